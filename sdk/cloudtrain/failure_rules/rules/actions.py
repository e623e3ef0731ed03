"""Actions that several rules advise."""

from __future__ import annotations

USE_SMALLER_BATCH = (
    "Halve [train.batch_size] and double [train.accumulate] (the global batch stays the same), "
    "or set [train.precision] to bf16."
)
USE_LESS_HOST_MEMORY = (
    "Use fewer DataLoader workers or a smaller dataset in memory, or a [cluster.instance_type] with more memory; "
    "memory use that grows from step to step is a leak."
)
USE_LESS_SHARED_MEMORY = (
    "Shared memory (/dev/shm) is full: lower num_workers or prefetch_factor of the DataLoader, "
    'or call torch.multiprocessing.set_sharing_strategy("file_system").'
)
DEBUG_NATIVE_CRASH = (
    "A native library crashed: set code.env.PYTHONFAULTHANDLER to 1 to print the Python line, "
    "and compare the versions in [code.requirements] with those of the container."
)
FIX_ROLE = "Fix the role [role]: cloudtrain check JOB lists missing permissions and trust, and how to grant them."
CONNECT_INSTANCES = (
    "Allow all traffic between members of [cluster.network.security_groups] (cloudtrain check JOB tests it)."
)
FREE_DISK = (
    "Raise [cluster.volume] (types with NVMe have a fixed size), keep fewer checkpoints ([checkpoint.keep]), "
    "and write only below /opt/ml."
)
FIND_CUDA_LINE = (
    "Run it once with code.env.CUDA_LAUNCH_BLOCKING set to 1: the traceback then shows the line that failed."
)
FIX_REQUIREMENTS = (
    "Fix the line in [code.requirements]: the package has no such version, or none for the container's Python."
)
CONNECT_TO_INTERNET = (
    "The container cannot reach that address: give [cluster.network.subnets] internet access "
    "(an isolated job has none), or add the files as a channel of data."
)
ALLOW_BUCKET = (
    "Allow the role [role] this operation on the bucket, or fix the URI in data or checkpoint.uri; "
    "cloudtrain check JOB lists missing permissions."
)
REPLACE_INSTANCE = "The hardware is broken: submit again with checkpoint.resume: {run}, which takes another instance."
READ_FIRST_FAILURE = (
    "The rank or host that failed first left no trace: read the end of each host's log, and submit again."
)
