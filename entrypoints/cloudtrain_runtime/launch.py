"""The launcher, PID 1 of each host's container: starts torchrun, forwards stop notices and writes the failure file.

Standard library only. Only the processes that it starts import torch: the launcher responds to a signal within
microseconds, and reports a readable failure even in an image whose torch cannot be imported.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # The kernel discards a signal to PID 1 without a handler, but keeps one that is blocked: until
    # `_Stop` has set the handlers, after the imports below, which take longer than the
    # interpreter's start.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from cloudtrain_runtime.contract import (
    ADDRESSES_VARIABLE,
    GRACE_VARIABLE,
    HOSTS_HERE_VARIABLE,
    INSTALLED_FILE,
    LISTENING_PORTS,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    OWN_LAUNCHER,
    PORT_VARIABLE,
    RENDEZVOUS_BACKEND,
    RENDEZVOUS_FILE_VARIABLE,
    STOP_GRACE_SECONDS,
    WORKER_SCRIPT,
    MlTree,
    RunConfig,
    describe_exit,
    usable_cpus,
)
from cloudtrain_runtime.contract.early_ends import ended_early
from cloudtrain_runtime.contract.gpu_sharing import is_gpu_shared
from cloudtrain_runtime.contract.strict_json import load_json
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.launcher import secrets
from cloudtrain_runtime.launcher.agent_signals import END_RANKS_SIGNAL, STOP_SIGNALS
from cloudtrain_runtime.launcher.code_outputs import CodeFolder
from cloudtrain_runtime.launcher.failure_file import REPORTED_EXIT_CODE, fail
from cloudtrain_runtime.launcher.hang import HangWatchdog, trace_variables
from cloudtrain_runtime.launcher.host import Host, count_gpus, is_on_sagemaker, read_host
from cloudtrain_runtime.launcher.host_environment import read_cuda, report_environment
from cloudtrain_runtime.launcher.host_tracking import HostTracking
from cloudtrain_runtime.launcher.output import MetricReader, RankOutput
from cloudtrain_runtime.launcher.sagemaker_environment import (
    accelerate_variables,
    entry_point,
    sagemaker_variables,
)
from cloudtrain_runtime.launcher.script_report import ScriptReport
from cloudtrain_runtime.process.environment import include_variables, ml_tree, read_run_config
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.heartbeat import Phase, read_heartbeats

_STOPPED = 128 + signal.SIGTERM
"""Exit code of a container that was ended by a stop signal, also by SIGINT or SIGHUP."""

_AGENT = "cloudtrain_runtime.launcher.agent"
_START_MODULE = """\
import sys
sys.path.insert(0, {code!r})
if sys.version_info[:2] == {version}:  # not in another Python that the job starts
{calls}
sys.path[:] = [each for each in sys.path[1:] if each != {folder!r}]
own = sys.modules.pop(__name__)
try:
    import sitecustomize  # the one of this machine
except ImportError:
    sys.modules[__name__] = own
"""
"""Module `sitecustomize`, which Python imports at its start from a folder in PYTHONPATH."""
_RANK_STARTERS = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch))\b")
_MARGIN_SECONDS = 20
"""Part of the grace time that is reserved for torchrun to end workers that have not acted on the notice."""
_EXIT_SECONDS = 5
"""Part of it in which the launcher itself ends."""

_RENDEZVOUS_SECONDS = 1800
"""How long the first host waits for the last one: hosts pull their images at different speeds."""


def main() -> int:
    """Run this host's part of the job; return the exit code of the container."""
    tree = ml_tree(os.environ)
    for folder in (tree.model, tree.output_data):
        folder.mkdir(parents=True, exist_ok=True)
    stop = _Stop(tree)
    exit_code = _run_job(tree, stop)
    if exit_code == _STOPPED and not tree.stopped_early.exists():
        # The processes were ended by the signal and have reported nothing.
        emit("stopped", host=read_host(tree).name, signal=stop.signal_name)
    return exit_code


def _run_job(tree: MlTree, stop: _Stop) -> int:
    if stop.is_received():
        return _STOPPED
    try:
        config = read_run_config(os.environ)
    except JobError as error:
        return fail(f"error: {error}")
    except (OSError, ValueError, TypeError, KeyError) as error:
        return fail(f"{tree.run_config} cannot be read: {error}")
    if config is None:
        return fail(f"{tree.run_config} cannot be read: No such file")
    host = read_host(tree)
    return _run(tree, config, host, stop)


def _run(tree: MlTree, config: RunConfig, host: Host, stop: _Stop) -> int:
    """Start this host's workers and wait for them; return the exit code of the container."""
    config = replace(config, processes_per_instance=limit_processes(config.processes_per_instance))
    is_installed = config.requirements is None or _install(tree, config.requirements, stop)
    resolved = secrets.ResolvedSecrets({})
    if is_installed and not stop.is_received():
        # Only the ranks' environment holds the values: not this process's environment, no argument
        # and no file.
        resolved = secrets.load_missing(config.secrets, on_start=stop.set_target)
        stop.set_target(None)
    if stop.is_received():
        return _STOPPED
    if not is_installed:
        return fail(
            f"pip could not install {config.requirements}; see its output in the log of {host.name}"
        )
    if resolved.problems:
        return _fail_host(host, [f"error: {problem}" for problem in resolved.problems])
    return _run_ranks(tree, config, host, stop, resolved.values)


def _run_ranks(
    tree: MlTree, config: RunConfig, host: Host, stop: _Stop, secret: Mapping[str, str]
) -> int:
    try:
        code = CodeFolder(tree, config.outputs, config.checkpoint.uri)
    except OSError as error:
        return _fail_host(
            host, [f"error: code.outputs: {error.filename} cannot be linked: {error.strerror}"]
        )
    watch = HangWatchdog(
        tree,
        host.name,
        hosts=len(host.hosts),
        limit_seconds=config.hang_seconds,
        has_task=config.task is not None,
        checkpoints=config.checkpoint.uri,
        is_stopping=stop.is_received,
    )
    report = ScriptReport(tree, config, host.name)
    cuda = read_cuda()
    environment = {
        **os.environ,
        **host_variables(tree, config, host),
        **cuda.variables(os.environ),
        **secret,
    }
    if calls := _start_calls(tree, config):
        environment["PYTHONPATH"] = _write_start_module(tree, calls, environment.get("PYTHONPATH"))
    metrics = None
    if config.metrics and host.rank == 0:
        metrics = MetricReader(config.metrics)
    # Without secrets and metrics, the ranks write to the log themselves.
    output = None
    if config.secrets or metrics is not None:
        output = RankOutput((environment[name] for name in config.secrets), metrics)
    try:
        tracking = HostTracking(tree, config, host, environment)
    except JobError as error:
        return _fail_host(host, [f"error: {error}"])
    environment |= tracking.variables
    command = [sys.executable, "-m", _AGENT, *torchrun_arguments(config, host, os.environ)]
    descriptor = None if output is None else output.descriptor
    agent = subprocess.Popen(
        command, cwd=tree.code, env=environment, stdout=descriptor, stderr=descriptor
    )
    if output is not None:
        output.close_write_end()
    stop.set_target(agent, request=END_RANKS_SIGNAL)
    watch.start(agent.pid)
    report.start()
    # This takes its time while torch is imported in another process.
    report_environment(tree, host, config, cuda)
    _compile_ahead(config)
    exit_code = _wait(agent.pid)
    stop.cancel()
    if output is not None:
        output.end()
    code.report(host.name)
    report.end()
    hung = watch.end()
    tracking.end(exit_code, stop.seconds_left())
    if hung is not None:
        return hung
    if exit_code != 0 and not stop.is_received():
        watch.keep_traces()
    return container_exit_code(tree, config, host, exit_code, is_stopping=stop.is_received())


def container_exit_code(
    tree: MlTree, config: RunConfig, host: Host, agent: int, *, is_stopping: bool
) -> int:
    """Return the exit code of the container for that of the agent, and report a failure that nothing has reported."""
    if agent == REPORTED_EXIT_CODE:
        return 1
    if agent == 0 and tree.stopped_early.exists():
        # SageMaker knows itself why it stops a job. Elsewhere, exit code 0 would say that training
        # is complete.
        return 0 if is_on_sagemaker(os.environ) else _STOPPED
    if agent == 0 and config.task is not None and (early := describe_early_exit(tree, host)):
        return _fail_host(host, [early], agent)
    if agent != 0 and not is_stopping and not tree.failure.exists():
        ended = f"the agent of the ranks on {host.name} ended with {describe_exit(agent)}"
        return _fail_host(host, [ended], agent)
    return agent if agent >= 0 else 128 - agent


def describe_early_exit(tree: MlTree, host: Host) -> str:
    """Return which rank of a Task ended with exit code 0 before its training did; empty if none has.

    Its process was ended by the Task or a library, such as by os._exit(0).
    """
    heartbeats = read_heartbeats(tree.heartbeats)
    unfinished = [each for each in heartbeats if each.phase is not Phase.LEFT]
    if not unfinished:
        return ""
    early = unfinished[0]
    rank = f"rank {early.rank} on {host.name} (local rank {early.local_rank})"
    return f"{rank} {ended_early(early.step)}, before its training had ended (os._exit?)"


def limit_processes(requested: int | None) -> int | None:
    """Return the number of ranks of this host: as requested, up to the limit in the environment."""
    limit = int(os.environ.get(MAX_PROCESSES_VARIABLE, "0"))
    if limit == 0 or (requested is not None and requested <= limit):
        return requested
    wanted = requested or "one per GPU"
    log_line(
        f"{limit} ranks on this instance instead of {wanted}: {MAX_PROCESSES_VARIABLE}={limit}"
    )
    return limit


def torchrun_arguments(config: RunConfig, host: Host, environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's arguments on this host.

    With this rendezvous (rendezvous.py), a group of hosts survives the loss of a worker on one of them. Ranks follow
    the order of the hosts because torchrun sorts its nodes by the address given with --local-addr, as text.
    """
    addresses = load_json(environ.get(ADDRESSES_VARIABLE, "{}"))
    master, own = (addresses.get(name, name) for name in (host.hosts[0], host.name))
    file = environ.get(RENDEZVOUS_FILE_VARIABLE)
    if len(host.hosts) == 1:
        endpoint = ""
        store = "store_type=hash"
        own = addresses.get(host.name, "127.0.0.1")
    elif file is not None:
        endpoint = file
        store = "store_type=file"
    else:
        endpoint = f"{master}:{environ.get(PORT_VARIABLE, rendezvous_port(config.key))}"
        store = f"is_host={str(host.rank == 0).lower()}"
    timeouts = f"join_timeout={_RENDEZVOUS_SECONDS},read_timeout={_RENDEZVOUS_SECONDS}"
    return [
        f"--nnodes={len(host.hosts)}",
        f"--nproc-per-node={config.processes_per_instance or 'auto'}",
        f"--max-restarts={config.max_restarts}",
        f"--rdzv-backend={RENDEZVOUS_BACKEND}",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={config.run}",
        f"--rdzv-conf={store},{timeouts}",
        f"--local-addr={own}",
        WORKER_SCRIPT,
    ]


def rendezvous_port(key: str) -> int:
    """Return the port at which the hosts of a run agree: the same on all of them, and not known without the key."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
    return LISTENING_PORTS[number % len(LISTENING_PORTS)]


def host_variables(tree: MlTree, config: RunConfig, host: Host) -> dict[str, str]:
    """Return the variables that this host's processes get in addition to the container's environment.

    Values that the container's environment sets already take precedence.
    """
    gpus = count_gpus()
    argv = config.args if isinstance(config.args, list) else []
    ranks = len(host.hosts) * (config.processes_per_instance or 0)
    if _starts_ranks(config):
        # As many as torchrun finds, or as the script or command starts itself.
        ranks = 0
    wanted = {
        **sagemaker_variables(
            tree, gpus=config.cuda_on_cpu or gpus, user_args=argv, entry_point=entry_point(config)
        ),
        **accelerate_variables(os.environ, gpus=config.cuda_on_cpu or gpus, ranks=ranks),
        ML_ROOT_VARIABLE: str(tree.root),
        "PYTHONUNBUFFERED": "1",
    }
    if gpus and config.hang_seconds is not None:
        wanted |= trace_variables(tree)
    if host.interface:
        # No other NCCL variables and no libfabric variables (FI_*): decision 020.
        wanted["NCCL_SOCKET_IFNAME"] = wanted["GLOO_SOCKET_IFNAME"] = host.interface
    if "OMP_NUM_THREADS" not in os.environ and gpus == 0 and config.processes_per_instance:
        ranks_here = config.processes_per_instance * int(os.environ.get(HOSTS_HERE_VARIABLE, "1"))
        wanted["OMP_NUM_THREADS"] = str(max(1, usable_cpus() // ranks_here))
    wanted = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return {**wanted, **include_variables(tree, os.environ)}


def _starts_ranks(config: RunConfig) -> bool:
    """Return whether the script or command starts its ranks itself."""
    if config.launcher == OWN_LAUNCHER:
        return True
    if config.command:
        return _RANK_STARTERS.search(" ".join(config.command)) is not None
    return config.starts_ranks


def _start_calls(tree: MlTree, config: RunConfig) -> dict[str, str]:
    """Return the calls with which each Python process of the ranks starts, by the module of the launcher."""
    calls = {}
    # On an instance, where the variable is not set, a scan finds all files.
    if config.task is None and ML_ROOT_VARIABLE in os.environ:
        calls["written_files"] = f"start({str(tree.written)!r})"
    if config.command and ML_ROOT_VARIABLE in os.environ:
        calls["loopback_store"] = "listen_on_loopback()"
        # On an instance, worker.py makes this call, and only for scripts.
        calls["fresh_start"] = "report_fresh_start()"
    if config.starts_ranks:
        calls["spawned_ranks"] = "skip_shutdown()"
    if config.cuda_on_cpu:
        log_line(
            f"CUDA on the CPU (--cuda-on-cpu): ranks see {config.cuda_on_cpu} CUDA devices, which are this machine's "
            "CPU and Gloo"
        )
        return {**calls, "cuda_on_cpu": f"start({config.cuda_on_cpu})"}
    gpus = count_gpus()
    if is_gpu_shared(config.processes_per_instance or gpus, gpus, os.environ):
        log_line("ranks share a GPU, which NCCL refuses: nccl is gloo in this run")
        calls["shared_gpus"] = "start()"
    return calls


def _write_start_module(tree: MlTree, calls: Mapping[str, str], python_path: str | None) -> str:
    """Write the module that makes calls at the start of each Python process; return PYTHONPATH with its folder."""
    folder = tree.start
    folder.mkdir(exist_ok=True)
    lines = [
        f"    from cloudtrain_runtime.launcher import {module}\n    {module}.{call}"
        for module, call in calls.items()
    ]
    text = _START_MODULE.format(
        code=str(tree.code),
        version=sys.version_info[:2],
        calls="\n".join(lines),
        folder=str(folder),
    )
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return os.pathsep.join(filter(None, (str(folder), python_path)))


def _install(tree: MlTree, requirements: str, stop: _Stop) -> bool:
    if ML_ROOT_VARIABLE in os.environ:
        state = "is not installed: a local run uses this machine's environment as it is"
        if (Path(sys.prefix) / INSTALLED_FILE).is_file():
            state = f"is installed in {sys.prefix}"
        log_line(f"{requirements} {state}")
        return True
    pip_install = [sys.executable, "-m", "pip", "install", "--no-input"]
    command = [*pip_install, "-r", str(tree.code / requirements)]
    with subprocess.Popen(command) as pip:
        stop.set_target(pip)
        is_installed = pip.wait() == 0
    stop.set_target(None)
    return is_installed


def _compile_ahead(config: RunConfig) -> None:
    """Compile the modules of this package that a Task's ranks will import, while torch is imported in another process.

    A script's ranks import few of them, which are compiled already, and their end would have to wait for the others.
    """
    if sys.dont_write_bytecode or config.task is None:
        return
    import compileall

    # Only an optimization: an error must not end the container.
    with contextlib.suppress(Exception):
        compileall.compile_dir(Path(__file__).parent, quiet=2)


def _wait(pid: int) -> int:
    """Wait for one child and reap all others: PID 1 inherits every orphan of the container."""
    while True:
        child, status = os.wait()
        if child == pid:
            return os.waitstatus_to_exitcode(status)


class _Stop:
    """Handles stop notices, from the launcher's start on.

    Ranks that act on the notice see it at their next step boundary, save together and exit. Any other process (a script
    that does not act on it, a long start-up) receives SIGTERM at once. A second notice changes nothing.
    """

    def __init__(self, tree: MlTree) -> None:
        self._is_received = False
        self._killed_at: float | None = None
        self._tree = tree
        self._process: subprocess.Popen[Any] | None = None
        self._request: signal.Signals | None = None
        self._timer: threading.Timer | None = None
        self.signal_name = ""
        tree.in_training_loop.unlink(missing_ok=True)
        tree.stopped_early.unlink(missing_ok=True)
        for number in STOP_SIGNALS:
            # Under nohup the end of the terminal is no notice.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def is_received(self) -> bool:
        return self._is_received

    def seconds_left(self) -> float | None:
        """Return how long this host may still work before it has to end; None without a notice."""
        if self._killed_at is None:
            return None
        return max(0.0, self._killed_at - time.monotonic() - _EXIT_SECONDS)

    def set_target(
        self, process: subprocess.Popen[Any] | None, request: signal.Signals | None = None
    ) -> None:
        """Set the process that ends when this host stops.

        Args:
            process: The process.
            request: Signal that it gets before SIGTERM; without it, it ignores SIGTERM.
        """
        self._process = process
        self._request = request
        if self._is_received and self._timer is None:
            self._terminate()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (the handler's signature)
        if self._is_received:
            return
        self._is_received = True
        grace = float(os.environ.get(GRACE_VARIABLE, STOP_GRACE_SECONDS))
        self._killed_at = time.monotonic() + grace
        self.signal_name = signal.Signals(number).name
        self._tree.stop_notice.touch()
        # Ranks that a notice of another host has stopped are about to end. The agent of that host waits for this one,
        # which must not be ended before them.
        ranks_act = self._tree.in_training_loop.exists() or self._tree.stopped_early.exists()
        if not ranks_act:
            self._terminate()
            return
        self._timer = threading.Timer(max(1.0, grace - _MARGIN_SECONDS), self._terminate)
        self._timer.daemon = True
        self._timer.start()

    def _terminate(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._request is not None:
                os.kill(self._process.pid, self._request)
            os.kill(self._process.pid, signal.SIGTERM)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _fail_host(host: Host, lines: list[str], exit_code: int = 1) -> int:
    """Report errors of this host; return the container's exit code."""
    emit("failed", host=host.name, exit_code=exit_code, message=lines[0], secondary=False)
    return fail("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
