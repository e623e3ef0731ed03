"""`make_plan`: everything decided before anything happens.

Pure: the same job, settings, code, run id, clock and machine give an equal plan. There is no dry run anywhere, because
this object is the first half of every run.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

from cloudtrain import catalog, limits
from cloudtrain.catalog import Prices, bundled_prices
from cloudtrain.cost import CostPlan, Time, bound_time, cost_of, price_cluster
from cloudtrain.errors import SpecError, nearest
from cloudtrain.locations import locations_here, locations_in_s3, resume_from
from cloudtrain.notes import Notes
from cloudtrain.placement import Machine, Placement, place
from cloudtrain.request import SETTING, Choices, Locations, render_request, source_of
from cloudtrain.settings import Settings
from cloudtrain.spec import JobSpec
from cloudtrain.units import format_duration, format_size
from cloudtrain_runtime.contract import (
    CheckpointConfig,
    EarlyStopping,
    RunConfig,
    TrainConfig,
)

LOCAL = "local"
SAGEMAKER = "sagemaker"

_LARGE_CODE_BYTES = 100 * 10**6
_OLD_PRICE_DAYS = 180
_PLACEHOLDER_ROLE = "arn:aws:iam::000000000000:role/CLOUDTRAIN_ROLE"
_LOCAL_ROLE = "arn:aws:iam::000000000000:role/local"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SECRET_NAME = re.compile(r"(?i)(?:^|_)(?:secret|password|passwd|token|api_?key|access_key|private_key)(?:$|_)")


@dataclass(frozen=True)
class Source:
    """Where the code comes from, as its git repository tells it.

    Attributes:
        commit: Full name of the commit, or None before the first one.
        branch: None where HEAD is detached.
        dirty: Whether files below the code folder differ from the commit, or are not in it.
        diff: What `git diff HEAD` says of tracked files below the code folder.
    """

    commit: str | None
    branch: str | None
    dirty: bool
    diff: str = ""


@dataclass(frozen=True)
class CodeInfo:
    """The code that travels. `digest` is sha256 over names, modes and contents; `bytes` counts them.

    `source` says where it comes from; the same code is the same code wherever it comes from.
    """

    digest: str
    bytes: int
    files: int
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ClusterPlan:
    """What the ranks run on. `backend` is the collective backend; `world_size` counts all ranks, 0 if unknown."""

    instance_type: str
    instances: int
    processes_per_instance: int | None
    world_size: int
    distribution: str
    launcher: str
    backend: str


@dataclass(frozen=True)
class BatchPlan:
    """Samples per optimizer step: `per_rank` x `accumulate` x world size = `global_`."""

    per_rank: int
    accumulate: int
    global_: int


@dataclass(frozen=True)
class LengthPlan:
    """How far the run goes; None where only the run itself can tell.

    Attributes:
        steps: Optimizer steps.
        epochs: Passes over the training data.
        samples: Training samples, all ranks together.
        checkpoints: Checkpoints written, at most.
    """

    steps: int | None
    epochs: int | None
    samples: int | None
    checkpoints: int | None


@dataclass(frozen=True)
class Upload:
    """Something on this machine that must lie at `uri` before the job starts."""

    path: str
    uri: str


@dataclass(frozen=True)
class Plan:
    """Everything decided.

    Attributes:
        target: Backend that this plan is for: `local` or `sagemaker`.
        request: The CreateTrainingJob document.
        config: What the container reads.
        warnings: What the user should know, one sentence each.
        decisions: Choices that cloudtrain made itself and why, one line each.
    """

    run: str
    job: str
    target: str
    created: datetime
    cluster: ClusterPlan
    batch: BatchPlan | None
    length: LengthPlan
    cost: CostPlan
    image: str
    bundle: CodeInfo
    locations: Locations
    config: RunConfig
    request: dict[str, Any]
    max_runtime_seconds: int
    max_wait_seconds: int | None
    uploads: tuple[Upload, ...]
    warnings: tuple[str, ...]
    decisions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints."""
        every = self.config.checkpoint
        source = self.bundle.source
        return {
            "run": self.run,
            "target": self.target,
            "request": self.request,
            "bundle": {"digest": self.bundle.digest, "bytes": self.bundle.bytes, "files": self.bundle.files},
            "source": source and {"commit": source.commit, "branch": source.branch, "dirty": source.dirty},
            "cluster": asdict(self.cluster),
            "batch": None
            if self.batch is None
            else {"per_rank": self.batch.per_rank, "accumulate": self.batch.accumulate, "global": self.batch.global_},
            "length": asdict(self.length),
            "cost": asdict(self.cost),
            "image": self.image,
            "checkpoint": {
                "uri": self.locations.checkpoints,
                "every": f"{every.every_steps} steps"
                if every.every_steps
                else format_duration(every.every_seconds or 0),
            },
            "max_runtime_seconds": self.max_runtime_seconds,
            "max_wait_seconds": self.max_wait_seconds,
            "warnings": list(self.warnings),
            "decisions": list(self.decisions),
        }

    def to_file(self) -> str:
        """Return the text of plan.json: everything, with sorted keys."""
        source = self.bundle.source
        everything = {
            **self.to_json(),
            "config": json.loads(self.config.to_json()),
            "source": source and asdict(source),
        }
        return json.dumps(everything, indent=2, sort_keys=True)


def make_plan(
    spec: JobSpec,
    settings: Settings,
    code: CodeInfo,
    *,
    run: str,
    now: datetime,
    target: str = SAGEMAKER,
    prices: Prices | None = None,
    home: Path | None = None,
    machine: Machine | None = None,
    resume_uri: str | None = None,
) -> Plan:
    """Decide everything.

    Args:
        spec: The job.
        settings: The account. For SageMaker, placeholders stand in for what is missing, with a warning.
        code: Digest and size of the code that travels.
        run: Run id.
        now: Time of the plan, in UTC.
        target: `sagemaker` or `local`.
        prices: What instances cost; by default what comes with cloudtrain.
        home: Folder of local runs (`.cloudtrain`); needed for local plans.
        machine: This machine; needed for local plans.
        resume_uri: Where the checkpoints of the run lie that `checkpoint.resume` names.

    Raises:
        SpecError: the job asks for what cannot work.
    """
    notes = Notes(spec, settings)
    is_local = target == LOCAL
    region = settings.region or catalog.priced_regions()[0]
    placement = place(spec, region=region, machine=machine if is_local else None, today=now.date(), notes=notes)
    # A script finds its checkpoints in /opt/ml/checkpoints; an isolated container cannot reach S3 by itself.
    sync = spec.code.script is not None or spec.cluster.network.isolation
    resume = resume_uri or resume_from(spec, notes)
    go_on_in = resume if sync and "://" in resume else None
    if is_local:
        locations = locations_here(spec, code.digest, run, home, go_on_in, notes)
        time, cost = Time(spec.limits.runtime, None, 0), CostPlan(0.0, 0.0, None)
    else:
        _check_settings(settings, notes)
        locations = locations_in_s3(spec, settings, code.digest, run, go_on_in, notes)
        rate = price_cluster(spec, region, prices or bundled_prices())
        time = bound_time(spec, rate, region, notes)
        cost = cost_of(spec, rate, region, time, notes)
        _warn_of_price(settings, region, cost, now.date(), notes)
    choices = Choices(
        run=run,
        role=_LOCAL_ROLE if is_local else settings.role or _PLACEHOLDER_ROLE,
        region=region,
        image=placement.image,
        launcher=placement.launcher,
        distribution=placement.distribution,
        locations=locations,
        sync_checkpoints=sync,
        max_runtime_seconds=time.runtime,
        max_wait_seconds=time.wait if not is_local else _local_wait(spec),
    )
    request = render_request(spec, settings, choices)
    _check_abilities(spec, notes)
    _check_limits(spec, request, is_local=is_local, notes=notes)
    _warn_of_code(spec, code, notes)
    if notes.problems:
        raise SpecError(notes.problems)
    checkpoints = "" if sync else locations.checkpoints
    return Plan(
        run=run,
        job=spec.name,
        target=target,
        created=now,
        cluster=_cluster(spec, placement),
        batch=_batch(spec, placement.world_size(spec.cluster.instances)),
        length=_length(spec, placement.world_size(spec.cluster.instances), time.runtime),
        cost=cost,
        image=placement.image,
        bundle=code,
        locations=locations,
        config=_run_config(spec, run, placement, checkpoints=checkpoints, resume=resume),
        request=request,
        max_runtime_seconds=time.runtime,
        max_wait_seconds=time.wait,
        uploads=() if is_local else _uploads(spec, locations),
        warnings=tuple(notes.warnings),
        decisions=tuple(notes.decisions),
    )


def _local_wait(spec: JobSpec) -> int | None:
    spot = spec.cluster.spot
    return None if spot is None else spot.max_wait or 2 * spec.limits.runtime


def _cluster(spec: JobSpec, placement: Placement) -> ClusterPlan:
    return ClusterPlan(
        instance_type=spec.cluster.first_choice,
        instances=spec.cluster.instances,
        processes_per_instance=placement.processes,
        world_size=placement.world_size(spec.cluster.instances),
        distribution=placement.distribution,
        launcher=placement.launcher,
        backend=placement.backend,
    )


def _batch(spec: JobSpec, world_size: int) -> BatchPlan | None:
    if spec.train is None:
        return None
    train = spec.train
    parallel = train.parallel.tensor * train.parallel.pipeline
    replicas = world_size // parallel
    return BatchPlan(train.batch_size, train.accumulate, train.batch_size * train.accumulate * replicas)


def _length(spec: JobSpec, world_size: int, runtime: int) -> LengthPlan:
    train, every = spec.train, spec.checkpoint.every
    steps = train.steps if train is not None else None
    batch = _batch(spec, world_size)
    checkpoints: int | None = None
    if train is not None and every.seconds is not None:
        checkpoints = runtime // every.seconds + 1  # and one at the end
    elif train is not None and every.steps is not None and steps is not None:
        checkpoints = -(-steps // every.steps)
    return LengthPlan(
        steps=steps,
        epochs=train.epochs if train is not None else None,
        samples=steps * batch.global_ if steps and batch and batch.global_ else None,
        checkpoints=checkpoints,
    )


def _run_config(spec: JobSpec, run: str, placement: Placement, *, checkpoints: str, resume: str) -> RunConfig:
    """Return what the container reads. Without `checkpoints` it saves in /opt/ml/checkpoints, which SageMaker syncs."""
    checkpoint = spec.checkpoint
    train = spec.train
    early = train.early_stopping if train else None
    args = spec.code.args
    return RunConfig(
        run=run,
        task=spec.code.task,
        script=spec.code.script,
        args=dict(args) if spec.code.task is not None and isinstance(args, dict) else _argv(args),
        requirements=spec.code.requirements,
        processes_per_instance=placement.processes,
        distribution=placement.distribution,
        max_restarts=spec.limits.retries,
        train=None
        if train is None
        else TrainConfig(
            epochs=train.epochs,
            steps=train.steps,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            precision=train.precision,
            compile=train.compile,
            clip_grad_norm=train.clip_grad_norm,
            learning_rate=train.learning_rate,
            seed=train.seed,
            evaluate_every_steps=train.evaluate.every.steps if train.evaluate else None,
            early_stopping=EarlyStopping(early.metric, early.patience, early.min_delta, early.mode) if early else None,
        ),
        checkpoint=CheckpointConfig(
            uri=checkpoints,
            every_seconds=checkpoint.every.seconds,
            every_steps=checkpoint.every.steps,
            keep=checkpoint.keep,
            resume="auto" if not checkpoints else resume,
        ),
    )


def _argv(args: dict[str, Any] | tuple[Any, ...]) -> list[str]:
    """Return argv: a list as it is, a mapping as `--key value`, true as a bare flag, false and null as nothing."""
    if not isinstance(args, dict):
        return [_written(value) for value in args]
    argv: list[str] = []
    for key, value in args.items():
        if value is True:
            argv.append(f"--{key}")
        elif value not in (False, None):
            argv += [f"--{key}", _written(value)]
    return argv


def _written(value: Any) -> str:
    """Return a value as the job file spells it: `1e-4` stays `1e-4`."""
    return str(getattr(value, "text", value))


def _uploads(spec: JobSpec, locations: Locations) -> tuple[Upload, ...]:
    """Return the local data that a cluster needs a copy of."""
    return tuple(
        Upload(str((spec.base / channel.uri).resolve()), locations.channels[name])
        for name, channel in spec.data.items()
        if not channel.is_s3
    )


# ---------------------------------------------------------------- what would be refused later


def _check_settings(settings: Settings, notes: Notes) -> None:
    """Check the form of the account's settings; what AWS's model limits is checked in the request."""
    if settings.missing:
        names = ", ".join(settings.missing)
        notes.warn(f"no {names} in the settings: placeholders stand in the request, and submit would refuse")
    if settings.bucket is not None and not _BUCKET.fullmatch(settings.bucket):
        message = f'expected a bucket name of 3 to 63 small letters, digits, dots or hyphens, got "{settings.bucket}"'
        notes.refuse_setting("bucket", message, "give the name alone, without s3://")
    if bool(settings.subnets) != bool(settings.security_groups):
        given, missing = ("subnets", "security_groups") if settings.subnets else ("security_groups", "subnets")
        notes.refuse_setting(given, "subnets and security_groups go together", f"give {missing}, too")
    if settings.region is not None and settings.region not in limits.regions():
        _unknown_region(settings.region, notes)


def _unknown_region(region: str, notes: Notes) -> None:
    """Warn of a region that may be newer than the installed AWS model, refuse one that is a typo."""
    areas = {name.rpartition("-")[0] for name in limits.regions()}
    if region.rpartition("-")[0] in areas and region.rpartition("-")[2].isdigit():
        notes.warn(f"the installed botocore does not know the region {region}")
        return
    near = nearest(region, limits.regions())
    hint = f'did you mean "{near}"?' if near else "for example us-west-2"
    notes.refuse_setting("region", f'there is no AWS region "{region}"', hint)


def _check_abilities(spec: JobSpec, notes: Notes) -> None:
    """Refuse what the shared entrypoint does not do: ignored, it would be paid for and not had."""
    if spec.train is not None:
        for name in ("data", "tensor", "pipeline"):
            if getattr(spec.train.parallel, name) not in ("ddp", 1):
                use = "use ddp" if name == "data" else "use 1"
                notes.refuse(("train", "parallel", name), "this version trains with ddp only", use)
        if spec.train.profile is not None:
            notes.refuse(("train", "profile"), "this version does not profile", "remove it")
        for name in ("tensorboard", "mlflow"):
            if getattr(spec.tracking, name):
                message = "this version tracks a Task by event lines only; a script may write what it likes"
                notes.refuse(("tracking", name), message, "remove it")


def _check_limits(spec: JobSpec, request: dict[str, Any], *, is_local: bool, notes: Notes) -> None:
    """Refuse what CreateTrainingJob would; a local run keeps the same limits, but for where things lie."""
    for violation in limits.check_request(_as_if_in_s3(request) if is_local else request):
        if request["AlgorithmSpecification"]["TrainingImage"] == "" and "TrainingImage" in violation.path:
            continue  # no container was found, which is told already
        if violation.path[-1] == "InstanceType":
            continue  # told with the nearest types
        source = source_of(violation.path, request, spec)
        if source[:1] == (SETTING,):
            notes.refuse_setting(str(source[1]), violation.message, violation.hint)
        else:
            is_key = violation.is_key or violation.path[-1] in ("ChannelName", "Key")
            notes.refuse(source, violation.message, violation.hint, is_key=is_key)
    for name in spec.code.env:
        if _SECRET_NAME.search(name):
            notes.warn(f"code.env.{name} looks like a secret: whoever may describe the job can read it")


def _as_if_in_s3(request: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a local run with its folders as AWS's model would have them."""
    document: dict[str, Any] = json.loads(json.dumps(request).replace('"file://', '"s3://here'))
    return document


def _warn_of_code(spec: JobSpec, code: CodeInfo, notes: Notes) -> None:
    if code.bytes > _LARGE_CODE_BYTES:
        size = format_size(code.bytes)
        notes.warn(f"the code folder has {size}: name data in .cloudtrainignore, and make it a channel")
    every, train = spec.checkpoint.every, spec.train
    if train is not None and train.steps is not None and every.steps is not None and every.steps > train.steps:
        notes.warn(f"the run ends after {train.steps} steps, before the first checkpoint at step {every.steps}")


def _warn_of_price(settings: Settings, region: str, cost: CostPlan, today: date, notes: Notes) -> None:
    if settings.region is None:
        notes.warn(f"no region in the settings: image and price are those of {region}")
    if cost.price_as_of is not None and (today - date.fromisoformat(cost.price_as_of)).days > _OLD_PRICE_DAYS:
        notes.warn(f"the price is of {cost.price_as_of}: cloudtrain prices --refresh")
