"""In the style of a prefetcher with a stream of its own, old AMP names, DataParallel's helpers and timing by events."""

import os
import threading

import torch
import torch.distributed as dist
from torch import nn


class Prefetcher:
    """Copies the next batch in a stream while the model computes."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches, self.stream = iter(batches), torch.cuda.Stream()
        self.preload()

    def preload(self) -> None:
        self.next = next(self.batches, None)
        if self.next is not None:
            with torch.cuda.stream(self.stream):
                self.next = self.next.cuda(non_blocking=True).float()

    def take(self) -> torch.Tensor | None:
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.next
        if batch is not None:
            batch.record_stream(torch.cuda.current_stream())
        self.preload()
        return batch


def main() -> None:
    assert torch.cuda.device_count() == 2, torch.cuda.device_count()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(7)
        print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory > 0)
    model = nn.DataParallel(nn.LSTM(4, 8, proj_size=1)).cuda()
    scaler, optimizer = torch.cuda.amp.GradScaler(), torch.optim.Adam(model.parameters(), lr=0.05)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    prefetcher = Prefetcher([torch.rand(6, 4, 4) for _ in range(30)])
    while (batch := prefetcher.take()) is not None:
        with torch.cuda.amp.autocast():
            outputs = model(batch)[0]
            loss = (outputs - batch.mean(dim=-1, keepdim=True)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"prefetcher loss {loss.item():.5f}", flush=True)
    end.record()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print("events", start.elapsed_time(end) > 0, torch.cuda.max_memory_allocated() // 2**20)
    placed: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: placed.append(torch.ones(2, device="cuda").cuda()))
    thread.start()
    thread.join()
    assert placed[0].sum() == 2
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
