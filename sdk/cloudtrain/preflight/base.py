"""Checks, the AWS account that they query, and descriptions of AWS errors."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from cloudtrain.aws.credential_errors import find_credential_problem
from cloudtrain.aws.errors import SuppressCodes, action_of, explain, make_client
from cloudtrain.aws.retry import client_retries
from cloudtrain.job.sections.cluster import Choice
from cloudtrain.planning.plan import Plan
from cloudtrain.settings.settings import Settings
from cloudtrain.support.aws_names import ROLE_ARN
from cloudtrain.support.checks import Check, unknown
from cloudtrain_runtime.contract.aws_codes import DENIED, MISSING_IN_SAGEMAKER, code_of
from cloudtrain_runtime.contract.bucket_owner import expect_owner
from cloudtrain_runtime.contract.redaction import redact

if TYPE_CHECKING:
    from boto3.session import Session
    from types_boto3_s3 import S3Client
    from types_boto3_sagemaker import SageMakerClient

S = TypeVar("S")
T = TypeVar("T")

CONNECT_SECONDS = 3
READ_SECONDS = 10
_ATTEMPTS = 3
_MAX_THREADS = 10
_MAX_MESSAGE_CHARACTERS = 200


def command(*words: object) -> str:
    """Return a shell command with quoted words."""
    return shlex.join(map(str, words))


class UnansweredError(Exception):
    """A check has no answer. `detail` says why, `fix` how to get one."""

    def __init__(self, detail: str, fix: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.fix = fix


@dataclass(frozen=True)
class Role:
    """Parts of an execution role's ARN. `path` is empty or ends with a slash."""

    partition: str
    account: str
    path: str
    name: str

    def arn(self, service: str, region: str, resource: str) -> str:
        """Return the ARN of a resource in the role's account."""
        return f"arn:{self.partition}:{service}:{region}:{self.account}:{resource}"


class Account:
    """An AWS account that checks query. Threads share its clients."""

    job = "*"
    """Name of the job for conditions of trust policies; `*` if unknown."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self.settings = settings
        self.region = str(settings.region)
        self._session = session
        self._clients: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()

    @overload
    def client(self, service: Literal["s3"], *, is_owned: bool = ...) -> S3Client: ...
    @overload
    def client(self, service: Literal["sagemaker"], *, is_owned: bool = ...) -> SageMakerClient: ...
    @overload
    def client(self, service: str, *, is_owned: bool = ...) -> Any: ...
    def client(self, service: str, *, is_owned: bool = True) -> Any:
        """Return a client with short timeouts. In boto3 only the creation of a client is not thread-safe.

        Args:
            service: AWS's name of the service.
            is_owned: Whether S3 must reject the settings' bucket if it belongs to another account. Buckets of the
                user's data may belong to other accounts.
        """
        with self._lock:
            if (service, is_owned) not in self._clients:
                from botocore.config import Config

                config = Config(
                    connect_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    retries=client_retries(_ATTEMPTS),
                    max_pool_connections=2 * _MAX_THREADS,
                )
                client = make_client(self._session, service, region_name=self.region, config=config)
                if service == "s3" and is_owned:
                    expect_owner(client, self.settings.bucket_owners.get)
                self._clients[service, is_owned] = client
            return self._clients[service, is_owned]

    @cached_property
    def caller(self) -> dict[str, str]:
        """`Account` and `Arn` of the credentials, from STS."""
        identity: dict[str, str] = self.client("sts").get_caller_identity()
        return identity

    @property
    def role_arn(self) -> str:
        """ARN of the execution role."""
        return str(self.settings.role)

    @cached_property
    def role(self) -> Role:
        """Parts of the execution role's ARN.

        Raises:
            UnansweredError: The ARN is not a role's; the check of the role reports that.
        """
        match = ROLE_ARN.fullmatch(self.role_arn)
        if match is None:
            raise UnansweredError("needs the ARN of a role")
        return Role(*match.groups())


class CheckContext(Account):
    """The account and the plan that checks need."""

    def __init__(self, plan: Plan, settings: Settings, session: Session) -> None:
        super().__init__(settings, session)
        self.plan = plan
        self.job = plan.run
        self._training_plans: dict[str, Future[Mapping[str, Any] | None]] = {}

    @property
    def role_arn(self) -> str:
        """ARN of the plan's execution role."""
        return str(self.plan.request["RoleArn"])

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The instance type, or the preferred types in order, with counts and training plans."""
        resources = self.plan.request["ResourceConfig"]
        if "InstancePreferences" not in resources:
            plan = resources.get("TrainingPlanArn")
            return (Choice(str(resources["InstanceType"]), int(resources["InstanceCount"]), plan),)
        return tuple(
            Choice(
                each["InstanceType"],
                each["InstanceCount"],
                next(iter(each.get("TrainingPlanArns", ())), None),
            )
            for each in resources["InstancePreferences"]
        )

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The instance type, or the preferred types in order."""
        return tuple(choice.instance_type for choice in self.choices)

    def training_plan(self, arn: str) -> Mapping[str, Any] | None:
        """Return a training plan as AWS describes it, asked once for all checks; None if there is none.

        Raises:
            ClientError: AWS refuses to describe it.
            BotoCoreError: AWS does not answer.
        """
        with self._lock:
            if arn not in self._training_plans:
                self._training_plans[arn] = start_thread(partial(self._describe_plan, arn))
            described = self._training_plans[arn]
        return described.result()

    def _describe_plan(self, arn: str) -> Mapping[str, Any] | None:
        describe = self.client("sagemaker").describe_training_plan
        return find(MISSING_IN_SAGEMAKER, describe, TrainingPlanName=arn)

    @property
    def most_instances(self) -> int:
        """The number of instances, or the largest one of the preferred types."""
        return max(choice.instances for choice in self.choices)


def bucket_region(context: Account, bucket: str, owner: Mapping[str, str] | None = None) -> str:
    """Return the region of a bucket, from HeadBucket, or from GetBucketLocation for servers that omit it.

    `owner` is the argument ExpectedBucketOwner, for clients that do not add it themselves.
    """
    owner = owner or {}
    answer: Mapping[str, Any] = context.client("s3").head_bucket(Bucket=bucket, **owner)
    if "BucketRegion" in answer:
        return str(answer["BucketRegion"])
    location: Mapping[str, Any] = context.client("s3").get_bucket_location(Bucket=bucket, **owner)
    return str(location.get("LocationConstraint") or "us-east-1")


@dataclass(frozen=True)
class CheckGroup:
    """Checks that one thread runs. `names` lists them, so that none is missing after an error."""

    names: tuple[str, ...]
    check: Callable[[Any], Iterable[Check]]

    def run(self, context: Account) -> tuple[Check, ...]:
        """Run the checks; after an error the remaining checks are `unknown`."""
        checks: list[Check] = []
        try:
            # extend() keeps the checks before an error.
            checks.extend(self.check(context))
        except Exception as error:  # noqa: BLE001 (an error in one check must not hide the others)
            detail, fix = describe_error(error)
            reported = {check.name for check in checks}
            checks += [unknown(name, detail, fix) for name in self.names if name not in reported]
        return tuple(checks)


def describe_error(error: Exception) -> tuple[str, str]:
    """Return why a check has no answer, and how to get one."""
    from botocore.exceptions import ClientError

    if isinstance(error, UnansweredError):
        return error.detail, error.fix
    cause = explain(error)
    if cause is None:
        return (
            f"a bug in cloudtrain: {type(error).__name__}: {_one_line(str(error))}",
            "please report it",
        )
    if is_denied(error):
        return f"these credentials lack the permission {action_of(error)}", cause.hint
    if isinstance(error, ClientError) and find_credential_problem(error) is None:
        return _one_line(f"{action_of(error)}: {cause.message}"), cause.hint
    return _one_line(cause.message), cause.hint


def is_denied(error: Exception) -> bool:
    """Whether the error is a missing permission."""
    return code_of(error) in DENIED


def _one_line(text: str) -> str:
    line = redact(" ".join(text.split()))
    if len(line) <= _MAX_MESSAGE_CHARACTERS:
        return line
    return line[:_MAX_MESSAGE_CHARACTERS] + "..."


def find(absent: Collection[str], call: Callable[..., T], **arguments: Any) -> T | None:
    """Return AWS's answer to a call; None if it is one of the error codes that mean that there is no such resource."""
    with SuppressCodes(absent):
        return call(**arguments)
    return None


def start_thread(call: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread, so that a hanging call does not block the command's exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 (raised again by `Future.result`)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def map_concurrently(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Call a function with each item, ten at a time, and return the results in order.

    Raises:
        Exception: The first error in order, after all calls have ended.
    """
    slots = threading.Semaphore(_MAX_THREADS)

    def call(item: S) -> T:
        with slots:
            return function(item)

    futures = [start_thread(partial(call, item)) for item in items]
    wait(futures)
    return [future.result() for future in futures]
