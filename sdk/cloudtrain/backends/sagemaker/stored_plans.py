"""Plans and configurations of submitted runs, read from S3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_objects import find_json
from cloudtrain.errors import CloudError, UnreachableError, UserError
from cloudtrain.planning.plan_file import PLAN_FILE
from cloudtrain.runs.run_files import CONFIG, PLAN, read_fields
from cloudtrain_runtime.contract import CONFIG_CHANNEL, CONFIG_FILE, RunConfig
from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.contract.trial import apply_trial, read_values, uri_of_trial


class StoredPlans:
    """The files that a submit has stored for its run. `client` returns a boto3 client by the name of its service."""

    def __init__(self, client: Callable[[str], Any]) -> None:
        self._client = client
        self._world_sizes: dict[str, int | None] = {}

    def read_plan(self, run: str, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the plan.json of a run with the description of its training job.

        Raises:
            UserError: there is none, because something else submitted the job or deleted the file.
            CloudError: AWS refused or cannot be reached.
        """
        folder = _config_folder(job)
        hint = "submit its job: cloudtrain submit JOB"
        if not folder:
            raise UserError(f"{run} was not submitted by cloudtrain", hint)
        uri = f"{folder.rpartition('/')[0]}/{PLAN_FILE}"
        content = self._read_json(uri)
        if content is None:
            raise UserError(f"the plan of {run} does not exist any more: {uri}", hint)
        return read_fields(_of_trial(content, run, job), PLAN)

    def read_config(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the run.json of a job; empty if it cannot be read."""
        folder = _config_folder(job)
        try:
            content = self._read_json(f"{folder}/{CONFIG_FILE}") or {} if folder else {}
        except CloudError:
            return {}
        of_trial = _of_trial({"config": content}, str(job.get("TrainingJobName", "")), job)
        return read_fields(of_trial["config"], CONFIG)

    def planned_world_size(self, run: str, job: Mapping[str, Any]) -> int | None:
        """Return the number of ranks in a run's plan, or None if the plan cannot be read. The plan is read once."""
        if run not in self._world_sizes:
            try:
                cluster = self.read_plan(run, job).get("cluster")
            except UnreachableError:
                return None
            except (CloudError, UserError):
                cluster = None
            world_size = cluster.get("world_size") if isinstance(cluster, Mapping) else None
            self._world_sizes[run] = (
                world_size if isinstance(world_size, int) and world_size > 0 else None
            )
        return self._world_sizes[run]

    def _read_json(self, uri: str) -> Mapping[str, Any] | None:
        """Return a JSON object in S3; None if there is none, and an empty one if another program wrote it."""
        with aws_errors(f"read {uri}"):
            return find_json(self._client("s3"), uri)


def _of_trial(plan: Mapping[str, Any], run: str, job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a plan.json with the values of a trial, which shares the stored file with the others of its tuning job."""
    if "TuningJobArn" not in job:
        return plan
    try:
        shared = RunConfig.from_json(dump_json(plan["config"]))
        config = apply_trial(shared, job["HyperParameters"], run)
    except (ValueError, KeyError, TypeError):
        return plan
    values = read_values(shared.searched, job["HyperParameters"])
    changed = {**plan, "run": run, "config": load_json(config.to_json())}
    if "job" in plan:
        changed["job"] = _with_values(plan["job"], values)
    if "checkpoint" in plan:
        uri = uri_of_trial(plan["checkpoint"]["uri"], shared.run, run)
        changed["checkpoint"] = {**plan["checkpoint"], "uri": uri}
    return changed


def _with_values(job: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document of a job with values by path, such as `train.learning_rate`."""
    changed: dict[str, Any] = load_json(dump_json(job))
    for path, value in values.items():
        *above, last = path.split(".")
        target = changed
        for part in above:
            target = target.setdefault(part, {})
        target[last] = value
    return changed


def _config_folder(job: Mapping[str, Any]) -> str:
    """Return the URI of a job's configuration without a trailing slash, or an empty string if it has none.

    The requests of version 0.1 have no such channel.
    """
    channels = {channel["ChannelName"]: channel for channel in job.get("InputDataConfig", [])}
    source = channels.get(CONFIG_CHANNEL, {}).get("DataSource", {}).get("S3DataSource", {})
    return str(source.get("S3Uri", "")).rstrip("/")
