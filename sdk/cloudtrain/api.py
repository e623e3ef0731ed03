"""The verbs: validate, plan, submit, status, logs, stop, list. The only place where the floors below meet."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.base import Backend
from cloudtrain.bundle import BUNDLES_FOLDER, Contents, Progress, collect, survey, write_bundle
from cloudtrain.container.machine import usable_cpus, visible_gpus
from cloudtrain.entry import find_module
from cloudtrain.errors import BundleError, RunNotFoundError
from cloudtrain.plan import LOCAL, SAGEMAKER, Machine, Plan, make_plan
from cloudtrain.run import LogLine, Run, Status, is_run_id, make_run_id, parse_reference
from cloudtrain.settings import Settings, load_settings
from cloudtrain.source import read_source
from cloudtrain.spec import JobSpec

if TYPE_CHECKING:
    from cloudtrain.backends.local import LocalBackend
    from cloudtrain.backends.sagemaker import SageMakerBackend

HOME_VARIABLE = "CLOUDTRAIN_HOME"
HOME_FOLDER = ".cloudtrain"


def validate(path: str | Path, overrides: Iterable[str] = (), *, instances: int | None = None) -> JobSpec:
    """Read and validate a job file, offline.

    Args:
        path: The job file.
        overrides: `path=value`, as the `--set` option takes them.
        instances: Replaces `cluster.instances`.

    Raises:
        SpecError: the job does not validate; `problems` holds every mistake with line and column.
        UserError: the file cannot be read.
    """
    return JobSpec.from_yaml(path, overrides, instances=instances)


def plan(
    spec: JobSpec | str | Path,
    *,
    local: bool = False,
    settings: Settings | None = None,
    now: datetime | None = None,
    suffix: str | None = None,
    progress: Progress | None = None,
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
    spec = spec if isinstance(spec, JobSpec) else validate(spec)
    return _plan(spec, local=local, settings=settings, now=now, suffix=suffix, progress=progress)[0]


def _plan(
    spec: JobSpec,
    *,
    local: bool,
    settings: Settings | None,
    now: datetime | None = None,
    suffix: str | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Contents]:
    settings = settings or find_settings(spec)
    moment = now or datetime.now(UTC)
    contents = collect(spec.code_directory, home=find_home(), progress=progress)
    _check_needed(spec, contents)
    decided = make_plan(
        spec,
        settings,
        dataclasses.replace(contents.info, source=read_source(spec.code_directory)),
        run=make_run_id(spec.name, moment, suffix or secrets.token_hex(3)),
        now=moment,
        target=LOCAL if local else SAGEMAKER,
        home=find_home(),
        machine=Machine(gpus=len(visible_gpus()), cpus=usable_cpus()) if local else None,
        resume_uri=_resume_uri(spec, settings, local=local),
    )
    return dataclasses.replace(decided, decisions=(*decided.decisions, *_left_out(contents))), contents


def files(spec: JobSpec | str | Path, *, progress: Progress | None = None) -> Contents:
    """Return what of the code folder would travel, what stays behind and why, and what looks like a secret.

    Args:
        spec: The job, or the path of its file.
        progress: Told how many bytes of the code have been read, and how many there are.

    Raises:
        SpecError: the job does not validate.
        BundleError: the code folder cannot travel.
    """
    spec = spec if isinstance(spec, JobSpec) else validate(spec)
    return survey(spec.code_directory, home=find_home(), progress=progress)


def submit(
    spec: JobSpec | str | Path,
    *,
    local: bool = False,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Run:
    """Start a run and return its handle at once; the run goes on without this process.

    Args:
        spec: The job, or the path of its file.
        local: Run on this machine instead of SageMaker.
        settings: The account; by default from environment and files.
        progress: Told how many bytes of the code have been read or packed, and how many there are.

    Raises:
        SpecError, BundleError, SettingsError, MissingExtraError: the input; nothing was started.
        CloudError: AWS refused or cannot be reached; nothing was started.
    """
    spec = spec if isinstance(spec, JobSpec) else validate(spec)
    settings = settings or find_settings(spec)
    backend = _backend(LOCAL if local else SAGEMAKER, settings)
    if not local:
        _sagemaker(settings).check_ready()
    decided, contents = _plan(spec, local=local, settings=settings, progress=progress)
    bundle = write_bundle(contents, find_home() / BUNDLES_FOLDER, progress=progress)
    return backend.submit(decided, bundle)


def get_run(reference: str, *, settings: Settings | None = None) -> Run:
    """Return the handle of a run from `<backend>:<run id>` or a bare run id.

    Raises:
        RunNotFoundError: no backend at hand has this run.
    """
    backend, run = parse_reference(reference)
    local = _local()
    if backend == LOCAL or (backend is None and local.has(run)):
        handle = Run(run, local)
    elif backend == SAGEMAKER or (settings or find_settings()).region is not None:
        handle = Run(run, _backend(SAGEMAKER, settings or find_settings()))
    else:
        raise RunNotFoundError(
            f"there is no local run {run} in {local.runs}",
            "see: cloudtrain list; for a run on SageMaker set CLOUDTRAIN_REGION (and credentials)",
        )
    return handle


def status(reference: str, *, settings: Settings | None = None) -> Status:
    """Return the present status of a run.

    Raises:
        RunNotFoundError: there is no such run.
    """
    return get_run(reference, settings=settings).status()


def logs(reference: str, *, follow: bool = False, settings: Settings | None = None) -> Iterator[LogLine]:
    """Yield the log lines of a run's hosts; with `follow` until it has ended.

    Raises:
        RunNotFoundError: there is no such run.
    """
    return get_run(reference, settings=settings).logs(follow=follow)


def stop(reference: str, *, settings: Settings | None = None) -> Run:
    """Ask a run to end and return its handle; `wait()` on it tells when it has.

    Raises:
        RunNotFoundError: there is no such run.
    """
    run = get_run(reference, settings=settings)
    run.stop()
    return run


def list_runs(
    *, local: bool = True, sagemaker: bool | None = None, settings: Settings | None = None
) -> Iterator[Status]:
    """Yield runs, newest first: those of this machine, then those of the account.

    Args:
        local: Whether to list this machine's runs.
        sagemaker: Whether to list the account's; by default when the settings are complete.
        settings: The account; by default from environment and files.
    """
    if local:
        yield from _local().list()
    settings = settings or find_settings()
    if sagemaker or (sagemaker is None and not settings.missing):
        yield from _sagemaker(settings).list()


def find_settings(spec: JobSpec | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings that apply to a job: flags, environment, cloudtrain.toml beside the job, profile file."""
    return load_settings(os.environ, job_directory=spec.base if spec is not None else Path.cwd(), flags=flags)


def find_home() -> Path:
    """Return the folder of local runs: CLOUDTRAIN_HOME, else the nearest `.cloudtrain` upwards, else one here."""
    if os.environ.get(HOME_VARIABLE):
        return Path(os.environ[HOME_VARIABLE]).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / HOME_FOLDER).is_dir():
            return folder / HOME_FOLDER
    return here / HOME_FOLDER


def _check_needed(spec: JobSpec, contents: Contents) -> None:
    """Refuse a job whose own files stay behind.

    Raises:
        BundleError: an ignore rule leaves out what the job names.
    """
    needed = {"code.script": spec.code.script, "code.requirements": spec.code.requirements}
    if spec.code.task is not None:
        path = find_module(spec.code_directory, spec.code.task.partition(":")[0])
        needed["code.task"] = path.relative_to(spec.code_directory).as_posix() if path is not None else None
    for field, name in needed.items():
        reason = contents.why_left_out(name) if name else None
        if reason is not None:
            raise BundleError(
                f"{name}, which {field} needs, would stay behind: {reason}",
                "change the rule, or name the file in .cloudtrainignore with a ! before it",
            )


def _left_out(contents: Contents) -> list[str]:
    """Return a line about what stays behind though no rule of the user's says so, where it may be missed."""
    names = [left.name for left in contents.left_out if left.by_default]
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 (fits a line)
    return [f"left behind: {', '.join(names[:3])}{more} (results and data; see: cloudtrain files)"]


def _resume_uri(spec: JobSpec, settings: Settings, *, local: bool) -> str | None:
    """Return where the checkpoints of the run lie that `checkpoint.resume` names, or None when it names none."""
    run = spec.checkpoint.resume.rpartition(":")[2]
    if not is_run_id(run):
        return None
    here = _local()
    if here.has(run):
        return here.checkpoints_of(run)
    if local or settings.bucket is None:
        return None
    return f"s3://{settings.bucket}/{settings.prefix}/{run}/checkpoints"


def _local() -> LocalBackend:
    from cloudtrain.backends.local import LocalBackend

    return LocalBackend(find_home())


def _sagemaker(settings: Settings) -> SageMakerBackend:
    from cloudtrain.backends.sagemaker import SageMakerBackend

    return SageMakerBackend(settings)


def _backend(name: str, settings: Settings) -> Backend:
    return _local() if name == LOCAL else _sagemaker(settings)
