"""Lightning's Trainer. One line, attach(trainer), gives it progress, checkpoints, stops and resumes."""

import argparse
import os
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime.integrations.lightning import attach

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()


class Sine(lightning.LightningModule):
    """Fit y = sin(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean squared error."""
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=options.lr)


lightning.seed_everything(0)
x = torch.linspace(-3, 3, 1024).unsqueeze(1)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=16, shuffle=True)
ranks = int(os.environ["LOCAL_WORLD_SIZE"])  # of this instance
trainer = lightning.Trainer(
    max_epochs=options.epochs,
    accelerator="gpu" if torch.cuda.device_count() >= ranks else "cpu",
    devices=ranks,
    num_nodes=int(os.environ["WORLD_SIZE"]) // ranks,
    strategy="ddp",
    log_every_n_steps=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
callback = attach(trainer)
model = Sine()
trainer.fit(model, loader)
if trainer.is_global_zero and not callback.is_stopped:
    torch.save(model.state_dict(), Path(os.environ.get("SM_MODEL_DIR", "."), "model.pt"))
