"""Runs whose work is done, and whose ranks are held by a thread or a child process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, processes_of

pytestmark = pytest.mark.processes

JOB = """
name: leaving
code: {script: train.py}
cluster: {instance_type: ml.m5.large, processes_per_instance: 2}
limits: {runtime: 10m, hang: 10s}
"""
SCRIPT = """
import multiprocessing, os, threading, time
from cloudtrain_runtime import report

def sleep():
    time.sleep(600)

if __name__ == "__main__":
    report(3, total=3, loss=0.5)
    if os.environ["RANK"] == "0":
        threading.Thread(target=sleep, name="uploader").start()
    else:
        multiprocessing.get_context("fork").Process(target=sleep, name="prefetcher").start()
    print("training done", flush=True)
"""


def test_what_holds_a_finished_run_is_named_and_ended(cli: Cli, job: Callable[..., Path]) -> None:
    done = cli("submit", job(JOB, train_py=SCRIPT), "--local", "--follow", "--json")
    assert done.code == 0, done.err
    run = done.json["run"]
    (warning,) = [each for each in done.json["warnings"] if "limits.hang" in each]
    assert "rank 0 and 1 more had done the work" in warning
    assert "the thread 'uploader' (train.py:6)" in warning
    log = cli("logs", run, "--raw").out
    assert "because it waited for the process 'prefetcher'" in log
    assert processes_of(run) == []
