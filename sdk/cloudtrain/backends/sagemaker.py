"""Runs on SageMaker: upload, send exactly the plan, and tell the truth about it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain import catalog
from cloudtrain.bundle.archive import Bundle
from cloudtrain.errors import CloudError, DriftError, MissingExtraError, RunNotFoundError, SettingsError
from cloudtrain.plan import SAGEMAKER, Plan
from cloudtrain.preflight import Pending, start_checks
from cloudtrain.request import distribution_argument
from cloudtrain.run import LogLine, Progress, Run, State, Status, fold_events, is_run_id
from cloudtrain.settings import Settings
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL, CONFIG_FILE, parse_event, sort_hosts

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PLAN_FILE = "plan.json"
_POLL_SECONDS = 5.0
_STATUS_EVENTS = 1000
"""Log lines that `status` reads from the end of the first host's stream."""

FINAL_STATES = {
    "Completed": State.SUCCEEDED,
    "Failed": State.FAILED,
    "Stopped": State.STOPPED,
    "Deleting": State.STOPPED,
}
"""TrainingJobStatus of an ended job. `Stopped` is never success."""

ACTIVE_STATES = {
    "Pending": State.QUEUED,
    "Starting": State.STARTING,
    "LaunchingMLInstances": State.STARTING,
    "PreparingTrainingStack": State.STARTING,
    "Downloading": State.STARTING,
    "DownloadingTrainingImage": State.STARTING,
    "Restarting": State.STARTING,
    "Training": State.RUNNING,
    "Updating": State.RUNNING,
    "Uploading": State.RUNNING,
    "Interrupted": State.INTERRUPTED,
    "Stopping": State.STOPPING,
    "Stopped": State.STOPPING,
    "MaxRuntimeExceeded": State.STOPPING,
    "MaxWaitTimeExceeded": State.STOPPING,
    "Completed": State.RUNNING,
    "Failed": State.STOPPING,
}
"""SecondaryStatus of a job in progress: every one that botocore's model knows (a test compares)."""

_STOP_REASONS = {
    "MaxRuntimeExceeded": "MaxRuntimeExceeded: limits.runtime is over",
    "MaxWaitTimeExceeded": "MaxWaitTimeExceeded: spot capacity did not come in cluster.spot.max_wait",
    "Interrupted": "interrupted: spot capacity was taken away",
}


def map_state(status: str, secondary: str) -> State:
    """Return our state for a TrainingJobStatus and its SecondaryStatus."""
    if status in FINAL_STATES:
        return FINAL_STATES[status]
    if status == "Stopping":
        return State.STOPPING
    # A secondary status newer than this mapping: the job is in progress, that much is sure.
    return ACTIVE_STATES.get(secondary, State.RUNNING)


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
        with _aws_errors("find credentials"):
            has_credentials = self._session().get_credentials() is not None
        try:
            self.settings.require()
        except SettingsError as error:
            if has_credentials:
                raise
            raise SettingsError(f"{error.message}; and there are no AWS credentials", error.hint) from None
        if not has_credentials:
            raise _no_credentials()
        if self.settings.transport == "estimator" and importlib.util.find_spec("sagemaker") is None:
            raise _no_sdk()

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
        with _aws_errors("upload the code"):
            self._upload_once(bundle.path, plan.locations.code)
            self._put_text(f"{plan.locations.config}/{CONFIG_FILE}", plan.config.to_json())
            # Beside the run, not in a channel: what was decided, and of which commit and changes the code was.
            self._put_text(f"{plan.locations.config.rpartition('/')[0]}/{PLAN_FILE}", plan.to_file())
            for upload in plan.uploads:
                self._upload_tree(Path(upload.path), upload.uri)
        with _aws_errors("create the training job"):
            if self.settings.transport == "boto3":
                self._client("sagemaker").create_training_job(**plan.request)
            else:
                send_by_estimator(plan, self._session(), self._client("sagemaker"))
        return Run(plan.run, self)

    def _upload_once(self, path: Path, uri: str) -> None:
        """Upload a file whose name holds its digest, unless it is there."""
        bucket, key = _split(uri)
        s3 = self._client("s3")
        from botocore.exceptions import ClientError

        try:
            s3.head_object(Bucket=bucket, Key=key, **self._expected_owner())
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("404", "NoSuchKey", "NotFound"):
                raise
            s3.upload_file(str(path), bucket, key, ExtraArgs=self._expected_owner())

    def _put_text(self, uri: str, text: str) -> None:
        bucket, key = _split(uri)
        self._client("s3").put_object(Bucket=bucket, Key=key, Body=text.encode(), **self._expected_owner())

    def _upload_tree(self, path: Path, uri: str) -> None:
        bucket, prefix = _split(uri)
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
        billable = int(job.get("BillableTimeInSeconds") or 0)
        price = self.prices.usd_per_hour(instance_type, self.settings.region or "")
        metrics = {metric["MetricName"]: float(metric["Value"]) for metric in job.get("FinalMetricDataList", [])}
        progress = _with_metrics(progress, metrics)
        return Status(
            run=run,
            backend=self.name,
            state=map_state(job["TrainingJobStatus"], job.get("SecondaryStatus", "")),
            reason=_reason(job),
            started=job.get("TrainingStartTime"),
            ended=job.get("TrainingEndTime"),
            billable_seconds=billable,
            cost_usd=None if price is None else round(price * instances * billable / 3600, 2),
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

        with _aws_errors("describe the training job"):
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
        with _aws_errors("read the log"):
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
        with _aws_errors("list the log streams"):
            try:
                pages = logs.get_paginator("describe_log_streams").paginate(
                    logGroupName=LOG_GROUP, logStreamNamePrefix=f"{run}/"
                )
                return sort_hosts([stream["logStreamName"] for page in pages for stream in page["logStreams"]])
            except logs.exceptions.ResourceNotFoundException:
                return []

    def logs(self, run: str, *, follow: bool = False) -> Iterator[LogLine]:
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
                    yield LogLine(host, event["message"], event["timestamp"] / 1000)
            if is_over:
                return
            time.sleep(self.poll_seconds)

    def _new_events(self, stream: str, tokens: dict[str, str]) -> Iterator[Mapping[str, Any]]:
        """Yield what has come since the token of this stream; the same token twice means the end for now."""
        while True:
            with _aws_errors("read the log"):
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
        with _aws_errors("list training jobs"):
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
        bucket, key = _split(uri)
        with _aws_errors(f"read {uri}"):
            body = self._client("s3").get_object(Bucket=bucket, Key=key, **self._expected_owner())["Body"].read()
        content = json.loads(body)
        return content if isinstance(content, dict) else {}

    # ------------------------------------------------------------ stop

    def stop(self, run: str) -> None:
        """Ask SageMaker to stop the job; one that has ended stays as it is."""
        job = self._describe(run)
        if map_state(job["TrainingJobStatus"], job.get("SecondaryStatus", "")).is_final:
            return
        with _aws_errors("stop the training job"):
            self._client("sagemaker").stop_training_job(TrainingJobName=run)

    # ------------------------------------------------------------ AWS

    def _session(self) -> Any:
        if self._session_ is None:
            import boto3

            with _aws_errors("read the AWS configuration"):
                self._session_ = boto3.Session(region_name=self.settings.region)
        return self._session_

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            if self.settings.region is None:
                raise SettingsError("no AWS region is set", "export CLOUDTRAIN_REGION=..., such as us-west-2")
            with _aws_errors(f"reach {service}"):
                config = Config(retries={"mode": "standard", "max_attempts": 5})
                self._clients[service] = self._session().client(service, config=config)
        return self._clients[service]


# ---------------------------------------------------------------- the estimator


def send_by_estimator(plan: Plan, session: Any, client: Any) -> None:
    """Create the training job through a real `sagemaker.pytorch.PyTorch` estimator.

    The one function that imports the SageMaker SDK (v2, whose support ends on 2027-07-06). Its import prints to
    standard output and replaces sys.excepthook; both are kept from the user.

    Raises:
        DriftError: it was about to send something else than the plan.
        MissingExtraError: it is not installed.
    """
    guard = DriftGuard(plan.request)
    with _quiet():
        try:
            os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
            from sagemaker.debugger.debugger import TensorBoardOutputConfig
            from sagemaker.inputs import TrainingInput
            from sagemaker.pytorch.estimator import PyTorch
            from sagemaker.session import Session
        except ImportError:
            raise _no_sdk() from None
        # Telemetry is on by default in v2 and would send the account id and error texts.
        no_telemetry = {"SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}, "SchemaVersion": "1.0"}
        sagemaker_session = Session(
            boto_session=session,
            sagemaker_client=client,
            default_bucket=_split(plan.locations.output)[0],  # else it asks STS at a fixed address
            sagemaker_config=no_telemetry,
        )
        events = client.meta.events
        events.register("provide-client-params.sagemaker.CreateTrainingJob", guard)
        try:
            board = plan.request.get("TensorBoardOutputConfig")
            estimator = PyTorch(
                **estimator_arguments(plan),
                sagemaker_session=sagemaker_session,
                tensorboard_output_config=TensorBoardOutputConfig(board["S3OutputPath"]) if board else None,
            )
            inputs = {
                channel["ChannelName"]: TrainingInput(
                    s3_data=channel["DataSource"]["S3DataSource"]["S3Uri"],
                    distribution=channel["DataSource"]["S3DataSource"]["S3DataDistributionType"],
                    input_mode=channel.get("InputMode"),
                )
                for channel in plan.request["InputDataConfig"]
                # With network isolation the SDK adds this one itself and refuses it as an input.
                if not (channel["ChannelName"] == CODE_CHANNEL and plan.request.get("EnableNetworkIsolation"))
            }
            # wait=True would swallow Ctrl-C; we watch ourselves.
            estimator.fit(inputs, wait=False, job_name=plan.run)
        finally:
            events.unregister("provide-client-params.sagemaker.CreateTrainingJob", guard)


def estimator_arguments(plan: Plan) -> dict[str, Any]:
    """Return the estimator's arguments, read off the request; v2 takes a mistyped one without a word."""
    request = plan.request
    algorithm, resources, stopping = (
        request["AlgorithmSpecification"],
        request["ResourceConfig"],
        request["StoppingCondition"],
    )
    hyperparameters = {name: json.loads(value) for name, value in request["HyperParameters"].items()}
    network = request.get("VpcConfig", {})
    optional = {
        "container_entry_point": algorithm.get("ContainerEntrypoint"),
        "environment": request.get("Environment"),
        "subnets": network.get("Subnets"),
        "security_group_ids": network.get("SecurityGroupIds"),
        "checkpoint_s3_uri": request.get("CheckpointConfig", {}).get("S3Uri"),
        "max_retry_attempts": request.get("RetryStrategy", {}).get("MaximumRetryAttempts"),
        "enable_network_isolation": request.get("EnableNetworkIsolation"),
        "encrypt_inter_container_traffic": request.get("EnableInterContainerTrafficEncryption"),
        "use_spot_instances": request.get("EnableManagedSpotTraining"),
        "max_wait": stopping.get("MaxWaitTimeInSeconds"),
        "keep_alive_period_in_seconds": resources.get("KeepAlivePeriodInSeconds"),
        "volume_kms_key": resources.get("VolumeKmsKeyId"),
        "output_kms_key": request["OutputDataConfig"].get("KmsKeyId"),
    }
    return {
        "entry_point": hyperparameters["sagemaker_program"],
        "source_dir": plan.locations.code,
        "role": request["RoleArn"],
        "image_uri": algorithm["TrainingImage"],
        "instance_type": plan.cluster.instance_type,
        "instance_count": plan.cluster.instances,
        "distribution": distribution_argument(plan.cluster.distribution),
        "output_path": request["OutputDataConfig"]["S3OutputPath"],
        "code_location": request["OutputDataConfig"]["S3OutputPath"],
        "volume_size": resources["VolumeSizeInGB"],
        "max_run": stopping["MaxRuntimeInSeconds"],
        "metric_definitions": algorithm["MetricDefinitions"],
        "tags": request["Tags"],
        "debugger_hook_config": False,
        "disable_profiler": True,
        **{name: value for name, value in optional.items() if value is not None},
    }


class DriftGuard:
    """Compares what the estimator is about to send with the plan, and adds what v2 has no argument for.

    Registered as a botocore hook: it runs after the estimator has decided and before anything is sent.
    """

    def __init__(self, planned: Mapping[str, Any]) -> None:
        self.planned = planned

    def __call__(self, params: dict[str, Any], **_event: Any) -> None:
        """Complete the parameters; stop the call when they differ from the plan.

        Raises:
            DriftError: they differ.
        """
        self._complete(params)
        differences = list(compare(self.planned, params))
        if differences:
            lines = "\n    ".join(differences)
            raise DriftError(
                f"the SageMaker SDK was about to send something else than the plan; nothing was sent:\n    {lines}",
                "use CLOUDTRAIN_TRANSPORT=boto3 to send the plan itself, and report this with your sagemaker version",
            )

    def _complete(self, params: dict[str, Any]) -> None:
        pending = self.planned["StoppingCondition"].get("MaxPendingTimeInSeconds")
        if pending is not None:
            params["StoppingCondition"].setdefault("MaxPendingTimeInSeconds", pending)
        preferences = self.planned["ResourceConfig"].get("InstancePreferences")
        if "MlflowConfig" in self.planned:
            params.setdefault("MlflowConfig", copy.deepcopy(self.planned["MlflowConfig"]))
        if preferences is not None:
            resources = params["ResourceConfig"]
            resources.pop("InstanceType", None)
            resources.pop("InstanceCount", None)
            resources["InstancePreferences"] = copy.deepcopy(preferences)


def compare(planned: Any, sent: Any, path: str = "") -> Iterator[str]:
    """Yield the differences between two documents, a line each. Lists of named things are compared by name."""
    if isinstance(planned, Mapping) and isinstance(sent, Mapping):
        for key in sorted({*planned, *sent}):
            below = f"{path}.{key}" if path else str(key)
            if key not in sent:
                yield f"{below}: planned {planned[key]!r}, not sent"
            elif key not in planned:
                yield f"{below}: not planned, sent {sent[key]!r}"
            else:
                yield from compare(planned[key], sent[key], below)
    elif isinstance(planned, list) and isinstance(sent, list):
        yield from compare(_by_name(planned), _by_name(sent), path)
    elif planned != sent or isinstance(planned, bool) != isinstance(sent, bool):
        yield f"{path}: planned {planned!r}, sent {sent!r}"


def _by_name(items: list[Any]) -> dict[str, Any]:
    """Key list items by their name where they have one (their order means nothing), else by position."""
    named: dict[str, Any] = {}
    for index, item in enumerate(items):
        name = str(index)
        if isinstance(item, Mapping):
            name = next((str(item[key]) for key in ("ChannelName", "Key", "Name") if key in item), name)
        if f"[{name}]" in named:
            name = f"{name}, again at {index}"
        named[f"[{name}]"] = item
    return named


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the SDK's greetings and its progress notes to itself, and the user's exception hook in place."""
    hook = sys.excepthook
    loggers = [logging.getLogger(name) for name in ("sagemaker", "botocore", "boto3")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.excepthook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---------------------------------------------------------------- errors


@contextlib.contextmanager
def _aws_errors(action: str) -> Iterator[None]:
    """Turn botocore's exceptions into ours: what was tried, what AWS said, what to do."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ValueError as error:
        if "endpoint" not in str(error).lower():
            raise
        raise CloudError(f"could not {action}: {error}", "write AWS_ENDPOINT_URL as http://host:port") from None
    except (ClientError, BotoCoreError, Boto3Error) as error:
        # boto3's transfers wrap what AWS said.
        cause = error.__context__ if isinstance(error, Boto3Error) else error
        if isinstance(cause, ClientError):
            raise _refused(action, cause) from None
        raise _unreachable(action, error) from None


_HINTS: dict[str, str] = {
    "AccessDenied": "the credentials may not do this: compare their policy with what cloudtrain calls",
    "AccessDeniedException": "the credentials may not do this: compare their policy with what cloudtrain calls",
    "NoSuchBucket": "create the bucket, or set CLOUDTRAIN_BUCKET to one that exists",
    "ResourceLimitExceeded": "ask for a higher quota of this instance type in the Service Quotas console",
    "ExpiredToken": "sign in again",
    "ExpiredTokenException": "sign in again",
    "InvalidClientTokenId": "the access key is unknown: check the profile",
    "UnrecognizedClientException": "the access key is unknown: check the profile",
}


def _refused(action: str, error: ClientError) -> CloudError:
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    return CloudError(f"could not {action}: AWS says {code}: {details.get('Message', '')}", _HINTS.get(code, ""))


def _unreachable(action: str, error: Exception) -> CloudError:
    from botocore import exceptions

    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return _no_credentials()
    return CloudError(f"could not {action}: {error}", "check the network, the region and AWS_ENDPOINT_URL")


def _no_sdk() -> MissingExtraError:
    return MissingExtraError(
        "sending through the SageMaker SDK needs sagemaker 2.x",
        "pip install 'cloudtrain[sagemaker]', or send the same document without it: CLOUDTRAIN_TRANSPORT=boto3",
    )


def _no_credentials() -> CloudError:
    return CloudError(
        "there are no AWS credentials",
        "sign in (aws configure, aws sso login, or AWS_PROFILE). To run on this machine without an account: --local",
    )


# ---------------------------------------------------------------- reading a description


def _reason(job: Mapping[str, Any]) -> str:
    if job.get("FailureReason"):
        return str(job["FailureReason"])
    if job["TrainingJobStatus"] in ("Stopped", "Stopping"):
        statuses = [entry.get("Status") for entry in job.get("SecondaryStatusTransitions", [])]
        for status in (job.get("SecondaryStatus"), *reversed(statuses)):
            if status in _STOP_REASONS:
                return _STOP_REASONS[status]
        return "stopped by request"
    transitions = job.get("SecondaryStatusTransitions") or [{}]
    return str(transitions[-1].get("StatusMessage", ""))


def _newest_of_first_host(streams: list[str]) -> str:
    """Return the stream that the first host writes to now: instances that replace others begin streams of their own."""
    first = streams[0].rpartition("-")[0]
    return [stream for stream in streams if stream.rpartition("-")[0] == first][-1]


def _with_metrics(progress: Progress, final: Mapping[str, float]) -> Progress:
    return dataclasses.replace(progress, metrics={**final, **progress.metrics})


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
