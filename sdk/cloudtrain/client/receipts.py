"""The receipt of a rehearsal, `rehearsal.json`: for which code and request which checks have which result.

A receipt holds for one code and one request. Their digest is part of its path, so that `plan` reads one small file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from cloudtrain.errors import UserError
from cloudtrain.job.spec import LoadedJob
from cloudtrain.planning.cost import COSTLY_USD
from cloudtrain.planning.plan import Plan
from cloudtrain.support.atomic_write import read_bounded, write_atomically
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.format_version import NewerFormatError, check_not_newer
from cloudtrain_runtime.contract.json_checks import ObjectSchema, count, mapping, text
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

RECEIPT_FILE = "rehearsal.json"
FOLDER = "rehearsals"
"""Folder of receipts and running rehearsals, below the folder of local runs."""
VERSION = 1
PROVEN = "proven"
_RESULTS = (PROVEN, "failed", "unknown")
_MOST_BYTES = 100_000
_NAME_DIGITS = 16
_RELEASE = lazy_pattern(r"[\w.+]{1,40}", re.ASCII)

LONG_SECONDS = 24 * 3600
"""A run that may last longer than this is worth a rehearsal."""

_ACCOUNT_MEMBERS = ("TrainingJobName", "RoleArn", "VpcConfig", "Tags", "StoppingCondition")
"""Members of the request that are the account's, name the run, or follow from the job and prices."""


_SCHEMA = ObjectSchema({
    **dict.fromkeys(("digest", "bundle", "request", "verdict", "date", "cloudtrain", "backend"), text),
    **dict.fromkeys(("version", "instances", "seed"), count), "checks": mapping(text),
})  # fmt: skip


@dataclass(frozen=True)
class Receipt:
    """A receipt.

    Attributes:
        version: Version of the format.
        digest: Digest of the code and the request together: a plan with another one was not rehearsed.
        bundle: Digest of the code without the job file, whose fields are in the digest of the request.
        request: Digest of the request, without name, time, account and places that depend on the run.
        verdict: `proven`, `failed` or `unknown`.
        checks: Result by name of the check; the worst of several.
        instances: Number of instances of the request. The receipt does not cover other numbers.
        date: When the rehearsal ended, in UTC, as ISO 8601.
        cloudtrain: Version of cloudtrain.
        backend: Where the runs took place: `local` or `sandbox`.
        seed: Seed of the steps at which runs were interrupted.
    """

    version: int
    digest: str
    bundle: str
    request: str
    verdict: str
    checks: Mapping[str, str]
    instances: int
    date: datetime
    cloudtrain: str
    backend: str
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return the content of rehearsal.json."""
        return {**asdict(self), "checks": dict(self.checks), "date": self.date.isoformat()}

    @property
    def sentence(self) -> str:
        """The receipt in words, for a plan."""
        failed = [name for name, result in self.checks.items() if result != PROVEN]
        rest = ""
        if failed:
            results = ", ".join(f"{name} {self.checks[name]}" for name in failed)
            rest = f" ({results})"
        instances = "1 instance" if self.instances == 1 else f"{self.instances} instances"
        return f"{self.verdict} on {self.date:%Y-%m-%d}, for {instances} and this code{rest}"


@dataclass(frozen=True)
class ReceiptKey:
    """What a receipt is about: the digests of a plan's code and request."""

    bundle: str
    request: str

    @classmethod
    def of(cls, plan: Plan) -> ReceiptKey:
        """Return the digests of a plan for a cluster."""
        return cls(plan.bundle.rehearsed or plan.bundle.digest, _digest(_canonical(plan)))

    @property
    def digest(self) -> str:
        """Digest of both."""
        return _digest([self.bundle, self.request])


def _digest(content: Any) -> str:
    return hashlib.sha256(dump_json(content, sort_keys=True).encode()).hexdigest()


def _canonical(plan: Plan) -> Any:
    """Return what is sent and run, without what may differ between two submits of the same job."""
    request = {name: value for name, value in plan.request.items() if name not in _ACCOUNT_MEMBERS}
    algorithm = dict(request.get("AlgorithmSpecification", {}))
    # The registry of AWS's images belongs to the region.
    if "TrainingImage" in algorithm:
        algorithm["TrainingImage"] = str(algorithm["TrainingImage"]).rpartition("/")[2]
    request["AlgorithmSpecification"] = algorithm
    hyperparameters = dict(request.get("HyperParameters", {}))
    for name in ("sagemaker_job_name", "sagemaker_region"):
        hyperparameters.pop(name, None)
    request["HyperParameters"] = hyperparameters
    for member, key in (("OutputDataConfig", "KmsKeyId"), ("ResourceConfig", "VolumeKmsKeyId")):
        request[member] = {
            name: value for name, value in request.get(member, {}).items() if name != key
        }
    config = load_json(plan.config.to_json())
    config.pop("bucket_owners", None)
    config["checkpoint"] = {**config["checkpoint"], "resume": "", "resume_run": "", "uri": ""}
    job = {name: value for name, value in plan.job_document.items() if name != "name"}
    # Where a run starts from is no part of what was rehearsed.
    job["checkpoint"] = {
        name: value for name, value in dict(job.get("checkpoint", {})).items() if name != "resume"
    }
    limits = dict(job.get("limits", {}))
    limits.pop("require_rehearsal", None)
    job["limits"] = limits
    if "CheckpointConfig" in request:
        request["CheckpointConfig"] = {**request["CheckpointConfig"], "S3Uri": ""}
    text = dump_json([request, config, job], sort_keys=True)
    places = (
        (plan.identity, "IDENTITY"),
        (plan.bundle.digest, "BUNDLE"),
        (plan.run, "RUN"),
        (plan.locations.base, "BASE"),
    )
    for value, name in places:
        text = text.replace(value, name) if value else text
    return text


def receipt_path(home: Path, digest: str) -> Path:
    """Return the path of the receipt of a digest in a folder of local runs."""
    return home / FOLDER / digest[:_NAME_DIGITS] / RECEIPT_FILE


def find_receipt(home: Path, beside: Path, plan: Plan) -> tuple[Receipt | None, tuple[str, ...]]:
    """Return the receipt of a plan's code and request, or None; and a sentence for each file that is no receipt.

    Args:
        home: Folder of local runs, where rehearsals keep receipts.
        beside: Folder of the job file, whose rehearsal.json is read, too.
        plan: A plan for a cluster.
    """
    key = ReceiptKey.of(plan)
    found = []
    problems = []
    for path in (receipt_path(home, key.digest), beside / RECEIPT_FILE):
        try:
            receipt = read_receipt(path)
        except ValueError as error:
            problems.append(f"{error}; it is ignored")
            continue
        if receipt is not None and receipt.digest == key.digest:
            found.append(receipt)
    return choose_receipt(found), tuple(problems)


def choose_receipt(receipts: Iterable[Receipt]) -> Receipt | None:
    """Return the one that counts of several receipts of one digest: the newest that is proven or failed.

    One that is unknown shows nothing, so it counts only where there is no other.
    """
    return max(
        receipts,
        key=lambda each: (each.verdict != "unknown", each.date, each.verdict == "failed"),
        default=None,
    )


def read_receipt(path: Path) -> Receipt | None:
    """Return the receipt in a file; None if there is no file.

    Raises:
        ValueError: The file cannot be read or is no receipt. The message names it.
    """
    try:
        content = read_bounded(path, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        parsed = load_json(content)
        check_not_newer(str(path), parsed, VERSION, writer=_writer_of(parsed))
        found = _SCHEMA(parsed)
        names = [field.name for field in fields(Receipt)]
        receipt = Receipt(
            **{
                **{name: found[name] for name in names},
                "date": datetime.fromisoformat(found["date"]),
            }
        )
    except NewerFormatError:
        raise
    except (ValueError, KeyError):
        raise ValueError(f"{path} is not a receipt of a rehearsal") from None
    if receipt.version != VERSION:
        raise ValueError(f"{path} is a receipt of another version of cloudtrain")
    if receipt.date.tzinfo is None or not {receipt.verdict, *receipt.checks.values()} <= {
        *_RESULTS
    }:
        raise ValueError(f"{path} is not a receipt of a rehearsal")
    return receipt


def _writer_of(content: Any) -> str:
    writer = content.get("cloudtrain") if isinstance(content, dict) else None
    return writer if isinstance(writer, str) and _RELEASE.fullmatch(writer) else ""


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Write a receipt atomically.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump_json(receipt.to_json(), indent=2) + "\n")


def is_proven(receipt: Receipt | None) -> bool:
    """Return whether there is a receipt with a proven verdict."""
    return receipt is not None and receipt.verdict == PROVEN


def is_worth_rehearsing(plan: Plan) -> bool:
    """Return whether a plan without a proven receipt has a warning."""
    is_required = plan.job_document.get("limits", {}).get("require_rehearsal", False)
    return plan.uses_account and bool(is_required or reason_to_rehearse(plan))


def reason_to_rehearse(plan: Plan) -> str:
    """Return why a run is worth a rehearsal, in words; empty for a short and cheap one on demand.

    The thresholds: spot, an estimate above 1,000 USD or accelerator hours that are worth as much and that it does not
    count (`CostPlan.is_costly`), or a time limit above 24 hours.
    """
    cost = plan.cost
    if plan.request.get("EnableManagedSpotTraining"):
        return "it runs on spot capacity, which AWS interrupts"
    if cost.max_usd is not None and cost.max_usd > COSTLY_USD:
        return f"it may cost {cost.max_usd:,.0f} USD"
    if cost.is_costly and not cost.accelerator_hours:
        return f"it may cost more than {COSTLY_USD:,.0f} USD, by the price in another region"
    if cost.is_costly:
        is_known = cost.max_usd is not None
        why = "which a training plan pays" if is_known else "whose price is unknown"
        return f"it may use {cost.accelerator_hours:,.0f} accelerator hours, {why}"
    if plan.max_runtime_seconds > LONG_SECONDS:
        return f"it may run for {format_duration(plan.max_runtime_seconds)}"
    return ""


def add_receipt(plan: Plan, job: LoadedJob, home: Path, *, is_submit: bool = False) -> Plan:
    """Return a plan for a cluster with its receipt, or with a warning if it has none and is long, costly or on spot.

    Args:
        plan: The plan; one for this machine is returned as it is.
        job: Its job.
        home: Folder of local runs.
        is_submit: Whether the plan is about to be sent to an account.

    Raises:
        UserError: It is, the job requires a proven rehearsal, and there is none.
    """
    spec = job.spec
    if spec is None or not plan.uses_account:
        return plan
    receipt, problems = find_receipt(home, spec.base, plan)
    plan = dataclasses.replace(
        plan, rehearsal=_shown(receipt), warnings=(*plan.warnings, *problems)
    )
    if is_proven(receipt):
        return plan
    if is_submit and spec.limits.require_rehearsal:
        have = "there is none for this code and request"
        if receipt is not None:
            have = f"it was {receipt.sentence}"
        raise UserError(
            f"limits.require_rehearsal: a proven rehearsal is needed before a submit, and {have}",
            f"run: cloudtrain rehearse {job.words}",
        )
    reason = reason_to_rehearse(plan)
    if spec.limits.require_rehearsal:
        reason = "limits.require_rehearsal asks for it"
    if not reason:
        return plan
    have = "not rehearsed"
    if receipt is not None:
        have = f"the rehearsal was {receipt.sentence}"
    warning = f"{have}, and {reason}: cloudtrain rehearse shows whether the job survives a stop"
    return dataclasses.replace(plan, warnings=(*plan.warnings, warning))


def _shown(receipt: Receipt | None) -> dict[str, object] | None:
    if receipt is None:
        return None
    return {**receipt.to_json(), "text": receipt.sentence}
