"""Checks of a job that only a plan for a Slurm cluster needs."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.diagnostics import decision, error, warning
from cloudtrain.planning.placement import TORCH_DISTRIBUTED, Machine
from cloudtrain.planning.target_checks import check_folder_data, name_paths
from cloudtrain.planning.tracking import check_node_tracking

_OF_SAGEMAKER = (
    *("prefer", "training_plan", "spot", "framework", "image", "volume", "keep_alive"),
    *("max_pending", "queue", "remote_debug", "health_check", "network"),
)
"""Fields of `cluster` that have no meaning on Slurm."""


def check_job(
    spec: JobSpec,
    conventions: ScriptConventions,
    node: Machine,
    python: str,
    *,
    installs: bool = False,
    is_own_python: bool = True,
) -> Iterator[Diagnostic]:
    """Check that a job can run on a Slurm cluster, and describe what differs from SageMaker.

    Args:
        spec: The job.
        conventions: How its script expects to be started.
        node: A node of the cluster.
        python: Absolute path of the Python on the nodes.
        installs: Whether the run uses an environment with its requirements.
        is_own_python: Whether the Python on the nodes is the one that submits.
    """
    if spec.cluster.distribution not in ("auto", TORCH_DISTRIBUTED):
        yield warning(
            f"{spec.cluster.distribution} uses AWS's mpirun and SMDDP on SageMaker; a run on Slurm uses torchrun, and "
            "Gloo or NCCL"
        )
    yield from _warn_of_ignored(spec)
    yield from check_folder_data(
        spec, "runs on Slurm", "a run on Slurm", "use a folder that all nodes share"
    )
    if (spec.checkpoint.uri or "").startswith("s3://") and spec.code.task is None:
        message = "a script's checkpoints stay in the run's folder on Slurm"
        yield error(("checkpoint", "uri"), message, "leave it out: --set checkpoint.uri=null")
    if installs:
        yield from _describe_installation(spec, python, is_own_python=is_own_python)
    elif spec.code.requirements is not None:
        yield decision(
            f"{spec.code.requirements} is not installed: the run uses the packages of {python} (or submit with --install)"
        )
    yield from _describe_ml_root(conventions)
    yield from _warn_of_idle_gpus(spec, conventions, node)
    yield from check_node_tracking(spec, node)


def _describe_installation(
    spec: JobSpec, python: str, *, is_own_python: bool
) -> Iterator[Diagnostic]:
    if spec.code.requirements is None:
        yield warning("--install installs nothing: the job has no code.requirements")
    elif is_own_python:
        yield decision(
            f"{spec.code.requirements} is installed once, in an environment in the shared folder, beside the packages of {python}"
        )
    else:
        message = f"--install cannot add to {python}, the Python of the site"
        yield error(
            ("code", "requirements"), message, "install them there, and submit without --install"
        )


def _warn_of_ignored(spec: JobSpec) -> Iterator[Diagnostic]:
    given = [
        f"cluster.{name}"
        for name in _OF_SAGEMAKER
        if _is_given(spec.cluster.model_fields_set, name, spec)
    ]
    if spec.output.uri is not None:
        given.append("output.uri")
    if spec.notify is not None:
        given.append("notify")
    if spec.request:
        given.append("request")
    if len(given) == 1:
        yield warning(f"{given[0]} is ignored: it is for SageMaker, and this run is on Slurm")
    elif given:
        names = f"{', '.join(given[:-1])} and {given[-1]}"
        yield warning(f"{names} are ignored: they are for SageMaker, and this run is on Slurm")


def _is_given(fields: set[str], name: str, spec: JobSpec) -> bool:
    return name in fields and getattr(spec.cluster, name) not in (None, False, ())


def _describe_ml_root(conventions: ScriptConventions) -> Iterator[Diagnostic]:
    yield decision(
        "/opt/ml is the run's own folder in code.args and code.env, and on nodes that allow mount namespaces everywhere"
    )
    if conventions.ml_paths:
        named = name_paths(conventions.ml_paths)
        yield warning(
            f"{named}: a node that allows no mount namespace has no such folder. Read SM_MODEL_DIR, SM_OUTPUT_DATA_DIR "
            "and SM_CHANNEL_<NAME>, which are right everywhere"
        )


def _warn_of_idle_gpus(
    spec: JobSpec, conventions: ScriptConventions, node: Machine
) -> Iterator[Diagnostic]:
    processes = spec.cluster.processes_per_instance
    if processes == "auto" or spec.code.command is not None or conventions.starts_ranks:
        return
    if processes < node.gpus and not conventions.splits_batches:
        yield warning(
            f"cluster.processes_per_instance: {processes} of the {node.gpus} GPUs of a node are used"
        )
