"""`JobSpec.with_values`: changed jobs are validated, and errors name the nearest field."""

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from support.jobs import EXAMPLES

import cloudtrain
from cloudtrain import JobSpec, SpecError, UserError

JOB = EXAMPLES / "digits" / "job.yaml"


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec.from_yaml(JOB)


def test_values_are_changed_in_a_new_job(spec: JobSpec) -> None:
    changed = spec.with_values({"train.epochs": 2, "cluster.spot": True, "limits.runtime": "30m"})
    assert changed.train is not None
    assert changed.cluster.spot is not None
    assert (changed.train.epochs, changed.train.batch_size, changed.limits.runtime) == (2, 16, 1800)
    assert changed.base == spec.base
    assert spec.to_document() == JobSpec.from_yaml(JOB).to_document()
    overridden = JobSpec.from_yaml(
        JOB, ["train.epochs=2", "cluster.spot=true", "limits.runtime=30m"]
    )
    assert changed.to_document() == overridden.to_document()
    assert cloudtrain.plan(changed, local=True).length.epochs == 2


def test_no_values_give_an_equal_job(spec: JobSpec) -> None:
    assert spec.with_values({}).to_document() == spec.to_document()


def test_none_removes_a_value(spec: JobSpec) -> None:
    changed = spec.with_values({"train.epochs": None, "train.steps": 500})
    assert changed.train is not None
    assert (changed.train.epochs, changed.train.steps) == (None, 500)


def test_python_values_become_those_of_a_job_file(spec: JobSpec) -> None:
    numpy = pytest.importorskip("numpy")
    values = {"train.learning_rate": numpy.float32(0.5), "train.epochs": numpy.int64(3)}
    types = {
        "cluster.prefer": ("ml.p4d.24xlarge", "ml.p4de.24xlarge"),
        "cluster.instance_type": None,
    }
    changed = spec.with_values({**values, **types, "code.directory": PurePosixPath(".")})
    assert changed.train is not None
    assert (changed.train.learning_rate, changed.train.epochs) == (0.5, 3)
    assert changed.cluster.types == ("ml.p4d.24xlarge", "ml.p4de.24xlarge")


def test_a_job_of_python_can_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    built = JobSpec(
        name="demo", code={"script": "train.py"}, cluster={"instance_type": "ml.m5.large"}
    )
    assert built.with_values({"cluster.instances": 3}).cluster.instances == 3
    with pytest.raises(SpecError) as error:
        built.with_values({"cluster.instances": 3, "train.epochs": 1})
    assert "train: this section is for a Task" in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("train.epoch", 2, 'train.epoch: unknown field; did you mean "epochs"?'),
        ("trian.epochs", 2, 'trian: unknown field; did you mean "train"?'),
        ("train.schedule", "cosin", ', got "cosin"; did you mean "cosine"?'),
        (
            "train.epochs",
            "two",
            'train.epochs: expected an integer, got "two"; for example epochs: 3',
        ),
    ],
)
def test_errors_name_the_field_and_the_nearest_one(
    spec: JobSpec, path: str, value: Any, problem: str
) -> None:
    with pytest.raises(SpecError) as error:
        spec.with_values({path: value})
    (found,) = map(str, error.value.problems)
    assert found.startswith(f"with_values({{{path!r}: {value!r}}})  {path.partition('.')[0]}")
    assert found.endswith(problem)


def test_a_long_value_is_shortened_in_errors(spec: JobSpec) -> None:
    with pytest.raises(SpecError) as error:
        spec.with_values({"train.epochs": "x" * 1000})
    assert len(str(error.value)) < 250


def test_all_problems_are_reported_together(spec: JobSpec) -> None:
    with pytest.raises(SpecError) as error:
        spec.with_values(
            {
                "train.epochs": 0,
                "limits.runtime": "6 hours",
                "train.steps": 5,
                "code.task": "other:Digits",
            }
        )
    assert sorted(problem.path for problem in error.value.problems) == [
        "code.task",
        "limits.runtime",
        "train.epochs",
    ]


@pytest.mark.parametrize("path", ["", "train.", ".epochs", "train..epochs"])
def test_an_empty_path_is_an_error(spec: JobSpec, path: str) -> None:
    with pytest.raises(UserError, match="expected the path of a field"):
        spec.with_values({path: 1})


def test_a_path_below_a_value_is_an_error(spec: JobSpec) -> None:
    with pytest.raises(UserError, match=r"code\.task is a value"):
        spec.with_values({"code.task.name": 1})


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_while_a_value_is_written(spec: JobSpec, error: type[BaseException]) -> None:
    class Interrupted(int):
        def __format__(self, _: str) -> str:
            raise error

    spec.limits.__dict__["runtime"] = Interrupted(60)
    spec.limits.__pydantic_fields_set__.add("runtime")
    spec.__pydantic_fields_set__.add("limits")
    with pytest.raises(error):
        spec.to_document()
