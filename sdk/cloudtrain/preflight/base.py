"""What a check is, what every check has at hand, and what is said when AWS does not answer."""

from __future__ import annotations

import queue
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

from cloudtrain.aws.errors import make_client
from cloudtrain.aws.retry import client_retries
from cloudtrain.planning.plan import Plan
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.bucket_owner import expect_owner
from cloudtrain_runtime.contract.redaction import redact

T = TypeVar("T")

CONNECT_SECONDS = 3
READ_SECONDS = 10
_ATTEMPTS = 3
_AT_ONCE = 10
_MESSAGE_CHARACTERS = 200

ACTIONS = {
    "GetCallerIdentity": "sts:GetCallerIdentity",
    "GetRole": "iam:GetRole",
    "SimulatePrincipalPolicy": "iam:SimulatePrincipalPolicy",
    "HeadBucket": "s3:ListBucket",
    "ListObjectsV2": "s3:ListBucket",
    "GetBucketLocation": "s3:GetBucketLocation",
    "GetBucketPolicy": "s3:GetBucketPolicy",
    "GetBucketEncryption": "s3:GetEncryptionConfiguration",
    "ListBuckets": "s3:ListAllMyBuckets",
    "ListRoles": "iam:ListRoles",
    "GetObject": "s3:GetObject",
    "ListServiceQuotas": "servicequotas:ListServiceQuotas",
    "ListAWSDefaultServiceQuotas": "servicequotas:ListAWSDefaultServiceQuotas",
    "ListTrainingJobs": "sagemaker:ListTrainingJobs",
    "DescribeTrainingJob": "sagemaker:DescribeTrainingJob",
    "DescribeJobQueues": "batch:DescribeJobQueues",
    "DescribeServiceEnvironments": "batch:DescribeServiceEnvironments",
    "DescribeSecret": "secretsmanager:DescribeSecret",
    "BatchGetImage": "ecr:BatchGetImage",
    "DescribeSubnets": "ec2:DescribeSubnets",
    "DescribeSecurityGroups": "ec2:DescribeSecurityGroups",
    "DescribeVpcEndpoints": "ec2:DescribeVpcEndpoints",
    "DescribeRouteTables": "ec2:DescribeRouteTables",
    "DescribeBudgets": "budgets:ViewBudget",
}
"""IAM action that each call needs. Names differ where AWS's Service Authorization Reference says so."""

_DENIED = (
    *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError"),
    *("UnauthorizedAccess", "403", "Forbidden", "AllAccessDisabled"),
)
_NOT_ACCEPTED = (
    *("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure", "InvalidToken", "InvalidSignatureException"),
)
_THROTTLED = ("Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown")

SIGN_IN_HINT = "sign in again: aws sso login, or aws configure"

_ROLE = re.compile(r"arn:(aws[\w-]*):iam::(\d{12}):role/((?:.*/)?)([\w+=,.@-]{1,64})")


class Result(StrEnum):
    """How a check ended. `unknown` is said as `could not check` and blocks nothing."""

    PASS = "pass"  # noqa: S105 (no password)
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Check:
    """One question asked of the account, and its answer.

    Attributes:
        name: What was checked, such as `role` or `data.train`.
        result: How it ended.
        detail: What was found, in one line.
        fix: What to type or where to click, or an empty string.
        warning: What a submit warns of although the check passed, or an empty string.
        is_shown: Whether a submit prints the detail although the check passed.
    """

    name: str
    result: Result
    detail: str
    fix: str = ""
    warning: str = ""
    is_shown: bool = False

    def to_json(self) -> dict[str, str]:
        """Return the object that `check --json` prints."""
        found = asdict(self)
        del found["is_shown"]
        return {**found, "result": str(self.result)}


def passed(name: str, detail: str, *, warning: str = "", is_shown: bool = False) -> Check:
    """Return a check that passed."""
    return Check(name, Result.PASS, detail, warning=warning, is_shown=is_shown)


def failed(name: str, detail: str, fix: str) -> Check:
    """Return a check that failed: the submit, or the job, would fail for certain."""
    return Check(name, Result.FAIL, detail, fix)


def unknown(name: str, detail: str, fix: str = "") -> Check:
    """Return a check that could not be made."""
    return Check(name, Result.UNKNOWN, detail, fix)


def command(*words: object) -> str:
    """Return a command that can be pasted into a shell."""
    return shlex.join(map(str, words))


class UnansweredError(Exception):
    """A check has no answer; says why and what would give it one."""

    def __init__(self, detail: str, fix: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.fix = fix


# ---------------------------------------------------------------- what every check has at hand


@dataclass(frozen=True)
class Role:
    """An execution role, read off its ARN. `path` ends with a slash where there is one."""

    partition: str
    account: str
    path: str
    name: str


class Account:
    """An account that is asked. Clients are made once and shared by the threads."""

    job = "*"
    """The job that is asked for in a role's trust, where it is known."""

    def __init__(self, settings: Settings, session: Any) -> None:
        self.settings = settings
        self.region = str(settings.region)
        self._session = session
        self._clients: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()

    def client(self, service: str, *, is_owned: bool = True) -> Any:
        """Return a client that gives up soon. Making one is not thread-safe in boto3; using one is.

        Args:
            service: AWS's name of it.
            is_owned: Whether S3 is to refuse our own bucket where it belongs to another account. The user's data may
                lie in a bucket that somebody else has shared.
        """
        with self._lock:
            if (service, is_owned) not in self._clients:
                from botocore.config import Config

                config = Config(
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    retries=client_retries(_ATTEMPTS),
                    max_pool_connections=2 * _AT_ONCE,
                )
                client = make_client(self._session, service, region_name=self.region, config=config)
                if service == "s3" and is_owned:
                    expect_owner(client, self.settings.bucket_owners.get)
                self._clients[service, is_owned] = client
            return self._clients[service, is_owned]

    @cached_property
    def caller(self) -> dict[str, str]:
        """Who asks: `Account` and `Arn`, as STS tells."""
        answer: dict[str, str] = self.client("sts").get_caller_identity()
        return answer

    @property
    def role_arn(self) -> str:
        """The execution role."""
        return str(self.settings.role)

    @cached_property
    def role(self) -> Role:
        """The execution role's parts.

        Raises:
            UnansweredError: it is no ARN of a role; the check of the role says so.
        """
        match = _ROLE.fullmatch(self.role_arn)
        if match is None:
            raise UnansweredError("needs the ARN of a role")
        return Role(*match.groups())


class CheckContext(Account):
    """What the checks of a plan ask with."""

    def __init__(self, plan: Plan, settings: Settings, session: Any) -> None:
        super().__init__(settings, session)
        self.plan = plan
        self.job = plan.run

    @property
    def role_arn(self) -> str:
        """The execution role that the plan names."""
        return str(self.plan.request["RoleArn"])

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The type asked for, or those preferred, in their order."""
        resources = self.plan.request["ResourceConfig"]
        preferences = resources.get("InstancePreferences")
        if preferences:
            return tuple(preference["InstanceType"] for preference in preferences)
        return (str(resources["InstanceType"]),)


def bucket_region(context: Account, bucket: str, owner: Mapping[str, str] | None = None) -> str:
    """Return the region of a bucket. S3 tells it whoever asks; servers that do not tell it are asked again.

    Args:
        context: Whom to ask.
        bucket: Its name.
        owner: The argument that names its expected owner, where the client does not know it.
    """
    owner = owner or {}
    answer = context.client("s3").head_bucket(Bucket=bucket, **owner)
    if "BucketRegion" in answer:
        return str(answer["BucketRegion"])
    location = context.client("s3").get_bucket_location(Bucket=bucket, **owner)
    return str(location.get("LocationConstraint") or "us-east-1")


# ---------------------------------------------------------------- asking


@dataclass(frozen=True)
class CheckGroup:
    """What one thread asks. `names` are the checks that it answers, so that none is missing when it breaks off."""

    names: tuple[str, ...]
    ask: Callable[[Any], Iterable[Check]]

    def answer(self, context: Account) -> tuple[Check, ...]:
        """Ask; whatever goes wrong becomes `could not check` of the checks that are not answered yet."""
        checks: list[Check] = []
        try:
            checks.extend(self.ask(context))  # what was answered before an error stays
        except Exception as error:  # noqa: BLE001 (one check must not hide the others, not even by a bug of ours)
            detail, fix = describe_error(error)
            told = {check.name for check in checks}
            checks += [unknown(name, detail, fix) for name in self.names if name not in told]
        return tuple(checks)


def describe_error(error: Exception) -> tuple[str, str]:
    """Return why there is no answer, and what would give one."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    if isinstance(error, UnansweredError):
        return error.detail, error.fix
    if isinstance(error, ClientError):
        return _explain_refusal(error_code(error), error.operation_name, error.response["Error"].get("Message", ""))
    if isinstance(error, BotoCoreError):
        return f"no answer: {_first_line(str(error))}", "check the network, the region and AWS_ENDPOINT_URL"
    if isinstance(error, ValueError) and "endpoint" in str(error).lower():
        return f"no answer: {_first_line(str(error))}", "write AWS_ENDPOINT_URL as http://host:port"
    if isinstance(error, ResponseParserError):
        return "what answers does not know this call of AWS", "check AWS_ENDPOINT_URL"
    return f"a bug in cloudtrain: {type(error).__name__}: {_first_line(str(error))}", "please report it"


def _explain_refusal(code: str, operation: str, message: str) -> tuple[str, str]:
    action = ACTIONS.get(operation, operation)
    if code in _DENIED:
        return f"these credentials may not do {action}", f"allow {action} to the credentials that run this"
    if code in _NOT_ACCEPTED:
        return f"AWS does not accept the credentials: {code}", SIGN_IN_HINT
    if code in _THROTTLED:
        return f"AWS answers that it is asked too often ({action})", "ask again in a minute"
    if code.startswith("5") and code.isdigit():  # no error of AWS's own: a page of some server on the way
        return f"{action}: the server answers {code}", "ask again in a minute"
    return f"{action}: AWS says {code}: {_first_line(message)}", ""


def error_code(error: Any) -> str:
    """Return AWS's code of a ClientError."""
    return str(error.response.get("Error", {}).get("Code", ""))


def is_denied(error: Any) -> bool:
    """Whether the caller lacks a permission."""
    return error_code(error) in _DENIED


def has_invalid_credentials(error: Any) -> bool:
    """Whether the credentials themselves are refused, so that every call will be."""
    return error_code(error) in _NOT_ACCEPTED


def _first_line(text: str) -> str:
    """Return a text as one line, cut where it grows long."""
    line = redact(" ".join(text.split()))
    return line if len(line) <= _MESSAGE_CHARACTERS else line[:_MESSAGE_CHARACTERS] + "..."


def run_concurrently(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls at the same time, at most ten at once; return their results in order.

    Threads are daemons: a call that hangs must not keep the command from ending.

    Raises:
        Exception: the first error in order, after all calls have ended.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(calls)):
        todo.put(index)
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}

    def work() -> None:
        while True:
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            try:
                results[index] = calls[index]()
            except Exception as error:  # noqa: BLE001 (raised again in the thread that asked)
                errors[index] = error

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(calls)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(calls))]
