"""Measure the cost of a checkpoint: the stall of the training step, and the upload.

    .venv/bin/python benchmarks/checkpoints.py [--rounds 7] --write benchmarks/results/checkpoints.md

Two ranks with Gloo train a layer of 42 million weights with AdamW (a state of 504 MB). They save the state in four
ways, alternately in the same processes: torch.save by rank 0, DCP's async_save, async_save with its asynchronous
stager, and cloudtrain. The stall is the time that the training thread waits in the call and before the next step of
the optimizer. One rank saves a larger state without training: the time until it is complete and on the disk, beside
torch.save and the bytes alone, with and without the checksums of a checkpoint. Uploads are measured alternately, too,
without training: the same 504 MB with an s3torchconnector writer, with boto3's upload_file, and as a complete
checkpoint of cloudtrain (from the call to the commit, in one process). All measurements with S3 use one S3 server on
loopback.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from measure import (
    SECONDS,
    Benchmark,
    Figures,
    Peer,
    Series,
    Session,
    alternate,
    seconds_of,
    serve_bucket,
    table,
)
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, async_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

WIDTH, SAMPLES = 6480, 64
"""42 million weights: with AdamW's two moments 504 MB in float32."""
LARGE_WIDTH = 11_180
"""125 million weights: 1.5 GB."""
_PIECE_BYTES = 8 << 20
_MOST_SECONDS = 300

RANKS = 2
TORCH_SAVE, ASYNC_SAVE, OWN, CONNECTOR = (
    "torch.save",
    "DCP async_save",
    "cloudtrain",
    "s3torchconnector",
)


def run_ranks(
    what: str, ranks: int, *, timeout_seconds: float | None = None, **options: Any
) -> tuple[list[Series], list[FailedPeer]]:
    """Run the ranks of one measurement; return rank 0's figures, and the ways that failed.

    Exits if the ranks fail or take too long.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        _, *child = BENCHMARK.child(run_rank, what=what, output=output.name, **options)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(
                [*torchrun, *child[2:]], stdout=log, stderr=log, env=environ, start_new_session=True
            ) as process,
        ):
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
            process.wait()
            log.seek(0)
            text = log.read()[-8000:]
        measured = Path(output.name).read_text()
    if not measured:
        sys.exit(f"{what} failed or took too long:\n{text}")
    found, failed = json.loads(measured)
    return [Series(**each) for each in found], [FailedPeer(**each) for each in failed]


def run_rank(what: str, output: str, **options: Any) -> None:
    """Run one rank."""
    warnings.simplefilter("ignore")
    dist.init_process_group("cpu:gloo,cuda:nccl" if options["device"] == "cuda" else "gloo")
    found, failed = {"stall": stalls, "complete": completions, "upload": uploads}[what](options)
    if dist.get_rank() == 0:
        measured = [[asdict(each) for each in part] for part in (found, failed)]
        Path(output).write_text(json.dumps(measured))
    sys.stdout.flush()
    os._exit(0)  # torch with Gloo may abort in the interpreter's shutdown


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="torch.save by rank 0, DCP's async_save with both stagers, s3torchconnector's writer and boto3's upload_file",
    goal="a stall of at most 0.05 times torch.save's and async_save's, an upload in 1.11 times the fastest's",
    mechanism="each save of cloudtrain was started, and committed while training went on",
    options={
        "device": ("cpu", "cpu or cuda: one rank on one GPU, with pinned memory"),
        "width": (WIDTH, "of the layer"),
        "large-width": (LARGE_WIDTH, "of the layer of the larger state"),
    },
    packages=("torch", "s3torchconnector", "boto3"),
    children=(run_rank,),
)


def measure(session: Session) -> list[str]:
    """Return a table of the stalls for a folder and for S3, and one of the uploads."""
    options = {
        "rounds": session.rounds,
        "device": session.options.device,
        "width": session.options.width,
    }
    ranks = 1 if options["device"] == "cuda" else RANKS
    lines: list[str] = []

    def find(found: list[Series], name: str) -> Series:
        return next(each for each in found if each.name == name)

    def check(found: list[Series]) -> None:
        saves = find(found, OWN).values("saves")
        expected = list(range(2, session.rounds + 2))  # the first round is a warm-up
        session.require(
            saves == expected,
            f"cloudtrain committed {saves} saves after its rounds, not {expected}",
        )
        return found

    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder, serve_bucket("speed") as s3:
        for place, uri in (("a folder", Path(folder).as_uri()), ("S3", s3)):
            found, failed = run_ranks("stall", ranks, uri=uri, **options)
            check(found)
            ratio = find(found, OWN).ratio(find(found, ASYNC_SAVE))
            step = find(found, TORCH_SAVE).median("step")
            lines += [*table(f"stall of a save to {place}", found, base=TORCH_SAVE, digits=3), ""]
            lines += [
                f"cloudtrain is {ratio:.2f} x {ASYNC_SAVE} (goal: at most 1). A step takes {step:.2f} s.",
                *(f"Not measured: {each.name}: {each.reason}." for each in failed),
                "",
            ]
            print("\n".join(lines), file=sys.stderr, flush=True)  # results so far
        large = options | {"width": session.options.large_width}
        found, _ = run_ranks("complete", 1, uri=Path(folder).as_uri(), **large)
        check(found)
        gigabytes = find(found, OWN).median("bytes") / 1e9
        title = f"{gigabytes:.1f} GB, complete and on the disk"
        lines += [*table(title, found, base=TORCH_SAVE), ""]
        print("\n".join(lines), file=sys.stderr, flush=True)
        found, _ = run_ranks("upload", 1, uri=s3, **options | {"device": "cpu"})
        check(found)
    return [*lines, *table("upload of the same bytes", found, base=CONNECTOR)]


@dataclass
class FailedPeer:
    """A way that cannot save with this PyTorch, and why. The others are measured all the same."""

    name: str
    reason: str


class Trainer:
    """A model, its optimizer and a batch."""

    def __init__(self, width: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width, bias=False).to(device)
        self.replica = (
            DistributedDataParallel(self.model) if dist.get_world_size() > 1 else self.model
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(SAMPLES, width, device=device)
        self.is_cuda = device == "cuda"

    def step(self, wait_for_copy: Callable[[], None] = lambda: None) -> float:
        """Run one step; return the duration of `wait_for_copy` in seconds."""
        self.replica(self.batch).square().mean().backward()
        began = time.perf_counter()
        wait_for_copy()
        waited = time.perf_counter() - began
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.is_cuda:
            torch.cuda.synchronize()
        return waited

    def states(self) -> dict[str, Any]:
        """Return the state to save."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def stalls(options: dict[str, Any]) -> tuple[list[Series], list[FailedPeer]]:
    """Save with each variant alternately; return seconds: the stall, and `total` until the save is complete."""
    trainer = Trainer(options["width"], options["device"])
    background = dist.new_group(backend="gloo")
    ways: dict[str, Callable[[Trainer, str, Any], tuple[float, float]]] = {
        TORCH_SAVE: by_torch_save,
        ASYNC_SAVE: by_async_save,
        "DCP async_save, asynchronous stager": StagedAsyncSave(),
        OWN: (own := OwnSave(options)).save,
    }

    def peer(name: str, save: Callable[[Trainer, str, Any], tuple[float, float]]) -> Peer:
        turns = itertools.count()

        def run() -> Figures:
            step = seconds_of(trainer.step)
            dist.barrier()
            folder = f"{options['uri']}/{name.replace(' ', '-').replace(',', '')}-{next(turns)}"
            stall, total = save(trainer, folder, background)
            if folder.startswith("file://"):
                dist.barrier()
                shutil.rmtree(folder.removeprefix("file://"), ignore_errors=True)
            return {SECONDS: stall, "total": total, "step": step, "saves": own.committed}

        return Peer(name, run, "at most 0.05" if name == OWN else "")

    peers = [peer(name, save) for name, save in ways.items()]
    return alternate_working(peers, options["rounds"], always=(TORCH_SAVE, OWN))


def alternate_working(
    peers: Sequence[Peer], rounds: int, *, always: Sequence[str]
) -> tuple[list[Series], list[FailedPeer]]:
    """Alternate the peers that work; return their figures, and the peers that failed.

    A version of PyTorch may break one way to save. Each way is therefore tried once before the rounds begin.

    Args:
        peers: The ways to save.
        rounds: Number of counted rounds.
        always: Ways without which there is nothing to compare; their exception is raised.
    """
    working: list[Peer] = []
    failed: list[FailedPeer] = []
    for peer in peers:
        try:
            peer.run()
        except Exception as error:
            if peer.name in always:
                raise
            failed.append(FailedPeer(peer.name, f"{type(error).__name__}: {error}"))
        else:
            working.append(peer)
    return alternate(working, rounds, warm_up=False), failed


def by_torch_save(trainer: Trainer, place: str, background: Any) -> tuple[float, float]:
    """Save as most scripts do: rank 0 writes everything, and training waits."""
    del background
    began = time.perf_counter()
    if dist.get_rank() == 0:
        states = trainer.states()
        if place.startswith("s3://"):
            with connector().writer(f"{place}/state.pt") as file:
                torch.save(states, file)
        else:
            folder = Path(place.removeprefix("file://"))
            folder.mkdir(parents=True)
            with (folder / "state.pt").open("wb") as file:
                torch.save(states, file)
                file.flush()
                os.fsync(file.fileno())
    dist.barrier()
    waited = time.perf_counter() - began
    trainer.step()
    return waited, waited


def by_async_save(trainer: Trainer, place: str, background: Any) -> tuple[float, float]:
    """Save with DCP's async_save and its defaults: it copies the state before it returns."""
    began = time.perf_counter()
    future: Any = async_save(
        trainer.states(), storage_writer=dcp_writer(place), process_group=background
    )
    waited = time.perf_counter() - began
    waited += trainer.step()
    future.result()
    return waited, time.perf_counter() - began


class StagedAsyncSave:
    """Save with DCP's async_save and its asynchronous stager (torch 2.9 and newer)."""

    def __init__(self) -> None:
        self.stager: Any = None

    def __call__(self, trainer: Trainer, place: str, background: Any) -> tuple[float, float]:
        """Save, and wait for the copy before the update of the weights."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self.stager is None:
            pins = trainer.is_cuda
            self.stager = DefaultStager(
                StagingOptions(
                    use_async_staging=True,
                    use_pinned_memory=pins,
                    use_shared_memory=False,
                    use_non_blocking_copy=pins,
                )
            )
        began = time.perf_counter()
        future: Any = async_save(
            trainer.states(),
            storage_writer=dcp_writer(place),
            process_group=background,
            async_stager=self.stager,
        )
        waited = time.perf_counter() - began
        waited += trainer.step(future.staging_completion.result)
        future.upload_completion.result()
        return waited, time.perf_counter() - began


class OwnSave:
    """Save as cloudtrain's training loop does."""

    def __init__(self, options: dict[str, Any]) -> None:
        from cloudtrain_runtime.checkpoint.manager import CheckpointManager
        from cloudtrain_runtime.contract import CheckpointConfig
        from cloudtrain_runtime.process.run_context import context

        config = CheckpointConfig(f"{options['uri']}/ours", None, None, 1, "never")
        place = replace(context(), device=torch.device(options["device"]), run="bench")
        self.checkpoints = CheckpointManager(config, place)
        self.saver = self.checkpoints._saver  # noqa: SLF001 (the time that the training thread waited)
        self.step = self.committed = 0

    def start(self, trainer: Trainer) -> None:
        """Start to save the next step."""
        self.step += 1
        self.checkpoints.save(self.step, trainer.model, [trainer.optimizer], {}, {})

    def save_completely(self, trainer: Trainer) -> None:
        """Start to save the next step, and return when it is committed: to the millisecond, as `wait` is not."""
        self.start(trainer)
        deadline = time.perf_counter() + _MOST_SECONDS
        while self.saver.last_step != self.step and time.perf_counter() < deadline:
            time.sleep(0.002)

    def wait(self) -> None:
        """Wait for the commit, and count it."""
        self.checkpoints.wait_for_save()
        self.committed += self.saver.last_step == self.step

    def save(self, trainer: Trainer, place: str, background: Any) -> tuple[float, float]:
        """Save, and wait for the copy before the update of the weights."""
        del place, background
        began = time.perf_counter()
        self.start(trainer)
        save = self.saver._save  # noqa: SLF001
        trainer.step()
        self.wait()
        return float(save.stall_seconds), time.perf_counter() - began  # type: ignore[union-attr]


def dcp_writer(place: str) -> Any:
    """Return DCP's writer for a location."""
    if place.startswith("s3://"):
        from s3torchconnector.dcp import S3StorageWriter

        return S3StorageWriter("us-west-2", place, s3client_config=connector_config())
    return FileSystemWriter(place.removeprefix("file://"))


def connector() -> Any:
    """Return s3torchconnector's checkpoint interface."""
    from s3torchconnector import S3Checkpoint

    return S3Checkpoint(
        "us-west-2", s3client_config=connector_config(), endpoint=os.environ["AWS_ENDPOINT_URL"]
    )


def connector_config() -> Any:
    """Return the client configuration of the server on loopback."""
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)


def completions(options: dict[str, Any]) -> tuple[list[Series], list[FailedPeer]]:
    """Save the same state with each variant alternately; return seconds until it is complete and on the disk."""
    trainer = Trainer(options["width"], options["device"])
    trainer.step()
    own = OwnSave(options)
    folder = Path(options["uri"].removeprefix("file://"))
    state = [
        tensor.detach()
        for part in (trainer.model, trainer.optimizer)
        for tensor in _tensors_of(part.state_dict())
    ]
    bytes_ = sum(tensor.nbytes for tensor in state)

    def with_torch() -> None:
        _write(folder / "state.pt", lambda file: torch.save(trainer.states(), file))

    def with_bytes(sums: bool) -> None:
        def write(file: BinaryIO) -> None:
            for tensor in state:
                data = memoryview(tensor.cpu().numpy()).cast("B")
                for start in range(0, len(data), _PIECE_BYTES):
                    piece = data[start : start + _PIECE_BYTES]
                    if sums:
                        zlib.crc32(piece)
                    file.write(piece)

        _write(folder / "state.bytes", write)

    def peer(name: str, save: Callable[[], None], goal: str = "") -> Peer:
        def run() -> Figures:
            seconds = seconds_of(save)
            if name == OWN:
                own.wait()
            trainer.step()
            return {SECONDS: seconds, "bytes": bytes_, "saves": own.committed}

        return Peer(name, run, goal)

    peers = [
        peer(TORCH_SAVE, with_torch),
        peer("the bytes alone", lambda: with_bytes(False)),
        peer("the bytes alone, and their checksums", lambda: with_bytes(True)),
        peer(OWN, lambda: own.save_completely(trainer), "at most 1"),
    ]
    return alternate_working(peers, options["rounds"], always=(TORCH_SAVE, OWN))


def _tensors_of(state: object) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors_of(value)


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file by a new one, when that is on the disk."""
    new = path.with_suffix(".new")
    with new.open("wb", buffering=0) as file:
        write(file)
        os.fsync(file.fileno())
    new.replace(path)


def uploads(options: dict[str, Any]) -> tuple[list[Series], list[FailedPeer]]:
    """Upload the same bytes with each variant alternately; return seconds by variant."""
    import boto3

    trainer = Trainer(options["width"], "cpu")
    trainer.step()
    own = OwnSave(options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        torch.save(trainer.states(), file)
        content = file.read_bytes()
        client = boto3.client("s3")

        def by_connector() -> None:
            with connector().writer("s3://speed/raw/connector") as writer:
                writer.write(content)

        def by_boto3() -> None:
            client.upload_file(str(file), "speed", "raw/boto3")

        def by_cloudtrain() -> None:
            own.save_completely(trainer)

        def peer(name: str, upload: Callable[[], None], goal: str = "") -> Peer:
            def run() -> Figures:
                seconds = seconds_of(upload)
                if upload is by_cloudtrain:
                    own.wait()
                trainer.step()
                return {SECONDS: seconds, "saves": own.committed}

            return Peer(name, run, goal)

        peers = [
            peer(CONNECTOR, by_connector),
            peer("boto3", by_boto3),
            peer(OWN, by_cloudtrain, "at most 1.11"),
        ]
        return alternate_working(peers, options["rounds"], always=(CONNECTOR, OWN))


if __name__ == "__main__":
    BENCHMARK.main(measure)
