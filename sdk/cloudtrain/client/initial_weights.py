"""The run or path that `train.init_from` names, replaced by its uri."""

from __future__ import annotations

from collections.abc import Callable

from cloudtrain.errors import SpecError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.storage_layout import ResumeSource, local_uri
from cloudtrain.support.run_id import is_run_id


def locate_initial_weights(spec: JobSpec, find_saved: Callable[[JobSpec, str], ResumeSource | None]) -> JobSpec:
    """Return a job whose `train.init_from` is a uri; one that names an unknown run stays as it is.

    Args:
        spec: The job.
        find_saved: Returns where a run, `RUN` or `<backend>:RUN`, saves its checkpoints; None where it is unknown.

    Raises:
        SpecError: Other runs may save to the folder of that run, too.
    """
    train = spec.train
    if train is None or train.init_from is None:
        return spec
    uri = train.init_from
    if not is_run_id(run := uri.rpartition(":")[2]):
        uri = local_uri(spec, uri)
    else:
        found = find_saved(spec, uri)
        if found is None:
            return spec
        uri = found.checkpoints
        if run not in uri:
            hint = f"name one of its checkpoints, {uri}/step-...; see: cloudtrain checkpoints {run}"
            message = f"{run} saves to a folder that other runs may share"
            raise SpecError([spec.problem("train.init_from", message, hint)])
    return spec.model_copy(update={"train": train.model_copy(update={"init_from": uri})})
