"""Clients of AWS that detect truncated responses, and translation of botocore's exceptions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.credential_errors import find_credential_problem, missing_credentials
from cloudtrain.errors import CloudError, CredentialsError, NoCapacityError, UnreachableError
from cloudtrain.support.proxies import proxy_variable_for, proxy_variables

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
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error, ResponseParserError) as error:
        # boto3's transfers wrap the exceptions of botocore.
        cause = error.__context__ if isinstance(error, Boto3Error) else error
        if cause is not None and (problem := find_credential_problem(cause)):
            raise problem.kind(f"could not {action}: {problem.message}", problem.hint) from None
        if isinstance(cause, ClientError):
            raise _refused(action, cause, hints or {}) from None
        raise _unreachable(action, error) from None
    except (OSError, ValueError, RuntimeError) as error:
        if problem := find_credential_problem(error):
            raise problem.kind(f"could not {action}: {problem.message}", problem.hint) from None
        if not isinstance(error, ValueError) or "endpoint" not in str(error).lower():
            raise
        raise CloudError(
            f"could not {action}: {error}", "set AWS_ENDPOINT_URL to http://host:port"
        ) from None


class SuppressCodes:
    """Suppresses botocore's ClientError with one of these error codes, as `contextlib.suppress` does."""

    def __init__(self, codes: Collection[str]) -> None:
        self._codes = codes

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        from botocore.exceptions import ClientError

        return isinstance(error, ClientError) and error.response["Error"]["Code"] in self._codes


_NETWORK_HINT = "check the network, the region and AWS_ENDPOINT_URL"
_NO_PERMISSION = (
    "the credentials lack this permission: compare their policy with docs/reference/permissions.md"
)
_HINTS: dict[str, str] = {
    "AccessDenied": _NO_PERMISSION,
    "AccessDeniedException": _NO_PERMISSION,
    "NoSuchBucket": "create the bucket, or set CLOUDTRAIN_BUCKET to one that exists",
    "ResourceLimitExceeded": "ask for a higher quota of this instance type in the Service Quotas console",
    "ThrottlingException": "too many calls at once: try again in a minute",
}


_TRANSIENT_CODES = frozenset(
    {
        *(
            "Throttling",
            "ThrottlingException",
            "ThrottledException",
            "RequestThrottled",
            "RequestThrottledException",
        ),
        *(
            "TooManyRequestsException",
            "RequestLimitExceeded",
            "SlowDown",
            "ServiceUnavailable",
            "InternalFailure",
        ),
        *(
            "ServiceUnavailableException",
            "RequestTimeout",
            "RequestTimeoutException",
            "PriorRequestNotComplete",
        ),
    }
)
_SERVER_ERROR = 500


def _refused(action: str, error: ClientError, hints: Mapping[str, str]) -> CloudError:
    details = error.response.get("Error", {})
    code, message = str(details.get("Code", "")), str(details.get("Message", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    kind = CloudError
    if code in _TRANSIENT_CODES or status >= _SERVER_ERROR:
        kind = UnreachableError
    elif code == "ResourceLimitExceeded":
        kind = NoCapacityError
    return kind(
        f"could not {action}: AWS says {code}: {message}", {**_HINTS, **hints}.get(code, "")
    )


def _unreachable(action: str, error: Exception) -> CloudError:
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    if isinstance(error, exceptions.ParamValidationError):
        return CloudError(
            f"could not {action}: {error}",
            "this boto3 is too old for it: pip install --upgrade boto3",
        )
    # botocore has two trees: a connection that is not made (DNS, refused, timeout) and one that is lost.
    lost = (
        exceptions.ConnectionError
        | exceptions.HTTPClientError
        | exceptions.IncompleteReadError
        | ResponseParserError
    )
    kind = UnreachableError if isinstance(error, lost) else CloudError
    return kind(f"could not {action}: {describe_connection(error)}", connection_hint(error))


def describe_connection(error: Exception) -> str:
    """Return why AWS was not reached; of a proxy that has refused, also its answer."""
    from botocore.exceptions import ProxyConnectionError

    cause = getattr(error, "kwargs", {}).get("error")
    answer = getattr(cause, "original_error", None)
    if isinstance(error, ProxyConnectionError) and type(answer) is OSError:
        return f"{error} ({answer})"
    return str(error)


def connection_hint(error: Exception) -> str:
    """Return what to check after an error of botocore that is no answer of AWS."""
    from botocore import exceptions

    fields = getattr(error, "kwargs", {})
    if isinstance(error, exceptions.ProxyConnectionError):
        names = " and ".join(proxy_variables(os.environ, fields["proxy_url"]))
        if names:
            return f"the proxy is that of {names}: correct it, or list hosts that need no proxy in NO_PROXY"
    variable = proxy_variable_for(str(fields.get("endpoint_url", "")))
    if not variable:
        return _NETWORK_HINT
    if isinstance(error, exceptions.SSLError):
        return (
            f"requests go through the proxy of {variable}; if it replaces certificates, name the file of its "
            "certificate authority in AWS_CA_BUNDLE"
        )
    return f"{_NETWORK_HINT}; requests go through the proxy of {variable}"


def missing_credentials_error() -> CredentialsError:
    """Return the error for missing credentials."""
    problem = missing_credentials()
    return CredentialsError(problem.message, problem.hint)
