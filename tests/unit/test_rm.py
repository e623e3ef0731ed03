"""Deletion of local runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.jobs import Cli, Terminal, command, until

from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.client.client import Client
from cloudtrain.client.removal import delete_folder, folder_bytes, select_older
from cloudtrain.features.sweeps.loader import make_sweep
from cloudtrain.features.sweeps.service import find_best_trials
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.features.sweeps.study import Study
from cloudtrain.features.sweeps.trial import TrialState
from cloudtrain.job.spec import JobSpec
from cloudtrain.runs.known_runs import record_run
from cloudtrain.runs.main_metric import is_higher_better, main_metric
from cloudtrain.runs.status import State
from cloudtrain.support.run_id import make_run_id

NOW = datetime(2024, 11, 20, 12, 0, tzinfo=UTC)
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes an ended local run and returns its folder."""

    def make(
        name: str,
        suffix: str,
        *,
        age: int = 0,
        resume: str = "auto",
        uri: str = "",
        **metrics: float,
    ) -> Path:
        moment = NOW - timedelta(days=age)
        run = make_run_id(name, moment, suffix)
        folder = tmp_path / "runs-home" / "runs" / run
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "weights").write_bytes(b"x" * 1000)
        write_state(folder, RecordedState(State.SUCCEEDED, started=moment, ended=moment))
        saved = {"uri": uri or (folder / "checkpoints").as_uri()}
        plan = {
            "run": run,
            "checkpoint": saved,
            "config": {"checkpoint": {**saved, "resume": resume}},
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        event = {
            "event": "evaluation",
            "split": "validation",
            "step": 1,
            "samples": 1,
            "time": 1.0,
            **metrics,
        }
        (folder / "events.jsonl").write_text(json.dumps(event) + "\n" if metrics else "")
        return folder

    return make


def left(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.parent.iterdir())


def test_named_runs_are_deleted_with_yes(write: Write, cli: Cli) -> None:
    first, second, third = (
        write("digits", "1a2b3c"),
        write("digits", "2a2b3c", age=1),
        write("mnist", "3a2b3c"),
    )
    done = cli("rm", first.name, "mnist", "--yes")
    assert (done.code, left(second)) == (0, [second.name])
    assert f"local:{first.name}  SUCCEEDED" in done.out
    assert done.err.startswith("deleted 2 runs, ")
    write("mnist", "3a2b3c")
    size = folder_bytes(third)
    assert size > 1000
    assert cli("rm", "mnist", "--yes", "--json").json == {
        "removed": [{"run": f"local:{third.name}", "bytes": size}],
        "kept": [],
    }


def test_nothing_is_deleted_without_consent(write: Write, cli: Cli) -> None:
    folder = write("digits", "1a2b3c")
    done = cli("rm", "digits")
    assert (done.code, folder.is_dir()) == (2, True)
    assert "--yes" in done.err
    assert folder.name in done.out


def test_a_terminal_is_asked(write: Write) -> None:
    folder = write("digits", "1a2b3c")
    for answer, is_left in ((b"n\n", True), (b"y\n", False)):
        terminal = Terminal([str(command()), "rm", "digits"], dict(os.environ))
        until(lambda shown=terminal: shown.shows("[y/N]"))
        terminal.press(answer)
        assert (terminal.end(), folder.exists()) == (0, is_left)
        assert ("nothing was deleted" in terminal.text, "error" in terminal.text) == (
            is_left,
            False,
        )


def test_wrong_arguments_are_refused(cli: Cli) -> None:
    for arguments in (
        [],
        ["x", "--older-than", "30d"],
        ["x", "--keep-best"],
        ["--older-than", "30"],
    ):
        done = cli("rm", *arguments)
        assert (done.code, "30d" in done.err or "unit" in done.err) == (2, True)


def test_active_and_remote_runs_are_refused(write: Write, cli: Cli, tmp_path: Path) -> None:
    active, other = write("digits", "1a2b3c"), write("mnist", "2a2b3c")
    write_state(active, RecordedState(State.RUNNING, supervisor=os.getpid()))
    remote = make_run_id("far", NOW, "3a2b3c")
    record_run(os.environ, f"sagemaker:{remote}", tmp_path)
    with (active / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cli("rm", "mnist", "digits", "--yes")
        assert cli("rm", "--older-than", "1s", "--yes").code == 0
    assert (done.code, f"cloudtrain stop local:{active.name}" in done.err) == (2, True)
    assert left(active) == [active.name]
    assert not other.exists()
    refused = cli("rm", "far", "--yes", environ={"CLOUDTRAIN_REGION": "us-west-2"})
    assert (refused.code, "nothing is deleted" in refused.err) == (2, True)


@pytest.mark.parametrize("form", ["resume", "step", "uri", "run"])
def test_checkpoints_of_another_run_are_kept(form: str, write: Write, cli: Cli) -> None:
    used = write("digits", "1a2b3c", age=50)
    place = (used / "checkpoints").as_uri()
    named = {
        "resume": {"resume": place},
        "step": {"resume": f"{place}/step-00000001"},
        "uri": {"uri": place},
    }
    user = write("digits", "2a2b3c", age=1, **named.get(form, {"resume": used.name}))
    done = cli("rm", used.name, "--yes")
    assert (done.code, used.is_dir(), user.name in done.err) == (2, True, True)
    found = select_older(Client(), NOW - timedelta(days=30), keep_best=False)
    assert (found.runs, list(found.kept)) == ((), [used.name])
    assert cli("rm", used.name, user.name, "--yes").code == 0
    assert not used.exists()


def test_a_chain_of_resumed_runs_is_kept(write: Write) -> None:
    first = write("digits", "1a2b3c", age=60)
    second = write("digits", "2a2b3c", age=50, resume=(first / "checkpoints").as_uri())
    write("digits", "3a2b3c", age=1, resume=(second / "checkpoints").as_uri())
    alone = write("digits", "4a2b3c", age=40)
    found = select_older(Client(), NOW - timedelta(days=30), keep_best=False)
    assert [status.run for status in found.runs] == [alone.name]
    assert sorted(found.kept) == sorted([first.name, second.name])


def test_the_best_run_of_each_job_is_kept(write: Write) -> None:
    write("digits", "1a2b3c", age=40, loss=0.3, accuracy=0.9)
    best = write("digits", "2a2b3c", age=41, loss=0.2, accuracy=0.8)
    write("digits", "3a2b3c", age=42)
    accurate = write("mnist", "4a2b3c", age=43, accuracy=0.9)
    write("mnist", "5a2b3c", age=44, accuracy=0.5)
    write("news", "6a2b3c", age=45, loss=2.0)
    write("news", "7a2b3c", age=1, loss=1.0)
    found = select_older(Client(), NOW - timedelta(days=30), keep_best=True)
    assert found.kept == {
        best.name: "best validation/loss of digits: 0.2",
        accurate.name: "best validation/accuracy of mnist: 0.9",
    }
    assert {status.run[-6:] for status in found.runs} == {"1a2b3c", "3a2b3c", "5a2b3c", "6a2b3c"}


def test_the_best_run_by_the_rule_of_the_job_is_kept(write: Write) -> None:
    """The best value counts, and the mode that the job names, also for a name without a direction."""

    def ended(name: str, suffix: str, train: dict[str, object], values: list[float]) -> Path:
        folder = write(name, suffix, age=40, score=values[-1], loss=values[-1])
        plan = json.loads((folder / "plan.json").read_text())
        plan["config"]["train"] = train
        (folder / "plan.json").write_text(json.dumps(plan))
        (folder / "logs").mkdir()
        events = [
            {
                "event": "evaluation",
                "split": "validation",
                "step": step,
                "samples": 1,
                "score": value,
                "loss": value,
            }
            for step, value in enumerate(values)
        ]
        lines = [f"CLOUDTRAIN {json.dumps(event)}\n" for event in events]
        (folder / "logs" / "algo-1.log").write_text("".join(lines))
        return folder

    rule = {
        "early_stopping": {
            "metric": "validation/score",
            "patience": 2,
            "min_delta": 0.0,
            "mode": "max",
        }
    }
    ended("digits", "1a2b3c", rule, [0.1, 0.5, 0.5])
    best = ended("digits", "2a2b3c", rule, [0.9, 0.2, 0.1])
    exported = ended("mnist", "3a2b3c", {"export": "best"}, [0.1, 0.9])
    ended("mnist", "4a2b3c", {"export": "best"}, [0.9, 0.3])
    ended("news", "5a2b3c", {"export": "last"}, [0.1, 0.9])
    last = ended("news", "6a2b3c", {"export": "last"}, [0.9, 0.3])
    found = select_older(Client(), NOW - timedelta(days=30), keep_best=True)
    assert found.kept == {
        best.name: "best validation/score of digits: 0.9",
        exported.name: "best validation/loss of mnist: 0.1",
        last.name: "best validation/loss of news: 0.3",
    }


def test_the_best_trial_by_the_sweeps_objective_is_kept(write: Write, tmp_path: Path) -> None:
    """The sweep looks for a small score; the runs of the job beside it are compared by their loss."""
    pytest.importorskip("optuna")
    (tmp_path / "train.py").write_text("")
    job = JobSpec.model_validate(
        {
            "name": "digits",
            "code": {"script": "train.py", "directory": str(tmp_path)},
            "cluster": {"instance_type": "ml.m5.large"},
        }
    )
    fields = {
        "space": {"code.args.x": {"int": [1, 9]}},
        "objective": {"metric": "validation/score", "goal": "min"},
        "strategy": "grid",
    }
    stored = StoredSweep.create(
        tmp_path / "runs-home", make_sweep(job, fields), "local", ("a" * 64, 0.0, 2)
    )
    scores = {"1a2b3c": (0.9, 0.1), "2a2b3c": (0.2, 0.5)}
    with contextlib.closing(Study(stored)) as study:
        for number, (suffix, (score, loss)) in enumerate(scores.items()):
            folder = write("digits", suffix, age=40, score=score, loss=loss)
            plan = json.loads((folder / "plan.json").read_text())
            plan["job"] = {"tags": {"sweep": stored.id, "trial": str(number)}}
            (folder / "plan.json").write_text(json.dumps(plan))
            trial = study.propose()
            assert trial is not None
            study.save(trial.but(run=folder.name, state=TrialState.SUCCEEDED, objective=score))
    write("digits", "3a2b3c", age=41, loss=0.4)
    beside = write("digits", "4a2b3c", age=42, loss=0.3)
    found = select_older(
        Client(), NOW - timedelta(days=30), keep_best=True, best_trials=find_best_trials()
    )
    assert found.kept == {
        folder.name: f"best validation/score of the sweep {stored.id}: 0.2",
        beside.name: "best validation/loss of digits: 0.3",
    }
    assert {status.run[-6:] for status in found.runs} == {"1a2b3c", "3a2b3c"}


def test_links_are_not_followed(write: Write, cli: Cli, tmp_path: Path) -> None:
    folder, linked = write("digits", "1a2b3c"), write("mnist", "2a2b3c")
    (outside := tmp_path / "outside").mkdir()
    (outside / "data").write_bytes(b"x" * 9000)
    (folder / "link").symlink_to(outside)
    (folder / "checkpoints" / "link").symlink_to(outside)
    assert folder_bytes(folder) < 9000
    delete_folder(folder)
    assert (folder.exists(), (outside / "data").exists()) == (False, True)
    linked.rename(outside / "run")
    linked.symlink_to(outside / "run")
    done = cli("rm", "mnist", "--yes")
    assert (done.code, "is a link" in done.err, (outside / "run" / "plan.json").is_file()) == (
        2,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("metrics", "main"),
    [
        (
            ["train/loss", "test/accuracy", "validation/loss", "validation/accuracy"],
            "validation/loss",
        ),
        (["train/loss", "test/accuracy", "validation/accuracy"], "validation/accuracy"),
        (["train/loss", "validation/score", "train/accuracy"], "train/loss"),
        (["train/loss", "train/val_loss"], "train/val_loss"),
        (["train/loss", "test/base_loss", "test/loss"], "test/loss"),
        (["train/mfu"], None),
    ],
)
def test_the_main_metric(metrics: list[str], main: str | None) -> None:
    assert main_metric(metrics) == main
    assert is_higher_better(main or "") is (main == "validation/accuracy")
