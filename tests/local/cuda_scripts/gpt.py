"""In the style of a small GPT's train.py: autocast, GradScaler, pinned batches, compile, accumulation."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.block = nn.Embedding(16, 32), nn.Embedding(12, 32), Block(32)
        self.head = nn.Linear(32, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def embed_and_attend(tokens: torch.Tensor) -> torch.Tensor:
            places = torch.arange(tokens.shape[1], device="cuda")  # recomputed in the backward pass
            return self.block(self.tokens(tokens) + self.places(places))

        return self.head(checkpoint(embed_and_attend, tokens, use_reentrant=False))


def main() -> None:
    local_rank, dtype = int(os.environ["LOCAL_RANK"]), "float16"
    device = f"cuda:{local_rank}"
    dist.init_process_group(backend="nccl", device_id=torch.device(device))
    torch.cuda.set_device(device)
    torch.manual_seed(1337 + local_rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    device_type = "cuda" if "cuda" in device else "cpu"
    context = (
        torch.amp.autocast(device_type=device_type, dtype=torch.float16)
        if device_type == "cuda"
        else nullcontext()
    )
    model = torch.compile(Gpt().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    model = DistributedDataParallel(model, device_ids=[local_rank])
    data = torch.arange(400) % 16
    for _ in range(25):
        starts = torch.randint(380, (8,))
        batch = torch.stack([data[start : start + 13] for start in starts])
        batch = batch.pin_memory().to(device, non_blocking=True)
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            with context:
                scores = model(batch[:, :-1])
                loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)
        print(f"gpt loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
