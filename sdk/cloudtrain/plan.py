"""`make_plan`: everything decided before anything happens.

Pure: the same job, settings, code, run id, clock and machine give an equal plan. There is no dry run anywhere, because
this object is the first half of every run.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cloudtrain import catalog
from cloudtrain.errors import Problem, SpecError, nearest
from cloudtrain.request import (
    LAUNCHER_CLOUDTRAIN,
    LAUNCHER_TOOLKIT,
    Choices,
    Locations,
    render_request,
)
from cloudtrain.run import is_run_id
from cloudtrain.settings import Settings
from cloudtrain.spec import JobSpec
from cloudtrain.units import format_duration, format_size
from cloudtrain_runtime.contract import (
    BUNDLE_FILE,
    CheckpointConfig,
    EarlyStopping,
    RunConfig,
    TrainConfig,
)

LOCAL = "local"
SAGEMAKER = "sagemaker"

PROCESSES_ON_CPU = 2
"""Ranks per instance on a machine without GPUs: the fewest that make collectives real."""

SMDDP_FRAMEWORK = "2.5"
"""Newest AWS container with SMDDP. Source: AWS's SMDDP release notes, 2026-11."""

_MIN_RUNTIME_SECONDS = 60
_LARGE_CODE_BYTES = 100 * 10**6
_PLACEHOLDER_ROLE = "arn:aws:iam::000000000000:role/CLOUDTRAIN_ROLE"
_PLACEHOLDER_BUCKET = "cloudtrain-bucket"
_LOCAL_ROLE = "arn:aws:iam::000000000000:role/local"


@dataclass(frozen=True)
class Machine:
    """What a local run finds here."""

    gpus: int
    cpus: int


@dataclass(frozen=True)
class Source:
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

    `source` says where it comes from; the same code is the same code wherever it comes from.
    """

    digest: str
    bytes: int
    files: int
    source: Source | None = field(default=None, compare=False)


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
    """Samples per optimizer step: `per_rank` x `accumulate` x world size = `global_`."""

    per_rank: int
    accumulate: int
    global_: int


@dataclass(frozen=True)
class CostPlan:
    """What the run costs. `max_usd` is price x instances x longest billed time; None when the price is unknown."""

    usd_per_hour: float | None
    max_usd: float | None
    price_as_of: str | None


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
    """

    run: str
    job: str
    target: str
    created: datetime
    cluster: ClusterPlan
    batch: BatchPlan | None
    cost: CostPlan
    image: str
    bundle: CodeInfo
    locations: Locations
    config: RunConfig
    request: dict[str, Any]
    max_runtime_seconds: int
    uploads: tuple[Upload, ...]
    warnings: tuple[str, ...]
    decisions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints."""
        every = self.config.checkpoint
        source = self.bundle.source
        return {
            "run": self.run,
            "target": self.target,
            "request": self.request,
            "bundle": {"digest": self.bundle.digest, "bytes": self.bundle.bytes, "files": self.bundle.files},
            "source": source and {"commit": source.commit, "branch": source.branch, "dirty": source.dirty},
            "cluster": asdict(self.cluster),
            "batch": None
            if self.batch is None
            else {"per_rank": self.batch.per_rank, "accumulate": self.batch.accumulate, "global": self.batch.global_},
            "cost": asdict(self.cost),
            "image": self.image,
            "checkpoint": {
                "uri": self.locations.checkpoints,
                "every": f"{every.every_steps} steps"
                if every.every_steps
                else format_duration(every.every_seconds or 0),
            },
            "max_runtime_seconds": self.max_runtime_seconds,
            "warnings": list(self.warnings),
            "decisions": list(self.decisions),
        }

    def to_file(self) -> str:
        """Return the text of plan.json: everything, with sorted keys."""
        source = self.bundle.source
        everything = {
            **self.to_json(),
            "config": json.loads(self.config.to_json()),
            "source": source and asdict(source),
        }
        return json.dumps(everything, indent=2, sort_keys=True)


def make_plan(
    spec: JobSpec,
    settings: Settings,
    code: CodeInfo,
    *,
    run: str,
    now: datetime,
    target: str = SAGEMAKER,
    home: Path | None = None,
    machine: Machine | None = None,
    resume_uri: str | None = None,
) -> Plan:
    """Decide everything.

    Args:
        spec: The job.
        settings: The account. For SageMaker, placeholders stand in for what is missing, with a warning.
        code: Digest and size of the code that travels.
        run: Run id.
        now: Time of the plan, in UTC.
        target: `sagemaker` or `local`.
        home: Folder of local runs (`.cloudtrain`); needed for local plans.
        machine: This machine; needed for local plans.
        resume_uri: Where the checkpoints of the run lie that `checkpoint.resume` names.

    Raises:
        SpecError: the job asks for what cannot work.
    """
    draft = _Draft(spec, settings, run=run, target=target, home=home, machine=machine)
    resume = resume_uri or draft.resume()
    distribution = draft.distribution()
    launcher = LAUNCHER_CLOUDTRAIN if distribution == "torch_distributed" else LAUNCHER_TOOLKIT
    image = draft.image(distribution)
    processes = draft.processes()
    # A script finds its checkpoints in /opt/ml/checkpoints; an isolated container cannot reach S3 by itself.
    sync = spec.code.script is not None or spec.cluster.network.isolation
    locations = draft.locations(code, go_on_in=resume if sync else None)
    draft.check(code)
    max_runtime = draft.max_runtime()
    max_wait = draft.max_wait(max_runtime)
    choices = Choices(
        run=run,
        role=draft.role(),
        region=draft.region(),
        image=image,
        launcher=launcher,
        distribution=distribution,
        locations=locations,
        sync_checkpoints=sync,
        max_runtime_seconds=max_runtime,
        max_wait_seconds=max_wait,
    )
    if draft.problems:
        raise SpecError(draft.problems)
    instances = spec.cluster.instances
    world_size = (processes or 0) * instances
    return Plan(
        run=run,
        job=spec.name,
        target=target,
        created=now,
        cluster=ClusterPlan(
            instance_type=spec.cluster.first_choice,
            instances=instances,
            processes_per_instance=processes,
            world_size=world_size,
            distribution=distribution,
            launcher=launcher,
            backend=draft.collective_backend(distribution, processes),
        ),
        batch=_batch(spec, world_size),
        cost=draft.cost(max_runtime),
        image=image,
        bundle=code,
        locations=locations,
        config=_run_config(
            spec, run, distribution, processes, checkpoints="" if sync else locations.checkpoints, resume=resume
        ),
        request=render_request(spec, settings, choices),
        max_runtime_seconds=max_runtime,
        uploads=draft.uploads(locations),
        warnings=tuple(draft.warnings),
        decisions=tuple(draft.decisions),
    )


def _batch(spec: JobSpec, world_size: int) -> BatchPlan | None:
    if spec.train is None:
        return None
    train = spec.train
    return BatchPlan(train.batch_size, train.accumulate, train.batch_size * train.accumulate * world_size)


def _run_config(
    spec: JobSpec, run: str, distribution: str, processes: int | None, *, checkpoints: str, resume: str
) -> RunConfig:
    """Return what the container reads. Without `checkpoints` it saves in /opt/ml/checkpoints, which SageMaker syncs."""
    checkpoint = spec.checkpoint
    train = spec.train
    early = train.early_stopping if train else None
    args = spec.code.args
    return RunConfig(
        run=run,
        task=spec.code.task,
        script=spec.code.script,
        args=dict(args) if spec.code.task is not None and isinstance(args, dict) else _argv(args),
        requirements=spec.code.requirements,
        processes_per_instance=processes,
        distribution=distribution,
        max_restarts=spec.limits.retries,
        train=None
        if train is None
        else TrainConfig(
            epochs=train.epochs,
            steps=train.steps,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            precision=train.precision,
            compile=train.compile,
            clip_grad_norm=train.clip_grad_norm,
            learning_rate=train.learning_rate,
            seed=train.seed,
            evaluate_every_steps=train.evaluate.every.steps if train.evaluate else None,
            early_stopping=EarlyStopping(early.metric, early.patience, early.min_delta, early.mode) if early else None,
        ),
        checkpoint=CheckpointConfig(
            uri=checkpoints,
            every_seconds=checkpoint.every.seconds,
            every_steps=checkpoint.every.steps,
            keep=checkpoint.keep,
            resume="auto" if not checkpoints else resume,
        ),
    )


def _argv(args: dict[str, Any] | tuple[Any, ...]) -> list[str]:
    """Return argv: a list as it is, a mapping as `--key value`, true as a bare flag, false and null as nothing."""
    if not isinstance(args, dict):
        return [str(value) for value in args]
    argv: list[str] = []
    for key, value in args.items():
        if value is True:
            argv.append(f"--{key}")
        elif value not in (False, None):
            argv += [f"--{key}", str(value)]
    return argv


class _Draft:
    """A plan in the making: each method decides one thing and notes what the user should know."""

    def __init__(
        self,
        spec: JobSpec,
        settings: Settings,
        *,
        run: str,
        target: str,
        home: Path | None,
        machine: Machine | None,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.run = run
        self.is_local = target == LOCAL
        self.home = home
        self.machine = machine
        self.warnings: list[str] = []
        self.decisions: list[str] = []
        self.problems: list[Problem] = []
        self.instance = catalog.find_instance(spec.cluster.first_choice)

    def _refuse(self, path: str, message: str, hint: str) -> None:
        self.problems.append(self.spec.problem(path, message, hint))

    # ------------------------------------------------------------ what runs

    def distribution(self) -> str:
        asked = self.spec.cluster.distribution
        if asked == "auto":
            self.decisions.append("distribution: torch_distributed, which works in every container and on every type")
            return "torch_distributed"
        if asked == "torch_distributed":
            return asked
        name = self.spec.cluster.first_choice
        if self.instance is not None and not self.instance.smddp:
            legal = ", ".join(other for other in catalog.instance_names() if _has_smddp(other))
            self._refuse(
                "cluster.distribution",
                f"{asked} needs AWS's SMDDP library, which does not support {name}",
                f"use torch_distributed, or one of {legal}",
            )
        if self.is_local:
            self.warnings.append(f"{asked} starts ranks with AWS's mpirun; on this machine torchrun stands in for it")
        return asked

    def image(self, distribution: str) -> str:
        cluster = self.spec.cluster
        if cluster.image is not None:
            return cluster.image
        needs_smddp = distribution != "torch_distributed"
        images = catalog.images()
        if cluster.framework is None:
            image = next(image for image in images if image.smddp or not needs_smddp)
            self.decisions.append(f"framework: PyTorch {image.framework}, the newest that {distribution} works with")
        else:
            wanted = ".".join(cluster.framework.split(".")[:2])
            found = [image for image in images if image.framework == wanted]
            if not found:
                legal = [image.framework for image in images]
                near = nearest(wanted, legal)
                self._refuse(
                    "cluster.framework",
                    f"AWS has no PyTorch {cluster.framework} container that cloudtrain can use",
                    (f'did you mean "{near}"? ' if near else "") + f"one of: {', '.join(legal)}; or give cluster.image",
                )
                return ""
            image = found[0]
            if needs_smddp and not image.smddp:
                self._refuse(
                    "cluster.framework",
                    f"the PyTorch {image.framework} container has no SMDDP, which {distribution} needs",
                    f'use framework: "{SMDDP_FRAMEWORK}" or distribution: torch_distributed',
                )
        gpu = self.instance is None or self.instance.gpus != 0
        return catalog.image_uri(image, region=self.region(), gpu=gpu)

    def processes(self) -> int | None:
        """Return ranks per instance, or None when only the container can tell."""
        asked = self.spec.cluster.processes_per_instance
        instances = self.spec.cluster.instances
        if asked != "auto":
            if self.is_local and self.machine is not None and 0 < self.machine.gpus < asked * instances:
                self.warnings.append(
                    f"{asked * instances} ranks share {self.machine.gpus} GPUs here, so they use Gloo; "
                    "on the cluster each has its own"
                )
            if self.instance is not None and self.instance.gpus and asked > self.instance.gpus:
                self.warnings.append(
                    f"{asked} ranks share the {self.instance.gpus} GPU of {self.instance.name}, so they use Gloo, "
                    "which is slower than NCCL"
                )
            return asked
        if self.is_local and self.machine is not None:
            return self._local_processes(self.machine, instances)
        name = self.spec.cluster.first_choice
        if self.instance is None or self.instance.gpus is None:
            near = nearest(name, catalog.instance_names())
            hint = f' (did you mean "{near}"?)' if near and self.instance is None else ""
            self.warnings.append(f"{name} is not in cloudtrain's catalog{hint}: ranks are counted in the container")
            return None
        return self.instance.gpus or PROCESSES_ON_CPU

    def _local_processes(self, machine: Machine, instances: int) -> int:
        if machine.gpus == 0:
            return PROCESSES_ON_CPU
        if machine.gpus >= instances:
            return machine.gpus // instances
        self.warnings.append(f"{instances} local instances share {machine.gpus} GPU, so they use Gloo instead of NCCL")
        return 1

    def collective_backend(self, distribution: str, processes: int | None) -> str:
        if self.is_local and self.machine is not None:
            ranks = (processes or 1) * self.spec.cluster.instances
            return "nccl" if self.machine.gpus >= ranks else "gloo"
        if self.instance is not None and self.instance.gpus == 0:
            return "gloo"
        if self.instance is not None and self.instance.gpus and (processes or 0) > self.instance.gpus:
            return "gloo"
        return "nccl" if distribution == "torch_distributed" else "smddp"

    def check(self, code: CodeInfo) -> None:
        """Refuse what the service or the container would only find out later."""
        if code.bytes > _LARGE_CODE_BYTES:
            self.warnings.append(
                f"the code folder has {format_size(code.bytes)}: name data in .cloudtrainignore, and make it a channel"
            )
        if self.instance is not None and self.instance.neuron:
            self._refuse(
                "cluster.instance_type",
                f"{self.instance.name} has no GPU that PyTorch's CUDA containers could use",
                "choose a p or g type",
            )
        for name, channel in self.spec.data.items():
            if self.is_local and channel.mode == "Pipe":
                self._refuse(f"data.{name}.mode", "this machine has no Pipe mode", "use File or FastFile")

    def resume(self) -> str:
        """Return `auto`, `never` or a uri. A run id must have been looked up before."""
        resume = self.spec.checkpoint.resume
        if resume in ("auto", "never") or "://" in resume:
            return resume
        if resume.startswith("/"):
            return Path(resume).as_uri()
        if is_run_id(resume.rpartition(":")[2]):
            self._refuse("checkpoint.resume", f"there is no run {resume} here", "see: cloudtrain list")
        else:
            hint = "use auto, never, a run id, s3://bucket/prefix or an absolute path"
            self._refuse("checkpoint.resume", f'expected where to resume from, got "{resume}"', hint)
        return resume

    # ------------------------------------------------------------ where things lie

    def role(self) -> str:
        if self.is_local:
            return _LOCAL_ROLE
        if self.settings.missing:
            names = ", ".join(self.settings.missing)
            self.warnings.append(
                f"no {names} in the settings: placeholders stand in the request, and submit would refuse"
            )
        return self.settings.role or _PLACEHOLDER_ROLE

    def region(self) -> str:
        return self.settings.region or catalog.priced_regions()[0]

    def locations(self, code: CodeInfo, *, go_on_in: str | None) -> Locations:
        """Return where everything lies; in S3, code is shared between runs by its digest.

        Args:
            code: What travels.
            go_on_in: `auto`, `never`, or the checkpoints folder that a script goes on in: unlike a Task it knows only
                one folder.
        """
        spec = self.spec
        own = go_on_in if go_on_in is not None and "://" in go_on_in else None
        if self.is_local:
            root = (self.home or Path(".cloudtrain")).resolve()
            base = (root / "runs" / self.run).as_uri()
            return Locations(
                code=(root / "bundles" / code.digest / BUNDLE_FILE).as_uri(),
                config=f"{base}/config",
                output=(root / "runs").as_uri(),
                checkpoints=own or self._local_checkpoints(f"{base}/checkpoints"),
                channels={name: _local_uri(spec, channel.uri) for name, channel in spec.data.items()},
            )
        base = f"s3://{self.settings.bucket or _PLACEHOLDER_BUCKET}/{self.settings.prefix}".rstrip("/")
        if spec.checkpoint.uri is not None and not spec.checkpoint.uri.startswith("s3://"):
            self._refuse("checkpoint.uri", "a cluster saves to S3", "use s3://bucket/prefix, or leave it out")
        return Locations(
            code=f"{base}/code/{code.digest}/{BUNDLE_FILE}",
            config=f"{base}/{self.run}/config",
            output=base,
            checkpoints=(own or spec.checkpoint.uri or f"{base}/{self.run}/checkpoints").rstrip("/"),
            channels={
                name: channel.uri if channel.is_s3 else f"{base}/{self.run}/data/{name}"
                for name, channel in spec.data.items()
            },
        )

    def _local_checkpoints(self, default: str) -> str:
        uri = self.spec.checkpoint.uri
        if uri is None:
            return default
        if uri.startswith("s3://") and self.spec.code.script is not None:
            self._refuse("checkpoint.uri", "a script's checkpoints stay on this machine in a local run", "leave it out")
        return uri if "://" in uri else (self.spec.base / uri).resolve().as_uri()

    def uploads(self, locations: Locations) -> tuple[Upload, ...]:
        """Return the local data that a cluster needs a copy of."""
        if self.is_local:
            return ()
        return tuple(
            Upload(str((self.spec.base / channel.uri).resolve()), locations.channels[name])
            for name, channel in self.spec.data.items()
            if not channel.is_s3
        )

    # ------------------------------------------------------------ time and money

    def _hourly(self) -> tuple[float | None, str]:
        """Return the price of the whole cluster in USD per hour, and the region it is from."""
        region = self.region()
        # With preferences any of the types may be chosen: the dearest bounds the cost.
        types = self.spec.cluster.prefer or (self.spec.cluster.first_choice,)
        prices = [catalog.usd_per_hour(name, region) for name in types]
        known = [price for price in prices if price is not None]
        return (max(known) * self.spec.cluster.instances if len(known) == len(types) else None), region

    def max_runtime(self) -> int:
        limits = self.spec.limits
        if limits.cost is None or self.is_local:
            return limits.runtime
        hourly, region = self._hourly()
        if hourly is None:
            self._refuse(
                "limits.cost",
                f"no price is known for {self.spec.cluster.first_choice} in {region}, so no ceiling can be kept",
                "remove limits.cost and bound limits.runtime",
            )
            return limits.runtime
        affordable = math.floor(limits.cost / hourly * 3600)
        if affordable < _MIN_RUNTIME_SECONDS:
            self._refuse(
                "limits.cost",
                f"{limits.cost:g} USD pays for {affordable} s of {hourly:.2f} USD per hour",
                "raise limits.cost or take fewer or smaller instances",
            )
        if affordable < limits.runtime:
            self.decisions.append(
                f"runtime: {format_duration(affordable)} instead of {format_duration(limits.runtime)}, "
                f"so that the run costs at most {limits.cost:g} USD"
            )
        return min(limits.runtime, max(affordable, _MIN_RUNTIME_SECONDS))

    def max_wait(self, max_runtime: int) -> int | None:
        spot = self.spec.cluster.spot
        if spot is None:
            return None
        return spot.max_wait or 2 * max_runtime

    def cost(self, max_runtime: int) -> CostPlan:
        if self.is_local:
            return CostPlan(0.0, 0.0, None)
        hourly, region = self._hourly()
        if hourly is None:
            self.warnings.append(f"no price is known for {self.spec.cluster.first_choice} in {region}")
            return CostPlan(None, None, None)
        if self.settings.region is None:
            self.warnings.append(f"no region in the settings: image and price are those of {region}")
        return CostPlan(round(hourly, 4), round(hourly * max_runtime / 3600, 2), catalog.price_date())


def _has_smddp(name: str) -> bool:
    instance = catalog.find_instance(name)
    return instance is not None and instance.smddp


def _local_uri(spec: JobSpec, uri: str) -> str:
    return uri if uri.startswith("s3://") else (spec.base / uri).resolve().as_uri()
