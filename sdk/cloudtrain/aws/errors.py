"""What every call to AWS shares: what went wrong, told as ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import CloudError, NoCapacityError, UnreachableError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


def make_client(session: Any, service: str, **options: Any) -> Any:
    """Return a boto3 client that notices an answer of which only a part has arrived, and asks again.

    botocore does not compare the length of an answer with what was announced, and reads half a JSON document as an
    answer without fields. S3's bodies are streams, which botocore does check.
    """
    client = session.client(service, **options)
    transport = client._endpoint.http_session  # noqa: SLF001 (no hook has the answer's bytes and may ask for a retry)
    send = transport.send

    def send_whole(request: Any) -> Any:
        from botocore.exceptions import ConnectionClosedError

        answer = send(request)
        announced = answer.headers.get("content-length", "")
        is_read = not request.stream_output and request.method != "HEAD"
        if is_read and announced.isdigit() and len(answer.content) < int(announced):
            raise ConnectionClosedError(endpoint_url=request.url)
        return answer

    transport.send = send_whole
    return client


@contextlib.contextmanager
def aws_errors(action: str, hints: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn botocore's exceptions into ours: what was tried, what AWS said, what to do.

    Args:
        action: What is tried, such as `read the log`.
        hints: What to do by error code, before what is generally done.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ValueError as error:
        if "endpoint" not in str(error).lower():
            raise
        raise CloudError(f"could not {action}: {error}", "write AWS_ENDPOINT_URL as http://host:port") from None
    except (ClientError, BotoCoreError, Boto3Error, ResponseParserError) as error:
        # boto3's transfers wrap what AWS said.
        cause = error.__context__ if isinstance(error, Boto3Error) else error
        if isinstance(cause, ClientError):
            raise _refused(action, cause, hints or {}) from None
        raise _unreachable(action, error) from None


_NO_ROOM = ("ResourceLimitExceeded",)
_HINTS: dict[str, str] = {
    "AccessDenied": "the credentials may not do this: compare their policy with what cloudtrain calls",
    "AccessDeniedException": "the credentials may not do this: compare their policy with what cloudtrain calls",
    "NoSuchBucket": "create the bucket, or set CLOUDTRAIN_BUCKET to one that exists",
    "ResourceLimitExceeded": "ask for a higher quota of this instance type in the Service Quotas console",
    "ThrottlingException": "too many calls at once: try again in a minute",
    "ExpiredToken": "sign in again",
    "ExpiredTokenException": "sign in again",
    "InvalidClientTokenId": "the access key is unknown: check the profile",
    "UnrecognizedClientException": "the access key is unknown: check the profile",
}


_PASSING = frozenset(
    {
        *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException"),
        *("TooManyRequestsException", "RequestLimitExceeded", "SlowDown", "ServiceUnavailable", "InternalFailure"),
        *("ServiceUnavailableException", "RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete"),
        # A clock that is wrong is mostly one that is just being set.
        *("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"),
    }
)
_SERVER_ERROR = 500


def _refused(action: str, error: ClientError, hints: Mapping[str, str]) -> CloudError:
    details = error.response.get("Error", {})
    code, message = str(details.get("Code", "")), str(details.get("Message", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    is_clock = code == "InvalidSignatureException" and ("expired" in message or "not yet current" in message)
    kind = UnreachableError if code in _PASSING or status >= _SERVER_ERROR or is_clock else CloudError
    kind = NoCapacityError if code in _NO_ROOM else kind
    return kind(f"could not {action}: AWS says {code}: {message}", {**_HINTS, **hints}.get(code, ""))


def _unreachable(action: str, error: Exception) -> CloudError:
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return missing_credentials_error()
    passing = (
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        exceptions.CredentialRetrievalError,
        ResponseParserError,
    )
    kind = UnreachableError if isinstance(error, passing) else CloudError
    return kind(f"could not {action}: {error}", "check the network, the region and AWS_ENDPOINT_URL")


def configured_region() -> str | None:
    """Return the region of AWS's own configuration, such as that of AWS_PROFILE; None where it cannot be read."""
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        found: str | None = boto3.Session().region_name
    except BotoCoreError:  # whoever asks for credentials tells
        return None
    return found


def missing_credentials_error() -> CloudError:
    """Return what is said where there are no credentials."""
    return CloudError(
        "there are no AWS credentials",
        "sign in (aws configure, aws sso login, or AWS_PROFILE). To run on this machine without an account: --local",
    )
