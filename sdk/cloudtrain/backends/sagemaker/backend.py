"""The SageMaker backend: uploads a plan's files, creates its training job and reports its status and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain import catalog
from cloudtrain.aws.clock import aws_time
from cloudtrain.aws.errors import SuppressCodes, aws_errors, missing_credentials_error
from cloudtrain.aws.retry import POLL_SECONDS, Backoff, poll
from cloudtrain.backends.base import HostingAccount, make_storage_environ, with_key
from cloudtrain.backends.sagemaker.batch_queue import BatchQueues
from cloudtrain.backends.sagemaker.billing import read_billing
from cloudtrain.backends.sagemaker.clients import Clients
from cloudtrain.backends.sagemaker.endpoint_billing import list_uses
from cloudtrain.backends.sagemaker.estimator import render_by_estimator, send_by_estimator
from cloudtrain.backends.sagemaker.job_states import (
    FINAL_STATES,
    read_deadline,
    read_phases,
    read_reason,
    read_state,
    read_waiting,
)
from cloudtrain.backends.sagemaker.listing import list_jobs
from cloudtrain.backends.sagemaker.log_tail import JobSnapshot
from cloudtrain.backends.sagemaker.logs import JobLogs
from cloudtrain.backends.sagemaker.sdk_import import missing_sdk_error, start_import
from cloudtrain.backends.sagemaker.stored_plans import StoredPlans
from cloudtrain.backends.sagemaker.submit_lock import SubmitLocks
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.backends.sagemaker.tuning_jobs import TuningJobs
from cloudtrain.backends.sagemaker.uploads import Uploads
from cloudtrain.bundle import ProgressCallback
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import (
    CloudError,
    RunNotFoundError,
    SettingsError,
    UnreachableError,
    UserError,
)
from cloudtrain.job.job_fields import REQUEST_TAG
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.planning.service_job import render_payload
from cloudtrain.planning.warm_pool import WarmPool, read_pool
from cloudtrain.runs.billing import Billing, EndpointUse
from cloudtrain.runs.downloads import RunStorage
from cloudtrain.runs.early_end import early_end
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, submission_time
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings, has_sdk
from cloudtrain.support.backend_facts import DEFAULT_BACKEND, facts_of
from cloudtrain.support.run_id import make_run_id
from cloudtrain_runtime.contract import CONFIG_FILE
from cloudtrain_runtime.contract.aws_codes import MISSING_IN_SAGEMAKER, code_of

if TYPE_CHECKING:
    from boto3.session import Session

    from cloudtrain.runs.previous_run import PreviousRun
    from cloudtrain.support.checks import Check

_EPOCH = datetime.fromtimestamp(0, UTC)
_LOCK_ATTEMPTS = 20
_LOCK_SECONDS = 86400
"""How long the holder of a submit lock may need for its uploads."""
_POOL_POLLS = 5
"""Number of polls for the warm pool of a job that has just ended. They take about a minute."""


class SageMakerBackend:
    """Training jobs in one account and region.

    Args:
        settings: Role, bucket, region and other settings of the account.
        prices: Instance prices; by default the bundled ones.
        poll_seconds: Shortest wait between polls. All other waits are proportional to it.
        session: boto3 session; by default one from the environment.
    """

    name: str = DEFAULT_BACKEND
    only_checkpoint_checks = False
    """Whether `start_checks` checks the checkpoints only, for an account without quotas."""
    capacity_pause_seconds = 60.0

    def __init__(
        self,
        settings: Settings,
        *,
        prices: catalog.Prices | None = None,
        poll_seconds: float = POLL_SECONDS,
        session: Session | None = None,
    ) -> None:
        self.settings = settings
        self.prices = prices or catalog.bundled_prices()
        self.poll_seconds = poll_seconds
        self._aws = Clients(settings, session)
        self._queues = BatchQueues(settings, self._aws.client)
        self._plans = StoredPlans(self._aws.client)
        self._scale = max(poll_seconds, 0.001) / POLL_SECONDS
        self._logs: JobLogs | None = None

    @property
    def is_configured(self) -> bool:
        """Whether no setting is missing."""
        return not self.settings.missing

    def target(self) -> SageMakerTarget:
        """Return the account as the target of a plan."""
        return SageMakerTarget(self.settings, self.prices)

    def for_previous(self, previous: PreviousRun) -> SageMakerBackend:
        """Return the backend with the account of a previous run, where its code is."""
        return self.with_settings(previous.settings(self.settings))

    def check_ready(self) -> None:
        """Check that settings and credentials exist.

        Raises:
            SettingsError: a setting is missing. The message mentions missing credentials, too.
            CloudError: only the credentials are missing.
        """
        with aws_errors("find credentials"):
            has_credentials = self._aws.session().get_credentials() is not None
        try:
            self.settings.require()
        except SettingsError as error:
            if has_credentials:
                raise
            raise SettingsError(
                f"{error.message}; and there are no AWS credentials", error.hint
            ) from None
        if not has_credentials:
            raise missing_credentials_error()
        if self.settings.sender == "estimator" and not has_sdk():
            raise missing_sdk_error()

    def start_checks(self, plan: Plan, *, skip: bool = False) -> Callable[[], tuple[Check, ...]]:
        """Start the checks of the account that a plan needs, and the import of the SageMaker SDK, which takes longest.

        Call `check_ready` before. A submit that fails in the meantime does not wait for the import.
        """
        # This imports a dozen modules that only a submit needs.
        from cloudtrain.preflight import start_checks

        if self.settings.sender == "estimator":
            start_import()
        if skip:
            return tuple
        only_checkpoints = self.only_checkpoint_checks
        return start_checks(
            plan, self.settings, self._aws.session(), only_checkpoints=only_checkpoints
        ).wait

    def check_resume(self, plan: Plan) -> tuple[Check, ...]:
        """Check whether there is a complete checkpoint that a plan can resume from."""
        from cloudtrain.preflight import start_checks

        return start_checks(plan, self.settings, self._aws.session(), only_checkpoints=True).wait()

    def with_settings(self, settings: Settings) -> SageMakerBackend:
        """Return a backend with the same session and other settings."""
        return SageMakerBackend(
            settings,
            prices=self.prices,
            poll_seconds=self.poll_seconds,
            session=self._aws.session(),
        )

    def find_active_run(self, plan: Plan) -> Run | None:
        """Return the active run of the same request and code, or None.

        This first test saves the rest of the work. It ignores errors of AWS, which the checks or `reserve` report.
        """
        with contextlib.suppress(CloudError), aws_errors("look for a run of the same request"):
            lock = self._locks(plan).read(plan.identity)
            state = None if lock is None else self._state(lock.run)
            if lock is not None and state is not None and not state.is_final:
                return Run(lock.run, self, attached=True)
        return None

    def _locks(self, plan: Plan) -> SubmitLocks:
        return SubmitLocks(self._aws.client("s3"), plan.locations.base)

    def _state(self, run: str) -> State | None:
        """Return the state of a run, or None if there is no such run. The id of a damaged lock is empty."""
        if not run:
            return None
        try:
            job = self._describe(run)
        except RunNotFoundError:
            return None
        return read_state(job)

    def submit(
        self,
        plan: Plan,
        bundle: Bundle | None,
        *,
        is_new: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Run:
        """Upload missing files and create the training job, or put it into its queue.

        Args:
            plan: The plan.
            bundle: Its code, or None if an earlier run has uploaded it.
            is_new: Start another run beside an active one of the same request.
            progress: Callback `(bytes_done, bytes_total)`.

        Returns:
            The run, or the active run of the same request. If another submit holds the lock and is about to start its
            run, the run has the id of that one, because SageMaker accepts only one job of a name.

        Raises:
            CloudError: AWS refused; no job was created.
            DriftError: the estimator was about to send something else than the plan; no job was created.
            MissingExtraError: the SageMaker SDK is not installed and transport is `estimator`.
            UserError: a file of the data cannot be read, or an earlier run's code was deleted; no job was created.
        """
        if is_new:
            # An id of time and request may belong to a submit of the same second.
            plan = plan.rename(make_run_id(plan.job, datetime.now(UTC), secrets.token_hex(3)))
        else:
            reserved = self._reserve(plan)
            if isinstance(reserved, Run):
                return reserved
            plan = reserved
        self._upload(plan, bundle, progress)
        with aws_errors("create the training job"):
            is_created = self._create(plan)
        if is_new:
            # Let later submits of the request attach to this run, and only now: the lock of a run that never started
            # would hide an earlier one that is active. A failure is ignored, because the run has started.
            with contextlib.suppress(CloudError), aws_errors("acquire the submit lock"):
                self._locks(plan).overwrite(plan.identity, plan.run)
        return Run(plan.run, self, attached=not is_created)

    def _reserve(self, plan: Plan) -> Run | Plan:
        """Acquire the submit lock of a request for a plan's run.

        Returns:
            The active run of the same request, if there is one. Otherwise the plan; if another submit holds the lock
            and is about to start its run, under the id of that run, because SageMaker accepts only one job of a name.

        Raises:
            CloudError: the lock could not be acquired.
        """
        locks = self._locks(plan)
        with aws_errors("acquire the submit lock"):
            for _ in range(_LOCK_ATTEMPTS):
                lock = locks.read(plan.identity)
                if lock is not None and lock.run == plan.run:
                    return plan
                state = None if lock is None else self._state(lock.run)
                if lock is not None and state is not None and not state.is_final:
                    return Run(lock.run, self, attached=True)
                if (
                    lock is not None
                    and state is None
                    and lock.run
                    and lock.age_seconds < _LOCK_SECONDS
                ):
                    return plan.rename(lock.run)
                if locks.acquire(plan.identity, plan.run, replace=lock):
                    return plan
        raise CloudError(
            "could not acquire the submit lock of this request",
            "try again; or let the credentials read objects below the prefix (s3:GetObject, s3:ListBucket)",
        )

    def _create(self, plan: Plan) -> bool:
        """Create the training job. Return False if another submit of the same request and code has created it."""
        from botocore.exceptions import ClientError

        client = self._aws.client("sagemaker")
        is_direct = self.settings.sender == "boto3"
        try:
            if plan.queue is not None:
                by_sdk = None
                if not is_direct:
                    by_sdk = render_by_estimator(plan, self._aws.session(), client)
                self._queues.submit(plan, render_payload(by_sdk or plan.request))
            elif is_direct:
                client.create_training_job(**plan.request)
            else:
                send_by_estimator(plan, self._aws.session(), client)
        except ClientError as error:
            if code_of(error) != "ResourceInUse" or not self._is_ours(plan):
                raise
            # After a retry of botocore, this call itself created the job: the first response was lost.
            return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) > 0
        return True

    def _is_ours(self, plan: Plan) -> bool:
        """Whether the training job of this name has the same request and code."""
        client = self._aws.client("sagemaker")
        arn = client.describe_training_job(TrainingJobName=plan.run)["TrainingJobArn"]
        pages = client.get_paginator("list_tags").paginate(ResourceArn=arn)
        tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
        return tags.get(REQUEST_TAG) == plan.identity

    def _upload(self, plan: Plan, bundle: Bundle | None, progress: ProgressCallback | None) -> None:
        uploads = Uploads(self._aws.client("s3"))
        action = "upload the code and the data" if plan.uploads else "upload the code"
        with (
            aws_errors(action),
            tempfile.TemporaryDirectory(prefix="cloudtrain-code-") as temporary,
        ):
            if bundle is not None:
                uploads.add_archive(bundle.path, plan.locations.code)
            else:
                uploads.renew_archive(plan.locations.code, Path(temporary))
            for upload in plan.uploads:
                uploads.add_folder(Path(upload.path), upload.uri)
            uploads.send(progress)
            folder = plan.locations.config
            uploads.put_texts(
                {
                    f"{folder}/{CONFIG_FILE}": with_key(plan.config).to_json(),
                    # The plan is beside the configuration and in no channel. It includes the commit of the code.
                    f"{folder.rpartition('/')[0]}/{PLAN_FILE}": plan.to_file(),
                }
            )

    def hosting_account(self) -> HostingAccount:
        """Return the account, for its endpoints."""
        return HostingAccount(
            backend=facts_of(self.name),
            settings=self.settings,
            prices=self.prices,
            session=self._aws.session,
            client=self._aws.client,
            poll_seconds=self.poll_seconds,
        )

    def tuning_jobs(self) -> TuningJobs:
        """Return the account's tuning jobs."""
        return TuningJobs(
            client=self._aws.client,
            upload=self._upload,
            prices=self.prices,
            region=self.settings.region,
        )

    def endpoints(self, since: datetime | None, until: datetime | None) -> Iterator[EndpointUse]:
        """Yield the endpoints of `deploy` within a period, and those that this machine has deleted."""
        region = self.settings.region or ""
        account = self.settings.account
        period = (since or _EPOCH, until or datetime.now(UTC))
        client = self._aws.client("sagemaker")
        return list_uses(
            client, self.name, self.prices, region=region, account=account, period=period
        )

    def status(self, run: str) -> Status:
        """Return the present status of a training job."""
        job = self._describe(run)
        progress = self._job_logs().progress(run)
        phases = read_phases(job)
        now = datetime.now(UTC)
        billing = self.billing(run, job)
        hourly = billing.usd_per_hour
        model = job.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        metrics = {
            metric["MetricName"]: float(metric["Value"])
            for metric in job.get("FinalMetricDataList", [])
        }
        progress = dataclasses.replace(progress, metrics={**metrics, **progress.metrics})
        state = read_state(job)
        reason = read_reason(job, now)
        if state is State.SUCCEEDED and (early := early_end(progress)):
            state = State.STOPPED
            reason = early
        return Status(
            run=run,
            backend=self.name,
            state=state,
            reason=reason,
            created=job.get("CreationTime"),
            started=job.get("TrainingStartTime"),
            ended=job.get("TrainingEndTime"),
            billable_seconds=billing.billable_seconds,
            cost_usd=None if hourly is None else round(hourly * billing.billable_seconds / 3600, 2),
            instance_type=billing.instance_type or None,
            instances=billing.instances,
            usd_per_hour=None if hourly is None else round(hourly, 4),
            phases=phases,
            warm_pool=read_pool(job, hourly, now),
            waiting=read_waiting(job),
            is_spot=billing.is_spot,
            ends_by=read_deadline(job, now),
            world_size=progress.world_size or self._plans.planned_world_size(run, job),
            progress=progress,
            artifacts={} if model is None else {"model": model},
        )

    def billing(self, run: str, job: Mapping[str, Any] | None = None) -> Billing:
        """Return what AWS bills for a training job, by its description if that is known."""
        return read_billing(job or self._describe(run), self.prices, self.settings.region)

    def has(self, run: str) -> bool:
        """Whether there is a run of this id."""
        return self._state(run) is not None

    def may_have(self, run: str) -> bool:  # noqa: ARG002 (finding out takes a call to AWS)
        """Return whether there is a region. Whether the account has the run takes a call to AWS."""
        return self.settings.region is not None

    def storage_environ(self) -> Mapping[str, str]:
        """Return the environment of a process that reads the checkpoints of the account's runs."""
        return make_storage_environ(os.environ, self.settings, self.settings.region)

    def storage_of(self, run: str) -> RunStorage:
        """Return where the training job stores its results. Each attempt of a queued run is a job of its own."""
        job = self._describe(run)
        output = (
            f"{job['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{job['TrainingJobName']}/output"
        )
        return RunStorage(output, self.storage_environ(), lambda: self._aws.client("s3"))

    def _describe(self, run: str) -> Mapping[str, Any]:
        if (
            self._queues.names(run) is not None
            and (known := self._queues.describe(run)) is not None
        ):
            return known
        description: Mapping[str, Any] | None = None
        with aws_errors("describe the training job"), SuppressCodes(MISSING_IN_SAGEMAKER):
            description = self._aws.client("sagemaker").describe_training_job(TrainingJobName=run)
        if description is None:
            description = self._queues.describe(run)
        if description is None:
            region = self.settings.region
            raise RunNotFoundError(
                f"SageMaker has no training job {run} in {region}", "see: cloudtrain list"
            )
        if "TrainingJobStatus" not in description:
            raise UnreachableError(
                "could not describe the training job: the response is truncated", "try again"
            )
        return description

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status."""
        return Backoff(self.poll_seconds)

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the selected log lines of all hosts, each once (see `JobLogs`)."""
        if follow:
            return self._job_logs().follow(run, only, lambda: self._snapshot(run), on_trouble)
        return self._job_logs().read(run, only, lambda: self._snapshot(run))

    def _snapshot(self, run: str) -> JobSnapshot:
        """Return the job's present state. Only times of AWS's clock are compared."""
        job = self._describe(run)
        secondary = job.get("SecondaryStatus", "")
        has_ended = read_state(job).is_final
        now = aws_time(job)
        ended = job.get("TrainingEndTime") or job.get("LastModifiedTime")
        ago = 0.0
        if has_ended and now is not None and ended is not None:
            ago = max(0.0, now - ended.timestamp())
        return JobSnapshot(secondary, has_ended, ago)

    def _jobs_of(self, run: str) -> tuple[str, ...]:
        """Return the names of a run's training jobs: the run id, or the attempts of a queued run so far."""
        names = self._queues.names(run)
        return (run,) if names is None else names

    def _job_logs(self) -> JobLogs:
        if self._logs is None:
            self._logs = JobLogs(self._aws.client("logs"), jobs=self._jobs_of, scale=self._scale)
        return self._logs

    def list(self, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the jobs that cloudtrain submitted, newest first. Pages are fetched lazily."""
        both = (
            list_jobs(self._aws.client("sagemaker"), wanted, self.name),
            self._queues.list(self.name, wanted),
        )
        return heapq.merge(*both, key=submission_time, reverse=True)

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the job's values by field of job.yaml, without those of files in S3 that cannot be read."""
        from cloudtrain.failure_rules import read_facts

        job = self._describe(run)
        try:
            plan = self._plans.read_plan(run, job)
        except (CloudError, UserError):
            plan = {}
        return read_facts(job, self._plans.read_config(job), plan)

    def plan_of(self, run: str) -> Mapping[str, Any]:
        """Return the plan.json of a run from S3.

        Raises:
            UserError: there is none, because something else submitted the job or deleted the file.
            CloudError: AWS refused or cannot be reached.
        """
        return self._plans.read_plan(run, self._describe(run))

    def stop(self, run: str) -> None:
        """Ask SageMaker to stop the job. A job that has ended is left as it is."""
        from botocore.exceptions import ClientError

        job = self._describe(run)
        if read_state(job).is_final:
            return
        if self._queues.stop(run):
            return
        with aws_errors("stop the training job"):
            try:
                self._aws.client("sagemaker").stop_training_job(
                    TrainingJobName=job["TrainingJobName"]
                )
            except ClientError as error:
                # The job may have ended, or begun to stop, in the meantime.
                state = self._state(run)
                is_over = state is not None and (state.is_final or state is State.STOPPING)
                if code_of(error) != "ValidationException" or not is_over:
                    raise

    def end_warm_pool(self, run: str) -> None:
        """Terminate the warm pool of an ended job, so that it is not billed any more.

        Raises:
            UserError: the job has no warm pool.
        """
        for job in islice(poll(lambda: self._describe(run), self.poll_backoff()), _POOL_POLLS):
            pool = read_pool(job, None, datetime.now(UTC))
            if (
                pool is None
                or pool.status != "InUse"
                or job["TrainingJobStatus"] not in FINAL_STATES
            ):
                break
        if pool is None or not pool.is_available:
            reference = f"{self.name}:{run}"
            raise UserError(
                f"{reference} has no warm pool: {_why_no_pool(pool)}",
                f"see: cloudtrain status {reference}",
            )
        with aws_errors("end the warm pool"):
            # Source: AWS's guide to warm pools, "Terminate a warm pool".
            self._aws.client("sagemaker").update_training_job(
                TrainingJobName=run, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
            )


def _why_no_pool(pool: WarmPool | None) -> str:
    if pool is None:
        return "the job does not request one (cluster.keep_alive)"
    if pool.reused_by:
        return f"{pool.reused_by} uses it now"
    if pool.status == "InUse":
        return "the job has not ended"
    return "it has ended already"
