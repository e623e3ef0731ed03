"""Classes of failures and their descriptions."""

from __future__ import annotations

import enum


class FailureClass(enum.StrEnum):
    """The kind of failure, which decides who can fix it."""

    USER_CODE = "user_code"
    OUT_OF_MEMORY = "out_of_memory"
    """Of a GPU."""
    HOST_MEMORY = "host_memory"
    """Of an instance, its shared memory included."""
    NCCL = "nccl"
    """The network between ranks: NCCL, EFA, Gloo, rendezvous."""
    HANG = "hang"
    """A rank did not join a collective."""
    DATA = "data"
    S3_ACCESS = "s3_access"
    IMAGE_PULL = "image_pull"
    CAPACITY = "capacity"
    QUOTA = "quota"
    IAM = "iam"
    SPOT = "spot"
    TIME_LIMIT = "time_limit"
    DEPENDENCY_INSTALL = "dependency_install"
    """A Python package is missing, broken or cannot be installed."""
    DISK_FULL = "disk_full"
    CHECKPOINT = "checkpoint"
    SERVICE = "service"
    """SageMaker itself, or the hardware."""
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The class in words."""
        return _WORDS[self]


_WORDS = {
    FailureClass.USER_CODE: "the job's own code",
    FailureClass.OUT_OF_MEMORY: "out of GPU memory",
    FailureClass.HOST_MEMORY: "out of host memory",
    FailureClass.NCCL: "the network between ranks",
    FailureClass.HANG: "a rank did not join a collective",
    FailureClass.DATA: "the data",
    FailureClass.S3_ACCESS: "access to S3",
    FailureClass.IMAGE_PULL: "the container image",
    FailureClass.CAPACITY: "no capacity for this instance type",
    FailureClass.QUOTA: "the account's quota",
    FailureClass.IAM: "permissions of the role",
    FailureClass.SPOT: "spot capacity was taken away or did not come",
    FailureClass.TIME_LIMIT: "the time limit",
    FailureClass.DEPENDENCY_INSTALL: "a Python package",
    FailureClass.DISK_FULL: "a full disk",
    FailureClass.CHECKPOINT: "the checkpoint",
    FailureClass.SERVICE: "SageMaker or its hardware",
    FailureClass.UNKNOWN: "unknown",
}
