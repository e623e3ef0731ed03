"""torchrun's agent of one host, with a report of failures: which rank failed, on which host, and why.

torchrun prints a table for people; SageMaker shows one file. This runs torchrun's own entry point, and writes the
exception that it raises to `/opt/ml/output/failure` and as one event line. Workers are forked from one process that has
imported torch (worker_template.py; `CLOUDTRAIN_WORKER_START=fresh` turns that off).
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from cloudtrain_runtime.contract import describe_exit
from cloudtrain_runtime.contract.secondary_errors import is_secondary_error
from cloudtrain_runtime.launcher.failure_cause import agree_on_cause
from cloudtrain_runtime.launcher.failure_file import (
    REPORTED_EXIT_CODE,
    RankFailure,
    failure_reason,
    report_failure,
    write_failure_file,
)
from cloudtrain_runtime.launcher.host import count_gpus
from cloudtrain_runtime.launcher.worker_template import COMMAND, Template, start_template
from cloudtrain_runtime.process.event_log import emit, log_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_LINGER_SECONDS = 0.3
"""How long the first host, which holds the rendezvous store, outlives its work: other hosts still access the store
when they exit, and print a stack trace if it is gone."""


def main(argv: list[str]) -> int:
    """Run torchrun with these arguments; return its exit code."""
    _limit_threads(argv)
    gc.disable()  # imports produce no garbage, and the collector takes a third of their time
    template = start_template()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import parse_args, run

    gc.freeze()  # so that the first collection does not traverse all of it
    gc.enable()
    _record_collectives()
    if template is not None:
        _fork_workers(template)
    has_started = _finish_starts(template)
    try:
        run(parse_args(argv))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # The error's frames keep the rendezvous store open, which the hosts need to agree on the cause.
        _report(error.failures, argv)
        return REPORTED_EXIT_CODE
    except RendezvousConnectionError:
        if not has_started.is_set():
            raise
        _report_lost_store()
        return REPORTED_EXIT_CODE
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        if template is not None:
            template.end()
    return 0


def _limit_threads(argv: list[str]) -> None:
    """Set the thread limit that torchrun would set later: OpenMP reads it once, when torch is loaded."""
    asked = next((each.partition("=")[2] for each in argv if each.startswith("--nproc-per-node=")), "1")
    ranks = int(asked) if asked.isdecimal() else count_gpus()
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        log_line("OMP_NUM_THREADS=1, as torchrun sets it for several ranks; code.env can set another value")
        os.environ["OMP_NUM_THREADS"] = "1"


def _fork_workers(template: Template) -> None:
    """Make torchrun's agent fork its workers where it would start a command, and change nothing else.

    The agent also accepts functions (`elastic_launch` with a start method), but then it reports only the first of
    several failures, signals a worker without its children, and never notices a worker that ends by `os._exit(0)`.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start_fresh: Any = getattr(SubprocessHandler, "_popen", None)
    if start_fresh is None or list(inspect.signature(start_fresh).parameters) != ["self", "args", "env"]:
        log_line("each worker is a new interpreter: this version of torch starts workers in an unknown way")
        return

    def start(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        is_redirected = self._stdout is not None or self._stderr is not None
        worker = None if is_redirected or tuple(args) != COMMAND else template.fork(env)
        return worker or start_fresh(self, args, env)

    SubprocessHandler._popen = start  # type: ignore[method-assign] # noqa: SLF001 (the only place where torchrun starts a worker)


def _finish_starts(template: Template | None) -> threading.Event:
    """Defer signals that arrive while workers are being started until all of them have been started.

    torchrun would raise an exception at once, without a record of the workers that it has already started. They would
    receive no signal and continue without an agent.

    Returns:
        An event that is set when the workers have been started for the first time.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import api

    has_started = threading.Event()
    handle = getattr(api, "_terminate_process_handler", None)
    start_workers: Any = getattr(LocalElasticAgent, "_start_workers", None)
    if handle is None or start_workers is None:
        return has_started
    is_starting = False
    deferred: list[int] = []

    def handle_later(signum: int, frame: FrameType | None) -> None:
        if is_starting:
            deferred.append(signum)
        else:
            handle(signum, frame)

    def start_all(self: Any, worker_group: Any) -> Any:
        nonlocal is_starting
        if template is not None:
            template.await_load()
        is_starting = True
        try:
            return start_workers(self, worker_group)
        finally:
            is_starting = False
            has_started.set()
            if deferred:
                handle(deferred[0], None)

    api._terminate_process_handler = handle_later  # noqa: SLF001
    LocalElasticAgent._start_workers = start_all  # type: ignore[method-assign] # noqa: SLF001
    return has_started


def _record_collectives() -> None:
    """Make collectives that time out write a trace."""
    import torch

    if torch.cuda.device_count() == 0:
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 8):
        # The former name, which torch 2.5 reads; torch 2.13 warns about it.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _report(failures: Mapping[int, ProcessFailure], argv: list[str]) -> None:
    """Emit the event of the rank that failed first on this host, and write the run's cause to the failure file."""
    rank, failure = min(failures.items(), key=lambda item: (_is_secondary(item[1]), _time_of(item[1])))
    title, traceback = _describe(failure)
    first = RankFailure(
        rank=rank,
        local_rank=failure.local_rank,
        title=title,
        traceback=traceback,
        exit_code=failure.exitcode,
        failed_at=_time_of(failure),
        secondary=_is_secondary(failure),
    )
    report_failure(first)
    options = dict(argument.partition("=")[::2] for argument in argv)
    reason = agree_on_cause(
        failure_reason(first),
        is_secondary=first.secondary,
        endpoint=options.get("--rdzv-endpoint", ""),
        hosts=int(options.get("--nnodes", "1")),
        holds_store="is_host=true" in options.get("--rdzv-conf", ""),
    )
    if reason:
        write_failure_file(reason, replace=True)


def _report_lost_store() -> None:
    """Report that the first host, which holds the rendezvous store, ended while the ranks of this host were running.

    The first host knows the cause. This host writes no failure file, which SageMaker might show in place of the cause.
    """
    host = os.environ.get("SM_CURRENT_HOST", "")
    message = f"the ranks on {host} were ended because the first host has ended"
    log_line(message)
    emit("failed", host=host, exit_code=1, message=message, secondary=True)


def _time_of(failure: ProcessFailure) -> float:
    """Return when a rank failed, in seconds since the epoch: with fractions if the rank has recorded them."""
    data: Any = failure.error_file_data
    content = data.get("message") if isinstance(data, dict) else None
    recorded = content.get("extraInfo", {}).get("failed_at") if isinstance(content, dict) else None
    return recorded if isinstance(recorded, float) else float(failure.timestamp)


def _is_secondary(failure: ProcessFailure) -> bool:
    title, traceback = _describe(failure)
    # torchrun ends the other workers itself, with SIGTERM.
    return failure.exitcode == -signal.SIGTERM or is_secondary_error(f"{title}\n{traceback}")


def _describe(failure: ProcessFailure) -> tuple[str, str]:
    """Return one line about a failure, and its traceback or an empty string."""
    data: Any = failure.error_file_data  # any JSON
    content = data.get("message") if isinstance(data, dict) else None
    if failure.exitcode == -signal.SIGKILL or (failure.exitcode < 0 and not isinstance(content, dict)):
        return f"was killed by {describe_exit(failure.exitcode)}", ""
    if not isinstance(content, dict):
        return f"ended with {describe_exit(failure.exitcode)}", ""
    traceback = str(content.get("extraInfo", {}).get("py_callstack", ""))
    return f"failed: {content.get('message', '')}", traceback


def run_and_exit(argv: list[str]) -> NoReturn:
    """Run torchrun with these arguments, and exit with its exit code.

    A worker that was forked from here passes through with the SystemExit or the exception that ends it.
    """
    exit_code = main(argv)
    if "is_host=true" in " ".join(argv) and "--nnodes=1" not in argv:
        time.sleep(_LINGER_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # the interpreter's shutdown would take 0.25 s with torch loaded


if __name__ == "__main__":
    run_and_exit(sys.argv[1:])
