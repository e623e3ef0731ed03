"""What each recorded version of cloudtrain has written is read, and continued, by this one.

`tests/written_by/<version>/` is what the version itself has written and printed; `written_by/record.py` made it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import Cli, Finished
from written_by.jobs import JOBS, document_of
from written_by.record import CPU
from written_by.versions import HOME_WORD, Written, differences, recorded_versions

import cloudtrain
from cloudtrain.client.receipts import read_receipt
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain_runtime.contract.run_config import RunConfig
from cloudtrain_runtime.contract.serving_config import SERVING_FILE, ServingConfig

HOME = re.compile(r"/\w[^\s\"]*/\.cloudtrain")
TEXTS = ("action", "message", "reason", "warnings", "alarms")
IGNORED = frozenset({"age_seconds", *TEXTS})
"""Keys whose values depend on the time of the call, or are texts, which no version promises to keep."""

LONGER = {
    "succeeded": ["train.steps=10"],
    "sharded": [
        "name=sharded",
        "train.steps=10",
        "cluster.processes_per_instance=2",
        "train.parallel.data=fsdp",
    ],
    "script": ["code.args.steps=10"],
}
"""What the recorded runs have changed when they were resumed."""


@pytest.fixture(scope="module", params=recorded_versions())
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written.unpack(request.param, tmp_path_factory.mktemp("written"))


@pytest.fixture
def written(unpacked: Written, monkeypatch: pytest.MonkeyPatch) -> Written:
    """What the version has written, which the test only reads."""
    use(unpacked, monkeypatch)
    return unpacked


@pytest.fixture
def changed(unpacked: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """A copy for a test that starts runs."""
    copy = unpacked.copy(tmp_path / "copy")
    use(copy, monkeypatch)
    return copy


def use(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(written.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(written.config))
    monkeypatch.chdir(written.project)


def test_commands_print_what_they_have_printed(cli: Cli, written: Written) -> None:
    found = list(_changed_output(cli, written))
    assert found == [], "\n".join(found)


def _changed_output(cli: Cli, written: Written) -> Iterator[str]:
    for words, before in written.expected["output"].items():
        done = cli(*words.split(), "--json")
        if not done.out:
            yield f"{words}: {done.err}"
            continue
        # The lines of a log still have the path of the first home.
        now = json.loads(HOME.sub(HOME_WORD, done.out))
        for each in differences(before, now, IGNORED):
            yield f"{words}: {each}"


def test_settings_have_the_same_values(cli: Cli, written: Written) -> None:
    shown = {
        "profile": cli("configure", "--show", "--json"),
        "team": cli("configure", "--show", "--profile", "team", "--json"),
        "beside": cli("configure", "--show", "--job", "beside/job.yaml", "--json"),
    }
    ignored = frozenset({"source", "file", "action"})
    for name, done in shown.items():
        assert list(differences(written.expected["settings"][name], done.json, ignored)) == [], name


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_means_the_same(written: Written, name: str) -> None:
    if name not in written.expected["jobs"]:
        pytest.skip("the version had no such job")
    now = document_of(written.project / "jobs" / f"{name}.yaml")
    assert list(differences(written.expected["jobs"][name], now, frozenset())) == []


def test_files_with_a_version_are_read(written: Written) -> None:
    receipt = read_receipt(written.project / "rehearsal.json")
    assert receipt is not None
    before = written.expected["receipt"]
    assert list(differences(before, receipt.to_json(), frozenset())) == []
    stored = list((written.home / "rehearsals").glob("*/rehearsal.json"))
    assert [read_receipt(path) for path in stored] == [receipt]
    serving = (written.project / SERVING_FILE).read_text()
    assert ServingConfig.from_json(serving).args == {"width": 4}
    for run in written.expected["runs"]:
        config = RunConfig.from_json((written.folder(run) / "config" / "run.json").read_text())
        assert config.run == written.run(run)


def test_plans_can_be_planned_again(written: Written) -> None:
    for run in written.expected["runs"].values():
        content = json.loads((written.home / "runs" / run / "plan.json").read_text())
        previous = PreviousRun(content)
        assert (previous.run, previous.job().checkpoint.resume) == (run, run)


def test_python_reads_the_runs(written: Written) -> None:
    runs = {status.run: status.state for status in cloudtrain.list_runs(backend="local")}
    expected = {run: before["state"] for run, before in _states(written)}
    assert {run: str(runs[run]) for run in expected} == expected
    run = cloudtrain.get_run(written.run("succeeded-resumed"))
    before = written.expected["output"][f"status {run.id}"]
    assert run.metrics["validation/loss"] == before["metrics"]["validation/loss"]


def _states(written: Written) -> Iterator[tuple[str, Any]]:
    for run in written.expected["runs"].values():
        yield run, written.expected["output"][f"status {run}"]


def test_results_can_be_taken_away(cli: Cli, written: Written, tmp_path: Path) -> None:
    done = cli("download", written.run("sharded"), "--to", tmp_path / "all", "--json")
    assert done.code == 0, done.err
    model = next((tmp_path / "all").rglob("model.tar.gz"))
    assert model.stat().st_size > 0
    options = ("--to", "torch", "-o", tmp_path / "weights.pt", "--json")
    done = cli("checkpoints", "export", written.run("sharded"), *options)
    assert done.code == 0, done.err
    exported = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert_equal_weights(exported, weights_of(written.folder("sharded")))


def test_the_page_of_runs_is_written(cli: Cli, written: Written, tmp_path: Path) -> None:
    runs = list(written.expected["runs"].values())
    done = cli("report", *runs, "-o", tmp_path / "report.html", "--json")
    assert done.code == 0, done.err
    text = (tmp_path / "report.html").read_text()
    assert all(run in text for run in runs)


@pytest.mark.processes
@pytest.mark.promise
def test_an_old_run_is_resumed(cli: Cli, changed: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime of the old version, in the uploaded code, reads the run.json that this one writes."""
    use_recorded_cpu(monkeypatch)
    words = ("resume", changed.run("succeeded"), "--set", "train.steps=10")
    assert_continued(changed, cli(*words, "--follow", "--json"), "succeeded")


@pytest.mark.processes
@pytest.mark.parametrize("run", ["succeeded", "sharded", "script"])
def test_a_new_run_continues_from_an_old_one(
    cli: Cli, changed: Written, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """The runtime of this version reads the old checkpoint."""
    use_recorded_cpu(monkeypatch)
    changes = [f"checkpoint.resume={changed.run(run)}", *LONGER[run]]
    options = [word for change in changes for word in ("--set", change)]
    job = "loop.yaml" if run == "script" else "job.yaml"
    assert_continued(changed, cli("submit", job, "--local", *options, "--follow", "--json"), run)


def use_recorded_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", CPU)
    monkeypatch.setenv("CLOUDTRAIN_PASS_ENVIRONMENT", "PYTHONPATH,ATEN_CPU_CAPABILITY")


def assert_continued(written: Written, done: Finished, run: str) -> None:
    """The steps repeat those that the old version has trained: with the same PyTorch, to the last bit."""
    assert done.code == 0, done.err
    assert (done.json["state"], done.json["last_step"]) == ("SUCCEEDED", 10)
    now = weights_of(written.home / "runs" / done.json["run"])
    before = weights_of(written.folder(f"{run}-resumed"))
    start = weights_of(written.folder(run))
    assert any(not torch.equal(now[name], value) for name, value in start.items())
    is_exact = written.expected["torch"] == torch.__version__
    assert_equal_weights(now, before, is_exact=is_exact)


@pytest.mark.processes
def test_an_interrupted_sweep_continues(cli: Cli, changed: Written) -> None:
    sweep = changed.expected["sweeps"]["interrupted"]
    before = changed.expected["output"][f"sweep status {sweep}"]["trials"]
    done = cli("sweep", "run", "slow-sweep.yaml", "--local", "--follow", "--json")
    assert done.code == 0, done.err
    assert (done.json["sweep"], done.json["state"]) == (sweep, "SUCCEEDED")
    assert done.json["trials"][0]["run"] == before[0]["run"]
    assert [trial["state"] for trial in done.json["trials"]] == ["SUCCEEDED", "SUCCEEDED"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the exported weights of a run."""
    found: dict[str, torch.Tensor] = torch.load(folder / "model" / "model.pt", weights_only=True)
    return found


def assert_equal_weights(
    now: dict[str, torch.Tensor], before: dict[str, torch.Tensor], *, is_exact: bool = True
) -> None:
    assert now.keys() == before.keys()
    tolerance = 0.0 if is_exact else 1e-4
    for name, value in before.items():
        torch.testing.assert_close(now[name], value, rtol=tolerance, atol=tolerance)
