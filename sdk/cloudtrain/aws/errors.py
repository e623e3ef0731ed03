"""Clients of AWS that detect truncated responses, and translation of botocore's exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.credential_errors import Problem, find_credential_problem, missing_credentials
from cloudtrain.aws.iam_actions import ACTIONS
from cloudtrain.errors import CloudError, CredentialsError, NoCapacityError, UnreachableError
from cloudtrain.support.proxies import proxy_variable_for
from cloudtrain_runtime.contract.aws_codes import DENIED, MISSING_BUCKET, TRANSIENT, code_of

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


def make_client(session: Any, service: str, **options: Any) -> Any:
    """Return a boto3 client that detects truncated responses and retries them.

    botocore does not compare the length of a response with Content-Length, and parses half a JSON document as a
    response without fields. The bodies of S3 objects are streams, which botocore does check.
    """
    client = session.client(service, **options)
    transport = client._endpoint.http_session  # noqa: SLF001 (no hook gets the bytes of a response and can retry)
    send = transport.send

    def send_and_check(request: Any) -> Any:
        from botocore.exceptions import ConnectionClosedError

        response = send(request)
        content_length = response.headers.get("content-length", "")
        has_body = not request.stream_output and request.method != "HEAD"
        if has_body and content_length.isdigit() and len(response.content) < int(content_length):
            raise ConnectionClosedError(endpoint_url=request.url)
        return response

    transport.send = send_and_check
    return client


@contextlib.contextmanager
def aws_errors(action: str, hints: Mapping[str, str] | None = None) -> Iterator[None]:
    """Translate botocore's exceptions into `CloudError`, with the action, AWS's message and a hint.

    Args:
        action: The action, such as `read the log`.
        hints: Hints by error code, which take precedence over the general ones.
    """
    try:
        yield
    except Exception as error:
        cause = explain(error, hints)
        if cause is None:
            raise
        raise cause.kind(f"could not {action}: {cause.message}", cause.hint) from None


def explain(error: Exception, hints: Mapping[str, str] | None = None) -> Problem | None:
    """Return why a call of AWS has failed, or None for an error with another cause.

    Args:
        error: The exception of botocore or boto3.
        hints: Hints by error code, which take precedence over the general ones.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    # boto3's transfers wrap the exceptions of botocore.
    cause = error.__context__ if isinstance(error, Boto3Error) else error
    if cause is not None and (problem := find_credential_problem(cause)):
        return problem
    if isinstance(cause, ClientError):
        return _explain_response(cause, hints or {})
    if isinstance(error, BotoCoreError | Boto3Error | ResponseParserError):
        return _explain_connection(error)
    if isinstance(error, ValueError) and "endpoint" in str(error).lower():
        return Problem(str(error), "write AWS_ENDPOINT_URL as http://host:port", CloudError)
    return None


def action_of(error: Any) -> str:
    """Return the IAM action that the call of a ClientError needs, or the operation if the action is unknown."""
    return ACTIONS.get(error.operation_name, str(error.operation_name))


class SuppressCodes:
    """Suppresses botocore's ClientError with one of these error codes, as `contextlib.suppress` does."""

    def __init__(self, codes: Collection[str]) -> None:
        self._codes = codes

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        from botocore.exceptions import ClientError

        return isinstance(error, ClientError) and code_of(error) in self._codes


_NETWORK_HINT = "check the network, the region and AWS_ENDPOINT_URL"
_SERVER_ERROR = 500


def _explain_response(error: ClientError, hints: Mapping[str, str]) -> Problem:
    code = code_of(error)
    message = str(error.response.get("Error", {}).get("Message", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    hint = ""
    kind: type[CloudError] = CloudError
    if code in TRANSIENT or status >= _SERVER_ERROR:
        hint = "try again in a minute"
        kind = UnreachableError
    elif code in DENIED:
        hint = _grant(error)
    elif code in MISSING_BUCKET:
        hint = "create the bucket, or set CLOUDTRAIN_BUCKET to one that exists"
    elif code == "ResourceLimitExceeded":
        hint = "ask for a higher quota of this instance type in the Service Quotas console"
        kind = NoCapacityError
    said = f"AWS says {code}: {message}"
    if code.startswith("5") and code.isdigit():
        # The response of a proxy or another server, which has no code of AWS.
        said = f"the server returned status {code}"
    return Problem(said, hints.get(code, hint), kind)


def _grant(error: ClientError) -> str:
    if error.operation_name in ACTIONS:
        return f"grant {action_of(error)} to these credentials"
    return "the credentials lack this permission: compare their policy with docs/reference/permissions.md"


def _explain_connection(error: Exception) -> Problem:
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    if isinstance(error, exceptions.ParamValidationError):
        return Problem(
            str(error), "this boto3 is too old for it: pip install --upgrade boto3", CloudError
        )
    if isinstance(error, ResponseParserError):
        return Problem(
            f"the response is not one of AWS: {error}", _connection_hint(error), UnreachableError
        )
    # botocore has two trees: a connection that is not made (DNS, refused, timeout) and one that is lost.
    lost = exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError
    kind = UnreachableError if isinstance(error, lost) else CloudError
    return Problem(_describe_connection(error), _connection_hint(error), kind)


def _describe_connection(error: Exception) -> str:
    """Return why AWS was not reached; of a proxy that has refused, also its answer."""
    from botocore.exceptions import ProxyConnectionError

    cause = getattr(error, "kwargs", {}).get("error")
    answer = getattr(cause, "original_error", None)
    if isinstance(error, ProxyConnectionError) and type(answer) is OSError:
        return f"{error} ({answer})"
    return str(error)


def _connection_hint(error: Exception) -> str:
    """Return what to check after an error of botocore that is no answer of AWS."""
    # An error of the proxy itself does not name the address of AWS.
    url = str(getattr(error, "kwargs", {}).get("endpoint_url") or "https://amazonaws.com")
    variable = proxy_variable_for(url)
    if not variable:
        return _NETWORK_HINT
    return (
        f"{_NETWORK_HINT}; requests go through the proxy of {variable}: correct it, list hosts that need no proxy in "
        "NO_PROXY, or name the file of its certificate authority in AWS_CA_BUNDLE"
    )


def missing_credentials_error() -> CredentialsError:
    """Return the error for missing credentials."""
    problem = missing_credentials()
    return CredentialsError(problem.message, problem.hint)
