"""Placement of a job: instance types, distribution, container image and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from cloudtrain import catalog
from cloudtrain.catalog import service_limits
from cloudtrain.errors import nearest
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.sections.train import Train
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import Step, decision, error, warning
from cloudtrain.planning.plan import ClusterPlan
from cloudtrain.support.aws_names import PUBLIC_REGISTRY, parse_image
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

TORCH_DISTRIBUTED = "torch_distributed"
LAUNCHER_CLOUDTRAIN = "cloudtrain"
LAUNCHER_TOOLKIT = "toolkit"
CPU_PROCESSES = 2
"""Ranks per instance on a machine without GPUs: the smallest number with real collectives."""
MIN_FSDP2_VERSION = "2.6"
"""First PyTorch with public FSDP2 (torch.distributed.fsdp.fully_shard). Source: PyTorch 2.6 release notes, 2025-01."""

CUDA_RANGES = {
    "K80": ("", "11.8"),
    "V100": ("", "12.9"),
    **dict.fromkeys(("B200", "B300", "GB200", "RTX PRO 4500", "RTX PRO Server 6000"), ("12.8", "")),
}
"""First and last CUDA version whose PyTorch builds have kernels for a GPU; other GPUs work with all versions.

Source: NVIDIA's CUDA release notes (12.0 drops Kepler, 12.8 brings Blackwell, 13.0 drops Volta); PyTorch's RELEASE.md.
"""

_OTHER_REGION = "us-west-2"
"""Region of the image that a local plan names in place of a region without AWS's images."""

_AWS_NAME = lazy_pattern(r"pytorch(?:-training)?:(?P<version>\d+\.\d+)")


@dataclass(frozen=True)
class Machine:
    """A machine whose own Python runs the ranks: this one for local runs, which is all instances, or a node of a cluster.

    Attributes:
        gpus: GPUs that are visible to CUDA.
        variables: Names of the environment variables that are set.
        has_ml_namespace: Whether a run can have its own /opt/ml, in a mount namespace.
        missing: Packages of trackers that are not installed: tensorboard, mlflow, wandb.
        has_wandb_login: Whether its user may have logged in at Weights & Biases.
        cards: How many of the GPUs NCCL can use together; None for all. MIG instances count as one.
        torch: Version of its PyTorch; empty if it is unknown.
        is_node: Whether it is a node of a cluster: each instance has a machine of this kind for itself.
    """

    gpus: int
    variables: frozenset[str] = frozenset()
    has_ml_namespace: bool = True
    missing: frozenset[str] = frozenset()
    has_wandb_login: bool = True
    cards: int | None = None
    torch: str = ""
    is_node: bool = False

    @property
    def place(self) -> str:
        """Where GPUs are shared, as part of a sentence."""
        return "of a node" if self.is_node else "here"

    def ranks(self, processes: int, instances: int) -> int:
        """Return how many ranks use its GPUs, with so many on each of the instances."""
        return processes if self.is_node else processes * instances

    @property
    def has_mig(self) -> bool:
        """Whether several GPUs are parts of one card, as MIG instances are."""
        return self.cards is not None and self.cards < self.gpus

    def is_shared_by(self, ranks: int) -> bool:
        """Return whether NCCL cannot give each of these ranks a GPU, of which there is one at least."""
        usable = self.gpus if self.cards is None else self.cards
        return 0 < usable < ranks


_Instances = list[catalog.Instance | None]
"""The instance types that the job may get, in order; None for a type that the catalog does not have."""


def choose_placement(
    spec: JobSpec,
    *,
    region: str,
    machine: Machine | None,
    today: date,
    shares_out: bool = False,
) -> Step[tuple[ClusterPlan, str]]:
    """Return the cluster and its ranks, and the uri of the container image.

    Args:
        spec: The job.
        region: Region of the image's registry.
        machine: The machine whose Python runs the ranks; None for containers on instances.
        today: Date of the plan.
        shares_out: Whether the code itself may use several GPUs for one process that is started.
    """
    instances: _Instances = []
    if machine is None or not machine.is_node:
        # A node has no instance type, and a portable job may name one.
        instances = yield from _find_instances(spec)
    first = instances[0] if instances else None
    known = [instance for instance in instances if instance is not None]
    distribution = yield from _distribution(spec, known)
    if machine is not None and region not in catalog.image_regions():
        # A local run pulls no image.
        region = _OTHER_REGION
    image, framework = yield from _image(spec, distribution, known, region, today, machine)
    processes = yield from _processes(spec, instances, machine, shares_out=shares_out)
    cluster = ClusterPlan(
        instance_type=spec.cluster.types[0] if instances else "",
        instances=spec.cluster.preferred_instances,
        processes_per_instance=processes,
        world_size=_world_size(spec, instances, processes),
        distribution=distribution,
        launcher=LAUNCHER_CLOUDTRAIN if distribution == TORCH_DISTRIBUTED else LAUNCHER_TOOLKIT,
        backend=_backend(spec, distribution, first, processes, machine),
    )
    yield from _check_parallel(spec, cluster, framework, _gpus(first, machine))
    return cluster, image


def _gpus(instance: catalog.Instance | None, machine: Machine | None) -> int | None:
    """Return the GPUs of this machine or else of an instance; None for a type that is newer than the catalog."""
    if machine is not None:
        return machine.gpus
    if instance is None:
        return None
    return instance.gpus


def _find_instances(spec: JobSpec) -> Step[_Instances]:
    instances = []
    for index, name in enumerate(spec.cluster.types):
        at: FieldPath = ("cluster", "instance_type")
        if spec.cluster.prefer:
            at = ("cluster", "prefer", index)
        instance = catalog.find_instance(name)
        if instance is None:
            yield from _check_unknown_type(name, at)
        elif not instance.has_images:
            why = "is not an x86 machine"
            if instance.neuron:
                why = "has no GPU that PyTorch's CUDA images support"
            yield error(at, f"{name} {why}", "choose a p or g type, such as ml.p4d.24xlarge")
        instances.append(instance)
    return instances


def _check_unknown_type(name: str, at: FieldPath) -> Iterator[Diagnostic]:
    """Warn about a type that is newer than the catalog; reject one that the installed AWS model does not have."""
    if name in service_limits.instance_types():
        yield warning(
            f"{name} is newer than cloudtrain's catalog: the container counts its GPUs at the start"
        )
        return
    near = " or ".join(f'"{other}"' for other in catalog.suggest(name))
    hint = "If it is a new type: pip install -U boto3"
    if near:
        hint = f"did you mean {near}? {hint}"
    yield error(
        at,
        f"SageMaker has no instance type {name} (model of botocore {service_limits.model_version()})",
        hint,
    )


def _distribution(spec: JobSpec, known: list[catalog.Instance]) -> Step[str]:
    requested = spec.cluster.distribution
    if requested == "auto":
        yield decision(
            f"distribution: {TORCH_DISTRIBUTED}, which works on every type and with every PyTorch"
        )
        return TORCH_DISTRIBUTED
    if requested == TORCH_DISTRIBUTED:
        return requested
    every = map(catalog.find_instance, catalog.instance_names())
    legal = ", ".join(
        instance.name for instance in every if instance is not None and instance.smddp
    )
    for instance in known:
        if not instance.smddp:
            message = (
                f"{requested} needs AWS's SMDDP library, which does not support {instance.name}"
            )
            yield error(
                ("cluster", "distribution"), message, f"use {TORCH_DISTRIBUTED}, or one of {legal}"
            )
    return requested


def _image(
    spec: JobSpec,
    distribution: str,
    known: list[catalog.Instance],
    region: str,
    today: date,
    machine: Machine | None,
) -> Step[tuple[str, str | None]]:
    kinds = {instance.gpus != 0 for instance in known}
    if len(kinds) > 1:
        hint = "prefer types of one kind"
        yield error(
            ("cluster", "prefer"), "one image cannot support types with and without GPUs", hint
        )
    if spec.cluster.image is not None:
        version = yield from _check_own_image(spec, distribution, region, kinds, today)
        return spec.cluster.image.uri, version
    if region not in catalog.image_regions():
        yield from _refuse_region(region)
        return "", None
    gpus = sorted({instance.gpu for instance in known if instance.gpu is not None})
    image = yield from _framework(spec, distribution, gpus, region, machine)
    if image is None:
        return "", None
    if machine is not None and spec.cluster.framework is not None:
        yield decision(_describe_framework(image, machine))
    yield from _warn_about_end(image, today)
    return catalog.image_uri(image, region=region, gpu=kinds != {False}), image.framework


def _refuse_region(region: str) -> Iterator[Diagnostic]:
    """Refuse a region without a known registry. A name that is no region at all is reported with the settings."""
    if region in service_limits.regions() or service_limits.is_newer_region(region):
        known = catalog.image_regions()
        near = nearest(region, known)
        hint = f"one of: {', '.join(known)}; or give cluster.image"
        if near:
            hint = f'did you mean "{near}"? {hint}'
        yield error(("cluster", "image"), f"no registry of AWS's images is known in {region}", hint)


def _framework(
    spec: JobSpec, distribution: str, gpus: list[str], region: str, machine: Machine | None
) -> Step[catalog.Image | None]:
    """Return AWS's image for the requested PyTorch version, by default the newest that the job can use."""
    needs_smddp = distribution != TORCH_DISTRIBUTED
    images = [image for image in catalog.images() if region not in image.absent_in]
    requested = spec.cluster.framework
    if requested is None:
        serving = [image for image in images if _supports(image, needs_smddp=needs_smddp)]
        fitting = [image for image in serving if not _unsupported(image, gpus)]
        if not fitting:
            yield _gpu_error(serving[0], gpus, "none of AWS's images has them")
            return None
        text = _describe_framework(fitting[0], machine)
        text += f", the newest that {distribution} works with"
        if fitting[0] is not serving[0]:
            text += f" on {' and '.join(gpus)}"
        if len(images) < len(catalog.images()):
            text += f" in {region}"
        yield decision(text)
        return fitting[0]
    version = ".".join(requested.split(".")[:2])
    found = next((image for image in images if image.framework == version), None)
    newer = catalog.newer_image(version)
    if newer is not None:
        found = newer
        yield warning(
            f"cluster.framework: PyTorch {version} is newer than cloudtrain's catalog. The tag of {newer.gpu} was "
            f"constructed after that of {images[0].framework}: `cloudtrain check` asks whether it exists"
        )
    if found is None:
        legal = [image.framework for image in images]
        near = nearest(version, legal)
        message = f"AWS has no PyTorch {requested} image in {region} that cloudtrain can use"
        hint = f"one of: {', '.join(legal)}; or give cluster.image"
        if near:
            hint = f'did you mean "{near}"? {hint}'
        yield error(("cluster", "framework"), message, hint)
        return None
    if needs_smddp:
        yield from _check_smddp(found, distribution, ("cluster", "framework"))
    if _unsupported(found, gpus):
        others = ", ".join(image.framework for image in images if not _unsupported(image, gpus))
        yield _gpu_error(found, gpus, f"these have: {others}" if others else "no other has")
    return found


def _describe_framework(image: catalog.Image, machine: Machine | None) -> str:
    """Return the PyTorch that a run uses; of a local run this machine's, beside that of the image."""
    if machine is None:
        return f"framework: PyTorch {image.framework}"
    if machine.is_node:
        return f"framework: PyTorch of the nodes; AWS's image has {image.framework}"
    own = f"PyTorch {machine.torch}".rstrip()
    return f"framework: {own} of this machine; AWS's image has {image.framework}"


def _unsupported(image: catalog.Image, gpus: list[str]) -> list[str]:
    """Return the GPUs that an image's PyTorch has no kernels for."""
    found: list[str] = []
    if not image.cuda:
        return found
    cuda = _version(image.cuda)
    for gpu in gpus:
        # An empty text where the GPU has no such limit.
        first, last = CUDA_RANGES.get(gpu, ("", ""))
        is_too_old = first and cuda < _version(first)
        is_too_new = last and cuda > _version(last)
        if is_too_old or is_too_new:
            found.append(gpu)
    return found


def _gpu_error(image: catalog.Image, gpus: list[str], others: str) -> Diagnostic:
    message = f"PyTorch {image.framework} with CUDA {image.cuda} has no kernels for {', '.join(_unsupported(image, gpus))}"
    return error(("cluster", "framework"), message, f"{others}; or give cluster.image")


def _supports(image: catalog.Image, *, needs_smddp: bool) -> bool:
    return not needs_smddp or (image.smddp and image.mpi4py)


def _check_smddp(image: catalog.Image, distribution: str, at: FieldPath) -> Iterator[Diagnostic]:
    missing = [
        name for name, inside in (("SMDDP", image.smddp), ("mpi4py", image.mpi4py)) if not inside
    ]
    if missing:
        newest = next(other for other in catalog.images() if _supports(other, needs_smddp=True))
        yield error(
            at,
            f"the PyTorch {image.framework} image has no {' and no '.join(missing)}, which {distribution} needs",
            f'use framework: "{newest.framework}" or distribution: {TORCH_DISTRIBUTED}',
        )


def _check_own_image(
    spec: JobSpec, distribution: str, region: str, kinds: set[bool], today: date
) -> Step[str | None]:
    """Check the image of a job; return its PyTorch version if it is one of AWS's, else None."""
    at = ("cluster", "image")
    image = spec.cluster.image
    uri = "" if image is None else image.uri
    found = parse_image(uri)
    is_public = uri.startswith(PUBLIC_REGISTRY)
    is_private = image is not None and image.private_registry is not None
    if is_private and (found is not None or is_public):
        yield error(
            (*at, "private_registry"),
            "the image is in ECR, which needs no registry login",
            "remove it",
        )
    if found is None and not is_public:
        if not is_private:
            hint = (
                "for example 123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1, public.ecr.aws/..., or, for another "
                "registry that the subnets reach, image: {uri: ..., private_registry: {}}"
            )
            yield error(
                at,
                f'SageMaker pulls images from ECR, or from a private registry, got "{uri}"',
                hint,
            )
        return None
    if found is not None and found.region != region:
        hint = f"push it to {region}, or run the job in {found.region}"
        yield error(at, f"the image is in {found.region}, but the job is in {region}", hint)
    name = uri.rpartition("/")[2]
    if found is not None:
        # Without the digest, which may follow the tag.
        name = f"{found.repository}:{found.tag}"
    aws = _AWS_NAME.match(name)
    if aws is None:
        return None
    if kinds == {True} and "-cpu-" in name:
        yield error(
            at,
            "this image has no CUDA, but the instance type has GPUs",
            "use the one with -cu or -gpu",
        )
    listed = next(
        (listed for listed in catalog.images() if listed.framework == aws["version"]), None
    )
    if listed is not None:
        yield from _warn_about_end(listed, today)
        if distribution != TORCH_DISTRIBUTED:
            yield from _check_smddp(listed, distribution, at)
    return aws["version"]


def _warn_about_end(image: catalog.Image, today: date) -> Iterator[Diagnostic]:
    if image.end_of_patch is not None and date.fromisoformat(image.end_of_patch) < today:
        yield warning(
            f"AWS no longer patches the PyTorch {image.framework} image (since {image.end_of_patch})"
        )


def _processes(
    spec: JobSpec, instances: _Instances, machine: Machine | None, *, shares_out: bool
) -> Step[int | None]:
    """Return the number of ranks per instance, or None when it is unknown before the start."""
    requested = spec.cluster.processes_per_instance
    given = [choice.instances for choice in spec.cluster.choices]
    if requested != "auto":
        yield from _warn_about_sharing(spec, requested, instances, machine, shares_out=shares_out)
        if machine is None and len(set(given)) > 1:
            message = "the types have different numbers of instances, so the world size would depend on capacity"
            yield error(
                ("cluster", "prefer"),
                message,
                "give equal numbers, or leave processes_per_instance out",
            )
        return requested
    if spec.code.command is not None:
        yield decision(
            "ranks: one per instance, because a command starts the processes of its instance itself"
        )
        if machine is not None:
            yield from _warn_about_sharing_here(spec, 1, machine)
        return 1
    if machine is not None:
        return (yield from _local_processes(spec, machine))
    counts = [None if instance is None else instance.gpus for instance in instances]
    ranks = {
        None if gpus is None else (gpus or CPU_PROCESSES) * count
        for gpus, count in zip(counts, given, strict=True)
    }
    # The world size may depend on the type. Unknown numbers of GPUs are equal only with equal numbers of instances.
    if len(ranks) > 1 or (None in ranks and len(set(given)) > 1):
        triples = zip(spec.cluster.choices, counts, strict=True)
        each = ", ".join(
            f"{choice.instances} x {choice.instance_type} {gpus or '?'}" for choice, gpus in triples
        )
        yield error(
            ("cluster", "prefer"),
            f"the types have different numbers of GPUs ({each}), so the world size would depend on capacity",
            "give each type as many instances as make equal numbers of GPUs, or give processes_per_instance",
        )
        return None
    if len(set(counts)) > 1:
        yield decision(
            "ranks: one per GPU; the types have different numbers of GPUs, and the same world size"
        )
        return None
    # None where the type is newer than the catalog: the container counts its GPUs.
    return CPU_PROCESSES if counts[0] == 0 else counts[0]


def _world_size(spec: JobSpec, instances: _Instances, processes: int | None) -> int:
    """Return the number of all ranks; 0 when it is unknown before the start."""
    each = processes
    first = instances[0] if instances else None
    if processes is None and len(instances) > 1 and first is not None:
        # The types have different numbers of GPUs, and all the same world size.
        each = first.gpus
    return (each or 0) * spec.cluster.preferred_instances


def _warn_about_sharing(
    spec: JobSpec,
    requested: int,
    instances: _Instances,
    machine: Machine | None,
    *,
    shares_out: bool,
) -> Iterator[Diagnostic]:
    if machine is not None:
        yield from _warn_about_sharing_here(spec, requested, machine)
    for instance in instances:
        if instance is None or not instance.gpus:
            continue
        name = instance.name
        gpus = instance.gpus
        if requested > gpus:
            yield warning(
                f"{requested} ranks share the {gpus} GPU of {name}: Gloo, which is slower than NCCL"
            )
        elif requested < gpus and machine is None and not shares_out:
            subject = "1 rank uses" if requested == 1 else f"{requested} ranks use"
            yield warning(
                f"{subject} {requested} of the {gpus} GPUs of {name}; all of them are billed"
            )


def _warn_about_sharing_here(
    spec: JobSpec, processes: int, machine: Machine
) -> Iterator[Diagnostic]:
    """Warn of a local run whose ranks share GPUs; for a script also of what then fails in its own code."""
    instances = 1 if machine.is_node else spec.cluster.preferred_instances
    ranks = machine.ranks(processes, instances)
    if not machine.is_shared_by(ranks):
        return
    kind = "GPUs" if machine.gpus > 1 else "GPU"
    if machine.has_mig:
        kind = "MIG instances"
    text = f"{ranks} ranks share {machine.gpus} {kind} {machine.place}, so they use Gloo instead of NCCL"
    if spec.code.task is None:
        text += "; nccl in the code becomes gloo, which has the collectives of DDP for tensors on a GPU, not those of FSDP"
    each = max(1, machine.gpus // instances)
    if spec.code.task is None and processes > each:
        text += (
            f". Code that takes the GPU of its LOCAL_RANK fails, because each instance has {each}: use "
            f"--set cluster.processes_per_instance={each}, or hide the GPUs (CUDA_VISIBLE_DEVICES= )"
        )
    yield warning(text)


def _local_processes(spec: JobSpec, machine: Machine) -> Step[int]:
    instances = spec.cluster.preferred_instances
    if machine.gpus == 0:
        return CPU_PROCESSES
    if machine.is_node:
        return machine.gpus
    processes = max(1, machine.gpus // instances)
    if machine.has_mig:
        # A process of CUDA sees one MIG instance only.
        processes = 1
    yield from _warn_about_sharing_here(spec, processes, machine)
    return processes


def _backend(
    spec: JobSpec,
    distribution: str,
    instance: catalog.Instance | None,
    processes: int | None,
    machine: Machine | None,
) -> str:
    if machine is not None:
        ranks = machine.ranks(processes or 1, spec.cluster.preferred_instances)
        has_gpu_each = machine.gpus > 0 and not machine.is_shared_by(ranks)
        return "nccl" if has_gpu_each else "gloo"
    gpus = _gpus(instance, machine)
    if gpus == 0 or (gpus and (processes or 0) > gpus):
        return "gloo"
    return "nccl" if distribution == TORCH_DISTRIBUTED else "smddp"


def _check_parallel(
    spec: JobSpec, cluster: ClusterPlan, framework: str | None, gpus: int | None
) -> Iterator[Diagnostic]:
    train = spec.train
    if train is None or train.parallel.is_plain:
        return
    parallel = train.parallel
    at = ("train", "parallel")
    if framework is not None and _version(framework) < _version(MIN_FSDP2_VERSION):
        field = next(
            name
            for name in ("data", "tensor", "pipeline")
            if getattr(parallel, name) not in ("ddp", 1)
        )
        message = f"{field}: {getattr(parallel, field)} needs PyTorch {MIN_FSDP2_VERSION}, and the container has {framework}"
        hint = f"use distribution: {TORCH_DISTRIBUTED} with a newer framework, or data: ddp"
        yield error((*at, field), message, hint)
    if gpus and cluster.backend == "gloo":
        hint = (
            "use one rank per GPU (cluster.processes_per_instance), or, for a local run, hide the GPUs from it "
            "(CUDA_VISIBLE_DEVICES= )"
        )
        yield error(at, "ranks that share a GPU support data: ddp only", hint)
    group = parallel.group_size
    world_size = cluster.world_size
    if world_size % group:
        message = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} does not divide the {world_size} ranks"
        yield error(at, message, f"their product must be one of {_divisors(world_size)}")
    elif parallel.shard and (replicas := world_size // group) % parallel.shard:
        message = f"shard {parallel.shard} does not divide the {replicas} data ranks"
        yield error((*at, "shard"), message, f"it must be one of {_divisors(replicas)}")
    if parallel.pipeline > 1:
        yield from _check_pipeline(train)
        yield from _warn_about_waiting(parallel.pipeline, train.accumulate)
    if cluster.processes_per_instance and parallel.tensor > cluster.processes_per_instance:
        yield warning(
            f"tensor parallelism over {parallel.tensor} ranks spans instances of {cluster.processes_per_instance}: "
            "every layer waits for the network"
        )


def _warn_about_waiting(stages: int, micro_batches: int) -> Iterator[Diagnostic]:
    """Warn about a pipeline that fills and drains for a large part of each step."""
    if micro_batches >= stages:
        return
    better = 4 * stages
    waits = (stages - 1) / (micro_batches + stages - 1)
    less = (stages - 1) / (better + stages - 1)
    yield warning(
        f"{stages} pipeline stages with accumulate {micro_batches}: {waits:.0%} of each step is waiting; with accumulate "
        f"{better} it would be {less:.0%}"
    )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_pipeline(train: Train) -> Iterator[Diagnostic]:
    """Check that the schedule of a pipeline fits the number of micro-batches and the rest of the section."""
    at = ("train", "parallel")
    parallel = train.parallel
    stages = parallel.pipeline
    schedule = parallel.schedule
    hint = f"set train.accumulate to {4 * stages}, or schedule: gpipe, which takes any number"
    if schedule == "1f1b" and train.accumulate < stages:
        message = f"1f1b with {stages} stages needs accumulate {stages} or more, and it is {train.accumulate}"
        yield error((*at, "schedule"), message, hint)
    if schedule in ("interleaved", "zero_bubble") and train.accumulate % stages:
        message = f"{schedule} needs an accumulate that {stages} stages divide, and it is {train.accumulate}"
        yield error((*at, "schedule"), message, hint)
    if schedule == "zero_bubble" and train.compile:
        yield error(
            (*at, "schedule"),
            "zero_bubble does not work with train.compile",
            "use another schedule",
        )
    for name in ("static_graph", "find_unused"):
        if getattr(parallel, name):
            yield error((*at, name), "it does not work with a pipeline", "remove it")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
