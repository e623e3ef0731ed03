"""Classes of failures and their descriptions."""

from __future__ import annotations

import enum
from typing import Self


class FailureClass(enum.StrEnum):
    """The kind of failure, which decides who can fix it. `words` describes it."""

    words: str

    def __new__(cls, value: str, words: str) -> Self:
        """Return the member of a value."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.words = words
        return member

    USER_CODE = "user_code", "an error in the job's code"
    OUT_OF_MEMORY = "out_of_memory", "out of GPU memory"
    HOST_MEMORY = "host_memory", "out of host memory"
    """Of an instance, its shared memory included."""
    KILLED = "killed", "a process was killed from outside"
    """By SIGKILL, without the kernel's word that it lacked memory."""
    NCCL = "nccl", "a network error between ranks"
    """NCCL, EFA, Gloo, rendezvous."""
    HANG = "hang", "a rank did not join a collective"
    DATA = "data", "an error in the data"
    S3_ACCESS = "s3_access", "no access to S3"
    IMAGE_PULL = "image_pull", "a fault of the container image"
    CAPACITY = "capacity", "no capacity for this instance type"
    QUOTA = "quota", "the account's quota is too small"
    IAM = "iam", "a permission is missing"
    SPOT = "spot", "AWS took the spot capacity away, or had none"
    TIME_LIMIT = "time_limit", "the time limit was reached"
    DEPENDENCY_INSTALL = "dependency_install", "a Python package is missing or broken"
    """It is missing, broken or cannot be installed."""
    DISK_FULL = "disk_full", "the disk is full"
    CHECKPOINT = "checkpoint", "a checkpoint cannot be used"
    SERVICE = "service", "a fault of SageMaker or its hardware"
    MACHINE = "machine", "this machine ended the run's supervisor"
    """Of a local run: by SIGKILL, for lack of memory, or at a restart."""
    UNKNOWN = "unknown", "unknown"

    @property
    def is_in_the_job(self) -> bool:
        """Whether the same code and job would fail again, so that a run must be submitted anew and not resumed."""
        return self in _IN_THE_JOB

    @property
    def is_installed(self) -> bool:
        """Whether the fault lies in what is installed, so that the line of the job's code that met it is right."""
        return self in (FailureClass.DEPENDENCY_INSTALL, FailureClass.IMAGE_PULL)


_IN_THE_JOB = frozenset(
    {
        FailureClass.USER_CODE,
        FailureClass.OUT_OF_MEMORY,
        FailureClass.HOST_MEMORY,
        FailureClass.HANG,
        FailureClass.DATA,
        FailureClass.IMAGE_PULL,
        FailureClass.DEPENDENCY_INSTALL,
        FailureClass.CHECKPOINT,
    }
)
