"""Runs on SageMaker: upload, send exactly the plan, and tell the truth about it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain import catalog
from cloudtrain.aws import aws_errors, no_credentials
from cloudtrain.backends.sagemaker.estimator import no_sdk, send_by_estimator
from cloudtrain.backends.sagemaker.logs import JobLogs, JobNow, aws_time
from cloudtrain.backends.sagemaker.pace import QUICK_SECONDS, BackoffPace, Budget, pace_client
from cloudtrain.backends.sagemaker.states import map_state, read_phases, read_reason, seconds_on_instances
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import CloudError, RunNotFoundError, SettingsError, UnreachableError
from cloudtrain.plan import SAGEMAKER, Plan
from cloudtrain.preflight import Pending, start_checks
from cloudtrain.request import split_uri
from cloudtrain.run import EVERYTHING, LogFilter, LogLine, Run, Status, is_run_id
from cloudtrain.settings import Settings
from cloudtrain_runtime.contract import CONFIG_CHANNEL, CONFIG_FILE

PLAN_FILE = "plan.json"
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
        poll_seconds: float = QUICK_SECONDS,
        session: Any = None,
        name: str = SAGEMAKER,
    ) -> None:
        self.name = name
        self.settings = settings
        self.prices = prices or catalog.bundled_prices()
        self.poll_seconds = poll_seconds
        self._session_: Any = session
        self._clients: dict[str, Any] = {}
        self._budgets: dict[str, Budget] = {}
        self._scale = max(poll_seconds, 0.001) / QUICK_SECONDS
        self._logs: JobLogs | None = None

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

    def start_checks(self, plan: Plan) -> Pending:
        """Start asking the account everything that a plan needs of it; nothing is changed there."""
        return start_checks(plan, self.settings, self._session())

    # ------------------------------------------------------------ submit

    def submit(self, plan: Plan, bundle: Bundle) -> Run:
        """Upload what is not there yet and create the training job.

        Raises:
            CloudError: AWS refused; no job was created.
            DriftError: the estimator would have sent something else than the plan; no job was created.
            MissingExtraError: the SageMaker SDK is not installed and transport is `estimator`.
        """
        with aws_errors("upload the code"):
            self._upload_once(bundle.path, plan.locations.code)
            self._put_text(f"{plan.locations.config}/{CONFIG_FILE}", plan.config.to_json())
            # Beside the run, not in a channel: what was decided, and of which commit and changes the code was.
            self._put_text(f"{plan.locations.config.rpartition('/')[0]}/{PLAN_FILE}", plan.to_file())
            for upload in plan.uploads:
                self._upload_tree(Path(upload.path), upload.uri)
        with aws_errors("create the training job"):
            if self.settings.transport == "boto3":
                self._client("sagemaker").create_training_job(**plan.request)
            else:
                send_by_estimator(plan, self._session(), self._client("sagemaker"))
        return Run(plan.run, self)

    def _upload_once(self, path: Path, uri: str) -> None:
        """Upload a file whose name holds its digest, unless it is there."""
        bucket, key = split_uri(uri)
        s3 = self._client("s3")
        from botocore.exceptions import ClientError

        try:
            s3.head_object(Bucket=bucket, Key=key, **self._expected_owner())
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("404", "NoSuchKey", "NotFound"):
                raise
            s3.upload_file(str(path), bucket, key, ExtraArgs=self._expected_owner())

    def _put_text(self, uri: str, text: str) -> None:
        bucket, key = split_uri(uri)
        self._client("s3").put_object(Bucket=bucket, Key=key, Body=text.encode(), **self._expected_owner())

    def _upload_tree(self, path: Path, uri: str) -> None:
        bucket, prefix = split_uri(uri)
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        root = path.parent if path.is_file() else path
        for file in files:
            key = f"{prefix}/{file.relative_to(root).as_posix()}"
            self._client("s3").upload_file(str(file), bucket, key, ExtraArgs=self._expected_owner())

    def _expected_owner(self) -> dict[str, str]:
        """Return the argument by which S3 refuses our bucket when it is no longer ours.

        The account is the role's, because CreateTrainingJob takes no role of another; asking STS would be one more call
        to an address that a private network may not reach.
        """
        return {"ExpectedBucketOwner": self.settings.account} if self.settings.account else {}

    # ------------------------------------------------------------ look

    def status(self, run: str) -> Status:
        """Return the present status of a training job."""
        job = self._describe(run)
        progress = self._job_logs().progress(run)
        resources = job["ResourceConfig"]
        instance_type = resources.get("SelectedInstanceType") or resources.get("InstanceType", "")
        instances = int(resources.get("SelectedInstanceCount") or resources.get("InstanceCount") or 1)
        instance = catalog.find_instance(instance_type)
        phases = read_phases(job)
        billable = int(job.get("BillableTimeInSeconds") or seconds_on_instances(phases, datetime.now(UTC)))
        price = self.prices.usd_per_hour(instance_type, self.settings.region or "")
        metrics = {metric["MetricName"]: float(metric["Value"]) for metric in job.get("FinalMetricDataList", [])}
        progress = dataclasses.replace(progress, metrics={**metrics, **progress.metrics})
        return Status(
            run=run,
            backend=self.name,
            state=map_state(job["TrainingJobStatus"], job.get("SecondaryStatus", "")),
            reason=read_reason(job),
            created=job.get("CreationTime"),
            started=job.get("TrainingStartTime"),
            ended=job.get("TrainingEndTime"),
            billable_seconds=billable,
            cost_usd=None if price is None else round(price * instances * billable / 3600, 2),
            instance_type=instance_type or None,
            instances=instances,
            usd_per_hour=None if price is None else round(price * instances, 4),
            phases=phases,
            world_size=progress.world_size or (instance.gpus * instances if instance and instance.gpus else None),
            progress=progress,
            artifacts={
                name: uri
                for name, uri in (("model", job.get("ModelArtifacts", {}).get("S3ModelArtifacts")),)
                if uri is not None
            },
        )

    def _describe(self, run: str) -> Mapping[str, Any]:
        from botocore.exceptions import ClientError

        with aws_errors("describe the training job"):
            try:
                description: Mapping[str, Any] = self._client("sagemaker").describe_training_job(TrainingJobName=run)
            except ClientError as error:
                if error.response["Error"]["Code"] in ("ValidationException", "ResourceNotFound"):
                    region = self.settings.region
                    raise RunNotFoundError(
                        f"SageMaker has no training job {run} in {region}", "see: cloudtrain list"
                    ) from None
                raise
        if "TrainingJobStatus" not in description:
            raise UnreachableError("could not describe the training job: the answer ends in the middle", "try again")
        return description

    def pace(self) -> BackoffPace:
        """Return how often to ask for the status."""
        return BackoffPace(self.poll_seconds)

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = EVERYTHING,
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
        has_ended = map_state(job["TrainingJobStatus"], secondary).is_final
        now, ended = aws_time(job), job.get("TrainingEndTime") or job.get("LastModifiedTime")
        ago = max(0.0, now - ended.timestamp()) if has_ended and now is not None and ended is not None else 0.0
        return JobNow(secondary, has_ended, ago)

    def _job_logs(self) -> JobLogs:
        if self._logs is None:
            client = self._client("logs")
            self._logs = JobLogs(client, share=self._budgets["GetLogEvents"].share, scale=self._scale)
        return self._logs

    def list(self) -> Iterator[Status]:
        """Yield the jobs that cloudtrain has named, newest first."""
        pages = self._client("sagemaker").get_paginator("list_training_jobs")
        with aws_errors("list training jobs"):
            for page in pages.paginate(SortBy="CreationTime", SortOrder="Descending"):
                for job in page["TrainingJobSummaries"]:
                    if is_run_id(job["TrainingJobName"]):
                        secondary = job.get("SecondaryStatus", "")
                        yield Status(
                            run=job["TrainingJobName"],
                            backend=self.name,
                            state=map_state(job["TrainingJobStatus"], secondary),
                            started=job.get("CreationTime"),
                            ended=job.get("TrainingEndTime"),
                        )

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the job's own values by field of job.yaml; those of run.json only where S3 lets us read it."""
        from cloudtrain.explain import read_facts

        job = self._describe(run)
        channels = {channel["ChannelName"]: channel for channel in job.get("InputDataConfig", [])}
        uri = channels.get(CONFIG_CHANNEL, {}).get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
        try:
            config = self._read_json(f"{uri}/{CONFIG_FILE}") if uri else {}
        except CloudError:
            config = {}
        return read_facts(job, config)

    def _read_json(self, uri: str) -> Mapping[str, Any]:
        bucket, key = split_uri(uri)
        with aws_errors(f"read {uri}"):
            body = self._client("s3").get_object(Bucket=bucket, Key=key, **self._expected_owner())["Body"].read()
        content = json.loads(body)
        return content if isinstance(content, dict) else {}

    # ------------------------------------------------------------ stop

    def stop(self, run: str) -> None:
        """Ask SageMaker to stop the job; one that has ended stays as it is."""
        job = self._describe(run)
        if map_state(job["TrainingJobStatus"], job.get("SecondaryStatus", "")).is_final:
            return
        with aws_errors("stop the training job"):
            self._client("sagemaker").stop_training_job(TrainingJobName=run)

    # ------------------------------------------------------------ AWS

    def _session(self) -> Any:
        if self._session_ is None:
            import boto3

            with aws_errors("read the AWS configuration"):
                self._session_ = boto3.Session(region_name=self.settings.region)
        return self._session_

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            if self.settings.region is None:
                raise SettingsError("no AWS region is set", "export CLOUDTRAIN_REGION=..., such as us-west-2")
            with aws_errors(f"reach {service}"):
                config = Config(retries={"mode": "standard", "max_attempts": 5}, **_TIMEOUTS.get(service, {}))
                self._clients[service] = self._session().client(service, config=config)
            if service in ("logs", "sagemaker"):
                self._budgets |= pace_client(self._clients[service], scale=1 / self._scale)
        return self._clients[service]
