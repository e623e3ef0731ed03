"""Saves and resumes while storage fails: a complete checkpoint, or an event with the reason, and training continues.

The tests use the real CheckpointManager, an S3 server with fault injection, a full disk, and ranks with real Gloo.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
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
from cloudtrain_runtime.contract import CheckpointConfig, MlTree, parse_event
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

BUCKET = "cloudtrain-test"
WIDTH = 1500
"""Makes a state of 18 MB, so that an upload of a shard has several parts."""

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


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
    monkeypatch.setenv(
        "AWS_MAX_ATTEMPTS", str(attempts)
    )  # with the default of 10, a permanent fault takes a minute


def empty_bucket() -> None:
    import boto3

    client = boto3.session.Session().client("s3")
    client.create_bucket(
        Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    found = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    for each in found:
        client.delete_object(Bucket=BUCKET, Key=each["Key"])


@dataclass
class Training:
    """A small training that saves its state, and keeps a copy of its weights at each step."""

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
        self.checkpoints = self.new_manager()

    def new_manager(self) -> CheckpointManager:
        """Return a manager of the checkpoints, as another start of the run creates it."""
        return CheckpointManager(
            CheckpointConfig(self.uri, None, None, self.keep, "auto"), self.context
        )

    def step_and_save(self, *, wait: bool = True) -> bool:
        """Train one step and save; return what `CheckpointManager.save` returns."""
        self.optimizer.zero_grad()
        self.model(torch.randn(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.step += 1
        self.weights[self.step] = self.model.weight.detach().clone()
        return self.checkpoints.save(
            self.step, self.model, [self.optimizer], {"step": self.step}, {}, wait=wait
        )

    def new_events(self) -> Events:
        """Return the events since the last call."""
        text = self.read()
        self.text += text
        found = [event for line in text.splitlines() if (event := parse_event(line)) is not None]
        self.events += found
        return found

    def missed_reason(self) -> str:
        """Return reason and detail of the only new event, a missed checkpoint."""
        (event,) = [event for event in self.new_events() if event["event"] != "checkpoint_damaged"]
        assert event["event"] == "checkpoint_missed", event
        return f"{event['reason']}: {event['detail']}"

    def resumed_step(self) -> int:
        """Resume in another start; return the step, after a comparison of its weights bit by bit."""
        model, optimizer = model_and_optimizer(2)
        step = self.new_manager().resume(model, [optimizer]).step
        assert step == 0 or torch.equal(model.weight, self.weights[step])
        return step

    def check_listed_checkpoints(self) -> None:
        """Check that listed checkpoints are undamaged, and that the newest reported checkpoints are listed."""
        self.new_events()
        storage = open_storage(self.uri)
        complete = {
            record.step: record for record in list_checkpoints(storage) if record.is_complete
        }
        for record in complete.values():
            assert record.manifest is not None
            assert list(find_damage(storage, record.name, record.manifest.files)) == []
        reported = {event["step"] for event in self.events if event["event"] == "checkpoint"}
        assert set(sorted(reported)[-self.keep :]) <= set(complete)


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
def test_a_save_survives_transient_faults(training: Training, s3: S3Server, kind: str) -> None:
    assert training.step_and_save()
    s3.set_faults(FaultPlan(max_faults=3, **{kind: 0.5}))
    for _ in range(2):
        assert (
            training.step_and_save()
        )  # the second save verifies its files, and deletes the first checkpoint
    assert [event["event"] for event in training.new_events()] == 3 * ["checkpoint"]
    s3.set_faults(FaultPlan(max_faults=3, **{kind: 0.5}))
    assert training.resumed_step() == 3
    training.check_listed_checkpoints()


PERMANENT = {
    "throttled": "S3 throttled every attempt: save less often",
    "broken": "S3 failed on every attempt: try again later",
    "reset": "the connection was lost or could not be made: check the network and the endpoint",
    "lost": "the connection was lost or could not be made: check the network and the endpoint",
    "expired": "the credentials have expired and could not be renewed: sign in again, or use a role",
    "denied": "access is denied: the role needs",
}


@pytest.mark.parametrize(("kind", "skip"), list(zip(PERMANENT, (0, 2, 4, 3, 0, 2), strict=True)))
def test_a_failed_save_has_a_reason_and_the_next_succeeds(
    training: Training,
    s3: S3Server,
    kind: str,
    skip: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    training.checkpoints = training.new_manager()
    assert training.step_and_save()
    training.new_events()
    s3.set_faults(FaultPlan(skip=skip, **{kind: 1.0}))
    for number in (1, 2, 3):
        is_complete = training.step_and_save()
        if skip and is_complete:
            break
        assert not is_complete
        assert PERMANENT[kind] in training.missed_reason()
        assert (training.events[-1]["missed"], training.events[-1]["alarm"]) == (
            number,
            number == 3,
        )
        if skip:
            break
    s3.set_faults(FaultPlan())
    assert training.step_and_save()
    assert training.resumed_step() == training.step
    training.check_listed_checkpoints()


def test_renewed_credentials_are_found(
    training: Training, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user signs in again while a run continues."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    keys = Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"])
    keys.write_text("[default]\naws_access_key_id=OLD\naws_secret_access_key=s\n")
    training.checkpoints = training.new_manager()
    assert training.step_and_save()
    training.new_events()
    s3.set_faults(FaultPlan(expired_keys=("OLD",)))
    assert not training.step_and_save()
    assert PERMANENT["expired"] in training.missed_reason()
    keys.write_text("[default]\naws_access_key_id=NEW\naws_secret_access_key=s\n")
    assert training.step_and_save()
    assert training.resumed_step() == training.step


def test_a_save_with_a_truncated_upload_is_no_checkpoint(training: Training, s3: S3Server) -> None:
    """The server stores half of an upload and reports success: of a shard, of writer.json, of the manifest."""
    assert training.step_and_save()
    rejected = 0
    for skip in range(5):
        training.new_events()
        before = s3.counts()["truncated"]
        s3.set_faults(
            FaultPlan(truncated=1.0, max_faults=1, skip=skip, operations="PutObject|UploadPart")
        )
        is_complete = training.step_and_save()
        s3.set_faults(FaultPlan())
        is_truncated = s3.counts()["truncated"] > before
        rejected += is_truncated and not is_complete
        if not is_complete:
            assert (
                "does not hold what was written to it" in (detail := training.missed_reason())
                or "was written and not kept" in detail
            )
        assert training.resumed_step() == (training.step if is_complete else training.step - 1)
        assert training.step_and_save()
        training.check_listed_checkpoints()
    assert rejected >= 3


@pytest.mark.parametrize("only", ["ListObjectsV2", "GetObject"])
@pytest.mark.parametrize("kind", ["throttled", "reset", "torn", "expired"])
def test_run_that_cannot_list_its_checkpoints_does_not_restart(
    training: Training, s3: S3Server, kind: str, only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    assert training.step_and_save()
    for skip in (0, 1, 2):
        s3.set_faults(FaultPlan(operations=only, skip=skip, **{kind: 1.0}))
        if only == "ListObjectsV2" and skip:
            break  # a resume sends one list request
        with pytest.raises(CheckpointError, match=r"cannot be listed|cannot be read") as caught:
            training.resumed_step()
        assert PERMANENT.get(kind, PERMANENT["reset"]) in str(caught.value)
    s3.set_faults(FaultPlan())
    assert training.resumed_step() == 1  # the failed requests have marked no checkpoint as damaged


def test_a_failing_disk_is_not_treated_as_empty(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any) -> list[str]:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "iterdir", fail)
    model, optimizer = model_and_optimizer(1)
    checkpoints = CheckpointManager(
        CheckpointConfig(str(tmp_path / "c"), None, None, 2, "auto"), context
    )
    with pytest.raises(CheckpointError, match=r"the run does not start.*Input/output error"):
        checkpoints.resume(model, [optimizer])


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Shorten waits of minutes to tenths of a second."""
    monkeypatch.setattr("cloudtrain_runtime.checkpoint.saving._PREVIOUS_SAVE_SECONDS", 0.01)
    monkeypatch.setattr("cloudtrain_runtime.checkpoint.saving._POLL_SECONDS", 0.1)
    return monkeypatch


def test_a_silent_storage_blocks_neither_training_nor_exit(
    training: Training, s3: S3Server, short_waits: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server responds only after its plan is replaced at the end. A call that waited for it would never return."""
    tree = MlTree(tmp_path / "ml")
    tree.stop_notice.parent.mkdir(parents=True)
    short_waits.setenv("CLOUDTRAIN_ML_ROOT", str(tree.root))
    training.checkpoints = training.new_manager()
    assert training.step_and_save()
    training.new_events()
    before = s3.counts()["silent"]
    s3.set_faults(FaultPlan(silent=1.0, skip=1))
    assert training.step_and_save(wait=False)
    until(lambda: s3.counts()["silent"] > before)
    missed: Events = []
    while [event["reason"] for event in missed[-2:]] != [
        "stalled",
        "stalled",
    ]:  # the client still fills its buffers
        assert not training.step_and_save(wait=False)
        missed += training.new_events()
    assert missed[0]["reason"] == "late"
    assert [event["alarm"] for event in missed] == [
        number >= 3 for number in range(1, len(missed) + 1)
    ]
    assert "does the storage answer?" in missed[-1]["detail"]
    # After a stop notice, a save gives up when the grace time ends.
    short_waits.setenv("CLOUDTRAIN_STOP_GRACE_SECONDS", "1")
    tree.stop_notice.touch()
    assert not training.step_and_save()
    assert "is waited for no longer" in training.missed_reason()
    # At the end of training, the wait for the last save ends when no rank has made progress for a while.
    tree.stop_notice.unlink()
    short_waits.setattr("cloudtrain_runtime.checkpoint.saving._STALL_SECONDS", 0.5)
    assert not training.checkpoints.wait_for_save()
    assert "is waited for no longer" in training.missed_reason()
    # Without faults, the retries of the client succeed.
    s3.set_faults(FaultPlan())
    short_waits.setattr("cloudtrain_runtime.checkpoint.saving._STALL_SECONDS", 60.0)
    assert training.step_and_save()
    assert training.resumed_step() == training.step
    training.check_listed_checkpoints()


def test_saves_succeed_again_after_the_server_restarts(
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with serve_s3(tmp_path / "s3") as server:
        set_account(server.endpoint, monkeypatch, attempts=2)
        empty_bucket()
        training = Training(
            f"s3://{BUCKET}/run/checkpoints", context, lambda: capfd.readouterr().out
        )
        assert training.step_and_save()
        training.new_events()
        uploads = server.counts()["UploadPart"]
        server.set_faults(FaultPlan(silent=1.0, operations="UploadPart"))
        assert training.step_and_save(wait=False)
        until(lambda: server.counts()["UploadPart"] > uploads)
        server.kill()
        training.checkpoints.wait_for_save()
        assert PERMANENT["reset"] in training.missed_reason()
        server.start()
        assert training.resumed_step() == 1
        assert training.step_and_save()
        assert training.resumed_step() == 3
        training.check_listed_checkpoints()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 50 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=50m", "none", str(disk)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_saves_on_a_full_disk_fail_until_there_is_room(
    small_disk: Path, context: Context, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(str(small_disk / "c"), context, lambda: capfd.readouterr().out)
    for _ in range(2):
        assert training.step_and_save()
    training.new_events()
    for number in (1, 2, 3):
        assert (
            not training.step_and_save()
        )  # 3 x 18 MB: the third is written before the first is deleted
        assert "there is no room left: free some, lower checkpoint.keep" in training.missed_reason()
        assert training.events[-1]["missed"] == number
    assert sorted(path.name for path in (small_disk / "c").iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]
    assert training.resumed_step() == 2
    training.keep = 1
    (small_disk / "c" / "step-00000001" / "manifest.json").unlink()
    for path in (small_disk / "c" / "step-00000001").iterdir():
        path.unlink()
    assert training.step_and_save()
    assert training.resumed_step() == training.step
    training.check_listed_checkpoints()


def test_a_file_size_limit_is_the_reason_of_a_missed_save(
    context: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(str(tmp_path / "c"), context, lambda: capfd.readouterr().out)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    try:
        is_complete = training.step_and_save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not is_complete
    assert "files may not be as large" in training.missed_reason()
    assert training.resumed_step() == 0
    assert training.step_and_save()
    assert training.resumed_step() == 2


@pytest.mark.promise
@pytest.mark.processes
def test_ranks_survive_many_faults_together(s3: S3Server, tmp_path: Path) -> None:
    """Requests of both ranks fail without retries, in any phase of a save. No rank waits for one that has failed."""
    uri = f"s3://{BUCKET}/ranks"
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    trial = Trial(
        2, tmp_path / "run", uri=uri, environ=tuple({**environ, "AWS_MAX_ATTEMPTS": "1"}.items())
    )
    s3.set_faults(
        FaultPlan(
            seed=4, throttled=0.05, broken=0.05, reset=0.05, truncated=0.1, max_faults=40, skip=8
        )
    )
    first = start(trial)
    s3.set_faults(FaultPlan())
    assert first.weights is not None, first.text  # it has trained to its end
    assert '"event": "checkpoint_missed"' in first.text
    assert '"event": "checkpoint"' in first.text
    records = [record for record in list_checkpoints(open_storage(uri)) if record.is_complete]
    for record in records:
        assert record.manifest is not None
        assert list(find_damage(open_storage(uri), record.name, record.manifest.files)) == []
    steps = max(first.losses)
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

context = replace(read_context({}), run="demo")
process_group.join_ranks(context)
warm, large = nn.Linear(10, 10), nn.Linear(5200, 5200)
for model in (warm, large):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    before = peak("VmRSS")
    for step in (1, 2):
        checkpoints = checkpoints if step > 1 else CheckpointManager(
            CheckpointConfig(f"{sys.argv[1]}/{model.in_features}", None, None, 1, "auto"), context)
        assert checkpoints.save(step, model, [optimizer], {}, {}, wait=True)
share = sum(p.nbytes for p in large.parameters()) * 2
print("MEMORY", share, peak() - before)
"""
OVERHEAD_BYTES = {"folder": 64 << 20, "s3": 160 << 20}
"""Memory of a save in addition to the copy of the rank's share, as documented."""
RETURNS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Makes glibc return each freed block of at least 1 MiB immediately. By default it raises this threshold to the size of
freed blocks and keeps later blocks for its threads, so that the peak depends on which thread frees first."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("target", OVERHEAD_BYTES)
def test_peak_memory_of_a_save_is_one_copy_of_the_share(
    target: str, s3: S3Server, tmp_path: Path
) -> None:
    uri = str(tmp_path / "c") if target == "folder" else f"s3://{BUCKET}/memory"
    child = [sys.executable, "-c", MEMORY, uri]
    environ = {**os.environ, **RETURNS_FREED_MEMORY}
    done = subprocess.run(
        child, capture_output=True, text=True, check=False, timeout=300, env=environ
    )
    assert done.returncode == 0, done.stderr
    share, peak = map(int, done.stdout.rpartition("MEMORY")[2].split())
    print(f"{target}: a share of {share / 1e6:.0f} MB, a peak of {peak / 1e6:.0f} MB")
    assert share > 200e6
    assert peak <= share + OVERHEAD_BYTES[target]
