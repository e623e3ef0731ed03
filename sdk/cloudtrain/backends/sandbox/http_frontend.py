"""WSGI application in front of moto: checks access, injects faults and serves training, tuning and service jobs."""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from cloudtrain.backends.sandbox.access import KEY_ISSUING_OPERATIONS, AccessControl, without_cors
from cloudtrain.backends.sandbox.batch_queues import PATHS, ServiceJobs
from cloudtrain.backends.sandbox.endpoint_operations import Endpoints
from cloudtrain.backends.sandbox.fault_injection import FaultInjector, FaultPlan
from cloudtrain.backends.sandbox.process import ACCOUNT
from cloudtrain.backends.sandbox.request_validation import ServiceError
from cloudtrain.backends.sandbox.resources import Operations
from cloudtrain.errors import UserError
from cloudtrain_runtime.contract.serving_config import MAX_REQUEST_BYTES
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_CHUNK_BYTES = 1 << 16
FAULTS_PATH = "/_cloudtrain/faults"
USER_AGENT = "cloudtrain-sandbox-service"
"""Marks the sandbox's own calls, which get no injected faults: in AWS they are not the user's calls either."""

_SAGEMAKER = "SageMaker."
_BATCH = "/batch/aws4_request"
"""Signature scope of requests to AWS Batch."""
_FORM = "application/x-www-form-urlencoded"
_JSON = "application/x-amz-json-1.1"

_INVOKE = "InvokeEndpoint"
_INVOCATION = re.compile(r"/endpoints/[A-Za-z0-9-]+/invocations")

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WsgiApplication = Callable[[Environ, StartResponse], Iterable[bytes]]

_OBJECT = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}
_BUCKET = {
    "GET": "ListObjects",
    "HEAD": "HeadBucket",
    "PUT": "CreateBucket",
    "DELETE": "DeleteBucket",
}
_UPLOADS = {
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("PUT", "partNumber"): "UploadPart",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("POST", "delete"): "DeleteObjects",
    ("GET", "location"): "GetBucketLocation",
}


class HttpFrontend:
    """Serves the requests of one account. moto serves SageMaker's operations that are not in `sagemaker`."""

    def __init__(
        self,
        moto: WsgiApplication,
        sagemaker: Operations,
        endpoints: Endpoints,
        faults: FaultInjector,
        batch: ServiceJobs,
        access: AccessControl,
    ) -> None:
        self._moto = moto
        self._sagemaker = sagemaker
        self._endpoints = endpoints
        self._batch = batch
        self._faults = faults
        self._access = access
        self._conditional_write = threading.Lock()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        reason = self._access.rejection_reason(environ)
        if reason:
            _discard_body(environ)
            code = "UnrecognizedClientException"
            s3_code = "InvalidAccessKeyId"
            return _refuse(environ, start_response, code, s3_code, reason, 403, 403)

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(status, without_cors(headers), *rest)

        return self._serve(environ, start)

    def _serve(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == FAULTS_PATH:
            return self._control_faults(environ, start_response)
        if USER_AGENT in environ.get("HTTP_USER_AGENT", ""):
            return self._moto(environ, start_response)
        operation = operation_of(environ)
        fault = self._faults.next_fault(operation)
        if fault.slow_seconds:
            time.sleep(fault.slow_seconds)
        if "throttle" in fault.kinds:
            return _refuse(environ, start_response, *_THROTTLED)
        if "errors" in fault.kinds:
            return _refuse(environ, start_response, *_INTERNAL_ERROR)
        response = self._dispatch(environ, start_response, operation)
        if fault.kinds:
            return _cut_connection(
                environ, list(response), keep=0.0 if "resets" in fault.kinds else 0.5
            )
        return response

    def _dispatch(
        self, environ: Environ, start_response: StartResponse, operation: str
    ) -> Iterable[bytes]:
        if operation == _INVOKE:
            return self._invoke(environ, start_response)
        is_batch = _is_batch(environ)
        is_sagemaker = environ.get("HTTP_X_AMZ_TARGET", "").startswith(_SAGEMAKER)
        if is_batch or (is_sagemaker and operation in self._sagemaker):
            try:
                document = load_json(_body(environ) or b"{}")
                if is_batch:
                    return _send(start_response, 200, self._batch.handle(operation, document))
                return _send(start_response, 200, self._sagemaker[operation](document))
            except ServiceError as error:
                return _send(start_response, 400, {"__type": error.code, "message": error.message})
            except (ValueError, TypeError, KeyError) as error:
                content = {"__type": "SerializationException", "message": str(error)}
                return _send(start_response, 400, content)
        return self._forward_to_moto(environ, start_response, operation)

    def _invoke(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Send a request to an endpoint's model, and its answer or a ModelError to the client."""
        name = str(environ["PATH_INFO"]).split("/")[2]
        content_type = environ.get("CONTENT_TYPE", "")
        accept = environ.get("HTTP_ACCEPT", "")
        body = _body(environ)
        if len(body) > MAX_REQUEST_BYTES:
            message = f"Body exceeds the limit of {MAX_REQUEST_BYTES} bytes"
            return _send_rest(start_response, 413, "ValidationError", {"Message": message})
        try:
            status, content, kind = self._endpoints.invoke(name, body, content_type, accept)
        except ServiceError as error:
            return _send_rest(start_response, 400, error.code, {"Message": error.message})
        if status != HTTPStatus.OK:
            text = content.decode("utf-8", "replace")
            message = f'Received client error ({status}) from primary with message "{text}".'
            original = {"Message": message, "OriginalStatusCode": status, "OriginalMessage": text}
            return _send_rest(start_response, 424, "ModelError", original)
        return _respond(start_response, 200, content, kind)

    def _forward_to_moto(
        self, environ: Environ, start_response: StartResponse, operation: str
    ) -> Iterable[bytes]:
        """Forward a request to moto; add the checks that moto lacks."""
        if environ.get("HTTP_X_AMZ_EXPECTED_BUCKET_OWNER", ACCOUNT) != ACCOUNT:
            return _refuse(environ, start_response, *_WRONG_OWNER)
        if operation == "PutObject" and (
            "HTTP_IF_NONE_MATCH" in environ or "HTTP_IF_MATCH" in environ
        ):
            # moto checks the condition and writes in two steps; in S3 both are one atomic step.
            with self._conditional_write:
                return list(self._moto(environ, start_response))
        response = self._moto(environ, start_response)
        if operation in KEY_ISSUING_OPERATIONS:
            response = list(response)
            self._access.accept_issued(b"".join(response))
        return response

    def _control_faults(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Replace the fault plan (PUT, JSON), or return its seed (GET)."""
        if environ["REQUEST_METHOD"] == "PUT":
            try:
                self._faults.set_plan(FaultPlan.from_document(load_json(_body(environ) or b"{}")))
            except (UserError, ValueError) as error:
                return _send(start_response, 400, {"message": str(error)})
        return _send(start_response, 200, {"seed": self._faults.plan.seed})


def operation_of(environ: Mapping[str, Any]) -> str:
    """Return AWS's name of the operation that a request calls."""
    target = str(environ.get("HTTP_X_AMZ_TARGET", ""))
    if target:
        return target.rpartition(".")[2]
    if _INVOCATION.fullmatch(str(environ["PATH_INFO"])) and environ["REQUEST_METHOD"] == "POST":
        return _INVOKE
    if _is_batch(environ):
        path = str(environ["PATH_INFO"])
        return PATHS.get(path, path.rpartition("/")[2])
    if environ.get("CONTENT_TYPE", "").startswith(_FORM):
        return parse_qs(_body(environ).decode("utf-8", "replace")).get("Action", ["?"])[0]
    return _s3_operation(environ)


def _s3_operation(environ: Mapping[str, Any]) -> str:
    method = str(environ["REQUEST_METHOD"])
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    for (verb, name), operation in _UPLOADS.items():
        if verb == method and name in query:
            return operation
    if "list-type" in query:
        return "ListObjectsV2"
    has_key = "/" in environ["PATH_INFO"].strip("/")
    if has_key and "HTTP_X_AMZ_COPY_SOURCE" in environ:
        return "CopyObject"
    return (_OBJECT if has_key else _BUCKET).get(method, method)


def _is_batch(environ: Mapping[str, Any]) -> bool:
    return _BATCH in str(environ.get("HTTP_AUTHORIZATION", ""))


def _body(environ: Any) -> bytes:
    """Return the body; rewind it for the next reader."""
    length = int(environ.get("CONTENT_LENGTH") or 0)
    data: bytes = environ["wsgi.input"].read(length) if length else b""
    environ["wsgi.input"] = io.BytesIO(data)
    return data


def _discard_body(environ: Environ) -> None:
    """Read and drop the body in chunks, so that the client can receive the response."""
    remaining_bytes = int(environ.get("CONTENT_LENGTH") or 0)
    while remaining_bytes > 0 and (
        chunk := environ["wsgi.input"].read(min(remaining_bytes, _CHUNK_BYTES))
    ):
        remaining_bytes -= len(chunk)
    environ["CONTENT_LENGTH"] = "0"


def _send(start_response: StartResponse, status: int, content: Mapping[str, Any]) -> list[bytes]:
    return _respond(start_response, status, dump_json(content).encode(), _JSON)


def _send_rest(
    start_response: StartResponse, status: int, code: str, content: Mapping[str, Any]
) -> list[bytes]:
    """Send an error of AWS's REST protocol with JSON."""
    return _respond(
        start_response,
        status,
        dump_json(content).encode(),
        "application/json",
        ("x-amzn-ErrorType", code),
    )


def _respond(
    start_response: StartResponse, status: int, body: bytes, kind: str, *headers: tuple[str, str]
) -> list[bytes]:
    common = [
        ("Content-Type", kind),
        ("Content-Length", str(len(body))),
        ("x-amzn-RequestId", "sandbox"),
    ]
    start_response(f"{status} {HTTPStatus(status).phrase}", [*common, *headers])
    return [body]


_THROTTLED = ("ThrottlingException", "SlowDown", "Rate exceeded", 400, 503)
_WRONG_OWNER = ("AccessDeniedException", "AccessDenied", "Access Denied", 400, 403)
_INTERNAL_ERROR = (
    "InternalFailure",
    "InternalError",
    "We encountered an internal error. Please try again.",
    500,
    500,
)


def _refuse(
    environ: Environ,
    start_response: StartResponse,
    code: str,
    s3_code: str,
    message: str,
    status: int,
    s3_status: int,
) -> Iterable[bytes]:
    """Send an error in the request's protocol. Read the body first, as AWS does."""
    if environ.get("HTTP_X_AMZ_TARGET") or _is_batch(environ):
        _body(environ)
        return _send(start_response, status, {"__type": code, "message": message})
    if environ.get("CONTENT_TYPE", "").startswith(_FORM):
        inner = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        text = f"<ErrorResponse>{inner}<RequestId>sandbox</RequestId></ErrorResponse>"
    else:
        status = s3_status
        text = f"<Error><Code>{s3_code}</Code><Message>{message}</Message><RequestId>sandbox</RequestId></Error>"
        _body(environ)
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else text.encode()
    return _respond(start_response, status, body, "text/xml")


def _cut_connection(environ: Environ, parts: list[bytes], *, keep: float) -> Iterator[bytes]:
    """Yield the given share of a response, then cut the connection."""
    body = b"".join(parts)
    if keep:
        yield body[: int(len(body) * keep)]
    connection: socket.socket = environ["werkzeug.socket"]
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("injected fault: connection cut")
