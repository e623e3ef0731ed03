"""Classes of failures. Their descriptions are in the table of titles."""

from __future__ import annotations

import enum

from cloudtrain.runs.titles import FAILURES


class FailureClass(enum.StrEnum):
    """The kind of failure, which decides who can fix it."""

    USER_CODE = "user_code"
    OUT_OF_MEMORY = "out_of_memory"
    HOST_MEMORY = "host_memory"
    """Of an instance, its shared memory included."""
    KILLED = "killed"
    """By SIGKILL, without the kernel's word that it lacked memory."""
    NCCL = "nccl"
    """NCCL, EFA, Gloo, rendezvous."""
    HANG = "hang"
    DATA = "data"
    S3_ACCESS = "s3_access"
    IMAGE_PULL = "image_pull"
    CAPACITY = "capacity"
    QUOTA = "quota"
    IAM = "iam"
    SPOT = "spot"
    TIME_LIMIT = "time_limit"
    DEPENDENCY_INSTALL = "dependency_install"
    """It is missing, broken or cannot be installed."""
    DISK_FULL = "disk_full"
    CHECKPOINT = "checkpoint"
    SERVICE = "service"
    MACHINE = "machine"
    """Of a local run: by SIGKILL, for lack of memory, or at a restart."""
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """What it is, in the words of every command and page."""
        return FAILURES[self]

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
