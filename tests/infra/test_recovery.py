"""The function that continues chains in the account: its handler in a process of its own, against moto over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from support.aws_frontend import Answer, Front, Request

from cloudtrain.backends.sagemaker.log_streams import LOG_GROUP
from cloudtrain.client.client import Client
from cloudtrain.features.recovery import service
from cloudtrain.features.recovery.shared_chain import account_chains, copy_of
from cloudtrain.features.recovery.stored_chain import StoredChain
from cloudtrain.job.sections.recover import Recover
from cloudtrain.job.spec import load_job
from cloudtrain.runs.attempt_chain import AttemptState, Chain
from cloudtrain.runs.status import State
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.manifest import Manifest, StoredFile, checkpoint_folder_name

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

EVENTS = Path(__file__).with_name("events")
RUNTIME = Path(__file__).parents[1] / "support" / "lambda_runtime.py"
HANDLER = "cloudtrain.features.recovery.account.handler"
JOB = """\
name: demo
code: {directory: ., script: train.py}
cluster: {instance_type: ml.g5.2xlarge}
limits: {runtime: 1h}
"""
OF_THE_JOB = ("TrainingJobStatus", "SecondaryStatus", "FailureReason")


def read_event(name: str, run: str = "") -> dict[str, Any]:
    """Return the document of an event; `run` is its training job."""
    event: dict[str, Any] = json.loads((EVENTS / f"{name}.json").read_text())
    if run:
        event["detail"]["TrainingJobName"] = run
        event["detail"]["TrainingJobArn"] = event["resources"][0].rpartition("/")[0] + f"/{run}"
    return event


@dataclass
class Account:
    """An account whose jobs train until a test ends them.

    Attributes:
        folder: Where the files of the function's calls are.
        moto: Address of moto.
        front: The server in front of it.
        ends: What DescribeTrainingJob reports, by job.
    """

    folder: Path
    moto: str
    front: Front
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)

    def describe(self, request: Request) -> Answer | None:
        """Report a job; moto's own have all completed."""
        name = json.loads(request.body)["TrainingJobName"]
        client = boto3.client("sagemaker", endpoint_url=self.moto)
        try:
            job = client.describe_training_job(TrainingJobName=name)
        except client.exceptions.ClientError:
            return None
        job.pop("ResponseMetadata")
        state = self.ends.get(name, read_event("training")["detail"])
        shown = {key: state[key] for key in OF_THE_JOB if key in state}
        content = json.dumps({**job, **shown}, default=lambda moment: moment.timestamp())
        return Answer.json(json.loads(content))

    def end(self, run: str, name: str) -> dict[str, Any]:
        """End a job as an event says; return the event."""
        event = read_event(name, run)
        self.ends[run] = event["detail"]
        return event

    def start(self, event: dict[str, Any], machine: str = "one") -> subprocess.Popen[str]:
        """Start a call of the function; `machine` is its environment of execution, with its own disk."""
        home = self.folder / machine
        home.mkdir(exist_ok=True)
        number = len(list(self.folder.glob("event-*")))
        path = self.folder / f"event-{number}.json"
        path.write_text(json.dumps(event))
        tests = ("PYTHON", "CLOUDTRAIN_TEST", "AWS_", "PATH", "COVERAGE")
        environ = {
            **{name: value for name, value in os.environ.items() if name.startswith(tests)},
            "AWS_LAMBDA_LOG_STREAM_NAME": f"2026/11/21/[$LATEST]{machine}",
            "CLOUDTRAIN_BUCKET": "cloudtrain-test",
            "CLOUDTRAIN_HOME": str(home / "cloudtrain"),
            "CLOUDTRAIN_REGION": "us-west-2",
            "CLOUDTRAIN_ROLE": os.environ["CLOUDTRAIN_ROLE"],
            "CLOUDTRAIN_TRANSPORT": "boto3",
            "HOME": str(home),
        }
        program = [sys.executable, str(RUNTIME), HANDLER, str(path), str(path.with_suffix(".out"))]
        return subprocess.Popen(program, env=environ, cwd=home, text=True, stdout=subprocess.PIPE)

    def finish(self, call: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait for a call; return its result."""
        printed, _ = call.communicate(timeout=300)
        assert call.returncode == 0, printed
        arguments: Any = call.args
        answer = json.loads(Path(arguments[-1]).read_text())
        assert answer["imported"] == []
        result: dict[str, Any] = answer["result"]
        return result

    def call(self, event: dict[str, Any], machine: str = "one") -> dict[str, Any]:
        """Call the function."""
        return self.finish(self.start(event, machine))

    def jobs(self) -> set[str]:
        """Return the names of all jobs."""
        client = boto3.client("sagemaker", endpoint_url=self.moto)
        return {
            each["TrainingJobName"] for each in client.list_training_jobs()["TrainingJobSummaries"]
        }


@pytest.fixture
def account(
    aws: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Account]:
    folder = tmp_path / "function"
    folder.mkdir()
    monkeypatch.setenv("CLOUDTRAIN_TRANSPORT", "boto3")
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as front:
        account = Account(folder, aws["AWS_ENDPOINT_URL"], front)
        front.rules["DescribeTrainingJob"] = account.describe
        front.respond("StopTrainingJob", Answer.json({}))
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        yield account


def write_job(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path


def begin(account: Account, folder: Path, **limits: Any) -> str:
    """Submit a run and begin its chain, as a laptop does that is closed afterwards; return the run's id."""
    run = Client().submit(write_job(folder), skip_check=True)
    stored = service.begin_with_run(Client(), run, Recover(**limits))
    with service.open_controller(stored, report=print) as controller:
        assert controller is not None
        controller.advance()
    assert account.jobs() == {run.id}
    return run.id


def read(chain: str) -> Chain:
    chains = account_chains(Client(), "sagemaker")
    assert chains is not None
    found = chains.read(chain)
    assert found is not None
    return found


def save(run: str, step: int) -> str:
    """Store a complete checkpoint of a run; return its URI."""
    s3 = boto3.client("s3")
    key = f"cloudtrain/{run}/config/run.json"
    body = s3.get_object(Bucket="cloudtrain-test", Key=key)["Body"].read().decode()
    config = RunConfig.from_json(body)
    manifest = Manifest(
        run=run,
        attempt="0a1b2c3d",
        step=step,
        time=1.0,
        world_size=1,
        mesh={},
        rng={},
        torch="2.13.0",
        code="",
        request="",
        state={"data": {"epoch": 0}},
        files={"__0_0.distcp": StoredFile(3, (0,))},
        training=dict(config.training),
    )
    uri = f"{config.checkpoint.uri}/{checkpoint_folder_name(step, '0a1b2c3d')}"
    place = split_uri(uri)
    for name, content in (("__0_0.distcp", b"123"), ("manifest.json", manifest.to_json().encode())):
        s3.put_object(Bucket=place.bucket, Key=f"{place.key}/{name}", Body=content)
    return uri


def log(run: str, *lines: str) -> None:
    """Write lines into the log of a run's host."""
    logs, stream = boto3.client("logs"), f"{run}/algo-1-1"
    logs.create_log_group(logGroupName=LOG_GROUP)
    logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
    now = int(time.time() * 1000)
    logs.put_log_events(
        logGroupName=LOG_GROUP,
        logStreamName=stream,
        logEvents=[{"timestamp": now, "message": line} for line in lines],
    )


def resumed_from(run: str) -> str:
    key = f"cloudtrain/{run}/config/run.json"
    body = boto3.client("s3").get_object(Bucket="cloudtrain-test", Key=key)["Body"].read()
    return RunConfig.from_json(body.decode()).checkpoint.resume


@pytest.mark.promise
def test_an_interrupted_job_is_continued_once(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    uri = save(first, 40)
    event = account.end(first, "interrupted")
    assert account.call(event) == {"stepped": [first]}
    chain = read(first)
    assert [each.state for each in chain.attempts] == [AttemptState.ENDED, AttemptState.RUNNING]
    assert chain.attempts[0].cause == "infrastructure"
    second = chain.newest.run
    assert account.jobs() == {first, second}
    assert resumed_from(second) == uri.rpartition("/")[0]
    # SageMaker may send several events of one change, and a later call may run elsewhere.
    assert account.call(event) == {"stepped": [first]}
    assert account.call(event, "two") == {"stepped": [first]}
    assert account.jobs() == {first, second}
    account.call(account.end(second, "completed"))
    assert read(first).state is State.SUCCEEDED
    assert account.jobs() == {first, second}


@pytest.mark.parametrize(
    ("event", "state"), [("user-code", State.FAILED), ("stopped", State.STOPPED)]
)
def test_other_ends_end_the_chain(
    account: Account, tmp_path: Path, event: str, state: State
) -> None:
    first = begin(account, tmp_path / "job")
    save(first, 40)
    log(first, "Traceback (most recent call last):", "ValueError: bad batch")
    assert account.call(account.end(first, event)) == {"stepped": [first]}
    assert read(first).state is state
    assert account.jobs() == {first}


def test_a_request_to_stop_reaches_the_function(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    save(first, 40)
    Client().get_run(first).stop()
    # Of a running job, the function repeats the request.
    assert account.call(read_event("schedule")) == {"stepped": [first]}
    assert account.front.seen.count("StopTrainingJob") == 2
    assert read(first).state is None
    # The job ends for another cause before it receives the request.
    assert account.call(account.end(first, "interrupted")) == {"stepped": [first]}
    assert read(first).state is State.STOPPED
    assert account.jobs() == {first}


def test_a_chain_can_be_stopped_on_any_machine(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    account.call(account.end(first, "no-capacity"))
    assert read(first).newest.state is AttemptState.PLANNED
    other = Client(home=tmp_path / "other-machine")
    assert other.status(first).state is State.QUEUED
    other.get_run(first).stop()
    assert not (tmp_path / "other-machine").exists()
    assert account.call(read_event("schedule")) == {"stepped": [first]}
    assert other.status(first).state is State.STOPPED
    assert account.jobs() == {first}


def test_the_schedule_retries_without_capacity(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    account.call(account.end(first, "no-capacity"))
    planned = read(first).newest
    assert planned.state is AttemptState.PLANNED
    assert account.jobs() == {first}
    assert account.call(read_event("schedule")) == {"stepped": [first]}
    assert read(first).newest.state is AttemptState.RUNNING
    assert account.jobs() == {first, planned.run}
    account.call(account.end(planned.run, "completed"))
    # The first call marks the end, and the next ones need no record to skip the chain.
    assert account.call(read_event("schedule")) == {}
    objects = boto3.client("s3").list_objects_v2(
        Bucket="cloudtrain-test", Prefix="cloudtrain/chains/"
    )
    assert f"cloudtrain/chains/{first}/ended" in [each["Key"] for each in objects["Contents"]]


def test_a_first_attempt_waits_for_its_code(account: Account, tmp_path: Path) -> None:
    """Only the machine of the submit has it."""
    job = write_job(tmp_path / "job")
    stored = service.begin_with_job(Client(), load_job(job).valid_spec(), "sagemaker")
    with service.open_controller(stored, report=print):
        pass
    assert account.call(read_event("schedule")) == {"stepped": [stored.id]}
    assert read(stored.id).newest.state is AttemptState.PLANNED
    assert account.jobs() == set()
    with service.open_controller(stored, report=print) as controller:
        assert controller is not None
        controller.advance()
    assert account.jobs() == {stored.id}


def test_two_calls_at_once_start_one_attempt(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    save(first, 40)
    event = account.end(first, "interrupted")
    calls = [account.start(event, machine) for machine in ("one", "two", "three")]
    results = [account.finish(call) for call in calls]
    assert {"stepped": [first]} in results
    assert all(each in ({"stepped": [first]}, {"held": [first]}) for each in results)
    chain = read(first)
    assert len(chain.attempts) == 2
    assert account.jobs() == {each.run for each in chain.attempts}


def test_a_held_lock_is_skipped(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    save(first, 40)
    event = account.end(first, "interrupted")
    chains = account_chains(Client(), "sagemaker")
    assert chains is not None
    with copy_of(chains, first).lock():
        assert account.call(event) == {"held": [first]}
        assert account.call(read_event("schedule")) == {"held": [first]}
    assert account.jobs() == {first}


def test_other_jobs_and_events_cost_a_listing(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    assert account.call(read_event("completed", "other-261121-120000-0a1b2c")) == {}
    assert account.call(read_event("training", first)) == {}
    assert account.jobs() == {first}


def test_a_damaged_record_stops_no_other_chain(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    other = "demo-261121-120000-0a1b2c"
    for key, body in ((f"{other}/chain.json", b"{}"), ("../../x/chain.json", b"{}")):
        boto3.client("s3").put_object(
            Bucket="cloudtrain-test", Key=f"cloudtrain/chains/{key}", Body=body
        )
    result = account.call(read_event("schedule"))
    assert result["stepped"] == [first]
    assert list(result["failed"]) == [other]


def test_another_machine_adopts_a_chain(account: Account, tmp_path: Path) -> None:
    first = begin(account, tmp_path / "job")
    home = tmp_path / "other-machine"
    other = Client(home=home)
    assert [phase.name for phase in other.status(first).attempts] == ["attempt 1"]
    stored = service.adopt(other, first, "sagemaker")
    assert stored is not None
    assert stored.home == home
    assert stored.read() == read(first)
    assert service.adopt(other, "demo-261121-120000-0a1b2c", "sagemaker") is None
    save(first, 40)
    account.end(first, "time-limit")
    with service.open_controller(stored, report=print) as controller:
        assert controller is not None
        controller.advance()
    assert read(first).newest.state is AttemptState.RUNNING
    # The first machine wakes up: its record is an older one, and it cannot store it.
    old = StoredChain.find(first)
    assert old is not None
    assert len(old.read().attempts) == 1
    with service.open_controller(old, report=print) as controller:
        assert controller is not None
    assert old.read() == read(first)
    assert len(account.jobs()) == 2
