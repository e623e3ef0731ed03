"""The environment variables that a run gets from SageMaker, the launcher and torchrun, and that no job may set."""

from __future__ import annotations

from typing import Final

from cloudtrain_runtime.contract.attempts import ATTEMPT_FILE_VARIABLE, ATTEMPT_VARIABLE
from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
from cloudtrain_runtime.contract.constants import (
    ADDRESSES_VARIABLE,
    CARDS_VARIABLE,
    ERROR_FILE_VARIABLE,
    EVENTS_FILE_VARIABLE,
    GPUS_VARIABLE,
    GRACE_VARIABLE,
    HOST_RANK_VARIABLE,
    HOSTS_HERE_VARIABLE,
    INSTANCE_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    OWN_STORE_VARIABLE,
    PORT_VARIABLE,
    RENDEZVOUS_FILE_VARIABLE,
)
from cloudtrain_runtime.contract.placeholders import CHECKPOINTS_VARIABLE

OF_LAUNCHER: Final = (
    ADDRESSES_VARIABLE,
    ATTEMPT_FILE_VARIABLE,
    ATTEMPT_VARIABLE,
    CARDS_VARIABLE,
    CHECKPOINTS_VARIABLE,
    EVENTS_FILE_VARIABLE,
    GPUS_VARIABLE,
    GRACE_VARIABLE,
    HOSTS_HERE_VARIABLE,
    HOST_RANK_VARIABLE,
    INSTANCE_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    OWNERS_VARIABLE,
    OWN_STORE_VARIABLE,
    PORT_VARIABLE,
    RENDEZVOUS_FILE_VARIABLE,
)
"""Of the launcher and of what starts it in a local run. A rehearsal's are not among them: it sets them as a job does."""

OF_TORCHRUN: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", ERROR_FILE_VARIABLE),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Of torchrun and of the launcher's agent in its place. Source: torch/distributed/elastic/agent/server, PyTorch 2.13."""

OF_SAGEMAKER: Final = (
    *("TRAINING_JOB_NAME", "TRAINING_JOB_ARN"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Of SageMaker, and of the credentials of the role. Sources: SageMaker developer guide, "How Amazon SageMaker AI Provides
Training Information"; AWS SDKs and Tools guide, "Container credential provider", 2026-11."""

_PREFIXES: Final = ("SM_", "OMPI_COMM_WORLD_")
"""Of the launcher or AWS's toolkit, and of mpirun."""


def setter_of(name: str) -> str:
    """Return what sets a variable itself, so that a job must not: `the launcher` or `SageMaker`; empty for others."""
    if name in OF_SAGEMAKER:
        return "SageMaker"
    is_own = name in OF_LAUNCHER or name in OF_TORCHRUN or name.startswith(_PREFIXES)
    return "the launcher" if is_own else ""
