"""The life of one training job: waits for instances, runs attempts, survives interruptions, ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain import catalog
from cloudtrain.aws.s3_download import DownloadError, download
from cloudtrain.backends.container import JobFolder
from cloudtrain.backends.container.filesystem import host_names
from cloudtrain.backends.container.process_tree import kill, processes_of_run
from cloudtrain.backends.sandbox.attempt import OUTCOME_FILE, REQUEST_FILE
from cloudtrain.backends.sandbox.cloudwatch_logs import LogUploader
from cloudtrain.backends.sandbox.fault_injection import FaultInjector
from cloudtrain.backends.sandbox.s3_sync import S3FolderSync
from cloudtrain.backends.sandbox.training_job import FAILURE_CHARACTERS, TrainingJob
from cloudtrain.backends.sandbox.warm_pool_allocation import WarmPools
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import (
    GRACE_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    STOP_GRACE_SECONDS,
)
from cloudtrain_runtime.contract.strict_json import dump_json

_POLL_SECONDS = 0.1
_MIRROR_SECONDS = 1.0
_NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)
_INTERNAL_ERROR = "InternalServerError: We encountered an internal error.  Please try again."
_MAX_RUNTIME, _MAX_WAIT = "MaxRuntimeExceeded", "MaxWaitTimeExceeded"
_MARGIN = 40
"""Characters kept for the exit code at the end of FailureReason."""


@dataclass(frozen=True)
class RunnerEnvironment:
    """What all jobs share.

    Attributes:
        folder: Where their trees go.
        environment: What their containers get: endpoint, region, keys.
        s3: boto3 client of the service's own.
        logs: Likewise.
        most_processes: Ranks that an instance may have here.
        stop_grace_seconds: Seconds between SIGTERM and SIGKILL.
        ending: Set when the sandbox ends: nothing is started any more.
        pools: Clusters that wait for the next job.
    """

    folder: Path
    environment: Mapping[str, str]
    s3: Any
    logs: Any
    sky: FaultInjector
    most_processes: int = 2
    stop_grace_seconds: float = STOP_GRACE_SECONDS
    ending: threading.Event = field(default_factory=threading.Event)
    pools: WarmPools = field(default_factory=WarmPools)


class JobRunner:
    """Drives one job in a thread of its own."""

    def __init__(self, job: TrainingJob, service: RunnerEnvironment) -> None:
        self.job = job
        self._service = service
        self._folder = service.folder / job.name
        self._attempts = 0
        self._retries = int(job.request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0))
        self._has_died = self._is_dead = False
        self._process: subprocess.Popen[bytes] | None = None
        job.begin_earlier(service.sky.weather.waited_seconds)
        self._thread = threading.Thread(target=self._run, name=job.name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._service.pools.add(self.job)
        self._thread.start()

    def end_now(self) -> None:
        """End what the job has started, without ceremony: the sandbox ends."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def _run(self) -> None:
        try:
            while not self.job.is_final and not self._service.ending.is_set():
                if self._wait_for_instances():
                    self._attempt()
        except Exception:  # noqa: BLE001 (a job whose life has a bug must not look alive)
            if self._service.ending.is_set():
                return
            traceback.print_exc()
            if not self.job.is_final:
                self._fail(_INTERNAL_ERROR)

    def _fail(self, reason: str) -> None:
        self.job.enter("Failed", "Training job failed", failure=reason)

    def _end_early(self, ending: str) -> None:
        self.job.enter("Stopping")
        self.job.enter(ending)

    # ------------------------------------------------------------ waiting

    def _wait_for_instances(self) -> bool:
        """Wait until there are instances; return False when the job has ended meanwhile."""
        job = self.job
        since = job.created
        if job.secondary in ("Interrupted", "Restarting"):
            since = job.clock()
            job.enter("Starting")
        while True:
            weather = self._service.sky.weather
            waited = job.clock() - since
            error_after = weather.capacity_error_after_seconds
            free = [each for each in job.choices if each[0] not in weather.no_capacity_types]
            if job.stop_asked.is_set():
                self._end_early("Stopped")
            elif self._waits_too_long():
                self._end_early(_MAX_WAIT)
            elif self._pends_too_long(waited):
                self._end_early("Stopped")
            elif self._is_first and self._service.pools.take(job):
                return self._begin()
            elif (error_after is not None and waited >= error_after) or (not free and _waits_for_none(job)):
                self._fail(_NO_CAPACITY)
            elif free and waited >= weather.capacity_after_seconds and error_after is None:
                job.select(*free[0])
                return self._begin()
            else:
                if job.secondary == "Starting":
                    job.enter("Pending")
                job.stop_asked.wait(_POLL_SECONDS)
                continue
            return False

    @property
    def _is_first(self) -> bool:
        return self._attempts == 0

    def _begin(self) -> bool:
        """Say that there are instances now."""
        if self.job.secondary == "Pending":
            self.job.tell("Preparing the instances for training")
        return True

    def _waits_too_long(self) -> bool:
        """Whether waiting and training together have used up the time of a spot job."""
        limit = self.job.limit("MaxWaitTimeInSeconds")
        return self.job.is_spot and limit is not None and self.job.clock() - self.job.created >= limit

    def _pends_too_long(self, waited: float) -> bool:
        """Whether the wait is over: a limit that counts for accelerated types only (botocore's StoppingCondition)."""
        if not any(_is_accelerated(name) for name, _ in self.job.choices):
            return False
        limit = self.job.limit("MaxPendingTimeInSeconds")
        return limit is not None and waited >= limit

    # ------------------------------------------------------------ one attempt

    def _attempt(self) -> None:
        self._attempts += 1
        job = self.job
        folder = JobFolder(self._folder / f"attempt-{self._attempts}")
        folder.root.mkdir(parents=True)
        job.enter("Downloading")
        mirrors = self._mirrors(folder.root)
        try:
            self._bring_inputs(mirrors)
        except DownloadError as error:
            self._fail(f"ClientError: Data download failed: {error}")
            return
        hosts = host_names(job.cluster[1])
        document = self._localize(folder.root)
        (folder.root / REQUEST_FILE).write_text(dump_json(document, indent=1) + "\n", encoding="utf-8")
        job.enter("Training")
        pump = LogUploader(job, folder, hosts, self._service.logs, job.clock)
        try:
            self._start(folder.root)
            ending = self._watch(folder, pump, mirrors)
        finally:
            self.end_now()
            pump.close()
        for mirror in mirrors.values():
            mirror.push(final=True)
        self._settle(folder, hosts, ending)

    @property
    def _is_first_attempt(self) -> bool:
        return self._attempts == 1

    def _mirrors(self, root: Path) -> dict[str, S3FolderSync]:
        """Return what is kept in step with S3, by the name of its folder."""
        found = {}
        for name, uri in _mirrored(self.job.request).items():
            (root / name).mkdir()
            found[name] = S3FolderSync(self._service.s3, root / name, uri)
        return found

    def _bring_inputs(self, mirrors: Mapping[str, S3FolderSync]) -> None:
        """Download the channels, once for all attempts, and the checkpoints that are there."""
        for channel in self.job.request.get("InputDataConfig", ()):
            target = self._folder / "inputs" / channel["ChannelName"]
            if not target.exists():
                uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
                if download(self._service.s3, uri, target) == 0:
                    raise DownloadError(f"nothing lies at {uri}")
        if "checkpoints" in mirrors and (self._is_first_attempt or self.job.is_spot):
            mirrors["checkpoints"].fetch()  # a retry (RetryStrategy) restores nothing

    def _localize(self, root: Path) -> dict[str, Any]:
        """Return the document with the places on this machine where the service has put things, or will look.

        A container sees none of them: what it reads (`input/config`) holds no place in S3.
        """
        document: dict[str, Any] = json.loads(dump_json(self.job.request))
        for channel in document.get("InputDataConfig", ()):
            source = channel["DataSource"]["S3DataSource"]
            source["S3Uri"] = (self._folder / "inputs" / channel["ChannelName"]).as_uri()
        resources = document["ResourceConfig"]
        resources.pop("InstancePreferences", None)
        resources["InstanceType"], resources["InstanceCount"] = self.job.cluster
        document["OutputDataConfig"]["S3OutputPath"] = (root / "out").as_uri()
        if "CheckpointConfig" in document:
            document["CheckpointConfig"]["S3Uri"] = (root / "checkpoints").as_uri()
        if "TensorBoardOutputConfig" in document:
            document["TensorBoardOutputConfig"]["S3OutputPath"] = (root / "board").as_uri()
        # Time is kept here, where all attempts are known.
        document["StoppingCondition"] = {"MaxRuntimeInSeconds": 10**9}
        return document

    def _start(self, root: Path) -> None:
        if self._service.ending.is_set():
            raise RuntimeError("the sandbox ends")
        with (root / "attempt.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cloudtrain.backends.sandbox.attempt", str(root)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=root,
                env=self._environment(),
            )

    def _environment(self) -> dict[str, str]:
        """Return the environment of an attempt: this one without the user's account, with the sandbox's."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {
            **own,
            **self._service.environment,
            GRACE_VARIABLE: str(self._service.stop_grace_seconds),
            MAX_PROCESSES_VARIABLE: str(self._processes()),
            "TRAINING_JOB_ARN": self.job.arn,
        }

    def _processes(self) -> int:
        """Return the ranks that an instance of this job may have here.

        Our launcher knows from run.json how many it wants; AWS's toolkit starts one per GPU of the instance type.
        """
        most = self._service.most_processes
        if "ContainerEntrypoint" in self.job.request["AlgorithmSpecification"]:
            return most
        instance = catalog.find_instance(self.job.cluster[0])
        return min(most, max(1, (instance.gpus if instance is not None else None) or 1))

    def _watch(self, folder: JobFolder, pump: LogUploader, mirrors: Mapping[str, S3FolderSync]) -> str:
        """Wait for the attempt's end; return why it was ended, or an empty string when it ended by itself."""
        process = self._process
        ending = ""
        pushed = time.monotonic()
        while process is not None:
            has_ended = process.poll() is not None
            pump.pump(final=has_ended)
            if has_ended:
                break
            if time.monotonic() - pushed >= _MIRROR_SECONDS:
                for mirror in mirrors.values():
                    mirror.push()
                pushed = time.monotonic()
            if ending == "" and (ending := self._why_end(pump.last_step)):
                if ending != "Interrupted":
                    self.job.enter("Stopping")
                process.terminate()
            self._let_die(folder, pump.last_step)
            time.sleep(_POLL_SECONDS)
        return ending

    def _why_end(self, step: int) -> str:
        """Return the secondary status for the sake of which the attempt has to end now, or an empty string."""
        job = self.job
        runtime = job.limit("MaxRuntimeInSeconds")
        if job.stop_asked.is_set():
            return "Stopped"
        if runtime is not None and job.seconds_trained >= runtime:
            return _MAX_RUNTIME
        if self._waits_too_long():
            return _MAX_WAIT
        steps = self._service.sky.weather.interrupt_at_step
        if job.is_spot and len(steps) >= self._attempts and step >= steps[self._attempts - 1]:
            return "Interrupted"
        return ""

    def _let_die(self, folder: JobFolder, step: int) -> None:
        """Kill an instance where the weather says so."""
        dead = self._service.sky.weather.dead_instance
        if dead is None or self._has_died or step < dead.step:
            return
        self._has_died = self._is_dead = True
        root = str(folder.tree(dead.host).root)
        doomed = []
        for process in processes_of_run(self.job.name):
            with contextlib.suppress(Exception):
                if process.environ().get(ML_ROOT_VARIABLE) == root:
                    doomed.append(process)
        kill(doomed)

    # ------------------------------------------------------------ its end

    def _settle(self, folder: JobFolder, hosts: tuple[str, ...], ending: str) -> None:
        job = self.job
        outcome = _read_outcome(folder.root)
        if outcome["state"] == "FAILED" and ending == "":
            if self._is_dead and (job.is_spot or self._retries > 0):
                self._retries -= not job.is_spot
                self._is_dead = False
                job.enter("Interrupted" if job.is_spot else "Restarting")
                return
            reason = _INTERNAL_ERROR if self._is_dead else _failure_reason(outcome, folder, hosts)
            self._upload(folder.root)
            self._fail(reason)
            return
        if ending == "Interrupted" and outcome["state"] != "SUCCEEDED":
            job.enter("Interrupted")
            return
        job.enter("Uploading")
        self._upload(folder.root)
        succeeded = outcome["state"] == "SUCCEEDED" and ending in ("", "Interrupted")
        job.enter("Completed" if succeeded else ending)

    def _upload(self, root: Path) -> None:
        bucket, prefix = split_uri(self.job.output_uri)
        for path in sorted((root / "out").rglob("*.tar.gz")):
            self._service.s3.upload_file(str(path), bucket, f"{prefix}/{path.name}")


def _mirrored(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders that are kept in step with S3: their uris by name."""
    found = {}
    if "CheckpointConfig" in request:
        found["checkpoints"] = request["CheckpointConfig"]["S3Uri"]
    if "TensorBoardOutputConfig" in request:
        found["board"] = request["TensorBoardOutputConfig"]["S3OutputPath"]
    return found


def _is_accelerated(name: str) -> bool:
    """Whether instances of a type are scarce, as the service counts it; one that is unknown is."""
    instance = catalog.find_instance(name)
    return instance is None or instance.is_accelerated


def _waits_for_none(job: TrainingJob) -> bool:
    """Whether a job with preferences is not kept waiting: a list without accelerated types is looked at once.

    Source: AWS's guide, "Instance preference lists for training jobs", Waiting for capacity.
    """
    has_list = "InstancePreferences" in job.request["ResourceConfig"]
    return has_list and not any(_is_accelerated(name) for name, _ in job.choices)


def _read_outcome(root: Path) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = json.loads((root / OUTCOME_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"state": "FAILED", "reason": "", "exit_codes": {}}
    return outcome


def _failure_reason(outcome: Mapping[str, Any], folder: JobFolder, hosts: tuple[str, ...]) -> str:
    """Return FailureReason as SageMaker writes it: failure file and exit code of the host that failed first."""
    codes = [code for code in outcome["exit_codes"].values() if code != 0]
    if not outcome["reason"]:
        return _INTERNAL_ERROR
    if not codes:  # nothing was started
        return f"ClientError: {outcome['reason']}"[:FAILURE_CHARACTERS]
    code = codes[0] if codes[0] >= 0 else 128 - codes[0]
    wrote = any(folder.tree(host).failure.is_file() for host in hosts)
    text = outcome["reason"][: FAILURE_CHARACTERS - _MARGIN] if wrote else ""
    return f"AlgorithmError: {text}, exit code: {code}"
