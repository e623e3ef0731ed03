"""A training job on this machine, from its document to its artifacts."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.backends.container import mount_namespace, process_tree
from cloudtrain.backends.container.artifacts import Stored, store_artifacts
from cloudtrain.backends.container.background import start_logged
from cloudtrain.backends.container.channel_copies import end_copies, original_of
from cloudtrain.backends.container.event_tail import EventTail
from cloudtrain.backends.container.filesystem import (
    StagingError,
    host_names,
    prepare_tree,
    share,
    stage_inputs,
)
from cloudtrain.backends.container.folder_sync import HostCheckpoints
from cloudtrain.backends.container.machine import (
    count_cards,
    free_port,
    host_addresses,
    is_disk_full,
    share_gpus,
    visible_gpus,
)
from cloudtrain.backends.container.ml_paths import map_arguments, map_values, seen_tree
from cloudtrain.errors import CloudError
from cloudtrain.runs.early_end import early_end
from cloudtrain.runs.status import State
from cloudtrain.support.proxies import exclude_loopback
from cloudtrain.support.regular_files import open_regular
from cloudtrain_runtime.contract import (
    ADDRESSES_VARIABLE,
    CARDS_VARIABLE,
    FAILURE_CHARACTERS,
    GPUS_VARIABLE,
    GRACE_VARIABLE,
    HOSTS_HERE_VARIABLE,
    INSTANCE_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    PORT_VARIABLE,
    RENDEZVOUS_FILE_VARIABLE,
    STOP_GRACE_SECONDS,
    MlTree,
    describe_exit,
)
from cloudtrain_runtime.contract.bucket_owner import owners_from
from cloudtrain_runtime.contract.early_ends import describe_early_end
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.secondary_errors import is_secondary_error
from cloudtrain_runtime.contract.strict_json import dump_json

PASS_VARIABLE = "CLOUDTRAIN_PASS_ENVIRONMENT"  # noqa: S105 (the name of a variable)
"""Names of additional variables of the shell for local runs, separated by commas."""

_PASSED_VARIABLES = (
    *(
        "HOME",
        "LANG",
        "LC_ALL",
        "TMPDIR",
        "TZ",
        "USER",
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
    ),
    *(
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "PYTHONHASHSEED",
    ),
)
"""Containers start with a clean environment, so a local run gets only these variables of the shell."""

_POLL_SECONDS = 0.05
_MERGE_SECONDS = 1.0
_STOPPED = 128 + signal.SIGTERM
"""Exit code of a container that a stop signal has ended."""
_PEER_SECONDS = 10.0
"""Time for hosts to detect the failure of another one before they are killed."""


@dataclass(frozen=True)
class JobFolder:
    """The folder of a run: one log and one tree per host, and the events of all hosts."""

    root: Path

    @property
    def logs(self) -> Path:
        """The folder of `<host>.log`."""
        return self.root / "logs"

    @property
    def events(self) -> Path:
        """The events of all hosts, one JSON object per line."""
        return self.root / "events.jsonl"

    @property
    def interpreter(self) -> Path:
        """File with the path of the containers' Python; absent for this process's."""
        return self.root / "interpreter"

    def tree(self, host: str) -> MlTree:
        """Return a host's /opt/ml."""
        return MlTree(self.root / "hosts" / host / "opt" / "ml")

    def log(self, host: str) -> Path:
        """Return a host's log."""
        return self.logs / f"{host}.log"


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
    is_stopped: Callable[[], bool],
    on_transition: Callable[[State, str], None] = lambda *_: None,
    on_ended: Callable[[State, str], None] = lambda *_: None,
    environ: Mapping[str, str] = os.environ,
) -> Outcome:
    """Execute a CreateTrainingJob document, and return when all its processes have ended.

    Args:
        request: The document. `s3://` URIs are read with the credentials in `environ`; `file://` URIs are local.
        folder: Folder for its trees and logs.
        is_stopped: Returns whether to stop the job; called many times per second.
        on_transition: Called with the state and its reason at each change except the last.
        on_ended: Called with the final state and its reason when all processes have ended, before anything is stored.
        environ: Environment with the credentials and variables to pass on, the GPUs, and the time between SIGTERM and
            SIGKILL.
    """
    job = _Job(request, folder, environ, on_ended)
    try:
        on_transition(State.STARTING, "preparing the instances")
        try:
            job.prepare()
        except StagingError as error:
            return job.end(State.FAILED, str(error))
        on_transition(State.RUNNING, "")
        job.start()
        return job.watch(is_stopped, on_transition)
    finally:
        process_tree.kill(process_tree.descendants())
        job.events.close()


class _Job:
    def __init__(
        self,
        request: Mapping[str, Any],
        folder: JobFolder,
        environ: Mapping[str, str],
        on_ended: Callable[[State, str], None],
    ) -> None:
        self.request = request
        self.on_ended = on_ended
        self.folder = folder
        self.name = str(request["TrainingJobName"])
        self.hosts = _hosts_of(request)
        self.gpus = dict(
            zip(self.hosts, share_gpus(visible_gpus(environ), len(self.hosts)), strict=True)
        )
        self.grace = float(environ.get(GRACE_VARIABLE, STOP_GRACE_SECONDS))
        self.environ = environ
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.exit_codes: dict[str, int] = {}
        self.fetched: dict[str, Path] = {}
        self.checkpoints: HostCheckpoints | None = None
        self.merged_at = time.monotonic()
        recorded = folder.interpreter
        self.python = sys.executable
        if recorded.is_file():
            self.python = os.fsdecode(recorded.read_bytes())
        self.events = EventTail({host: folder.log(host) for host in self.hosts}, folder.events)

    def prepare(self) -> None:
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        self._write_python()
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
        self.checkpoints = _host_checkpoints(self.request, self.folder)
        if self.checkpoints is None:
            tree = self.folder.tree(self.hosts[0])
            share(tree, tree.checkpoints, path_of(uri))
            return
        try:
            self.checkpoints.restore()
        except OSError as error:
            raise StagingError(
                f"the checkpoints in {path_of(uri)} cannot be copied to every host: {error}"
            ) from None

    def _write_python(self) -> None:
        """Create a command `python` for the containers that starts the run's interpreter with its packages."""
        command = self.folder.root / "bin" / "python"
        command.parent.mkdir(parents=True, exist_ok=True)
        # A path is bytes, and not always UTF-8.
        command.write_bytes(os.fsencode(f'#!/bin/sh\nexec {shlex.quote(self.python)} "$@"\n'))
        command.chmod(0o755)

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

    def start(self) -> None:
        port = free_port()
        rendezvous = self._write_rendezvous_file()
        addresses = dump_json(host_addresses(self.hosts))
        for host in self.hosts:
            environment = self._environment(host) | {
                PORT_VARIABLE: str(port),
                RENDEZVOUS_FILE_VARIABLE: str(rendezvous),
                ADDRESSES_VARIABLE: addresses,
            }
            self.started[host] = start_logged(
                mount_namespace.wrap(str(self.folder.tree(host).root), self._command(host)),
                self.folder.log(host),
                cwd=self.folder.tree(host).root,
                env=environment,
                preexec_fn=process_tree.end_with_parent,
            )

    def _write_rendezvous_file(self) -> Path:
        """Write the file through which the hosts' agents agree; only this user may read and write it."""
        folder = self.folder.root
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            # torch opens no file there. The other folder lives as long as this object.
            self._utf8_folder = tempfile.TemporaryDirectory(prefix="cloudtrain-")
            folder = Path(self._utf8_folder.name)
        path = folder / "rendezvous"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        return path

    def _command(self, host: str) -> list[str]:
        entrypoint = self.request["AlgorithmSpecification"].get("ContainerEntrypoint")
        if entrypoint:
            return [
                *entrypoint,
                *self.request["AlgorithmSpecification"].get("ContainerArguments", []),
            ]
        has_torchrun = (
            self.request.get("HyperParameters", {}).get("sagemaker_torch_distributed_enabled")
            == "true"
        )
        tree = self.folder.tree(host)
        # The request of an estimator without our code, or a trial of a tuning job.
        if has_torchrun or not original_of(tree, tree.run_config).is_file():
            return [sys.executable, "-P", "-m", "cloudtrain_runtime.launcher.toolkit"]
        # AWS's toolkit would start mpirun, which this machine may lack; torchrun starts the same root script.
        return [
            "/bin/sh",
            "-c",
            f'cd "${ML_ROOT_VARIABLE}/code" && exec python -m cloudtrain_runtime.launch',
        ]

    def _environment(self, host: str) -> dict[str, str]:
        names = [
            *_PASSED_VARIABLES,
            *(
                part.strip()
                for part in self.environ.get(PASS_VARIABLE, "").split(",")
                if part.strip()
            ),
        ]
        names += [name for name in self.environ if name.startswith("AWS_")]
        passed = {name: self.environ[name] for name in names if name in self.environ}
        gpus = self.gpus[host]
        tree = self.folder.tree(host)
        own = [] if self.python == sys.executable else [str(Path(self.python).parent)]
        most = self.environ.get(MAX_PROCESSES_VARIABLE)
        limits = {MAX_PROCESSES_VARIABLE: most} if most else {}
        beside = str(Path(sys.executable).parent)
        return {
            **passed,
            **exclude_loopback(passed),
            # Commands such as torchrun are beside the interpreter, whose environment may not be activated.
            "PATH": ":".join(
                [f"{self.folder.root}/bin", *own, self.environ.get("PATH", os.defpath), beside]
            ),
            process_tree.RUN_VARIABLE: self.name,
            "TRAINING_JOB_ARN": self.environ.get(
                "TRAINING_JOB_ARN", f"arn:aws:sagemaker:local:000000000000:training-job/{self.name}"
            ),
            ML_ROOT_VARIABLE: str(seen_tree(tree).root),
            INSTANCE_VARIABLE: str(tree.root),
            HOSTS_HERE_VARIABLE: str(len(self.hosts)),
            GRACE_VARIABLE: str(self.grace),
            GPUS_VARIABLE: str(len(gpus)),
            CARDS_VARIABLE: str(count_cards(visible_gpus(self.environ))),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            **limits,
            **map_values(self.request.get("Environment", {}), seen_tree(tree)),
        }

    def watch(
        self, is_stopped: Callable[[], bool], on_transition: Callable[[State, str], None]
    ) -> Outcome:
        """Wait until all hosts are done, one has failed, the time limit is reached, or the job is stopped."""
        limit = self.request["StoppingCondition"]["MaxRuntimeInSeconds"]
        deadline = time.monotonic() + limit
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
            if is_stopped():
                on_transition(State.STOPPING, "stopped by request")
                self._stop()
                return self.end(State.STOPPED, "stopped by request")
            if time.monotonic() >= deadline:
                reason = f"MaxRuntimeExceeded: the run reached limits.runtime ({limit} s)"
                on_transition(State.STOPPING, reason)
                self._stop()
                return self.end(State.STOPPED, reason)
            self._pause()

    def _poll(self) -> None:
        self.events.read()
        if self.checkpoints is not None and time.monotonic() - self.merged_at >= _MERGE_SECONDS:
            # The final merge reports lasting errors.
            with contextlib.suppress(OSError):
                self.checkpoints.merge()
            self.merged_at = time.monotonic()
        for host, process in self.started.items():
            code = process.poll()
            if code is not None and host not in self.exit_codes:
                self.exit_codes[host] = code
                # The kernel ends all processes of a container with its first one.
                process_tree.kill(process_tree.processes_of_host(self.folder.tree(host).root))

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.exit_codes) < len(self.hosts) and time.monotonic() < deadline:
            self._poll()
            self._pause()

    def _pause(self) -> None:
        """Wait for a moment, or until the first process of a host has ended."""
        running = [each for host, each in self.started.items() if host not in self.exit_codes]
        process_tree.wait_for_end(running, _POLL_SECONDS)

    def _stop(self) -> None:
        """Send SIGTERM to each host's first process, as SageMaker does, and wait for the grace time."""
        for process in self.started.values():
            process.terminate()
        self._wait_for_all(self.grace)

    def end(self, state: State, reason: str) -> Outcome:
        """Kill the remaining processes and pack the artifacts."""
        process_tree.kill(process_tree.descendants())
        for host in self.hosts:
            end_copies(self.folder.tree(host))
        self.events.read()
        self.on_ended(state, reason)
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


def store_again(request: Mapping[str, Any], folder: JobFolder) -> Stored:
    """Store what could not be stored when a job ended: SUCCEEDED or STOPPED, on this machine."""
    return store_artifacts(
        request,
        str(request["TrainingJobName"]),
        folder.tree(_hosts_of(request)[0]),
        _host_checkpoints(request, folder),
        with_model=True,
    )


def find_cause(
    events: Sequence[Mapping[str, Any]],
    files: Mapping[str, Path],
    exit_codes: Mapping[str, int],
    *,
    full_disk: Path | None = None,
) -> str:
    """Return the reason of a failed job: the first failure that is not the consequence of another one.

    Args:
        events: The events of all hosts. A launcher emits `failed` once, after the last restart.
        files: Path of each host's failure file, in the order of the hosts.
        exit_codes: Exit codes of the hosts that have ended.
        full_disk: Folder whose disk is full, or None. A container that cannot write its log reports no cause.
    """
    failures = sorted(
        (event for event in events if event["event"] == "failed"),
        key=_failed_at,
    )
    causes = [event for event in failures if not event.get("secondary")]
    if causes:
        return _reason_of(causes[0], files)
    left = [event for event in events if event["event"] == "left"]
    if failures and left:
        ended = describe_early_end(left[0]["ranks"], left[0]["host"], left[0].get("step"))
        return f"{ended}, while others waited for {_reason_of(failures[0], files)}"
    reported = {str(event.get("host")) for event in failures}
    silent = [host for host, code in exit_codes.items() if code != 0 and host not in reported]
    # Other launchers emit no events. AWS's toolkit writes a file on every host, also after the loss of a peer.
    written = sorted(
        (host for host in silent if files[host].is_file()),
        key=lambda host: files[host].stat().st_mtime_ns,
    )
    texts = [_read(files[host]) for host in written]
    if first := next((text for text in texts if not is_secondary_error(text)), ""):
        return first
    if ended := next((host for host in silent if host not in written), ""):
        ending = f"the container of {ended} ended with {describe_exit(exit_codes[ended])}"
        if full_disk is not None:
            return f"the disk is full ({full_disk}): {ending}, and its log may lack the cause"
        return f"{ending}; see its log"
    return _reason_of(failures[0], files) if failures else texts[0]


def _failed_at(event: Mapping[str, Any]) -> float:
    return float(event.get("failed_at", event.get("time", 0.0)))


def _reason_of(event: Mapping[str, Any], files: Mapping[str, Path]) -> str:
    path = files.get(str(event.get("host")))
    if path is not None and path.is_file():
        return _read(path)
    return str(event.get("message", ""))[:FAILURE_CHARACTERS]


def _read(path: Path) -> str:
    with open_regular(path) as file:
        text = file.read(4 * FAILURE_CHARACTERS).decode("utf-8", "replace")
    return text[:FAILURE_CHARACTERS]
