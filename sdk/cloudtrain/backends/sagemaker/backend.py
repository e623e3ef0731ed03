"""Runs on SageMaker: upload, send exactly the plan, and tell the truth about it."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import importlib.util
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain import catalog
from cloudtrain.aws.errors import aws_errors, make_client, no_credentials
from cloudtrain.aws.retry import POLL_SECONDS, Backoff, client_retries
from cloudtrain.backends.sagemaker.batch_queue import PLAN_FILE, Queues
from cloudtrain.backends.sagemaker.estimator import render_by_estimator, send_by_estimator
from cloudtrain.backends.sagemaker.job_states import (
    FINAL_STATES,
    read_end,
    read_instances,
    read_phases,
    read_reason,
    read_state,
    read_waiting,
    seconds_on_instances,
)
from cloudtrain.backends.sagemaker.listing import list_jobs, read_cluster
from cloudtrain.backends.sagemaker.logs import JobLogs, JobNow, aws_time
from cloudtrain.backends.sagemaker.sdk_check import no_sdk, start_loading
from cloudtrain.backends.sagemaker.submit_lock import Claims
from cloudtrain.backends.sagemaker.uploads import Uploads
from cloudtrain.bundle import ProgressCallback
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import CloudError, RunNotFoundError, SettingsError, UnreachableError, UserError
from cloudtrain.job.spec import REQUEST_TAG
from cloudtrain.planning.plan import SAGEMAKER, Plan
from cloudtrain.planning.service_job import render_payload
from cloudtrain.planning.warm_pool import read_pool
from cloudtrain.planning.warm_pool_state import WarmPool
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.run import Run
from cloudtrain.runs.run_files import CONFIG, PLAN, read_fields
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, submission_time
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import CONFIG_CHANNEL, CONFIG_FILE
from cloudtrain_runtime.contract.bucket_owner import expect_owner

if TYPE_CHECKING:
    from cloudtrain.preflight import Check, PendingChecks

_CLAIM_ATTEMPTS = 20
_CLAIM_SECONDS = 86400
"""Time in which whoever has claimed a request may still be uploading for it."""
_POOL_POLLS = 5
"""How often to poll for the warm pool of a job that has just ended: for about a minute."""
_TIMEOUTS: Mapping[str, Mapping[str, float]] = {"logs": {"connect_timeout": 10, "read_timeout": 30}}
"""Seconds; botocore's own 60 are too long for a tail that a dead connection would hold."""


class SageMakerBackend:
    """Training jobs in one account and region.

    Args:
        poll_seconds: The shortest wait of what is asked again and again; all others grow and shrink with it.
        session: boto3 session to send with; by default one from the environment.
        name: Another name where the session leads elsewhere, such as to a sandbox.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        prices: catalog.Prices | None = None,
        poll_seconds: float = POLL_SECONDS,
        session: Any = None,
        name: str = SAGEMAKER,
    ) -> None:
        self.name = name
        self.settings = settings
        self.prices = prices or catalog.bundled_prices()
        self.poll_seconds = poll_seconds
        self._session_: Any = session
        self._clients: dict[str, Any] = {}
        self._queues = Queues(settings, self._client)
        self._making = threading.RLock()  # a session is not made for threads, its clients are
        self._scale = max(poll_seconds, 0.001) / POLL_SECONDS
        self._logs: JobLogs | None = None
        self._planned: dict[str, int | None] = {}

    def check_ready(self) -> None:
        """Check that settings and credentials are there, before anything is packed.

        Raises:
            SettingsError: a setting is missing; the message names missing credentials, too.
            CloudError: only credentials are missing.
        """
        with aws_errors("find credentials"):
            has_credentials = self._session().get_credentials() is not None
        try:
            self.settings.require()
        except SettingsError as error:
            if has_credentials:
                raise
            raise SettingsError(f"{error.message}; and there are no AWS credentials", error.hint) from None
        if not has_credentials:
            raise no_credentials()
        if self.settings.transport == "estimator" and importlib.util.find_spec("sagemaker") is None:
            raise no_sdk()

    def start_loading(self) -> None:
        """Begin in the background what takes longest, the import of the SageMaker SDK; `check_ready` comes before.

        A submit that fails meanwhile does not wait for it.
        """
        if self.settings.transport == "estimator":
            start_loading()

    def start_checks(self, plan: Plan) -> PendingChecks:
        """Start asking the account everything that a plan needs of it, a sandbox only for the checkpoints."""
        from cloudtrain.preflight import start_checks  # a dozen modules that only a submit needs

        return start_checks(plan, self.settings, self._session(), only_checkpoints=self.name != SAGEMAKER)

    def check_resume(self, plan: Plan) -> tuple[Check, ...]:
        """Ask whether there is a whole checkpoint that a plan can go on from."""
        from cloudtrain.preflight import check_resume

        return check_resume(plan, self.settings, self._session())

    def under(self, settings: Settings) -> SageMakerBackend:
        """Return a backend of the same session with other settings."""
        return SageMakerBackend(
            settings, prices=self.prices, poll_seconds=self.poll_seconds, session=self._session(), name=self.name
        )

    # ------------------------------------------------------------ submit

    def find_live(self, plan: Plan) -> Run | None:
        """Return the run of the same request and code that goes on, or None.

        A first look that saves the rest of the work: what keeps it from looking is told by the checks, or by `reserve`.
        """
        with contextlib.suppress(CloudError), aws_errors("look for a run of the same request"):
            claim = self._claims(plan).read(plan.identity)
            state = None if claim is None else self._state(claim.run)
            if claim is not None and state is not None and not state.is_final:
                return Run(claim.run, self, attached=True)
        return None

    def reserve(self, plan: Plan) -> Run | Plan:
        """Claim a request for a plan's run, or find out who has.

        Returns:
            The run that goes on already; else the plan, under the id of whoever is about to start the same, if
            somebody is: SageMaker takes one job of a name.
        """
        claims = self._claims(plan)
        with aws_errors("claim the request"):
            for _ in range(_CLAIM_ATTEMPTS):
                claim = claims.read(plan.identity)
                if claim is not None and claim.run == plan.run:
                    return plan
                state = None if claim is None else self._state(claim.run)
                if claim is not None and state is not None and not state.is_final:
                    return Run(claim.run, self, attached=True)
                if claim is not None and state is None and claim.run and claim.age_seconds < _CLAIM_SECONDS:
                    return plan.rename(claim.run)
                if claims.write(plan.identity, plan.run, over=claim):
                    return plan
        raise CloudError(
            "the claim on this request is always somebody else's",
            "try again; or let the credentials read objects below the prefix (s3:GetObject, s3:ListBucket)",
        )

    def hand_over(self, plan: Plan) -> None:
        """Let later submits of the request attach to this run, which goes on beside whatever they attached to.

        Only once it is there: a claim on a run that never began would hide the one that goes on. It is no error when
        the claim cannot be written, because the run has begun.
        """
        with contextlib.suppress(CloudError), aws_errors("claim the request"):
            self._claims(plan).overwrite(plan.identity, plan.run)

    def _claims(self, plan: Plan) -> Claims:
        return Claims(self._client("s3"), plan.locations.output)

    def _state(self, run: str) -> State | None:
        """Return the state of a run, or None when there is none; a claim that cannot be read names none."""
        if not run:
            return None
        try:
            job = self._describe(run)
        except RunNotFoundError:
            return None
        return read_state(job)

    def submit(self, plan: Plan, bundle: Bundle | None, *, progress: ProgressCallback | None = None) -> Run:
        """Upload what is not there yet and create the training job, or put it into its queue.

        Args:
            plan: What to send.
            bundle: Its code, or None where an earlier run has uploaded it.
            progress: Told how many bytes have been uploaded, and how many there are.

        Raises:
            CloudError: AWS refused; no job was created.
            DriftError: the estimator would have sent something else than the plan; no job was created.
            MissingExtraError: the SageMaker SDK is not installed and transport is `estimator`.
            UserError: a file of the data cannot be read, or an earlier run's code is gone; no job was created.
        """
        self._upload(plan, bundle, progress)
        with aws_errors("create the training job"):
            is_new = self._create(plan)
        return Run(plan.run, self, attached=not is_new)

    def _create(self, plan: Plan) -> bool:
        """Create the training job; return False when another submit of the same request and code was faster."""
        from botocore.exceptions import ClientError

        client = self._client("sagemaker")
        is_direct = self.settings.transport == "boto3"
        try:
            if plan.queue is not None:
                by_sdk = None if is_direct else render_by_estimator(plan, self._session(), client)
                self._queues.submit(plan, render_payload(by_sdk or plan.request))
            elif is_direct:
                client.create_training_job(**plan.request)
            else:
                send_by_estimator(plan, self._session(), client)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceInUse" or not self._is_ours(plan):
                raise
            # Tried again by botocore, because an answer was lost: then it was this call that has created the job.
            return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) > 0
        return True

    def _is_ours(self, plan: Plan) -> bool:
        """Whether the training job of this name is of the same request and code."""
        client = self._client("sagemaker")
        arn = client.describe_training_job(TrainingJobName=plan.run)["TrainingJobArn"]
        pages = client.get_paginator("list_tags").paginate(ResourceArn=arn)
        tags = {tag["Key"]: tag["Value"] for page in pages for tag in page["Tags"]}
        return tags.get(REQUEST_TAG) == plan.identity

    def _upload(self, plan: Plan, bundle: Bundle | None, progress: ProgressCallback | None) -> None:
        uploads = Uploads(self._client("s3"))
        told = "upload the code and the data" if plan.uploads else "upload the code"
        with aws_errors(told), tempfile.TemporaryDirectory(prefix="cloudtrain-code-") as kept:
            if bundle is not None:
                uploads.add_archive(bundle.path, plan.locations.code)
            else:
                uploads.renew_archive(plan.locations.code, Path(kept))
            for upload in plan.uploads:
                uploads.add_folder(Path(upload.path), upload.uri)
            uploads.send(progress)
            folder = plan.locations.config
            uploads.put_texts(
                {
                    f"{folder}/{CONFIG_FILE}": plan.config.to_json(),
                    # Beside it, not in a channel: what was decided, and of which commit and changes the code was.
                    f"{folder.rpartition('/')[0]}/{PLAN_FILE}": plan.to_file(),
                }
            )

    # ------------------------------------------------------------ look

    def status(self, run: str) -> Status:
        """Return the present status of a training job."""
        job = self._describe(run)
        progress = self._job_logs().progress(run)
        instance_type, _ = read_cluster(job["ResourceConfig"])
        instances = read_instances(job)
        phases, now = read_phases(job), datetime.now(UTC)
        billable = int(job.get("BillableTimeInSeconds") or seconds_on_instances(phases, now))
        price = self.prices.usd_per_hour(instance_type or "", self.settings.region or "")
        metrics = {metric["MetricName"]: float(metric["Value"]) for metric in job.get("FinalMetricDataList", [])}
        progress = dataclasses.replace(progress, metrics={**metrics, **progress.metrics})
        return Status(
            run=run,
            backend=self.name,
            state=read_state(job),
            reason=read_reason(job, now),
            created=job.get("CreationTime"),
            started=job.get("TrainingStartTime"),
            ended=job.get("TrainingEndTime"),
            billable_seconds=billable,
            cost_usd=None if price is None else round(price * instances * billable / 3600, 2),
            instance_type=instance_type,
            instances=instances,
            usd_per_hour=None if price is None else round(price * instances, 4),
            phases=phases,
            warm_pool=read_pool(job, None if price is None else price * instances, now),
            waiting=read_waiting(job),
            is_spot=bool(job.get("EnableManagedSpotTraining")),
            ends_by=read_end(job, now),
            world_size=progress.world_size or self._planned_world_size(run, job),
            progress=progress,
            artifacts={
                name: uri
                for name, uri in (("model", job.get("ModelArtifacts", {}).get("S3ModelArtifacts")),)
                if uri is not None
            },
        )

    def _planned_world_size(self, run: str, job: Mapping[str, Any]) -> int | None:
        """Return the number of ranks that a run's plan gives; None where the plan cannot be read. It is read once."""
        if run not in self._planned:
            try:
                cluster = self._read_plan(run, job).get("cluster")
            except UnreachableError:
                return None
            except (CloudError, UserError):
                cluster = None
            world_size = cluster.get("world_size") if isinstance(cluster, Mapping) else None
            self._planned[run] = world_size if isinstance(world_size, int) and world_size > 0 else None
        return self._planned[run]

    def has(self, run: str) -> bool:
        """Whether there is a run of this id."""
        return self._state(run) is not None

    def _describe(self, run: str) -> Mapping[str, Any]:
        from botocore.exceptions import ClientError

        if self._queues.names(run) is not None and (known := self._queues.describe(run)) is not None:
            return known
        with aws_errors("describe the training job"):
            try:
                description: Mapping[str, Any] = self._client("sagemaker").describe_training_job(TrainingJobName=run)
            except ClientError as error:
                if error.response["Error"]["Code"] in ("ValidationException", "ResourceNotFound"):
                    queued = self._queues.describe(run)
                    if queued is not None:
                        return queued
                    region = self.settings.region
                    raise RunNotFoundError(
                        f"SageMaker has no training job {run} in {region}", "see: cloudtrain list"
                    ) from None
                raise
        if "TrainingJobStatus" not in description:
            raise UnreachableError("could not describe the training job: the answer ends in the middle", "try again")
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
        """Yield the wanted log lines of all hosts, each once (see `JobLogs`)."""
        if follow:
            return self._job_logs().follow(run, only, lambda: self._look(run), on_trouble)
        return self._job_logs().read(run, only, lambda: self._look(run))

    def _look(self, run: str) -> JobNow:
        """Return what a tail must know of its job. Only times of AWS's own clock are compared."""
        job = self._describe(run)
        secondary = job.get("SecondaryStatus", "")
        has_ended = read_state(job).is_final
        now, ended = aws_time(job), job.get("TrainingEndTime") or job.get("LastModifiedTime")
        ago = max(0.0, now - ended.timestamp()) if has_ended and now is not None and ended is not None else 0.0
        return JobNow(secondary, has_ended, ago)

    def _jobs_of(self, run: str) -> tuple[str, ...]:
        """Return the names of a run's training jobs: its own, or those that a queue has made of it so far."""
        names = self._queues.names(run)
        return (run,) if names is None else names

    def _job_logs(self) -> JobLogs:
        if self._logs is None:
            client = self._client("logs")
            self._logs = JobLogs(client, jobs=self._jobs_of, scale=self._scale)
        return self._logs

    def list(self, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the jobs that cloudtrain has named, newest first; pages are asked for when they are needed."""
        both = (list_jobs(self._client("sagemaker"), wanted, self.name), self._queues.list(self.name, wanted))
        return heapq.merge(*both, key=submission_time, reverse=True)

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the job's own values by field of job.yaml; those of run.json only where S3 lets us read it."""
        from cloudtrain.failure_rules import read_facts

        job = self._describe(run)
        folder = _config_folder(job)
        try:
            config = self._read_json(f"{folder}/{CONFIG_FILE}") if folder else {}
        except CloudError:
            config = {}
        try:
            plan = self._read_plan(run, job)
        except (CloudError, UserError):
            plan = {}
        return read_facts(job, read_fields(config, CONFIG), read_fields(plan, PLAN))

    def plan_of(self, run: str) -> Mapping[str, Any]:
        """Return what was decided for a run: the plan.json that lies beside its configuration in S3.

        Raises:
            UserError: there is none, because something else has submitted it.
            CloudError: AWS refused or cannot be reached.
        """
        return self._read_plan(run, self._describe(run))

    def _read_plan(self, run: str, job: Mapping[str, Any]) -> Mapping[str, Any]:
        from botocore.exceptions import ClientError

        folder = _config_folder(job)
        if not folder:
            raise UserError(f"{run} was not submitted by cloudtrain", "submit its job: cloudtrain submit JOB")
        uri = f"{folder.rpartition('/')[0]}/{PLAN_FILE}"
        try:
            return read_fields(self._read_json(uri), PLAN)
        except CloudError as error:
            if isinstance(error.__context__, ClientError) and "NoSuchKey" in error.message:
                raise UserError(f"the plan of {run} is gone: {uri}", "submit its job: cloudtrain submit JOB") from None
            raise

    def _read_json(self, uri: str) -> Mapping[str, Any]:
        bucket, key = split_uri(uri)
        with aws_errors(f"read {uri}"):
            body = self._client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return {}  # somebody has written something else there
        return content if isinstance(content, dict) else {}

    # ------------------------------------------------------------ stop

    def stop(self, run: str) -> None:
        """Ask SageMaker to stop the job; one that has ended stays as it is."""
        from botocore.exceptions import ClientError

        job = self._describe(run)
        if read_state(job).is_final:
            return
        if self._queues.stop(run):
            return
        with aws_errors("stop the training job"):
            try:
                self._client("sagemaker").stop_training_job(TrainingJobName=job["TrainingJobName"])
            except ClientError as error:
                # It may have ended, or begun to stop, since it was looked at.
                state = self._state(run)
                is_over = state is not None and (state.is_final or state is State.STOPPING)
                if error.response["Error"]["Code"] != "ValidationException" or not is_over:
                    raise

    def end_warm_pool(self, run: str) -> None:
        """End the warm pool that a job has left behind: from then on it is not paid for.

        Raises:
            UserError: it keeps none.
        """
        backoff = self.poll_backoff()
        for _ in range(_POOL_POLLS):
            job = self._describe(run)
            pool = read_pool(job, None, datetime.now(UTC))
            if pool is None or pool.status != "InUse" or job["TrainingJobStatus"] not in FINAL_STATES:
                break
            time.sleep(backoff.next_seconds())
        if pool is None or not pool.is_available:
            reference = f"{self.name}:{run}"
            raise UserError(
                f"{reference} keeps no warm pool: {_why_no_pool(pool)}", f"see: cloudtrain status {reference}"
            )
        with aws_errors("end the warm pool"):
            # Source: AWS's guide of warm pools, "Terminate a warm pool".
            self._client("sagemaker").update_training_job(
                TrainingJobName=run, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
            )

    # ------------------------------------------------------------ AWS

    def _session(self) -> Any:
        if self._session_ is None:
            import boto3

            with aws_errors("read the AWS configuration"):
                self._session_ = boto3.Session(region_name=self.settings.region)
        return self._session_

    def _client(self, service: str) -> Any:
        with self._making:
            if service not in self._clients:
                from botocore.config import Config

                if self.settings.region is None:
                    raise SettingsError("no AWS region is set", "export CLOUDTRAIN_REGION=..., such as us-west-2")
                with aws_errors(f"reach {service}"):
                    config = Config(retries=client_retries(), **_TIMEOUTS.get(service, {}))
                    client = make_client(self._session(), service, config=config)
                if service == "s3":
                    # What it reads and writes is the account's own. The account is the role's, because
                    # CreateTrainingJob takes no role of another; asking STS would be one more call to an address that
                    # a private network may not reach.
                    expect_owner(client, lambda _: self.settings.account)
                self._clients[service] = client
            return self._clients[service]


def _why_no_pool(pool: WarmPool | None) -> str:
    if pool is None:
        return "the job asked for none (cluster.keep_alive)"
    if pool.reused_by:
        return f"{pool.reused_by} has taken it over"
    return "the job has not ended" if pool.status == "InUse" else "it has ended already"


def _config_folder(job: Mapping[str, Any]) -> str:
    """Return the uri of a job's configuration without a slash at its end, or an empty string where it has none.

    Runs submitted by version 0.1 have none there in their requests, later ones do.
    """
    channels = {channel["ChannelName"]: channel for channel in job.get("InputDataConfig", [])}
    source = channels.get(CONFIG_CHANNEL, {}).get("DataSource", {}).get("S3DataSource", {})
    return str(source.get("S3Uri", "")).rstrip("/")
