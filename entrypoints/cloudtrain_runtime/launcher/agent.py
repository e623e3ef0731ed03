"""The agent of one host, with a report of failures: which rank failed, on which host, and why.

Several hosts agree by torchrun's own agents; a single host has one without torch, which starts its ranks as torchrun
does (host_agent.py). torchrun prints a table for people, and SageMaker shows one file: this writes the failure to
`/opt/ml/output/failure` and as one event line. The workers of a script are new interpreters. Those of a Task are forks
of a process that has imported torch (fork_server.py); `CLOUDTRAIN_WORKER_START=fresh` turns that off.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from cloudtrain_runtime.contract import WORKER_SCRIPT, describe_exit
from cloudtrain_runtime.contract.early_ends import ended_early
from cloudtrain_runtime.contract.secondary_errors import is_secondary_error
from cloudtrain_runtime.launcher.agent_signals import handle_stop_signals
from cloudtrain_runtime.launcher.failure_cause import agree_on_cause
from cloudtrain_runtime.launcher.failure_file import (
    REPORTED_EXIT_CODE,
    RankFailure,
    failure_reason,
    report_failure,
    write_failure_file,
)
from cloudtrain_runtime.launcher.fork_server import ForkServer, ServerLostError, start_server
from cloudtrain_runtime.launcher.group_joins import read_joins
from cloudtrain_runtime.launcher.host import count_gpus
from cloudtrain_runtime.launcher.host_agent import HostAgent, HostOptions
from cloudtrain_runtime.launcher.oom_kills import count_oom_kills, describe_oom_kills
from cloudtrain_runtime.launcher.rank_processes import FailedProcess
from cloudtrain_runtime.launcher.shared_forks import find_shared_server
from cloudtrain_runtime.process.environment import ml_tree, read_run_config
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.heartbeat import Heartbeat, Phase, read_heartbeats

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

START_VARIABLE = "CLOUDTRAIN_WORKER_START"
"""`fresh`: a new interpreter for each worker of a Task, too."""

_LINGER_SECONDS = 0.3
"""How long the first host, which holds the rendezvous store, outlives its work: other hosts still access the store
when they exit, and print a stack trace if it is gone."""


def main(argv: list[str]) -> int:
    """Run the ranks of this host with torchrun's arguments; return its exit code."""
    _limit_threads(argv)
    oom_kills = count_oom_kills()
    # Imports produce no garbage, and the collector takes a third of their time.
    gc.disable()
    is_task = _forks_ranks()
    options = HostOptions.of(argv, os.environ)
    server = None
    if is_task:
        server = find_shared_server(os.environ) or start_server(needs_torch=options is None)
    _record_collectives()
    try:
        if options is None:
            return _run_with_torch(argv, server, oom_kills)
        agent = HostAgent(options, server)
        gc.enable()
        failed = agent.run()
    except ServerLostError as error:
        # The server has printed why.
        log_line(str(error))
        return 1
    if failed:
        _report(failed, argv, describe_oom_kills(oom_kills), is_task=is_task)
        return REPORTED_EXIT_CODE
    stop = agent.stop_signal()
    return 0 if stop is None else 128 + int(stop)


def _run_with_torch(argv: list[str], server: ForkServer | None, oom_kills: int | None) -> int:
    """Run the ranks by an agent of torch; return its exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import config_from_args, parse_args

    from cloudtrain_runtime.launcher.rendezvous import register_rendezvous

    handle_stop_signals()
    arguments = parse_args(argv)  # type: ignore[no-untyped-call]
    if hasattr(arguments, "signals_to_handle"):
        # torchrun's own handlers would end the ranks without being asked. torch before this option
        # has no other way.
        arguments.signals_to_handle = "SIGQUIT"
    register_rendezvous()
    agent = None
    if server is not None:
        from cloudtrain_runtime.launcher.fork_server_agent import ForkServerAgent

        agent = ForkServerAgent(config_from_args(arguments)[0], WORKER_SCRIPT, server)
    # Frozen, so that the first collection does not traverse all that the imports have made.
    gc.freeze()
    gc.enable()
    try:
        failed = _run_torchrun(arguments) if agent is None else agent.run_workers()
    except RendezvousConnectionError:
        tree = ml_tree(os.environ)
        has_started = agent is not None and agent.has_started
        if agent is None:
            # The ranks of torchrun's own agent leave files when they have started.
            has_started = bool(read_joins(tree) or read_heartbeats(tree.heartbeats))
        if not has_started:
            raise
        # The first host, which holds the rendezvous store, has ended while the ranks of this host
        # were running. It knows the cause. This host writes no failure file, which SageMaker might
        # show in place of the cause.
        host = os.environ.get("SM_CURRENT_HOST", "")
        message = f"the ranks on {host} were ended because the first host has ended"
        log_line(message)
        emit("failed", host=host, exit_code=1, message=message, secondary=True)
        return REPORTED_EXIT_CODE
    except SignalException as error:
        return 128 + int(error.sigval)
    if failed is None:
        return 0
    is_task = agent is not None
    _report(failed.failures, argv, describe_oom_kills(oom_kills), is_task=is_task)
    return REPORTED_EXIT_CODE


def _limit_threads(argv: list[str]) -> None:
    """Set the thread limit that torchrun would set later: OpenMP reads it once, when torch is loaded."""
    options = [each for each in argv if each.startswith("--nproc-per-node=")]
    asked = options[0].partition("=")[2] if options else "1"
    ranks = int(asked) if asked.isdecimal() else count_gpus()
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        log_line(
            "OMP_NUM_THREADS=1, as torchrun sets it for several ranks; code.env can set another value"
        )
        os.environ["OMP_NUM_THREADS"] = "1"


def _forks_ranks() -> bool:
    """Return whether workers are forks of one process: those of a Task, unless the environment says otherwise."""
    wish = os.environ.get(START_VARIABLE, "")
    if wish not in ("", "fresh"):
        log_line(f'{START_VARIABLE} is {wish!r}; its one value is "fresh"')
    config = read_run_config(os.environ)
    return config is not None and config.task is not None and not wish


def _run_torchrun(arguments: Namespace) -> ChildFailedError | None:
    """Run torchrun, whose workers are new interpreters; return its report of failures, or None."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # The error's frames keep the rendezvous store open, which the hosts need to agree on the
        # cause.
        return error
    return None


def _record_collectives() -> None:
    """Make collectives that time out write a trace."""
    if count_gpus() == 0:
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if _torch_version() < (2, 8):
        # The former name, which torch 2.5 reads; torch 2.13 warns about it.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _torch_version() -> tuple[int, int]:
    """Return the version of the installed torch, without its import; (0, 0) if it is unknown."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor = version("torch").split(".")[:2]
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return 0, 0


def _report(
    failures: Mapping[int, ProcessFailure | FailedProcess],
    argv: list[str],
    oom_kills: str,
    *,
    is_task: bool,
) -> None:
    """Emit the event of the rank that failed first on this host, and write the run's cause to the failure file."""
    found = [_describe(rank, failure, oom_kills) for rank, failure in failures.items()]
    first = min(found, key=lambda each: (each.secondary, each.failed_at))
    if first.secondary:
        first = _early_end(first, set(failures), is_task=is_task) or first
    report_failure(first)
    options = dict(argument.partition("=")[::2] for argument in argv)
    reason = agree_on_cause(
        failure_reason(first),
        is_secondary=first.secondary,
        endpoint=options.get("--rdzv-endpoint", ""),
        hosts=int(options.get("--nnodes", "1")),
        options=options.get("--rdzv-conf", ""),
    )
    if reason:
        write_failure_file(reason, replace=True)


def _describe(rank: int, failure: ProcessFailure | FailedProcess, oom_kills: str) -> RankFailure:
    """Return how a rank failed, from what it has recorded (worker.record_failure) and from its exit code."""
    # The worker has written the file, so its content may be any JSON.
    data: Any = failure.error_file_data
    content = data.get("message") if isinstance(data, dict) else None
    recorded = content if isinstance(content, dict) else {}
    details = recorded.get("extraInfo", {})
    code = failure.exitcode
    title = f"failed: {recorded.get('message', '')}"
    traceback = str(details.get("py_callstack", ""))
    if code == -signal.SIGKILL or not recorded:
        what = "was killed by" if code < 0 else "ended with"
        title = f"{what} {describe_exit(code)}"
        traceback = ""
    if code == -signal.SIGKILL:
        title += oom_kills
    # The rank's own time has fractions of a second, torchrun's has not.
    failed_at = details.get("failed_at")
    if not isinstance(failed_at, float):
        failed_at = float(failure.timestamp)
    return RankFailure(
        rank=rank,
        local_rank=failure.local_rank,
        title=title,
        traceback=traceback,
        exit_code=code,
        failed_at=failed_at,
        # torchrun ends the other workers itself, with SIGTERM.
        secondary=code == -signal.SIGTERM or is_secondary_error(f"{title}\n{traceback}"),
    )


def _early_end(
    waiting: RankFailure, failed: Collection[int], *, is_task: bool
) -> RankFailure | None:
    """Return the failure of a rank of this host that ended with exit code 0 before `waiting` lost it, or None.

    Args:
        waiting: The first failure, which is the consequence of something else.
        failed: The ranks of this host that failed. Any other one has ended with exit code 0.
        is_task: Whether the ranks train a Task, which ends no process itself when torchrun asks it to end.
    """
    tree = ml_tree(os.environ)
    ended = [each for each in read_heartbeats(tree.heartbeats) if each.rank not in failed]
    # When the monotonic clock was at 0.
    started_at = time.time() - time.monotonic()

    def is_cause(each: Heartbeat) -> bool:
        if each.phase is not Phase.LEFT:
            # A Task's process that ended in its middle, such as by os._exit, has not left.
            return is_task
        # A rank that has ended after the failure, because torchrun ended it, is no cause.
        return started_at + each.left_nanoseconds / 1e9 < waiting.failed_at

    early = [each for each in ended if is_cause(each)]
    if not early:
        return None
    first = early[0]
    place = _last_place(waiting.traceback, str(tree.code.resolve()))
    return replace(
        waiting,
        rank=first.rank,
        local_rank=first.local_rank,
        title=f"{ended_early(first.step)}, while rank {waiting.rank} waited for it{place}",
        exit_code=0,
        secondary=False,
    )


def _last_place(traceback: str, code: str) -> str:
    """Return ` at train.py:21` for the innermost frame of the job's own code in a traceback; empty if it has none."""
    frames = re.findall(
        rf'File "{re.escape(code)}/(?P<file>(?!cloudtrain_runtime/)[^"]+)", line (?P<line>\d+)',
        traceback,
    )
    if not frames:
        return ""
    file, line = frames[-1]
    return f" at {file}:{line}"


def run_and_exit(argv: list[str]) -> NoReturn:
    """Run torchrun with these arguments, and exit with its exit code."""
    exit_code = main(argv)
    if "is_host=true" in " ".join(argv) and "--nnodes=1" not in argv:
        time.sleep(_LINGER_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's shutdown would take 0.25 s with torch loaded.
    os._exit(exit_code)


if __name__ == "__main__":
    run_and_exit(sys.argv[1:])
