"""A training job on this machine, from its document to its artifacts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.backends.container import mount_namespace
from cloudtrain.backends.container.artifacts import Stored, store_artifacts
from cloudtrain.backends.container.channel_copies import end_copies
from cloudtrain.backends.container.event_tail import EventTail
from cloudtrain.backends.container.failure_reason import find_cause
from cloudtrain.backends.container.filesystem import (
    StagingError,
    host_names,
    prepare_tree,
    share,
    stage_inputs,
)
from cloudtrain.backends.container.folder_sync import HostCheckpoints
from cloudtrain.backends.container.host_launcher import (
    HostLauncher,
    LocalHosts,
    grace_seconds,
    write_python,
)
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.machine import is_disk_full
from cloudtrain.backends.container.ml_paths import map_arguments
from cloudtrain.errors import CloudError
from cloudtrain.runs.early_end import early_end
from cloudtrain.runs.status import State
from cloudtrain_runtime.contract.bucket_owner import owners_from
from cloudtrain_runtime.contract.file_uri import path_of

"""Reason of a run that its user has stopped."""

LIMIT_REACHED = "MaxRuntimeExceeded"
"""Beginning of the reason of a run that has reached its time limit, as SageMaker calls it."""

_POLL_SECONDS = 0.05
_MERGE_SECONDS = 1.0
_STOPPED = 128 + signal.SIGTERM
"""Exit code of a container that a stop signal has ended."""
_PEER_SECONDS = 10.0
"""Time for hosts to detect the failure of another one before they are killed."""


MakeLauncher = Callable[
    [Mapping[str, Any], JobFolder, tuple[str, ...], Mapping[str, str]], HostLauncher
]
"""Returns a launcher of containers for a request, a folder, the hosts and an environment."""


@dataclass(frozen=True)
class Outcome:
    """Result of a job.

    Attributes:
        state: Final state.
        reason: Reason of the end; may be empty.
        artifacts: Paths by name.
        exit_codes: Exit codes of the containers by host; -9 means SIGKILL.
        problems: What could not be stored, why, and where it is instead.
    """

    state: State
    reason: str
    artifacts: Mapping[str, str]
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def run_job(
    request: Mapping[str, Any],
    folder: JobFolder,
    *,
    stop_reason: Callable[[], str],
    on_transition: Callable[[State, str], None] = lambda *_: None,
    on_ended: Callable[[State, str], None] = lambda *_: None,
    environ: Mapping[str, str] = os.environ,
    make_launcher: MakeLauncher = LocalHosts,
    used_seconds: float = 0.0,
    stores: Callable[[State, str], bool] = lambda *_: True,
) -> Outcome:
    """Execute a CreateTrainingJob document, and return when all its processes have ended.

    Args:
        request: The document. `s3://` URIs are read with the credentials in `environ`; `file://` URIs are local.
        folder: Folder for its trees and logs.
        stop_reason: Returns why to stop the job, or an empty text; called many times per second.
        on_transition: Called with the state and its reason at each change except the last.
        on_ended: Called with the final state and its reason when all processes have ended, before anything is stored.
        environ: Environment with the credentials and variables to pass on, the GPUs, and the time between SIGTERM and
            SIGKILL.
        make_launcher: Returns what starts the containers; by default on this machine.
        used_seconds: Part of the job's time limit that former attempts have used.
        stores: Returns whether the results of a job with this final state and reason are stored; not those of an
            attempt that another one continues.
    """
    job = _Job(request, folder, environ, on_ended, make_launcher, stores)
    try:
        on_transition(State.STARTING, "preparing the instances")
        try:
            job.prepare()
        except StagingError as error:
            return job.end(State.FAILED, str(error))
        on_transition(State.RUNNING, "")
        job.launcher.start()
        return job.watch(stop_reason, on_transition, used_seconds)
    finally:
        job.launcher.kill()
        job.events.close()


class _Job:
    def __init__(
        self,
        request: Mapping[str, Any],
        folder: JobFolder,
        environ: Mapping[str, str],
        on_ended: Callable[[State, str], None],
        make_launcher: MakeLauncher,
        stores: Callable[[State, str], bool],
    ) -> None:
        self.request = request
        self.on_ended = on_ended
        self.stores = stores
        self.folder = folder
        self.name = str(request["TrainingJobName"])
        self.hosts = _hosts_of(request)
        self.grace = grace_seconds(environ)
        self.launcher = make_launcher(request, folder, self.hosts, environ)
        self.environ = environ
        self.exit_codes: Mapping[str, int] = {}
        self.fetched: dict[str, Path] = {}
        self.checkpoints: HostCheckpoints | None = None
        self.merged_at = time.monotonic()
        self.events = EventTail({host: folder.log(host) for host in self.hosts}, folder.events)

    def prepare(self) -> None:
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        write_python(self.folder)
        has_namespace = mount_namespace.is_available()
        for host in self.hosts:
            tree = self.folder.tree(host)
            prepare_tree(tree, self.request, host, self.hosts, has_namespace=has_namespace)
            stage_inputs(tree, self.request, host, self.hosts, self._fetch)
            map_arguments(tree)
        self._prepare_checkpoints()

    def _prepare_checkpoints(self) -> None:
        uri = self.request.get("CheckpointConfig", {}).get("S3Uri")
        if uri is None:
            return
        if not self.launcher.shares_disk:
            self.checkpoints = _host_checkpoints(self.request, self.folder)
        if self.checkpoints is None:
            for host in self.hosts:
                tree = self.folder.tree(host)
                share(tree, tree.checkpoints, path_of(uri))
            return
        try:
            self.checkpoints.restore()
        except OSError as error:
            raise StagingError(
                f"the checkpoints in {path_of(uri)} cannot be copied to every host: {error}"
            ) from None

    def _fetch(self, uri: str) -> Path:
        """Download the objects of an `s3://` URI, once for all hosts, and return their folder."""
        from cloudtrain.aws.errors import aws_errors
        from cloudtrain.aws.s3_download import DownloadError, download, make_s3_client

        if uri not in self.fetched:
            folder = self.folder.root / "inputs" / str(len(self.fetched))
            try:
                with aws_errors("connect to S3"):
                    s3 = make_s3_client(owners_from(self.environ))
                count = download(s3, uri, folder)
            except CloudError as error:
                message = f"Data download failed: {error.message}: {error.hint}"
                raise StagingError(message) from None
            except DownloadError as error:
                raise StagingError(f"Data download failed: {error}") from None
            if count == 0:
                raise StagingError(f"there is nothing at {uri}")
            self.fetched[uri] = folder
        return self.fetched[uri]

    def watch(
        self,
        stop_reason: Callable[[], str],
        on_transition: Callable[[State, str], None],
        used_seconds: float,
    ) -> Outcome:
        """Wait until all hosts are done, one has failed, the time limit is reached, or the job is stopped."""
        limit = self.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        deadline = time.monotonic() + limit - used_seconds
        while True:
            self._poll()
            codes = set(self.exit_codes.values())
            if codes > {0} or (codes and 0 not in codes):
                # After a signal from outside, the ranks of the other hosts save, too.
                is_stop = codes <= {0, _STOPPED}
                self._wait_for_all(self.grace if is_stop else _PEER_SECONDS)
                self.events.read()
                if early := early_end(self.events.progress):
                    return self.end(State.STOPPED, early)
                files = {host: self.folder.tree(host).failure for host in self.hosts}
                reason = find_cause(
                    self.events.seen,
                    files,
                    self.exit_codes,
                    full_disk=self.folder.root if is_disk_full(self.folder.root) else None,
                )
                return self.end(State.FAILED, reason)
            if len(self.exit_codes) == len(self.hosts):
                self.events.read()
                early = early_end(self.events.progress)
                return self.end(State.STOPPED if early else State.SUCCEEDED, early)
            if reason := stop_reason():
                on_transition(State.STOPPING, reason)
                self._stop()
                return self.end(State.STOPPED, reason)
            if time.monotonic() >= deadline:
                reason = f"{LIMIT_REACHED}: the run reached limits.runtime ({limit} s)"
                on_transition(State.STOPPING, reason)
                self._stop()
                return self.end(State.STOPPED, reason)
            self.launcher.wait(_POLL_SECONDS)

    def _poll(self) -> None:
        self.events.read()
        if self.checkpoints is not None and time.monotonic() - self.merged_at >= _MERGE_SECONDS:
            # The final merge reports lasting errors.
            with contextlib.suppress(OSError):
                self.checkpoints.merge()
            self.merged_at = time.monotonic()
        self.exit_codes = self.launcher.poll()

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.exit_codes) < len(self.hosts) and time.monotonic() < deadline:
            self._poll()
            self.launcher.wait(_POLL_SECONDS)

    def _stop(self) -> None:
        self.launcher.stop()
        self._wait_for_all(self.grace)

    def end(self, state: State, reason: str) -> Outcome:
        """Kill the remaining processes and pack the artifacts."""
        self.launcher.kill()
        for host in self.hosts:
            end_copies(self.folder.tree(host))
        self.events.read()
        self.on_ended(state, reason)
        stored = Stored()
        if self.stores(state, reason):
            stored = store_artifacts(
                self.request,
                self.name,
                self.folder.tree(self.hosts[0]),
                self.checkpoints,
                with_model=state in (State.SUCCEEDED, State.STOPPED),
            )
        return Outcome(
            state=state,
            reason=reason,
            artifacts=stored.artifacts,
            exit_codes=dict(self.exit_codes),
            problems=tuple(stored.problems.values()),
        )


def _hosts_of(request: Mapping[str, Any]) -> tuple[str, ...]:
    resources = request["ResourceConfig"]
    count = resources.get("InstanceCount") or resources["InstancePreferences"][0]["InstanceCount"]
    return host_names(int(count))


def _host_checkpoints(request: Mapping[str, Any], folder: JobFolder) -> HostCheckpoints | None:
    """Return the checkpoint folders of several hosts, which are merged; None if all are in one folder."""
    uri = request.get("CheckpointConfig", {}).get("S3Uri")
    hosts = _hosts_of(request)
    if uri is None or len(hosts) == 1:
        return None
    return HostCheckpoints(path_of(uri), [folder.tree(host).checkpoints for host in hosts])


def store_again(
    request: Mapping[str, Any], folder: JobFolder, *, shares_disk: bool = False
) -> Stored:
    """Store what could not be stored when a job ended: SUCCEEDED or STOPPED, on this machine."""
    checkpoints = None if shares_disk else _host_checkpoints(request, folder)
    return store_artifacts(
        request,
        str(request["TrainingJobName"]),
        folder.tree(_hosts_of(request)[0]),
        checkpoints,
        with_model=True,
    )
