"""Hints for words of SageMaker's estimators, and for fields without their section."""

from typing import Any

import pytest

import cloudtrain
from cloudtrain.job.diagnostics import ESTIMATOR_WORDS
from cloudtrain.job.spec import JobSpec

JOB: dict[str, Any] = {
    "name": "words",
    "code": {"script": "train.py"},
    "cluster": {"instance_type": "ml.g5.xlarge"},
}


@pytest.mark.parametrize("place", sorted(set(ESTIMATOR_WORDS.values())))
def test_a_hint_names_a_field_that_exists(place: str) -> None:
    model: Any = JobSpec
    *sections, name = place.split(".")
    for section in sections:
        model = model.model_fields[section].annotation
    assert name in model.model_fields


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"hyperparameters": {"lr": 1}}, "did you mean code.args?"),
        ({"instance_count": 2}, "did you mean cluster.instances?"),
        ({"entry_point": "train.py"}, "did you mean code.script?"),
        ({"instance_type": "ml.g5.xlarge"}, "did you mean cluster.instance_type?"),
        ({"epochs": 40}, "did you mean train.epochs?"),
        (
            {"cluster": {"instance_type": "ml.g5.xlarge", "instance_count": 2}},
            "did you mean cluster.instances?",
        ),
        ({"role": "arn"}, "the role is a setting of the account"),
        ({"chekpoint": {}}, 'did you mean "checkpoint"?'),
        (
            {"cluster": {"instance_type": "ml.g5.xlarge", "instance": 2}},
            'did you mean "instances"?',
        ),
    ],
)
def test_an_unknown_field_gets_the_nearest_legal_one(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(cloudtrain.SpecError) as caught:
        JobSpec(**{**JOB, **changes})
    hints = [
        problem.hint for problem in caught.value.problems if problem.message == "unknown field"
    ]
    assert len(hints) == 1
    assert hints[0].startswith(hint)


def test_set_names_the_section_of_a_field() -> None:
    spec = JobSpec(**JOB)
    with pytest.raises(cloudtrain.SpecError, match=r"did you mean train\.epochs\?"):
        spec.with_values({"epochs": 40})
