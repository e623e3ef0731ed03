"""`Plan`: everything that is decided before a run starts.

There is no separate dry run: every submit makes this plan first and then executes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from cloudtrain.job.arguments import command_line
from cloudtrain.job.script_conventions import Conventions
from cloudtrain.planning.cost import (
    CostPlan,
)
from cloudtrain.planning.request import Locations
from cloudtrain.settings.settings import Origin
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract import (
    RunConfig,
)
from cloudtrain_runtime.contract.strict_json import dump_json

LOCAL = "local"
SAGEMAKER = "sagemaker"


@dataclass(frozen=True)
class GitSource:
    """Where the code comes from, as its git repository tells it.

    Attributes:
        commit: Full name of the commit, or None before the first one.
        branch: None where HEAD is detached.
        dirty: Whether files below the code folder differ from the commit, or are not in it.
        diff: What `git diff HEAD` says of tracked files below the code folder.
    """

    commit: str | None
    branch: str | None
    dirty: bool
    diff: str = ""


@dataclass(frozen=True)
class CodeInfo:
    """The code that travels. `digest` is sha256 over names, modes and contents; `bytes` counts them.

    `source` says where it comes from; the same code is the same code wherever it comes from. `conventions` says how
    the job's script wants to be started.
    """

    digest: str
    bytes: int
    files: int
    source: GitSource | None = field(default=None, compare=False)
    conventions: Conventions = field(default_factory=Conventions)


@dataclass(frozen=True)
class ClusterPlan:
    """What the ranks run on. `backend` is the collective backend; `world_size` counts all ranks, 0 if unknown."""

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

    Ranks of one tensor group or one pipeline see the same samples.
    """

    per_rank: int
    accumulate: int
    global_: int


@dataclass(frozen=True)
class LengthPlan:
    """How far the run goes; None where only the run itself can tell.

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
    """Something on this machine that must lie at `uri` before the job starts."""

    path: str
    uri: str


@dataclass(frozen=True)
class Plan:
    """Everything decided.

    Attributes:
        target: Backend that this plan is for: `local` or `sagemaker`.
        request: The CreateTrainingJob document.
        config: What the container reads.
        warnings: What the user should know, one sentence each.
        decisions: Choices that cloudtrain made itself and why, one line each.
        resume: `auto`, `never`, or the uri of the checkpoints to go on from.
        identity: sha256 over everything that would be sent and run, but for the run's own name: two submits of the same
            request and code have the same. It stands in the request as a tag, too.
        job_document: The job as a job file holds it, so that the run can be planned again from anywhere.
        queue: The SubmitServiceJob document without its payload, or None where no queue is waited in.
        settings_beside_job: Settings that the request takes from a cloudtrain.toml beside the job, not from the user.
        omitted_arguments: Arguments of the script that the job gives as `null`, as `--key`: they are not passed.
        checks: What was asked of the account before it was sent, as `check --json` prints it: among it what the image's
            tag meant then.
        left_out: Name and reason of what stays behind of the code folder, bounded.
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
    settings_beside_job: tuple[Origin, ...] = ()
    checks: tuple[Mapping[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    def rename(self, run: str) -> Plan:
        """Return the same plan under another run id, which stands in it wherever this one does."""

        def named(text: str) -> str:
            return text.replace(self.run, run)

        places = self.locations
        return replace(
            self,
            run=run,
            locations=Locations(
                code=named(places.code),
                config=named(places.config),
                output=named(places.output),
                checkpoints=named(places.checkpoints),
                channels={name: named(uri) for name, uri in places.channels.items()},
            ),
            config=RunConfig.from_json(named(self.config.to_json())),
            request=json.loads(named(dump_json(self.request))),
            queue=json.loads(named(dump_json(self.queue))),
            uploads=tuple(Upload(upload.path, named(upload.uri)) for upload in self.uploads),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints."""
        every = self.config.checkpoint
        source = self.bundle.source
        return {
            "run": self.run,
            "target": self.target,
            "request": self.request,
            "queue": self.queue,
            "bundle": {"digest": self.bundle.digest, "bytes": self.bundle.bytes, "files": self.bundle.files},
            "source": source and {"commit": source.commit, "branch": source.branch, "dirty": source.dirty},
            "cluster": asdict(self.cluster),
            "batch": None
            if self.batch is None
            else {"per_rank": self.batch.per_rank, "accumulate": self.batch.accumulate, "global": self.batch.global_},
            "length": asdict(self.length),
            "cost": asdict(self.cost),
            "image": self.image,
            "command": {
                "text": command_line(self.config),
                "entry": self.config.task or self.config.script,
                "args": self.config.args,
                "omitted": list(self.omitted_arguments),
            },
            "settings_beside_job": [origin.to_json() for origin in self.settings_beside_job],
            "secrets": {name: asdict(reference) for name, reference in self.config.secrets.items()},
            "checkpoint": {
                "uri": self.locations.checkpoints,
                "every": f"{every.every_steps} steps"
                if every.every_steps
                else format_duration(every.every_seconds or 0),
            },
            "max_runtime_seconds": self.max_runtime_seconds,
            "max_wait_seconds": self.max_wait_seconds,
            "warnings": list(self.warnings),
            "decisions": list(self.decisions),
        }

    def to_file(self) -> str:
        """Return the text of plan.json: everything, with sorted keys."""
        source = self.bundle.source
        everything = {
            **self.to_json(),
            "job": self.job_document,
            "checks": [dict(check) for check in self.checks],
            "config": json.loads(self.config.to_json()),
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "source": source and asdict(source),
        }
        return dump_json(everything, indent=2, sort_keys=True)
