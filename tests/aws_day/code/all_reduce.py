"""Script of the jobs with several ranks: adds the ranks up and prints the sum."""

import json
import os
import time

import torch
import torch.distributed as dist

backend = "nccl" if torch.cuda.is_available() else "gloo"
if backend == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group(backend)
total = torch.tensor([dist.get_rank() + 1.0], device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(total)
found = {
    "kind": "sum",
    "time": time.time(),
    "rank": dist.get_rank(),
    "world": dist.get_world_size(),
}
found |= {"sum": total.item(), "backend": backend, "torch": torch.__version__}
print("AWS_DAY " + json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
