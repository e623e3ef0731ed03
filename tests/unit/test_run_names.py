"""What RUN means, and where runs are found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.jobs import Cli

import cloudtrain
from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.errors import RunNotFoundError
from cloudtrain.runs.known_runs import known_runs, record_run, recorded_homes
from cloudtrain.runs.status import State
from cloudtrain.support.run_id import make_run_id

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes an ended local run of a job and returns its id."""

    def make(name: str, hours: int, suffix: str, home: Path = tmp_path / "runs-home") -> str:
        run = make_run_id(name, NOW - timedelta(hours=hours), suffix)
        folder = home / "runs" / run
        folder.mkdir(parents=True)
        write_state(folder, RecordedState(State.SUCCEEDED, started=NOW, ended=NOW))
        return run

    return make


def found(name: str) -> str:
    return cloudtrain.get_run(name).reference


def test_a_name_is_the_newest_run_of_its_job(write: Write) -> None:
    newest, _ = write("digits", 1, "1a2b3c"), write("digits", 2, "2a2b3c")
    other = write("digits-large", 0, "3a2b3c")
    assert found("digits") == found("local:digits") == f"local:{newest}"
    assert found("latest") == found("local:latest") == f"local:{other}"


def test_a_unique_beginning_or_end_is_a_run(write: Write) -> None:
    first, second = write("digits", 1, "1a2b3c"), write("mnist", 2, "2a2b3d")
    assert found("1a2b3c") == found("dig") == found(first[3:]) == f"local:{first}"
    assert found("-2a2b3d") == found("mni") == f"local:{second}"


def test_an_ambiguous_name_lists_the_newest_first(write: Write, cli: Cli) -> None:
    older, newer = write("digits", 2, "2a2b3c"), write("digital", 1, "1a2b3c")
    done = cli("status", "dig")
    assert done.code == 2
    assert [line.strip() for line in done.err.splitlines()[1:3]] == [
        f"local:{newer}",
        f"local:{older}",
    ]


def test_an_unknown_name_names_the_nearest(write: Write, cli: Cli) -> None:
    write("digits", 1, "1a2b3c")
    done = cli("logs", "digts")
    assert (done.code, 'did you mean "digits"?' in done.err) == (2, True)


def test_there_may_be_no_latest_run() -> None:
    with pytest.raises(RunNotFoundError, match="there is no local run yet"):
        found("latest")


def test_latest_is_no_evaluation(write: Write, tmp_path: Path) -> None:
    evaluation = write("digits-evaluation", 0, "1a2b3c")
    plan = tmp_path / "runs-home" / "runs" / evaluation / "plan.json"
    plan.write_text(
        json.dumps({"run": evaluation, "config": {"evaluation": {"run": "local:digits"}}})
    )
    with pytest.raises(RunNotFoundError, match="there are only evaluations in local"):
        found("latest")
    trained = write("digits", 2, "2a2b3c")
    assert (found("latest"), found("digits-evaluation")) == (
        f"local:{trained}",
        f"local:{evaluation}",
    )
    named = write("my-evaluation", 1, "3a2b3c")
    path = tmp_path / "runs-home" / "runs" / named / "plan.json"
    path.write_text(json.dumps({"run": named, "config": {"evaluation": None}}))
    assert found("latest") == f"local:{named}", "a training may have such a name"


def test_a_status_is_accepted_where_a_run_is(write: Write) -> None:
    run = write("digits", 1, "1a2b3c")
    (status,) = cloudtrain.list_runs()
    assert cloudtrain.get_run(status).id == cloudtrain.status(status).run == run


def test_runs_of_other_folders_are_found(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDTRAIN_HOME")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    homes = [tmp_path / name / ".cloudtrain" for name in ("first", "second", "gone")]
    runs = [
        write(name, hours, "1a2b3c", home)
        for name, hours, home in zip("ab", (1, 2), homes[:2], strict=True)
    ]
    for home in homes:
        record_run(os.environ, f"local:{runs[0]}", home)
    assert recorded_homes(os.environ) == [homes[1], homes[0]]
    assert [status.run for status in cloudtrain.list_runs()] == runs
    assert cloudtrain.get_run("b").id == cloudtrain.get_run(runs[1]).id == runs[1]
    assert not (here / ".cloudtrain").exists()
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(homes[0]))
    assert [status.run for status in cloudtrain.list_runs()] == runs[:1]


def test_recorded_runs_of_an_account_have_names(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found without a call; `latest` is always local."""
    local, remote = write("digits", 1, "1a2b3c"), make_run_id("digits", NOW, "2a2b3c")
    record_run(os.environ, f"sagemaker:{remote}", tmp_path)
    with (tmp_path / "home" / ".config" / "cloudtrain" / "runs.jsonl").open("a") as file:
        file.write("damaged\n[]\n{}\n")
    assert known_runs(os.environ, [tmp_path / "runs-home"]) == [
        f"sagemaker:{remote}",
        f"local:{local}",
    ]
    monkeypatch.setenv("CLOUDTRAIN_REGION", "us-west-2")
    assert found("digits") == f"sagemaker:{remote}"
    assert found("latest") == f"local:{local}"


def test_the_job_is_job_yaml_by_default(cli: Cli, job: Callable[..., Path]) -> None:
    text = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large}\n"
    folder = job(text, train_py="").parent
    assert cli("validate", cwd=folder).out == "job.yaml: demo is valid\n"
    assert "job.yaml: no such file" in cli("plan", cwd=folder.parent).err
