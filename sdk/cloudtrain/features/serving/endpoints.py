"""The endpoints of the accounts in use: what they cost, and which of them are idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.backends.base import HostingAccount
from cloudtrain.client.client import Client, client_of
from cloudtrain.features.serving.account import accounts_in_use
from cloudtrain.preflight.endpoint import list_variants
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import BACKENDS, choose_backends
from cloudtrain.support.renamed import renamed_arguments

if TYPE_CHECKING:
    from types_boto3_sagemaker import SageMakerClient

_PERIOD_SECONDS = 3600
_METRIC_DAYS = 15
"""CloudWatch keeps values of 60 s for 15 days, and longer periods for more. Source: its user guide."""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint.

    Attributes:
        name: Its name.
        backend: `sagemaker` or `sandbox`.
        status: Its status, such as InService.
        capacity: Its instances, or the memory of a serverless endpoint.
        usd_per_hour: Price of its instances; None where it is unknown, and 0 for a serverless endpoint.
        created: When it was created.
        invocations: Invocations within the time that was asked for; None where CloudWatch does not answer.
        is_idle: Whether it is older than this time, and had no invocation in it.
    """

    name: str
    backend: str
    status: str
    capacity: str
    usd_per_hour: float | None
    created: datetime
    invocations: int | None
    is_idle: bool

    def to_json(self) -> dict[str, Any]:
        """Return an entry of the object that `list --endpoints --json` prints."""
        return {
            "name": self.name,
            "place": self.backend,
            "status": self.status,
            "capacity": self.capacity,
            "usd_per_hour": self.usd_per_hour,
            "created": self.created.isoformat(),
            "invocations": self.invocations,
            "is_idle": self.is_idle,
        }


@renamed_arguments(places="backend")
def list_endpoints(
    idle_seconds: float = 86400.0,
    *,
    backend: str | Iterable[str] | None = None,
    settings: Settings | None = None,
    client: Client | None = None,
) -> tuple[Endpoint, ...]:
    """Return the endpoints of the sandboxes that run and of the account, newest first.

    Args:
        idle_seconds: An endpoint without invocations for so long is idle.
        backend: One or several; by default all.
        settings: The account; by default from environment and files.
        client: The client whose account and sandboxes are asked, in place of `settings`.

    Raises:
        UserError: There is no such backend.
        CloudError: AWS refused or cannot be reached.
    """
    named = choose_backends(backend)
    names = tuple(BACKENDS) if named is None else named
    found = [
        endpoint
        for account in accounts_in_use(client_of(client, settings).session)
        if account.backend.name in names
        for endpoint in _endpoints_of(account, idle_seconds)
    ]
    return tuple(sorted(found, key=lambda each: each.created, reverse=True))


def _endpoints_of(account: HostingAccount, idle_seconds: float) -> Iterator[Endpoint]:
    with aws_errors("list the endpoints"):
        client: SageMakerClient = account.client("sagemaker")
        for page in client.get_paginator("list_endpoints").paginate():
            for summary in page["Endpoints"]:
                yield _read(account, summary, idle_seconds)


def _read(account: HostingAccount, summary: Mapping[str, Any], idle_seconds: float) -> Endpoint:
    name = summary["EndpointName"]
    variants = list_variants(account.client("sagemaker"), name)
    capacity = []
    prices = list[float | None]()
    for variant, count in variants:
        serverless = variant.get("ServerlessConfig")
        if serverless is not None:
            capacity.append(f"serverless, {serverless['MemorySizeInMB']} MB")
            continue
        kind = variant.get("InstanceType", "?")
        capacity.append(f"{count} x {kind}")
        each = account.usd_per_hour(kind)
        prices.append(None if each is None else count * each)
    names = [str(variant["VariantName"]) for variant, _ in variants]
    invocations = _invocations(account, name, names, idle_seconds)
    created = summary["CreationTime"].astimezone(UTC)
    is_old = datetime.now(UTC) - created >= timedelta(seconds=idle_seconds)
    is_idle = is_old and invocations == 0 and summary["EndpointStatus"] == "InService"
    known = [each for each in prices if each is not None]
    usd = sum(known, 0.0) if len(known) == len(prices) else None
    return Endpoint(
        name=name,
        backend=account.backend.name,
        status=summary["EndpointStatus"],
        capacity=", ".join(capacity),
        usd_per_hour=usd,
        created=created,
        invocations=invocations,
        is_idle=is_idle,
    )


def _invocations(
    account: HostingAccount, name: str, variants: list[str], seconds: float
) -> int | None:
    """Return the invocations of the last seconds, by CloudWatch; None where it does not answer."""
    from botocore.exceptions import BotoCoreError, ClientError

    end = datetime.now(UTC)
    start = end - timedelta(seconds=min(seconds, _METRIC_DAYS * 86400))
    total = 0.0
    try:
        for variant in variants:
            dimensions = [
                {"Name": "EndpointName", "Value": name},
                {"Name": "VariantName", "Value": variant},
            ]
            points = account.client("cloudwatch").get_metric_statistics(
                Namespace="AWS/SageMaker",
                MetricName="Invocations",
                Dimensions=dimensions,
                StartTime=start,
                EndTime=end + timedelta(seconds=60),
                Period=_PERIOD_SECONDS,
                Statistics=["Sum"],
            )["Datapoints"]
            total += sum(each["Sum"] for each in points)
    except (ClientError, BotoCoreError):
        return None
    return round(total)
