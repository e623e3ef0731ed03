"""Sweeps of local runs, with real controllers and real runs."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import Cli, until

import cloudtrain
from cloudtrain.controllers import pauses
from cloudtrain.features.sweeps import controller, service
from cloudtrain.features.sweeps.loader import load_sweep
from cloudtrain.features.sweeps.study import Study

pytest.importorskip("optuna")
pytestmark = pytest.mark.processes

CURVE = """
import argparse, time
parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--seconds", type=float, default=0.0)
given = parser.parse_args()
for step in range(1, given.steps + 1):
    print(f"step={step} loss={(given.x - 0.3) ** 2 + 1 / step:.6f}", flush=True)
    time.sleep(given.seconds)
"""
SWEEP = """\
name: curve
job:
  name: curve
  code: {command: [bash, -c, "python curve.py --x $$X --steps $$STEPS --seconds $$SECONDS_PER_STEP"], env: ENV}
  cluster: {instance_type: ml.m5.large}
  metrics: {loss: "loss=([0-9.]+)", step: "step=([0-9]+)"}
space: SPACE
objective: train/loss
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a sweep file beside its script."""

    def write_sweep(space: str, more: str, steps: int = 2, seconds: float = 0.0) -> Path:
        (tmp_path / "curve.py").write_text(CURVE)
        env = f'{{X: "0", STEPS: "{steps}", SECONDS_PER_STEP: "{seconds}"}}'
        file = tmp_path / "sweep.yaml"
        file.write_text(SWEEP.replace("SPACE", space).replace("ENV", env) + more)
        return file

    return write_sweep


def controllers_of(sweep: str) -> list[psutil.Process]:
    found = (
        each
        for each in psutil.process_iter(["cmdline"])
        if "cloudtrain.features.sweeps" in (each.info["cmdline"] or ())
    )
    return [each for each in found if each.info["cmdline"][-1].endswith(sweep)]


def kill_controller(sweep: str) -> None:
    (controller,) = controllers_of(sweep)
    os.kill(controller.pid, signal.SIGKILL)
    until(lambda: not controllers_of(sweep))


@pytest.mark.promise
def test_a_killed_controller_loses_and_doubles_no_trial(
    cli: Cli, write: Callable[..., Path], tmp_path: Path
) -> None:
    file = write(
        "{code.env.X: {uniform: [0, 1]}}", "trials: 20\nparallel: 2\nstrategy: bayesian\nseed: 3\n"
    )
    started = cli("sweep", file, "--local", "--json")
    assert started.code == 0, started.err
    sweep = cloudtrain.get_sweep(started.json["sweep"])
    for count in (5, 12):
        until(lambda count=count: sweep.log.read_text().count(" PLANNED ") >= count)
        kill_controller(sweep.id)
        assert sweep.status().state == "INTERRUPTED"
        assert cli("sweep", file, "--local", "--json").json["sweep"] == sweep.id
    done = cli("sweep", "follow", "latest", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert (found["state"], len(found["trials"])) == ("SUCCEEDED", 20)
    assert [trial["number"] for trial in found["trials"]] == list(range(20))
    assert {trial["state"] for trial in found["trials"]} == {"SUCCEEDED"}
    runs = cli("list", "--tag", f"sweep={sweep.id}", "--json").json["runs"]
    assert Counter(run["run"] for run in runs) == Counter(trial["run"] for trial in found["trials"])
    # The best trial's job gives the same score again.
    written = cli("sweep", "best", sweep.id, "--write", tmp_path / "best.yaml", "--json")
    assert written.json["objective"] == min(trial["objective"] for trial in found["trials"])
    assert "# searched: 0 to 1" in (tmp_path / "best.yaml").read_text()
    again = cli("submit", tmp_path / "best.yaml", "--local", "--follow", "--json").json
    assert again["metrics"]["train/loss"] == written.json["objective"]


def test_a_crash_at_any_record_doubles_no_trial(
    cli: Cli, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller ends before and after each record of each trial, once."""
    file = write("{code.env.X: {uniform: [0, 1]}}", "trials: 2\nstrategy: random\n")
    stored, _ = service.open_sweep(load_sweep(file), backend="local")
    crashed, record = set[tuple[str, int, str]](), Study.save

    def crash_once(when: str, trial: cloudtrain.sweeps.Trial) -> None:
        if (point := (when, trial.number, str(trial.state))) not in crashed:
            crashed.add(point)
            raise InterruptedError(point)

    def save(study: Study, trial: cloudtrain.sweeps.Trial) -> None:
        crash_once("before", trial)
        record(study, trial)
        crash_once("after", trial)

    monkeypatch.setattr(Study, "save", save)
    while service.read_status(stored).state == "INTERRUPTED":
        with contextlib.suppress(InterruptedError):
            service.control(stored)
    assert len(crashed) == 2 * 2 * 3  # PLANNED, RUNNING and SUCCEEDED
    status = service.read_status(stored)
    assert [str(trial.state) for trial in status.trials] == ["SUCCEEDED"] * 2
    runs = cli("list", "--tag", f"sweep={stored.id}", "--json").json["runs"]
    assert sorted(run["run"] for run in runs) == sorted(trial.run for trial in status.trials)


def test_trials_below_the_median_are_stopped(cli: Cli, write: Callable[..., Path]) -> None:
    space = "{code.env.X: {choice: ['0.3', '0.31', '0.32', '0.33', '0.34', '2.0']}}"
    file = write(space, "strategy: grid\npruning: median\n", steps=4, seconds=0.5)
    done = cli("sweep", file, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    *good, bad = done.json["trials"]
    assert {trial["state"] for trial in good} == {"SUCCEEDED"}
    assert bad["state"] == "PRUNED"
    assert bad["reason"].startswith("pruned at step ")
    assert done.json["best"]["values"] == {"code.env.X": "0.3"}


def test_a_stopped_sweep_stops_its_runs(cli: Cli, write: Callable[..., Path]) -> None:
    file = write(
        "{code.env.X: {uniform: [0, 1]}}", "trials: 3\nparallel: 2\nstrategy: random\n", 1000, 0.2
    )
    sweep = cli("sweep", file, "--local", "--json").json["sweep"]
    handle = cloudtrain.get_sweep(sweep)
    until(lambda: handle.status().count(cloudtrain.sweeps.TrialState.RUNNING) == 2)
    kill_controller(sweep)
    stopped = cli("sweep", "stop", sweep, "--json")
    assert stopped.code == 0, stopped.err
    assert stopped.json["state"] == "STOPPED"
    assert [trial["state"] for trial in stopped.json["trials"]] == ["STOPPED", "STOPPED"]
    assert not [run for run in cli("list", "--json").json["runs"] if run["state"] == "RUNNING"]


def test_a_sweep_whose_first_trials_fail_ends(
    cli: Cli, write: Callable[..., Path], tmp_path: Path
) -> None:
    file = write("{code.env.X: {uniform: [0, 1]}}", "trials: 10\nparallel: 3\nstrategy: random\n")
    (tmp_path / "curve.py").write_text("raise ValueError('broken on purpose')\n")
    done = cli("sweep", file, "--local", "--follow", "--json")
    assert done.code == 4, done.err
    assert done.json["state"] == "FAILED"
    # Two run at a time: the fourth may have failed before the third was seen.
    assert re.match(r"the first [34] trials failed: ", done.json["reason"])
    assert len(done.json["trials"]) < 10
    assert done.json["best"] is None
    assert cli("sweep", "best", "latest").code == 2
    assert cli("sweep", "show", "latest", "0", "--json").json["state"] == "FAILED"


def test_a_misspelt_metric_ends_a_sweep(cli: Cli, write: Callable[..., Path]) -> None:
    file = write("{code.env.X: {uniform: [0, 1]}}", "trials: 10\nparallel: 1\nstrategy: random\n")
    file.write_text(
        file.read_text().replace(
            "objective: train/loss", "objective: {metric: train/los, goal: min}"
        )
    )
    done = cli("sweep", file, "--local", "--follow", "--json")
    assert (done.code, done.json["state"], len(done.json["trials"])) == (4, "FAILED", 1), done.err
    assert done.json["reason"].startswith(
        "trial 0: the run reported no train/los; it reported train/loss"
    )
    assert done.json["reason"].endswith('did you mean "train/loss"?')


def test_promoted_trials_continue_exactly(
    cli: Cli, small: Callable[..., Path], tmp_path: Path
) -> None:
    job = small(double=True)
    job.write_text(job.read_text().replace("epochs: 3", "steps: 9"))
    sweep = cloudtrain.sweep(
        job,
        {"train.learning_rate": {"log_uniform": [1e-3, 1e-1]}},
        objective="test/loss",
        strategy="hyperband",
        rungs={"first": 3},
        trials=3,
        parallel=2,
        local=True,
    )
    status = sweep.wait()
    assert status.state is cloudtrain.sweeps.SweepState.SUCCEEDED, status
    best = sweep.best
    assert (best.length, len(best.earlier), sorted(best.rungs)) == (9, 1, ["3", "9"])
    tags = sweep.run_of(best).plan_document()["job"]["tags"]
    assert tags == {"sweep": sweep.id, "trial": str(best.number)}
    assert status.count(cloudtrain.sweeps.TrialState.PRUNED) == 2
    resumed = sweep.run_of(best).status().progress
    sweep.write_job(tmp_path / "best.yaml")
    straight = cli("submit", tmp_path / "best.yaml", "--local", "--follow", "--json").json
    assert straight["metrics"]["test/loss"] == resumed.metrics["test/loss"] == best.objective


def test_a_function_scores_runs(write: Callable[..., Path], tmp_path: Path) -> None:
    job = load_sweep(write("{code.env.X: {uniform: [0, 1]}}", "trials: 1\n")).job

    def distance(run: cloudtrain.Run) -> float:
        arguments: Any = json.loads(
            (Path(run.status().artifacts["folder"]) / "request.json").read_text()
        )
        return abs(float(arguments["Environment"]["X"]) - 0.5)

    space = {"code.env.X": {"choice": ["0.1", "0.5", "0.8"]}}
    sweep = cloudtrain.sweep(
        job, space, objective=distance, goal="min", strategy="grid", parallel=3, local=True
    )
    assert sweep.best.values == {"code.env.X": "0.5"}
    assert sweep.best_job().code.env["X"] == "0.5"
    assert "next" in sweep._repr_html_()
    assert "best trials" in repr(sweep.status())


REFUSED = """
import os, pathlib
print("loss=0.5", flush=True)
if not pathlib.Path(MARKER).exists():
    raise RuntimeError("An error occurred (AccessDenied) when calling the GetObject operation: Denied")
"""


def test_failures_by_an_outside_cause_are_repeated(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(controller, "_MOST_REPEATS", 2)
    file = write("{code.env.X: {uniform: [0, 1]}}", "trials: 2\nparallel: 2\nstrategy: random\n")
    marker = tmp_path.with_name(f"{tmp_path.name}-access")  # outside of the code
    (tmp_path / "curve.py").write_text(REFUSED.replace("MARKER", repr(str(marker))))
    stored, _ = service.open_sweep(load_sweep(file), backend="local")
    lines: list[str] = []
    service.control(stored, report=lines.append)
    assert any(line.startswith("paused: no access to S3: ") for line in lines)
    status = service.read_status(stored)
    assert status.state == "INTERRUPTED"
    assert "AccessDenied" in status.reason
    assert "to continue: cloudtrain sweep run FILE --local" in status.reason
    assert status.count(cloudtrain.sweeps.TrialState.FAILED) == 0
    assert status.best is None
    # Access is granted, and the same trials run.
    marker.touch()
    service.control(stored, report=lines.append)
    status = service.read_status(stored)
    assert (status.state, status.reason) == ("SUCCEEDED", "")
    assert [str(trial.state) for trial in status.trials] == ["SUCCEEDED"] * 2
    assert all(trial.attempt > 0 for trial in status.trials)


def test_a_full_disk_pauses_a_sweep(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "small"
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(home)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(home))
    try:
        file = write("{code.env.X: {choice: ['0.1', '0.5', '0.8']}}", "strategy: grid\n")
        stored, _ = service.open_sweep(load_sweep(file), backend="local")
        filler = home / "filler"
        lines: list[str] = []

        def report(line: str) -> None:
            lines.append(line)
            if line.startswith("trial 0 SUCCEEDED"):
                with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))
            if line.startswith("paused: the disk is full"):
                paused = service.read_status(stored)
                assert paused.reason.startswith("paused: the disk is full")
                filler.unlink()

        service.control(stored, report=report)
        assert sum(line.startswith("paused: the disk is full") for line in lines) == 1
        status = service.read_status(stored)
        assert (status.state, status.evaluated) == ("SUCCEEDED", 3)
    finally:
        subprocess.run(["umount", "--lazy", str(home)], check=True)


def test_the_best_of_a_part_says_so(
    cli: Cli, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("{code.env.X: {choice: ['0.1', '0.5']}}", "strategy: grid\n")
    stored, _ = service.open_sweep(load_sweep(file), backend="local")

    def leave(line: str) -> None:
        if line.startswith("trial 0 SUCCEEDED"):
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        service.control(stored, report=leave)
    shown = cli("sweep", "status", stored.id)
    assert "(best of 1 of 2 trials)" in shown.out
    assert cli("sweep", "status", stored.id, "--json").json["evaluated_trials"] == 1
    service.control(stored)
    assert "(best of" not in cli("sweep", "status", stored.id).out


def test_a_sweep_ends_with_the_last_combination(write: Callable[..., Path]) -> None:
    """Also one of an earlier version, which has planned more trials than there are combinations."""
    file = write("{code.env.X: {choice: ['0.1', '0.5']}}", "strategy: random\ntrials: 5\n")
    stored, planned = service.open_sweep(load_sweep(file), backend="local")
    assert planned is not None
    assert stored.planned_trials == planned.trials == 2
    service.control(dataclasses.replace(stored, planned_trials=5))
    status = service.read_status(stored)
    assert (status.state, status.reason, status.evaluated) == ("SUCCEEDED", "", 2)
    assert {trial.values["code.env.X"] for trial in status.trials} == {"0.1", "0.5"}


def test_an_edited_sweep_continues_with_its_first_code(
    cli: Cli, write: Callable[..., Path], tmp_path: Path
) -> None:
    """The controller dies after the first trial; then the user edits the script and a text file."""
    file = write("{code.env.X: {choice: ['0.1', '0.5', '0.8']}}", "strategy: grid\n")
    stored, _ = service.open_sweep(load_sweep(file), backend="local")

    def edit(line: str) -> None:
        if line.startswith("trial 0 SUCCEEDED"):
            (tmp_path / "README.md").write_text("one more idea\n")
        if line.startswith("trial 1 SUCCEEDED"):
            (tmp_path / "curve.py").write_text("raise SystemExit('edited')\n")
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        service.control(stored, report=edit)
    done = cli("sweep", file, "--local", "--follow", "--json")
    assert (done.code, done.json["sweep"], done.json["state"]) == (0, stored.id, "SUCCEEDED")
    assert f"note: {tmp_path} has changed since the sweep began" in done.err
    plans = [
        cloudtrain.get_run(trial["run"]).plan_document()["bundle"] for trial in done.json["trials"]
    ]
    assert [each["digest"] for each in plans] == [stored.digest] * 3
