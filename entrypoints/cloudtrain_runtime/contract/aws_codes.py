"""Error codes of AWS by kind. The services spell the same refusal in different ways.

Where a response has no body, as that to a HEAD request, the client gives the HTTP status in place of a code.
"""

from __future__ import annotations

from typing import Any, Final

Codes = frozenset[str]

DENIED: Final[Codes] = frozenset(
    {
        "403",
        "AccessDenied",
        "AccessDeniedException",
        "AllAccessDisabled",
        "AuthorizationError",
        "Forbidden",
        "UnauthorizedAccess",
        "UnauthorizedOperation",
    }
)
"""The credentials are accepted, and lack a permission."""

EXPIRED_CREDENTIALS: Final[Codes] = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
)
WRONG_KEY: Final[Codes] = frozenset(
    {
        "AuthFailure",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "UnrecognizedClientException",
    }
)
WRONG_SIGNATURE: Final[Codes] = frozenset({"InvalidSignatureException", "SignatureDoesNotMatch"})
"""The secret key is wrong; or the clock, which only the message says."""
NOT_ACCEPTED: Final[Codes] = EXPIRED_CREDENTIALS | WRONG_KEY | WRONG_SIGNATURE
"""AWS does not accept the credentials, whatever they may do."""

WRONG_TIME: Final[Codes] = frozenset(
    {"RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed"}
)

NOT_FOUND_STATUS: Final[Codes] = frozenset({"404", "NotFound"})
"""S3's response to a HEAD request, which does not say whether the object or its bucket is missing."""
MISSING_BUCKET: Final[Codes] = frozenset({"NoSuchBucket"})
MISSING_OBJECT: Final[Codes] = frozenset({"NoSuchKey"}) | NOT_FOUND_STATUS

MISSING_IN_SAGEMAKER: Final[Codes] = frozenset(
    {"ResourceNotFound", "ResourceNotFoundException", "ValidationException"}
)
"""SageMaker's responses to a request that describes or deletes by a name that nothing has."""

CONDITION_NOT_MET: Final[Codes] = frozenset({"412", "PreconditionFailed"})
CONDITION_CONFLICT: Final[Codes] = frozenset({"409", "ConditionalRequestConflict"})
"""Another conditional write of the same object was in progress."""

THROTTLED: Final[Codes] = frozenset(
    {
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
UNAVAILABLE: Final[Codes] = frozenset(
    {
        "500",
        "502",
        "503",
        "504",
        "InternalError",
        "InternalFailure",
        "InternalServerError",
        "ServiceUnavailable",
        "ServiceUnavailableException",
    }
)
"""The service, or a proxy before it, has failed."""
TIMED_OUT: Final[Codes] = frozenset({"RequestTimeout", "RequestTimeoutException"})
"""The service has not received the request in time."""
TRANSIENT: Final[Codes] = THROTTLED | UNAVAILABLE | TIMED_OUT
"""The same request may succeed later."""


def code_of(error: BaseException) -> str:
    """Return AWS's code of a `ClientError` of botocore; empty for other exceptions."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    return str(response.get("Error", {}).get("Code", ""))


def any_of(codes: Codes) -> str:
    """Return a regular expression that finds one of these codes as a word of a text."""
    return rf"\b(?:{'|'.join(sorted(codes))})\b"
