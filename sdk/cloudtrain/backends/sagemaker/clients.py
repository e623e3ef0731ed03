"""The boto3 session and clients of a backend."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from cloudtrain.aws.credential_errors import missing_region
from cloudtrain.aws.errors import aws_errors, make_client
from cloudtrain.aws.retry import client_retries
from cloudtrain.aws.session import make_session
from cloudtrain.errors import SettingsError
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.bucket_owner import expect_owner

if TYPE_CHECKING:
    from boto3.session import Session
    from types_boto3_logs import CloudWatchLogsClient
    from types_boto3_s3 import S3Client
    from types_boto3_sagemaker import SageMakerClient

_TIMEOUTS: Mapping[str, Mapping[str, Any]] = {"logs": {"connect_timeout": 10, "read_timeout": 30}}
"""Seconds. botocore's 60 s are too long for a log that is followed over a dead connection."""


class Clients:
    """Clients of AWS services, each created once, of a boto3 session; by default of one from the environment."""

    def __init__(self, settings: Settings, session: Session | None = None) -> None:
        self._settings = settings
        self._session = session
        self._clients: dict[str, Any] = {}
        # boto3 sessions are not thread-safe, clients are.
        self._lock = threading.RLock()

    def session(self) -> Session:
        """Return the boto3 session.

        Raises:
            UntrustedSettingsError: A file beside the job gives a role, bucket or key that the user has not agreed to.
        """
        self._settings.require_trust()
        if self._session is None:
            with aws_errors("read the AWS configuration"):
                self._session = make_session(region_name=self._settings.region)
        return self._session

    @overload
    def client(self, service: Literal["s3"]) -> S3Client: ...
    @overload
    def client(self, service: Literal["sagemaker"]) -> SageMakerClient: ...
    @overload
    def client(self, service: Literal["logs"]) -> CloudWatchLogsClient: ...
    @overload
    def client(self, service: str) -> Any: ...
    def client(self, service: str) -> Any:
        """Return the client of a service.

        Raises:
            SettingsError: no region is set.
        """
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._make(service)
            return self._clients[service]

    def _make(self, service: str) -> Any:
        from botocore.config import Config

        if self._settings.region is None:
            problem = missing_region()
            raise SettingsError(problem.message, problem.hint)
        with aws_errors(f"reach {service}"):
            config = Config(retries=client_retries(), **_TIMEOUTS.get(service, {}))
            client = make_client(self.session(), service, config=config)
        if service == "s3":
            # All buckets belong to the account of the role, because CreateTrainingJob takes no role of another account.
            # Asking STS would need one more endpoint, which a private network may not reach.
            expect_owner(client, lambda _: self._settings.account)
        return client
