"""The worker, one process per rank: trains the Task, or runs the user's script unchanged."""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from cloudtrain_runtime.contract import (
    ERROR_FILE_VARIABLE,
    OWN_LAUNCHER,
    RunConfig,
    describe_exit,
)
from cloudtrain_runtime.contract.placeholders import CHECKPOINTS_VARIABLE, substitute
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.secondary_errors import is_secondary_error
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.errors import JobError, TaskError
from cloudtrain_runtime.launcher.failure_file import (
    RankFailure,
    failure_reason,
    report_failure,
    write_failure_file,
)
from cloudtrain_runtime.launcher.fresh_start import report_fresh_start
from cloudtrain_runtime.launcher.group_joins import JoinRecorder
from cloudtrain_runtime.launcher.host import read_host
from cloudtrain_runtime.launcher.host_environment import read_cuda, report_environment
from cloudtrain_runtime.launcher.loopback_store import listen_on_loopback
from cloudtrain_runtime.launcher.sagemaker_environment import toolkit_variables
from cloudtrain_runtime.metrics.tracking.process import start_tracking
from cloudtrain_runtime.process import fast_exit, heartbeat
from cloudtrain_runtime.process.environment import (
    include_variables,
    is_mpirun_rank,
    is_toolkit_trial,
    ml_tree,
    own_launcher_variables,
    read_run_config,
    torchrun_variables,
)
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.leaving import limit_leaving
from cloudtrain_runtime.process.loader_workers import protect_loaders
from cloudtrain_runtime.process.log_prefix import prefix_lines
from cloudtrain_runtime.process.reserved_port import reserve_master_port
from cloudtrain_runtime.training import determinism

_SECONDARY_DELAY_SECONDS = 2.0
_leaving_seconds: float | None = None
"""How long this rank may take to end when its work is done: limits.hang; None without a limit."""


def main() -> None:
    """Run this rank. Write an exception's traceback to torchrun's error file, from which `output/failure` is made."""
    fast_exit.register(on_success=finalize_mpi)
    try:
        run_rank()
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 (torch raises some errors that do not derive from Exception)
        callstack = "".join(
            traceback.format_exception(error.with_traceback(trim_to_user_code(error.__traceback__)))
        )
        record_failure(f"{type(error).__name__}: {error}", callstack)
        if is_mpirun_rank(os.environ) and is_secondary_error(callstack):
            # AWS's toolkit quotes the first error in mpirun's output, and output from other hosts arrives later.
            time.sleep(_SECONDARY_DELAY_SECONDS)
        # In one write, with the rank before each line as torch's own hook does: ranks share their host's log, and the
        # lines of two ranks that fail together would mix.
        log_line("\n".join(f"{_rank_prefix()}{line}" for line in callstack.rstrip().splitlines()))
        report_without_agent(f"failed: {type(error).__name__}: {error}", callstack)
        # Its frames refer to what the exit releases, such as the workers of data loaders.
        traceback.clear_frames(error.__traceback__)
        # Skips the interpreter's shutdown, which may abort (see `exit_process`) and then hide the reason.
        exit_process(1)


def run_rank() -> None:
    """Run the script or train the Task that run.json names."""
    try:
        config = read_run_config(os.environ)
    except JobError as error:
        exit_with_error(error)
    if config is None:
        sys.exit(
            "no run.json: only cloudtrain's launcher or AWS's training toolkit can start this script"
        )
    global _leaving_seconds  # noqa: PLW0603 (a process has one rank)
    _leaving_seconds = config.hang_seconds
    is_of_toolkit = is_mpirun_rank(os.environ) or is_toolkit_trial(os.environ)
    if is_of_toolkit:
        replace_launcher(config)
    os.environ.update(torchrun_variables(os.environ))
    reserve_master_port(os.environ)
    listen_on_loopback()
    load_secrets(config)
    if is_of_toolkit and os.environ["RANK"] == "0":
        track_run(config)
    prefix_lines(os.environ)
    heartbeat.arm(os.environ)
    code = str(Path.cwd())
    if code not in sys.path:
        sys.path.insert(0, code)
    if config.task is None and os.environ.get("RANK", "0") == "0":
        # A Task reports its start itself, with the step that it continues from.
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        emit("attempt", host=os.environ.get("SM_CURRENT_HOST", ""), restarts=restarts)
    if config.command:
        run_command(config)
    elif config.task is None:
        run_script(config)
    else:
        run_task(config)


def replace_launcher(config: RunConfig) -> None:
    """Do in a rank of AWS's toolkit what cloudtrain's launcher does before it starts the ranks."""
    tree = ml_tree(os.environ)
    os.environ.update(toolkit_variables(tree, config, os.environ))
    if included := include_variables(
        tree, os.environ
    ):  # without cloudtrain's launcher, which sets it first
        os.environ.update(included)
        sys.path.insert(1, str(tree.include))
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("LOCAL_RANK")) == "0":
        report_environment(tree, read_host(tree), config, read_cuda())


def track_run(config: RunConfig) -> None:
    """Start the process that logs the run to its trackers, where no launcher of cloudtrain does."""
    if config.tracking is None:
        return
    try:
        atexit.register(start_tracking(ml_tree(os.environ), config, os.environ).end)
    except JobError as error:
        exit_with_error(error)
    except OSError as error:
        emit("tracking", detail=f"the run is not logged to its trackers: {error}")


def trim_to_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of the job's own code on; unchanged if it has no such frame.

    The frames of the training loop before it do not help the reader and fill a screen for each rank.
    """
    code = Path.cwd().resolve()
    runtime = Path(__file__).resolve().parent
    own = trace
    while own is not None:
        name = own.tb_frame.f_code.co_filename
        file = Path(name).resolve()
        is_file = not name.startswith("<")  # <frozen runpy>
        if is_file and file.is_relative_to(code) and not file.is_relative_to(runtime):
            return own
        own = own.tb_next
    return trace


def load_secrets(config: RunConfig) -> None:
    """Redact the values of the job's secrets in the output, and fetch those that the environment does not have yet.

    cloudtrain's launcher has set all of them. Under AWS's toolkit each rank fetches them.
    """
    if not config.secrets:
        return
    from cloudtrain_runtime.launcher.secrets import load_missing

    found = load_missing(config.secrets)
    if found.problems:
        exit_with_error(JobError("; ".join(found.problems)))
    os.environ.update(found.values)


def _rank_prefix() -> str:
    return f"[rank{os.environ.get('RANK', '?')}]: "


def record_failure(message: str, callstack: str) -> None:
    """Write the error file that torchrun reads, atomically.

    torchrun ends ranks that have lost a peer, perhaps while they write this file, and an incomplete file would crash
    torchrun's agent instead of restarting the group.

    Does the same as `torch.distributed.elastic.multiprocessing.errors.record`, without the 0.3 s that its import takes.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path is None:
        return
    now = time.time()
    # torch reads integral seconds; cloudtrain's agent compares hosts that fail within the same second.
    details = {"py_callstack": redact(callstack), "timestamp": str(int(now)), "failed_at": now}
    content = {"message": {"message": redact(message), "extraInfo": details}}
    part = Path(f"{path}.part")
    part.write_text(dump_json(content), encoding="utf-8")
    part.replace(path)


def report_without_agent(title: str, callstack: str = "", exit_code: int = 1) -> None:
    """Write the failure file where cloudtrain's agent does not: under AWS's toolkit.

    The toolkit does not overwrite an existing failure file. A secondary failure is not written: on the first host it
    would replace the cause, which the toolkit finds in mpirun's output.
    """
    has_agent = ERROR_FILE_VARIABLE in os.environ and not is_toolkit_trial(os.environ)
    if has_agent or not ml_tree(os.environ).run_config.is_file():
        return
    failure = RankFailure(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        title=title,
        traceback=callstack,
        exit_code=exit_code,
        failed_at=time.time(),
        secondary=is_secondary_error(f"{title}\n{callstack}"),
    )
    report_failure(failure)
    if not failure.secondary:
        write_failure_file(failure_reason(failure), replace=False)


def run_command(config: RunConfig) -> NoReturn:
    """Replace this process by the job's command, whose exit code and signals are then those of the rank.

    The words of a command that starts its own ranks may use all variables, which it does not find in its environment.
    """
    os.environ[CHECKPOINTS_VARIABLE] = str(ml_tree(os.environ).checkpoints)
    try:
        words = [substitute(word, os.environ) for word in [*config.command, *map(str, config.args)]]
        sys.stdout.flush()
        sys.stderr.flush()
        is_own = config.launcher == OWN_LAUNCHER
        environment = own_launcher_variables(os.environ) if is_own else dict(os.environ)
        os.execvpe(words[0], words, environment)  # noqa: S606 (without a shell)
    except KeyError as error:
        exit_with_error(JobError(f"code.command: there is no variable ${error.args[0]}"))
    except OSError as error:
        exit_with_error(JobError(f"code.command: {words[0]} cannot be started: {error.strerror}"))


def run_script(config: RunConfig) -> None:
    """Run the user's script as `python script.py ARGS` would, or the module as `python -m module ARGS` would."""
    script = Path(config.script or "").absolute()
    sys.argv = [
        str(script) if config.module is None else "-m",
        *script_arguments(config, os.environ),
    ]
    sys.path[0] = str(script.parent if config.module is None else Path.cwd())
    protect_loaders(ml_tree(os.environ).in_training_loop)
    report_fresh_start()
    recorder = JoinRecorder() if ml_tree(os.environ).joins.is_dir() else None
    code: str | int | None = 0
    try:
        if config.module is None:
            runpy.run_path(str(script), run_name="__main__")
        else:
            runpy.run_module(config.module, run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        code = exit_.code
    checkpoints = sys.modules.get("cloudtrain_runtime.checkpoint.script_api")
    if not code and checkpoints is not None:
        try:
            checkpoints.finish_script()
        except JobError as error:
            exit_with_error(error)
    if code:
        is_message = isinstance(code, str)
        title = f"failed: {code}" if is_message else f"ended with {describe_exit(int(code))}"
        report_without_agent(title, exit_code=1 if is_message else int(code))
    elif recorder is not None:
        recorder.end()
    exit_process(code)


def script_arguments(config: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Return the script's arguments. The local rank comes first, as with `python -m torch.distributed.launch`."""
    given = config.args if isinstance(config.args, list) else []
    option = config.local_rank_option
    return [*([f"{option}={environ['LOCAL_RANK']}"] if option else []), *given]


def run_task(config: RunConfig) -> None:
    """Train the Task, or evaluate it."""
    if config.train is not None and config.train.deterministic:
        determinism.configure_cublas()
    from cloudtrain_runtime.metrics.bandwidth import report_bandwidth
    from cloudtrain_runtime.process import process_group
    from cloudtrain_runtime.process.run_context import context
    from cloudtrain_runtime.training.task_loading import load_task
    from cloudtrain_runtime.training.trainer import Trainer

    if config.task is None or config.train is None or not isinstance(config.args, dict):
        raise ValueError("run.json has neither a script or module nor a Task with a train section")
    rank_context = context()
    try:
        process_group.join_ranks(rank_context)
        report_bandwidth(rank_context, config.network_gbps)
        trainer = Trainer(
            load_task(config.task, config.args), config.train, config.checkpoint, rank_context
        )
        if config.evaluation is None:
            trainer.run()
        else:
            from cloudtrain_runtime.training.evaluation_run import run_evaluation

            run_evaluation(trainer, config.evaluation)
    except JobError as error:
        exit_with_error(error)
    except (
        SystemExit
    ) as exit_:  # without an error the other ranks would lose this one for no visible reason
        raise TaskError(f"the Task ended its process, by sys.exit({exit_.code!r})") from exit_
    exit_process(0)


def exit_with_error(error: JobError) -> NoReturn:
    """Report a mistake of the job without a traceback, and end this process."""
    record_failure(str(error), "")
    if not error.is_common or os.environ.get("RANK", "0") == "0":
        log_line(f"{_rank_prefix()}error: {error}")
    report_without_agent(f"failed: {error}")
    exit_process(1)


def exit_process(code: str | int | None) -> NoReturn:
    """End this process: join threads, run exit handlers, flush files, and skip the interpreter's shutdown.

    With torch loaded the shutdown takes 0.6 s. It also destroys a process group that a model still references, which
    can abort a run that had succeeded: with Gloo, up to half of the runs of an ordinary script fail so under plain
    torchrun 2.13 (the cause is that of pytorch#179291). multiprocessing ends forked processes in the same way.
    """
    heartbeat.leave(has_failed=code not in (None, 0))
    if _leaving_seconds is not None:
        limit_leaving(_leaving_seconds, code if isinstance(code, int) else int(bool(code)))
    loaders = sys.modules.get("cloudtrain_runtime.data.loader")
    if loaders is not None:
        loaders.close_loaders()
    if isinstance(code, str):
        sys.exit(code)
    fast_exit.exit_process(code or 0)


def finalize_mpi() -> None:
    """Finalize MPI if this process has initialized it: mpirun treats a rank that exits without it as failed.

    Usually mpi4py finalizes MPI in the interpreter's shutdown. This calls the MPI library directly, because SMDDP may
    have initialized it.
    """
    if not is_mpirun_rank(os.environ):
        return
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    path = next((line.split()[-1] for line in lines if "/libmpi.so" in line), None)
    if path is None:
        return
    library, is_initialized, is_finalized = ctypes.CDLL(path), ctypes.c_int(), ctypes.c_int()
    library.MPI_Initialized(ctypes.byref(is_initialized))
    library.MPI_Finalized(ctypes.byref(is_finalized))
    if is_initialized.value and not is_finalized.value:
        library.MPI_Finalize()


if __name__ == "__main__":
    main()
