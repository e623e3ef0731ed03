"""The cluster, distribution and image that a plan chooses, and the combinations that it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from support.jobs import Cli
from support.plans import SETTINGS, PlanOf, local, refusal

from cloudtrain.backends.container.machine import this_machine
from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices, service_limits
from cloudtrain.planning.placement import Machine


def test_auto_explains_its_choice(plan_of: PlanOf) -> None:
    plan = plan_of()
    assert plan.cluster.distribution == "torch_distributed"
    assert plan.cluster.launcher == "cloudtrain"
    assert len(plan.decisions) == 2


@pytest.mark.parametrize("distribution", ["pytorchddp", "smdistributed"])
def test_mpi_distributions_take_the_newest_image_that_has_smddp(
    plan_of: PlanOf, distribution: str
) -> None:
    plan = plan_of(f"cluster.distribution={distribution}")
    assert "pytorch-training:2.5.1-gpu" in plan.image
    assert plan.cluster.launcher == "toolkit"
    assert "ContainerEntrypoint" not in plan.request["AlgorithmSpecification"]


@pytest.mark.parametrize("instance_type", ["ml.p5e.48xlarge", "ml.g6.48xlarge", "ml.m5.xlarge"])
def test_smddp_on_the_wrong_instance_is_refused(plan_of: PlanOf, instance_type: str) -> None:
    text = refusal(
        plan_of, "cluster.distribution=smdistributed", f"cluster.instance_type={instance_type}"
    )
    assert (
        f"does not support {instance_type}; use torch_distributed, or one of ml.p4d.24xlarge"
        in text
    )


def test_smddp_with_an_image_that_lacks_it_is_refused(plan_of: PlanOf) -> None:
    text = refusal(plan_of, "cluster.distribution=pytorchddp", 'cluster.framework="2.13"')
    assert 'has no SMDDP and no mpi4py, which pytorchddp needs; use framework: "2.5"' in text


def test_an_unknown_framework_is_refused(plan_of: PlanOf) -> None:
    text = refusal(plan_of, 'cluster.framework="2.4"')
    assert (
        'AWS has no PyTorch 2.4 image in us-west-2 that cloudtrain can use; did you mean "2.14"? one of: 2.14,'
        in text
    )
    assert "no PyTorch 3.0 image" in refusal(plan_of, 'cluster.framework="3.0"')


def test_a_framework_newer_than_the_catalog_is_a_warning(plan_of: PlanOf) -> None:
    plan = plan_of('cluster.framework="2.99"')
    assert plan.image.endswith("/pytorch:2.99-cu133-amzn2023-sagemaker")
    assert any(
        "PyTorch 2.99 is newer than cloudtrain's catalog" in warning for warning in plan.warnings
    )
    assert "has no SMDDP" in refusal(
        plan_of, 'cluster.framework="2.99"', "cluster.distribution=smdistributed"
    )


def test_the_newest_image_of_a_region_is_chosen(plan_of: PlanOf) -> None:
    in_china = "arn:aws-cn:iam::123456789012:role/training"
    abroad = SageMakerTarget(
        replace(SETTINGS, role=in_china, region="cn-north-1"), bundled_prices()
    )
    plan = plan_of(target=abroad)
    assert plan.image.startswith("727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.13-")
    assert "no PyTorch 2.14 image in cn-north-1" in refusal(
        plan_of, 'cluster.framework="2.14"', target=abroad
    )


def test_a_region_without_a_known_registry_is_refused(plan_of: PlanOf) -> None:
    later = SageMakerTarget(replace(SETTINGS, region="eu-west-9"), bundled_prices())
    text = refusal(plan_of, target=later)
    assert "cluster.image: no registry of AWS's images is known in eu-west-9; did you mean" in text
    assert "one of: af-south-1, ap-east-1," in text
    here = LocalTarget(
        replace(SETTINGS, region="eu-west-9"), Path("/somewhere/.cloudtrain"), Machine(gpus=0)
    )
    assert "us-west-2" in plan_of(target=here).image, "a local run pulls no image"
    own = "cluster.image=123456789012.dkr.ecr.eu-west-9.amazonaws.com/train:1"
    assert plan_of(own, target=later).image.endswith("/train:1")


def test_trainium_is_refused(plan_of: PlanOf) -> None:
    assert "no GPU that PyTorch" in refusal(plan_of, "cluster.instance_type=ml.trn1.32xlarge")


def test_unknown_instance_type_is_refused(plan_of: PlanOf) -> None:
    assert 'did you mean "ml.p4d.24xlarge"?' in refusal(
        plan_of, "cluster.instance_type=ml.p4d.24xlrge"
    )


def test_instance_type_missing_in_the_catalog_is_a_warning(
    plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = service_limits.instance_types()
    monkeypatch.setattr(service_limits, "instance_types", lambda: known | {"ml.p9.48xlarge"})
    plan = plan_of("cluster.instance_type=ml.p9.48xlarge")
    assert any("newer than cloudtrain's catalog" in warning for warning in plan.warnings)
    assert plan.cluster.processes_per_instance is None


def test_a_cpu_instance_gets_the_cpu_image(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.instance_type=ml.m5.xlarge")
    assert "-cpu-" in plan.image
    assert plan.cluster.backend == "gloo"
    assert plan.cluster.processes_per_instance == 2


@pytest.mark.parametrize(
    ("gpus", "instances", "processes", "backend"),
    [
        (0, 2, 2, "gloo"),
        (4, 2, 2, "nccl"),
        (8, 1, 8, "nccl"),
        (1, 2, 1, "gloo"),
        (1, 1, 1, "nccl"),
        (3, 2, 1, "nccl"),
        (2, 3, 1, "gloo"),
    ],
)
def test_local_runs_use_the_available_gpus(
    plan_of: PlanOf, gpus: int, instances: int, processes: int, backend: str
) -> None:
    plan = plan_of(f"cluster.instances={instances}", **local(gpus))
    assert (plan.cluster.processes_per_instance, plan.cluster.backend) == (processes, backend)


@pytest.mark.parametrize(
    ("overrides", "gpus", "cards", "expected"),
    [
        (["cluster.instances=2"], 1, None, "2 ranks share 1 GPU here, so they use Gloo"),
        (["cluster.instances=3"], 2, None, "3 ranks share 2 GPUs here, so they use Gloo"),
        (["cluster.instances=2"], 2, 1, "2 ranks share 2 MIG instances here, so they use Gloo"),
        (["cluster.instances=2", "cluster.processes_per_instance=2"], 1, None, "4 ranks share 1"),
    ],
)
def test_a_local_plan_warns_of_shared_gpus(
    plan_of: PlanOf, overrides: list[str], gpus: int, cards: int | None, expected: str
) -> None:
    target = LocalTarget(SETTINGS, Path("/home"), Machine(gpus=gpus, cards=cards))
    plan = plan_of(*overrides, target=target)
    (found,) = [each for each in plan.warnings if "share" in each]
    assert found.startswith(expected)
    assert plan.cluster.backend == "gloo"
    assert plan_of("cluster.instances=1", target=target).cluster.backend == "nccl"


def test_ranks_that_share_a_gpu_support_replicas_only(plan_of: PlanOf) -> None:
    text = refusal(plan_of, "cluster.instances=2", "train.parallel.data=fsdp", **local(1))
    assert (
        "train.parallel: ranks that share a GPU support data: ddp only; use one rank per GPU"
        in text
    )
    assert plan_of("cluster.instances=2", **local(1)).cluster.backend == "gloo"
    for gpus in (0, 2):
        plan_of("cluster.instances=2", "train.parallel.data=fsdp", **local(gpus))


def test_local_plan_warns_that_torchrun_replaces_mpirun(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.distribution=smdistributed", **local())
    assert any("a local run uses torchrun" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["cluster.distribution=smdistributed", "cluster.instance_type=ml.p5e.48xlarge"],
            "does not support ml.p5e",
        ),
        (["cluster.distribution=pytorchddp", "cluster.framework=2.8"], "has no SMDDP"),
        (
            [
                "cluster.distribution=smdistributed",
                "cluster.image=763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
            ],
            "cluster.image: the PyTorch 2.13 image has no SMDDP",
        ),
        (
            ["train.parallel.data=fsdp", "cluster.framework=2.5"],
            "train.parallel.data: data: fsdp needs PyTorch 2.6, and the container has 2.5",
        ),
        (
            ["train.parallel.tensor=2", "cluster.distribution=smdistributed"],
            "train.parallel.tensor: tensor: 2 needs PyTorch 2.6, and the container has 2.5; use distribution",
        ),
        (
            ["train.parallel={tensor: 3, pipeline: 2}"],
            "tensor 3 x pipeline 2 does not divide the 16 ranks; their",
        ),
        (
            ["train.parallel={data: fsdp, shard: 3}"],
            "train.parallel.shard: shard 3 does not divide the 16 data ranks; it must be one of 1, 2, 4, 8, 16",
        ),
        (
            ["data.train={uri: s3://bucket/x, mode: Pipe}"],
            "data.train.mode: a Task reads a channel's files",
        ),
        (
            ["train.parallel={pipeline: 4}", "train.accumulate=3"],
            "1f1b with 4 stages needs accumulate 4 or more, and it is 3; set train.accumulate to 16, or",
        ),
        (
            ["train.parallel={pipeline: 4, schedule: zero_bubble}", "train.accumulate=6"],
            "train.parallel.schedule: zero_bubble needs an accumulate that 4 stages divide, and it is 6",
        ),
        (
            ["train.parallel={pipeline: 2, schedule: zero_bubble}", "train.compile=true"],
            "train.parallel.schedule: zero_bubble does not work with train.compile",
        ),
        (
            ["train.parallel={pipeline: 2, static_graph: true}"],
            "train.parallel.static_graph: it does not work with a pipeline",
        ),
        (
            ["train.parallel={pipeline: 2, find_unused: true}"],
            "train.parallel.find_unused: it does not work with a pipeline",
        ),
        (
            ["metrics={loss: 'x(.)'}"],
            "metrics: a Task reports its metrics itself; patterns are for scripts; remove it",
        ),
        (
            ["tracking.mlflow=mlflow.db"],
            "tracking.mlflow: a cluster cannot write a database on this machine",
        ),
        (
            ["tracking.mlflow=https://ada:secret12@example.com"],
            "tracking.mlflow: contains a value that looks like a sec",
        ),
        (
            ["cluster={prefer: [ml.p4d.24xlarge, ml.g5.12xlarge]}"],
            "cluster.prefer: the types have different numbers",
        ),
        (
            ["cluster={prefer: [ml.g5.xlarge, ml.m5.xlarge]}"],
            "cluster.prefer: one image cannot support types",
        ),
        (
            ["cluster={prefer: [ml.p4d.24xlarge, ml.trn1.32xlarge]}"],
            "cluster.prefer[1]: ml.trn1.32xlarge has no GPU",
        ),
        (
            ["cluster={prefer: [ml.p4d.24xlarge, ml.p5.48xlarge], distribution: smdistributed}"],
            "SMDDP library, which does not support ml.p5.48xlarge",
        ),
    ],
)
def test_unsupported_combinations_are_refused_with_the_reason(
    plan_of: PlanOf, overrides: list[str], expected: str
) -> None:
    text = refusal(plan_of, *overrides)
    assert expected in text
    assert all(problem.partition("; ")[2] for problem in text.splitlines()), "each has a hint"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["cluster.instance_type=ml.g5.xlarge"],
            "ml.g5.xlarge has no EFA: its 2 instances exchange gradients by TCP",
        ),
        (
            ["cluster.framework=2.6"],
            "AWS no longer patches the PyTorch 2.6 image (since 2026-01-29)",
        ),
        (
            ["cluster.processes_per_instance=4"],
            "4 ranks use 4 of the 8 GPUs of ml.p4d.24xlarge; all",
        ),
        (
            ["train={steps: 100}", "checkpoint.every=500 steps"],
            "the run ends after 100 steps, before the first",
        ),
        (
            ["train={steps: 100, evaluate: {every: 200 steps}}"],
            "ends after 100 steps, before the first evaluation",
        ),
        (
            ["checkpoint.every=10h", "limits.runtime=1h"],
            "checkpoint.every is longer than limits.runtime",
        ),
    ],
)
def test_unfavourable_settings_are_warnings(
    plan_of: PlanOf, overrides: list[str], expected: str
) -> None:
    assert any(expected in warning for warning in plan_of(*overrides).warnings)


def test_a_local_plan_says_nothing_of_billed_gpus(plan_of: PlanOf) -> None:
    assert any(
        "all of them are billed" in warning
        for warning in plan_of("cluster.processes_per_instance=1").warnings
    )
    assert not any(
        "billed" in warning
        for warning in plan_of("cluster.processes_per_instance=1", **local()).warnings
    )


def test_a_plan_of_one_instance_or_with_efa_does_not_warn(plan_of: PlanOf) -> None:
    assert plan_of().warnings == ()
    assert any("of local NVMe" in warning for warning in plan_of("cluster.volume=200GB").warnings)
    assert plan_of("cluster.instances=1", "cluster.instance_type=ml.g5.xlarge").warnings == ()


@pytest.mark.parametrize(
    ("instance_type", "framework"),
    [("ml.p3.2xlarge", "2.8"), ("ml.g5.xlarge", "2.14"), ("ml.p6-b200.48xlarge", "2.14")],
)
def test_newest_image_with_kernels_for_the_gpu_is_chosen(
    plan_of: PlanOf, instance_type: str, framework: str
) -> None:
    plan = plan_of(f"cluster.instance_type={instance_type}")
    assert any(f"framework: PyTorch {framework}," in decision for decision in plan.decisions)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["cluster.instance_type=ml.p3.2xlarge", "cluster.framework=2.13"],
            "CUDA 13.3 has no kernels for V100; these",
        ),
        (
            ["cluster.instance_type=ml.p6-b200.48xlarge", "cluster.framework=2.5"],
            "CUDA 12.4 has no kernels for B200",
        ),
        (
            ["cluster.instance_type=ml.p2.xlarge"],
            "has no kernels for K80; none of AWS's images has them",
        ),
        (
            ["cluster.image=hello"],
            'cluster.image: SageMaker pulls images from ECR, or from a private registry, got "hello"',
        ),
        (
            ["cluster.image=''"],
            "cluster.image: SageMaker pulls images from ECR, or from a private registry",
        ),
        (
            ["cluster.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/mine:1"],
            "the image is in eu-west-1, but the job is in us-west-2; push it to us-west-2",
        ),
        (
            [
                "cluster.image=763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker"
            ],
            "this image has no CUDA, but the instance type has GPUs",
        ),
    ],
)
def test_unusable_images_are_refused(plan_of: PlanOf, overrides: list[str], expected: str) -> None:
    assert expected in refusal(plan_of, *overrides)


def test_an_image_may_be_named_by_its_digest(plan_of: PlanOf) -> None:
    uri = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/team/train@sha256:{'a' * 64}"
    plan = plan_of(f"cluster.image={uri}")
    assert (plan.image, plan.request["AlgorithmSpecification"]["TrainingImage"]) == (uri, uri)


@pytest.mark.parametrize(
    "digest",
    ["sha256:" + "a" * 63, "sha256:" + "A" * 64, "sha512:" + "a" * 128, "", "a" * 64],
)
def test_a_malformed_digest_is_reported(plan_of: PlanOf, digest: str) -> None:
    expected = (
        "cluster.image: expected an image whose digest is sha256: and 64 digits of 0-9 and a-f"
    )
    uri = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/team/train@{digest}"
    assert expected in refusal(plan_of, f"cluster.image={uri}")


def test_a_pipeline_with_after_step_is_refused(cli: Cli, job: Callable[..., Path]) -> None:
    code = "from cloudtrain_runtime import Task\nclass T(Task):\n    def model(self): ...\n    def datasets(self): ...\n"
    code += "    def loss(self, model, batch): ...\n    def pipeline(self, model, stages): ...\n"
    text = (
        "name: t\ncode: {task: 'mine:T', directory: .}\ncluster: {instance_type: ml.g5.12xlarge}\n"
    )
    text += "train: {steps: 2, accumulate: 2, parallel: {pipeline: 2}}\n"
    assert cli("validate", job(text, mine_py=code)).err == ""
    refused = cli("validate", job(text, mine_py=code + "    def after_step(self, model): ...\n"))
    assert "does not work with after_step()" in refused.err


@pytest.mark.parametrize(
    ("train", "field"),
    [
        ("accumulate: 2", "accumulate"),
        ("skip_nonfinite: 3", "skip_nonfinite"),
        ("compile: true", "compile"),
        ("parallel: {data: fsdp}", "parallel.data"),
        ("parallel: {tensor: 2}", "parallel.tensor"),
        ("parallel: {pipeline: 2}", "parallel.pipeline"),
        ("parallel: {compress: bf16}", "parallel.compress"),
    ],
)
def test_a_training_step_refuses_other_loops(
    cli: Cli, job: Callable[..., Path], train: str, field: str
) -> None:
    code = "from cloudtrain_runtime import Task\nclass T(Task):\n    def model(self): ...\n    def datasets(self): ...\n"
    code += "    def loss(self, model, batch): ...\n    def pipeline(self, model, stages): ...\n"
    code += "    def parallelize(self, model, mesh): ...\n    def training_step(self, model, batch, update): ...\n"
    text = (
        "name: t\ncode: {task: 'mine:T', directory: .}\ncluster: {instance_type: ml.g5.12xlarge}\n"
    )
    assert cli("validate", job(f"{text}train: {{steps: 2}}\n", mine_py=code)).err == ""
    refused = cli("validate", job(f"{text}train: {{steps: 2, {train}}}\n", mine_py=code))
    assert f"train.{field}: does not work with training_step()" in refused.err


def test_a_local_plan_names_the_torch_of_this_machine(plan_of: PlanOf) -> None:
    machine = Machine(gpus=0, torch="2.9.1+cpu")
    here = LocalTarget(SETTINGS, Path("/somewhere/.cloudtrain"), machine)
    own = "framework: PyTorch 2.9.1+cpu of this machine; AWS's image has"
    for overrides, image in (
        ((), "2.14, the newest that torch_distributed works with"),
        (('cluster.framework="2.13"',), "2.13"),
    ):
        decisions = plan_of(*overrides, target=here).decisions
        found = [text for text in decisions if text.startswith("framework: ")]
        assert found == [f"{own} {image}"]


def test_this_machine_has_the_torch_that_is_installed() -> None:
    # A Python without torch runs this test, too.
    installed = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.version("torch")
    assert this_machine().torch == installed
