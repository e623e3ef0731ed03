"""The folders and files below `/opt/ml`: SageMaker's own and those of cloudtrain's launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cloudtrain_runtime.contract.constants import (
    CONFIG_CHANNEL,
    CONFIG_FILE,
    INCLUDE_FOLDER,
    OUTPUTS_FOLDER,
)


class MlTree:
    """Paths below `/opt/ml`, which is the root in a container."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "input" / "config"
        """Folder of hyperparameters.json, inputdataconfig.json and resourceconfig.json."""
        self.data = root / "input" / "data"
        """Folder with one folder per input channel."""
        self.code = root / "code"
        """Folder into which the bundle is unpacked."""
        self.include = self.code / INCLUDE_FOLDER
        """Folder with the folders of `code.include`; absent in a bundle without any."""
        self.model = root / "model"
        """Folder that becomes model.tar.gz at the end."""
        self.tensorboard = root / "output" / "tensorboard"
        """Folder that SageMaker copies to S3 while the job runs, if the request says so (TensorBoardOutputConfig)."""
        self.output_data = root / "output" / "data"
        """Folder that becomes output.tar.gz at the end."""
        self.failure = root / "output" / "failure"
        """File whose first 1024 characters become FailureReason."""
        self.checkpoints = root / "checkpoints"
        """Folder that SageMaker synchronizes with CheckpointConfig.S3Uri."""
        self.outputs = self.checkpoints / OUTPUTS_FOLDER
        """Folder in which the files and folders of `code.outputs` are kept."""
        self.run_config = self.data / CONFIG_CHANNEL / CONFIG_FILE
        """The run.json of this run."""
        self.stop_notice = root / "output" / "stop-notice"
        """File that the launcher writes when the host receives a stop notice."""
        self.in_training_loop = root / "output" / "in-training-loop"
        """File that exists while the workers act on a stop notice."""
        self.stopped_early = root / "output" / "stopped-early"
        """File that a rank writes when all ranks have agreed to end before the last step."""
        self.saved = root / "output" / "saved"
        """File that each rank writes when a checkpoint of the runtime is complete, wherever it is stored."""
        self.heartbeats = root / "output" / "watch"
        """Folder of the ranks' heartbeat files; cloudtrain's launcher creates it."""
        self.joins = root / "output" / "joins"
        """Folder in which each rank of a script records whether it has used a process group."""
        self.start = root / "start"
        """Folder of a module that each Python process of the ranks imports at its start."""
        self.written = self.start / "written"
        """File in which the processes of a script record what they write to."""
        self.rehearsal = root / "output" / "rehearsal"
        """Folder in which the ranks of a rehearsed run record their steps."""
        self.tracking = root / "output" / "tracking"
        """Folder of the process that logs to trackers; no part of output.tar.gz."""
        self.hang = self.output_data / "hang"
        """Folder with the evidence of a hang; part of output.tar.gz."""


CONTAINER_TREE: Final = MlTree(Path("/opt/ml"))
"""The paths that a container sees."""
