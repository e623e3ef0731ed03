"""`cloudtrain checkpoints` and `resume --from`, with local runs and with folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import RUN, flip, save_bytes
from support.jobs import Cli

pytestmark = pytest.mark.processes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "saved"
    for step in (100, 200):
        save_bytes(root, step)
    (save_bytes(root, 300) / "manifest.json").unlink()
    return root


@pytest.mark.promise
def test_a_folder_is_listed(cli: Cli, folder: Path) -> None:
    entries = cli("checkpoints", folder, "--json").json["checkpoints"]
    assert [(entry["step"], entry["state"]) for entry in entries] == [
        (300, "unfinished"),
        (200, "complete"),
        (100, "complete"),
    ]
    assert set(entries[0]) == {
        *("step", "name", "uri", "state", "why", "bytes", "files"),
        *("time", "age_seconds", "world_size", "torch", "run", "best"),
    }
    assert entries[1]["age_seconds"] > 0
    for form in (("checkpoints", folder), ("checkpoints", "list", folder)):
        out = cli(*form).out
        assert "200" in out
        assert "it was never finished" in out
        assert RUN in out
    assert cli("checkpoints", "--json", folder).json["checkpoints"][1]["step"] == 200
    none = cli("checkpoints", folder / "nowhere")
    assert "no checkpoints at" in none.out
    assert "cloudtrain_runtime.checkpoint" in none.err
    assert "code.outputs" in none.err


def test_a_verification_ends_with_4_when_something_is_damaged(cli: Cli, folder: Path) -> None:
    intact = cli("checkpoints", "verify", folder)
    assert intact.code == 0, intact.err
    assert "step-00000200  verified" in intact.out
    flip(folder / "step-00000100" / "__0_0.distcp", 5)
    done = cli("checkpoints", "verify", folder, "--json")
    assert done.code == 4
    states = {entry["step"]: entry for entry in done.json["checkpoints"]}
    assert states[100]["state"] == "damaged"
    assert "__0_0.distcp" in states[100]["why"]
    assert cli("checkpoints", "verify", folder, "--step", "200").code == 0
    text = cli("checkpoints", "verify", folder)
    assert "step-00000100  damaged: __0_0.distcp" in text.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["verify", "FOLDER", "--step", "150"], "the nearest complete: 100 and 200"),
        (["export", "FOLDER", "--to", "torch", "--step", "300"], "step-00000300 is unfinished"),
        (["export", "FOLDER", "--to", "gguf"], "'gguf' is not one of"),
        (["export", "FOLDER"], "Missing option '--to'"),
        (["export", "FOLDER", "--to", "torch", "-o", "FOLDER"], "exists already"),
        (["verify", "FOLDER/empty"], "there is no complete checkpoint"),
        (["digits"], "there is no run 'digits'"),
        ([RUN], "there is no local run"),
        ([], "there is no local run yet"),
    ],
)
def test_a_users_mistake(cli: Cli, folder: Path, arguments: list[str], expected: str) -> None:
    done = cli("checkpoints", *(word.replace("FOLDER", str(folder)) for word in arguments))
    assert done.code == 2
    assert expected in done.err + done.out
    assert "Traceback" not in done.err


def test_a_run_that_saved_nothing_says_what_to_do(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(SCRIPT_JOB, train_py="raise SystemExit(1)\n")
    run = cli("submit", path, "--local", "--follow", "--json").json["run"]
    listed = cli("checkpoints", run)
    assert "file:" not in listed.out
    refused = cli("resume", run)
    assert refused.code == 2
    assert f"there is no complete checkpoint of {run} at " in refused.err
    assert "code.outputs" in refused.err
    assert "to start anew: cloudtrain submit" in refused.err
    assert "file:" not in refused.err
    assert "list the checkpoints" not in refused.err


def test_modules_in_the_working_folder_are_not_imported(cli: Cli, folder: Path) -> None:
    (folder / "json.py").write_text("raise SystemExit('imported')")
    assert cli("checkpoints", ".", cwd=folder).code == 0
    assert cli("checkpoints", "./", "--json", cwd=folder).json["checkpoints"][0]["step"] == 300


@pytest.fixture
def ended(cli: Cli, small: Callable[..., Path]) -> Mapping[str, Any]:
    """A local run that has saved several checkpoints."""
    path = small()
    settings = ("--set", "checkpoint.keep=20", "--set", "cluster.processes_per_instance=2")
    done = cli("submit", path, "--local", *settings, "--follow", "--json")
    assert done.code == 0, done.err
    return {"run": done.json["run"], "job": path, "last": done.json["last_step"]}


def test_a_run_is_listed_verified_exported_and_resumed(
    cli: Cli, ended: Mapping[str, Any], tmp_path: Path
) -> None:
    run = ended["run"]
    entries = cli("checkpoints", run, "--json").json["checkpoints"]
    steps = [entry["step"] for entry in entries if entry["state"] == "complete"]
    assert steps == sorted(steps, reverse=True)
    assert len(steps) >= 4
    assert {entry["run"] for entry in entries} == {run}
    assert cli("checkpoints", "verify", run).code == 0

    exported = cli("checkpoints", "export", run, "--to", "torch", "--json", cwd=tmp_path)
    assert exported.code == 0, exported.err
    assert exported.json["path"] == f"{run}-{entries[0]['name']}.pt"
    state = torch.load(tmp_path / exported.json["path"], weights_only=True)
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "weight": (1, 3),
        "bias": (1,),
    }
    again = cli("checkpoints", "export", run, "--to", "torch", cwd=tmp_path)
    assert again.code == 2
    assert "exists already" in again.err
    one = str(tmp_path / "one.safetensors")
    assert (
        cli(
            "checkpoints",
            "export",
            f"local:{run}",
            "--to",
            "safetensors",
            "--step",
            steps[-1],
            "-o",
            one,
        ).code
        == 0
    )
    assert Path(one).stat().st_size > 16

    middle = steps[2]
    trained = cli("resume", run)
    assert trained.code == 2
    last = f"step {ended['last']} of run {run} is the last step"
    assert f"{run} has succeeded, and nothing is left to train: {last}" in trained.err
    assert f"cloudtrain resume {run} --set train.epochs=N" in trained.err
    wrong = cli("resume", run, "--from", str(middle + 1))
    assert wrong.code == 2
    assert f"the nearest complete: {middle} and {steps[1]}" in wrong.err
    twice = cli("resume", run, "--from", str(middle), "--set", "checkpoint.resume=never")
    assert twice.code == 2
    assert "name two checkpoints" in twice.err
    resumed = cli("resume", run, "--from", str(middle), "--follow", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["first_step"] == middle
    assert resumed.json["last_step"] == ended["last"]


def test_a_run_is_found_by_its_id_where_it_has_saved(
    cli: Cli, small: Callable[..., Path], tmp_path: Path
) -> None:
    path = small()
    own = tmp_path / "own folder"
    done = cli("submit", path, "--local", "--set", f"checkpoint.uri={own}", "--follow", "--json")
    assert done.code == 0, done.err
    run = done.json["run"]
    newest = cli("checkpoints", run, "--json").json["checkpoints"][0]
    assert newest["uri"].startswith(own.as_uri())
    resume = (
        "submit",
        path,
        "--local",
        "--set",
        "train.epochs=4",
        "--set",
        f"checkpoint.resume={run}",
    )
    rest = cli(*resume, "--follow", "--json")
    assert rest.code == 0, rest.err
    assert rest.json["first_step"] == newest["step"]
    for each in own.iterdir():
        (each / "manifest.json").unlink()
    for refused in (cli(*resume), cli("resume", run)):
        assert refused.code == 2
        assert f"there is no complete checkpoint of {run}" in refused.err
        assert "start anew" in refused.err
    one = cli("submit", path, "--local", "--set", f"checkpoint.resume={own}/step-00000002")
    assert one.code == 2
    assert "there is no complete checkpoint of step 2" in one.err


SCRIPT_JOB = """\
name: script
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}
checkpoint: {every: 2 steps, keep: 20}
"""
SCRIPT = """
import torch
from cloudtrain_runtime import checkpoint

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
start = checkpoint.load(model=model, optimizer=optimizer)
for step in range(start.step + 1, 9):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(step, model=model, optimizer=optimizer)
"""


@pytest.mark.promise
def test_resumed_script_loads_old_checkpoints_and_saves_its_own(
    cli: Cli, job: Callable[..., Path]
) -> None:
    path = job(SCRIPT_JOB, train_py=SCRIPT)
    first = cli("submit", path, "--local", "--follow", "--json")
    assert first.code == 0, first.err

    def listed(run: str) -> dict[int, str]:
        found = cli("checkpoints", run, "--json").json["checkpoints"]
        return {entry["step"]: entry["uri"] for entry in found if entry["state"] == "complete"}

    before = listed(first.json["run"])
    assert {4, 8} <= set(before)
    second = cli("resume", first.json["run"], "--from", "4", "--follow", "--json")
    assert second.code == 0, second.err
    assert "checkpoint.every" not in second.err
    after = listed(second.json["run"])
    assert set(after) <= {6, 8}
    assert 8 in after
    assert not set(after.values()) & set(before.values())
    assert listed(first.json["run"]) == before
