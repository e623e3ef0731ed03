"""Plans: the request, run.json, settings and limits of AWS."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.plans import CODE, NOW, RUN, SCRIPT_JOB, SETTINGS, TASK_JOB, PlanOf, local, refusal

import cloudtrain
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.console.plans import print_plan
from cloudtrain.errors import Problem
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.planner import make_plan
from cloudtrain.runs.previous_run import checkpoints_of
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import RunConfig, TrackingConfig

GOLDEN = Path(__file__).parent / "golden"


def test_a_plan_is_pure(plan_of: PlanOf) -> None:
    assert plan_of() == plan_of()
    assert plan_of().to_file() == plan_of().to_file()


def test_a_renamed_plan_is_the_plan_of_that_run(plan_of: PlanOf) -> None:
    for arguments in ({}, local()):
        plan = plan_of("cluster.queue={name: q, share: a}", **arguments)
        renamed = plan.rename("demo-261120-101500-ffffff")
        assert RUN not in renamed.to_file()
        assert renamed.rename(RUN) == plan
        assert renamed.identity == plan.identity


def test_the_run_id_of_a_cluster_begins_with_the_identity() -> None:
    spec = JobSpec(
        name="demo", code={"script": "train.py"}, cluster={"instance_type": "ml.g5.xlarge"}
    )
    plan = make_plan(spec, CODE, SageMakerTarget(SETTINGS, bundled_prices()), now=NOW)
    assert plan.run == f"demo-261120-101500-{plan.identity[:6]}"


def test_earlier_problems_are_reported_with_those_of_the_plan(plan_of: PlanOf) -> None:
    earlier = [
        Diagnostic("is missing", ("code", "script")),
        Problem("train.py", 3, 1, "", "no such function"),
    ]
    message = refusal(plan_of, "cluster.instance_type=ml.trn1.32xlarge", found=earlier)
    assert [
        text
        for text in ("is missing", "no such function", "ml.trn1.32xlarge")
        if text not in message
    ] == []


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
def test_the_request_equals_the_golden_file(
    plan_of: PlanOf, name: str, overrides: list[str], arguments: dict[str, Any]
) -> None:
    """To accept an intended change, delete the file, run the test once, and review the diff."""
    text = json.dumps(plan_of(*overrides, **arguments).request, indent=1, sort_keys=True) + "\n"
    path = GOLDEN / f"request-{name}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path} was missing; it is written now")
    assert text == path.read_text()


@pytest.mark.parametrize(
    ("layout", "shown", "global_batch"),
    [
        ("{data: fsdp}", "fsdp 16", "1024 samples (16 per rank x 4 x 16 ranks)"),
        (
            "{data: fsdp, offload: true}",
            "fsdp 16 in host memory",
            "1024 samples (16 per rank x 4 x 16 ranks)",
        ),
        ("{tensor: 4}", "ddp 4 x tensor 4", "256 samples (16 per rank x 4 x 4 data ranks)"),
        (
            "{data: fsdp, shard: 2, pipeline: 2, tensor: 2, schedule: gpipe}",
            "pipeline 2 (gpipe) x fsdp 4 in shards of 2 x tensor 2",
            "256 samples (16 per rank x 4 x 4 data ranks)",
        ),
    ],
)
def test_the_parallel_layout_is_shown(
    plan_of: PlanOf, capsys: pytest.CaptureFixture[str], layout: str, shown: str, global_batch: str
) -> None:
    print_plan(plan_of(f"train.parallel={layout}"))
    rows = dict(
        line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line
    )
    assert rows["parallel"].strip() == shown
    assert {name: text.strip() for name, text in rows.items()}["global batch"] == global_batch


def test_a_pipeline_that_mostly_waits_is_a_warning(plan_of: PlanOf) -> None:
    few = plan_of("train.parallel={pipeline: 4, schedule: gpipe}", "train.accumulate=2")
    assert [
        text
        for text in few.warnings
        if "60% of each step is waiting; with accumulate 16 it would be 16%" in text
    ]
    assert not [
        text for text in plan_of("train.parallel={pipeline: 4}").warnings if "waiting" in text
    ]


def test_world_size_and_global_batch(plan_of: PlanOf) -> None:
    plan = plan_of()
    assert plan.cluster.world_size == 16
    assert plan.to_json()["batch"] == {"per_rank": 16, "accumulate": 4, "global": 16 * 4 * 16}
    assert plan.cluster.backend == "nccl"


def test_plan_json_has_the_promised_keys(plan_of: PlanOf) -> None:
    content = plan_of().to_json()
    assert {
        "run",
        "request",
        "bundle",
        "cluster",
        "batch",
        "cost",
        "image",
        "checkpoint",
        "warnings",
    } <= set(content)
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
    assert set(content["cost"]) == {
        *("usd_per_hour", "max_usd", "price_as_of", "warm_pool_usd"),
        *("ceiling_usd", "over_limit_seconds", "not_covered", "accelerator_hours", "is_costly"),
    }
    assert content["checkpoint"] == {
        "uri": f"s3://bucket/cloudtrain/{RUN}/checkpoints",
        "every": "10m",
    }


def test_a_refusal_names_the_place_in_the_file(plan_of: PlanOf) -> None:
    text = TASK_JOB.replace("instances: 2", "distribution: smdistributed").replace(
        "p4d.24xlarge", "g6.48xlarge"
    )
    assert "job.yaml:3:56  cluster.distribution: smdistributed needs" in refusal(plan_of, text=text)
    assert refusal(plan_of, "cluster.framework=2.4").startswith(
        "--set cluster.framework=2.4  cluster.framework"
    )


def test_missing_settings_leave_placeholders_and_a_warning(plan_of: PlanOf) -> None:
    plan = plan_of(settings=Settings())
    assert plan.request["RoleArn"] == "<your role>"
    assert plan.request["OutputDataConfig"] == {"S3OutputPath": "s3://<your bucket>/cloudtrain"}
    assert plan.to_json()["checkpoint"]["uri"].startswith("s3://<your bucket>/cloudtrain/")
    assert any("no role, bucket, region" in warning for warning in plan.warnings)


def test_local_data_is_uploaded_for_a_cluster(plan_of: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "one.png").write_bytes(b"1")
    plan = plan_of(f"data.train={tmp_path / 'images'}")
    assert [(upload.path, upload.uri) for upload in plan.uploads] == [
        (str(tmp_path / "images"), f"s3://bucket/cloudtrain/{RUN}/data/train/")
    ]


def test_a_local_plan_costs_nothing_and_saves_locally(plan_of: PlanOf) -> None:
    plan = plan_of(**local())
    assert plan.cost.max_usd == 0
    assert plan.locations.checkpoints == f"file:///somewhere/.cloudtrain/runs/{RUN}/checkpoints"
    assert plan.request["ResourceConfig"]["InstanceType"] == "ml.p4d.24xlarge"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"role": "training"}, "CLOUDTRAIN_X  role: AWS allows at least 20 characters"),
        (
            {"role": "arn:aws:iam::123:role/training"},
            "has a form that AWS refuses; it must match arn:aws",
        ),
        ({"bucket": "s3://bucket"}, "bucket: expected a bucket name"),
        (
            {"region": "us-wset-2"},
            'region: there is no AWS region "us-wset-2"; did you mean "us-west-2"?',
        ),
        (
            {"role": "arn:aws-cn:iam::123456789012:role/training"},
            "a role of aws-cn does not work in us-west-2",
        ),
        (
            {"kms_key": "arn:aws:kms:eu-west-1:123456789012:key/1"},
            "the key is in eu-west-1, but the region is us-west-2",
        ),
        ({"kms_key": "my key"}, "kms_key: 'my key' has a form that AWS refuses"),
        (
            {"subnets": ("subnet-1",)},
            "subnets: subnets and security_groups go together; give security_groups, too",
        ),
        (
            {"security_groups": ("sg-1",)},
            "security_groups: subnets and security_groups go together",
        ),
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
    image = "cluster.image=123456789012.dkr.ecr.us-west-9.amazonaws.com/train:1"
    plan = plan_of(image, settings=dataclasses.replace(SETTINGS, region="us-west-9"))
    assert any("does not know the region us-west-9" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([], 600.0),
        (["limits.hang=90s"], 90.0),
        (["limits.hang=off"], None),
        (["limits.hang=no"], None),
    ],
)
def test_the_hang_timeout_is_in_run_json(
    plan_of: PlanOf, overrides: list[str], seconds: float | None
) -> None:
    plan = plan_of(*overrides)
    assert plan.config.hang_seconds == seconds
    again = json.loads(plan.to_file())["job"]
    assert JobSpec(**again).limits.hang == seconds, "as resume reads it from plan.json"


ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com"

SIX_NAMES = (
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.48xlarge",
    "p5e.48xlarge",
    "p5en.48xlarge",
    "p3.16xlarge",
)
SIX_TYPES = [f"ml.{name}" for name in SIX_NAMES]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "cluster.max_pending=5m",
            "cluster.max_pending: AWS allows at least 30m, got 5m; use at least 30m",
        ),
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
        (
            f"cluster={{prefer: [{', '.join(SIX_TYPES)}]}}",
            "cluster.prefer: AWS allows at most 5 entries, got 6",
        ),
        (
            "cluster.network={subnets: [subnet-1], security_groups: [a, b, c, d, e, f]}",
            "cluster.network.security_groups: AWS allows at most 5 entries, got 6",
        ),
    ],
)
def test_limits_of_aws_are_reported_at_the_field(
    plan_of: PlanOf, override: str, expected: str
) -> None:
    text = refusal(plan_of, override)
    assert expected in text
    assert f"--set {override}" in text
    assert expected in refusal(plan_of, override, **local()), "a local run keeps the same limits"


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
    assert request["Environment"] == {
        "MLFLOW_TRACKING_URI": "https://mlflow.example.com",
        "MLFLOW_EXPERIMENT_NAME": "demo",
        "MLFLOW_RUN_NAME": RUN,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    named = plan_of(
        "tracking.mlflow=https://a.b", "code.env={MLFLOW_EXPERIMENT_NAME: team}", text=text
    ).request
    assert named["Environment"]["MLFLOW_EXPERIMENT_NAME"] == "team"


def test_a_task_is_tracked_with_its_plan(plan_of: PlanOf) -> None:
    plan = plan_of("tracking.mlflow=https://mlflow.example.com")
    assert plan.config.tracking == TrackingConfig(
        "https://mlflow.example.com", f"s3://bucket/cloudtrain/{RUN}/plan.json"
    )
    assert RunConfig.from_json(plan.config.to_json()) == plan.config
    assert plan_of().config.tracking is None
    database = plan_of("tracking.mlflow=curves/mlflow.db", **local()).request["Environment"][
        "MLFLOW_TRACKING_URI"
    ]
    assert database.startswith("sqlite:////")
    assert database.endswith("/job/curves/mlflow.db")


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            ["tracking.mlflow=http://localhost:5000"],
            "on SageMaker http://localhost:5000 is the container itself",
        ),
        (
            [
                "tracking.mlflow=https://a.b",
                "cluster.network.isolation=true",
                "cluster.instances=1",
            ],
            "reaches no MLflow",
        ),
    ],
)
def test_a_server_that_a_container_cannot_reach(
    plan_of: PlanOf, overrides: list[str], warning: str
) -> None:
    assert [text for text in plan_of(*overrides).warnings if warning in text]


def test_a_run_of_the_same_training_keeps_its_mlflow_name(plan_of: PlanOf) -> None:
    first = plan_of("tracking.mlflow=https://a.b", text=SCRIPT_JOB)

    def name(*overrides: str) -> str:
        source = checkpoints_of(json.loads(first.to_file()), first.run)
        again = plan_of("tracking.mlflow=https://a.b", *overrides, text=SCRIPT_JOB, resumed=source)
        return str(
            again.rename("demo-261120-101500-ffffff").request["Environment"]["MLFLOW_RUN_NAME"]
        )

    assert name() == RUN
    assert name("code.args=[--lr, 1]") == "demo-261120-101500-ffffff"


def test_a_task_has_tensorboard_and_a_profile(plan_of: PlanOf) -> None:
    plan = plan_of("tracking.tensorboard=true", "train.profile={at: 100, steps: 3}")
    assert plan.config.train is not None
    assert (
        plan.config.train.tensorboard,
        plan.config.train.profile_at,
        plan.config.train.profile_steps,
    ) == (
        True,
        100,
        3,
    )
    assert plan.request["TensorBoardOutputConfig"] == {"S3OutputPath": "s3://bucket/cloudtrain"}
    plain = plan_of()
    assert plain.config.train is not None
    assert (plain.config.train.tensorboard, plain.config.train.profile_at) == (False, None)


def test_the_rated_bandwidth_is_in_run_json(plan_of: PlanOf) -> None:
    def rating(*overrides: str, **arguments: Any) -> float | None:
        return plan_of(*overrides, **arguments).config.network_gbps

    assert rating("cluster.instances=2") == 400
    assert rating("cluster.instances=1") is None, "one instance has no network between instances"
    assert rating("cluster={instances: 2, prefer: [ml.p5.48xlarge, ml.p4d.24xlarge]}") == 400, (
        "the slower one"
    )
    assert rating("cluster.instances=2", **local()) is None


@pytest.mark.parametrize(
    ("directory", "shown"), [("../other", ", from ../other"), ("inside", ""), ("x/../inside", "")]
)
def test_code_outside_of_the_jobs_folder_is_named(
    job: Callable[..., Path], capsys: pytest.CaptureFixture[str], directory: str, shown: str
) -> None:
    path = job(
        f"name: elsewhere\ncode: {{script: train.py, directory: {directory}}}\n"
        "cluster: {instance_type: ml.g5.xlarge}\n"
    )
    code = path.parent / directory.removeprefix("x/../")
    code.mkdir()
    (code / "train.py").write_text("")
    print_plan(cloudtrain.plan(path))
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("code "))
    assert row.partition("sha256 ")[2][12:] == shown
