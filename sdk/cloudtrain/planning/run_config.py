"""The configuration that the container reads (`run.json`)."""

from __future__ import annotations

from cloudtrain.job.arguments import script_argv
from cloudtrain.job.sections.train import Train
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import ClusterPlan, CodeInfo
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.planning.targets import Target
from cloudtrain.planning.training_identity import identify_training
from cloudtrain_runtime.contract import CheckpointConfig, EarlyStopping, ParallelConfig, RunConfig, TrainConfig


def decide_run_config(
    spec: JobSpec,
    code: CodeInfo,
    target: Target,
    cluster: ClusterPlan,
    *,
    resumed: ResumeSource | None,
    local_rank_option: str | None,
) -> RunConfig:
    """Return the configuration of a run, without its id, the plan's identity and the uri of its checkpoints.

    Args:
        spec: The job.
        code: The code.
        target: Where the run takes place.
        cluster: Instances and ranks.
        resumed: The checkpoints that `checkpoint.resume` names.
        local_rank_option: Option through which the script receives its local rank, or None.
    """
    given = spec.code.args
    args = dict(given) if spec.code.task is not None and isinstance(given, dict) else script_argv(given)
    return RunConfig(
        run="",
        task=spec.code.task,
        script=spec.code.script,
        args=args,
        requirements=spec.code.requirements,
        processes_per_instance=cluster.processes_per_instance,
        distribution=cluster.distribution,
        max_restarts=spec.limits.retries,
        train=None if spec.train is None else _train(spec.train, tensorboard=spec.tracking.tensorboard),
        checkpoint=_checkpoint(spec, resumed),
        code=code.digest,
        hang_seconds=None if spec.limits.hang is None else float(spec.limits.hang),
        network_gbps=target.network_gbps(spec),
        local_rank_option=local_rank_option,
        secrets=dict(sorted(spec.code.secrets.items())),
        bucket_owners=target.settings.bucket_owners,
        outputs=list(spec.code.outputs),
        starts_ranks=code.conventions.starts_ranks,
        training=identify_training(spec, args, resumed.uploaded if resumed is not None else None),
    )


def _checkpoint(spec: JobSpec, resumed: ResumeSource | None) -> CheckpointConfig:
    checkpoint = spec.checkpoint
    # An isolated container has only /opt/ml/checkpoints, into which SageMaker downloads what it resumes from.
    source = None if spec.cluster.network.isolation else resumed
    default = "auto" if spec.cluster.network.isolation else checkpoint.resume
    return CheckpointConfig(
        uri="",
        every_seconds=checkpoint.every.seconds,
        every_steps=checkpoint.every.steps,
        keep=checkpoint.keep,
        resume=default if source is None else source.checkpoints,
        resume_run="" if source is None else source.run,
    )


def _train(train: Train, *, tensorboard: bool) -> TrainConfig:
    nested = {"parallel", "warmup", "evaluate", "early_stopping", "profile"}
    bucket = train.parallel.bucket
    return TrainConfig(
        **train.model_dump(exclude=nested),
        parallel=ParallelConfig(
            **train.parallel.model_dump(exclude={"bucket"}), bucket_bytes=None if bucket is None else bucket * 10**6
        ),
        warmup_steps=train.warmup.steps or 0 if train.warmup else 0,
        evaluate_every_steps=train.evaluate.every.steps if train.evaluate else None,
        early_stopping=EarlyStopping(**train.early_stopping.model_dump()) if train.early_stopping else None,
        profile_at=train.profile.at if train.profile else None,
        profile_steps=train.profile.steps if train.profile else 0,
        tensorboard=tensorboard,
    )
