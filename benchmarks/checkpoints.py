"""Measure the cost of a checkpoint: the stall of the training step, and the upload.

    python benchmarks/checkpoints.py --write benchmarks/results/checkpoints.md

Two ranks with Gloo train a layer of 42 million weights with AdamW (a state of 504 MB). They save the state in four
ways, alternately in the same processes: torch.save by rank 0, DCP's async_save, async_save with its asynchronous
stager, and cloudtrain. The stall is the time that the training thread waits in the call and before the next step of
the optimizer. Uploads are measured alternately, too, without training: the same 504 MB with an s3torchconnector
writer, with boto3's upload_file, and as a complete checkpoint of cloudtrain (from the call to the commit, in one
process). All measurements with S3 use one S3 server on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loopback import serve_bucket
from measure import describe_machine
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, async_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

WIDTH, SAMPLES = 6480, 64
"""42 million weights: with AdamW's two moments 504 MB in float32."""

STEPS_BETWEEN = 1
RANKS = 2


def main() -> int:
    """Measure alternately, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", help="cpu or cuda: one rank on one GPU, with pinned memory")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(json.loads(arguments.child))
        return 0
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder, serve_bucket("speed") as s3:
        ranks = 1 if arguments.device == "cuda" else RANKS
        for place, uri in (("a folder", Path(folder).as_uri()), ("S3", s3)):
            options = {"uri": uri, "rounds": arguments.rounds, "device": arguments.device, "width": arguments.width}
            lines += stall_table(run_ranks("stall", options, ranks), place)
            print("\n".join(lines), file=sys.stderr, flush=True)  # results so far
        options = {"uri": s3, "rounds": arguments.rounds, "device": "cpu", "width": arguments.width}
        lines += upload_table(run_ranks("upload", options, 1))
    lines += [f"Medians of {arguments.rounds} turns on {machine(arguments.device)}, torch {torch.__version__}."]
    print("\n".join(lines))
    if arguments.write is not None:
        arguments.write.write_text("\n".join(["# Cost of a checkpoint", "", *introduction(), *lines]) + "\n")
    return 0


def introduction() -> list[str]:
    """Return the description of the measurement."""
    return [*(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(), ""]


def machine(device: str) -> str:
    """Return the machine."""
    return f"{torch.cuda.get_device_name(0)}, {describe_machine()}" if device == "cuda" else describe_machine()


def run_ranks(what: str, options: dict[str, Any], ranks: int) -> dict[str, list[float]]:
    """Run the ranks of one measurement; return the results of rank 0."""
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        text = json.dumps({**options, "what": what, "output": output.name})
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *(__file__, "--child", text),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
        measured = Path(output.name).read_text()
    if not measured:
        sys.exit(f"{what} failed:\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}")
    return json.loads(measured)  # type: ignore[no-any-return]


def stall_table(measured: dict[str, list[float]], place: str) -> list[str]:
    """Return the stalls as a Markdown table."""
    blocking, own = measured["torch.save"], measured["cloudtrain"]
    rows = [f"| save to {place} | stall, median s | min to max | x torch.save | goal |", "|---|---|---|---|---|"]
    for name, seconds in measured.items():
        if name == "step":
            continue
        ratio = statistics.median(a / b for a, b in zip(seconds, blocking, strict=True))
        goal = "at most 0.05" if seconds is own else ""
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        rows.append(f"| {name} | {statistics.median(seconds):.3f} | {spread} | {ratio:.3f} | {goal} |")
    against = statistics.median(a / b for a, b in zip(own, measured["DCP async_save"], strict=True))
    step = statistics.median(measured["step"])
    return [*rows, "", f"cloudtrain is {against:.2f} x async_save (goal: at most 1). A step takes {step:.2f} s.", ""]


def upload_table(measured: dict[str, list[float]]) -> list[str]:
    """Return the uploads as a Markdown table."""
    raw = [name for name in measured if name != "cloudtrain"]
    fastest = min(raw, key=lambda name: statistics.median(measured[name]))
    rows = [f"| upload of the same bytes | median s | min to max | speed x {fastest} | goal |", "|---|---|---|---|---|"]
    for name, seconds in measured.items():
        ratio = statistics.median(b / a for a, b in zip(seconds, measured[fastest], strict=True))
        goal = "at least 0.9" if name == "cloudtrain" else ""
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        rows.append(f"| {name} | {statistics.median(seconds):.2f} | {spread} | {ratio:.2f} | {goal} |")
    return [*rows, ""]


def child(options: dict[str, Any]) -> None:
    """Run one rank."""
    warnings.simplefilter("ignore")
    device = options["device"]
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    measured = stalls(options) if options["what"] == "stall" else uploads(options)
    if dist.get_rank() == 0:
        Path(options["output"]).write_text(json.dumps(measured))
    sys.stdout.flush()
    os._exit(0)  # torch with Gloo may abort in the interpreter's shutdown


class Trainer:
    """A model, its optimizer and a batch."""

    def __init__(self, width: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width, bias=False).to(device)
        self.replica = DistributedDataParallel(self.model) if dist.get_world_size() > 1 else self.model
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


def stalls(options: dict[str, Any]) -> dict[str, list[float]]:
    """Save with each variant alternately; return the stall of training in seconds by variant."""
    trainer = Trainer(options["width"], options["device"])
    background = dist.new_group(backend="gloo")
    ways: dict[str, Callable[[Trainer, str, Any], float]] = {
        "torch.save": by_torch_save,
        "DCP async_save": by_async_save,
        "DCP async_save, asynchronous stager": StagedAsyncSave(),
        "cloudtrain": OwnSave(options),
    }
    measured: dict[str, list[float]] = {name: [] for name in [*ways, "step"]}
    for turn in range(options["rounds"] + 1):
        for name, save in ways.items():
            for _ in range(STEPS_BETWEEN):
                began = time.perf_counter()
                trainer.step()
                measured["step"].append(time.perf_counter() - began)
            dist.barrier()
            place = f"{options['uri']}/{name.replace(' ', '-').replace(',', '')}-{turn}"
            seconds = save(trainer, place, background)
            if turn > 0:  # the first turn is a warm-up
                measured[name].append(seconds)
            if place.startswith("file://"):
                dist.barrier()
                shutil.rmtree(place.removeprefix("file://"), ignore_errors=True)
    return measured


def by_torch_save(trainer: Trainer, place: str, background: Any) -> float:
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
    return waited


def by_async_save(trainer: Trainer, place: str, background: Any) -> float:
    """Save with DCP's async_save and its defaults: it copies the state before it returns."""
    began = time.perf_counter()
    future: Any = async_save(trainer.states(), storage_writer=dcp_writer(place), process_group=background)
    waited = time.perf_counter() - began
    waited += trainer.step()
    future.result()
    return waited


class StagedAsyncSave:
    """Save with DCP's async_save and its asynchronous stager (torch 2.9 and newer)."""

    def __init__(self) -> None:
        self.stager: Any = None

    def __call__(self, trainer: Trainer, place: str, background: Any) -> float:
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
            trainer.states(), storage_writer=dcp_writer(place), process_group=background, async_stager=self.stager
        )
        waited = time.perf_counter() - began
        waited += trainer.step(future.staging_completion.result)
        future.upload_completion.result()
        return waited


class OwnSave:
    """Save as cloudtrain's training loop does."""

    def __init__(self, options: dict[str, Any]) -> None:
        from cloudtrain_runtime.checkpoint.manager import CheckpointManager
        from cloudtrain_runtime.contract import CheckpointConfig
        from cloudtrain_runtime.process.run_context import context

        config = CheckpointConfig(f"{options['uri']}/ours", None, None, 1, "never")
        place = replace(context(), device=torch.device(options["device"]), run="bench")
        self.checkpoints = CheckpointManager(config, place)
        self.step = 0

    def __call__(self, trainer: Trainer, place: str, background: Any) -> float:
        """Save, and wait for the copy before the update of the weights."""
        del place, background
        self.step += 1
        saver = self.checkpoints._saver  # noqa: SLF001 (the time that the training thread waited)
        self.checkpoints.save(self.step, trainer.model, [trainer.optimizer], {}, {})
        save = saver._save  # noqa: SLF001
        trainer.step()
        self.checkpoints.wait_for_save()
        return float(save.stall_seconds)  # type: ignore[union-attr]


def dcp_writer(place: str) -> Any:
    """Return DCP's writer for a location."""
    if place.startswith("s3://"):
        from s3torchconnector.dcp import S3StorageWriter

        return S3StorageWriter("us-west-2", place, s3client_config=connector_config())
    return FileSystemWriter(place.removeprefix("file://"))


def connector() -> Any:
    """Return s3torchconnector's checkpoint interface."""
    from s3torchconnector import S3Checkpoint

    return S3Checkpoint("us-west-2", s3client_config=connector_config(), endpoint=os.environ["AWS_ENDPOINT_URL"])


def connector_config() -> Any:
    """Return the client configuration of the server on loopback."""
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)


def uploads(options: dict[str, Any]) -> dict[str, list[float]]:
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
            own.step += 1
            own.checkpoints.save(own.step, trainer.model, [trainer.optimizer], {}, {})
            deadline = time.perf_counter() + 300
            while own.checkpoints._saver.last_step != own.step and time.perf_counter() < deadline:  # noqa: SLF001
                time.sleep(0.002)

        ways = {"s3torchconnector": by_connector, "boto3": by_boto3, "cloudtrain": by_cloudtrain}
        measured: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options["rounds"] + 1):
            for name, act in ways.items():
                began = time.perf_counter()
                act()
                if turn > 0:
                    measured[name].append(time.perf_counter() - began)
                own.checkpoints.wait_for_save()
                trainer.step()
    return measured


if __name__ == "__main__":
    sys.exit(main())
