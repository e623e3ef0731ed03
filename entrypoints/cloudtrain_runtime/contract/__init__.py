"""The contract between the SDK and the container: everything that both of them use.

Standard library only: the SDK imports it on a laptop without torch, the launcher in any image with Python 3.11.
"""

from __future__ import annotations

from cloudtrain_runtime.contract.constants import (
    ADDRESSES_VARIABLE,
    BUNDLE_FILE,
    CARDS_VARIABLE,
    CODE_CHANNEL,
    CONFIG_CHANNEL,
    CONFIG_FILE,
    DEFAULT_RENDEZVOUS_PORT,
    ERROR_FILE_VARIABLE,
    FAILURE_CHARACTERS,
    GPUS_VARIABLE,
    GRACE_VARIABLE,
    HOST_RANK_VARIABLE,
    HOSTS_HERE_VARIABLE,
    INCLUDE_FOLDER,
    INSTALLED_FILE,
    INSTANCE_VARIABLE,
    LISTENING_PORTS,
    LOG_EVERY_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    MODEL_FILE,
    OUTPUTS_FOLDER,
    OWN_LAUNCHER,
    PORT_VARIABLE,
    REHEARSAL_FORKS_VARIABLE,
    REHEARSAL_HOLD_VARIABLE,
    REHEARSAL_LAST_VARIABLE,
    REHEARSAL_SAMPLES_VARIABLE,
    RENDEZVOUS_BACKEND,
    RENDEZVOUS_FILE_VARIABLE,
    SPLITS,
    STOP_GRACE_SECONDS,
    WEIGHT_FILES,
    WORKER_SCRIPT,
)
from cloudtrain_runtime.contract.events import EVENT_PREFIX, check_event, format_event, parse_event
from cloudtrain_runtime.contract.exit_codes import describe_exit
from cloudtrain_runtime.contract.hosts import sort_hosts, usable_cpus
from cloudtrain_runtime.contract.ml_tree import MlTree
from cloudtrain_runtime.contract.run_config import (
    CheckpointConfig,
    EarlyStopping,
    EvaluationConfig,
    ParallelConfig,
    RunConfig,
    SearchedValue,
    SecretConfig,
    TrackingConfig,
    TrainConfig,
)
