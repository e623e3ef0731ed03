"""The folders and files below `/opt/ml`: SageMaker's own and those of cloudtrain's launcher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cloudtrain_runtime.contract.constants import CONFIG_CHANNEL, CONFIG_FILE, OUTPUTS_FOLDER


@dataclass(frozen=True)
class MlTree:
    """Paths below `/opt/ml`."""

    root: Path

    @property
    def config(self) -> Path:
        """Folder of hyperparameters.json, inputdataconfig.json and resourceconfig.json."""
        return self.root / "input" / "config"

    @property
    def data(self) -> Path:
        """Folder with one folder per input channel."""
        return self.root / "input" / "data"

    @property
    def code(self) -> Path:
        """Folder into which the bundle is unpacked."""
        return self.root / "code"

    @property
    def model(self) -> Path:
        """Folder that becomes model.tar.gz at the end."""
        return self.root / "model"

    @property
    def tensorboard(self) -> Path:
        """Folder that SageMaker copies to S3 while the job runs, if the request says so (TensorBoardOutputConfig)."""
        return self.root / "output" / "tensorboard"

    @property
    def output_data(self) -> Path:
        """Folder that becomes output.tar.gz at the end."""
        return self.root / "output" / "data"

    @property
    def failure(self) -> Path:
        """File whose first 1024 characters become FailureReason."""
        return self.root / "output" / "failure"

    @property
    def checkpoints(self) -> Path:
        """Folder that SageMaker synchronizes with CheckpointConfig.S3Uri."""
        return self.root / "checkpoints"

    @property
    def outputs(self) -> Path:
        """Folder in which the files and folders of `code.outputs` are kept."""
        return self.checkpoints / OUTPUTS_FOLDER

    @property
    def run_config(self) -> Path:
        """The run.json of this run."""
        return self.data / CONFIG_CHANNEL / CONFIG_FILE

    @property
    def stop_notice(self) -> Path:
        """File that the launcher writes when the host receives a stop notice."""
        return self.root / "output" / "stop-notice"

    @property
    def in_training_loop(self) -> Path:
        """File that exists while the workers act on a stop notice."""
        return self.root / "output" / "in-training-loop"

    @property
    def heartbeats(self) -> Path:
        """Folder of the ranks' heartbeat files; it exists while the launcher monitors them."""
        return self.root / "output" / "watch"

    @property
    def joins(self) -> Path:
        """Folder in which each rank records whether it has joined a process group."""
        return self.root / "output" / "joins"

    @property
    def hang(self) -> Path:
        """Folder with the evidence of a hang; part of output.tar.gz."""
        return self.output_data / "hang"
