"""Translation of the errors of S3's clients into `S3Error`, whose message says what to do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from cloudtrain_runtime.contract import aws_codes
from cloudtrain_runtime.contract.aws_codes import any_of, code_of
from cloudtrain_runtime.s3.retry import is_container_endpoint

_DETAIL_CHARACTERS = 300
_DENIED = (
    "access is denied: the role needs s3:ListBucket on the bucket, s3:GetObject, s3:PutObject, s3:DeleteObject and"
    " s3:AbortMultipartUpload on the prefix, and the use of the bucket's key; or the bucket belongs to another account"
    " than the run's"
)
_LOST = "the connection was lost or could not be made: check the network and the endpoint"
_RENEWED_BY_ROLE = (
    "resume the run; if it fails again, check that the role exists and that SageMaker may assume it"
)
# Patterns of error codes, botocore's classes and the connector's messages; the first match counts.
# Credential errors have two messages: one for a machine, and one for a container whose endpoint
# provides the credentials.
_CREDENTIALS = (
    (
        r"CredentialRetrievalError",
        "the source of the credentials failed: check AWS_PROFILE, or sign in again",
        f"the container's credentials endpoint failed on every attempt: {_RENEWED_BY_ROLE}",
    ),
    (
        any_of(aws_codes.EXPIRED_CREDENTIALS)
        + r"|Expired|TOKEN_EXPIRED|RefreshRequired|SSOToken|UnauthorizedSSO",
        "the credentials have expired and could not be renewed: sign in again, or use a role, which renews itself",
        f"the credentials of the job's role have expired and could not be renewed: {_RENEWED_BY_ROLE}",
    ),
    (
        any_of(aws_codes.WRONG_KEY | aws_codes.WRONG_SIGNATURE),
        "the credentials are wrong: check AWS_PROFILE, or the keys in the environment",
        f"AWS does not accept the credentials of the job's role: {_RENEWED_BY_ROLE}",
    ),
    (
        r"NoCredentials|PartialCredentials|No signing credentials|CREDENTIALS|ProfileNotFound",
        "there are no credentials: give the job a role, or set AWS_PROFILE",
        "the container's credentials endpoint returns no credentials: give the job a role",
    ),
)
_SENTENCES = (
    (any_of(aws_codes.DENIED) + r"|Access Denied|KMS", _DENIED),
    (any_of(aws_codes.MISSING_BUCKET), "there is no such bucket: check its name"),
    (r"NoSuchUpload", "another client ended the upload: check the bucket's lifecycle rules"),
    (any_of(aws_codes.MISSING_OBJECT), "there is no such object (any more)"),
    (r"InvalidRange|\b416\b", "the object is shorter than expected"),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|IncorrectRegion|\b301\b",
        "the bucket is in another region: set AWS_DEFAULT_REGION to the bucket's region",
    ),
    (any_of(aws_codes.WRONG_TIME) + r"|TIME_SKEWED", "this machine's clock is wrong: set it"),
    (
        # S3 answers 503 when it limits the requests for a prefix.
        any_of(aws_codes.THROTTLED) + r"|[Tt]hrottl|SLOW_DOWN|ServiceUnavailable|\b503\b",
        "S3 throttled every attempt: save less often, or use more prefixes",
    ),
    (
        any_of(aws_codes.UNAVAILABLE) + r"|INTERNAL_ERROR",
        "S3 failed on every attempt: try again later",
    ),
    (
        r"BadDigest|[Cc]hecksum|CHECKSUM|IncompleteBody",
        "the data was corrupted in transit: try again",
    ),
    (
        r"EntityTooLarge|EntityTooSmall|InvalidPart",
        "S3 rejects a part of this size: this is a bug in cloudtrain",
    ),
    (
        any_of(aws_codes.TIMED_OUT)
        + r"|Connection|Endpoint|Timeout|TIMEOUT|SOCKET|AWS_IO|AWS_ERROR_HTTP|ResponseStreaming"
        + r"|IncompleteRead|Protocol|SSL|TLS|DNS",
        _LOST,
    ),
)
_CODE = re.compile(r"<Code>(\w+)</Code>")


class S3Error(OSError):
    """S3 rejected or failed an operation; the message says what to do."""


@contextlib.contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Translate errors of S3's clients into an `S3Error` that begins with the operation, such as `writing s3://bucket/key`."""
    try:
        yield
    except S3Error:
        raise
    except _client_errors() as error:
        raise S3Error(f"{doing}: {_sentence(error)}") from error


def is_credentials_error(error: S3Error) -> bool:
    """Return whether an error is about credentials."""
    return any(sentence in str(error) for _, *sentences in _CREDENTIALS for sentence in sentences)


def error_code(error: BaseException) -> str:
    """Return S3's code for an error, such as `NoSuchKey`, or an empty string."""
    if code := code_of(error):
        return code
    found = _CODE.search(str(error))
    return found[1] if found else ""


def retry_count(error: BaseException) -> int:
    """Return how often a client retried before this error."""
    response = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _client_errors() -> tuple[type[BaseException], ...]:
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return (BotoCoreError, ClientError, HTTPError, ConnectionError, TimeoutError)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    searched = f"{type(error).__name__} {error_code(error)} {text}"
    detail = f"({text[:_DETAIL_CHARACTERS]})"
    here = 1 if is_container_endpoint(os.environ) else 0
    of_credentials = [(pattern, texts[here]) for pattern, *texts in _CREDENTIALS]
    for pattern, sentence in (*of_credentials, *_SENTENCES):
        if re.search(pattern, searched):
            return f"{sentence} {detail}"
    return f"the S3 request failed {detail}"
