"""Sweeps of an account, in the sandbox: a budget, and a controller that continues on another machine."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.jobs import Cli, until

import cloudtrain

pytest.importorskip("optuna")
pytestmark = [pytest.mark.processes, pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

SWEEP = """\
name: rate
job:
  name: rate
  code: {script: train.py, args: {rate: 0.1}}
  cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}
  metrics: {loss: "loss=([0-9.]+)"}
  limits: {runtime: 10m}
space: {code.args.rate: {uniform: [0, 1]}}
objective: train/loss
strategy: random
trials: 4
parallel: 3
limits: {cost: BUDGET USD}
"""
SCRIPT = """
import sys, time
print(f"loss={float(sys.argv[2]):.4f}", flush=True)
time.sleep(2)
"""


@pytest.fixture
def sweep_file(cli: Cli, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP.replace("BUDGET", "100"))
    high = cli("sweep", "plan", file, "--sandbox", "--region", "us-west-2", "--json").json[
        "trial_usd"
    ][1]
    file.write_text(SWEEP.replace("BUDGET", f"{2.5 * high:.2f}"))  # two trials at the same time
    yield file
    cli("sandbox", "--stop")


def test_a_sweep_continues_elsewhere_within_its_budget(
    cli: Cli, sweep_file: Path, tmp_path: Path
) -> None:
    started = cli("sweep", sweep_file, "--sandbox", "--json")
    assert started.code == 0, started.err
    assert "limits.cost pays for 2 of 3 trials at the same time" in started.err
    name, budget = started.json["sweep"], started.json["budget_usd"]
    sweep = cloudtrain.get_sweep(name)

    def check_budget() -> int:
        status = sweep.status().to_json()
        assert status["spent_usd"] + status["reserved_usd"] <= budget
        time.sleep(0.3)
        return len(status["trials"])

    until(lambda: check_budget() >= 2)
    (controller,) = (
        each
        for each in psutil.process_iter(["cmdline"])
        if name in " ".join(each.info["cmdline"] or ())
    )
    os.kill(controller.pid, signal.SIGKILL)
    controller.wait()
    shutil.rmtree(tmp_path / "runs-home" / "sweeps")  # as on another machine
    again = cli("sweep", sweep_file, "--sandbox", "--follow", "--json")
    assert again.code == 0, again.err
    assert again.json["sweep"] == name
    assert [trial["state"] for trial in again.json["trials"]] == ["SUCCEEDED"] * 4
    assert again.json["spent_usd"] <= budget
    jobs = cli("list", "--tag", f"sweep={name}", "--json").json["runs"]
    assert sorted(job["run"] for job in jobs) == sorted(
        trial["run"] for trial in again.json["trials"]
    )
    best = min(again.json["trials"], key=lambda trial: trial["objective"])
    assert again.json["best"]["run"] == best["run"]
