"""`Plan`: everything that is decided before a run starts.

There is no separate dry run: every submit makes this plan first and then executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from cloudtrain.job.arguments import command_line
from cloudtrain.job.requirements import Requirements
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.planning.cost import CostPlan
from cloudtrain.planning.storage_layout import Locations
from cloudtrain.settings.settings import Origin, Settings
from cloudtrain.support.backend_facts import facts_of, place_name
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.support.units import format_duration, format_size, format_usd
from cloudtrain_runtime.contract import EvaluationConfig, RunConfig
from cloudtrain_runtime.contract.format_version import FIELD
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

PLAN_VERSION = 1
"""Version of plan.json."""


@dataclass(frozen=True)
class GitSource:
    """The git commit that the code comes from.

    Attributes:
        commit: Full name of the commit, or None before the first one.
        branch: Name of the branch, or None where HEAD is detached.
        dirty: Whether files below the code folder differ from the commit, or are not in it.
        diff: Output of `git diff HEAD` for tracked files below the code folder.
    """

    commit: str | None
    branch: str | None
    dirty: bool
    diff: str = ""


@dataclass(frozen=True)
class CodeInfo:
    """Summary of the code that is uploaded.

    Attributes:
        digest: sha256 over names, modes and contents.
        bytes: Size of all contents.
        files: Number of files.
        source: The git commit, or None. Not compared: equal code from another commit is equal.
        conventions: How the job's script expects to be started.
        evaluation: What the code evaluates, in a run that does not train; else None.
        rehearsed: Digest of the code without the job file, for receipts of rehearsals; empty where it is unknown.
        requirements: What `code.requirements` contains; not complete where it was not read.
    """

    digest: str
    bytes: int
    files: int
    source: GitSource | None = field(default=None, compare=False)
    conventions: ScriptConventions = field(default_factory=ScriptConventions)
    evaluation: EvaluationConfig | None = None
    rehearsed: str = ""
    requirements: Requirements = field(default_factory=lambda: Requirements(is_complete=False))


@dataclass(frozen=True)
class ClusterPlan:
    """The cluster that the ranks run on.

    Attributes:
        instance_type: The instance type, or the first of the preferences.
        instances: Number of instances.
        processes_per_instance: Ranks per instance, or None when it is unknown before the start.
        world_size: Number of all ranks; 0 when it is unknown before the start.
        distribution: `torch_distributed`, `pytorchddp` or `smdistributed`.
        launcher: `cloudtrain` or `toolkit`.
        backend: Backend of the collectives: `nccl`, `gloo` or `smddp`.
    """

    instance_type: str
    instances: int
    processes_per_instance: int | None
    world_size: int
    distribution: str
    launcher: str
    backend: str


@dataclass(frozen=True)
class BatchPlan:
    """Samples per optimizer step: `per_rank` x `accumulate` x data ranks = `global_`.

    Ranks of one tensor group or one pipeline process the same samples.
    """

    per_rank: int
    accumulate: int
    global_: int


@dataclass(frozen=True)
class LengthPlan:
    """Length of the run; None where it is unknown before the start.

    Attributes:
        steps: Optimizer steps.
        epochs: Passes over the training data.
        samples: Training samples, all ranks together.
        checkpoints: Checkpoints written, at most.
    """

    steps: int | None
    epochs: int | None
    samples: int | None
    checkpoints: int | None


@dataclass(frozen=True)
class Upload:
    """A file or folder on this machine that must be uploaded to `uri` before the job starts."""

    path: str
    uri: str


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a run starts.

    Attributes:
        run: Run id.
        job: Name of the job.
        target: Backend that this plan is for; the sandbox runs plans for SageMaker.
        created: Time of the plan, in UTC.
        cluster: Instances and ranks.
        batch: Samples per optimizer step; None for a script.
        length: Length of the run.
        cost: Estimate, limit, and what they do not cover.
        image: Uri of the container image.
        bundle: The code.
        locations: Uris of the run's files.
        config: The configuration that the container reads (`run.json`).
        request: The CreateTrainingJob document.
        max_runtime_seconds: Training time after which the job is stopped.
        max_wait_seconds: Limit of waiting and training together, with spot; else None.
        uploads: Local data to upload before the start.
        warnings: One sentence each.
        decisions: What cloudtrain decided itself and why, one line each.
        resume: `auto`, `never`, or the uri of the checkpoints to resume from.
        identity: sha256 over everything that is sent and run, without the run id: equal for two submits of the same
            request and code. A tag of the request holds it, too.
        job_document: The content of the job file, so that the run can be planned again without the file.
        queue: The SubmitServiceJob document without its payload, or None without a queue.
        omitted_arguments: Arguments of the script that the job sets to `null`, as `--key`; they are not passed.
        settings: The account.
        settings_beside_job: Settings that the request takes from a cloudtrain.toml beside the job.
        sender: What sends the request: `estimator` or `boto3`; None for a local run.
        checks: Results of the checks of the account before the submit, as `check --json` prints them. One of them has
            the digest of the image.
        submitter: Name of the user who submits it, on this machine; empty when it is unknown.
        left_out: Path and reason of files in the code folder that are not uploaded; shortened if there are many.
        modules: By the name of a module or package in the bundle, its path there; shortened if there are many.
        rehearsal: Receipt of a rehearsal of this code and request, with the sentence `text`; None if there is none.
        batch_job: What a cluster's queue receives, such as sbatch of Slurm; None where there is none.
        render: Function that returns the plan for another run id, without the changes that followed it.
    """

    run: str
    job: str
    target: str
    created: datetime
    cluster: ClusterPlan
    batch: BatchPlan | None
    length: LengthPlan
    cost: CostPlan
    image: str
    bundle: CodeInfo
    locations: Locations
    config: RunConfig
    request: dict[str, Any]
    max_runtime_seconds: int
    max_wait_seconds: int | None
    uploads: tuple[Upload, ...]
    warnings: tuple[str, ...]
    decisions: tuple[str, ...]
    resume: str = "auto"
    identity: str = ""
    job_document: Mapping[str, Any] = field(default_factory=dict)
    queue: dict[str, Any] | None = None
    omitted_arguments: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    settings_beside_job: tuple[Origin, ...] = ()
    sender: str | None = None
    checks: tuple[Mapping[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    submitter: str = ""
    rehearsal: Mapping[str, Any] | None = None
    batch_job: BatchJob | None = None
    render: Callable[[str], Plan] = field(kw_only=True, compare=False, repr=False)

    def __repr__(self) -> str:
        return _summarize(self).to_text()

    def _repr_html_(self) -> str:
        return _summarize(self).to_html()

    @property
    def uses_account(self) -> bool:
        """Whether the run takes place in an account, or in the sandbox that simulates one."""
        return facts_of(self.target).uses_account

    def rename(self, run: str) -> Plan:
        """Return the same plan with another run id, in every place that contains the run id."""
        return replace(
            self.render(run),
            warnings=self.warnings,
            decisions=self.decisions,
            checks=self.checks,
            left_out=self.left_out,
            modules=self.modules,
            submitter=self.submitter,
            rehearsal=self.rehearsal,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints."""
        checkpoint = self.config.checkpoint
        every = format_duration(checkpoint.every_seconds or 0)
        if checkpoint.every_steps:
            every = f"{checkpoint.every_steps} steps"
        source = self.bundle.source
        batch = None
        if self.batch is not None:
            batch = {
                "per_rank": self.batch.per_rank,
                "accumulate": self.batch.accumulate,
                "global": self.batch.global_,
            }
        found: dict[str, Any] = {
            "run": self.run,
            "target": self.target,
            "request": self.request,
            "queue": self.queue,
            "sender": self.sender,
            "bundle": {
                "digest": self.bundle.digest,
                "bytes": self.bundle.bytes,
                "files": self.bundle.files,
            },
            "source": source
            and {"commit": source.commit, "branch": source.branch, "dirty": source.dirty},
            "cluster": asdict(self.cluster),
            "batch": batch,
            "length": asdict(self.length),
            "cost": asdict(self.cost),
            "cuda_on_cpu": self.config.cuda_on_cpu,
            "image": self.image,
            "command": {
                "text": command_line(self.config),
                "entry": self.config.entry,
                "args": self.config.args,
                "omitted": list(self.omitted_arguments),
            },
            "settings_beside_job": [origin.to_json() for origin in self.settings_beside_job],
            "secrets": {name: asdict(reference) for name, reference in self.config.secrets.items()},
            "checkpoint": {
                "uri": self.locations.checkpoints,
                "every": every,
            },
            "max_runtime_seconds": self.max_runtime_seconds,
            "max_wait_seconds": self.max_wait_seconds,
            "rehearsal": self.rehearsal,
            "warnings": list(self.warnings),
            "decisions": list(self.decisions),
        }
        if self.batch_job is not None:
            found["batch_job"] = self.batch_job.to_document()
        return found

    def to_file(self) -> str:
        """Return the content of plan.json: every value of the plan, with sorted keys."""
        source = self.bundle.source
        content = {
            **self.to_json(),
            FIELD: PLAN_VERSION,
            "job": self.job_document,
            "checks": [dict(check) for check in self.checks],
            "config": load_json(self.config.to_json()),
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "modules": [{"name": name, "path": path} for name, path in self.modules.items()],
            "source": source and asdict(source),
            "submitter": self.submitter,
        }
        return dump_json(content, indent=2, sort_keys=True)


def _summarize(plan: Plan) -> Summary:
    """Return a summary of a plan; the HTML table has all its warnings and its decisions, too."""
    details = [("warning", text) for text in plan.warnings[1:]]
    details += [("decision", text) for text in plan.decisions]
    return Summary(f"Plan {plan.run}", tuple(_summary_rows(plan)), details)


def _summary_rows(plan: Plan) -> Iterator[Row]:
    cluster = plan.cluster
    length = plan.length
    yield "command", command_line(plan.config)
    ranks = "ranks unknown before the start"
    if cluster.world_size:
        ranks = count(cluster.world_size, "rank")
    where = f"of {cluster.instance_type}" if plan.uses_account else place_name(plan.target)
    instances = f"{count(cluster.instances, 'instance')} {where}"
    yield "cluster", f"{instances}, {ranks}, {cluster.distribution}"
    if plan.batch is not None and plan.batch.global_:
        yield "batch", f"{count(plan.batch.global_, 'sample')} per step"
    if length.steps is not None:
        yield "length", count(length.steps, "step")
    elif length.epochs is not None:
        yield "length", count(length.epochs, "epoch")
    yield "code", f"{count(plan.bundle.files, 'file')}, {format_size(plan.bundle.bytes)}"
    yield "checkpoints", plan.locations.checkpoints
    yield "time limit", format_duration(plan.max_runtime_seconds)
    if plan.uses_account or plan.cost.usd_per_hour:
        yield "cost", _describe_cost(plan.cost)
    if plan.warnings:
        others = len(plan.warnings) - 1
        more = f" (and {others} more in plan.warnings)" if others else ""
        yield "warning", f"{plan.warnings[0]}{more}"


def _describe_cost(cost: CostPlan) -> str:
    if cost.usd_per_hour is None or cost.max_usd is None:
        return "unknown price"
    hourly = f"{format_usd(cost.usd_per_hour)} per hour"
    return f"{hourly}, estimate {format_usd(cost.max_usd)} at the time limit"
