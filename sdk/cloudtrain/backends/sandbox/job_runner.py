"""Runner of one training job: waits for instances, runs attempts, and restarts after interruptions."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain import catalog
from cloudtrain.aws.s3_download import DownloadError, download
from cloudtrain.backends.container.background import start_logged
from cloudtrain.backends.container.filesystem import MOUNTED, host_names
from cloudtrain.backends.container.folder_sync import FolderSync
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.machine import is_disk_full
from cloudtrain.backends.container.process_tree import kill, processes_of_run
from cloudtrain.backends.sandbox.attempt import OUTCOME_FILE, REQUEST_FILE
from cloudtrain.backends.sandbox.cloudwatch_logs import LogUploader
from cloudtrain.backends.sandbox.fault_injection import FaultInjector
from cloudtrain.backends.sandbox.file_systems import mounted_folder
from cloudtrain.backends.sandbox.own_folders import claim_folder
from cloudtrain.backends.sandbox.training_job import FAILURE_CHARACTERS, TrainingJob, WarmPools
from cloudtrain.support.data_files import data_files
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import (
    GRACE_VARIABLE,
    INSTANCE_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    STOP_GRACE_SECONDS,
)
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

if TYPE_CHECKING:
    from types_boto3_logs import CloudWatchLogsClient
    from types_boto3_s3 import S3Client

_POLL_SECONDS = 0.1
_SYNC_SECONDS = 1.0
_NO_CAPACITY = "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
_INTERNAL_ERROR = "InternalServerError: We encountered an internal error.  Please try again."
_MAX_RUNTIME = "MaxRuntimeExceeded"
_MAX_WAIT = "MaxWaitTimeExceeded"
_EXIT_CODE_CHARACTERS = 40
"""Characters of FailureReason that are reserved for the exit code at its end."""


@dataclass(frozen=True)
class RunnerEnvironment:
    """Resources that all jobs and endpoints of a sandbox share.

    Attributes:
        folder: Folder of the jobs' files.
        endpoints: Folder of the endpoints' files.
        file_systems: Folder with one folder for each file system that jobs mount.
        environment: AWS variables of the containers: endpoint, region, keys.
        s3: boto3 client of S3 for the sandbox's own calls.
        logs: boto3 client of CloudWatch Logs for the sandbox's own calls.
        cloudwatch: boto3 client of CloudWatch for the sandbox's own calls.
        faults: Injected faults.
        max_processes: Most ranks per instance.
        stop_grace_seconds: Time between SIGTERM and SIGKILL.
        is_ending: Set when the sandbox ends; then no process is started.
        pools: Warm pools of the account.
    """

    folder: Path
    endpoints: Path
    file_systems: Path
    environment: Mapping[str, str]
    s3: S3Client
    logs: CloudWatchLogsClient
    cloudwatch: Any
    faults: FaultInjector
    max_processes: int = 2
    stop_grace_seconds: float = STOP_GRACE_SECONDS
    is_ending: threading.Event = field(default_factory=threading.Event)
    pools: WarmPools = field(default_factory=WarmPools)


class JobRunner:
    """Runs one job in its own thread."""

    def __init__(self, job: TrainingJob, shared: RunnerEnvironment) -> None:
        self.job = job
        self._shared = shared
        self._folder = shared.folder / job.name
        self._attempts = 0
        self._retries = int(job.request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0))
        self._has_killed_instance = self._is_instance_dead = False
        self._process: subprocess.Popen[bytes] | None = None
        job.backdate(shared.faults.plan.waited_seconds)
        self._thread = threading.Thread(target=self._run, name=job.name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._shared.pools.add(self.job)
        self._thread.start()

    def kill(self) -> None:
        """Kill the process of the current attempt, which ends all processes of the job."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def _run(self) -> None:
        try:
            while not self.job.is_final and not self._shared.is_ending.is_set():
                if self._wait_for_instances():
                    self._run_attempt()
        except Exception:  # noqa: BLE001 (a bug must not leave the job in progress)
            if self._shared.is_ending.is_set():
                return
            traceback.print_exc()
            if not self.job.is_final:
                self._fail(self._internal_error())

    def _internal_error(self) -> str:
        """Return the reason of a failure of the sandbox itself."""
        if is_disk_full(self._shared.folder):
            return f"{_INTERNAL_ERROR} The disk is full ({self._shared.folder})."
        return _INTERNAL_ERROR

    def _fail(self, reason: str) -> None:
        self.job.enter("Failed", "Training job failed", failure=reason)

    def _end_early(self, ending: str) -> None:
        self.job.enter("Stopping")
        self.job.enter(ending)

    def _wait_for_instances(self) -> bool:
        """Wait until instances are available; return False if the job ended during the wait."""
        job = self.job
        since = job.created
        if job.secondary in ("Interrupted", "Restarting"):
            since = job.clock()
            job.enter("Starting")
        while True:
            plan = self._shared.faults.plan
            waited_seconds = job.clock() - since
            error_after = plan.capacity_error_after_seconds
            available = [each for each in job.choices if each[0] not in plan.no_capacity_types]
            if job.is_stop_requested.is_set():
                self._end_early("Stopped")
            elif self._has_exceeded_max_wait():
                self._end_early(_MAX_WAIT)
            elif self._has_exceeded_max_pending(waited_seconds):
                self._end_early("Stopped")
            elif self._attempts == 0 and self._shared.pools.take(job):
                return True
            elif (error_after is not None and waited_seconds >= error_after) or (
                not available and _fails_without_wait(job)
            ):
                self._fail(_NO_CAPACITY)
            elif (
                available and waited_seconds >= plan.capacity_after_seconds and error_after is None
            ):
                job.select(*available[0])
                return True
            else:
                if job.secondary == "Starting":
                    job.enter("Pending")
                job.is_stop_requested.wait(_POLL_SECONDS)
                continue
            return False

    def _has_exceeded_max_wait(self) -> bool:
        """Whether a spot job has used up MaxWaitTimeInSeconds, which counts waiting and training."""
        limit = self.job.limit("MaxWaitTimeInSeconds")
        return (
            self.job.is_spot and limit is not None and self.job.clock() - self.job.created >= limit
        )

    def _has_exceeded_max_pending(self, waited_seconds: float) -> bool:
        """Whether the job has exceeded MaxPendingTimeInSeconds, a limit for accelerated types (botocore's model)."""
        if not any(_is_accelerated(name) for name, _ in self.job.choices):
            return False
        limit = self.job.limit("MaxPendingTimeInSeconds")
        return limit is not None and waited_seconds >= limit

    def _run_attempt(self) -> None:
        self._attempts += 1
        job = self.job
        if self._attempts == 1:
            self._folder = claim_folder(self._folder)
        folder = JobFolder(self._folder / f"attempt-{self._attempts}")
        folder.root.mkdir()
        job.enter("Downloading")
        syncs = self._make_syncs(folder.root)
        try:
            self._download_inputs(syncs)
        except DownloadError as error:
            self._fail(f"ClientError: Data download failed: {error}")
            return
        hosts = host_names(job.cluster[1])
        document = self._local_request(folder.root)
        (folder.root / REQUEST_FILE).write_text(
            dump_json(document, indent=1) + "\n", encoding="utf-8"
        )
        job.enter("Training")
        uploader = LogUploader(
            job=job,
            folder=folder,
            hosts=hosts,
            logs=self._shared.logs,
            clock=job.clock,
        )
        try:
            self._start(folder.root)
            ending = self._watch(folder, uploader, syncs)
        finally:
            self.kill()
            uploader.close()
        for sync in syncs.values():
            sync.push(is_final=True)
        self._finish_attempt(folder, hosts, ending)

    def _make_syncs(self, root: Path) -> dict[str, FolderSync]:
        """Create the folders that are copied to S3; return their synchronizations by folder name."""
        request = self.job.request
        uris = {
            "checkpoints": request.get("CheckpointConfig", {}).get("S3Uri"),
            "board": request.get("TensorBoardOutputConfig", {}).get("S3OutputPath"),
        }
        found = {}
        for name, uri in uris.items():
            if uri is not None:
                (root / name).mkdir()
                found[name] = FolderSync(root / name, functools.partial(self._upload_below, uri))
        return found

    def _upload_below(self, uri: str, path: Path, name: str) -> None:
        bucket, prefix = split_uri(uri)
        self._shared.s3.upload_file(str(path), bucket, f"{prefix.rstrip('/')}/{name}".lstrip("/"))

    def _download_inputs(self, syncs: Mapping[str, FolderSync]) -> None:
        """Download the channels, once for all attempts, and the existing checkpoints."""
        for channel in self.job.request.get("InputDataConfig", ()):
            target = self._folder / "inputs" / channel["ChannelName"]
            if "FileSystemDataSource" not in channel["DataSource"] and not target.exists():
                uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
                if download(self._shared.s3, uri, target) == 0:
                    raise DownloadError(f"there are no objects at {uri}")
        # A retry (RetryStrategy) restores no checkpoints.
        if "checkpoints" in syncs and (self._attempts == 1 or self.job.is_spot):
            uri = self.job.request["CheckpointConfig"]["S3Uri"].rstrip("/")
            download(self._shared.s3, f"{uri}/", syncs["checkpoints"].folder)
            syncs["checkpoints"].mark_copied()

    def _local_request(self, root: Path) -> dict[str, Any]:
        """Return the request with folders of this machine in place of S3 URIs.

        A container sees none of them, because the files in `input/config` hold no S3 URIs.
        """
        document: dict[str, Any] = load_json(dump_json(self.job.request))
        for channel in document.get("InputDataConfig", ()):
            mount = channel["DataSource"].pop("FileSystemDataSource", None)
            folder = self._folder / "inputs" / channel["ChannelName"]
            if mount is not None:
                folder = mounted_folder(self._shared.file_systems, mount)
            source = channel["DataSource"].setdefault("S3DataSource", {})
            source["S3Uri"] = folder.as_uri()
            if mount is not None:
                source[MOUNTED] = True
        resources = document["ResourceConfig"]
        resources.pop("InstancePreferences", None)
        resources["InstanceType"], resources["InstanceCount"] = self.job.cluster
        document["OutputDataConfig"]["S3OutputPath"] = (root / "out").as_uri()
        if "CheckpointConfig" in document:
            document["CheckpointConfig"]["S3Uri"] = (root / "checkpoints").as_uri()
        if "TensorBoardOutputConfig" in document:
            document["TensorBoardOutputConfig"]["S3OutputPath"] = (root / "board").as_uri()
        # The runner enforces the limits itself, because they cover all attempts.
        document["StoppingCondition"] = {"MaxRuntimeInSeconds": 10**9}
        return document

    def _start(self, root: Path) -> None:
        if self._shared.is_ending.is_set():
            raise RuntimeError("the sandbox is shutting down")
        self._process = start_logged(
            [sys.executable, "-P", "-m", "cloudtrain.backends.sandbox.attempt", str(root)],
            root / "attempt.log",
            stdin=subprocess.PIPE,
            cwd=root,
            env=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        """Return the environment of an attempt: this process's, with the sandbox's AWS variables only."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {
            **own,
            **self._shared.environment,
            GRACE_VARIABLE: str(self._shared.stop_grace_seconds),
            MAX_PROCESSES_VARIABLE: str(self._processes_per_instance()),
            "TRAINING_JOB_ARN": self.job.arn,
        }

    def _processes_per_instance(self) -> int:
        """Return the most ranks that an instance of this job may have here.

        cloudtrain's launcher reads the wanted number from run.json; AWS's toolkit starts one per GPU of the type.
        """
        limit = self._shared.max_processes
        if "ContainerEntrypoint" in self.job.request["AlgorithmSpecification"]:
            return limit
        instance = catalog.find_instance(self.job.cluster[0])
        return min(limit, max(1, (instance.gpus if instance is not None else None) or 1))

    def _watch(
        self, folder: JobFolder, uploader: LogUploader, syncs: Mapping[str, FolderSync]
    ) -> str:
        """Wait until the attempt ends; return why it was stopped, or an empty string if it ended by itself."""
        process = self._process
        ending = ""
        last_sync = time.monotonic()
        while process is not None:
            has_ended = process.poll() is not None
            uploader.upload(final=has_ended)
            if has_ended:
                break
            if time.monotonic() - last_sync >= _SYNC_SECONDS:
                for sync in syncs.values():
                    sync.push()
                last_sync = time.monotonic()
            if ending == "" and (ending := self._stop_reason(uploader.last_step)):
                if ending != "Interrupted":
                    self.job.enter("Stopping")
                process.terminate()
            self._inject_dead_instance(folder, uploader.last_step)
            time.sleep(_POLL_SECONDS)
        return ending

    def _stop_reason(self, step: int) -> str:
        """Return the secondary status that the attempt must stop with now, or an empty string."""
        job = self.job
        runtime = job.limit("MaxRuntimeInSeconds")
        if job.is_stop_requested.is_set():
            return "Stopped"
        if runtime is not None and job.training_seconds >= runtime:
            return _MAX_RUNTIME
        if self._has_exceeded_max_wait():
            return _MAX_WAIT
        steps = self._shared.faults.plan.interrupt_at_step
        if job.is_spot and len(steps) >= self._attempts and step >= steps[self._attempts - 1]:
            return "Interrupted"
        return ""

    def _inject_dead_instance(self, folder: JobFolder, step: int) -> None:
        """Kill an instance if the fault plan demands it at this step."""
        dead = self._shared.faults.plan.dead_instance
        if dead is None or self._has_killed_instance or step < dead.step:
            return
        self._has_killed_instance = self._is_instance_dead = True
        root = str(folder.tree(dead.host).root)
        found = []
        for process in processes_of_run(self.job.name):
            with contextlib.suppress(Exception):
                if process.environ().get(INSTANCE_VARIABLE) == root:
                    found.append(process)
        kill(found)

    def _finish_attempt(self, folder: JobFolder, hosts: tuple[str, ...], ending: str) -> None:
        job = self.job
        outcome = _read_outcome(folder.root)
        # SageMaker goes by the exit codes: it does not know whether training was complete.
        has_ended_well = outcome["state"] != "FAILED" and not any(outcome["exit_codes"].values())
        if not has_ended_well and ending == "":
            if self._is_instance_dead and (job.is_spot or self._retries > 0):
                self._retries -= not job.is_spot
                self._is_instance_dead = False
                job.enter("Interrupted" if job.is_spot else "Restarting")
                return
            if outcome["reason"] and not self._is_instance_dead:
                reason = _failure_reason(outcome, folder, hosts)
            else:
                reason = self._internal_error()
            self._upload(folder.root)
            self._fail(reason)
            return
        if ending == "Interrupted" and outcome["state"] != "SUCCEEDED":
            job.enter("Interrupted")
            return
        job.enter("Uploading")
        self._upload(folder.root)
        has_succeeded = has_ended_well and ending in ("", "Interrupted")
        job.enter("Completed" if has_succeeded else ending)

    def _upload(self, root: Path) -> None:
        for path, name in data_files(root / "out" / self.job.name / "output"):
            self._upload_below(self.job.output_uri, path, name)


def _is_accelerated(name: str) -> bool:
    """Whether AWS treats a type as accelerated; an unknown type counts as accelerated."""
    instance = catalog.find_instance(name)
    return instance is None or instance.is_accelerated


def _fails_without_wait(job: TrainingJob) -> bool:
    """Whether a job does not wait for capacity: AWS tries a preference list without accelerated types only once.

    Source: AWS's guide, "Instance preference lists for training jobs", Waiting for capacity.
    """
    has_list = "InstancePreferences" in job.request["ResourceConfig"]
    return has_list and not any(_is_accelerated(name) for name, _ in job.choices)


def _read_outcome(root: Path) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = load_json((root / OUTCOME_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"state": "FAILED", "reason": "", "exit_codes": {}}
    return outcome


def _failure_reason(outcome: Mapping[str, Any], folder: JobFolder, hosts: tuple[str, ...]) -> str:
    """Return FailureReason as SageMaker writes it: failure file and exit code of the first failed host."""
    codes = [code for code in outcome["exit_codes"].values() if code != 0]
    # No process was started.
    if not codes:
        return f"ClientError: {outcome['reason']}"[:FAILURE_CHARACTERS]
    code = codes[0] if codes[0] >= 0 else 128 - codes[0]
    text = ""
    if any(folder.tree(host).failure.is_file() for host in hosts):
        text = outcome["reason"][: FAILURE_CHARACTERS - _EXIT_CODE_CHARACTERS]
    return f"AlgorithmError: {text}, exit code: {code}"
