"""Record of the AWS calls in tests. `tests/infra` checks that the policies of infra/ allow these calls.

Each test session logs its AWS calls (tests/guard/recording.py). If a call is missing in infra/calls.json, the session
fails (tests/conftest.py). To update the record:

    PYTHONPATH=tests python -m support.aws_calls --write         run every test that calls AWS, write a new record
    PYTHONPATH=tests python -m support.aws_calls --add FOLDER    add the calls that an earlier session logged

Placeholders replace names that differ between accounts and runs: `{bucket}`, `{prefix}`, `{run}` and so on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "infra" / "calls.json"
RAW_FILE = "calls.jsonl"
CLIENT, CONTAINER, SERVICE, FUNCTION = "client", "container", "service", "function"
"""Callers: the SDK and the command line; the runtime in the container; SageMaker, which the sandbox replaces; the
function that continues chains in the account."""

_FOLDERS = ("sandbox", "sagemaker", "runtime", "local", "explain", "docs", "infra", "unit")
_RUN = r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*-(?:\d{6}-\d{6}-[0-9a-f]{6}|[0-9a-f]{10}(?:-\d+)?(?:-\d{3}-[0-9a-f]{8})?)"
"""A run id, the name of a tuning job, or that of one of its trials."""
_OWN_BUCKETS = re.compile(
    r"cloudtrain-(test|sandbox|[0-9a-f]{16})|full-[0-9a-f]{16}|vision-training-[0-9a-f]{16}"
)

_NOT_GRANTED = frozenset({("ce", "GetCostAndUsage")})
"""Calls that infra/ does not allow on purpose: it shows the bill of the whole account, and each call is billed."""

Raw = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Call:
    """One entry of the record: all calls with the same caller, operation, resource and fields.

    Attributes:
        who: The caller: `client`, `container` or `service`.
        service: botocore's name of the service.
        operation: Operation, such as `GetObject`.
        resource: Resource with placeholders in braces, or `*` for an operation without a resource.
        fields: Other parameters that permissions depend on, such as Tags.
        by: Verbs of the client, or parts of the runtime. Information for readers, not a part of the key.
    """

    who: str
    service: str
    operation: str
    resource: str
    fields: tuple[str, ...] = ()
    by: tuple[str, ...] = ()

    @property
    def key(self) -> Call:
        """This entry without `by`, as a dictionary key."""
        return replace(self, by=())

    def __str__(self) -> str:
        fields = f" with {', '.join(self.fields)}" if self.fields else ""
        return f"{self.who} ({', '.join(self.by)}): {self.service} {self.operation} on {self.resource}{fields}"


def read_record(path: Path = RECORD) -> dict[Call, Call]:
    """Return the calls of the record, by key."""
    calls = [
        Call(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in each.items()
            }
        )
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]
    return {call.key: call for call in calls}


def write_record(calls: Iterable[Call], path: Path = RECORD) -> None:
    """Write the record with one call in each line, so that diffs are readable."""
    lines = [
        json.dumps({name: value for name, value in vars(call).items() if value != ()})
        for call in sorted(calls)
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def calls_seen(folder: Path) -> dict[Call, Call]:
    """Return the calls that sessions have logged in a folder, by key."""
    found: dict[Call, Call] = {}
    path = folder / RAW_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        for call in read_raw(json.loads(line)):
            found[call.key] = _merge(found.get(call.key), call)
    return found


def unknown_calls(folder: Path) -> list[Call]:
    """Return the logged calls that are missing in the record."""
    known = read_record()
    return sorted(call for key, call in calls_seen(folder).items() if key not in known)


def _merge(one: Call | None, other: Call) -> Call:
    return replace(other, by=tuple(sorted({*(one.by if one else ()), *other.by})))


def read_raw(raw: Raw) -> Iterator[Call]:
    """Yield the calls of one log line: one for each resource, none for internal calls of the sandbox."""
    caller = _caller(raw)
    if raw["program"][0] == "lambda_runtime.py":
        caller = FUNCTION, "recover"
    if caller is None or (raw["service"], raw["operation"]) in _NOT_GRANTED:
        return
    who, part = caller
    for resource in sorted(set(_resources(raw, who))):
        yield Call(who, raw["service"], raw["operation"], resource, _fields(raw), (part,))


def _caller(raw: Raw) -> tuple[str, str] | None:
    # The sandbox's process only forwards calls, and a session makes clients for others, which read and write objects.
    passed = (
        "cloudtrain.backends.sandbox.process:",
        "cloudtrain.aws.session:",
        "cloudtrain.aws.s3_objects:",
        "cloudtrain.aws.s3_lock:",
    )
    stack = [each for each in raw["stack"] if not each.startswith(passed)]
    # A call of the sandbox counts as the sandbox's, also when it passes through other packages.
    stack = [each for each in stack if each.startswith("cloudtrain.backends.sandbox.")] or stack
    modules = [each.partition(":")[0] for each in stack]
    if not modules:
        return None
    if modules[0] == "cloudtrain.aws.s3_download" or "cloudtrain.runs.file_transfer" in modules:
        is_download = "cloudtrain.runs.file_transfer" in modules
        return (CLIENT, "download") if is_download else (CONTAINER, "channels of a local run")
    if modules[0].startswith("cloudtrain.backends.sandbox."):
        # In a transfer thread of boto3, the stack is that of the client's creation, in `server`. The server itself
        # reads and writes no objects.
        is_transfer = modules[0].endswith(".server") and "Key" in raw["parameters"]
        part = _SANDBOX["transfer"] if is_transfer else _SANDBOX.get(modules[0].rpartition(".")[2])
        return None if part is None else (SERVICE, part)
    if any(module == "cloudtrain_runtime.checkpoint.inspection" for module in modules):
        return CLIENT, "checkpoints"
    if modules[0].startswith("cloudtrain_runtime."):
        return CONTAINER, next(
            (part for name, part in _PARTS.items() if any(name in each for each in stack)), "other"
        )
    return CLIENT, _verb(raw, stack)


_SANDBOX = {
    "job_runner": "inputs and outputs",
    "s3_sync": "inputs and outputs",
    "transfer": "inputs and outputs",
    "training_job_operations": "inputs",
    "cloudwatch_logs": "logs",
    "endpoint_runner": "endpoints",
}
_PARTS = {
    "launcher.hang": "hang",
    "metrics.tracking.": "tracking",
    ".secrets": "secrets",
    "checkpoint": "checkpoints",
    "runtime.s3.": "checkpoints",
}


def _verb(raw: Raw, stack: list[str]) -> str:
    """Return the command that makes the call. Outside of a command, derive the verb from the stack."""
    program, *words = raw["program"]
    named = next((word for word in words if word in _COMMANDS), None)  # options may come first
    if program == "cloudtrain" and named is not None:
        return str(named)
    text = " ".join(stack)
    return next((verb for pattern, verb in _VERBS.items() if re.search(pattern, text)), "other")


_COMMANDS = {
    *(
        "check",
        "checkpoints",
        "configure",
        "download",
        "explain",
        "files",
        "follow",
        "list",
        "logs",
        "plan",
        "prices",
    ),
    *("compare", "costs", "deploy", "evaluate", "recover", "report", "serve", "sweep", "undeploy"),
    *("resume", "sandbox", "schema", "status", "stop", "submit", "validate"),
}
_VERBS = {
    r"serving\.endpoints|endpoint_billing:list_uses": "list",
    r"serving\.deployment:undeploy": "undeploy",
    r"cloudtrain\.serving\.": "deploy",
    r"configur|preflight\.account": "configure",
    r"preflight\.prices": "prices",
    r"preflight\.": "check",
    r"sagemaker\.(uploads|submit_lock|estimator|sdk)": "submit",
    r"\.(submit|_create|_upload|reserve|find_live|hand_over)\b": "submit",
    r"sagemaker\.log(s|_tail|_streams)\b": "logs",
    r"sagemaker\.listing|\.list\b": "list",
    r"\.end_warm_pool|\.stop\b": "stop",
    r"\.facts": "explain",
    r"\.plan_of|check_resume": "resume",
    r"checkpoint": "checkpoints",
    r"\.(status|has|_describe|describe|_look|_state)\b": "status",
    r"cloudtrain\.sweeps\.": "sweep",
    r"features\.recovery|account_chains|shared_folder": "recover",
}


def _resources(raw: Raw, who: str) -> list[str]:
    service, operation, parameters = raw["service"], raw["operation"], raw["parameters"]
    if service == "s3":
        bucket, prefix = parameters.get("Bucket"), parameters.get("Prefix", "")
        keys = parameters.get("Keys") or [parameters.get("Key")]
        is_data, is_saved = (
            any(name in each for each in raw["stack"]) for name in ("s3_download:", ".inspection:")
        )
        # The client downloads the channels of a local run; `checkpoints` reads them by their URI, as the container.
        by = CLIENT if is_data and who == CONTAINER else CONTAINER if is_saved else who
        is_read = operation.startswith(("Get", "Head", "List"))
        return [_s3_resource(bucket, key, prefix, by, is_read=is_read) for key in keys]
    find = _NAMED.get((service, operation))
    return [find(parameters)] if find else ["*"]


def _fields(raw: Raw) -> tuple[str, ...]:
    names = ("Tags", "tags", "ServerSideEncryption", "SSEKMSKeyId", "ACL", "VersionId", "Tagging")
    return tuple(name for name in names if name in raw["parameters"].get("", ()))


def _s3_resource(
    bucket: str | None, key: str | None, prefix: str, who: str, *, is_read: bool
) -> str:
    """Return the object of a call, or the bucket if the call has no key.

    Tests choose any URI for the checkpoints of a container and for a user's data, so these cannot be recognised by
    their names.
    """
    if bucket is None:
        return "*"
    known = _in_layout(key if key is not None else prefix)
    if key is None:
        is_data = who == SERVICE and prefix and known is None
        is_own = not is_data and (who == CONTAINER or _OWN_BUCKETS.fullmatch(bucket) is not None)
        return "{bucket}" if known is not None or is_own else "{data-bucket}"
    if known is not None:
        return f"{{bucket}}/{{prefix}}/{known}"
    if who == CONTAINER or (who == SERVICE and not is_read):
        return "{bucket}/{prefix}/{elsewhere}/checkpoints/*"
    return "{data}/*/manifest.json" if key.endswith("/manifest.json") else "{data}/*"


def _in_layout(key: str) -> str | None:
    """Return the form of a key of `cloudtrain.planning.storage_layout`, or None for another key."""
    for pattern, form in _LAYOUT.items():
        if re.search(pattern, key):
            return form
    return None


_LAYOUT = {
    r"(^|/)checkpoints/hang/": "{run}/checkpoints/hang/*",
    r"(^|/)code/([0-9a-f]{16,}/|[^/]+\.tar\.gz$)": "code/*",
    r"(^|/)requests/[0-9a-f]{8,}\.json$": "requests/*",
    r"(^|/)packages/": "packages/*",
    r"(^|/)queues/": "queues/*",
    r"(^|/)sweeps/": "sweeps/*",
    r"(^|/)chains/": "chains/*",
    rf"(^|/){_RUN}/config/run\.json$": "{run}/config/run.json",
    rf"(^|/){_RUN}/config(/|$)": "{run}/config/*",
    rf"(^|/){_RUN}/plan\.json$": "{run}/plan.json",
    rf"(^|/){_RUN}/data/": "{run}/data/*",
    rf"(^|/){_RUN}/evaluations(/|$)": "{run}/evaluations/*",
    rf"(^|/){_RUN}/steps/checkpoints(/|$)": "{run}/steps/checkpoints/*",
    rf"(^|/){_RUN}/checkpoints(/|$)": "{run}/checkpoints/*",
    r"/output/((model|output)\.tar\.gz$|model/)": "{run}/output/*",
    r"/tensorboard": "{run}/tensorboard/*",
}


def _repository(name: str) -> str:
    return f"repository/{name}" if name in ("pytorch", "pytorch-training") else "repository/{image}"


def _role(arn: str) -> str:
    return "user/{caller}" if ":user/" in arn else "role/{role}"


_JOB = "training-job/{run}"
_TUNING = "hyper-parameter-tuning-job/{run}"
_ENDPOINT_PARTS = {
    "Model": "model/{run}",
    "EndpointConfig": "endpoint-config/{run}",
    "Endpoint": "endpoint/{run}",
}
_STREAM = "log-group:/aws/sagemaker/TrainingJobs:log-stream:{run}"
_GROUP = "log-group:/aws/sagemaker/TrainingJobs"
_NAMED: Mapping[tuple[str, str], Any] = {
    **{
        ("sagemaker", f"{name}TrainingJob"): lambda parameters: _JOB
        for name in ("Create", "Describe", "Stop", "Update")
    },
    **{
        ("sagemaker", f"{name}HyperParameterTuningJob"): lambda parameters: _TUNING
        for name in ("Create", "Describe", "Stop", "ListTrainingJobsFor")
    },
    ("sagemaker", "DescribeTrainingPlan"): lambda parameters: "training-plan/{plan}",
    **{
        ("sagemaker", f"{verb}{kind}"): lambda parameters, resource=resource: resource
        for kind, resource in _ENDPOINT_PARTS.items()
        for verb in ("Create", "Describe", "Delete")
    },
    ("sagemaker-runtime", "InvokeEndpoint"): lambda parameters: _ENDPOINT_PARTS["Endpoint"],
    **{
        ("application-autoscaling", operation): lambda parameters: "scalable-target/{target}"
        for operation in ("RegisterScalableTarget", "PutScalingPolicy", "DeregisterScalableTarget")
    },
    ("sagemaker", "ListTags"): lambda parameters: (
        _ENDPOINT_PARTS["Endpoint"] if ":endpoint/" in parameters.get("ResourceArn", "") else _JOB
    ),
    ("sagemaker", "AddTags"): lambda parameters: _JOB,
    ("logs", "DescribeLogStreams"): lambda parameters: _GROUP,
    ("logs", "CreateLogGroup"): lambda parameters: _GROUP,
    ("logs", "CreateLogStream"): lambda parameters: _STREAM,
    ("logs", "PutLogEvents"): lambda parameters: _STREAM,
    ("logs", "GetLogEvents"): lambda parameters: _STREAM,
    ("iam", "GetRole"): lambda parameters: "role/{role}",
    ("iam", "SimulatePrincipalPolicy"): lambda parameters: _role(
        parameters.get("PolicySourceArn", "")
    ),
    ("ecr", "BatchGetImage"): lambda parameters: _repository(parameters.get("repositoryName", "")),
    ("batch", "SubmitServiceJob"): lambda parameters: "job-queue/{queue}",
    ("batch", "ListServiceJobs"): lambda parameters: "job-queue/{queue}",
    ("batch", "GetJobQueueSnapshot"): lambda parameters: "job-queue/{queue}",
    ("batch", "DescribeServiceJob"): lambda parameters: "service-job/{job}",
    ("batch", "TerminateServiceJob"): lambda parameters: "service-job/{job}",
    ("budgets", "DescribeBudgets"): lambda parameters: "budget/*",
    ("fsx", "DescribeFileSystems"): lambda parameters: "file-system/{file-system}",
    ("efs", "DescribeMountTargets"): lambda parameters: "file-system/{file-system}",
    ("efs", "DescribeMountTargetSecurityGroups"): lambda parameters: "file-system/{file-system}",
    ("secretsmanager", "DescribeSecret"): lambda parameters: "{secret}",
    ("secretsmanager", "GetSecretValue"): lambda parameters: "{secret}",
}


def main(arguments: list[str]) -> int:
    """Update the record; return the exit code."""
    match arguments:
        case ["--write"]:
            with tempfile.TemporaryDirectory() as folder:
                code = _run_tests(Path(folder))
                write_record(calls_seen(Path(folder)).values())
            return code
        case ["--add", folder]:
            known = read_record()
            for key, call in calls_seen(Path(folder)).items():
                known[key] = _merge(known.get(key), call)
            write_record(known.values())
            return 0
    print(__doc__, file=sys.stderr)
    return 2


def _run_tests(folder: Path) -> int:
    tests = Path(__file__).parents[1]
    environ = {**os.environ, "CLOUDTRAIN_TEST_RECORD": str(folder)}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--numprocesses",
            "2",
            *(str(tests / each) for each in _FOLDERS),
        ],
        check=False,
        env=environ,
        cwd=tests.parent,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
