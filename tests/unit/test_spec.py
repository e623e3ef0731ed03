from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.entry import check_task
from cloudtrain.errors import SpecError, UserError
from cloudtrain.spec import JobSpec
from cloudtrain.units import Cadence

WriteJob = Callable[..., Path]

GOOD = """\
name: demo
code: {task: "mine:Mine", args: {layers: 4}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2}
train: {epochs: 3, learning_rate: 1e-3}
"""


def problems_of(path: Path, *overrides: str, instances: int | None = None) -> list[str]:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_yaml(path, overrides, instances=instances)
    return [str(problem).replace(str(path), "job.yaml") for problem in caught.value.problems]


def test_a_job_is_read(job: WriteJob) -> None:
    path = job(GOOD, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n")
    spec = JobSpec.from_yaml(path)
    assert spec.name == "demo"
    assert spec.cluster.instances == 2
    assert spec.train is not None
    assert spec.train.learning_rate == 1e-3
    assert spec.checkpoint.every == Cadence(seconds=600)
    assert spec.code_directory == path.parent


def test_a_job_is_frozen(job: WriteJob) -> None:
    spec = JobSpec.from_yaml(job(GOOD, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n"))
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
        mine_py="class Mine:\n    def __init__(self, layers=2): ...\n",
    )
    assert problems_of(path) == [
        'job.yaml:6:3  cluster.instnces: unknown field; did you mean "instances"?',
        "job.yaml:7:15  cluster.keep_alive: expected a duration with a unit such as 90s, 10m, 36h or 2d, got 30",
        'job.yaml:9:11  train.epochs: expected a whole number, got "three"',
        'job.yaml:10:14  train.precision: expected one of fp32, bf16, fp16, got "bf61"; did you mean "bf16"?',
        'job.yaml:11:1  limts: unknown field; did you mean "limits"?',
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("name=my_job", 'name: expected letters, digits and single hyphens between them; did you mean "my-job"?'),
        ("name=" + "a" * 43, "name: 43 characters; at most 42; the run id adds date and suffix"),
        ("cluster.instances=0", "cluster.instances: must be greater than or equal to 1, got 0"),
        ("cluster.instances=2.5", "cluster.instances: expected a whole number, got 2.5"),
        ("cluster.instance_type=p4d.24xlarge", "expected a SageMaker instance type such as ml.p4d.24xlarge"),
        ("cluster.spot=maybe", 'expected true, false or a mapping with max_wait, got "maybe"; spot: {max_wait: 36h}'),
        ("cluster.spot={max_wait: 1h}", "cluster.spot.max_wait: shorter than limits.runtime"),
        ("cluster.max_pending=5m", "cluster.max_pending: must be greater than or equal to 1800, got"),
        ("cluster.volume=200", "cluster.volume: expected a size with a unit such as 200GB"),
        ("cluster.distribution=ddp", "cluster.distribution: expected one of auto, torch_distributed, pytorchddp"),
        ("cluster.prefer=[ml.p4d.24xlarge]", "cluster: give exactly one of instance_type and prefer"),
        ("code.script=train.py", "code: give exactly one of task and script"),
        ("code.task=mine.py", "code.task: expected module:Class, such as gpt:GPT"),
        ("code.task=other:Mine", "code.task: no such file"),
        ("code.task=mine:Mien", 'code.task: mine.py has no class Mien; did you mean "Mine"?'),
        ("code.args.layrs=4", 'code.args.layrs: Mine takes no such argument; did you mean "layers"?'),
        ("code.directory=nowhere", "code.directory: no such folder"),
        ("code.directory=" + "x" * 300, "code.directory: no such folder"),
        ("code.directory=job.yaml", "code.directory: expected a folder"),
        ("code.args=[1]", "code.args: a Task takes keyword arguments: write a mapping"),
        ("train.steps=10", "train: give exactly one of epochs and steps"),
        ("train.parallel.data=fsdp", "train.parallel.data: this version trains with ddp only; use ddp"),
        ("train.evaluate.every=10m", "train.evaluate.every: expected a number of steps such as 200 steps"),
        ("checkpoint.every=often", "checkpoint.every: expected a duration such as 10m or a count such as 500 steps"),
        ("limits.cost=500", "limits.cost: expected an amount such as 500 USD"),
        ("data.code=s3://bucket/x", "data.code: cloudtrain uses a channel of this name itself; rename it"),
        ("data.train=nowhere", "data.train: no such file or folder"),
        ("data.train={uri: s3://b/x, mode: Fast}", "data.train.mode: expected one of File, FastFile, Pipe"),
        ("data.train={url: s3://b/x}", 'data.train.url: unknown field; did you mean "uri"?'),
        ("tracking.tensorboard=true", "tracking.tensorboard: this version tracks by event lines only"),
        ("train.profile={at: 100}", "train.profile: this version does not profile"),
        ("trakcing={}", 'trakcing: unknown field; did you mean "tracking"?'),
    ],
)
def test_each_mistake_says_what_was_expected(job: WriteJob, change: str, expected: str) -> None:
    found = problems_of(job(GOOD, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n"), change)
    assert any(expected in problem for problem in found), found
    assert any(f"--set {change}" in problem or "job.yaml:" in problem for problem in found)


def test_an_override_is_named_as_the_origin(job: WriteJob) -> None:
    assert problems_of(
        job(GOOD, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n"), "cluster.instances=many"
    ) == ['--set cluster.instances=many  cluster.instances: expected a whole number, got "many"']
    assert problems_of(job(GOOD, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n"), instances=0) == [
        "--instances 0  cluster.instances: must be greater than or equal to 1, got 0"
    ]


def test_an_override_must_be_path_and_value(job: WriteJob) -> None:
    with pytest.raises(UserError, match="expected path=value"):
        JobSpec.from_yaml(job(GOOD, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n"), ["cluster.spot"])


def test_overrides_are_read_as_yaml(job: WriteJob) -> None:
    spec = JobSpec.from_yaml(
        job(GOOD, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n"),
        ["train.learning_rate=1e-4", "cluster.spot={max_wait: 36h}", "tags.team=vision"],
    )
    assert spec.train is not None
    assert spec.train.learning_rate == 1e-4
    assert spec.cluster.spot is not None
    assert spec.cluster.spot.max_wait == 36 * 3600
    assert spec.tags == {"team": "vision"}


def test_spot_and_environment_take_what_people_write(job: WriteJob) -> None:
    text = GOOD.replace("instances: 2", "instances: 2, spot: true") + "tags: {cost-center: 42, live: true}\n"
    spec = JobSpec.from_yaml(job(text, mine_py="class Mine:\n    def __init__(self, layers=2): ...\n"))
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
        "job.yaml:1:1  cluster: required field is missing",
        "job.yaml:1:1  code: required field is missing",
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

    from cloudtrain import spec

    for section in ast.parse(inspect.getsource(spec)).body:
        if not isinstance(section, ast.ClassDef) or section.name == "Section":
            continue
        for statement, after in zip(section.body, [*section.body[1:], ast.Pass()], strict=True):
            if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert is_text, f"{section.name}.{ast.unparse(statement.target)} has no docstring"


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ("class Mine:\n def __init__(self, a, b=1, *, c, d=2): ...", {"a": 1, "c": 2}, []),
        (
            "class Mine:\n def __init__(self, a, b=1, *, c, d=2): ...",
            {},
            ["needs the argument a", "needs the argument c"],
        ),
        ("class Mine:\n def __init__(self, **anything): ...", {"x": 1}, []),
        ("class Mine(Base): ...", {"x": 1}, []),
        ("from elsewhere import Mine", {"x": 1}, []),
        ("from elsewhere import *", {"x": 1}, []),
        ("Mine = make()", {"x": 1}, []),
        ("class Other: ...", {}, ["mine.py has no class Mine"]),
        ("x = 1", {}, ["mine.py has no class Mine"]),
        ("class Mine(:", {}, ["mine.py:1 is not valid Python"]),
    ],
)
def test_a_task_is_checked_by_its_source_text(
    tmp_path: Path, source: str, arguments: dict[str, int], expected: list[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    found = [message for _, message, _ in check_task(path, "Mine", arguments)]
    assert len(found) == len(expected)
    assert all(part in message for part, message in zip(expected, found, strict=True)), found
