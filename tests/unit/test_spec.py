from collections.abc import Callable
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.errors import SpecError, UserError
from cloudtrain.job.sections.cluster import Cluster, Spot
from cloudtrain.job.sections.code import Code
from cloudtrain.job.spec import JobSpec
from cloudtrain.support.units import Cadence

WriteJob = Callable[..., Path]

DURATION = "expected a duration with a unit such as 90s, 10m, 36h or 2d"
GOOD = """\
name: demo
code: {task: "mine:Mine", args: {layers: 4}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {epochs: 3, learning_rate: 1e-3}
"""
MINE = "class Mine(Task):\n    def __init__(self, layers=2): ...\n"


def problems_of(path: Path, *overrides: str, instances: int | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        JobSpec.from_yaml(path, overrides, instances=instances)
    problems = getattr(caught.value, "problems", [caught.value])
    assert all(problem.hint for problem in problems), problems
    return [str(problem).replace(str(path), "job.yaml") for problem in problems]


def test_a_job_is_read(job: WriteJob) -> None:
    path = job(GOOD, mine_py=MINE)
    spec = JobSpec.from_yaml(path)
    assert spec.name == "demo"
    assert spec.cluster.instances == 2
    assert spec.train is not None
    assert spec.train.learning_rate == 1e-3
    assert spec.checkpoint.every == Cadence(seconds=600)
    assert spec.code_directory == path.parent


def test_a_job_is_frozen(job: WriteJob) -> None:
    spec = JobSpec.from_yaml(job(GOOD, mine_py=MINE))
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"  # type: ignore[misc]


def test_all_problems_are_reported_at_once_with_their_places(job: WriteJob) -> None:
    path = job(
        """\
name: demo
code:
  task: "mine:Mine"
cluster:
  instance_type: ml.p4d.24xlarge
  instnces: 2
  keep_alive: 30
train:
  epochs: three
  precision: bf61
limts: {}
""",
        mine_py=MINE,
    )
    assert problems_of(path) == [
        'job.yaml:6:3  cluster.instnces: unknown field; did you mean "instances"?',
        "job.yaml:7:15  cluster.keep_alive: " + DURATION + ", got 30; did you mean 30m?",
        'job.yaml:9:11  train.epochs: expected an integer, got "three"; for example epochs: 3',
        'job.yaml:10:14  train.precision: expected one of fp32, bf16, fp16, got "bf61"; did you mean "bf16"?',
        'job.yaml:11:1  limts: unknown field; did you mean "limits"?',
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "name=my_job",
            'name: expected letters, digits and single hyphens between them; did you mean "my-job"?',
        ),
        ("name=" + "a" * 43, "name: 43 characters; at most 42; the run id adds date and suffix"),
        ("cluster.instances=0", "cluster.instances: expected at least 1, got 0; use at least 1"),
        ("cluster.instances=2.5", "cluster.instances: expected an integer, got 2.5"),
        (
            "cluster.instance_type=p4d.24xlarge",
            "expected a SageMaker instance type such as ml.p4d.24xlarge",
        ),
        (
            "cluster.spot=maybe",
            'expected true, false or a mapping with max_wait, got "maybe"; write spot: {max_wait: 36h}',
        ),
        ("code.env={SM_MODEL_DIR: x}", "code.env.SM_MODEL_DIR: the launcher sets this variable"),
        ("data.x=''", "data.x: expected s3://bucket/prefix or a path, got nothing"),
        ("data.x=.", "contains the code folder, which would be uploaded as data"),
        ("data.x=/dev/null", "expected a file or folder, but /dev/null is neither"),
        (
            "data.x=file:///etc/hostname",
            'data.x: expected a path, got the uri "file:///etc/hostname"',
        ),
        ("data.x=arn:aws:s3:::bucket/x", "data.x: expected s3://bucket/prefix"),
        (
            "data={'..': s3://bucket/x}",
            "a channel becomes a folder, and this is not the name of a folder",
        ),
        ("data.x=s3://my..bucket/x", "data.x: expected s3://bucket/prefix"),
        ("cluster.instances=true", "cluster.instances: expected a number, got true"),
        ("train.learning_rate=true", "train.learning_rate: expected a number, got true"),
        ("train.learning_rate=.inf", "train.learning_rate: expected a finite number"),
        ("train.seed=99999999999999", "train.seed: expected at most"),
        ("cluster.volume=200gb", "did you mean 200GB?"),
        ("limits.cost=$1,000", "did you mean 1000 USD?"),
        ("limits.runtime=2 hours", "did you mean 2h?"),
        ("limits.runtime=59s", "limits.runtime: expected 1m to 28d, got 59s; use 1m to 28d"),
        ("cluster.volume=200", "cluster.volume: expected a size with a unit such as 200GB"),
        (
            "cluster.distribution=ddp",
            "cluster.distribution: expected one of auto, torch_distributed, pytorchddp",
        ),
        (
            "cluster.prefer=[ml.p4d.24xlarge]",
            "cluster: give exactly one of instance_type and prefer",
        ),
        ("code.script=train.py", "code: give exactly one of task, script, module and command"),
        ("code.task=mine.py", "code.task: expected module:Class, such as gpt:GPT"),
        ("code.task=other:Mine", "code.task: no such file"),
        ("code.task=mine:Mien", 'code.task: mine.py has no class Mien; did you mean "Mine"?'),
        (
            "code.args.layrs=4",
            'code.args.layrs: Mine takes no such argument; did you mean "layers"?',
        ),
        ("code.directory=nowhere", "code.directory: no such folder"),
        ("code.directory=" + "x" * 300, "code.directory: no such folder"),
        ("code.directory=job.yaml", "code.directory: expected a folder"),
        ("code.args=[1]", "code.args: a Task takes keyword arguments: write a mapping"),
        ("train.steps=10", "train: give exactly one of epochs and steps"),
        (
            "train.evaluate.every=10m",
            "train.evaluate.every: expected a number of steps such as 200 steps",
        ),
        (
            "metrics={loss: 'loss='}",
            "metrics.loss: expected one group that matches the value, got 0; for example",
        ),
        ("metrics={loss: '(('}", "metrics.loss: not a regular expression: missing )"),
        (
            "metrics={loss: '(?:a+)+(c)'}",
            "metrics.loss: a repetition of a group that ends with a repetition can take",
        ),
        ("metrics={'a b': '(.)'}", "metrics.a b: expected letters, digits and _ . : / -, got"),
        ("train.warmup=10m", "train.warmup: expected a number of steps such as 100 steps"),
        (
            "train.parallel.shard=2",
            "train.parallel.shard: has an effect with data: fsdp only; remove it, or use data: fsdp",
        ),
        (
            "train.parallel.offload=true",
            "train.parallel.offload: has an effect with data: fsdp only; remove it",
        ),
        (
            "train.parallel={data: fsdp, compress: bf16}",
            "train.parallel.compress: has an effect with data: ddp only",
        ),
        (
            "train.parallel={tensor: 2, compress: bf16}",
            "train.parallel.compress: is an option of DDP, which does not support layers that tensor splits",
        ),
        ("train.parallel={tensor: 2, bucket: 25MB}", "train.parallel.bucket: is an option of DDP"),
        (
            "train.parallel={tensor: 2, static_graph: true}",
            "train.parallel.static_graph: is an option of DDP",
        ),
        (
            "train.parallel={static_graph: true, find_unused: true}",
            "train.parallel.find_unused: contradicts static_graph",
        ),
        (
            "train.parallel.schedule=gpipe",
            "train.parallel.schedule: has an effect with a pipeline only",
        ),
        (
            "checkpoint.every=often",
            "checkpoint.every: expected a duration such as 10m or a count such as 500 steps",
        ),
        ("limits.cost=500", "limits.cost: expected an amount such as 500 USD"),
        ("data.code=s3://bucket/x", "data.code: cloudtrain uses this channel itself; rename it"),
        ("data.train=nowhere", "data.train: no such file or folder"),
        (
            "data.train={uri: s3://b/x, mode: Fast}",
            "data.train.mode: expected one of File, FastFile, Pipe",
        ),
        ("data.train={url: s3://b/x}", 'data.train.url: unknown field; did you mean "uri"?'),
        (
            "train={steps: 10, profile: {at: 8, steps: 5}}",
            "profile.at: the run ends after step 10; use at most 6",
        ),
        ("train.early_stopping={metric: loss}", 'did you mean "validation/loss"?'),
        (
            "code.env={WORLD_SIZE: 4}",
            "code.env.WORLD_SIZE: the launcher sets this variable for each rank; remove it",
        ),
        ("data={a: s3://bucket/x, A: s3://bucket/y}", "data.a: differs from A by case only"),
        ("data.train=s3:/bucket/x", "data.train: expected s3://bucket/prefix"),
        ("data.train=S3://bucket/x", "data.train: expected s3://bucket/prefix"),
        ("data.train=gs://bucket/x", "data.train: expected s3://bucket/prefix"),
        ("data.train=s3://Bucket/x", "data.train: expected s3://bucket/prefix"),
        ("checkpoint.uri=gs://bucket/x", "checkpoint.uri: expected s3://bucket/prefix"),
        ("checkpoint.resume=s3:/bucket/x", "checkpoint.resume: expected s3://bucket/prefix"),
        ("checkpoint.resume=runs/old", "checkpoint.resume: expected an absolute path"),
        ("checkpoint.resume=yesterday", "checkpoint.resume: expected where to resume from"),
        (
            "tags={'aws:team': x}",
            "tags.aws:team: AWS reserves tags that begin with aws:; rename it",
        ),
        ("tags={'cloudtrain:job': x}", "cloudtrain sets this tag itself; rename it"),
        (
            "tracking.mlflow=mlflow",
            "tracking.mlflow: expected the ARN of a SageMaker MLflow resource",
        ),
        (
            "cluster.network={subnets: [subnet-1]}",
            "cluster.network: subnets and security_groups go together",
        ),
        (
            "cluster={prefer: [ml.p5.48xlarge, ml.p5.48xlarge]}",
            "cluster.prefer: a type is given twice",
        ),
        ("limits.runtime=29d", "limits.runtime: expected 1m to 28d, got 29d"),
        (
            "limits.hang=9s",
            "limits.hang: expected 10s to 28d, got 9s; use 10s to 28d, or off to disable hang detection",
        ),
        ("limits.hang=29d", "limits.hang: expected 10s to 28d, got 29d"),
        ("limits.hang=10", "limits.hang: expected a duration"),
        ("limits.hang=true", "limits.hang: expected a duration"),
        ("limits.runtime=" + "9" * 400 + "h", "limits.runtime: expected a duration"),
        ("cluster.instances=" + "9" * 5000, "cluster.instances: expected an integer"),
        ("data.train=job.yaml/x", "data.train: no such file or folder"),
        ("code.directory=job.yaml/x", "code.directory: no such folder"),
        ("cluster.instances=!!python/none 1", "not allowed"),
        ("trakcing={}", 'trakcing: unknown field; did you mean "tracking"?'),
    ],
)
def test_each_mistake_says_what_was_expected(job: WriteJob, change: str, expected: str) -> None:
    found = problems_of(job(GOOD, mine_py=MINE), change)
    assert any(expected in problem for problem in found), found
    assert any(f"--set {change}" in problem or "job.yaml:" in problem for problem in found)


def test_an_override_is_named_as_the_origin(job: WriteJob) -> None:
    assert problems_of(job(GOOD, mine_py=MINE), "cluster.instances=many") == [
        '--set cluster.instances=many  cluster.instances: expected an integer, got "many"; for example instances: 2'
    ]
    assert problems_of(job(GOOD, mine_py=MINE), instances=0) == [
        "--instances 0  cluster.instances: expected at least 1, got 0; use at least 1"
    ]


def test_an_override_must_be_path_and_value(job: WriteJob) -> None:
    with pytest.raises(UserError, match="expected path=value"):
        JobSpec.from_yaml(job(GOOD, mine_py=MINE), ["cluster.spot"])


def test_overrides_are_read_as_yaml(job: WriteJob) -> None:
    spec = JobSpec.from_yaml(
        job(GOOD, mine_py=MINE),
        ["train.learning_rate=1e-4", "cluster.spot={max_wait: 36h}", "tags.team=vision"],
    )
    assert spec.train is not None
    assert spec.train.learning_rate == 1e-4
    assert spec.cluster.spot is not None
    assert spec.cluster.spot.max_wait == 36 * 3600
    assert spec.tags == {"team": "vision"}


def test_spot_and_tags_accept_true_and_numbers(job: WriteJob) -> None:
    text = (
        GOOD.replace("instances: 2", "instances: 2, spot: true")
        + "tags: {cost-center: 42, live: true}\n"
    )
    spec = JobSpec.from_yaml(job(text, mine_py=MINE))
    assert spec.cluster.spot is not None
    assert spec.tags == {"cost-center": "42", "live": "true"}


def test_a_near_file_is_named(job: WriteJob) -> None:
    path = job(
        GOOD.replace('task: "mine:Mine", args: {layers: 4}', "script: trian.py").replace(
            "train: {epochs: 3, learning_rate: 1e-3}\n", ""
        ),
        train_py="",
    )
    assert 'did you mean "train.py"?' in problems_of(path)[0]
    assert problems_of(path)[0].startswith("job.yaml:2:16  code.script: no such file")


def test_missing_fields_are_named(job: WriteJob) -> None:
    assert problems_of(job("name: demo\n")) == [
        "job.yaml:1:1  cluster: required field is missing; for example cluster: {instance_type: ml.p4d.24xlarge}",
        "job.yaml:1:1  code: required field is missing; for example code: {script: train.py}",
    ]


def test_a_mistake_in_a_list_is_reported_once(job: WriteJob) -> None:
    cluster = "cluster: {prefer: [{instance_type: ml.p4d.24xlarge, instance: 2}]}"
    assert problems_of(
        job(f"name: demo\ncode: {{script: train.py}}\n{cluster}\noutputs: {{}}\n", train_py="")
    ) == [
        'job.yaml:3:53  cluster.prefer[0].instance: unknown field; did you mean "instances"?',
        "job.yaml:4:1  outputs: unknown field; did you mean output or code.outputs?",
    ]


def test_wrong_value_hides_no_rule_of_another_field(job: WriteJob) -> None:
    path = job(
        """\
name: demo
name: twice
code: {task: "mine:Mine", script: train.py}
cluster:
  instance_type: p4d.24xlarge
  spot: {max_wait: 1h}
  keep_alive: 30m
  network: {subnets: [subnet-1]}
train: {epochs: none, precison: bf16}
limits: {runtime: 2h}
data: {train: "s3:/bucket", code: s3://bucket/code}
""",
        mine_py="class Mine(Task): ...\n",
        train_py="",
    )
    assert [problem.partition("  ")[2].partition(":")[0] for problem in problems_of(path)] == [
        "name",
        "code",
        "cluster.instance_type",
        "cluster.spot.max_wait",
        "cluster.keep_alive",
        "cluster.network",
        "train.epochs",
        "train.precison",
        "data.train",
        "data.code",
    ]


def test_scalars_are_read_as_people_mean_them(job: WriteJob) -> None:
    """YAML 1.1 reads `no` as false, `1e-4` as text and 2.10 as 2.1. cloudtrain reads them as people mean them."""
    path = job(
        """\
name: 2024
code: {script: train.py, args: {lr: 1e-4, seed: 007, tag: no}, env: {A: 0.10, B: true, C: 1e-4, D: 007}}
cluster: {instance_type: ml.p4d.24xlarge, framework: 2.10, spot: no, network: {isolation: no}}
tags: {version: 1.10}
""",
        train_py="",
    )
    spec = JobSpec.from_yaml(path)
    assert spec.name == "2024"
    assert spec.cluster.framework == "2.10"
    assert spec.cluster.spot is None
    assert spec.cluster.network.isolation is False
    assert spec.code.env == {"A": "0.10", "B": "true", "C": "1e-4", "D": "007"}
    assert spec.tags == {"version": "1.10"}
    assert isinstance(spec.code.args, dict)
    assert spec.code.args["lr"] == 1e-4
    assert spec.code.args["tag"] == "no"


def test_local_data_must_exist_for_each_instance(job: WriteJob, tmp_path: Path) -> None:
    path = job(GOOD, mine_py=MINE)
    data = tmp_path / "data"
    data.mkdir()
    assert "there are no files in" in problems_of(path, f"data.train={data}")[0]
    (data / "one").write_text("1")
    assert JobSpec.from_yaml(path, [f"data.train={data}"]).data["train"].uri == str(data)
    found = problems_of(path, f"data.train={{uri: {data}, sharded: true}}")
    assert "1 file for 2 instances: 1 would get none; use at least 2 files" in found[0]


def test_other_mistakes_are_refused(job: WriteJob, tmp_path: Path) -> None:
    path = job(GOOD, mine_py=MINE, train_py="def f(:\n")
    shorter = ["cluster.spot={max_wait: 1h}", "limits.runtime=2h"]
    assert "max_wait: shorter than limits.runtime, 2h" in problems_of(path, *shorter)[0]
    inside = ["data.train=s3://bucket/data", "checkpoint.uri=s3://bucket/data/saved"]
    assert (
        "checkpoints would be written into the data of channel train"
        in problems_of(path, *inside)[0]
    )
    script = ["code={script: train.py}", "train=null"]
    assert "train.py:1 is not valid Python" in problems_of(path, *script)[0]
    (path.parent / "train.py").write_bytes("# coding: latin-1\nx = 'ü'\n".encode("latin-1"))
    assert JobSpec.from_yaml(path, script).code.script == "train.py"
    (path.parent / "train.py").write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert JobSpec.from_yaml(path, script).code.script == "train.py"
    assert "expected text or a number" in problems_of(path, *script, "code.args={l: [1, [2]]}")[0]
    assert "expected text or a number" in problems_of(path, *script, "code.args=[true]")[0]
    assert (
        "code.args is a list in"
        in problems_of(path, *script, "code.args=[--lr, 1]", "code.args.0=--wd")[0]
    )


def test_empty_sections_are_none(job: WriteJob) -> None:
    path = job(
        GOOD.replace("instances: 2", "instances: 2, spot: , prefer: , network: ")
        + "limits:\ntags:\ndata:\ncheckpoint:\n",
        mine_py=MINE,
    )
    assert JobSpec.from_yaml(path).limits.runtime == 86400


def test_merge_keys_take_over_the_fields_of_an_anchor(job: WriteJob) -> None:
    path = job(
        """\
name: demo
code: &code {script: train.py, env: {A: "1"}}
cluster: {instance_type: ml.g5.xlarge, network: &net {isolation: true}}
tags: {<<: {team: a, cost: b}, team: c}
""",
        train_py="",
    )
    assert JobSpec.from_yaml(path).tags == {"team": "c", "cost": "b"}
    wrong = job(
        "name: demo\ncode: {script: train.py}\ncluster:\n  <<: [1]\n  instance_type: ml.g5.xlarge\n",
        train_py="",
    )
    assert "expected a mapping after <<" in problems_of(wrong)[0]


def test_a_job_built_in_python_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = JobSpec(name="a", cluster={"instance_type": "ml.g5.xlarge"}, code={"script": "nope.py"})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no such file"):
        cloudtrain.plan(spec)
    with pytest.raises(SpecError, match="sent as JSON"):
        Code(task="a:B", args={"layers": object()})


def test_data_to_upload_is_checked_for_secrets(job: WriteJob) -> None:
    path = job(
        "name: a\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge}\ndata: {x: images}\n",
        train_py="",
    )
    (path.parent / "images").mkdir()
    (path.parent / "images" / "one.png").write_bytes(b"1")
    assert cloudtrain.plan(path).uploads
    (path.parent / "images" / ".env").write_text("TOKEN=abc\n")
    (path.parent / ".cloudtrainignore").write_text("images/\n")
    with pytest.raises(SpecError, match="the data holds what looks like a secret"):
        cloudtrain.plan(path)
    assert cloudtrain.plan(path, local=True).uploads == ()


def test_an_isolated_job_downloads_nothing(job: WriteJob) -> None:
    path = job(GOOD, mine_py="class Mine(Task): ...\n", **{"requirements.txt": "einops"})
    overrides = [
        "code.args={}",
        "code.requirements=requirements.txt",
        "cluster.network.isolation=true",
    ]
    assert "an isolated container cannot download packages" in problems_of(path, *overrides)[0]


def test_the_constructor_names_the_argument_of_a_broken_rule() -> None:
    with pytest.raises(SpecError) as caught:
        Cluster(
            instance_type="ml.p5.48xlarge", spot=Spot(), keep_alive="1m", image="x", framework="2.5"
        )
    assert [str(problem) for problem in caught.value.problems] == [
        "Cluster(...)  framework: give framework or image, not both; remove one of them",
        "Cluster(...)  keep_alive: SageMaker has no warm pools for spot training; remove keep_alive or spot",
    ]


def test_the_constructor_reports_the_same_problems() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(name="demo", code={"tsk": "a:B"}, cluster={"instance_type": "ml.p4d.24xlarge"})  # type: ignore[arg-type]
    assert [str(problem) for problem in caught.value.problems] == [
        'JobSpec(...)  code.tsk: unknown field; did you mean "task"?'
    ]


def test_every_field_has_one_sentence() -> None:
    import ast
    import inspect

    from cloudtrain.job import spec

    for section in ast.parse(inspect.getsource(spec)).body:
        if not isinstance(section, ast.ClassDef) or "Section" not in map(
            ast.unparse, section.bases
        ):
            continue
        for statement, after in zip(section.body, [*section.body[1:], ast.Pass()], strict=True):
            if isinstance(statement, ast.AnnAssign) and not ast.unparse(
                statement.target
            ).startswith("_"):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert is_text, f"{section.name}.{ast.unparse(statement.target)} has no docstring"
