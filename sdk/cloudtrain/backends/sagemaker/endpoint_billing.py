"""What AWS bills for the instances of endpoints: of those that exist, and of those that `undeploy` has recorded.

AWS keeps no list of deleted endpoints. So `undeploy` records what it deletes, on its machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.errors import SuppressCodes, aws_errors
from cloudtrain.catalog import Prices
from cloudtrain.job.job_fields import RUN_TAG
from cloudtrain.runs.billing import Billing, EndpointUse
from cloudtrain.settings.settings import profile_file
from cloudtrain.support.records import append_record, read_records
from cloudtrain_runtime.contract.aws_codes import DENIED, MISSING_IN_SAGEMAKER

if TYPE_CHECKING:
    from types_boto3_sagemaker import SageMakerClient

DELETED = "Deleted"
_UNBILLED = ("Failed", "OutOfService")
"""Statuses of an endpoint that has no instances. Source: API reference of DescribeEndpoint."""
_HINTS = dict.fromkeys(DENIED, "allow_endpoints of infra/ grants it: docs/how-to/deploy.md")


@dataclass(frozen=True)
class EndpointRecord:
    """What is billed for an endpoint.

    Attributes:
        arn: Its ARN, with region and account.
        name: Its name.
        run: Id of the run whose model it serves.
        created: When it was created, in seconds since the epoch.
        deleted: When it was deleted, in seconds since the epoch; None for one that exists.
        instance_type: Type of its instances; empty if it is serverless.
        instances: Their number.
        state: Its status.
    """

    arn: str
    name: str
    run: str
    created: float
    deleted: float | None
    instance_type: str
    instances: int
    state: str = DELETED


def read_endpoint(client: SageMakerClient, described: Mapping[str, Any]) -> EndpointRecord | None:
    """Return what is billed for an endpoint; None if `deploy` has not created it.

    Args:
        client: Client of SageMaker.
        described: Response of DescribeEndpoint.
    """
    tags = {
        each["Key"]: each["Value"]
        for each in client.list_tags(ResourceArn=described["EndpointArn"])["Tags"]
    }
    if RUN_TAG not in tags:
        return None
    config = client.describe_endpoint_config(EndpointConfigName=described["EndpointConfigName"])
    # `deploy` creates one.
    variant = config["ProductionVariants"][0]
    counts = {
        each["VariantName"]: each.get("CurrentInstanceCount")
        for each in described.get("ProductionVariants", ())
    }
    is_serverless = "ServerlessConfig" in variant
    instances = 0
    if not is_serverless:
        instances = int(counts.get(variant["VariantName"]) or variant["InitialInstanceCount"])
    return EndpointRecord(
        arn=described["EndpointArn"],
        name=described["EndpointName"],
        run=tags[RUN_TAG],
        created=described["CreationTime"].timestamp(),
        deleted=None,
        instance_type="" if is_serverless else str(variant["InstanceType"]),
        instances=instances,
        state=described["EndpointStatus"],
    )


def record_deleted(place: str, endpoint: EndpointRecord, environ: Mapping[str, str]) -> None:
    """Append a deleted endpoint to the user's record; a failure is ignored, because the endpoint is deleted."""
    with contextlib.suppress(OSError):
        append_record(_record_file(environ), {"place": place, **asdict(endpoint)})


def list_uses(
    client: SageMakerClient,
    place: str,
    prices: Prices,
    *,
    region: str,
    account: str | None,
    period: tuple[datetime, datetime],
) -> Iterator[EndpointUse]:
    """Yield the endpoints of `deploy` within a period, those that exist first.

    Args:
        client: Client of SageMaker.
        place: `sagemaker` or `sandbox`.
        prices: Prices of instances.
        region: Region of the endpoints.
        account: Account of the endpoints; None for any.
        period: Start and end.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    found = list(_existing(client, period[1]))
    known = {(each.arn, round(each.created)) for each in found}
    for each in _recorded(place, os.environ):
        _, _, _, its_region, its_account, _ = each.arn.split(":", 5)
        is_here = its_region == region and account in (None, its_account)
        if is_here and (each.arn, round(each.created)) not in known:
            found.append(each)
    since, until = (moment.timestamp() for moment in period)
    for each in found:
        end = until if each.deleted is None else min(until, each.deleted)
        seconds = max(0, round(end - max(since, each.created)))
        if seconds:
            billing = _billing(each, 0 if each.state in _UNBILLED else seconds, prices, region)
            yield EndpointUse(
                name=each.name,
                run=each.run,
                state=each.state,
                created=datetime.fromtimestamp(each.created, UTC),
                billing=billing,
            )


def _existing(client: SageMakerClient, until: datetime) -> Iterator[EndpointRecord]:
    with aws_errors("list the endpoints", _HINTS):
        for page in client.get_paginator("list_endpoints").paginate(CreationTimeBefore=until):
            for summary in page["Endpoints"]:
                # Deleted in the meantime.
                with SuppressCodes(MISSING_IN_SAGEMAKER):
                    described = client.describe_endpoint(EndpointName=summary["EndpointName"])
                    endpoint = read_endpoint(client, described)
                    if endpoint is not None:
                        yield endpoint


def _billing(endpoint: EndpointRecord, seconds: int, prices: Prices, region: str) -> Billing:
    each = prices.hosting_usd_per_hour(endpoint.instance_type, region)
    hourly = None
    if each is not None and endpoint.instance_type:
        hourly = each * endpoint.instances
    return Billing(
        instance_type=endpoint.instance_type,
        instances=endpoint.instances,
        region=region,
        usd_per_hour=hourly,
        billable_seconds=seconds,
    )


def _record_file(environ: Mapping[str, str]) -> Path:
    return profile_file(environ).with_name("endpoints.jsonl")


def _recorded(place: str, environ: Mapping[str, str]) -> Iterable[EndpointRecord]:
    """Return the recorded endpoints of a place; damaged lines are skipped."""
    found: dict[tuple[str, int], EndpointRecord] = {}
    for content in read_records(_record_file(environ)):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            if content.pop("place") == place:
                endpoint = EndpointRecord(**content)
                _, _, service, _, _, _ = endpoint.arn.split(":", 5)
                if service == "sagemaker" and endpoint.deleted is not None:
                    found[endpoint.arn, round(endpoint.created)] = endpoint
    return found.values()
