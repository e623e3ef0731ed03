"""`make_plan`: decide everything about a run, without any side effect.

Everything that does not depend on the run id is decided first. Its digest is the plan's identity; the id of a training
job ends with its first digits. The same job, settings, code, time and machine give an equal plan; only the end of other
runs' ids is random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from cloudtrain.errors import Problem, SpecError
from cloudtrain.job.arguments import omitted_arguments
from cloudtrain.job.diagnostics import Diagnostic, Severity
from cloudtrain.job.sections.cluster import wrong_types
from cloudtrain.job.spec import JobSpec, with_placeholder_type
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.planning.diagnostics import Step, problems_of, run_step, texts_of
from cloudtrain.planning.environment_checks import check_search_paths, check_sizes
from cloudtrain.planning.job_checks import (
    check_abilities,
    check_initial_weights,
    check_resume_source,
    check_secrets,
    decide_launcher,
    describe_outputs,
    find_local_rank_option,
    may_use_several_gpus,
    warn_about_code,
    warn_about_last_batch,
    warn_about_script,
)
from cloudtrain.planning.package_checks import (
    check_installed_module,
    warn_about_packages,
    warn_about_torch,
    warn_about_wheels,
)
from cloudtrain.planning.placement import choose_placement
from cloudtrain.planning.plan import BatchPlan, CodeInfo, LengthPlan, Plan
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.planning.recovery import decide_recovery
from cloudtrain.planning.request import Decisions, render_request
from cloudtrain.planning.request_limits import check_limits
from cloudtrain.planning.resumed_fields import describe_changes
from cloudtrain.planning.run_config import decide_run_config
from cloudtrain.planning.storage_layout import Locations, ResumeSource
from cloudtrain.planning.targets import Target
from cloudtrain.planning.tracking import describe_tracking, offline_folder
from cloudtrain.planning.value_checks import warn_about_arguments
from cloudtrain.support.run_id import make_run_id
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.strict_json import dump_json


def make_plan(
    spec: JobSpec,
    code: CodeInfo,
    target: Target,
    *,
    now: datetime,
    suffix: str | None = None,
    resumed: ResumeSource | None = None,
    data_stamp: str = "",
    found: Sequence[Diagnostic | Problem] = (),
) -> Plan:
    """Return the plan of a run.

    Args:
        spec: The job.
        code: Digest and size of the code.
        target: Where the run takes place, with the account or machine.
        now: Time of the plan, in UTC.
        suffix: Six hexadecimal digits of the run id; by default the target decides.
        resumed: The checkpoints that `checkpoint.resume` names; None when they have not been looked up.
        data_stamp: Fingerprint of the local data to upload, so that other data gives another identity.
        found: What earlier steps found. Errors are raised together with those of the plan.

    Raises:
        SpecError: the job cannot work. The error lists every problem.
    """
    missing = missing_type(spec, target)
    if missing is not None:
        spec = with_placeholder_type(spec)
    decisions, diagnostics = run_step(_decide(spec, code, target, now, resumed))
    diagnostics += [] if missing is None else [missing]
    # The identity: everything that is sent and run, without the run id. The code's uri contains its digest.
    _, request, config = _documents(decisions, "RUN")
    sent = [request, config.to_json(), spec.to_document()["cluster"].get("queue"), data_stamp]
    if (batch_job := _batch_job(decisions, "RUN")) is not None:
        sent.append(batch_job.sent)
    identity = hashlib.sha256(dump_json(sent, sort_keys=True).encode()).hexdigest()
    decisions = replace(decisions, identity=identity)
    run = make_run_id(spec.name, now, suffix or target.run_suffix(identity))
    plan = _render(decisions, run)
    diagnostics += check_limits(spec, plan.request)
    diagnostics += check_secrets(spec)
    diagnostics += describe_outputs(spec, plan.locations.checkpoints)
    diagnostics += [each for each in found if isinstance(each, Diagnostic)]
    located = [each for each in found if isinstance(each, Problem)]
    located += problems_of(diagnostics, spec, target.settings)
    if located:
        raise SpecError(list(dict.fromkeys(located)))
    return replace(
        plan,
        warnings=texts_of(Severity.WARNING, diagnostics),
        decisions=texts_of(Severity.DECISION, diagnostics),
    )


def missing_type(spec: JobSpec, target: Target) -> Diagnostic | None:
    """Return the error about a job without an instance type, where the target needs one."""
    if spec.cluster.types or not target.needs_instance_type:
        return None
    return wrong_types().below(("cluster",))


def _batch_job(decisions: Decisions, run: str) -> BatchJob | None:
    return decisions.target.batch_job(
        decisions.spec,
        decisions.cluster,
        decisions.limits,
        run=run,
        identity=decisions.identity,
    )


def _decide(
    spec: JobSpec, code: CodeInfo, target: Target, now: datetime, resumed: ResumeSource | None
) -> Step[Decisions]:
    """Return everything that does not depend on the run id."""
    today = now.date()
    cluster, image = yield from choose_placement(
        spec,
        region=target.region,
        machine=target.machine,
        today=today,
        shares_out=may_use_several_gpus(spec, code.conventions),
    )
    resumed = resumed or _named_checkpoints(spec, target)
    yield from target.check(spec, code.conventions, resumed)
    limits, cost = yield from target.decide_limits(spec, today)
    yield from decide_recovery(spec, target.name, cost.max_usd)
    local_rank = yield from find_local_rank_option(spec, code.conventions)
    yield from check_search_paths(spec, image if target.machine is None else None)
    yield from check_sizes(spec)
    launcher = yield from decide_launcher(spec, cluster.processes_per_instance)
    yield from warn_about_script(spec, code, cluster.processes_per_instance)
    yield from warn_about_arguments(spec, code.conventions)
    yield from warn_about_last_batch(spec, code.conventions, cluster.world_size)
    yield from check_abilities(spec)
    yield from check_resume_source(spec, resumed)
    yield from describe_changes(spec, resumed)
    yield from check_initial_weights(spec, is_local=target.machine is not None)
    yield from warn_about_code(spec, code.bytes, code.conventions)
    if target.machine is None:
        yield from check_installed_module(spec, image)
        yield from warn_about_packages(spec, code, image)
        yield from warn_about_torch(code.requirements, image)
        yield from warn_about_wheels(code.requirements, image)
    config = decide_run_config(
        spec,
        code,
        target,
        cluster,
        resumed=resumed,
        local_rank_option=local_rank,
        launcher=launcher,
    )
    yield from describe_tracking(spec, config)
    return Decisions(
        spec=spec,
        code=code,
        target=target,
        created=now,
        cluster=cluster,
        image=image,
        limits=limits,
        cost=cost,
        resumed=resumed,
        config=config,
    )


def _named_checkpoints(spec: JobSpec, target: Target) -> ResumeSource | None:
    """Return the checkpoints that a path or uri in `checkpoint.resume` names; None for `auto`, `never` and a run id."""
    named = spec.checkpoint.resume
    if named.startswith("/"):
        named = Path(named).as_uri()
    if "://" not in named:
        return None
    return target.resume_source(spec, named)


def _documents(decisions: Decisions, run: str) -> tuple[Locations, dict[str, Any], RunConfig]:
    """Return what depends on the run id: the uris of a run's files, its request and its run.json."""
    locations = decisions.target.locations(
        decisions.spec, decisions.code.digest, run, decisions.resumed
    )
    checkpoint = replace(decisions.config.checkpoint, uri=locations.saves)
    config = replace(decisions.config, run=run, request=decisions.identity, checkpoint=checkpoint)
    if config.tracking is not None:
        folder = locations.config.rpartition("/")[0]
        tracking = replace(config.tracking, plan=f"{folder}/{PLAN_FILE}")
        if tracking.wandb == "offline":
            is_local = decisions.target.machine is not None
            files = offline_folder(
                decisions.spec, config, folder, decisions.resumed, is_local=is_local
            )
            tracking = replace(tracking, files=files)
        config = replace(config, tracking=tracking)
    return locations, render_request(decisions, run, locations), config


def _render(decisions: Decisions, run: str) -> Plan:
    """Return the plan of a run, without warnings and decisions."""
    spec = decisions.spec
    target = decisions.target
    limits = decisions.limits
    locations, request, config = _documents(decisions, run)
    batch = _batch(spec, decisions.cluster.world_size)
    resume = spec.checkpoint.resume
    if decisions.resumed is not None:
        resume = decisions.resumed.checkpoints
    return Plan(
        run=run,
        job=spec.name,
        target=target.name,
        created=decisions.created,
        cluster=decisions.cluster,
        batch=batch,
        length=_length(spec, batch, limits.runtime_seconds),
        cost=decisions.cost,
        image=decisions.image,
        bundle=decisions.code,
        locations=locations,
        config=config,
        request=request,
        max_runtime_seconds=limits.runtime_seconds,
        max_wait_seconds=limits.wait_seconds,
        uploads=target.uploads(spec, locations),
        warnings=(),
        decisions=(),
        resume=resume,
        identity=decisions.identity,
        job_document=spec.to_document(),
        queue=target.queue(spec, request),
        omitted_arguments=omitted_arguments(spec.code.args) if spec.code.task is None else (),
        settings=target.settings,
        settings_beside_job=target.settings_beside_job,
        sender=target.sender,
        batch_job=_batch_job(decisions, run),
        render=partial(_render, decisions),
    )


def _batch(spec: JobSpec, world_size: int) -> BatchPlan | None:
    train = spec.train
    if train is None:
        return None
    replicas = world_size // train.parallel.group_size
    return BatchPlan(
        per_rank=train.batch_size,
        accumulate=train.accumulate,
        global_=train.batch_size * train.accumulate * replicas,
    )


def _length(spec: JobSpec, batch: BatchPlan | None, runtime: int) -> LengthPlan:
    train = spec.train
    if train is None:
        return LengthPlan(steps=None, epochs=None, samples=None, checkpoints=None)
    steps = train.steps
    every = spec.checkpoint.every
    checkpoints: int | None = None
    if every.seconds is not None:
        # One more, at the end.
        checkpoints = runtime // every.seconds + 1
    elif every.steps is not None and steps is not None:
        # Rounded up, because the last one is at the end.
        checkpoints = -(-steps // every.steps)
    samples: int | None = None
    if steps and batch and batch.global_:
        samples = steps * batch.global_
    return LengthPlan(
        steps=steps,
        epochs=train.epochs,
        samples=samples,
        checkpoints=checkpoints,
    )
