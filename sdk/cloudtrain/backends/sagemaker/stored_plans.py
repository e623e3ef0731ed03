"""Plans and configurations of submitted runs, read from S3."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.backends.sagemaker.batch_queue import PLAN_FILE
from cloudtrain.errors import CloudError, UnreachableError, UserError
from cloudtrain.runs.run_files import CONFIG, PLAN, read_fields
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract import CONFIG_CHANNEL, CONFIG_FILE


class StoredPlans:
    """The files that a submit has stored for its run.

    Args:
        client: Returns a boto3 client by the name of its service.
    """

    def __init__(self, client: Callable[[str], Any]) -> None:
        self._client = client
        self._world_sizes: dict[str, int | None] = {}

    def read_plan(self, run: str, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the plan.json of a run.

        Args:
            run: Run id.
            job: The description of its training job.

        Raises:
            UserError: there is none, because something else submitted the job or deleted the file.
            CloudError: AWS refused or cannot be reached.
        """
        from botocore.exceptions import ClientError

        folder = _config_folder(job)
        if not folder:
            raise UserError(f"{run} was not submitted by cloudtrain", "submit its job: cloudtrain submit JOB")
        uri = f"{folder.rpartition('/')[0]}/{PLAN_FILE}"
        try:
            return read_fields(self._read_json(uri), PLAN)
        except CloudError as error:
            if isinstance(error.__context__, ClientError) and "NoSuchKey" in error.message:
                raise UserError(
                    f"the plan of {run} does not exist any more: {uri}", "submit its job: cloudtrain submit JOB"
                ) from None
            raise

    def read_config(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the run.json of a job; empty if it cannot be read."""
        folder = _config_folder(job)
        try:
            return read_fields(self._read_json(f"{folder}/{CONFIG_FILE}"), CONFIG) if folder else {}
        except CloudError:
            return {}

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
            self._world_sizes[run] = world_size if isinstance(world_size, int) and world_size > 0 else None
        return self._world_sizes[run]

    def _read_json(self, uri: str) -> Mapping[str, Any]:
        bucket, key = split_uri(uri)
        with aws_errors(f"read {uri}"):
            body = self._client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return {}  # another program wrote it
        return content if isinstance(content, dict) else {}


def _config_folder(job: Mapping[str, Any]) -> str:
    """Return the URI of a job's configuration without a trailing slash, or an empty string if it has none.

    The requests of version 0.1 have no such channel.
    """
    channels = {channel["ChannelName"]: channel for channel in job.get("InputDataConfig", [])}
    source = channels.get(CONFIG_CHANNEL, {}).get("DataSource", {}).get("S3DataSource", {})
    return str(source.get("S3Uri", "")).rstrip("/")
