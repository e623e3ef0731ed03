"""Prove a new account: ranks, network, checkpoint, a restart that resumes, and a report that is uploaded.

It also runs without cloudtrain's launcher: `torchrun --nproc-per-node 2 --max-restarts 1 first_contact.py`.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cloudtrain_runtime import checkpoint, report

Report = dict[str, Any]
ROUNDS = 5
INTENDED_EXIT_CODE = 75


def main() -> None:
    """Measure the network, train a small model, fail once, resume and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--largest-mb",
        type=float,
        default=None,
        help="largest all-reduce; default: 256, 16 on a CPU",
    )
    options = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    is_main = dist.get_rank() == 0

    ranks: list[Report] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, describe_rank(device))
    largest = (options.largest_mb or (256 if use_gpu else 16)) * 1e6
    found = {
        "world_size": len(ranks),
        "ranks": ranks,
        "all_reduce": measure_network(device, largest),
    }
    found |= train(device, options.steps)
    if is_main:
        text = json.dumps(found, indent=1)
        path = Path(os.environ.get("SM_OUTPUT_DATA_DIR", "."), "first-contact.json")
        path.write_text(text + "\n")
        print(
            f"first contact succeeded: resumed from step {found['resumed_from_step']}, wrote {path}",
            flush=True,
        )
    dist.destroy_process_group()


def describe_rank(device: torch.device) -> Report:
    """Return where this rank runs and with which versions."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    return {
        "rank": dist.get_rank(),
        "host": os.environ.get("SM_CURRENT_HOST", platform.node()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
    }


def measure_network(device: torch.device, largest_bytes: float) -> list[Report]:
    """Return the time and the bus bandwidth of all-reduces of several sizes, on the slowest rank."""
    found, size = [], 4096
    while size <= largest_bytes:
        data = torch.ones(size // 4, device=device)
        dist.all_reduce(data)  # the first one connects the ranks
        seconds = min(time_all_reduce(data) for _ in range(ROUNDS))
        slowest = torch.tensor(seconds, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        ranks = dist.get_world_size()
        gbps = (
            2 * (ranks - 1) / ranks * size * 8 / slowest.item() / 1e9
        )  # nccl-tests: doc/PERFORMANCE.md
        found.append(
            {
                "bytes": size,
                "milliseconds": round(slowest.item() * 1e3, 3),
                "gbit_per_second": round(gbps, 3),
            }
        )
        if dist.get_rank() == 0:
            print(
                f"all-reduce of {size:>11,} bytes: {slowest.item() * 1e3:9.3f} ms, {gbps:8.3f} Gbit/s",
                flush=True,
            )
        size *= 4
    return found


def time_all_reduce(data: torch.Tensor) -> float:
    """Return the seconds of one all-reduce."""
    began = time.perf_counter()
    dist.all_reduce(data)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    return time.perf_counter() - began


def train(device: torch.device, steps: int) -> Report:
    """Train a small model; fail once in the middle, and return what the second attempt has resumed from."""
    torch.manual_seed(0)  # all ranks build the same model
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = checkpoint.load(model=model, optimizer=optimizer).step
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if is_restarted and start == 0:
        sys.exit("first contact failed: the restarted ranks found no checkpoint")
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(
        device
    )
    for step in range(start + 1, steps + 1):
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        is_middle = step == steps // 2
        checkpoint.save(step, model=model, optimizer=optimizer, force=is_middle or step == steps)
        report(step, steps, loss=loss.item())
        if is_middle and start == 0:
            if dist.get_rank() == 0:
                print(
                    f"first contact: all ranks fail on purpose after step {step}, and have to resume",
                    flush=True,
                )
            sys.exit(INTENDED_EXIT_CODE)
        if checkpoint.should_stop():
            break
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), Path(os.environ.get("SM_MODEL_DIR", "."), "model.pt"))
    return {"steps": steps, "resumed_from_step": start, "last_loss": loss.item()}


if __name__ == "__main__":
    main()
