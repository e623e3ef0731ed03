"""Lightning's Trainer, with a callback that makes the three calls: checkpoint.load, save and should_stop."""

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime import GlobalOrderSampler, checkpoint


class Checkpoints(lightning.Callback):
    """Resumes from the newest checkpoint, saves checkpoints, and stops the training when the run is stopped.

    Args:
        sampler: Sampler with the position of the run. Lightning counts only the batches of the current process.
    """

    def __init__(self, sampler: GlobalOrderSampler) -> None:
        self.sampler = sampler

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Load the checkpoint, after Lightning has wrapped the model and created the optimizer."""
        checkpoint.load(**self.saved(trainer, pl_module))
        loop = trainer.fit_loop
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = (
            self.sampler.epoch
        )
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = (
            self.sampler.step
        )
        self.on_signal = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, *_: Any) -> None:
        """Restore the handler of SIGTERM: Lightning's handler waits for the other ranks and can hang."""
        signal.signal(signal.SIGTERM, self.on_signal)

    def on_train_epoch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Use the sampler's number of micro-steps. It grows if a run resumes with fewer ranks."""
        trainer.accumulate_grad_batches = len(next(self.sampler.schedule()).micro_batches)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any
    ) -> None:
        """Save and stop at the end of an optimizer step."""
        if trainer.global_step == self.sampler.step:
            return  # a micro-step
        self.sampler.advance()
        is_end = self.sampler.epoch == trainer.max_epochs
        checkpoint.save(self.sampler.step, **self.saved(trainer, pl_module), force=is_end)
        trainer.should_stop = checkpoint.should_stop()

    def saved(
        self, trainer: lightning.Trainer, module: lightning.LightningModule
    ) -> dict[str, Any]:
        """Return the objects to save. The precision plugin contains the state of the scaler, if there is one."""
        schedulers = {
            f"scheduler_{n}": each.scheduler for n, each in enumerate(trainer.lr_scheduler_configs)
        }
        return {
            "model": trainer.model or module,  # the model that Lightning has wrapped
            "optimizer": trainer.optimizers,
            "sampler": self.sampler,
            "precision": trainer.precision_plugin,
            **schedulers,
        }


class Classifier(lightning.LightningModule):
    """A classifier of handwritten digits."""

    def __init__(self, sampler: GlobalOrderSampler, learning_rate: float, epochs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
        self.sampler, self.learning_rate, self.steps = (
            sampler,
            learning_rate,
            epochs * sampler.steps_per_epoch,
        )

    def configure_optimizers(self) -> dict[str, Any]:
        """Return SGD and its schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the remaining samples of the epoch."""
        digits = load_digits()
        data = TensorDataset(
            torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
        )
        # Without its own generator, each start of a loader would change the global random state. The dropout after a
        # resume would then differ from that of an uninterrupted run.
        return DataLoader(data, batch_sampler=self.sampler, generator=torch.Generator())

    def on_train_epoch_start(self) -> None:
        """Prepare the loss weights of the epoch's batches."""
        self.weights = self.weights_of_batches()

    def weights_of_batches(self) -> Iterator[float]:
        """Yield loss weights that give all samples of a step the same weight, with any number of samples per rank."""
        for step in self.sampler.schedule():
            for micro in step.micro_batches:
                # Lightning divides by the first factor, DDP by the second.
                yield (
                    self.trainer.accumulate_grad_batches
                    * self.sampler.world_size
                    * micro.count
                    / step.samples
                )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels) * next(self.weights)


def main() -> None:
    """Train the classifier and save it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    torch.manual_seed(0)  # all ranks build the same model
    sampler = GlobalOrderSampler(len(load_digits().target), batch_size=options.batch_size)
    model = Classifier(sampler, options.lr, options.epochs)
    torch.manual_seed(1 + sampler.rank)  # dropout differs between ranks
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="gpu" if torch.cuda.device_count() >= local_ranks else "cpu",
        devices=local_ranks,
        num_nodes=sampler.world_size // local_ranks,
        strategy="ddp",
        # Explicit, so that Lightning does not detect Slurm and install its signal handlers.
        plugins=[TorchElasticEnvironment()],
        callbacks=[Checkpoints(sampler)],
        enable_checkpointing=False,
        use_distributed_sampler=False,  # GlobalOrderSampler already distributes the samples
        reload_dataloaders_every_n_epochs=1,  # the first epoch after a resume is shorter than the next ones
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)

    if trainer.is_global_zero and sampler.epoch == options.epochs:
        folder = Path(os.environ.get("SM_MODEL_DIR", "."))
        torch.save(model.net.state_dict(), folder / "model.pt")
        print(f"world size {trainer.world_size}: saved {folder / 'model.pt'}", flush=True)


if __name__ == "__main__":
    main()
