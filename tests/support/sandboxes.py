"""Sandboxes that tests start and send requests to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from support.jobs import command, until

GRACE_SECONDS = 30
"""From SIGTERM to SIGKILL. The launcher ends the ranks 20 s earlier, so they have 10 s to save."""
FINAL = ("Completed", "Failed", "Stopped")
_creates_client = Lock()


@dataclass(frozen=True)
class Served:
    """A running sandbox.

    Attributes:
        process: Process of the command.
        info: The JSON object that the command prints.
        home: Folder of the sandbox.
    """

    process: subprocess.Popen[str]
    info: Mapping[str, Any]
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a client."""
        return dict(self.info["environment"])

    @property
    def port(self) -> int:
        """Port on loopback."""
        return int(self.info["endpoint"].rpartition(":")[2])

    @property
    def authorization(self) -> str:
        """Authorization header with its access key; the sandbox does not verify signatures."""
        key = self.environment["AWS_ACCESS_KEY_ID"]
        return f"AWS4-HMAC-SHA256 Credential={key}/20261122/us-west-2/sandbox/aws4_request, Signature=none"

    @cached_property
    def _session(self) -> Any:
        """The session of all clients: it parses the model of a service once, which takes 0.1 s."""
        import boto3

        return boto3.Session(
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=self.environment["AWS_DEFAULT_REGION"],
        )

    def client(self, service: str) -> Any:
        """Return a boto3 client of this sandbox that does not retry."""
        from botocore.config import Config

        config = Config(retries={"total_max_attempts": 1})
        with _creates_client:  # a session is not safe for threads
            return self._session.client(service, endpoint_url=self.info["endpoint"], config=config)

    def set_faults(self, **faults: Any) -> None:
        """Replace the fault plan; without arguments, inject no faults."""
        address = f"{self.info['endpoint']}/_cloudtrain/faults"
        request = urllib.request.Request(address, data=json.dumps(faults).encode(), method="PUT")  # noqa: S310
        request.add_header("Authorization", self.authorization)
        urllib.request.urlopen(request).close()  # noqa: S310 (loopback)

    def create(self, name: str, script: str, **fields: Any) -> str:
        """Create a training job that runs a shell script on each instance; return its name."""
        self.client("sagemaker").create_training_job(**request(self, name, script, **fields))
        return name

    def describe(self, name: str) -> dict[str, Any]:
        """Return the response of DescribeTrainingJob."""
        response: dict[str, Any] = self.client("sagemaker").describe_training_job(
            TrainingJobName=name
        )
        return response

    def end_of(self, name: str) -> dict[str, Any]:
        """Wait until a job has ended; return its description."""
        until(lambda: self.describe(name)["TrainingJobStatus"] in FINAL)
        return self.describe(name)

    def secondary(self, name: str, wanted: str) -> None:
        """Wait until a job is in a secondary status."""
        until(lambda: self.describe(name)["SecondaryStatus"] == wanted)

    def lines(self, name: str, host: str = "algo-1") -> list[str]:
        """Return the log of a host, over all its streams."""
        logs = self.client("logs")
        group = "/aws/sagemaker/TrainingJobs"
        streams = logs.describe_log_streams(
            logGroupName=group, logStreamNamePrefix=f"{name}/{host}-"
        )["logStreams"]
        return [
            event["message"]
            for stream in sorted(stream["logStreamName"] for stream in streams)
            for event in logs.get_log_events(
                logGroupName=group, logStreamName=stream, startFromHead=True
            )["events"]
        ]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with a prefix in the sandbox's bucket."""
        found = self.client("s3").list_objects_v2(Bucket=self.info["bucket"], Prefix=prefix)
        return [entry["Key"] for entry in found.get("Contents", [])]


def request(served: Served, name: str, script: str, **fields: Any) -> dict[str, Any]:
    """Return a CreateTrainingJob request that runs a shell script on each instance."""
    stopping = {"MaxRuntimeInSeconds": 600, **fields.pop("StoppingCondition", {})}
    resources = {
        "InstanceType": "ml.m5.large",
        "InstanceCount": fields.pop("instances", 1),
        "VolumeSizeInGB": 10,
    }
    return {
        "TrainingJobName": name,
        "RoleArn": served.info["role"],
        "AlgorithmSpecification": {
            "TrainingImage": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.5.1-cpu-py311",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/sh", "-c", 'eval "$SCRIPT"'],
            "MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
        },
        "OutputDataConfig": {"S3OutputPath": f"s3://{served.info['bucket']}/out"},
        "ResourceConfig": resources,
        "StoppingCondition": stopping,
        "Environment": {"SCRIPT": script, **fields.pop("Environment", {})},
        **fields,
    }


RUN_ALL = """
import json, os, sys
from pathlib import Path
from cloudtrain.backends.container.job import run_job
from cloudtrain.backends.container.job_folder import JobFolder
for folder in map(Path, sys.argv[1:]):
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CLOUDTRAIN_STOP_GRACE_SECONDS": "1"}
    request = json.loads((folder / "request.json").read_text())
    outcome = run_job(request, JobFolder(folder), stop_reason=lambda: "", environ=environ)
    (folder / "outcome.json").write_text(json.dumps([str(outcome.state), outcome.reason]))
"""


def run_here(folders: list[Path], environment: Mapping[str, str]) -> None:
    """Run the requests in folders as the local backend does, one after another in one child process."""
    command = [sys.executable, "-P", "-c", RUN_ALL, *map(str, folders)]
    subprocess.run(command, check=True, env={**os.environ, **environment})


@contextmanager
def serve(home: Path, *arguments: str) -> Iterator[Served]:
    """Start a sandbox with the command; stop it as Ctrl-C does."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [
                str(command()),
                "sandbox",
                "--home",
                str(home),
                "--grace",
                str(GRACE_SECONDS),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "HOME": str(home)},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (home / "stderr").read_text()
        yield Served(process, json.loads(line), home)
    finally:
        process.terminate()
        process.wait(300)
        process.stdout.close()


def statuses(description: Mapping[str, Any]) -> list[str]:
    """Return the secondary statuses that a job has gone through."""
    return [entry["Status"] for entry in description["SecondaryStatusTransitions"]]


def unknown_fields(response: Any, shape: Any, path: str = "") -> list[str]:
    """Return the paths of values in a response that are missing in its output shape, or that have another type."""
    if shape.type_name == "structure":
        if not isinstance(response, dict):
            return [path]
        found = [f"{path}.{name}" for name in response if name not in shape.members]
        known = {name: value for name, value in response.items() if name in shape.members}
        return found + [
            bad
            for name, value in known.items()
            for bad in unknown_fields(value, shape.members[name], f"{path}.{name}")
        ]
    if shape.type_name == "list":
        return [bad for item in response for bad in unknown_fields(item, shape.member, f"{path}[]")]
    if shape.type_name == "map":
        return [
            bad
            for item in response.values()
            for bad in unknown_fields(item, shape.value, f"{path}{{}}")
        ]
    if getattr(shape, "enum", None):
        return [] if response in shape.enum else [f"{path}={response}"]
    kinds = {
        "string": str,
        "integer": int,
        "long": int,
        "boolean": bool,
        "float": float,
        "timestamp": object,
    }
    return [] if isinstance(response, kinds[shape.type_name]) else [path]


def model_of(operation: str) -> Any:
    """Return botocore's model of an operation."""
    import botocore.session

    return botocore.session.get_session().get_service_model("sagemaker").operation_model(operation)
