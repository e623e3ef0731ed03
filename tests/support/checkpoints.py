"""Checkpoints for tests, written by torch.distributed.checkpoint, with a manifest."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from cloudtrain_runtime.contract.manifest import (
    MANIFEST_FILE,
    Checksums,
    Manifest,
    checkpoint_folder_name,
)

BLOCK_BYTES = 4096
"""Small, so that a small file has several blocks."""

RUN = "demo-261120-101500-1a2b3c"

_RANK = """
import os, sys
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.state_dict import get_state_dict

kind, folder = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 7))
if kind == "fsdp":
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(model)
elif kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3, 40)).sum().backward()
optimizer.step()
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "objects": {"schedule": {"last_epoch": 3}},
         "rng": {"torch": torch.get_rng_state()}}
save(state, storage_writer=FileSystemWriter(folder))
dist.barrier()
os._exit(0)  # torch's shutdown with Gloo sometimes aborts
"""


def save_ranks(folder: Path, kind: str = "ddp", ranks: int = 1) -> None:
    """Save a model of 2,407 parameters, its optimizer and other state with torchrun. Write no manifest."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    script = folder.parent / "rank.py"
    script.write_text(_RANK)
    try:
        subprocess.run(
            [*command, str(script), kind, str(folder)], check=True, capture_output=True, timeout=120
        )
    finally:
        script.unlink()


def write_manifest(
    folder: Path, *, run: str = RUN, step: int | None = None, **fields: Any
) -> Manifest:
    """Write a manifest of the files in a folder."""
    files = {}
    for path in sorted(folder.iterdir()):
        checksums = Checksums(BLOCK_BYTES)
        checksums.update(path.read_bytes())
        files[path.name] = checksums.result()
    given: Mapping[str, Any] = {
        "attempt": "0a1b2c3d",
        "time": 1_000_000.0 + (step or 0),
        "world_size": 2,
        "mesh": {"data": 2},
        "rng": {},
        "torch": "2.13.0",
        "code": "",
        "request": "",
        "state": {},
        "block_bytes": BLOCK_BYTES,
        **fields,
    }
    manifest = Manifest(run=run, step=step or int(folder.name.split("-")[1]), files=files, **given)
    (folder / MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


def save_bytes(root: Path, step: int, *, attempt: str = "", run: str = RUN) -> Path:
    """Write a complete checkpoint of three files without entries; return its folder."""
    folder = root / checkpoint_folder_name(step, attempt)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(
        pickle.dumps(Metadata(state_dict_metadata={}, storage_data={}))
    )
    for name, size in (("__0_0.distcp", 3 * BLOCK_BYTES + 17), ("__1_0.distcp", 100)):
        (folder / name).write_bytes(bytes((step + index) % 256 for index in range(size)))
    write_manifest(folder, run=run, step=step, attempt=attempt or "0a1b2c3d")
    return folder


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
