"""The server behind one endpoint of the sandbox, with the model's package that AWS's image would run."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from cloudtrain.backends.container.filesystem import StagingError
from cloudtrain.backends.container.model_server import LocalServer
from cloudtrain.backends.sandbox.job_runner import RunnerEnvironment
from cloudtrain.backends.sandbox.own_folders import claim_folder
from cloudtrain.bundle.unpacking import UnpackError, unpack
from cloudtrain.errors import CloudtrainError
from cloudtrain.support.s3_uri import split_uri

_RESPONSE_SECONDS = 60.0
"""Longest time in which a container must answer. Source: API reference of InvokeEndpoint."""
_PACKAGE_FILES = ("config.yaml", "deployment.py", "serving.json")


class EndpointRunner:
    """Starts the server of an endpoint, and ends it.

    Attributes:
        status: The endpoint's status.
        reason: Why it has failed, or an empty string.
    """

    def __init__(self, name: str, variant: str, uri: str, shared: RunnerEnvironment) -> None:
        self.status = "Creating"
        self.reason = ""
        self._name = name
        self._variant = variant
        self._uri = uri
        self._shared = shared
        self._folder: Path | None = None
        self._server: LocalServer | None = None

    def start(self) -> None:
        """Start the server in a thread."""
        threading.Thread(target=self._run, name=f"endpoint-{self._name}", daemon=True).start()

    def delete(self, on_end: Callable[[], None]) -> None:
        """End the server in a thread, which then calls `on_end`."""
        self.status = "Deleting"
        threading.Thread(
            target=self._end, args=(on_end,), name=f"endpoint-{self._name}", daemon=True
        ).start()

    def invoke(self, body: bytes, content_type: str, accept: str) -> tuple[int, bytes, str]:
        """Send a request to the model; return status, content and type of its answer."""
        server = self._server
        if server is None:
            return 503, b'{"error": "the endpoint has no server"}', "application/json"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_RESPONSE_SECONDS)
        headers = {"Content-Type": content_type, "Accept": accept}
        try:
            connection.request("POST", "/invocations", body, headers)
            response = connection.getresponse()
            content = response.read()
        except OSError as error:
            return 504, str(error).encode(), "text/plain"
        finally:
            connection.close()
        self._count()
        return response.status, content, response.getheader("Content-Type") or accept

    def _run(self) -> None:
        try:
            folder = self._folder = claim_folder(self._shared.endpoints / self._name)
            package = folder / "model"
            self._fetch(folder, package)
            if self._shared.is_ending.is_set():
                return
            self._server = LocalServer(package, folder / "server.log")
            self._server.wait_until_ready()
        except (CloudtrainError, StagingError, UnpackError, OSError) as error:
            self.reason = str(error)
        except Exception as error:  # noqa: BLE001 (of boto3's client, whose errors have no common base)
            self.reason = f"Failed to download model data: {error}"
        if self.reason and self._server is not None:
            self._server.stop()
        self.status = "Failed" if self.reason else "InService"

    def _fetch(self, folder: Path, package: Path) -> None:
        if not self._uri:
            raise StagingError(
                "cloudtrain sandbox: a model needs ModelDataUrl with a package of cloudtrain deploy"
            )
        package.mkdir(parents=True)
        archive = folder / "model.tar.gz"
        bucket, key = split_uri(self._uri)
        self._shared.s3.download_file(bucket, key, str(archive))
        unpack(archive, package)
        missing = [name for name in _PACKAGE_FILES if not (package / name).is_file()]
        if missing:
            lacking = " and no ".join(missing)
            raise StagingError(
                f"cloudtrain sandbox: {self._uri} has no {lacking}; only packages of cloudtrain deploy run here"
            )

    def _end(self, on_end: Callable[[], None]) -> None:
        if self._server is not None:
            self._server.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        on_end()

    def _count(self) -> None:
        """Count the invocation in CloudWatch, as SageMaker does."""
        dimensions = [
            {"Name": "EndpointName", "Value": self._name},
            {"Name": "VariantName", "Value": self._variant},
        ]
        datum = {
            "MetricName": "Invocations",
            "Dimensions": dimensions,
            "Value": 1.0,
            "Unit": "None",
        }
        with contextlib.suppress(OSError):
            self._shared.cloudwatch.put_metric_data(Namespace="AWS/SageMaker", MetricData=[datum])
