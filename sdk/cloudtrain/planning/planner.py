"""`make_plan`: decide everything about a run, without any side effect.

The same job, settings, code, run id, time and machine give an equal plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from cloudtrain import catalog
from cloudtrain.catalog import Prices, bundled_prices
from cloudtrain.errors import SpecError
from cloudtrain.job.arguments import omitted_arguments, script_argv
from cloudtrain.job.sections.train import Parallel
from cloudtrain.job.spec import REQUEST_TAG, JobSpec
from cloudtrain.planning.cost import (
    CostPlan,
    TimeLimits,
    compute_time_limits,
    estimate_cost,
    price_cluster,
)
from cloudtrain.planning.diagnostics import Diagnostics
from cloudtrain.planning.placement import Machine, Placement, choose_placement
from cloudtrain.planning.plan import LOCAL, SAGEMAKER, BatchPlan, ClusterPlan, CodeInfo, LengthPlan, Plan, Upload
from cloudtrain.planning.request import Locations, RequestOptions, render_request
from cloudtrain.planning.script_warnings import warn_about_script
from cloudtrain.planning.service_job import render_service_job
from cloudtrain.planning.storage_layout import (
    ResumeSource,
    local_locations,
    resolve_resume,
    resume_source,
    s3_locations,
    script_checkpoint_uri,
)
from cloudtrain.planning.training_identity import identify_training
from cloudtrain.planning.validation import (
    check_abilities,
    check_limits,
    check_queue,
    check_resume,
    check_secrets,
    check_settings,
    describe_outputs,
    find_local_rank_option,
    warn_about_code,
    warn_about_last_checkpoint,
    warn_about_price,
)
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import (
    CheckpointConfig,
    EarlyStopping,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from cloudtrain_runtime.contract.strict_json import dump_json

_PLACEHOLDER_ROLE = "arn:aws:iam::000000000000:role/CLOUDTRAIN_ROLE"
_LOCAL_ROLE = "arn:aws:iam::000000000000:role/local"


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
    resumed: ResumeSource | None = None,
    data_stamp: str = "",
) -> Plan:
    """Return the plan of a run.

    Args:
        spec: The job.
        settings: The account. For SageMaker, missing settings become placeholders, with a warning.
        code: Digest and size of the code.
        run: Run id.
        now: Time of the plan, in UTC.
        target: `sagemaker` or `local`.
        prices: Prices of instances; by default those of the package.
        home: Folder of local runs (`.cloudtrain`); required for local plans.
        machine: This machine; required for local plans.
        resumed: The checkpoints that `checkpoint.resume` names; None when they have not been looked up.
        data_stamp: Fingerprint of the local data to upload, so that other data gives another identity.

    Raises:
        SpecError: the job cannot work. The error lists every problem.
    """
    diagnostics = Diagnostics(spec, settings)
    is_local = target == LOCAL
    region = settings.region or catalog.priced_regions()[0]
    placement = choose_placement(
        spec, region=region, machine=machine if is_local else None, today=now.date(), diagnostics=diagnostics
    )
    # SageMaker syncs /opt/ml/checkpoints for scripts, which save there, and for isolated containers, which have no S3.
    is_isolated = spec.cluster.network.isolation
    syncs_checkpoints = spec.code.script is not None or is_isolated
    resume = resumed.checkpoints if resumed is not None else resolve_resume(spec, diagnostics)
    if resumed is None and "://" in resume:
        resumed = resume_source(resume, is_synced=spec.code.script is not None and not is_local and not is_isolated)
    resume_folder = resumed.folder if syncs_checkpoints and resumed is not None else None
    if is_local:
        locations = local_locations(spec, code.digest, run, home, resume_folder, diagnostics)
        limits, cost = TimeLimits(spec.limits.runtime, None, 0), CostPlan(0.0, 0.0, None)
    else:
        check_settings(settings, diagnostics)
        is_separate = syncs_checkpoints and spec.checkpoint.resume == "never"
        locations = s3_locations(spec, settings, code.digest, run, resume_folder, diagnostics, is_separate=is_separate)
        price = price_cluster(spec, region, prices or bundled_prices())
        limits = compute_time_limits(spec, price, region, diagnostics)
        cost = estimate_cost(spec, price, region, limits, diagnostics)
        warn_about_price(settings, region, cost.price_as_of, now.date(), diagnostics)
    options = RequestOptions(
        run=run,
        role=_LOCAL_ROLE if is_local else settings.role or _PLACEHOLDER_ROLE,
        region=region,
        image=placement.image,
        launcher=placement.launcher,
        distribution=placement.distribution,
        locations=locations,
        sync_checkpoints=syncs_checkpoints,
        max_runtime_seconds=limits.runtime_seconds,
        max_wait_seconds=limits.wait_seconds if not is_local else _local_wait(spec),
    )
    request = render_request(spec, settings, options)
    checkpoints = locations.checkpoints
    if syncs_checkpoints:
        checkpoints = (
            ""
            if is_isolated
            else script_checkpoint_uri(spec, locations, run, resume_folder, diagnostics, is_local=is_local)
        )
    local_rank = find_local_rank_option(spec, code.conventions, diagnostics)
    here = machine if is_local else None
    warn_about_script(spec, code.conventions, placement.processes, machine=here, diagnostics=diagnostics)
    config = _run_config(spec, run, placement, code.digest, checkpoints=checkpoints, resume=resume, resumed=resumed)
    network_gbps = None if is_local else _network_gbps(spec)
    config = replace(
        config,
        network_gbps=network_gbps,
        local_rank_option=local_rank,
        starts_ranks=code.conventions.starts_ranks,
        bucket_owners=settings.bucket_owners,
        training=identify_training(spec, config.args, resumed.uploaded if resumed is not None else None),
    )
    identity = _identify([request, config.to_json(), spec.to_document()["cluster"].get("queue"), data_stamp], run)
    request["Tags"] = sorted([*request["Tags"], {"Key": REQUEST_TAG, "Value": identity}], key=itemgetter("Key"))
    check_abilities(spec, diagnostics)
    check_resume(spec, resumed, diagnostics)
    if not is_local:
        warn_about_last_checkpoint(spec, diagnostics)
    check_queue(spec, settings, is_local=is_local, diagnostics=diagnostics)
    check_limits(spec, request, is_local=is_local, diagnostics=diagnostics)
    check_secrets(spec, diagnostics)
    for name, reference in config.secrets.items():
        if is_local and machine is not None and name in machine.variables:
            diagnostics.add_decision(
                f"{name} is set on this machine: its value is used, and the secret {reference.secret} is not read"
            )
    warn_about_code(spec, code.bytes, diagnostics)
    describe_outputs(spec, locations.checkpoints, diagnostics)
    if diagnostics.problems:
        raise SpecError(diagnostics.problems)
    cluster = _cluster(spec, placement)
    batch = _batch(spec, cluster.world_size)
    return Plan(
        run=run,
        job=spec.name,
        target=target,
        created=now,
        cluster=cluster,
        batch=batch,
        length=_length(spec, batch, limits.runtime_seconds),
        cost=cost,
        image=placement.image,
        bundle=code,
        locations=locations,
        config=replace(config, request=identity),
        request=request,
        max_runtime_seconds=limits.runtime_seconds,
        max_wait_seconds=limits.wait_seconds,
        uploads=() if is_local else _uploads(spec, locations),
        warnings=tuple(diagnostics.warnings),
        decisions=tuple(diagnostics.decisions),
        resume=resumed.checkpoints if resumed is not None else resume,
        identity=identity,
        job_document=spec.to_document(),
        queue=None if is_local else render_service_job(spec, request),
        omitted_arguments=omitted_arguments(spec.code.args) if spec.code.script is not None else (),
        settings_beside_job=() if is_local else settings.beside_job,
    )


def _identify(parts: list[Any], run: str) -> str:
    """Return sha256 over the parts of a plan, without the run id.

    Args:
        parts: Request, `run.json`, queue and the fingerprint of the data. The code's uri contains its digest.
        run: Run id.
    """
    text = dump_json(parts, sort_keys=True)
    return hashlib.sha256(text.replace(run, "RUN").encode()).hexdigest()


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
        checkpoints = runtime // every.seconds + 1  # the last one is at the end
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
    resumed: ResumeSource | None,
) -> RunConfig:
    """Return the configuration that the container reads.

    Args:
        spec: The job.
        run: Run id.
        placement: Image and ranks.
        code: Digest of the code.
        checkpoints: Uri to save checkpoints to; empty for /opt/ml/checkpoints, which SageMaker syncs.
        resume: `auto`, `never` or a uri.
        resumed: The checkpoints that `checkpoint.resume` names.
    """
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
            resume="auto" if not checkpoints else resume if resumed is None else resumed.checkpoints,
            resume_run=resumed.run if checkpoints and resumed is not None else "",
        ),
        code=code,
        hang_seconds=None if spec.limits.hang is None else float(spec.limits.hang),
        secrets=spec.code.secrets,
        outputs=list(spec.code.outputs),
    )


def _network_gbps(spec: JobSpec) -> float | None:
    """Return the network bandwidth between instances in Gbit/s, of the slowest type; None when it is unknown."""
    found = [catalog.find_instance(name) for name in spec.cluster.types]
    ratings = [None if instance is None else instance.network_gbps for instance in found]
    known = [rating for rating in ratings if rating is not None]
    return min(known) if spec.cluster.instances > 1 and len(known) == len(ratings) else None


def _parallel(parallel: Parallel) -> ParallelConfig:
    return ParallelConfig(
        data=parallel.data,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        schedule=parallel.schedule,
        shard=parallel.shard,
        reshard=parallel.reshard,
        static_graph=parallel.static_graph,
        compress=parallel.compress,
        bucket_bytes=None if parallel.bucket is None else parallel.bucket * 10**6,
    )


def _uploads(spec: JobSpec, locations: Locations) -> tuple[Upload, ...]:
    """Return the uploads of the job's local data."""
    return tuple(
        Upload(str((spec.base / channel.uri).resolve()), locations.channels[name])
        for name, channel in spec.data.items()
        if not channel.is_s3
    )
