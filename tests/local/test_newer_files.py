"""Files of a newer cloudtrain: each kind is refused with its version, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli
from written_by.versions import Written, recorded_versions

from cloudtrain.client.receipts import read_receipt
from cloudtrain_runtime.contract.manifest import Manifest
from cloudtrain_runtime.contract.run_config import RunConfig
from cloudtrain_runtime.contract.serving_config import SERVING_FILE, ServingConfig

NEWER = 99
WORDS = "has version 99, which a newer cloudtrain wrote; this one reads version"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written.unpack(recorded_versions()[-1], tmp_path_factory.mktemp("written"))


@pytest.fixture
def written(unpacked: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    found = unpacked.copy(tmp_path / "copy")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(found.home))
    monkeypatch.chdir(found.project)
    return found


def raise_version(path: Path, **changes: Any) -> str:
    """Give a file a newer version, and a field that only that one has; return its text."""
    content = {**json.loads(path.read_text()), "version": NEWER, "new": [1], **changes}
    path.write_text(json.dumps(content))
    return path.read_text()


@pytest.mark.parametrize("command", ["status", "follow", "stop"])
def test_the_state_of_a_newer_run_is_refused(cli: Cli, written: Written, command: str) -> None:
    raise_version(written.folder("succeeded") / "state.json", state="HIBERNATING")
    done = cli(command, written.run("succeeded"), "--json")
    assert f"state.json {WORDS} 1: pip install -U cloudtrain" in done.err + done.out


def test_newer_runs_do_not_hide_the_others(cli: Cli, written: Written) -> None:
    raise_version(written.folder("succeeded") / "state.json", state="HIBERNATING")
    runs = {each["run"]: each for each in cli("list", "--local", "--json").json["runs"]}
    assert runs[written.run("failed")]["state"] == "FAILED"
    assert runs[written.run("succeeded")]["state"] == "UNKNOWN"
    assert WORDS in runs[written.run("succeeded")]["reason"]


def test_a_newer_plan_is_not_resumed(cli: Cli, written: Written) -> None:
    raise_version(written.folder("succeeded") / "plan.json")
    done = cli("resume", written.run("succeeded"), "--json")
    assert done.code == 2
    assert f"plan.json {WORDS} 1: pip install -U cloudtrain" in done.json["error"]["message"]


@pytest.mark.parametrize("command", [("status",), ("best",), ("stop",), ("show", "0")])
def test_a_newer_sweep_is_refused(cli: Cli, written: Written, command: tuple[str, ...]) -> None:
    sweep = written.expected["sweeps"]["finished"]
    raise_version(written.home / "sweeps" / sweep / "sweep.json", spec={"new": True})
    arguments = [command[0], sweep, *command[1:]]
    done = cli("sweep", *arguments, "--json")
    assert done.code == 2, done.out
    assert f"sweep.json {WORDS} 1: pip install -U cloudtrain" in done.json["error"]["message"]


def test_a_newer_receipt_names_its_writer(cli: Cli, written: Written) -> None:
    path = written.project / "rehearsal.json"
    raise_version(path, cloudtrain="9.9.0", checks=[])
    with pytest.raises(ValueError, match=r"version 99, which cloudtrain 9\.9\.0 wrote; this one"):
        read_receipt(path)
    warnings = cli("plan", "job.yaml", "--json").json["warnings"]
    assert any("which cloudtrain 9.9.0 wrote" in each for each in warnings), warnings


@pytest.mark.parametrize(
    ("parse", "name"),
    [
        (RunConfig.from_json, "config/run.json"),
        (Manifest.from_json, "checkpoints/step-00000006/manifest.json"),
    ],
    ids=["run", "manifest"],
)
def test_newer_files_of_a_run_are_refused(
    written: Written, parse: Callable[[str], Any], name: str
) -> None:
    text = raise_version(written.folder("succeeded") / name)
    with pytest.raises(ValueError, match=f"{Path(name).name} {WORDS}"):
        parse(text)


def test_a_newer_package_is_not_served(written: Written) -> None:
    text = raise_version(written.project / SERVING_FILE)
    with pytest.raises(ValueError, match=f"{SERVING_FILE} {WORDS} 1"):
        ServingConfig.from_json(text)


def test_a_newer_checkpoint_is_listed_as_such(cli: Cli, written: Written) -> None:
    raise_version(written.folder("succeeded") / "checkpoints" / "step-00000006" / "manifest.json")
    listed = cli("checkpoints", written.run("succeeded"), "--json").json["checkpoints"]
    by_step = {each["step"]: each for each in listed}
    assert by_step[4]["state"] == "complete"
    assert by_step[6]["state"] == "unreadable"
    assert f"manifest.json {WORDS} 2" in by_step[6]["why"]


@pytest.mark.processes
def test_training_does_not_go_back_behind_one(cli: Cli, written: Written) -> None:
    """The older checkpoint is complete; to continue from it would lose steps without a word."""
    raise_version(written.folder("succeeded") / "checkpoints" / "step-00000006" / "manifest.json")
    resume = f"checkpoint.resume={written.run('succeeded')}"
    done = cli("submit", "job.yaml", "--local", "--set", resume, "--follow", "--json")
    assert done.code == 4, done.out
    log = cli("logs", done.json["run"]).out
    assert WORDS in log
    assert not list((written.home / "runs" / done.json["run"]).glob("checkpoints/step-*"))
