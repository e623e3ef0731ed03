"""`make_plan`: everything decided before anything happens.

Pure: the same job, settings, code, run id, clock and machine give an equal plan. There is no dry run anywhere, because
this object is the first half of every run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from cloudtrain import catalog
from cloudtrain.catalog import Prices, bundled_prices
from cloudtrain.errors import SpecError
from cloudtrain.job.arguments import command_line, omitted_arguments, script_argv
from cloudtrain.job.script_conventions import Conventions
from cloudtrain.job.sections.train import Parallel
from cloudtrain.job.spec import REQUEST_TAG, JobSpec
from cloudtrain.planning.cost import (
    CostPlan,
    Time,
    bound_time,
    cost_of,
    price_cluster,
)
from cloudtrain.planning.diagnostics import Notes
from cloudtrain.planning.placement import Machine, Placement, place
from cloudtrain.planning.request import Choices, Locations, render_request
from cloudtrain.planning.script_warnings import warn_of_script
from cloudtrain.planning.service_job import render_service_job
from cloudtrain.planning.storage_layout import (
    Resumed,
    locations_here,
    locations_in_s3,
    resume_from,
    resumed_at,
    script_saves_to,
)
from cloudtrain.planning.training_identity import training_of
from cloudtrain.planning.validation import (
    check_abilities,
    check_limits,
    check_queue,
    check_resume,
    check_secrets,
    check_settings,
    choose_local_rank,
    note_outputs,
    warn_of_code,
    warn_of_last_save,
    warn_of_price,
)
from cloudtrain.settings.settings import Origin, Settings
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract import (
    CheckpointConfig,
    EarlyStopping,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from cloudtrain_runtime.contract.strict_json import dump_json

LOCAL = "local"
SAGEMAKER = "sagemaker"

_PLACEHOLDER_ROLE = "arn:aws:iam::000000000000:role/CLOUDTRAIN_ROLE"
_LOCAL_ROLE = "arn:aws:iam::000000000000:role/local"


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

    `source` says where it comes from; the same code is the same code wherever it comes from. `conventions` says how
    the job's script wants to be started.
    """

    digest: str
    bytes: int
    files: int
    source: Source | None = field(default=None, compare=False)
    conventions: Conventions = field(default_factory=Conventions)


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
    """Samples per optimizer step: `per_rank` x `accumulate` x data ranks = `global_`.

    Ranks of one tensor group or one pipeline see the same samples.
    """

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
        resume: `auto`, `never`, or the uri of the checkpoints to go on from.
        identity: sha256 over everything that would be sent and run, but for the run's own name: two submits of the same
            request and code have the same. It stands in the request as a tag, too.
        job_document: The job as a job file holds it, so that the run can be planned again from anywhere.
        queue: The SubmitServiceJob document without its payload, or None where no queue is waited in.
        settings_beside_job: Settings that the request takes from a cloudtrain.toml beside the job, not from the user.
        omitted_arguments: Arguments of the script that the job gives as `null`, as `--key`: they are not passed.
        checks: What was asked of the account before it was sent, as `check --json` prints it: among it what the image's
            tag meant then.
        left_out: Name and reason of what stays behind of the code folder, bounded.
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
    resume: str = "auto"
    identity: str = ""
    job_document: Mapping[str, Any] = field(default_factory=dict)
    queue: dict[str, Any] | None = None
    omitted_arguments: tuple[str, ...] = ()
    settings_beside_job: tuple[Origin, ...] = ()
    checks: tuple[Mapping[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    def rename(self, run: str) -> Plan:
        """Return the same plan under another run id, which stands in it wherever this one does."""

        def named(text: str) -> str:
            return text.replace(self.run, run)

        places = self.locations
        return replace(
            self,
            run=run,
            locations=Locations(
                code=named(places.code),
                config=named(places.config),
                output=named(places.output),
                checkpoints=named(places.checkpoints),
                channels={name: named(uri) for name, uri in places.channels.items()},
            ),
            config=RunConfig.from_json(named(self.config.to_json())),
            request=json.loads(named(dump_json(self.request))),
            queue=json.loads(named(dump_json(self.queue))),
            uploads=tuple(Upload(upload.path, named(upload.uri)) for upload in self.uploads),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints."""
        every = self.config.checkpoint
        source = self.bundle.source
        return {
            "run": self.run,
            "target": self.target,
            "request": self.request,
            "queue": self.queue,
            "bundle": {"digest": self.bundle.digest, "bytes": self.bundle.bytes, "files": self.bundle.files},
            "source": source and {"commit": source.commit, "branch": source.branch, "dirty": source.dirty},
            "cluster": asdict(self.cluster),
            "batch": None
            if self.batch is None
            else {"per_rank": self.batch.per_rank, "accumulate": self.batch.accumulate, "global": self.batch.global_},
            "length": asdict(self.length),
            "cost": asdict(self.cost),
            "image": self.image,
            "command": {
                "text": command_line(self.config),
                "entry": self.config.task or self.config.script,
                "args": self.config.args,
                "omitted": list(self.omitted_arguments),
            },
            "settings_beside_job": [origin.to_json() for origin in self.settings_beside_job],
            "secrets": {name: asdict(reference) for name, reference in self.config.secrets.items()},
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
            "job": self.job_document,
            "checks": [dict(check) for check in self.checks],
            "config": json.loads(self.config.to_json()),
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "source": source and asdict(source),
        }
        return dump_json(everything, indent=2, sort_keys=True)


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
    resumed: Resumed | None = None,
    data_stamp: str = "",
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
        resumed: What the run is found to have saved that `checkpoint.resume` names.
        data_stamp: Tells one state of this machine's data, which would be uploaded, from another.

    Raises:
        SpecError: the job asks for what cannot work.
    """
    notes = Notes(spec, settings)
    is_local = target == LOCAL
    region = settings.region or catalog.priced_regions()[0]
    placement = place(spec, region=region, machine=machine if is_local else None, today=now.date(), notes=notes)
    # A script finds its checkpoints in /opt/ml/checkpoints; an isolated container cannot reach S3 by itself.
    isolated = spec.cluster.network.isolation
    sync = spec.code.script is not None or isolated
    resume = resumed.steps if resumed is not None else resume_from(spec, notes)
    if resumed is None and "://" in resume:
        resumed = resumed_at(resume, is_synced=spec.code.script is not None and not is_local and not isolated)
    go_on_in = resumed.folder if sync and resumed is not None else None
    if is_local:
        locations = locations_here(spec, code.digest, run, home, go_on_in, notes)
        time, cost = Time(spec.limits.runtime, None, 0), CostPlan(0.0, 0.0, None)
    else:
        check_settings(settings, notes)
        apart = sync and spec.checkpoint.resume == "never"
        locations = locations_in_s3(spec, settings, code.digest, run, go_on_in, notes, keeps_apart=apart)
        rate = price_cluster(spec, region, prices or bundled_prices())
        time = bound_time(spec, rate, region, notes)
        cost = cost_of(spec, rate, region, time, notes)
        warn_of_price(settings, region, cost.price_as_of, now.date(), notes)
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
    checkpoints = locations.checkpoints
    if sync:
        checkpoints = "" if isolated else script_saves_to(spec, locations, run, go_on_in, notes, is_local=is_local)
    local_rank = choose_local_rank(spec, code.conventions, notes)
    here = machine if is_local else None
    warn_of_script(spec, code.conventions, placement.processes, machine=here, notes=notes)
    config = _run_config(spec, run, placement, code.digest, checkpoints=checkpoints, resume=resume, resumed=resumed)
    network_gbps = None if is_local else _network_gbps(spec)
    config = replace(
        config,
        network_gbps=network_gbps,
        local_rank_option=local_rank,
        starts_ranks=code.conventions.starts_ranks,
        bucket_owners=settings.bucket_owners,
        training=training_of(spec, config.args, resumed.uploaded if resumed is not None else None),
    )
    identity = _identify([request, config.to_json(), spec.to_document()["cluster"].get("queue"), data_stamp], run)
    request["Tags"] = sorted([*request["Tags"], {"Key": REQUEST_TAG, "Value": identity}], key=itemgetter("Key"))
    check_abilities(spec, notes)
    check_resume(spec, resumed, notes)
    if not is_local:
        warn_of_last_save(spec, notes)
    check_queue(spec, settings, is_local=is_local, notes=notes)
    check_limits(spec, request, is_local=is_local, notes=notes)
    check_secrets(spec, notes)
    for name, reference in config.secrets.items():
        if is_local and machine is not None and name in machine.variables:
            notes.decide(f"{name} is set here: this value is taken, and the secret {reference.secret} is not asked for")
    warn_of_code(spec, code.bytes, notes)
    note_outputs(spec, locations.checkpoints, notes)
    if notes.problems:
        raise SpecError(notes.problems)
    cluster = _cluster(spec, placement)
    batch = _batch(spec, cluster.world_size)
    return Plan(
        run=run,
        job=spec.name,
        target=target,
        created=now,
        cluster=cluster,
        batch=batch,
        length=_length(spec, batch, time.runtime),
        cost=cost,
        image=placement.image,
        bundle=code,
        locations=locations,
        config=replace(config, request=identity),
        request=request,
        max_runtime_seconds=time.runtime,
        max_wait_seconds=time.wait,
        uploads=() if is_local else _uploads(spec, locations),
        warnings=tuple(notes.warnings),
        decisions=tuple(notes.decisions),
        resume=resumed.steps if resumed is not None else resume,
        identity=identity,
        job_document=spec.to_document(),
        queue=None if is_local else render_service_job(spec, request),
        omitted_arguments=omitted_arguments(spec.code.args) if spec.code.script is not None else (),
        settings_beside_job=() if is_local else settings.beside_job,
    )


def _identify(parts: list[Any], run: str) -> str:
    """Return sha256 over the request, what the container reads, the queue and the state of the data, but not the run.

    The code is in it by its digest, which is part of the place where it lies.
    """
    whole = dump_json(parts, sort_keys=True)
    return hashlib.sha256(whole.replace(run, "RUN").encode()).hexdigest()


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


def _length(spec: JobSpec, batch: BatchPlan | None, runtime: int) -> LengthPlan:
    train, every = spec.train, spec.checkpoint.every
    steps = train.steps if train is not None else None
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


def _run_config(
    spec: JobSpec,
    run: str,
    placement: Placement,
    code: str,
    *,
    checkpoints: str,
    resume: str,
    resumed: Resumed | None,
) -> RunConfig:
    """Return what the container reads. Without `checkpoints` it saves in /opt/ml/checkpoints, which SageMaker syncs."""
    checkpoint = spec.checkpoint
    train = spec.train
    early = train.early_stopping if train else None
    args = spec.code.args
    return RunConfig(
        run=run,
        task=spec.code.task,
        script=spec.code.script,
        args=dict(args) if spec.code.task is not None and isinstance(args, dict) else script_argv(args),
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
            parallel=_parallel(train.parallel),
            activation_checkpointing=train.activation_checkpointing,
            schedule=train.schedule,
            warmup_steps=train.warmup.steps or 0 if train.warmup else 0,
            deterministic=train.deterministic,
            skip_nonfinite=train.skip_nonfinite,
            export=train.export,
            export_nonfinite=train.export_nonfinite,
            workers=train.workers,
            tensorboard=spec.tracking.tensorboard,
            profile_at=train.profile.at if train.profile else None,
            profile_steps=train.profile.steps if train.profile else 0,
        ),
        checkpoint=CheckpointConfig(
            uri=checkpoints,
            every_seconds=checkpoint.every.seconds,
            every_steps=checkpoint.every.steps,
            keep=checkpoint.keep,
            resume="auto" if not checkpoints else resume if resumed is None else resumed.steps,
            resume_run=resumed.run if checkpoints and resumed is not None else "",
        ),
        code=code,
        hang_seconds=None if spec.limits.hang is None else float(spec.limits.hang),
        secrets=spec.code.secrets,
        outputs=list(spec.code.outputs),
    )


def _network_gbps(spec: JobSpec) -> float | None:
    """Return the rating of the network between instances, the slowest where the type is left open; or None."""
    found = [catalog.find_instance(name) for name in spec.cluster.types]
    ratings = [None if instance is None else instance.network_gbps for instance in found]
    known = [rating for rating in ratings if rating is not None]
    return min(known) if spec.cluster.instances > 1 and len(known) == len(ratings) else None


def _parallel(spread: Parallel) -> ParallelConfig:
    return ParallelConfig(
        data=spread.data,
        tensor=spread.tensor,
        pipeline=spread.pipeline,
        schedule=spread.schedule,
        shard=spread.shard,
        reshard=spread.reshard,
        static_graph=spread.static_graph,
        compress=spread.compress,
        bucket_bytes=None if spread.bucket is None else spread.bucket * 10**6,
    )


def _uploads(spec: JobSpec, locations: Locations) -> tuple[Upload, ...]:
    """Return the local data that a cluster needs a copy of."""
    return tuple(
        Upload(str((spec.base / channel.uri).resolve()), locations.channels[name])
        for name, channel in spec.data.items()
        if not channel.is_s3
    )
