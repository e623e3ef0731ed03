"""What AWS's Cost Explorer reports for SageMaker. AWS bills each request (0.01 USD in 2026)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from cloudtrain.aws.errors import aws_errors, make_client
from cloudtrain.aws.retry import client_retries
from cloudtrain.aws.session import make_session
from cloudtrain.errors import CloudError
from cloudtrain_runtime.contract.aws_codes import DENIED

_REGION = "us-east-1"
"""The service has one endpoint, which reports all regions."""

_SERVICE = "Amazon SageMaker"
_METRIC = "UnblendedCost"
_TRAINING = re.compile(r"(?:[A-Z0-9]+-)?(?:Train|TrSpt):ml\..+")
"""Usage types of training instances, on demand and spot, as in the price list: `USW2-Train:ml.p4d.24xlarge`."""

_CENTS = 2
_LONGEST = timedelta(days=365)
_HINTS = {
    **dict.fromkeys(
        DENIED,
        "the credentials need ce:GetCostAndUsage on *, and Cost Explorer must be enabled once",
    ),
    "DataUnavailableException": "Cost Explorer has no data yet: it needs up to 24 hours after it was enabled",
}


@dataclass(frozen=True)
class Billed:
    """What AWS's Cost Explorer reports for SageMaker in a period.

    Attributes:
        since: First day, as YYYY-MM-DD.
        until: Day after the last one.
        training_usd: Cost of training instances, on demand and spot.
        sagemaker_usd: Cost of all of SageMaker.
        by_usage: Cost by usage type, the highest first.
        is_estimated: Whether AWS may still change the figures.
        requests: Number of requests, each of which AWS bills.
    """

    since: str
    until: str
    training_usd: float
    sagemaker_usd: float
    by_usage: Mapping[str, float]
    is_estimated: bool
    requests: int

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `costs --json`."""
        return {
            "since": self.since,
            "until": self.until,
            "training_usd": round(self.training_usd, _CENTS),
            "sagemaker_usd": round(self.sagemaker_usd, _CENTS),
            "by_usage": {name: round(usd, _CENTS) for name, usd in self.by_usage.items()},
            "is_estimated": self.is_estimated,
            "requests": self.requests,
        }


def fetch_billed(since: datetime, until: datetime | None = None) -> Billed:
    """Return what AWS has billed for SageMaker in a period of whole days (UTC), by usage type.

    Args:
        since: Start of the period.
        until: End of the period; by default now.

    Raises:
        CloudError: The period is longer than a year; AWS refused, cannot be reached, or bills in another currency.
    """
    first = since.astimezone(UTC).date()
    last = (until or datetime.now(UTC)).astimezone(UTC).date()
    if last - first > _LONGEST:
        raise CloudError(
            f"Cost Explorer is asked for at most a year, not since {first}", "use --since 365d"
        )
    # The end is exclusive.
    end = max(last, first) + timedelta(days=1)
    by_usage: dict[str, float] = {}
    is_estimated = False
    requests = 0
    for page in _pages(first, end):
        requests += 1
        for period in page.get("ResultsByTime", ()):
            is_estimated |= bool(period.get("Estimated"))
            for group in period.get("Groups", ()):
                usage = str(group["Keys"][0])
                by_usage[usage] = by_usage.get(usage, 0.0) + _usd(group["Metrics"][_METRIC])
    return Billed(
        since=first.isoformat(),
        until=end.isoformat(),
        training_usd=sum(usd for usage, usd in by_usage.items() if _TRAINING.fullmatch(usage)),
        sagemaker_usd=sum(by_usage.values()),
        by_usage=dict(sorted(by_usage.items(), key=lambda pair: -pair[1])),
        is_estimated=is_estimated,
        requests=requests,
    )


def _pages(first: date, end: date) -> Iterator[Mapping[str, Any]]:
    from botocore.config import Config

    arguments: dict[str, Any] = {
        "TimePeriod": {"Start": first.isoformat(), "End": end.isoformat()},
        "Granularity": "MONTHLY",
        "Metrics": [_METRIC],
        "Filter": {"Dimensions": {"Key": "SERVICE", "Values": [_SERVICE]}},
        "GroupBy": [{"Type": "DIMENSION", "Key": "USAGE_TYPE"}],
    }
    with aws_errors("ask Cost Explorer", _HINTS):
        config = Config(retries=client_retries())
        client = make_client(make_session(), "ce", region_name=_REGION, config=config)
    token: str | None = None
    while True:
        with aws_errors("ask Cost Explorer", _HINTS):
            page = client.get_cost_and_usage(
                **arguments, **({} if token is None else {"NextPageToken": token})
            )
        yield page
        token = page.get("NextPageToken")
        if not token:
            return


def _usd(amount: Mapping[str, str]) -> float:
    if amount.get("Unit") != "USD":
        raise CloudError(
            f"Cost Explorer reports in {amount.get('Unit')}, not in USD", "leave out --billed"
        )
    return float(amount["Amount"])
