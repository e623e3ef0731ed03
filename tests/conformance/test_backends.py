"""What every backend promises: the same tests for this machine, the sandbox, an account, Slurm, and one of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import plain_backend
from support.jobs import until
from support.sandboxes import serve

import cloudtrain
from cloudtrain import Client, Observer, Plan, RunNotFoundError, State, Status
from cloudtrain.backends.sandbox import sandbox_home
from cloudtrain.backends.sandbox.process import stop_sandbox
from cloudtrain.support.backend_facts import BACKENDS

pytestmark = pytest.mark.promise

JOB = """\
name: demo
code: {directory: ., script: train.py, args: [%s]}
cluster: {instance_type: ml.m5.large, processes_per_instance: 1}
limits: {runtime: 10m, hang: null}
"""
SCRIPT = """\
import os, sys, time, pathlib
print("first line", flush=True)
if "save" in sys.argv:
    pathlib.Path(os.environ["SM_MODEL_DIR"], "weights.bin").write_text("weights")
if "wait" in sys.argv:
    time.sleep(120)
if "report" in sys.argv:
    for step, loss in ((10, 2.0), (20, 1.5)):
        print('CLOUDTRAIN {"event": "step", "step": %d, "time": 5.0, "loss": %f}' % (step, loss), flush=True)
if "fail" in sys.argv:
    raise ValueError("the loss is a banana")
print("last line", flush=True)
"""
NAMES = (*BACKENDS, plain_backend.FACTS.name)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A sandbox that acts as an account: its address and key come from the environment, as those of AWS do."""
    with serve(tmp_path_factory.mktemp("account")) as running:
        yield running.environment


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all runs of these tests, and of the sandbox, whose start takes seconds."""
    home = tmp_path_factory.mktemp("home")
    yield home
    stop_sandbox(sandbox_home(home))


@pytest.fixture(params=NAMES)
def backend(
    request: pytest.FixtureRequest,
    shared_home: Path,
    served: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    monkeypatch.setitem(BACKENDS, "plain", plain_backend.FACTS)
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(shared_home))
    monkeypatch.setenv("CLOUDTRAIN_TRANSPORT", "boto3")
    if request.param == "sagemaker":
        for name, value in served.items():
            monkeypatch.setenv(name, value)
    if request.param == "slurm":
        request.getfixturevalue("slurm_site")
    return str(request.param)


class PlanKeeper(Observer):
    """Keeps the plan of a submit."""

    plan: Plan

    def on_plan(self, plan: Plan) -> None:
        self.plan = plan


Start = Callable[..., cloudtrain.Run]


@pytest.fixture
def start(job: Callable[..., Path], backend: str) -> Start:
    def submit(argument: str = "", observer: Observer | None = None) -> cloudtrain.Run:
        path = job(JOB % argument, train_py=SCRIPT)
        return Client(observer=observer).submit(path, backend=backend, skip_check=True)

    return submit


@dataclass(frozen=True)
class Ended:
    """A run that has succeeded, with the plan and the status that its submit saw."""

    run: cloudtrain.Run
    plan: Plan
    status: Status


@pytest.fixture(scope="module")
def ended_runs() -> dict[str, Ended]:
    """The ended run of each backend: those who only read share it."""
    return {}


@pytest.fixture
def ended(start: Start, backend: str, ended_runs: dict[str, Ended]) -> Ended:
    """A run that printed, reported, saved a model and no checkpoint, and succeeded."""
    if backend not in ended_runs:
        kept = PlanKeeper()
        run = start("report, save", observer=kept)
        status = run.wait(timeout_seconds=300)
        ended_runs[backend] = Ended(run, kept.plan, status)
    return ended_runs[backend]


def elsewhere(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program that knows the run's id alone, in a new process."""
    code = (
        "import sys; from cloudtrain.support.backend_facts import BACKENDS; "
        "from support import plain_backend; BACKENDS['plain'] = plain_backend.FACTS; "
        "from cloudtrain.cli import run; "
        "sys.exit(run(sys.argv[1:]))"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )


def test_a_run_succeeds_and_its_lines_are_read_once(ended: Ended, backend: str) -> None:
    assert ended.run.backend == backend
    assert ended.status.state is State.SUCCEEDED
    lines = list(ended.run.logs(follow=True))
    texts = [line.text for line in lines]
    assert all(line.time for line in lines)
    assert [text for text in texts if text.endswith(" line")] == ["first line", "last line"]


def test_metrics_of_a_run_have_a_history(ended: Ended) -> None:
    list(ended.run.logs(follow=True))  # CloudWatch gets the last lines some seconds after the end
    history = ended.run.history()
    assert list(history["step"]) == [10, 20]
    assert list(history["train/loss"]) == [2.0, 1.5]


def test_a_failed_run_keeps_its_reason(start: Start) -> None:
    status = start("fail").wait(timeout_seconds=300)
    assert status.state is State.FAILED
    assert status.reason
    assert status.exit_code == cloudtrain.errors.EXIT_RUN_FAILED


def test_the_stored_plan_is_the_plan_of_the_submit(ended: Ended) -> None:
    planned = ended.plan.rename(ended.run.id).request
    assert ended.run.plan_document()["request"] == json.loads(json.dumps(planned))


def test_a_new_process_needs_the_run_id_alone(ended: Ended) -> None:
    status = elsewhere("status", ended.run.id, "--json")
    assert json.loads(status.stdout)["state"] == "SUCCEEDED", status.stderr
    assert "last line" in elsewhere("logs", ended.run.reference).stdout


def test_a_billed_run_is_not_stopped_by_a_short_name(start: Start, backend: str) -> None:
    run = start("wait")
    until(lambda: run.state is State.RUNNING)
    stopped = elsewhere("stop", f"{backend}:demo", "--no-wait")
    assert stopped.returncode == (2 if run.is_billed else 0), stopped.stderr
    if run.is_billed:
        assert f"to stop it: cloudtrain stop {run.reference}" in stopped.stderr
        assert run.state is State.RUNNING
        assert elsewhere("stop", "demo", "--no-wait", "--yes").returncode == 0
    assert run.wait(timeout_seconds=300).state is State.STOPPED
    assert run.is_billed == (backend == "sagemaker")


def test_a_stop_ends_the_run(start: Start) -> None:
    run = start("wait")
    until(lambda: run.state is State.RUNNING and "first line" in [line.text for line in run.logs()])
    run.stop()
    assert run.wait(timeout_seconds=300).state is State.STOPPED
    run.stop()  # a run that has ended is left as it is
    assert run.state is State.STOPPED


def test_runs_are_listed_by_their_backend(start: Start, backend: str) -> None:
    run = start()
    run.wait(timeout_seconds=300)
    assert [status.run for status in Client().list_runs(backend=[backend])][:1] == [run.id]
    assert run.id in [status.run for status in Client().list_runs()]


def test_an_unknown_run_is_not_found(ended: Ended, backend: str) -> None:
    with pytest.raises(RunNotFoundError):
        Client().status(f"{backend}:demo-261120-101500-1a2b3c")


def test_a_run_without_a_warm_pool_has_none_to_end(ended: Ended) -> None:
    with pytest.raises(cloudtrain.UserError):
        ended.run.end_warm_pool()


def test_a_run_without_checkpoints_is_not_resumed(ended: Ended) -> None:
    with pytest.raises(cloudtrain.UserError, match="checkpoint"):
        Client().resume(ended.run, skip_check=True)


def test_stored_results_are_downloaded(ended: Ended, tmp_path: Path) -> None:
    done = Client().download(ended.run, tmp_path / "to", what=["model"], unpack=True)
    assert (tmp_path / "to/model/weights.bin").read_text() == "weights"
    assert {each.path for each in done.files} - {"model.tar.gz"} == {"model/weights.bin"}
    again = elsewhere("download", ended.run.reference, "--to", str(tmp_path / "again"))
    assert again.returncode == 0
    assert (tmp_path / "again/SHA256SUMS").exists()


def test_a_run_without_results_has_none_to_download(start: Start, tmp_path: Path) -> None:
    run = start()
    run.wait(timeout_seconds=300)
    with pytest.raises(cloudtrain.UserError, match=f"{run.id} has no model"):
        run.download(tmp_path / "to")


def test_every_verb_takes_a_run_or_its_reference(ended: Ended) -> None:
    run = ended.run
    for given in (run, run.reference):
        assert cloudtrain.get_run(given).id == run.id
        assert cloudtrain.status(given).state is State.SUCCEEDED
        assert cloudtrain.explain(given).run == run.id
        assert "first line" in [line.text for line in cloudtrain.logs(given)]
        assert cloudtrain.checkpoint_folder(given).list() == ()
        assert cloudtrain.stop(given).id == run.id
