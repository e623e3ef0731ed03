"""The calls to AWS that the end-to-end tests make, as a record that the policies of infra/ are proven against.

Each session of the tests writes down what it calls (tests/guard/recording.py). A call that infra/calls.json does not
have fails the session, see conftest.py. To bring the record up to date:

    PYTHONPATH=tests python -m support.aws_calls --write         run every test that calls AWS, write a new record
    PYTHONPATH=tests python -m support.aws_calls --add FOLDER    add the calls of an earlier session of the tests

Names that differ between accounts and runs are put in braces: `{bucket}`, `{prefix}`, `{run}` and so on.
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
CLIENT, CONTAINER, SERVICE = "client", "container", "service"
"""Who calls: the SDK and the command line; the runtime in the container; SageMaker, whose place the sandbox takes."""

_FOLDERS = ("sandbox", "sagemaker", "runtime", "local", "explain", "docs", "infra", "unit")
_RUN = r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*-\d{6}-\d{6}-[0-9a-f]{6}"
_OWN_BUCKETS = re.compile(r"cloudtrain-(test|sandbox|[0-9a-f]{16})|whole-[0-9a-f]{16}|vision-training-[0-9a-f]{16}")

Raw = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Call:
    """What is known of all calls of a kind.

    Attributes:
        who: `client`, `container` or `service`.
        service: As botocore names it; `s3torchconnector` for what goes past botocore.
        operation: Such as `GetObject`.
        resource: What it is about, with names in braces; `*` where it is about nothing in particular.
        fields: Parameters that decide about permissions beside the resource, such as Tags.
        by: Verbs of the client, or parts of the runtime. For the reader: it does not tell one call from another.
    """

    who: str
    service: str
    operation: str
    resource: str
    fields: tuple[str, ...] = ()
    by: tuple[str, ...] = ()

    @property
    def key(self) -> Call:
        """What tells it from others."""
        return replace(self, by=())

    def __str__(self) -> str:
        fields = f" with {', '.join(self.fields)}" if self.fields else ""
        return f"{self.who} ({', '.join(self.by)}): {self.service} {self.operation} on {self.resource}{fields}"


def read_record(path: Path = RECORD) -> dict[Call, Call]:
    """Return the calls of the record, by key."""
    calls = [
        Call(**{name: tuple(value) if isinstance(value, list) else value for name, value in each.items()})
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]
    return {call.key: call for call in calls}


def write_record(calls: Iterable[Call], path: Path = RECORD) -> None:
    """Write calls down, one a line, so that a change of the record can be read."""
    lines = [json.dumps({name: value for name, value in vars(call).items() if value != ()}) for call in sorted(calls)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def calls_seen(folder: Path) -> dict[Call, Call]:
    """Return what sessions have written down in a folder, by key."""
    found: dict[Call, Call] = {}
    path = folder / RAW_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        for call in read_raw(json.loads(line)):
            found[call.key] = _joined(found.get(call.key), call)
    return found


def unknown_calls(folder: Path) -> list[Call]:
    """Return what was seen and is not in the record."""
    known = read_record()
    return sorted(call for key, call in calls_seen(folder).items() if key not in known)


def _joined(one: Call | None, other: Call) -> Call:
    return replace(other, by=tuple(sorted({*(one.by if one else ()), *other.by})))


# ---------------------------------------------------------------- who calls


def read_raw(raw: Raw) -> Iterator[Call]:
    """Yield what a line of the recording means: a call for each resource, none for what is the sandbox's own."""
    caller = _caller(raw)
    if caller is None:
        return
    who, part = caller
    for resource in sorted(set(_resources(raw, who))):
        yield Call(who, raw["service"], raw["operation"], resource, _fields(raw), (part,))


def _caller(raw: Raw) -> tuple[str, str] | None:
    # A session of the sandbox only hands calls on.
    stack = [each for each in raw["stack"] if not each.startswith("cloudtrain.backends.sandbox.process:")]
    stack = [each for each in stack if each.startswith("cloudtrain.backends.sandbox.")] or stack  # whoever it calls
    modules = [each.partition(":")[0] for each in stack]
    if not modules:
        return None
    if modules[0] == "cloudtrain.aws.s3_download":
        return CONTAINER, "channels of a local run"
    if modules[0].startswith("cloudtrain.backends.sandbox."):
        # Threads of boto3's transfers know only who has made their client; the server itself touches no object.
        is_transfer = modules[0].endswith(".server") and "Key" in raw["parameters"]
        part = _SANDBOX["transfer"] if is_transfer else _SANDBOX.get(modules[0].rpartition(".")[2])
        return None if part is None else (SERVICE, part)
    if any(module == "cloudtrain_runtime.checkpoint.inspection" for module in modules):
        return CLIENT, "checkpoints"
    if modules[0].startswith("cloudtrain_runtime."):
        return CONTAINER, next((part for name, part in _PARTS.items() if any(name in each for each in stack)), "other")
    return CLIENT, _verb(raw, stack)


_SANDBOX = {
    "job_runner": "inputs and outputs",
    "s3_sync": "inputs and outputs",
    "transfer": "inputs and outputs",
    "training_job_operations": "inputs",
    "cloudwatch_logs": "logs",
}
_PARTS = {
    "launcher.hang": "hang",
    ".secrets": "secrets",
    "checkpoint": "checkpoints",
    "runtime.s3.": "checkpoints",
}


def _verb(raw: Raw, stack: list[str]) -> str:
    """Return the command that calls, where it is one; else that which the innermost function serves."""
    program, *words = raw["program"]
    named = next((word for word in words if word in _COMMANDS), None)  # options may come first
    if program == "cloudtrain" and named is not None:
        return str(named)
    text = " ".join(stack)
    return next((verb for pattern, verb in _VERBS.items() if re.search(pattern, text)), "other")


_COMMANDS = {
    *("check", "checkpoints", "configure", "explain", "files", "follow", "list", "logs", "plan", "prices"),
    *("resume", "sandbox", "schema", "status", "stop", "submit", "validate"),
}
_VERBS = {
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
}


# ---------------------------------------------------------------- what they are about


def _resources(raw: Raw, who: str) -> list[str]:
    service, operation, told = raw["service"], raw["operation"], raw["parameters"]
    if service in ("s3", "s3torchconnector"):
        keys = told.get("Keys") or [told.get("Key")]
        is_data, is_saved = (any(name in each for each in raw["stack"]) for name in ("s3_download:", ".inspection:"))
        # A local run's channels; checkpoints by their uri.
        by = CLIENT if is_data and who == CONTAINER else CONTAINER if is_saved else who
        is_read = operation.startswith(("Get", "Head", "List"))
        return [_place(told.get("Bucket"), key, told.get("Prefix", ""), by, is_read=is_read) for key in keys]
    find = _NAMED.get((service, operation))
    return [find(told)] if find else ["*"]


def _fields(raw: Raw) -> tuple[str, ...]:
    names = ("Tags", "tags", "ServerSideEncryption", "SSEKMSKeyId", "ACL", "VersionId", "Tagging")
    return tuple(name for name in names if name in raw["parameters"].get("", ()))


def _place(bucket: str | None, key: str | None, prefix: str, who: str, *, is_read: bool) -> str:
    """Return an object, or a bucket where no key is named.

    A container knows its checkpoints by a uri only, and tests choose any; a user's data may lie anywhere.
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
    r"(^|/)queues/": "queues/*",
    rf"(^|/){_RUN}/config(/|$)": "{run}/config/*",
    rf"(^|/){_RUN}/plan\.json$": "{run}/plan.json",
    rf"(^|/){_RUN}/data/": "{run}/data/*",
    rf"(^|/){_RUN}/steps/checkpoints(/|$)": "{run}/steps/checkpoints/*",
    rf"(^|/){_RUN}/checkpoints(/|$)": "{run}/checkpoints/*",
    r"/output/(model|output)\.tar\.gz$": "{run}/output/*",
    r"/tensorboard": "{run}/tensorboard/*",
}


def _repository(name: str) -> str:
    return f"repository/{name}" if name in ("pytorch", "pytorch-training") else "repository/{image}"


def _role(arn: str) -> str:
    return "user/{caller}" if ":user/" in arn else "role/{role}"


_JOB = "training-job/{run}"
_STREAM = "log-group:/aws/sagemaker/TrainingJobs:log-stream:{run}"
_GROUP = "log-group:/aws/sagemaker/TrainingJobs"
_NAMED: Mapping[tuple[str, str], Any] = {
    **{("sagemaker", f"{name}TrainingJob"): lambda told: _JOB for name in ("Create", "Describe", "Stop", "Update")},
    ("sagemaker", "ListTags"): lambda told: _JOB,
    ("sagemaker", "AddTags"): lambda told: _JOB,
    ("logs", "DescribeLogStreams"): lambda told: _GROUP,
    ("logs", "CreateLogGroup"): lambda told: _GROUP,
    ("logs", "CreateLogStream"): lambda told: _STREAM,
    ("logs", "PutLogEvents"): lambda told: _STREAM,
    ("logs", "GetLogEvents"): lambda told: _STREAM,
    ("iam", "GetRole"): lambda told: "role/{role}",
    ("iam", "SimulatePrincipalPolicy"): lambda told: _role(told.get("PolicySourceArn", "")),
    ("ecr", "BatchGetImage"): lambda told: _repository(told.get("repositoryName", "")),
    ("batch", "SubmitServiceJob"): lambda told: "job-queue/{queue}",
    ("batch", "ListServiceJobs"): lambda told: "job-queue/{queue}",
    ("batch", "GetJobQueueSnapshot"): lambda told: "job-queue/{queue}",
    ("batch", "DescribeServiceJob"): lambda told: "service-job/{job}",
    ("batch", "TerminateServiceJob"): lambda told: "service-job/{job}",
    ("budgets", "DescribeBudgets"): lambda told: "budget/*",
    ("secretsmanager", "DescribeSecret"): lambda told: "{secret}",
    ("secretsmanager", "GetSecretValue"): lambda told: "{secret}",
}


# ---------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """Bring the record up to date."""
    match arguments:
        case ["--write"]:
            with tempfile.TemporaryDirectory() as folder:
                code = _run_tests(Path(folder))
                write_record(calls_seen(Path(folder)).values())
            return code
        case ["--add", folder]:
            known = read_record()
            for key, call in calls_seen(Path(folder)).items():
                known[key] = _joined(known.get(key), call)
            write_record(known.values())
            return 0
    print(__doc__, file=sys.stderr)
    return 2


def _run_tests(folder: Path) -> int:
    tests = Path(__file__).parents[1]
    environ = {**os.environ, "CLOUDTRAIN_TEST_RECORD": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--numprocesses", "2", *(str(tests / each) for each in _FOLDERS)],
        check=False,
        env=environ,
        cwd=tests.parent,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
