"""Checks of a job that only a plan for this machine needs."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.script_conventions import ScriptConventions
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import decision, error, warning
from cloudtrain.planning.placement import TORCH_DISTRIBUTED, Machine

_MOST_NAMED = 3


def check_local(spec: JobSpec, conventions: ScriptConventions, machine: Machine) -> Iterator[Diagnostic]:
    """Check that a job can run on this machine, and describe what differs from SageMaker."""
    if spec.cluster.distribution not in ("auto", TORCH_DISTRIBUTED):
        yield warning(
            f"{spec.cluster.distribution} uses AWS's mpirun and SMDDP on SageMaker; a local run uses torchrun, and "
            "Gloo or NCCL"
        )
    for name, channel in spec.data.items():
        if channel.mode == "Pipe" and spec.train is None:  # `check_abilities` rejects it for a Task
            yield error(("data", name, "mode"), "local runs do not support Pipe mode", "use File or FastFile")
    if (spec.checkpoint.uri or "").startswith("s3://") and spec.code.script is not None:
        message = "a script's checkpoints stay on this machine in a local run"
        yield error(("checkpoint", "uri"), message, "leave it out: --set checkpoint.uri=null")
    yield from _describe_ml_root(conventions, machine)
    if conventions.spawn is not None and spec.code.script is not None and spec.cluster.instances > 1:
        yield warning(
            f"{conventions.spawn}: names such as algo-1 do not resolve in a local run; use the first host's address "
            "in MASTER_ADDR, which is set here and on SageMaker"
        )
    if spec.cluster.queue is not None:
        yield warning("cluster.queue has no effect on a local run")
    for name, reference in spec.code.secrets.items():
        if name in machine.variables:
            yield decision(
                f"{name} is set on this machine: its value is used, and the secret {reference.secret} is not read"
            )


def _describe_ml_root(conventions: ScriptConventions, machine: Machine) -> Iterator[Diagnostic]:
    """Describe how `/opt/ml` is provided, and warn about paths in the code that will not exist."""
    if machine.has_ml_namespace:
        yield decision("/opt/ml is the run's own folder everywhere: each instance has a mount namespace")
        return
    yield decision("/opt/ml is the run's own folder in code.args and code.env only: there is no mount namespace here")
    if conventions.ml_paths:
        named = ", ".join(conventions.ml_paths[:_MOST_NAMED])
        more = f" and {len(conventions.ml_paths) - _MOST_NAMED} more" if len(conventions.ml_paths) > _MOST_NAMED else ""
        yield warning(
            f"{named}{more}: /opt/ml in the code is this machine's own in a local run, because the machine allows no "
            "mount namespace. Read SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and SM_CHANNEL_<NAME>, which are right everywhere"
        )
