"""In the style of an Accelerate example: the library chooses device and backend, and bf16 is asked for."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    assert accelerator.device.type == "cuda", accelerator.device
    assert accelerator.num_processes == 2
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(
        TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8, pin_memory=True
    )
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            print(
                f"accelerate loss {accelerator.gather(loss.detach()).mean().item():.4f}", flush=True
            )
    accelerator.end_training()


if __name__ == "__main__":
    main()
