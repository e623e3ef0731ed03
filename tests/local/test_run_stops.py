"""Local runs that are stopped, reach their time limit, are detached from, or lose their supervisor."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, command, processes_of, until

from cloudtrain_runtime.contract import parse_event

pytestmark = pytest.mark.processes

Small = Callable[..., Path]


@pytest.mark.promise
def test_stop_saves_and_ends_every_process(cli: Cli, small: Small) -> None:
    path = small(seconds=0.2)
    run = cli(
        "submit", path, "--local", "--instances", "2", "--set", "train.epochs=500", "--json"
    ).json["run"]
    until(lambda: (cli("status", run, "--json").json["last_step"] or 0) >= 1)
    assert len(processes_of(run)) > 4
    done = cli("stop", run, "--json")
    assert done.code == 0
    assert done.json["state"] == "STOPPED"
    assert done.json["exit_code"] == 5
    assert processes_of(run) == []
    assert '"event": "stopped"' in cli("logs", run, "--raw").out
    assert (
        done.json["last_checkpoint"]["step"] == done.json["last_step"]
        or done.json["last_checkpoint"]["step"] > 1
    )
    assert cli("stop", run).code == 0  # a second stop has no effect


def test_a_script_that_ignores_sigterm_is_killed(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: stubborn\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}\n",
        train_py="import signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('up', flush=True)\ntime.sleep(600)\n",
    )
    run = cli(
        "submit", path, "--local", "--json", environ={"CLOUDTRAIN_STOP_GRACE_SECONDS": "2"}
    ).json["run"]
    until(lambda: "up" in cli("logs", run, "--raw").out)
    assert any("sleep" in process.name() for process in processes_of(run))
    done = cli("stop", run, "--json")
    assert done.json["state"] == "STOPPED"
    assert processes_of(run) == []


RUN_TO_TIME_LIMIT = """
import json, os, sys
from pathlib import Path
from cloudtrain.backends.container.job import run_job
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.process_tree import descendants

folder = Path(sys.argv[1])
request = {
    "TrainingJobName": "limit-261120-101500-1a2b3c",
    "AlgorithmSpecification": {"ContainerEntrypoint": ["/bin/sh", "-c", "echo up; sleep 600"]},
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
    "StoppingCondition": {"MaxRuntimeInSeconds": 1},
    "OutputDataConfig": {"S3OutputPath": (folder / "out").as_uri()},
}
seen = []
outcome = run_job(
    request,
    JobFolder(folder / "job"),
    stop_reason=lambda: "",
    on_transition=lambda state, _: seen.append(str(state)),
    environ={**os.environ, "CUDA_VISIBLE_DEVICES": "", "CLOUDTRAIN_STOP_GRACE_SECONDS": "5"},
)
print(json.dumps([str(outcome.state), outcome.reason, seen, len(descendants())]))
"""


@pytest.mark.promise
def test_the_time_limit_stops_a_run_and_is_the_reason(tmp_path: Path) -> None:
    """In a child process, because a job kills every descendant of the process that supervises it."""
    command = [sys.executable, "-c", RUN_TO_TIME_LIMIT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    state, reason, transitions, left = json.loads(done.stdout)
    assert (state, reason.partition(":")[0]) == ("STOPPED", "MaxRuntimeExceeded")
    assert transitions == ["STARTING", "RUNNING", "STOPPING"]
    assert (tmp_path / "job" / "logs" / "algo-2.log").read_text() == "up\n"
    assert left == 0


@pytest.mark.promise
def test_ctrl_c_detaches_and_prints_how_to_attach_again(cli: Cli, small: Small) -> None:
    path = small(seconds=0.2)
    following = subprocess.Popen(
        [str(command()), "submit", str(path), "--local", "--follow", "--set", "train.epochs=500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = until(lambda: next((found["run"] for found in cli("list", "--json").json["runs"]), None))
    until(lambda: (cli("status", run, "--json").json["last_step"] or 0) >= 1)
    os.killpg(following.pid, signal.SIGINT)  # a terminal sends it to the foreground process group
    out, err = following.communicate(timeout=300)
    assert following.returncode == 130
    assert f"local:{run} continues. To attach again: " in err
    assert f"cloudtrain follow local:{run}\n" in err
    assert "Traceback" not in out + err
    before = cli("status", run, "--json").json
    assert before["state"] == "RUNNING"
    until(lambda: cli("status", run, "--json").json["last_step"] > before["last_step"])
    assert cli("stop", run).code == 0


def test_a_run_outlives_its_terminal(cli: Cli, small: Small) -> None:
    """The session leader dies and the kernel sends SIGHUP, as when a terminal window is closed."""
    path = small(seconds=0.1)
    script = f"import os, pty, sys\npid, fd = pty.fork()\nif pid == 0:\n os.execv({str(command())!r}, sys.argv[1:])\n"
    script += "import time\nout = b''\nwhile b'training' not in out: out += os.read(fd, 1000)\nos.close(fd)\n"
    subprocess.run(
        ["python", "-c", script, "cloudtrain", "submit", str(path), "--local", "--follow"],
        check=True,
        timeout=300,
    )
    run = cli("list", "--json").json["runs"][0]["run"]
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "SUCCEEDED"


def test_a_dead_supervisor_is_reported_and_processes_end(cli: Cli, small: Small) -> None:
    path = small(seconds=0.2)
    submitted = cli("submit", path, "--local", "--set", "train.epochs=500", "--json").json
    run, folder = submitted["run"], Path(submitted["artifacts"]["folder"])
    until(lambda: (cli("status", run, "--json").json["last_step"] or 0) >= 1)
    os.kill(json.loads((folder / "state.json").read_text())["supervisor"], signal.SIGKILL)
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "FAILED"
    assert "the supervisor of this run died" in status["reason"]
    assert cli("explain", run, "--json").json["class"] == "machine"
    until(lambda: processes_of(run) == [])


def test_followed_logs_of_a_running_job_end_with_it(cli: Cli, small: Small) -> None:
    every = ("--set", "checkpoint.every=1s", "--set", "train.epochs=10")
    run = cli("submit", small(seconds=0.05), "--local", "--instances", "2", *every, "--json").json[
        "run"
    ]
    lines = cli("logs", "-f", "--raw", run).out.splitlines()
    assert lines == sorted(set(lines), key=lines.index)
    assert sum('"event": "finished"' in line for line in lines) == 1
    assert sorted(lines) == sorted(cli("logs", run, "--raw").out.splitlines())
    # Checkpoints are saved by the clock of rank 0, one per interval.
    saved = [
        event["step"]
        for line in lines
        if (event := parse_event(line)) and event["event"] == "checkpoint"
    ]
    assert len(saved) >= 3
    assert all(later - sooner > 1 for sooner, later in itertools.pairwise(saved[:-1]))
