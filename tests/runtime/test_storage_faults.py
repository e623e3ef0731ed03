"""Saves and resumes while storage fails: a complete checkpoint, or an event with the reason, and training continues.

The tests use the real Saver, an S3 server with fault injection, a full disk, and ranks with real Gloo.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import until
from support.ranks import Trial, start
from support.s3_faults import FaultPlan
from support.s3_server import S3Server, serve_s3
from torch import nn

from cloudtrain_runtime.checkpoint.listing import list_checkpoints
from cloudtrain_runtime.checkpoint.manager import CheckpointManager
from cloudtrain_runtime.checkpoint.storage import open_storage
from cloudtrain_runtime.checkpoint.verified_reader import find_damage
from cloudtrain_runtime.contract import CheckpointConfig, parse_event
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's own

BUCKET = "cloudtrain-test"
WIDTH = 1500
"""The state has 18 MB: shards in several parts."""

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


@pytest.fixture(params=["boto3", "s3torchconnector"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if name != "boto3":
        pytest.importorskip(name)
    monkeypatch.setenv("CLOUDTRAIN_S3_ENGINE", name)
    return name


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server without faults, with an empty bucket. The AWS variables point to it."""
    set_account(server.endpoint, monkeypatch)
    monkeypatch.setattr("cloudtrain_runtime.s3.objects._READ_PAUSES_SECONDS", (0.05, 0.1))
    server.set_faults(FaultPlan())
    empty_bucket()
    return server


def set_account(endpoint: str, monkeypatch: pytest.MonkeyPatch, attempts: int = 4) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", str(attempts))  # with 10, what never succeeds takes a minute to say so


def empty_bucket() -> None:
    import boto3

    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    found = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    for each in found:
        client.delete_object(Bucket=BUCKET, Key=each["Key"])


@dataclass
class Training:
    """A small training that saves, and remembers what its weights were at each step."""

    uri: str
    context: Context
    read: Callable[[], str]
    keep: int = 2
    events: Events = field(default_factory=list)
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    text: str = ""
    step: int = 0

    def __post_init__(self) -> None:
        self.model, self.optimizer = model_and_optimizer(1)
        self.checkpoints = self.again()

    def again(self) -> CheckpointManager:
        """Return the checkpoints as another start of the run sees them."""
        return CheckpointManager(CheckpointConfig(self.uri, None, None, self.keep, "auto"), self.context)

    def go_on(self, *, wait: bool = True) -> bool:
        """Take a step and save."""
        self.optimizer.zero_grad()
        self.model(torch.randn(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.step += 1
        self.weights[self.step] = self.model.weight.detach().clone()
        return self.checkpoints.save(self.step, self.model, [self.optimizer], {"step": self.step}, {}, wait=wait)

    def told(self) -> Events:
        """Return the events since this was asked for the last time."""
        text = self.read()
        self.text += text
        found = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
        self.events += found
        return found

    def missed(self) -> str:
        """Return the reason and the detail of the one event that was told: a save that was missed."""
        (event,) = [event for event in self.told() if event["event"] != "checkpoint_damaged"]
        assert event["event"] == "checkpoint_missed", event
        return f"{event['reason']}: {event['detail']}"

    def resumed(self) -> int:
        """Go on in another start; return the step, whose weights are there bit by bit."""
        model, optimizer = model_and_optimizer(2)
        step = self.again().resume(model, [optimizer]).step
        assert step == 0 or torch.equal(model.weight, self.weights[step])
        return step

    def check(self) -> None:
        """Whatever was called a checkpoint is one, and what was not is none."""
        self.told()
        storage = open_storage(self.uri)
        whole = {record.step: record for record in list_checkpoints(storage) if record.is_complete}
        for record in whole.values():
            assert record.manifest is not None
            assert list(find_damage(storage, record.folder, record.manifest.files)) == []
        named = {event["step"] for event in self.events if event["event"] == "checkpoint"}
        assert set(sorted(named)[-self.keep :]) <= set(whole)


def model_and_optimizer(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def training(s3: S3Server, context: Context, capfd: pytest.CaptureFixture[str]) -> Training:
    return Training(f"s3://{BUCKET}/run/checkpoints", context, lambda: capfd.readouterr().out)


@pytest.mark.parametrize("kind", ["throttled", "broken", "reset", "torn", "slow", "conflict"])
def test_a_save_gets_through_transient_faults(training: Training, s3: S3Server, engine: str, kind: str) -> None:
    assert training.go_on()
    s3.set_faults(FaultPlan(max_faults=3, **{kind: 0.5}))
    for _ in range(2):
        assert training.go_on()  # the second one reads back what it has written, and retires the first
    assert [event["event"] for event in training.told()] == 3 * ["checkpoint"]
    s3.set_faults(FaultPlan(max_faults=3, **{kind: 0.5}))
    assert training.resumed() == 3
    training.check()


LASTING = {
    "throttled": "S3 throttled every attempt: save less often",
    "broken": "S3 failed on every attempt: try again later",
    "reset": "the connection was lost or could not be made: check the network and the endpoint",
    "lost": "the connection was lost or could not be made: check the network and the endpoint",
    "expired": "the credentials have expired and could not be renewed: sign in again, or use a role",
    "denied": "access is denied: the role needs",
}


@pytest.mark.parametrize(("kind", "skip"), list(zip(LASTING, (0, 2, 4, 3, 0, 2), strict=True)))
def test_a_save_that_fails_says_why_and_the_next_one_is_complete(
    training: Training, s3: S3Server, engine: str, kind: str, skip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    training.checkpoints = training.again()
    assert training.go_on()
    training.told()
    s3.set_faults(FaultPlan(skip=skip, **{kind: 1.0}))
    for number in (1, 2, 3):
        is_complete = training.go_on()
        if skip and is_complete:
            break
        assert not is_complete
        assert LASTING[kind] in training.missed()
        assert (training.events[-1]["missed"], training.events[-1]["alarm"]) == (number, number == 3)
        if skip:
            break
    s3.set_faults(FaultPlan())
    assert training.go_on()
    assert training.resumed() == training.step
    training.check()


def test_renewed_credentials_are_found(
    training: Training, s3: S3Server, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody signs in again beside a run that goes on."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    keys = Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"])
    keys.write_text(f"[default]\naws_access_key_id=OLD{engine}\naws_secret_access_key=s\n")
    training.checkpoints = training.again()
    assert training.go_on()
    training.told()
    s3.set_faults(FaultPlan(expired_keys=(f"OLD{engine}",)))
    assert not training.go_on()
    assert LASTING["expired"] in training.missed()
    keys.write_text(f"[default]\naws_access_key_id=NEW{engine}\naws_secret_access_key=s\n")
    assert training.go_on()
    assert training.resumed() == training.step


def test_what_the_storage_has_lost_is_no_checkpoint(training: Training, s3: S3Server, engine: str) -> None:
    """Half of an upload is kept and answered with success: of a shard, of what tells whose it is, of the manifest."""
    assert training.go_on()
    seen = 0
    for skip in range(5):
        training.told()
        before = s3.counts()["truncated"]
        s3.set_faults(FaultPlan(truncated=1.0, max_faults=1, skip=skip, operations="PutObject|UploadPart"))
        is_complete = training.go_on()
        s3.set_faults(FaultPlan())
        has_lost = s3.counts()["truncated"] > before
        seen += has_lost and not is_complete
        if not is_complete:
            assert (
                "does not hold what was written to it" in (detail := training.missed())
                or "was written and not kept" in detail
            )
        assert training.resumed() == (training.step if is_complete else training.step - 1)
        assert training.go_on()
        training.check()
    assert seen >= 3


@pytest.mark.parametrize("only", ["ListObjectsV2", "GetObject"])
@pytest.mark.parametrize("kind", ["throttled", "reset", "torn", "expired"])
def test_run_that_cannot_list_its_checkpoints_does_not_restart(
    training: Training, s3: S3Server, kind: str, only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    assert training.go_on()
    for skip in (0, 1, 2):
        s3.set_faults(FaultPlan(operations=only, skip=skip, **{kind: 1.0}))
        if only == "ListObjectsV2" and skip:
            break  # it lists once
        with pytest.raises(CheckpointError, match=r"cannot be listed|cannot be read") as caught:
            training.resumed()
        assert LASTING.get(kind, LASTING["reset"]) in str(caught.value)
    s3.set_faults(FaultPlan())
    assert training.resumed() == 1  # and nothing was taken for damaged


def test_a_failing_disk_is_not_an_empty_one(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any) -> list[str]:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "iterdir", fail)
    model, optimizer = model_and_optimizer(1)
    checkpoints = CheckpointManager(CheckpointConfig(str(tmp_path / "c"), None, None, 2, "auto"), context)
    with pytest.raises(CheckpointError, match=r"the run does not start.*Input/output error"):
        checkpoints.resume(model, [optimizer])


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Waits of minutes take tenths of a second."""
    monkeypatch.setattr("cloudtrain_runtime.checkpoint.saving._PREVIOUS_SAVE_SECONDS", 0.01)
    monkeypatch.setattr("cloudtrain_runtime.checkpoint.saving._POLL_SECONDS", 0.1)
    return monkeypatch


def test_a_storage_that_never_answers_is_told_and_holds_nobody(
    training: Training, s3: S3Server, engine: str, hurried: pytest.MonkeyPatch
) -> None:

    def nothing_moves() -> bool:
        before = training.checkpoints._saver._bytes  # noqa: SLF001
        time.sleep(0.2)
        return training.checkpoints._saver._bytes == before and bool(s3.counts()["silent"])  # noqa: SLF001

    assert training.go_on()
    training.told()
    s3.set_faults(FaultPlan(silent=1.0, silent_seconds=5.0, skip=1))
    assert training.go_on(wait=False)
    until(nothing_moves)
    for _ in range(3):
        assert not training.go_on(wait=False)  # steps are taken all the same
    told = training.told()
    assert [(event["reason"], event["alarm"]) for event in told] == [
        ("late", False),
        ("stalled", False),
        ("stalled", True),
    ]
    assert "does the storage answer?" in told[-1]["detail"]
    assert "ALARM" in training.text
    # Told to stop, the run leaves without a checkpoint, in time.
    hurried.setenv("CLOUDTRAIN_STOP_GRACE_SECONDS", "1")
    training.checkpoints.notice._is_signalled = True  # noqa: SLF001 (what SIGTERM sets)
    began = time.monotonic()
    assert not training.go_on()
    assert time.monotonic() - began < 10
    assert "is waited for no longer" in training.missed()
    # At the end of training there is no such hurry, but an end.
    training.checkpoints.notice._is_signalled = False  # noqa: SLF001
    hurried.setattr("cloudtrain_runtime.checkpoint.saving._STALL_SECONDS", 0.5)
    assert not training.checkpoints.wait_for_save()
    assert "is waited for no longer" in training.missed()
    # Without faults, the retries of the client succeed.
    s3.set_faults(FaultPlan())
    hurried.setattr("cloudtrain_runtime.checkpoint.saving._STALL_SECONDS", 60.0)
    assert training.go_on()
    assert training.resumed() == training.step
    training.check()


def test_a_server_that_is_killed_in_an_upload_comes_back(
    context: Context, engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve_s3(tmp_path / "s3") as server:
        set_account(server.endpoint, monkeypatch, attempts=2)
        empty_bucket()
        training = Training(f"s3://{BUCKET}/run/checkpoints", context, lambda: capfd.readouterr().out)
        assert training.go_on()
        training.told()
        uploads = server.counts()["UploadPart"]
        server.set_faults(FaultPlan(silent=1.0, operations="UploadPart"))
        assert training.go_on(wait=False)
        until(lambda: server.counts()["UploadPart"] > uploads)
        server.kill()
        training.checkpoints.wait_for_save()
        assert LASTING["reset"] in training.missed()
        server.start()
        assert training.resumed() == 1
        assert training.go_on()
        assert training.resumed() == 3
        training.check()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 50 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=50m", "none", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_told_and_recovers_when_there_is_room(
    small_disk: Path, context: Context, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(str(small_disk / "c"), context, lambda: capfd.readouterr().out)
    for _ in range(2):
        assert training.go_on()
    training.told()
    for number in (1, 2, 3):
        assert not training.go_on()  # 3 x 18 MB: the third is there while the first still is
        assert "there is no room left: free some, lower checkpoint.keep" in training.missed()
        assert training.events[-1]["missed"] == number
    assert sorted(path.name for path in (small_disk / "c").iterdir()) == ["step-00000001", "step-00000002"]
    assert training.resumed() == 2
    training.keep = 1
    (small_disk / "c" / "step-00000001" / "manifest.json").unlink()
    for path in (small_disk / "c" / "step-00000001").iterdir():
        path.unlink()
    assert training.go_on()
    assert training.resumed() == training.step
    training.check()


def test_a_limit_on_files_is_told(context: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    training = Training(str(tmp_path / "c"), context, lambda: capfd.readouterr().out)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    try:
        is_complete = training.go_on()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not is_complete
    assert "files may not be as large" in training.missed()
    assert training.resumed() == 0
    assert training.go_on()
    assert training.resumed() == 2


@pytest.mark.processes
def test_ranks_survive_many_faults_together(s3: S3Server, tmp_path: Path, engine: str) -> None:
    """Requests of either rank fail for good, at any phase of a save; no rank waits for one that has failed."""
    uri = f"s3://{BUCKET}/ranks"
    environ = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "CLOUDTRAIN_S3"))}
    trial = Trial(2, tmp_path / "run", uri=uri, environ=tuple({**environ, "AWS_MAX_ATTEMPTS": "1"}.items()))
    s3.set_faults(FaultPlan(seed=4, throttled=0.05, broken=0.05, reset=0.05, truncated=0.1, max_faults=40, skip=8))
    whole = start(trial)
    s3.set_faults(FaultPlan())
    assert whole.weights is not None, whole.text  # trained to its end
    assert '"event": "checkpoint_missed"' in whole.text
    assert '"event": "checkpoint"' in whole.text
    records = [record for record in list_checkpoints(open_storage(uri)) if record.is_complete]
    for record in records:
        assert record.manifest is not None
        assert list(find_damage(open_storage(uri), record.folder, record.manifest.files)) == []
    steps = max(whole.losses)
    again = start(replace(trial, folder=tmp_path / "again", ends_at=steps + 2))
    assert again.weights is not None, again.text
    assert min(again.losses) == records[-1].step + 1


MEMORY = """
import sys, warnings
from dataclasses import replace
from pathlib import Path
import torch
from torch import nn
from cloudtrain_runtime.process import process_group
from cloudtrain_runtime.checkpoint.manager import CheckpointManager
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.contract import CheckpointConfig

warnings.simplefilter("ignore")

def peak(name="VmHWM"):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024

place = replace(read_context({}), run="demo")
process_group.join_ranks(place)
warm, large = nn.Linear(10, 10), nn.Linear(5200, 5200)
for model in (warm, large):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    before = peak("VmRSS")
    for step in (1, 2):
        checkpoints = checkpoints if step > 1 else CheckpointManager(
            CheckpointConfig(f"{sys.argv[1]}/{model.in_features}", None, None, 1, "auto"), place)
        assert checkpoints.save(step, model, [optimizer], {}, {}, wait=True)
share = sum(p.nbytes for p in large.parameters()) * 2
print("MEMORY", share, peak() - before)
"""
BEYOND_BYTES = {"folder": 64 << 20, "boto3": 160 << 20, "s3torchconnector": 464 << 20}
"""What a save holds besides the copy of the rank's share, as the guide states it."""
RETURNS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Has glibc return each freed block of a MiB or more at once. By default it raises this threshold to the size of freed
blocks and keeps later ones for its threads, so that the peak depends on which thread frees first."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("where", BEYOND_BYTES)
def test_a_save_takes_one_copy_of_the_share_and_a_little_more(
    where: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "s3torchconnector":
        pytest.importorskip(where)
    if where != "folder":
        monkeypatch.setenv("CLOUDTRAIN_S3_ENGINE", where)
    uri = str(tmp_path / "c") if where == "folder" else f"s3://{BUCKET}/memory"
    child = [sys.executable, "-c", MEMORY, uri]
    environ = {**os.environ, **RETURNS_FREED_MEMORY}
    done = subprocess.run(child, capture_output=True, text=True, check=False, timeout=300, env=environ)
    assert done.returncode == 0, done.stderr
    share, peak = map(int, done.stdout.rpartition("MEMORY")[2].split())
    print(f"{where}: a share of {share / 1e6:.0f} MB, a peak of {peak / 1e6:.0f} MB")
    assert share > 200e6
    assert peak <= share + BEYOND_BYTES[where]
