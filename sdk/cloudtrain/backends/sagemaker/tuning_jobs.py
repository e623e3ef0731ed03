"""Tuning jobs of the account: create, describe, list trials and stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.errors import SuppressCodes, aws_errors
from cloudtrain.backends.base import TuningTrial
from cloudtrain.backends.sagemaker.billing import read_billing
from cloudtrain.bundle import ProgressCallback
from cloudtrain.bundle.archive import Bundle
from cloudtrain.catalog import Prices
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.status import State
from cloudtrain_runtime.contract.aws_codes import MISSING_IN_SAGEMAKER, code_of

if TYPE_CHECKING:
    from types_boto3_sagemaker import SageMakerClient

_IN_USE = "ResourceInUse"
_STATES = {
    "InProgress": State.RUNNING,
    "Stopping": State.STOPPING,
    "Completed": State.SUCCEEDED,
    "Failed": State.FAILED,
    "Stopped": State.STOPPED,
}
_PAGE = 100

Upload = Callable[[Plan, Bundle | None, ProgressCallback | None], None]


class TuningJobs:
    """The tuning jobs of an account.

    Args:
        client: Returns a boto3 client by the name of its service.
        upload: Uploads the files of a plan.
        prices: Instance prices.
        region: Region of the jobs.
    """

    def __init__(
        self, client: Callable[[str], Any], upload: Upload, prices: Prices, region: str | None
    ) -> None:
        self._client = client
        self._upload = upload
        self._prices = prices
        self._region = region

    def describe(self, name: str) -> Mapping[str, Any] | None:
        """Return the response of DescribeHyperParameterTuningJob, or None if there is no such tuning job."""
        found: list[Mapping[str, Any]] = []
        with aws_errors("describe the tuning job"), SuppressCodes(MISSING_IN_SAGEMAKER):
            found.append(
                self._sagemaker.describe_hyper_parameter_tuning_job(
                    HyperParameterTuningJobName=name
                )
            )
        return next(iter(found), None)

    def create(
        self,
        request: Mapping[str, Any],
        plan: Plan,
        bundle: Bundle,
        progress: ProgressCallback | None = None,
    ) -> bool:
        """Upload the files of a plan and create its tuning job; return False if it exists already.

        Raises:
            CloudError: AWS refused; no tuning job was created.
        """
        self._upload(plan, bundle, progress)
        created: list[Any] = []
        with aws_errors("create the tuning job"), SuppressCodes((_IN_USE,)):
            created.append(self._sagemaker.create_hyper_parameter_tuning_job(**request))
        return bool(created)

    def trials(self, name: str) -> tuple[TuningTrial, ...]:
        """Return the trials of a tuning job, oldest first."""
        with aws_errors("list the trials of the tuning job"):
            pages = self._sagemaker.get_paginator(
                "list_training_jobs_for_hyper_parameter_tuning_job"
            ).paginate(
                HyperParameterTuningJobName=name,
                SortBy="CreationTime",
                SortOrder="Ascending",
                PaginationConfig={"PageSize": _PAGE},
            )
            summaries = [each for page in pages for each in page["TrainingJobSummaries"]]
            return tuple(map(self._read_trial, summaries))

    def _read_trial(self, summary: Mapping[str, Any]) -> TuningTrial:
        """Return a trial with its cost. Only the description of an ended job has the seconds that AWS bills."""
        run = str(summary["TrainingJobName"])
        state = _STATES[summary["TrainingJobStatus"]]
        cost = 0.0 if "TrainingStartTime" not in summary else None
        if cost is None:
            job = self._sagemaker.describe_training_job(TrainingJobName=run)
            billing = read_billing(job, self._prices, self._region)
            hourly = billing.usd_per_hour
            cost = None if hourly is None else round(hourly * billing.billable_seconds / 3600, 4)
        final = summary.get("FinalHyperParameterTuningJobObjectiveMetric")
        return TuningTrial(
            run=run,
            state=state,
            hyperparameters=dict(summary["TunedHyperParameters"]),
            objective=None if final is None else float(final["Value"]),
            cost_usd=cost,
            reason=str(summary.get("FailureReason", "")),
            created=_seconds(summary["CreationTime"]) or 0.0,
            ended=_seconds(summary.get("TrainingEndTime")),
        )

    def stop(self, name: str) -> None:
        """Ask SageMaker to stop the tuning job and its trials. One that has ended is left as it is."""
        from botocore.exceptions import ClientError

        with aws_errors("stop the tuning job"):
            try:
                self._sagemaker.stop_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
            except ClientError as error:
                job = self.describe(name)
                is_over = job is not None and job["HyperParameterTuningJobStatus"] != "InProgress"
                if code_of(error) != "ValidationException" or not is_over:
                    raise

    @property
    def _sagemaker(self) -> SageMakerClient:
        client: SageMakerClient = self._client("sagemaker")
        return client


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.astimezone(UTC).timestamp()
