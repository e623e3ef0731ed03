"""Runs on SageMaker: upload, send exactly the plan, and tell the truth about it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain import catalog
from cloudtrain.aws import aws_errors, no_credentials
from cloudtrain.backends.sagemaker.estimator import no_sdk, send_by_estimator
from cloudtrain.backends.sagemaker.states import map_state, read_phases, read_reason, seconds_on_instances
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import CloudError, RunNotFoundError, SettingsError
from cloudtrain.plan import SAGEMAKER, Plan
from cloudtrain.preflight import Pending, start_checks
from cloudtrain.request import split_uri
from cloudtrain.run import EVERYTHING, LogFilter, LogLine, Progress, Run, Status, fold_events, is_run_id
from cloudtrain.settings import Settings
from cloudtrain_runtime.contract import CONFIG_CHANNEL, CONFIG_FILE, parse_event, sort_hosts

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PLAN_FILE = "plan.json"
_POLL_SECONDS = 5.0
_STATUS_EVENTS = 1000
"""Log lines that `status` reads from the end of the first host's stream."""


class SageMakerBackend:
    """Training jobs in one account and region.

    Args:
        session: boto3 session to send with; by default one from the environment.
        name: Another name where the session leads elsewhere, such as to a sandbox.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        prices: catalog.Prices | None = None,
        poll_seconds: float = _POLL_SECONDS,
        session: Any = None,
        name: str = SAGEMAKER,
    ) -> None:
        self.name = name
        self.settings = settings
        self.prices = prices or catalog.bundled_prices()
        self.poll_seconds = poll_seconds
        self._session_: Any = session
        self._clients: dict[str, Any] = {}

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
        progress = self._progress(run)
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
        return description

    def _progress(self, run: str) -> Progress:
        """Return what the newest log lines of the first host tell."""
        streams = self._streams(run)
        if not streams:
            return Progress()
        with aws_errors("read the log"):
            page = self._client("logs").get_log_events(
                logGroupName=LOG_GROUP,
                logStreamName=_newest_of_first_host(streams),
                startFromHead=False,
                limit=_STATUS_EVENTS,
            )
        parsed = (parse_event(event["message"]) for event in page["events"])
        return fold_events(event for event in parsed if event is not None)

    def _streams(self, run: str) -> list[str]:
        """Return the log streams of a run's hosts, in the hosts' order."""
        logs = self._client("logs")
        with aws_errors("list the log streams"):
            try:
                pages = logs.get_paginator("describe_log_streams").paginate(
                    logGroupName=LOG_GROUP, logStreamNamePrefix=f"{run}/"
                )
                return sort_hosts([stream["logStreamName"] for page in pages for stream in page["logStreams"]])
            except logs.exceptions.ResourceNotFoundException:
                return []

    def logs(self, run: str, *, follow: bool = False, only: LogFilter = EVERYTHING) -> Iterator[LogLine]:
        """Yield the log lines of all hosts, each once."""
        tokens: dict[str, str] = {}
        while True:
            is_over = (
                not follow
                or map_state((job := self._describe(run))["TrainingJobStatus"], job.get("SecondaryStatus", "")).is_final
            )
            for stream in self._streams(run):
                host = stream.rpartition("/")[2].rpartition("-")[0]
                for event in self._new_events(stream, tokens):
                    line = LogLine(host, event["message"], event["timestamp"] / 1000)
                    if only.wants(line):
                        yield line
            if is_over:
                return
            time.sleep(self.poll_seconds)

    def _new_events(self, stream: str, tokens: dict[str, str]) -> Iterator[Mapping[str, Any]]:
        """Yield what has come since the token of this stream; the same token twice means the end for now."""
        while True:
            with aws_errors("read the log"):
                page = self._client("logs").get_log_events(
                    logGroupName=LOG_GROUP,
                    logStreamName=stream,
                    startFromHead=True,
                    **({"nextToken": tokens[stream]} if stream in tokens else {}),
                )
            yield from page["events"]
            if page["nextForwardToken"] == tokens.get(stream):
                return
            tokens[stream] = page["nextForwardToken"]

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
                config = Config(retries={"mode": "standard", "max_attempts": 5})
                self._clients[service] = self._session().client(service, config=config)
        return self._clients[service]


def _newest_of_first_host(streams: list[str]) -> str:
    """Return the stream that the first host writes to now: instances that replace others begin streams of their own."""
    first = streams[0].rpartition("-")[0]
    return [stream for stream in streams if stream.rpartition("-")[0] == first][-1]
