"""Names and limits that the SDK and the container share: channels, files, environment variables."""

from __future__ import annotations

from typing import Final

CONFIG_CHANNEL: Final = "cloudtrain"
"""Input channel with `run.json`: one small object per run."""

CODE_CHANNEL: Final = "code"
"""Input channel with the bundle: one object per content digest, shared between runs."""

CONFIG_FILE: Final = "run.json"
BUNDLE_FILE: Final = "sourcedir.tar.gz"
"""File name that AWS's training toolkit expects in `sagemaker_submit_directory`."""

WORKER_SCRIPT: Final = "cloudtrain_worker.py"
"""Script that every launcher starts once per rank. AWS's toolkit does not accept a package as entry point."""

INCLUDE_FOLDER: Final = "cloudtrain_include"
"""Folder of the bundle with the folders of `code.include`, each under the name by which it is imported."""

ML_ROOT_VARIABLE: Final = "CLOUDTRAIN_ML_ROOT"
"""Path of `/opt/ml` for the processes of an instance. Unset in a SageMaker container; a local run sets it to `/opt/ml`
in a mount namespace, and else to the instance's folder."""

INSTANCE_VARIABLE: Final = "CLOUDTRAIN_INSTANCE_FOLDER"
"""The instance's folder on the machine (local runs), by which its processes are found."""

ADDRESSES_VARIABLE: Final = "CLOUDTRAIN_HOST_ADDRESSES"
"""JSON object from host name to address, for hosts whose names do not resolve (local runs)."""

PORT_VARIABLE: Final = "CLOUDTRAIN_RENDEZVOUS_PORT"
EVENTS_FILE_VARIABLE: Final = "CLOUDTRAIN_EVENTS_FILE"
"""File to which each event is appended, too: the process that logs to trackers reads it."""

RENDEZVOUS_FILE_VARIABLE: Final = "CLOUDTRAIN_RENDEZVOUS_FILE"
"""File through which hosts on the same machine agree, instead of a port."""

RENDEZVOUS_BACKEND: Final = "cloudtrain"
"""Value of torchrun's `--rdzv-backend`."""

GRACE_VARIABLE: Final = "CLOUDTRAIN_STOP_GRACE_SECONDS"
GPUS_VARIABLE: Final = "CLOUDTRAIN_GPUS"
"""Number of GPUs that this host may use. Unset: the launcher counts them."""

MAX_PROCESSES_VARIABLE: Final = "CLOUDTRAIN_MOST_PROCESSES"
"""Upper limit of the ranks per host. A sandbox simulates an instance of 8 GPUs with 2 ranks."""

OWN_LAUNCHER: Final = "own"
"""Value of `RunConfig.launcher` for a command that starts its own ranks."""

HOST_RANK_VARIABLE: Final = "CLOUDTRAIN_HOST_RANK"
"""Place of this host among all hosts, from 0, for a command that starts its own ranks."""

REHEARSAL_LAST_VARIABLE: Final = "CLOUDTRAIN_REHEARSAL_LAST_STEP"
"""Optimizer steps after which a rehearsed training ends, as if that were its end."""

REHEARSAL_HOLD_VARIABLE: Final = "CLOUDTRAIN_REHEARSAL_HOLD_STEP"
"""Step at which the ranks of a rehearsed run wait to be interrupted."""

REHEARSAL_FORKS_VARIABLE: Final = "CLOUDTRAIN_REHEARSAL_FORKS"
"""Socket of the process that has imported torch for all runs of a rehearsal."""

REHEARSAL_SAMPLES_VARIABLE: Final = "CLOUDTRAIN_REHEARSAL_SAMPLES"
"""Set where a rehearsed run records a digest of each sample."""

LOG_EVERY_VARIABLE: Final = "CLOUDTRAIN_LOG_EVERY_STEPS"
"""Steps of a Task from one line of the log to the next."""

HOSTS_HERE_VARIABLE: Final = "CLOUDTRAIN_HOSTS_HERE"
"""Number of the job's hosts that share this machine's CPUs (local runs)."""

CARDS_VARIABLE: Final = "CLOUDTRAIN_CARDS"
"""Number of GPUs that these hosts share, each of which NCCL can use for one rank (local runs)."""

ERROR_FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
"""File in which torchrun looks for a worker's exception, as JSON."""

OWN_STORE_VARIABLE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set so that the ranks have a store of their own, besides that of torchrun's agents."""

DEFAULT_RENDEZVOUS_PORT: Final = 7777
LISTENING_PORTS: Final = range(20000, 32768)
"""Ports below Linux's ephemeral range (net.ipv4.ip_local_port_range), which outgoing connections use."""

STOP_GRACE_SECONDS: Final = 120
"""Seconds between SIGTERM and SIGKILL. Source: SageMaker's StopTrainingJob documentation, 2026."""

INSTALLED_FILE: Final = "cloudtrain-installed"
"""File at the root of a virtual environment in which a local run's requirements have been installed."""

OUTPUTS_FOLDER: Final = "outputs"
"""Folder next to a script's checkpoints with the files and folders of `code.outputs`."""

SPLITS: Final = ("train", "validation", "test")
"""Names of the datasets that a Task may have."""

WEIGHT_FILES: Final = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".tar.gz")
"""Ends of the names of files with a model's weights; `train.init_from` takes other names for folders."""

MODEL_FILE: Final = "model.pt"
"""Weights in a model folder or archive."""

FAILURE_CHARACTERS: Final = 1024
"""Number of characters of /opt/ml/output/failure that SageMaker shows as FailureReason."""
