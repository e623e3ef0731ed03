"""The verbs: validate, plan, check, submit, resume, status, logs, explain, stop, list, configure.

Here alone the floors meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import heapq
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from cloudtrain.backends.base import Backend
from cloudtrain.bundle import BUNDLES_FOLDER, Contents, ProgressCallback, collect, list_contents, secrets_below
from cloudtrain.bundle.git_source import read_source
from cloudtrain.catalog import Prices, bundled_prices, newest, priced_regions, read_prices
from cloudtrain.client.capacity import FIRST_PAUSE_SECONDS
from cloudtrain.client.submission import (
    NO_CALLBACKS,
    Callbacks,
    Sending,
    add_warnings,
    refuse_failed,
)
from cloudtrain.errors import (
    EXIT_RUN_FAILED,
    CloudError,
    CloudtrainError,
    Problem,
    RunNotFoundError,
    SettingsError,
    SpecError,
    UntrustedSettingsError,
    UserError,
)
from cloudtrain.job.entry import find_module
from cloudtrain.job.problems import Finding
from cloudtrain.job.script_conventions import Conventions, read_conventions
from cloudtrain.job.spec import JobSpec, read_job
from cloudtrain.planning.continuation import (
    AUTO,
    Continuation,
    find_continuation,
    manifests_in,
)
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import (
    LOCAL,
    SAGEMAKER,
    CodeInfo,
    Plan,
    make_plan,
)
from cloudtrain.planning.storage_layout import Resumed, steps_beside
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.previous_run import PreviousRun, saved_by
from cloudtrain.runs.run import Run, parse_reference
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, submission_time
from cloudtrain.runs.status import Status
from cloudtrain.settings.settings import (
    PROFILE_VARIABLE,
    Origin,
    Settings,
    find_origins,
    load_settings,
    prices_file,
    profile_file,
)
from cloudtrain.settings.trust import agree, is_agreed
from cloudtrain.support.data_files import data_files
from cloudtrain.support.run_id import is_run_id, make_run_id
from cloudtrain_runtime.contract import BUNDLE_FILE
from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
from cloudtrain_runtime.contract.manifest import step_of_folder_name
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.backends.local.backend import LocalBackend
    from cloudtrain.backends.sagemaker import SageMakerBackend
    from cloudtrain.backends.sandbox import Sandbox
    from cloudtrain.bundle.archive import Bundle
    from cloudtrain.failure_rules import Explanation
    from cloudtrain.preflight import Candidates, Check
    from cloudtrain.settings.profiles import ProfileChange

SANDBOX = "sandbox"
HOME_VARIABLE = "CLOUDTRAIN_HOME"
HOME_FOLDER = ".cloudtrain"


def validate(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    instances: int | None = None,
    local: bool = False,
    settings: Settings | None = None,
) -> JobSpec:
    """Read a job file and check everything that the file alone can tell, offline.

    The code folder is not read, but for the names that the job gives: `plan` does that.

    Args:
        path: The job file.
        overrides: `path=value`, as the `--set` option takes them.
        instances: Replaces `cluster.instances`.
        local: Check for a run on this machine instead of SageMaker.
        settings: The account; by default from environment and files.

    Raises:
        SpecError: the job does not validate; `problems` holds every mistake with line and column.
        UserError: the file cannot be read.
    """
    reading = read_job(path, overrides, instances=instances)
    problems = list(reading.problems)
    if reading.spec is not None:
        # The plan of the job with legal values in the places of wrong ones shows what else is wrong.
        try:
            _decide(reading.spec, _NO_CODE, local=local, settings=settings)
        except SpecError as error:
            told = {(problem.path, problem.message) for problem in problems}
            problems += [
                problem
                for problem in error.problems
                if not reading.is_about_wrong(problem.path) and (problem.path, problem.message) not in told
            ]
    if reading.spec is None or problems:
        raise SpecError(problems)
    return reading.spec


_MOST_LEFT_OUT = 500
"""Names of what stays behind that a plan keeps, for `explain`."""

_NO_CODE = CodeInfo(digest="0" * 64, bytes=0, files=0)
"""Stands for the code where only the job file is checked."""


def plan(
    spec: JobSpec | str | Path,
    *,
    local: bool = False,
    settings: Settings | None = None,
    now: datetime | None = None,
    suffix: str | None = None,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Decide everything that a submit would send, offline.

    Args:
        spec: The job, or the path of its file.
        local: Plan for this machine instead of SageMaker.
        settings: The account; by default from environment and files.
        now: Time of the plan in UTC; by default now.
        suffix: Six hexadecimal digits of the run id; by default random.
        progress: Told how many bytes of the code have been read, and how many there are.

    Raises:
        SpecError: the job asks for what cannot work.
        BundleError: the code folder cannot travel.
    """
    spec = spec if isinstance(spec, JobSpec) else validate(spec, local=local, settings=settings)
    return _plan(spec, local=local, settings=settings, now=now, suffix=suffix, progress=progress)[0]


def _plan(
    spec: JobSpec,
    *,
    local: bool,
    settings: Settings | None,
    now: datetime | None = None,
    suffix: str | None = None,
    progress: ProgressCallback | None = None,
    cloud: SageMakerBackend | None = None,
) -> tuple[Plan, Contents]:
    missing = [spec.problem_of(finding) for finding in spec.references.check()]
    if missing:  # a job that was built in Python has not been asked yet
        raise SpecError(missing)
    secret = [spec.problem_of(finding) for finding in _secret_data(spec)] if not local else []
    if secret:
        raise SpecError(secret)
    contents = collect(spec.code_directory, home=find_home(), progress=progress)
    misplaced = [*_left_behind(spec, contents), *_own_outputs(spec, contents)]
    if misplaced:
        raise SpecError(misplaced)
    code = dataclasses.replace(contents.info, source=read_source(spec.code_directory), conventions=_conventions(spec))
    stamp = "" if local else _stamp_data(spec)
    settings = settings or find_settings(spec)
    resumed = _find_resumed(spec, settings, local=local, cloud=cloud)
    decided = _decide(
        spec, code, local=local, settings=settings, now=now, suffix=suffix, data_stamp=stamp, resumed=resumed
    )
    decided = _with_continuation(decided)
    left_out = tuple((left.name, left.reason) for left in contents.left_out[:_MOST_LEFT_OUT])
    decisions = (*decided.decisions, *_left_out(contents))
    warnings = (*decided.warnings, *_shipped_outputs(spec, contents))
    return dataclasses.replace(decided, decisions=decisions, warnings=warnings, left_out=left_out), contents


def _continuation_here(decided: Plan) -> Continuation:
    """Return what a run would continue from, where that is a folder of this machine."""
    from cloudtrain.backends.container.filesystem import path_of

    checkpoint = decided.config.checkpoint
    place = checkpoint.uri if checkpoint.resume in (AUTO, "never") else checkpoint.resume
    if checkpoint.resume == "never" or not place.startswith("file:"):
        return Continuation()
    return find_continuation(decided.config, manifests_in(path_of(place), checkpoint.resume_run))


def _with_continuation(decided: Plan) -> Plan:
    """Return a plan that names what its run continues from, and how that differs."""
    found = _continuation_here(decided)
    decisions, warnings = list(decided.decisions), list(decided.warnings)
    if found.manifest is not None:
        differences = f"; {found.differences}" if found.differences else ""
        decisions.append(f"continues from step {found.manifest.step} of run {found.manifest.run}{differences}")
    if found.stranger is not None:
        warnings.append(f"submit refuses this: {_stranger(found)}")
    warnings += [text for text in (found.warning, found.doubt) if text]
    return dataclasses.replace(decided, decisions=tuple(decisions), warnings=tuple(warnings))


def _stranger(found: Continuation) -> str:
    saved = found.stranger
    whose = f"step {saved.step} of run {saved.run}" if saved is not None else ""
    return f"the checkpoints in checkpoint.uri are another training's ({whose}: {found.differences})"


def _refuse_stranger(decided: Plan) -> None:
    """Refuse a run whose place holds only another training's checkpoints.

    Raises:
        UserError: it does.
    """
    found = _continuation_here(decided)
    if found.stranger is not None:
        hint = (
            f"to continue from them: --set checkpoint.resume={found.stranger.run}; to start anew: another "
            "checkpoint.uri, or --set checkpoint.resume=never"
        )
        raise UserError(_stranger(found), hint)


def _conventions(spec: JobSpec) -> Conventions:
    if spec.code.script is not None:
        return read_conventions(spec.code_directory, spec.code.script)
    module = find_module(spec.code_directory, (spec.code.task or "").partition(":")[0])
    if module is None:
        return Conventions()
    read = read_conventions(spec.code_directory, module.relative_to(spec.code_directory).as_posix())
    return Conventions(ml_paths=read.ml_paths)


def _stamp_data(spec: JobSpec) -> str:
    """Return what tells one state of this machine's data from another, without reading it: names, sizes and times."""
    stamp = hashlib.sha256()
    for name, channel in sorted(spec.data.items()):
        if not channel.is_s3:
            root = spec.base / channel.uri
            for file in data_files(root):
                with contextlib.suppress(OSError):  # the upload reports what cannot be read
                    found = file.path.stat()
                    text = f"{name} {file.name} {found.st_size} {found.st_mtime_ns}\n"
                    stamp.update(text.encode("utf-8", "surrogateescape"))
    return stamp.hexdigest()


def _secret_data(spec: JobSpec) -> Iterator[Finding]:
    """Yield what looks like a secret, by its name, in folders of data that would be uploaded."""
    for name, channel in spec.data.items():
        found = [] if channel.is_s3 else secrets_below(spec.base / channel.uri)
        if found:
            message = f"the data holds what looks like a secret: {', '.join(map(str, found))}"
            yield Finding(message, ("data", name, "uri"), "move it elsewhere, or name the folder of the data alone")


def _left_behind(spec: JobSpec, contents: Contents) -> Iterator[Problem]:
    """Yield a problem for each file that the job names and that does not travel, such as an ignored script."""
    code = spec.code
    module = find_module(spec.code_directory, code.task.partition(":")[0]) if code.task is not None else None
    wanted = {
        "task": module.relative_to(spec.code_directory).as_posix() if module is not None else None,
        "script": code.script,
        "requirements": code.requirements,
    }
    for field, written in wanted.items():
        name = PurePosixPath(written or "").as_posix()
        reason = contents.why_left_out(name) if written is not None else None
        if reason is not None:
            message = f"{name} would not be in the container: {reason}"
            yield spec.problem(f"code.{field}", message, f"write !{name} to .cloudtrainignore")


def _own_outputs(spec: JobSpec, contents: Contents) -> Iterator[Problem]:
    """Yield a problem for each output that is source of the job: a resumed run would take the old one."""
    for index, output in enumerate(spec.code.outputs):
        named = (spec.code.script, spec.code.requirements)
        own = next((name for name in _shipped(output, contents) if name.endswith(".py") or name in named), None)
        if own is not None:
            message = f"{own} is source of the job, and a run that resumes would start with its old content"
            yield spec.problem_of(Finding(message, ("code", "outputs", index), "let the script write elsewhere"))


def _shipped_outputs(spec: JobSpec, contents: Contents) -> list[str]:
    """Return a warning for each output that travels with the code: a resumed run finds the kept one instead."""
    first = ((output, next(_shipped(output, contents), None)) for output in spec.code.outputs)
    return [
        f"code.outputs: {name} travels with the code, too; a run that resumes finds the kept {output} instead"
        for output, name in first
        if name is not None
    ]


def _shipped(output: str, contents: Contents) -> Iterator[str]:
    """Yield the files of the code that an output names."""
    for entry in contents.entries:
        if entry.name == output or (output.endswith("/") and entry.name.startswith(output)):
            yield entry.name


def _decide(
    spec: JobSpec,
    code: CodeInfo,
    *,
    local: bool,
    settings: Settings | None,
    now: datetime | None = None,
    suffix: str | None = None,
    data_stamp: str = "",
    resumed: Resumed | None = None,
) -> Plan:
    settings = settings or find_settings(spec)
    moment = now or datetime.now(UTC)
    run = make_run_id(spec.name, moment, suffix or secrets.token_hex(3))
    decided = make_plan(
        spec,
        settings,
        code,
        run=run,
        now=moment,
        target=LOCAL if local else SAGEMAKER,
        prices=prices(),
        home=find_home(),
        machine=_this_machine() if local else None,
        resumed=resumed or _find_resumed(spec, settings, local=local),
        data_stamp=data_stamp,
    )
    # Runs of this machine may begin in the same second; the account's are named after what they are.
    return decided if local or suffix else decided.rename(make_run_id(spec.name, moment, decided.identity[:6]))


def _this_machine() -> Machine:
    from cloudtrain.backends.container.machine import usable_cpus, visible_gpus
    from cloudtrain.backends.container.mount_namespace import is_available

    return Machine(
        gpus=len(visible_gpus()),
        cpus=usable_cpus(),
        variables=frozenset(os.environ),
        has_ml_namespace=is_available(),
    )


def check(spec: JobSpec | str | Path, *, settings: Settings | None = None) -> tuple[Check, ...]:
    """Ask the account everything that a submit would need of it, side by side; nothing is changed there.

    Args:
        spec: The job, or the path of its file.
        settings: The account; by default from environment and files.

    Raises:
        SpecError, BundleError, SettingsError, MissingExtraError: the input.
        CloudError: there are no credentials.
    """
    spec = spec if isinstance(spec, JobSpec) else validate(spec, settings=settings)
    settings = settings or find_settings(spec)
    backend = _sagemaker(settings)
    backend.check_ready()
    decided, _ = _plan(spec, local=False, settings=settings, cloud=backend)
    return backend.start_checks(decided).wait()


def files(spec: JobSpec | str | Path, *, progress: ProgressCallback | None = None) -> Contents:
    """Return what of the code folder would travel, what stays behind and why, and what looks like a secret.

    Args:
        spec: The job, or the path of its file.
        progress: Told how many bytes of the code have been read, and how many there are.

    Raises:
        SpecError: the job does not validate.
        BundleError: the code folder cannot travel.
    """
    spec = spec if isinstance(spec, JobSpec) else JobSpec.from_yaml(spec)
    return list_contents(spec.code_directory, home=find_home(), progress=progress)


def submit(
    spec: JobSpec | str | Path,
    *,
    local: bool = False,
    sandbox: bool = False,
    settings: Settings | None = None,
    skip_check: bool = False,
    new: bool = False,
    wait_for_capacity: float | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Run:
    """Start a run and return its handle at once; the run goes on without this process.

    Where a run of the same request and code goes on already, that one is returned and nothing is started
    (`run.attached`), however often and from wherever it is submitted. Local runs cost nothing: each submit starts one.

    Args:
        spec: The job, or the path of its file.
        local: Run on this machine instead of SageMaker.
        sandbox: Send to the local AWS; one is started in the background when none runs. Of the checks only that of the
            checkpoints is made, because a sandbox has no quotas and holds nothing of the real account.
        settings: The account; by default from environment and files.
        skip_check: Do not ask the account first whether the job can run.
        new: Start another run beside one of the same request and code.
        wait_for_capacity: Seconds in which a run that finds no capacity, or no room in the quota, is submitted again,
            with growing pauses; returns when it has its instances. Nothing else is tried again.
        callbacks: What to call while it works, such as `Callbacks(on_plan=...)`.

    Returns:
        The run; `run.warnings` are those of its plan.

    Raises:
        SpecError, BundleError, SettingsError, MissingExtraError: the input; nothing was started.
        CloudError: a check failed, AWS refused or cannot be reached; nothing was started.
    """
    if sandbox:
        found = start_sandbox()
        settings = found.settings(settings or find_settings(spec))
    spec = spec if isinstance(spec, JobSpec) else validate(spec, local=local, settings=settings)
    settings = settings or find_settings(spec)
    cloud = None if local else _in_sandbox(found, settings) if sandbox else _sagemaker(settings)
    if cloud is not None:
        cloud.check_ready()
    decided, contents = _plan(spec, local=local, settings=settings, progress=callbacks.progress, cloud=cloud)
    if local:
        _refuse_nothing_here(decided, settings)
        if decided.config.task is not None:  # a script need not load what lies there
            _refuse_stranger(decided)
    callbacks.on_plan(decided)
    from cloudtrain.bundle.archive import write_bundle

    def pack() -> Bundle:
        return write_bundle(contents, _make_home() / BUNDLES_FOLDER, progress=callbacks.progress)

    if cloud is None:
        return _local().submit(decided, pack()).with_warnings(decided.warnings)
    sending = Sending(cloud, pack, skip_check=skip_check, new=new, callbacks=callbacks)
    if wait_for_capacity is None:
        return sending.send(decided)
    first_pause = cloud.poll_seconds if sandbox else FIRST_PAUSE_SECONDS
    return sending.send_when_there_is_room(decided, wait_for_capacity, first_pause=first_pause)


def resume(
    reference: str,
    overrides: Iterable[str] = (),
    *,
    instances: int | None = None,
    from_step: int | None = None,
    settings: Settings | None = None,
    skip_check: bool = False,
    new: bool = False,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Run:
    """Start a new run that goes on from a complete checkpoint of one that has ended, by default the last.

    It has the same job, code, data and account, wherever it was submitted from; neither job file nor code is needed.

    Args:
        reference: The run that has ended.
        overrides: What changes, `path=value` as the `--set` option takes them, such as `cluster.spot=true`.
        instances: Replaces `cluster.instances`.
        from_step: Step of the checkpoint to go on from.
        settings: Region and transport; by default from environment and files.
        skip_check: Do not ask the account first whether the job can run. The checkpoint is looked for in any case.
        new: Start another run beside one of the same request.
        callbacks: What to call while it works, such as `Callbacks(on_plan=...)`.

    Raises:
        RunNotFoundError: there is no such run.
        UserError: it has not ended, or has left nothing to go on from; nothing was started.
        SpecError: the changed job does not validate.
        CloudError: a check failed, AWS refused or cannot be reached; nothing was started.
    """
    backend, run = _find(reference, settings)
    state = backend.status(run).state
    if not state.is_final:
        raise UserError(f"{run} is {state}: it goes on by itself", f"to end it: cloudtrain stop {run}")
    earlier = PreviousRun(backend.plan_of(run))
    spec = earlier.job(overrides, instances=instances)
    resumed = earlier.saved if spec.checkpoint.resume == run else None
    if from_step is not None:
        if resumed is None:
            raise UserError("--from and checkpoint.resume name two places", "give one of them")
        saved = CheckpointFolder(resumed.steps, run, _environ(backend.name, settings))
        resumed = dataclasses.replace(resumed, steps=saved.find(from_step).uri)
    today = settings or find_settings()
    if backend.name == LOCAL:
        return _resume_here(earlier, spec, resumed, today, callbacks)
    if backend.name == SANDBOX and (found := find_sandbox()) is not None:
        today = found.settings(today)
    account = earlier.settings(today)
    cloud = cast("SageMakerBackend", backend).under(account)
    cloud.check_ready()
    stamp = _stamp_data(spec)
    resumed = resumed or _find_resumed(spec, account, local=False, cloud=cloud)
    decided = _decide(spec, earlier.code, local=False, settings=account, data_stamp=stamp, resumed=resumed)
    callbacks.on_plan(decided)
    left = f"see what {run} has left: cloudtrain checkpoints {backend.name}:{run}"
    try:
        refuse_failed(checks := cloud.check_resume(decided), left)
    except CloudError as error:
        raise UserError(error.message, error.hint) from None  # nothing to go on from, whoever has noticed
    if skip_check:
        callbacks.on_checks(checks)
        decided = add_warnings(decided, checks)
    sending = Sending(cloud, None, skip_check=skip_check, new=new, callbacks=callbacks)
    return sending.send(decided)


def _resume_here(
    earlier: PreviousRun, spec: JobSpec, resumed: Resumed | None, settings: Settings, callbacks: Callbacks
) -> Run:
    """Start a local run from the checkpoints and the packed code of another one. Settings tell whose a bucket is."""
    from cloudtrain.bundle.archive import Bundle

    local = _local()
    again = f"cloudtrain submit --local JOB --set checkpoint.resume={earlier.run}"
    decided = _with_continuation(_decide(spec, earlier.code, local=True, settings=settings, resumed=resumed))
    _refuse_nothing_here(decided, settings)
    archive = find_home() / BUNDLES_FOLDER / earlier.code.digest / BUNDLE_FILE
    if not archive.is_file():
        raise UserError(f"the code of {earlier.run} is gone: {archive}", f"with the code as it is now: {again}")
    callbacks.on_plan(decided)
    return local.submit(decided, Bundle(archive, earlier.code)).with_warnings(decided.warnings)


def _refuse_nothing_here(decided: Plan, settings: Settings) -> None:
    """Refuse a local run that is to go on from something, when there is nothing.

    Raises:
        UserError: the place that it names holds no complete checkpoint.
        CloudError: it lies in S3, which refused or cannot be reached.
    """
    from cloudtrain.backends.container.filesystem import path_of

    config = decided.config
    if "://" not in decided.resume:
        return
    own_files = decided.locations.checkpoints  # of a script, which may save as it likes
    is_folder = config.script is not None and step_of_folder_name(decided.resume.rpartition("/")[2]) is None
    if is_folder and own_files.startswith("file:") and any(path_of(own_files).glob("*")):
        return
    try:
        CheckpointFolder(decided.resume, config.checkpoint.resume_run, _environ(LOCAL, settings)).find()
    except UserError as error:
        raise UserError(error.message, f"{error.hint}; or start anew: cloudtrain submit --local JOB") from None


def checkpoint_folder(reference: str, *, settings: Settings | None = None) -> CheckpointFolder:
    """Return where checkpoints lie: those of a run on whatever backend, or those at a uri or in a folder.

    Args:
        reference: A run, `s3://bucket/prefix`, `file:///...` or a path that holds a slash.
        settings: The account; by default from environment and files.

    Raises:
        RunNotFoundError: there is no such run.
        CloudError: AWS refused or cannot be reached.
    """
    if "/" in reference or (not is_run_id(reference) and Path(reference).is_dir()):
        return CheckpointFolder(reference, environ=_environ(SAGEMAKER, settings))
    backend, run = _find(reference, settings)
    return CheckpointFolder(saved_by(backend.plan_of(run), run).steps, run, _environ(backend.name, settings))


def _environ(backend: str, settings: Settings | None) -> dict[str, str]:
    """Return the environment of a process that reads what a backend's runs have saved."""
    if backend == SANDBOX and (found := find_sandbox()) is not None:
        # Nothing of the real account: a profile or an endpoint would lead there.
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {**own, **found.environment, OWNERS_VARIABLE: dump_json(found.settings(Settings()).bucket_owners)}
    account = settings or find_settings()
    region = {"AWS_DEFAULT_REGION": account.region} if account.region and backend == SAGEMAKER else {}
    return {**os.environ, **region, OWNERS_VARIABLE: dump_json(account.bucket_owners)}


def get_run(reference: str, *, settings: Settings | None = None) -> Run:
    """Return the handle of a run from `<backend>:<run id>` or a bare run id.

    Raises:
        RunNotFoundError: no backend at hand has this run.
    """
    backend, run = _find(reference, settings)
    return Run(run, backend)


def _find(reference: str, settings: Settings | None) -> tuple[Backend, str]:
    """Return the backend that has a run, and the run's id."""
    backend, run = parse_reference(reference)
    local = _local()
    here = _sandbox_of(run) if backend in (SANDBOX, None) and not local.has(run) else None
    if backend == SANDBOX and here is None:
        hint = "the runs of a sandbox end with it; see: cloudtrain list"
        raise RunNotFoundError(f"no sandbox that runs here has a run {run}", hint)
    if here is not None:
        return here, run
    if backend == LOCAL or (backend is None and local.has(run)):
        return local, run
    if backend == SAGEMAKER or (settings or find_settings()).region is not None:
        return _sagemaker(settings or find_settings()), run
    raise RunNotFoundError(
        f"there is no local run {run} in {local.runs}",
        "see: cloudtrain list; for a run on SageMaker set CLOUDTRAIN_REGION (and credentials)",
    )


def status(reference: str, *, settings: Settings | None = None) -> Status:
    """Return the present status of a run.

    Raises:
        RunNotFoundError: there is no such run.
    """
    return get_run(reference, settings=settings).status()


def logs(
    reference: str,
    *,
    follow: bool = False,
    only: LogFilter = ALL_LINES,
    on_trouble: Callable[[str], None] | None = None,
    settings: Settings | None = None,
) -> Iterator[LogLine]:
    """Yield the log lines of a run's hosts, or those that are wanted; with `follow` until it has ended.

    Raises:
        RunNotFoundError: there is no such run.
    """
    return get_run(reference, settings=settings).logs(follow=follow, only=only, on_trouble=on_trouble)


def explain(run: str | Run, *, settings: Settings | None = None) -> Explanation:
    """Tell why a run has failed: the first error of all ranks that is no echo, its class, and the next thing to do.

    Args:
        run: Its reference, or its handle.
        settings: The account; by default from environment and files.

    Raises:
        RunNotFoundError: there is no such run.
        CloudError: AWS refused or cannot be reached.
    """
    from cloudtrain.failure_rules import explain as explain_lines

    handle = run if isinstance(run, Run) else get_run(run, settings=settings)
    found = handle.status()
    # What has succeeded or was stopped needs no log.
    lines = handle.logs() if found.exit_code in (None, EXIT_RUN_FAILED) else ()
    return explain_lines(found, lines, handle.facts())


def stop(reference: str, *, settings: Settings | None = None) -> Run:
    """Ask a run to end and return its handle; `wait()` on it tells when it has.

    Raises:
        RunNotFoundError: there is no such run.
    """
    run = get_run(reference, settings=settings)
    run.stop()
    return run


def list_runs(
    wanted: RunFilter = ALL_RUNS,
    *,
    local: bool = True,
    sagemaker: bool | None = None,
    settings: Settings | None = None,
    on_unreachable: Callable[[CloudtrainError], None] | None = None,
) -> Iterator[Status]:
    """Yield runs, newest first. Nothing is read or asked before it is needed: who takes ten runs pays for ten.

    Args:
        wanted: Which; by default all.
        local: Whether to list this machine's runs, and those of its sandbox while that runs.
        sagemaker: Whether to list the account's; by default when the settings are complete.
        settings: The account; by default from environment and files.
        on_unreachable: Told when the account's runs cannot be listed; by default that is an error.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    sources: list[Iterator[Status]] = []
    if local:
        sources.append(_local().list(wanted))
        if (found := find_sandbox()) is not None:
            sources.append(_in_sandbox(found, found.settings(Settings())).list(wanted))
    settings = settings or find_settings()
    if sagemaker or (sagemaker is None and not settings.missing):
        try:
            sources.append(_while_reachable(_sagemaker(settings), wanted, on_unreachable))
        except UntrustedSettingsError as error:
            if on_unreachable is None:
                raise
            on_unreachable(error)
    yield from heapq.merge(*sources, key=submission_time, reverse=True)


def _while_reachable(
    backend: Backend, wanted: RunFilter, on_unreachable: Callable[[CloudtrainError], None] | None
) -> Iterator[Status]:
    try:
        yield from backend.list(wanted)
    except CloudError as error:
        if on_unreachable is None:
            raise
        on_unreachable(error)


def start_sandbox(home: Path | None = None) -> Sandbox:
    """Return the sandbox of this machine; start one in the background when none runs. It lives until `stop_sandbox`.

    Args:
        home: Its folder; by default `sandbox` in the folder of runs.

    Raises:
        CloudtrainError: it did not start.
    """
    from cloudtrain.backends.sandbox import start_sandbox as start

    return start(home or _make_home() / SANDBOX)


def find_sandbox(home: Path | None = None) -> Sandbox | None:
    """Return the sandbox that runs on this machine, or None."""
    folder = home or find_home() / SANDBOX
    if not folder.is_dir():
        return None
    from cloudtrain.backends.sandbox import find_sandbox as find

    return find(folder)


def stop_sandbox(home: Path | None = None) -> bool:
    """End the sandbox and everything that it has started; return False when there was none."""
    from cloudtrain.backends.sandbox import stop_sandbox as stop

    return stop(home or find_home() / SANDBOX)


def serve_sandbox(
    *,
    home: Path | None = None,
    port: int = 0,
    most_processes: int = 2,
    stop_grace_seconds: float = 120,
    weather_file: Path | None = None,
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    """Be the sandbox until this process is told to end.

    Args:
        home: Its folder; by default `sandbox` in the folder of runs.
        port: Port on loopback; 0 takes a free one.
        most_processes: Ranks that an instance may have.
        stop_grace_seconds: Seconds between SIGTERM and SIGKILL.
        weather_file: YAML file with what goes wrong.
        on_ready: Given what a client needs, once it answers.

    Raises:
        UserError: the port, the folder or the weather cannot be used.
        MissingExtraError: moto, torch or psutil is not installed.
    """
    from cloudtrain.backends.sandbox.fault_injection import FaultPlan
    from cloudtrain.backends.sandbox.server import ServerOptions, serve

    options = ServerOptions(
        home=(home or _make_home() / SANDBOX).absolute(),
        port=port,
        most_processes=most_processes,
        stop_grace_seconds=stop_grace_seconds,
        weather=FaultPlan() if weather_file is None else FaultPlan.from_file(weather_file),
    )
    serve(options, lambda sandbox: on_ready(sandbox.to_json()))


def find_settings(
    job: JobSpec | str | Path | None = None, flags: Mapping[str, Any] | None = None, *, trust: bool = False
) -> Settings:
    """Return the settings that apply to a job: flags, environment, cloudtrain.toml beside the job, profile file.

    A role, bucket or key from a cloudtrain.toml beside the job, which a cloned repository may bring along, is used
    against an account only after the user has agreed: `trust`, or once by `cloudtrain --trust COMMAND`.

    Args:
        job: The job, or the path of its file; by default the working folder's settings.
        flags: Values given on the command line; None means not given.
        trust: Agree to the values of a cloudtrain.toml beside the job, for the settings that are returned.

    Raises:
        SettingsError: a file or value is malformed.
    """
    found = load_settings(os.environ, job_directory=_folder_of(job), flags=flags)
    is_trusted = bool(found.beside_job) and (trust or is_agreed(os.environ, found))
    return dataclasses.replace(found, is_trusted=True) if is_trusted else found


def trust_settings(file: str, values: Mapping[str, str]) -> None:
    """Remember that the user agrees to these values of a settings file beside a job.

    Args:
        file: Absolute path of the file.
        values: The values by the names of their settings, as an `UntrustedSettingsError` holds them.

    Raises:
        SettingsError: the answer cannot be stored.
    """
    agree(os.environ, file, values)


def trace_settings(
    job: JobSpec | str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[Origin, ...]:
    """Return every place that gives a setting a value: of one setting's places the first counts, it hides the others.

    Args:
        job: The job, or the path of its file; by default the working folder's settings.
        flags: Values given on the command line; None means not given.

    Raises:
        SettingsError: a file is malformed.
    """
    return tuple(find_origins(os.environ, job_directory=_folder_of(job), flags=flags))


def _folder_of(job: JobSpec | str | Path | None) -> Path:
    if isinstance(job, JobSpec):
        return job.base
    return Path.cwd() if job is None else Path(job).parent


def configure(
    values: Mapping[str, str | Sequence[str]],
    *,
    profile: str | None = None,
    overwrite: bool = False,
    offline: bool = False,
    on_checks: Callable[[tuple[Check, ...]], None] | None = None,
    confirm: Callable[[ProfileChange], None] | None = None,
) -> ProfileChange:
    """Store settings in the user's profile file, for every later command.

    Args:
        values: Settings by name, such as `read_terraform` returns them; empty ones are taken out.
        profile: Name of the profile, which CLOUDTRAIN_PROFILE chooses; by default the top level, which always counts.
        overwrite: Replace other values that are stored already.
        offline: Do not ask the account whether the values are true.
        on_checks: Told what the account has said, when nothing of it is a failure; some may be unknown.
        confirm: Told what will change before it is written; raises to leave all as it was. Decides alone about
            overwriting.

    Returns:
        What has changed; nothing was written where that is nothing.

    Raises:
        SettingsError: a value or the file is malformed, or other values would be replaced; nothing was written.
        CloudError: the account says that a value is wrong; nothing was written.
    """
    from cloudtrain.settings.profiles import change_profile

    change = change_profile(profile_file(os.environ), profile, values)
    checks = () if offline else _ask_about(change)
    refuse_failed(checks, "nothing was stored; to store it all the same: --offline")
    if on_checks is not None:
        on_checks(checks)
    if confirm is not None:
        confirm(change)
    elif change.overwrites and not overwrite:
        names = ", ".join(each.name for each in change.overwrites)
        raise SettingsError(f"{change.file} has other values of {names}; nothing was stored", "pass overwrite=True")
    if change.changes:
        change.write()
    return change


def _ask_about(change: ProfileChange) -> tuple[Check, ...]:
    """Ask the account about what a profile would hold; without credentials that is unknown."""
    from cloudtrain.preflight.account import check_settings

    known: dict[str, Any] = dict(change.settings)
    return check_settings(Settings(**{"region": default_region(), **known}))


def default_region() -> str | None:
    """Return the region that counts without a profile of ours: the environment's, else that of AWS's configuration."""
    from cloudtrain.aws.errors import configured_region

    # A profile that is being made is not there yet.
    environ = {name: value for name, value in os.environ.items() if name != PROFILE_VARIABLE}
    return load_settings(environ).region or configured_region()


def read_terraform(source: str | Path) -> dict[str, str | tuple[str, ...]]:
    """Return the settings that Terraform's outputs give.

    Args:
        source: The folder of a configuration that was applied, such as `infra/`, a file of what
            `terraform output -json` has printed, or `-` for standard input.

    Raises:
        UserError: there is no such place, or Terraform cannot be asked.
        SettingsError: what it says is no settings.
    """
    from cloudtrain.settings.terraform_outputs import read_outputs

    return read_outputs(source)


def find_candidates(region: str) -> dict[str, Candidates]:
    """Return the roles and buckets of the account, those first that fit; why the others do not stands with them.

    Args:
        region: The region of the jobs.

    Returns:
        What was found for the settings `role` and `bucket`, by name.

    Raises:
        CloudError: there are no credentials.
    """
    from cloudtrain.preflight.account import find_buckets, find_roles, open_account

    account = open_account(Settings(region=region))
    return {"role": find_roles(account), "bucket": find_buckets(account)}


def list_profiles() -> dict[str | None, dict[str, str | tuple[str, ...]]]:
    """Return the settings of each profile in the user's profile file; those of the top level under None.

    Raises:
        SettingsError: the file is malformed.
    """
    from cloudtrain.settings.profiles import read_profiles

    return read_profiles(profile_file(os.environ))


def remove_profile(name: str) -> None:
    """Take a named profile out of the user's profile file.

    Raises:
        SettingsError: there is none of this name, or the file is malformed or cannot be written.
    """
    from cloudtrain.settings import profiles

    profiles.remove_profile(profile_file(os.environ), name)


def prices() -> Prices:
    """Return the newest prices that are known here: those that came with cloudtrain, and what a refresh has written.

    Raises:
        SettingsError: the file that a refresh writes is there and cannot be read.
    """
    return newest(bundled_prices(), read_prices(prices_file(os.environ)))


def refresh_prices(region: str | None = None, *, settings: Settings | None = None, today: date | None = None) -> Prices:
    """Fetch a region's prices from the AWS Price List API and keep them for later plans.

    Args:
        region: By default that of the settings, else the first region whose prices come with cloudtrain.
        settings: The account; by default from environment and files.
        today: The day that the prices get; by default today's in UTC.

    Returns:
        The newest prices that are known here now.

    Raises:
        CloudError: there are no credentials, AWS refused, or it has no prices for this region; nothing was written.
        SettingsError: the file cannot be read or written.
    """
    from cloudtrain.preflight.prices import refresh_prices as refresh

    wanted = region or (settings or find_settings()).region or priced_regions()[0]
    fetched = refresh(wanted, prices_file(os.environ), today=today or datetime.now(UTC).date())
    return newest(bundled_prices(), fetched)


def find_home() -> Path:
    """Return the folder of local runs: CLOUDTRAIN_HOME, else the nearest `.cloudtrain` upwards, else one here."""
    if os.environ.get(HOME_VARIABLE):
        return Path(os.environ[HOME_VARIABLE]).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / HOME_FOLDER).is_dir():
            return folder / HOME_FOLDER
    return here / HOME_FOLDER


def _make_home() -> Path:
    home = find_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{home}: cannot be a folder for runs: {error.strerror}", f"set {HOME_VARIABLE}") from None
    return home


def _left_out(contents: Contents) -> list[str]:
    """Return a line about what stays behind though no rule of the user's says so, where it may be missed."""
    names = [left.name for left in contents.left_out if left.by_default]
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 (fits a line)
    return [f"left behind: {', '.join(names[:3])}{more} (results and data; see: cloudtrain files)"]


def _find_resumed(
    spec: JobSpec, settings: Settings, *, local: bool, cloud: SageMakerBackend | None = None
) -> Resumed | None:
    """Return what the run has saved that `checkpoint.resume` names, or None when it names no run.

    Without `cloud` nothing is asked: a run of the account is taken to have saved where runs do by default.
    """
    run = spec.checkpoint.resume.rpartition(":")[2]
    if not is_run_id(run):
        return None
    here = _local()
    if here.has(run):
        return saved_by(here.plan_of(run), run)
    if local or settings.bucket is None:
        return None
    if cloud is not None:
        # Its plan may be gone and its checkpoints may not; the checks tell of what is not there.
        with contextlib.suppress(UserError):
            return saved_by(cloud.plan_of(run), run)
    folder = f"s3://{settings.bucket}/{settings.prefix}/{run}/checkpoints"
    return Resumed(folder, steps_beside(folder) if spec.code.script is not None else folder, run)


def _local() -> LocalBackend:
    from cloudtrain.backends.local.backend import LocalBackend

    return LocalBackend(find_home())


def _sagemaker(settings: Settings) -> SageMakerBackend:
    """Return the backend of the account.

    Raises:
        UntrustedSettingsError: a role, bucket or key comes from beside the job, and the user has not agreed to it.
    """
    settings.require_trust()
    from cloudtrain.backends.sagemaker import SageMakerBackend

    return SageMakerBackend(settings, prices=prices())


def _in_sandbox(sandbox: Sandbox, settings: Settings) -> SageMakerBackend:
    from cloudtrain.backends.sagemaker import SageMakerBackend

    poll_seconds = 0.5  # nobody counts the calls
    return SageMakerBackend(
        settings, prices=prices(), poll_seconds=poll_seconds, session=sandbox.session(), name=SANDBOX
    )


def _sandbox_of(run: str) -> SageMakerBackend | None:
    """Return the backend of this machine's sandbox when it has a run, else None."""
    found = find_sandbox()
    if found is None:
        return None
    backend = _in_sandbox(found, found.settings(Settings()))
    return backend if backend.has(run) else None
