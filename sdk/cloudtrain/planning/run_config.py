"""The configuration that the container reads (`run.json`), with the identity of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain.job.arguments import script_argv
from cloudtrain.job.launcher_choice import OWN
from cloudtrain.job.sections.train import Train
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.placement import CPU_PROCESSES
from cloudtrain.planning.plan import ClusterPlan, CodeInfo
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.planning.targets import Target
from cloudtrain.planning.tracking import decide_tracking
from cloudtrain_runtime.contract import (
    CheckpointConfig,
    EarlyStopping,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from cloudtrain_runtime.contract.strict_json import (
    decode_floats,
    dump_json,
    encode_floats,
    load_json,
)
from cloudtrain_runtime.contract.training_identity import LENGTH_FIELDS


def decide_run_config(
    spec: JobSpec,
    code: CodeInfo,
    target: Target,
    cluster: ClusterPlan,
    *,
    resumed: ResumeSource | None,
    local_rank_option: str | None,
    launcher: str,
) -> RunConfig:
    """Return the configuration of a run, without its id, the plan's identity and the uri of its checkpoints."""
    args = _arguments(spec)
    train = None
    if spec.train is not None:
        train = _train(spec.train, tensorboard=spec.tracking.tensorboard)
    return RunConfig(
        run="",
        task=spec.code.task,
        script=spec.code.script,
        module=spec.code.module,
        command=list(spec.code.command or ()),
        args=args,
        requirements=spec.code.requirements,
        processes_per_instance=cluster.processes_per_instance,
        distribution=cluster.distribution,
        max_restarts=spec.limits.retries,
        train=train,
        checkpoint=_checkpoint(spec, resumed),
        code=code.digest,
        hang_seconds=None if spec.limits.hang is None else float(spec.limits.hang),
        network_gbps=target.network_gbps(spec),
        local_rank_option=local_rank_option,
        secrets=dict(sorted(spec.code.secrets.items())),
        bucket_owners=target.settings.bucket_owners,
        outputs=list(spec.code.outputs),
        starts_ranks=code.conventions.starts_ranks,
        metrics=dict(spec.metrics),
        cuda_on_cpu=_simulated_devices(code, cluster) if target.cuda_on_cpu else 0,
        tracking=decide_tracking(spec, code),
        evaluation=code.evaluation,
        training=identify_training(spec, args, resumed.uploaded if resumed is not None else None),
        launcher=launcher if launcher == OWN else "",
    )


def _arguments(spec: JobSpec) -> dict[str, Any] | list[str]:
    """Return the arguments as a Task gets them, by name, or as a script does, in words."""
    given = spec.code.args
    if spec.code.task is not None and isinstance(given, dict):
        return dict(given)
    return script_argv(given)


def _simulated_devices(code: CodeInfo, cluster: ClusterPlan) -> int:
    """Return the devices that an instance appears to have: one per rank. Scripts that start their ranks get several."""
    ranks = cluster.processes_per_instance or 0
    return max(ranks, CPU_PROCESSES) if code.conventions.starts_ranks else ranks


def _checkpoint(spec: JobSpec, resumed: ResumeSource | None) -> CheckpointConfig:
    checkpoint = spec.checkpoint
    resume = checkpoint.resume
    resume_run = ""
    if spec.cluster.network.isolation:
        # The container has only /opt/ml/checkpoints, into which SageMaker downloads what it resumes from.
        resume = "auto"
    elif resumed is not None:
        resume = resumed.checkpoints
        resume_run = resumed.run
    return CheckpointConfig(
        uri="",
        every_seconds=checkpoint.every.seconds,
        every_steps=checkpoint.every.steps,
        keep=checkpoint.keep,
        resume=resume,
        resume_run=resume_run,
    )


def _train(train: Train, *, tensorboard: bool) -> TrainConfig:
    values = train.model_dump(exclude={"warmup", "evaluate", "early_stopping", "profile"})
    parallel = values.pop("parallel")
    bucket = parallel.pop("bucket")
    warmup_steps = 0
    if train.warmup:
        warmup_steps = train.warmup.steps or 0
    early_stopping = None
    if train.early_stopping:
        early_stopping = EarlyStopping(**train.early_stopping.model_dump())
    return TrainConfig(
        **values,
        parallel=ParallelConfig(
            **parallel,
            bucket_bytes=None if bucket is None else bucket * 10**6,
        ),
        warmup_steps=warmup_steps,
        evaluate_every_steps=train.evaluate.every.steps if train.evaluate else None,
        early_stopping=early_stopping,
        profile_at=train.profile.at if train.profile else None,
        profile_steps=train.profile.steps if train.profile else 0,
        tensorboard=tensorboard,
    )


def identify_training(
    spec: JobSpec, args: Mapping[str, Any] | list[str], uploaded: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the identity of a training: entry, arguments, data and `train`, without its length.

    `uploaded` has data paths in an earlier run's job file, by the uri to which that run uploaded them.
    """
    # Only what differs from the defaults counts, so that a field of a later version changes no identity.
    defaults = Train(epochs=1).model_dump(mode="json", exclude=set(LENGTH_FIELDS))
    train = defaults
    if spec.train is not None:
        train = spec.train.model_dump(mode="json", exclude=set(LENGTH_FIELDS))
    identity = {
        "entry": spec.code.entry,
        "args": args,
        "data": {
            name: (uploaded or {}).get(channel.source, channel.source)
            for name, channel in spec.data.items()
        },
        "train": _without_defaults(train, defaults),
    }
    identity = {name: value for name, value in identity.items() if value}
    return decode_floats(load_json(dump_json(encode_floats(identity))))  # type: ignore[no-any-return]


def _without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _without_defaults(value, default)  # noqa: PLW2901 (reduced to its changes)
            default = {}
        if value != default:
            found[name] = value
    return found
