"""In the style of a Lightning script: `accelerator="gpu"`, DDP over the instance's devices, 16-bit precision."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Linear(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        print(f"lightning loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def main() -> None:
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(
        TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8, pin_memory=True
    )
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=2,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert trainer.num_devices == 2
    assert trainer.strategy.root_device.type == "cuda"
    trainer.fit(Linear(), loader)


if __name__ == "__main__":
    main()
