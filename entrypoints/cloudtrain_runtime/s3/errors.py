"""What S3 and its clients say went wrong, as one kind of error whose sentence says what to do."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator

from cloudtrain_runtime.s3.credentials import is_container_endpoint

_DETAIL_CHARACTERS = 300
_DENIED = (
    "access is denied: the role needs s3:ListBucket on the bucket, s3:GetObject, s3:PutObject, s3:DeleteObject and"
    " s3:AbortMultipartUpload on the prefix, and the use of the bucket's key; or the bucket belongs to another account"
    " than the run's"
)
_LOST = "the connection was lost or could not be made: check the network and the endpoint"
_RENEWED_BY_ROLE = "resume the run; if it fails again, check that the role exists and that SageMaker may assume it"
# Patterns of error codes, of botocore's classes and of the connector's texts; the first that is found counts. Where
# credentials are concerned: what to do on a machine, and what to do where a container's endpoint provides them.
_CREDENTIALS = (
    (
        r"CredentialRetrievalError",
        "the source of the credentials failed: check AWS_PROFILE, or sign in again",
        f"the container's credentials endpoint failed until the last attempt: {_RENEWED_BY_ROLE}",
    ),
    (
        r"Expired|TOKEN_EXPIRED|RefreshRequired|SSOToken|UnauthorizedSSO",
        "the credentials have expired and could not be renewed: sign in again, or use a role, which renews itself",
        f"the credentials of the job's role have expired and could not be renewed: {_RENEWED_BY_ROLE}",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|InvalidClientTokenId",
        "the credentials are wrong: check AWS_PROFILE, or the keys in the environment",
        f"AWS does not accept the credentials of the job's role: {_RENEWED_BY_ROLE}",
    ),
    (
        r"NoCredentials|PartialCredentials|No signing credentials|CREDENTIALS|ProfileNotFound",
        "there are no credentials: give the job a role, or set AWS_PROFILE",
        "the container's credentials endpoint gives no credentials: give the job a role",
    ),
)
_SENTENCES = (
    (
        r"AccessDenied|Access Denied|Forbidden|KMS|\b403\b",
        _DENIED,
    ),
    (r"NoSuchBucket", "there is no such bucket: check its name"),
    (r"NoSuchUpload", "the upload was ended by somebody else: check the bucket's lifecycle rules"),
    (r"NoSuchKey|\b404\b", "it is not there (any more)"),
    (r"InvalidRange|\b416\b", "it is shorter than it should be"),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|IncorrectRegion|\b301\b",
        "the bucket lies in another region: set AWS_DEFAULT_REGION to the bucket's",
    ),
    (r"RequestTimeTooSkewed|TIME_SKEWED", "this machine's clock is wrong: set it"),
    (
        r"SlowDown|[Tt]hrottl|RequestLimitExceeded|TooManyRequests|SLOW_DOWN|ServiceUnavailable|\b503\b",
        "S3 asked to slow down until the last attempt: save less often, or spread over more prefixes",
    ),
    (
        r"InternalError|INTERNAL_ERROR|InternalServerError|\b500\b|\b502\b|\b504\b",
        "S3 failed until the last attempt: try again later",
    ),
    (r"BadDigest|[Cc]hecksum|CHECKSUM|IncompleteBody", "the bytes were damaged on their way: try again"),
    (r"EntityTooLarge|EntityTooSmall|InvalidPart", "S3 does not take a part of this size: it is cloudtrain's mistake"),
    (
        r"Connection|Endpoint|Timeout|TIMEOUT|SOCKET|AWS_IO|AWS_ERROR_HTTP|ResponseStreaming|IncompleteRead|Protocol|SSL|TLS|DNS",
        _LOST,
    ),
)
_CODE = re.compile(r"<Code>(\w+)</Code>")


class S3Error(OSError):
    """What S3 refuses or cannot do; the message says what to do about it."""


@contextlib.contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn the errors of S3's clients into an `S3Error`.

    Args:
        doing: What is being done, such as `writing s3://bucket/key`.

    Raises:
        S3Error: in place of what a client raises.
    """
    try:
        yield
    except S3Error:
        raise
    except _client_errors() as error:
        raise S3Error(f"{doing}: {_sentence(error)}") from error


def is_credentials_error(error: S3Error) -> bool:
    """Tell whether other credentials could help."""
    return any(sentence in str(error) for _, *sentences in _CREDENTIALS for sentence in sentences)


def is_recognized(error: S3Error) -> bool:
    """Tell whether the cause was recognized."""
    return is_credentials_error(error) or any(sentence in str(error) for _, sentence in _SENTENCES)


def error_code(error: BaseException) -> str:
    """Return S3's code for an error, such as `NoSuchKey`, or an empty string."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    found = _CODE.search(str(error))
    return found[1] if found else ""


def retry_count(error: BaseException) -> int:
    """Return how often a client has tried again before this error."""
    response = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _client_errors() -> tuple[type[BaseException], ...]:
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    errors: tuple[type[BaseException], ...] = (BotoCoreError, ClientError, HTTPError, ConnectionError, TimeoutError)
    connector = sys.modules.get("s3torchconnectorclient")
    return (*errors, connector.S3Exception) if connector else errors


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    searched = f"{type(error).__name__} {error_code(error)} {text}"
    detail = f"({text[:_DETAIL_CHARACTERS]})"
    here = 1 if is_container_endpoint(os.environ) else 0
    for pattern, sentence in (*((pattern, texts[here]) for pattern, *texts in _CREDENTIALS), *_SENTENCES):
        if re.search(pattern, searched):
            return f"{sentence} {detail}"
    return f"S3 cannot do this {detail}"
