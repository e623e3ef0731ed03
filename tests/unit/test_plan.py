import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.catalog import service_limits
from cloudtrain.console.plans import print_plan
from cloudtrain.errors import SpecError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.storage_layout import (
    ResumeSource,
    direct_folder_of,
    resume_source,
    split_checkpoint,
    synced_folder_of,
)
from cloudtrain.settings.settings import Settings

WriteJob = Callable[..., Path]
NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)
RUN = "demo-261120-101500-1a2b3c"
CODE = CodeInfo("d" * 64, 1000, 3)
SETTINGS = Settings(role="arn:aws:iam::123456789012:role/training", bucket="bucket", region="us-west-2")
GOOD = """\
name: demo
code: {task: "mine:Mine", args: {layers: 4}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {epochs: 3, batch_size: 16, accumulate: 4}
"""
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def plan_of(job: WriteJob) -> Callable[..., Plan]:
    def plan(*overrides: str, text: str = GOOD, settings: Settings = SETTINGS, **arguments: Any) -> Plan:
        path = job(text, mine_py="class Mine(Task):\n    def __init__(self, layers=2): ...\n", train_py="")
        spec = JobSpec.from_yaml(path, overrides)
        return make_plan(spec, settings, CODE, run=RUN, now=NOW, **arguments)

    return plan


PlanOf = Callable[..., Plan]


def local(gpus: int = 0) -> dict[str, Any]:
    return {"target": "local", "home": Path("/somewhere/.cloudtrain"), "machine": Machine(gpus=gpus, cpus=2)}


def refusal(plan_of: PlanOf, *overrides: str, **arguments: Any) -> str:
    with pytest.raises(SpecError) as caught:
        plan_of(*overrides, **arguments)
    return str(caught.value)


def test_a_plan_is_pure(plan_of: PlanOf) -> None:
    assert plan_of() == plan_of()
    assert plan_of().to_file() == plan_of().to_file()


@pytest.mark.parametrize(
    ("name", "overrides", "arguments"),
    [
        ("cluster", [], {}),
        ("local", [], local()),
        (
            "everything",
            [
                "cluster.distribution=smdistributed",
                "cluster.spot={max_wait: 36h}",
                "cluster.volume=200GB",
                "cluster.max_pending=6h",
                "cluster.network={subnets: [subnet-1], security_groups: [sg-1], encrypt_traffic: true}",
                "data={train: {uri: 's3://bucket/train', mode: FastFile, sharded: true}}",
                "code.env={A: 'b'}",
                "limits.retries=3",
                "tags.team=vision",
            ],
            {},
        ),
    ],
)
def test_the_request_is_the_one_on_file(
    plan_of: PlanOf, name: str, overrides: list[str], arguments: dict[str, Any]
) -> None:
    """To accept a change on purpose: delete the file, run once (it is written), and read the diff."""
    text = json.dumps(plan_of(*overrides, **arguments).request, indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"request-{name}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path} was missing; it is written now")
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("spread", "shown", "global_batch"),
    [
        ("{data: fsdp}", "fsdp 16", "1024 samples (16 per rank x 4 x 16 ranks)"),
        ("{tensor: 4}", "ddp 4 x tensor 4", "256 samples (16 per rank x 4 x 4 data ranks)"),
        (
            "{data: fsdp, shard: 2, pipeline: 2, tensor: 2, schedule: gpipe}",
            "pipeline 2 (gpipe) x fsdp 4 in shards of 2 x tensor 2",
            "256 samples (16 per rank x 4 x 4 data ranks)",
        ),
    ],
)
def test_how_a_model_is_spread_is_shown(
    plan_of: PlanOf, capsys: pytest.CaptureFixture[str], spread: str, shown: str, global_batch: str
) -> None:
    print_plan(plan_of(f"train.parallel={spread}"))
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert rows["parallel"].strip() == shown
    assert {name: text.strip() for name, text in rows.items()}["global batch"] == global_batch


def test_a_pipeline_that_mostly_waits_is_warned_of(plan_of: PlanOf) -> None:
    few = plan_of("train.parallel={pipeline: 4, schedule: gpipe}", "train.accumulate=2")
    assert [note for note in few.warnings if "60% of each step is waiting; with accumulate 16 it would be 16%" in note]
    assert not [note for note in plan_of("train.parallel={pipeline: 4}").warnings if "waiting" in note]


def test_world_size_and_global_batch(plan_of: PlanOf) -> None:
    plan = plan_of()
    assert plan.cluster.world_size == 16
    assert plan.to_json()["batch"] == {"per_rank": 16, "accumulate": 4, "global": 16 * 4 * 16}
    assert plan.cluster.backend == "nccl"


def test_plan_json_has_the_promised_keys(plan_of: PlanOf) -> None:
    content = plan_of().to_json()
    assert {"run", "request", "bundle", "cluster", "batch", "cost", "image", "checkpoint", "warnings"} <= set(content)
    assert set(content["bundle"]) == {"digest", "bytes", "files"}
    assert set(content["cluster"]) == {
        "instance_type",
        "instances",
        "processes_per_instance",
        "world_size",
        "distribution",
        "launcher",
        "backend",
    }
    assert set(content["cost"]) == {"usd_per_hour", "max_usd", "price_as_of", "warm_pool_usd"}
    assert content["checkpoint"] == {"uri": f"s3://bucket/cloudtrain/{RUN}/checkpoints", "every": "10m"}


def test_the_estimate_counts_the_time_to_stop(plan_of: PlanOf, capsys: pytest.CaptureFixture[str]) -> None:
    cost = plan_of("limits.runtime=10h").cost
    assert cost.usd_per_hour == pytest.approx(50.5026)
    assert cost.max_usd == pytest.approx(506.71), "ten hours and two minutes"
    print_plan(plan_of("limits.runtime=10h"))
    shown = capsys.readouterr().out
    assert "\nruntime       stopped after 10h\n" in shown
    assert "50.50 USD per hour, estimated 506.71 USD at its time limit (" in shown


def test_a_cost_limit_shortens_the_runtime_so_that_it_holds(plan_of: PlanOf) -> None:
    plan = plan_of("limits.cost=100 USD")
    assert plan.request["StoppingCondition"]["MaxRuntimeInSeconds"] == plan.max_runtime_seconds
    assert plan.cost.max_usd is not None
    assert 99.9 < plan.cost.max_usd <= 100, "with two minutes to stop"
    assert any("its estimated cost stays within 100 USD" in decision for decision in plan.decisions)


def test_a_cost_limit_that_cannot_hold_is_refused(plan_of: PlanOf) -> None:
    assert "0.1 USD pays for 0s" in refusal(plan_of, "limits.cost=0.1 USD")
    unpriced = dataclasses.replace(SETTINGS, region="eu-west-1")
    assert "the cost cannot be limited" in refusal(plan_of, "limits.cost=10 USD", settings=unpriced)


def test_auto_says_what_it_chose_and_why(plan_of: PlanOf) -> None:
    plan = plan_of()
    assert plan.cluster.distribution == "torch_distributed"
    assert plan.cluster.launcher == "cloudtrain"
    assert len(plan.decisions) == 2


@pytest.mark.parametrize("distribution", ["pytorchddp", "smdistributed"])
def test_mpi_distributions_take_the_newest_image_that_has_smddp(plan_of: PlanOf, distribution: str) -> None:
    plan = plan_of(f"cluster.distribution={distribution}")
    assert "pytorch-training:2.5.1-gpu" in plan.image
    assert plan.cluster.launcher == "toolkit"
    assert "ContainerEntrypoint" not in plan.request["AlgorithmSpecification"]


@pytest.mark.parametrize("instance_type", ["ml.p5e.48xlarge", "ml.g6.48xlarge", "ml.m5.xlarge"])
def test_smddp_on_the_wrong_instance_is_refused(plan_of: PlanOf, instance_type: str) -> None:
    text = refusal(plan_of, "cluster.distribution=smdistributed", f"cluster.instance_type={instance_type}")
    assert f"does not support {instance_type}; use torch_distributed, or one of ml.p4d.24xlarge" in text


def test_smddp_with_an_image_that_lacks_it_is_refused(plan_of: PlanOf) -> None:
    text = refusal(plan_of, "cluster.distribution=pytorchddp", 'cluster.framework="2.13"')
    assert 'has no SMDDP and no mpi4py, which pytorchddp needs; use framework: "2.5"' in text


def test_an_unknown_framework_is_refused(plan_of: PlanOf) -> None:
    assert 'did you mean "2.13"?' in refusal(plan_of, 'cluster.framework="2.14"')


def test_a_refusal_names_the_place_in_the_file(plan_of: PlanOf) -> None:
    text = GOOD.replace("instances: 2", "distribution: smdistributed").replace("p4d.24xlarge", "g6.48xlarge")
    assert "job.yaml:3:56  cluster.distribution: smdistributed needs" in refusal(plan_of, text=text)
    assert refusal(plan_of, "cluster.framework=2.14").startswith("--set cluster.framework=2.14  cluster.framework")


def test_trainium_is_refused(plan_of: PlanOf) -> None:
    assert "no GPU that PyTorch" in refusal(plan_of, "cluster.instance_type=ml.trn1.32xlarge")


def test_unknown_instance_type_is_refused(plan_of: PlanOf) -> None:
    assert 'did you mean "ml.p4d.24xlarge"?' in refusal(plan_of, "cluster.instance_type=ml.p4d.24xlrge")


def test_instance_type_missing_in_the_catalog_is_a_warning(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_missing_settings_leave_placeholders_and_a_warning(plan_of: PlanOf) -> None:
    plan = plan_of(settings=Settings())
    assert "CLOUDTRAIN_ROLE" in plan.request["RoleArn"]
    assert any("no role, bucket, region" in warning for warning in plan.warnings)


def test_resume_names(plan_of: PlanOf) -> None:
    assert plan_of("checkpoint.resume=s3://bucket/x").config.checkpoint.resume == "s3://bucket/x"
    assert plan_of("checkpoint.resume=/tmp/x", **local()).config.checkpoint.resume == "file:///tmp/x"
    assert "cannot read a path on this machine" in refusal(plan_of, "checkpoint.resume=/tmp/x")
    assert plan_of("checkpoint.resume=never").config.checkpoint.resume == "never"
    assert "expected where to resume from" in refusal(plan_of, "checkpoint.resume=yesterday")
    other = "demo-261119-101500-aaaaaa"
    assert f"there is no run {other}" in refusal(plan_of, f"checkpoint.resume={other}")
    found = ResumeSource("s3://bucket/other", "s3://bucket/other", other)
    saved = plan_of(f"checkpoint.resume={other}", resumed=found).config.checkpoint
    assert (saved.resume, saved.resume_run) == ("s3://bucket/other", other)
    assert plan_of("checkpoint.resume=s3://bucket/x").config.checkpoint.resume_run == "", "of whatever run"
    one = plan_of("checkpoint.resume=s3://bucket/x/step-00000300-0a1b2c3d").config.checkpoint
    assert one.resume == "s3://bucket/x/step-00000300-0a1b2c3d"


def test_a_script_has_argv_and_a_synchronised_checkpoint_folder(plan_of: PlanOf) -> None:
    text = GOOD.replace('task: "mine:Mine", args: {layers: 4}', "script: train.py, args: {lr: 0.1, amp: true, x: null}")
    text = text.replace("train: {epochs: 3, batch_size: 16, accumulate: 4}\n", "")
    plan = plan_of(text=text)
    assert plan.config.args == ["--lr", "0.1", "--amp"]
    assert plan.request["CheckpointConfig"] == {"S3Uri": f"s3://bucket/cloudtrain/{RUN}/checkpoints"}
    assert plan.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"


def test_isolated_containers_save_through_the_service(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.network.isolation=true", "cluster.instances=1")
    assert plan.request["EnableNetworkIsolation"] is True
    assert plan.request["CheckpointConfig"]["S3Uri"].endswith("/checkpoints")
    assert plan.config.checkpoint.uri == ""


def test_isolated_instances_cannot_share_checkpoints(plan_of: PlanOf) -> None:
    for arguments in ({}, local()):
        told = refusal(plan_of, "cluster.network.isolation=true", "cluster.instances=2", **arguments)
        assert "a Task on 2 isolated instances could not save a checkpoint" in told
        script = plan_of("cluster.network.isolation=true", "cluster.instances=2", text=SCRIPT_JOB, **arguments)
        assert "those of all hosts in one folder" in " ".join(script.warnings)


def test_a_cluster_does_not_save_to_a_local_folder(plan_of: PlanOf) -> None:
    assert "a cluster saves checkpoints to S3" in refusal(plan_of, "checkpoint.uri=/tmp/x")


def test_local_data_is_uploaded_for_a_cluster(plan_of: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "one.png").write_bytes(b"1")
    plan = plan_of(f"data.train={tmp_path / 'images'}")
    assert [(upload.path, upload.uri) for upload in plan.uploads] == [
        (str(tmp_path / "images"), f"s3://bucket/cloudtrain/{RUN}/data/train/")
    ]


@pytest.mark.parametrize(
    ("gpus", "instances", "processes", "backend"),
    [(0, 2, 2, "gloo"), (4, 2, 2, "nccl"), (8, 1, 8, "nccl"), (1, 2, 1, "gloo"), (1, 1, 1, "nccl"), (3, 2, 1, "nccl")],
)
def test_local_runs_take_the_gpus_that_are_there(
    plan_of: PlanOf, gpus: int, instances: int, processes: int, backend: str
) -> None:
    plan = plan_of(f"cluster.instances={instances}", **local(gpus))
    assert (plan.cluster.processes_per_instance, plan.cluster.backend) == (processes, backend)


def test_a_local_plan_costs_nothing_and_stays_here(plan_of: PlanOf) -> None:
    plan = plan_of(**local())
    assert plan.cost.max_usd == 0
    assert plan.locations.checkpoints == f"file:///somewhere/.cloudtrain/runs/{RUN}/checkpoints"
    assert plan.request["ResourceConfig"]["InstanceType"] == "ml.p4d.24xlarge"


def test_local_plan_warns_that_torchrun_replaces_mpirun(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.distribution=smdistributed", **local())
    assert any("a local run uses torchrun" in warning for warning in plan.warnings)


# ---------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.distribution=smdistributed", "cluster.instance_type=ml.p5e.48xlarge"], "does not support ml.p5e"),
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
        (["tracking.mlflow=https://mlflow.example.com"], "tracking.mlflow: MLflow is supported for scripts only"),
        (["cluster={prefer: [ml.p4d.24xlarge, ml.g5.12xlarge]}"], "cluster.prefer: the types have different numbers"),
        (
            ["cluster={prefer: [ml.g5.xlarge, ml.m5.xlarge]}"],
            "cluster.prefer: one image cannot support types",
        ),
        (["cluster={prefer: [ml.p4d.24xlarge, ml.trn1.32xlarge]}"], "cluster.prefer[1]: ml.trn1.32xlarge has no GPU"),
        (
            ["cluster={prefer: [ml.p4d.24xlarge, ml.p5.48xlarge], distribution: smdistributed}"],
            "SMDDP library, which does not support ml.p5.48xlarge",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(plan_of: PlanOf, overrides: list[str], expected: str) -> None:
    text = refusal(plan_of, *overrides)
    assert expected in text
    assert all(problem.partition("; ")[2] for problem in text.splitlines()), "each has a hint"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.instance_type=ml.g5.xlarge"], "ml.g5.xlarge has no EFA: its 2 instances exchange gradients by TCP"),
        (["cluster.framework=2.6"], "AWS no longer patches the PyTorch 2.6 image (since 2026-01-29)"),
        (
            ["cluster.processes_per_instance=4"],
            "4 ranks use 4 of the 8 GPUs of ml.p4d.24xlarge; all",
        ),
        (["train={steps: 100}", "checkpoint.every=500 steps"], "the run ends after 100 steps, before the first"),
        (
            ["train={steps: 100, evaluate: {every: 200 steps}}"],
            "ends after 100 steps, before the first evaluation",
        ),
        (["checkpoint.every=10h", "limits.runtime=1h"], "checkpoint.every is longer than limits.runtime"),
    ],
)
def test_what_is_worth_knowing_is_a_warning(plan_of: PlanOf, overrides: list[str], expected: str) -> None:
    assert any(expected in warning for warning in plan_of(*overrides).warnings)


def test_a_plan_of_one_instance_or_with_efa_does_not_warn(plan_of: PlanOf) -> None:
    assert plan_of().warnings == ()
    assert any("of local NVMe" in warning for warning in plan_of("cluster.volume=200GB").warnings)
    assert plan_of("cluster.instances=1", "cluster.instance_type=ml.g5.xlarge").warnings == ()


# ---------------------------------------------------------------- the account's settings


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"role": "training"}, "CLOUDTRAIN_X  role: AWS allows at least 20 characters"),
        ({"role": "arn:aws:iam::123:role/training"}, "has a form that AWS refuses; it must match arn:aws"),
        ({"bucket": "s3://bucket"}, "bucket: expected a bucket name"),
        ({"region": "us-wset-2"}, 'region: there is no AWS region "us-wset-2"; did you mean "us-west-2"?'),
        ({"role": "arn:aws-cn:iam::123456789012:role/training"}, "a role of aws-cn does not work in us-west-2"),
        (
            {"kms_key": "arn:aws:kms:eu-west-1:123456789012:key/1"},
            "the key is in eu-west-1, but the job is in us-west-2",
        ),
        ({"kms_key": "my key"}, "kms_key: 'my key' has a form that AWS refuses"),
        ({"subnets": ("subnet-1",)}, "subnets: subnets and security_groups go together; give security_groups, too"),
        ({"security_groups": ("sg-1",)}, "security_groups: subnets and security_groups go together"),
        ({"prefix": "x" * 1100}, "prefix: AWS allows at most 1024 characters"),
    ],
)
def test_malformed_settings_are_refused_with_their_source(
    plan_of: PlanOf, change: dict[str, Any], expected: str
) -> None:
    sources = dict.fromkeys(change, "CLOUDTRAIN_X")
    text = refusal(plan_of, settings=dataclasses.replace(SETTINGS, **change, sources=sources))
    assert expected in text
    assert text.startswith("CLOUDTRAIN_X")


def test_a_region_that_is_newer_than_botocore_is_a_warning(plan_of: PlanOf) -> None:
    plan = plan_of(settings=dataclasses.replace(SETTINGS, region="us-west-9"))
    assert any("does not know the region us-west-9" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [([], 600.0), (["limits.hang=90s"], 90.0), (["limits.hang=off"], None), (["limits.hang=no"], None)],
)
def test_the_container_is_told_when_a_run_hangs(plan_of: PlanOf, overrides: list[str], seconds: float | None) -> None:
    plan = plan_of(*overrides)
    assert plan.config.hang_seconds == seconds
    again = json.loads(plan.to_file())["job"]
    assert JobSpec(**again).limits.hang == seconds, "as a resume from elsewhere reads it"


# ---------------------------------------------------------------- AWS's limits


ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
SIX_TYPES = [f"ml.{name}" for name in ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge")]
SIX_TYPES.append("ml.p3.16xlarge")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cluster.max_pending=5m", "cluster.max_pending: AWS allows at least 30m, got 5m; use at least 30m"),
        ("cluster.keep_alive=7h", "cluster.keep_alive: AWS allows at most 6h, got 7h"),
        ("limits.retries=31", "limits.retries: AWS allows at most 30, got 31"),
        (f"code.env.A={'x' * 513}", "code.env.A: AWS allows at most 512 characters, got 513"),
        ("code.env={'MY-VAR': x}", "code.env.MY-VAR: name: 'MY-VAR' has a form that AWS refuses"),
        (
            f"code.env={{{', '.join(f'A{n}: x' for n in range(101))}}}",
            "code.env: AWS allows at most 100 entries",
        ),
        (
            f"tags={{{', '.join(f'a{n}: x' for n in range(50))}}}",
            "tags: AWS allows at most 48 besides",
        ),
        (f"tags.a={'x' * 257}", "tags.a: AWS allows at most 256 characters, got 257"),
        ("tags.a='x;y'", "tags.a: 'x;y' has a form that AWS refuses"),
        ("data={'my data': s3://bucket/x}", "data.my data: 'my data' has a form that AWS refuses"),
        (
            f"data={{{', '.join(f'c{n}: s3://bucket/x' for n in range(19))}}}",
            "data: AWS allows at most 18 besides cloudtrain's own, got 19",
        ),
        (f"data.train=s3://bucket/{'x' * 1020}", "data.train: AWS allows at most 1024 characters"),
        (f"cluster.image={ECR}/{'x' * 256}", "cluster.image: AWS allows at most 255 characters"),
        (f"cluster={{prefer: [{', '.join(SIX_TYPES)}]}}", "cluster.prefer: AWS allows at most 5 entries, got 6"),
        (
            "cluster.network={subnets: [subnet-1], security_groups: [a, b, c, d, e, f]}",
            "cluster.network.security_groups: AWS allows at most 5 entries, got 6",
        ),
    ],
)
def test_awss_limits_are_told_at_the_field(plan_of: PlanOf, override: str, expected: str) -> None:
    text = refusal(plan_of, override)
    assert expected in text
    assert f"--set {override}" in text
    assert expected in refusal(plan_of, override, **local()), "a local run keeps the same limits"


# ---------------------------------------------------------------- cost


def test_cost_limit_never_shortens_a_requested_runtime(plan_of: PlanOf) -> None:
    text = refusal(plan_of, "limits={runtime: 10h, cost: 100 USD}")
    assert "100 USD pays for 1h56m of 50.50 USD per hour, 2m to stop after it; limits.runtime is 10h" in text
    assert "raise it to 507 USD, or lower limits.runtime to 116m" in text
    assert plan_of("limits={runtime: 10h, cost: 507 USD}").max_runtime_seconds == 36000


def test_spot_estimate_uses_on_demand_price_and_max_wait(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.spot={max_wait: 20h}", "limits.runtime=10h")
    assert plan.cost.max_usd == pytest.approx((20 + 120 / 3600) * 50.502572, abs=0.01)
    plan = plan_of("cluster.spot=true", "limits.cost=100 USD")
    assert plan.max_wait_seconds == plan.max_runtime_seconds
    assert plan.cost.max_usd is not None
    assert plan.cost.max_usd <= 100
    text = refusal(plan_of, "cluster.spot={max_wait: 30h}", "limits.cost=500 USD")
    assert "cluster.spot.max_wait is 1d6h" in text


def test_a_warm_pool_is_paid_for(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.keep_alive=1h", "limits.runtime=1h")
    assert plan.cost.max_usd == pytest.approx((2 + 120 / 3600) * 50.502572, abs=0.01)
    assert plan.cost.warm_pool_usd == pytest.approx(50.502572, abs=0.01)
    assert plan.warnings == plan_of().warnings
    assert plan_of().cost.warm_pool_usd == 0
    assert plan_of("cluster.keep_alive=1h", "limits.cost=100 USD").max_runtime_seconds == 7128 - 3600 - 120


def test_a_warm_pool_of_more_than_the_guide_allows_is_a_warning(plan_of: PlanOf) -> None:
    assert any(
        "AWS documents at most 1h; its API accepts 2h" in each for each in plan_of("cluster.keep_alive=2h").warnings
    )


def test_the_dearest_preference_bounds_the_cost(plan_of: PlanOf) -> None:
    cheap = plan_of("cluster={prefer: [ml.g5.xlarge]}").cost.usd_per_hour
    both = plan_of("cluster={prefer: [ml.g5.xlarge, ml.g5.8xlarge]}").cost.usd_per_hour
    assert cheap is not None
    assert both is not None
    assert both > 2 * cheap


def test_the_length_is_told_where_it_is_known(plan_of: PlanOf) -> None:
    length = plan_of("train={steps: 1000, batch_size: 16}", "checkpoint.every=300 steps").length
    assert (length.steps, length.samples, length.checkpoints) == (1000, 1000 * 16 * 16, 4)
    length = plan_of("limits.runtime=1h").length
    assert (length.steps, length.epochs, length.checkpoints) == (None, 3, 7)


def test_a_runtime_that_nobody_asked_for_gives_way_to_max_wait(plan_of: PlanOf) -> None:
    plan = plan_of("cluster.spot={max_wait: 2h}")
    assert (plan.max_runtime_seconds, plan.max_wait_seconds) == (7200, 7200)


# ---------------------------------------------------------------- GPUs and images


@pytest.mark.parametrize(
    ("instance_type", "framework"),
    [("ml.p3.2xlarge", "2.8"), ("ml.g5.xlarge", "2.13"), ("ml.p6-b200.48xlarge", "2.13")],
)
def test_newest_image_with_kernels_for_the_gpu_is_chosen(plan_of: PlanOf, instance_type: str, framework: str) -> None:
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
        (["cluster.instance_type=ml.p2.xlarge"], "has no kernels for K80; none of AWS's images has them"),
        (["cluster.image=hello"], 'cluster.image: SageMaker pulls images from ECR only, got "hello"'),
        (["cluster.image=''"], "cluster.image: SageMaker pulls images from ECR only"),
        (
            ["cluster.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/mine:1"],
            "the image is in eu-west-1, but the job is in us-west-2; push it to us-west-2",
        ),
        (
            ["cluster.image=763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cpu-amzn2023-sagemaker"],
            "this image has no CUDA, but the instance type has GPUs",
        ),
    ],
)
def test_what_a_container_cannot_do_is_refused(plan_of: PlanOf, overrides: list[str], expected: str) -> None:
    assert expected in refusal(plan_of, *overrides)


def test_an_image_may_be_named_by_its_digest(plan_of: PlanOf) -> None:
    uri = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/team/train@sha256:{'a' * 64}"
    plan = plan_of(f"cluster.image={uri}")
    assert (plan.image, plan.request["AlgorithmSpecification"]["TrainingImage"]) == (uri, uri)


@pytest.mark.parametrize(
    ("digest", "expected"),
    [
        ("sha256:" + "a" * 63, "cluster.image: a sha256 digest has 64 hexadecimal digits, got 63"),
        ("sha256:" + "A" * 64, "cluster.image: a sha256 digest has 64 digits of 0-9 and a-f, got "),
        ("sha512:" + "a" * 128, 'cluster.image: the digest must begin with "sha256:", got "sha512:'),
        ("", 'cluster.image: the digest must begin with "sha256:", got ""'),
        ("a" * 64, 'cluster.image: the digest must begin with "sha256:"'),
    ],
)
def test_a_malformed_digest_is_told(plan_of: PlanOf, digest: str, expected: str) -> None:
    uri = f"123456789012.dkr.ecr.us-west-2.amazonaws.com/team/train@{digest}"
    assert expected in refusal(plan_of, f"cluster.image={uri}")


# ---------------------------------------------------------------- checkpoints of what cannot reach S3 itself

SCRIPT_JOB = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.p4d.24xlarge}\n"


def test_never_resuming_gives_a_script_a_folder_of_its_own(plan_of: PlanOf) -> None:
    overrides = ["checkpoint.uri=s3://bucket/saved", "checkpoint.resume=never"]
    request = plan_of(*overrides, text=SCRIPT_JOB).request
    assert request["CheckpointConfig"] == {"S3Uri": f"s3://bucket/saved/{RUN}"}
    request = plan_of(*overrides, "cluster.network.isolation=true", "cluster.instances=1").request
    assert request["CheckpointConfig"] == {"S3Uri": f"s3://bucket/saved/{RUN}"}
    assert plan_of(*overrides[:1], text=SCRIPT_JOB).request["CheckpointConfig"] == {"S3Uri": "s3://bucket/saved"}


def test_script_with_another_checkpoint_uri_is_warned(plan_of: PlanOf) -> None:
    overrides = ["checkpoint.uri=s3://bucket/new", "checkpoint.resume=s3://bucket/old"]
    plan = plan_of(*overrides, text=SCRIPT_JOB)
    assert plan.request["CheckpointConfig"] == {"S3Uri": "s3://bucket/old"}
    assert any(
        "it resumes and saves in s3://bucket/old, not in s3://bucket/new" in warning for warning in plan.warnings
    )
    assert plan_of(*overrides).config.checkpoint.uri == "s3://bucket/new", "a Task reads there and writes here"


@pytest.mark.parametrize(
    ("synced", "steps"),
    [
        ("s3://bucket/cloudtrain/run/checkpoints", "s3://bucket/cloudtrain/run/steps/checkpoints"),
        ("s3://bucket/saved/", "s3://bucket/steps/saved"),
        ("s3://bucket", "s3://bucket/steps"),
    ],
)
def test_a_script_saves_beside_what_is_synced(synced: str, steps: str) -> None:
    assert direct_folder_of(synced) == steps
    # A whole bucket must never be taken for what is synced.
    assert synced_folder_of(steps) == (None if synced == "s3://bucket" else synced.rstrip("/"))
    assert synced_folder_of(synced) is None


def test_the_name_of_one_checkpoint_is_split_off() -> None:
    assert split_checkpoint("s3://b/x/step-00000300-0a1b2c3d/") == ("s3://b/x", "step-00000300-0a1b2c3d")
    assert split_checkpoint("s3://b/x/step-300") == ("s3://b/x/step-300", "")


def test_a_script_names_either_of_its_folders() -> None:
    synced, steps = "s3://b/run/checkpoints", "s3://b/run/steps/checkpoints"
    for uri in (synced, steps):
        assert resume_source(uri, is_synced=True) == ResumeSource(synced, steps)
        assert resume_source(f"{uri}/step-00000300", is_synced=True) == ResumeSource(synced, f"{steps}/step-00000300")
    assert resume_source(f"{synced}/step-00000300", is_synced=False).checkpoints == f"{synced}/step-00000300"


def test_a_scripts_checkpoints_are_its_own(plan_of: PlanOf) -> None:
    plan = plan_of(text=SCRIPT_JOB)
    assert plan.request["CheckpointConfig"] == {"S3Uri": f"s3://bucket/cloudtrain/{RUN}/checkpoints"}
    assert plan.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"
    assert plan.config.checkpoint.resume == "auto"
    assert plan_of("checkpoint.uri=s3://bucket/a/b", text=SCRIPT_JOB).config.checkpoint.uri == "s3://bucket/a/steps/b"
    never = plan_of("checkpoint.uri=s3://bucket/a/b", "checkpoint.resume=never", text=SCRIPT_JOB)
    assert never.config.checkpoint.uri == f"s3://bucket/a/steps/b/{RUN}", "not below another run's synced folder"
    isolated = plan_of("cluster.network.isolation=true", text=SCRIPT_JOB)
    assert isolated.config.checkpoint.uri == ""


def test_a_script_that_resumes_a_run_reads_there_and_saves_here(plan_of: PlanOf) -> None:
    other = "demo-261119-101500-aaaaaa"
    base = f"s3://bucket/cloudtrain/{other}"
    found = ResumeSource(f"{base}/checkpoints", f"{base}/steps/checkpoints", other)
    saved = plan_of(f"checkpoint.resume={other}", text=SCRIPT_JOB, resumed=found)
    assert saved.request["CheckpointConfig"] == {"S3Uri": f"{base}/checkpoints"}
    assert saved.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"
    assert saved.config.checkpoint.resume == f"{base}/steps/checkpoints"
    assert saved.config.checkpoint.resume_run == other
    # Also where both had one checkpoint.uri: two runs that resume the same one would share it.
    shared = ResumeSource("s3://bucket/a/b", "s3://bucket/a/steps/b", other)
    again = plan_of("checkpoint.uri=s3://bucket/a/b", f"checkpoint.resume={other}", text=SCRIPT_JOB, resumed=shared)
    assert again.config.checkpoint.uri == f"s3://bucket/cloudtrain/{RUN}/steps/checkpoints"
    assert again.config.checkpoint.resume == "s3://bucket/a/steps/b"


def test_a_local_script_saves_to_its_folder(plan_of: PlanOf) -> None:
    plan = plan_of(text=SCRIPT_JOB, **local())
    assert plan.config.checkpoint.uri == plan.locations.checkpoints
    other = ResumeSource("file:///old", "file:///old/step-00000300", "demo-261119-101500-aaaaaa")
    resumed = plan_of("checkpoint.resume=/old", text=SCRIPT_JOB, resumed=other, **local())
    assert resumed.locations.checkpoints == "file:///old", "what it finds in /opt/ml/checkpoints"
    assert resumed.config.checkpoint.uri == plan.config.checkpoint.uri
    assert resumed.config.checkpoint.resume == "file:///old/step-00000300"


def test_an_isolated_container_takes_the_newest(plan_of: PlanOf) -> None:
    overrides = (
        "cluster.network.isolation=true",
        "cluster.instances=1",
        "checkpoint.resume=s3://bucket/x/step-00000300",
    )
    assert "resumes from the newest checkpoint" in refusal(plan_of, *overrides)
    plan = plan_of(*overrides[:2], "checkpoint.resume=s3://bucket/x")
    assert (plan.config.checkpoint.uri, plan.config.checkpoint.resume) == ("", "auto")
    assert plan.request["CheckpointConfig"] == {"S3Uri": "s3://bucket/x"}


def test_every_and_keep_count_for_scripts_that_use_the_api(plan_of: PlanOf) -> None:
    (warning,) = [text for text in plan_of("checkpoint.keep=2", text=SCRIPT_JOB).warnings if "checkpoint.keep" in text]
    assert "has an effect only where the script saves by cloudtrain_runtime.checkpoint" in warning


def test_a_last_save_that_will_not_fit_is_told(plan_of: PlanOf) -> None:
    def told(*overrides: str, **arguments: Any) -> list[str]:
        return [text for text in plan_of(*overrides, **arguments).warnings if "checkpoint.size" in text]

    assert told("checkpoint.size=45GB") == [], "2 hosts x 250 MB/s x 90 s"
    (warning,) = told("checkpoint.size=480GB")
    assert "480 GB take about 16m to upload from 2 instances at 250.0 MB/s each" in warning
    assert "leaves 90 s of its 120 s" in warning
    assert "22 instances" in warning
    assert told("checkpoint.size=480GB", "cluster.instances=22") == []
    assert told("checkpoint.size=480GB", **local()) == []
    slow = told("checkpoint.size=10GB", "cluster.instance_type=ml.m5.xlarge", "cluster.instances=1")
    assert slow, "half of a slow network"


# ---------------------------------------------------------------- tracking


def test_a_script_tracks_with_tensorboard_and_mlflow(plan_of: PlanOf) -> None:
    text = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.p4d.24xlarge}\n"
    arn = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/team"
    request = plan_of(f"tracking={{tensorboard: true, mlflow: '{arn}'}}", text=text).request
    assert request["TensorBoardOutputConfig"] == {"S3OutputPath": "s3://bucket/cloudtrain"}
    assert request["MlflowConfig"] == {
        "MlflowResourceArn": arn,
        "MlflowExperimentName": "demo",
        "MlflowRunName": RUN,
    }
    request = plan_of("tracking.mlflow=https://mlflow.example.com", text=text).request
    assert request["Environment"]["MLFLOW_TRACKING_URI"] == "https://mlflow.example.com"


def test_a_task_is_seen_by_tensorboard_and_a_profile(plan_of: PlanOf) -> None:
    plan = plan_of("tracking.tensorboard=true", "train.profile={at: 100, steps: 3}")
    assert plan.config.train is not None
    assert (plan.config.train.tensorboard, plan.config.train.profile_at, plan.config.train.profile_steps) == (
        True,
        100,
        3,
    )
    assert plan.request["TensorBoardOutputConfig"] == {"S3OutputPath": "s3://bucket/cloudtrain"}
    plain = plan_of()
    assert plain.config.train is not None
    assert (plain.config.train.tensorboard, plain.config.train.profile_at) == (False, None)


def test_the_network_that_a_measurement_is_held_against(plan_of: PlanOf) -> None:
    def rating(*overrides: str, **arguments: Any) -> float | None:
        return plan_of(*overrides, **arguments).config.network_gbps

    assert rating("cluster.instances=2") == 400
    assert rating("cluster.instances=1") is None, "there is none between instances"
    assert rating("cluster={instances: 2, prefer: [ml.p5.48xlarge, ml.p4d.24xlarge]}") == 400, "the slower one"
    assert rating("cluster.instances=2", **local()) is None
