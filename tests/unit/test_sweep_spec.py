"""sweep.yaml: every mistake with its place, and the nearest legal value."""

from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES

import cloudtrain
from cloudtrain import SpecError
from cloudtrain.errors import UserError
from cloudtrain.features.sweeps.loader import LoadedSweep, load_sweep, make_sweep

JOB = EXAMPLES / "digits" / "job.yaml"
VALID = f"""\
job: {JOB}
space:
  train.learning_rate: {{log_uniform: [1e-4, 1e-2]}}
  train.schedule: {{choice: [constant, cosine]}}
  train.warmup: {{choice: [5 steps, 10 steps], when: {{train.schedule: cosine}}}}
objective: validation/loss
trials: 8
limits: {{cost: 20 USD, time: 2h}}
"""


def load(folder: Path, text: str) -> LoadedSweep:
    file = folder / "sweep.yaml"
    file.write_text(text)
    return load_sweep(file)


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        load(folder, text)
    return [str(each).replace(f"{folder}/", "") for each in error.value.problems]


def test_a_valid_sweep_has_its_defaults(tmp_path: Path) -> None:
    sweep = load(tmp_path, VALID)
    spec = sweep.spec
    assert (sweep.name, spec.strategy, spec.engine, spec.parallel, spec.seed) == (
        "digits",
        "bayesian",
        "optuna",
        1,
        0,
    )
    assert (spec.limits.cost, spec.limits.time, spec.objective.is_maximized) == (20.0, 7200, False)
    assert sweep.job.train is not None


def test_the_goal_follows_from_the_metrics_name(tmp_path: Path) -> None:
    sweep = load(tmp_path, VALID.replace("validation/loss", "test/accuracy"))
    assert sweep.spec.objective.is_maximized
    (problem,) = problems_of(tmp_path, VALID.replace("validation/loss", "test/score"))
    assert problem.startswith(
        "sweep.yaml:6:12  objective.goal: it is unknown whether a larger or a smaller test/score"
    )


@pytest.mark.parametrize("given", ["{}", "{step: 1}", "{int: [1, 4], choice: [1]}"])
def test_a_grid_of_a_parameter_without_a_kind_is_refused(tmp_path: Path, given: str) -> None:
    text = f"job: {JOB}\nspace:\n  train.batch_size: {given}\nobjective: validation/loss\nstrategy: grid\n"
    (problem,) = problems_of(tmp_path, text)
    assert "give exactly one of choice" in problem


def test_all_mistakes_are_reported_with_their_places(tmp_path: Path) -> None:
    text = f"""\
job: {JOB}
space:
  train.learning_rate: {{log_unifrom: [1e-4, 1e-2]}}
  train.batch_size: {{int: [64, 16]}}
  train.warmup: {{choice: [5 steps], when: {{train.schedul: cosine}}}}
  train.clip_grad_norm: {{log_uniform: [0, 1]}}
objectiv: validation/loss
objective: loss
strategy: bayes
trials: many
"""
    at, swap, bound = "sweep.yaml:", "write [16, 64]", "use a lower bound above 0, or uniform"
    near, mean = 'did you mean "train.batch_size"?', 'did you mean "bayesian"?'
    assert problems_of(tmp_path, text) == [
        'sweep.yaml:3:25  space.train.learning_rate.log_unifrom: unknown field; did you mean "log_uniform"?',
        f"{at}4:27  space.train.batch_size.int: expected the smallest and then the largest value, got [64, 16]; {swap}",
        f"{at}5:44  space.train.warmup.when.train.schedul: expected another field of the space; {near}",
        f"{at}6:40  space.train.clip_grad_norm.log_uniform[0]: a logarithmic scale has no value 0.0; {bound}",
        'sweep.yaml:7:1  objectiv: unknown field; did you mean "objective"?',
        'sweep.yaml:8:12  objective.metric: expected split/name, got "loss"; did you mean "validation/loss"?',
        f'{at}9:11  strategy: expected one of grid, random, bayesian, hyperband, got "bayes"; {mean}',
        'sweep.yaml:10:9  trials: expected an integer, got "many"; for example trials: 20',
    ]


WORDS = """\
job: JOB
method: random
parameters: {}
metric: {name: loss, goal: minimize}
run_cap: 3
space:
  train.batch_size: {values: [4, 8]}
  train.learning_rate: {min: 0.1, max: 1}
  train.accumulate: [1, 2]
objective: {metric: validation/loss, direction: minimize}
trials: 2
"""


def test_words_of_other_tools_name_the_field(tmp_path: Path) -> None:
    found = problems_of(tmp_path, WORDS.replace("JOB", str(JOB)))
    hints = {each.partition("  ")[2].partition(":")[0]: each.partition("; ")[2] for each in found}
    spread = "a range is int: [LOW, HIGH], uniform: [LOW, HIGH] or log_uniform: [LOW, HIGH]"
    assert hints == {
        "method": "did you mean strategy?",
        "parameters": "did you mean space?",
        "metric": "did you mean objective.metric?",
        "run_cap": "did you mean trials?",
        "space.train.batch_size.values": 'did you mean "choice"?',
        "space.train.learning_rate.min": spread,
        "space.train.learning_rate.max": spread,
        "space.train.accumulate": (
            "write train.accumulate: {choice: [1, 2]}; a range is int, uniform or log_uniform"
        ),
        "objective.direction": "did you mean objective.goal?",
    }


def test_an_inline_job_is_checked_with_its_places(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = """\
job:
  name: demo
  code: {script: train.py}
  cluster: {instnces: 2, instance_type: ml.m5.large}
space: {code.args.rate: {uniform: [0, 1]}}
objective: {metric: validation/score, goal: max}
trials: 2
"""
    assert problems_of(tmp_path, text) == [
        'sweep.yaml:4:13  job.cluster.instnces: unknown field; did you mean "instances"?'
    ]
    sweep = load(tmp_path, text.replace("instnces", "instances"))
    assert sweep.job.base == tmp_path
    assert sweep.job.cluster.instances == 2


def test_a_missing_job_file_is_reported_at_its_field(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, VALID.replace(str(JOB), "jobb.yaml"))
    assert problem.startswith("sweep.yaml:1:6  job: jobb.yaml: no such file")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "trials: 8",
            "strategy: grid",
            "a grid needs single values, and this is a range without steps",
        ),
        ("trials: 8", "", "trials: required field is missing; for example trials: 20"),
        (
            "trials: 8",
            "trials: 8\npruning: median\nstrategy: hyperband",
            "hyperband has its own rule",
        ),
        (
            "trials: 8",
            "trials: 8\nrungs: {first: 5}",
            "has an effect with strategy: hyperband only",
        ),
        (
            "when: {train.schedule: cosine}",
            "when: {train.schedule: linear}",
            "never has the value linear",
        ),
        ("choice: [constant, cosine]", "choice: [cosine, cosine]", "given twice: cosine"),
        (
            "when: {train.schedule: cosine}",
            "when: {train.warmup: 5 steps}",
            "expected another field of the space",
        ),
        (
            "{log_uniform: [1e-4, 1e-2]}",
            "{log_uniform: [1e-4, 1e-2], step: 1e-3}",
            "has an effect with int and uniform",
        ),
        (
            "{log_uniform: [1e-4, 1e-2]}",
            "{uniform: [0, 1], int: [1, 2]}",
            "give exactly one of choice, int",
        ),
        (
            "limits: {cost: 20 USD, time: 2h}",
            "limits: {cost: 20}",
            "expected an amount such as 500 USD",
        ),
    ],
)
def test_a_mistake_is_reported(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert any(message in problem for problem in problems_of(tmp_path, VALID.replace(old, new)))


def test_conditions_in_a_circle_are_reported(tmp_path: Path) -> None:
    circle = "{choice: [constant, cosine], when: {train.warmup: 5 steps}}"
    found = problems_of(tmp_path, VALID.replace("{choice: [constant, cosine]}", circle))
    assert any("the conditions form a circle" in problem for problem in found)


def test_a_function_needs_a_goal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="larger or a smaller score"):
        cloudtrain.sweep(
            tmp_path / "job.yaml",
            {"train.steps": {"int": [1, 2]}},
            objective=lambda _: 1.0,
            local=True,
        )


def test_a_sweep_of_python_is_validated() -> None:
    fields: dict[str, Any] = {
        "space": {"train.epochs": {"int": [1, 3]}},
        "objective": "validation/loss",
        "trials": 3,
    }
    assert make_sweep(JOB, fields).spec.space["train.epochs"].kinds == ["int"]
    with pytest.raises(SpecError) as error:
        make_sweep(JOB, {**fields, "strateggy": "grid"})
    assert 'did you mean "strategy"?' in str(error.value)


def test_the_kind_of_the_other_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        load_sweep(JOB)
    (problem,) = error.value.problems
    assert problem.message == "a job file, not a sweep file"
    assert problem.hint == f"its command: cloudtrain plan {JOB}"

    load(tmp_path, VALID)
    with pytest.raises(SpecError) as error:
        cloudtrain.JobSpec.from_yaml(tmp_path / "sweep.yaml")
    (problem,) = error.value.problems
    assert problem.message == "a sweep file, not a job file"
    assert problem.hint == f"its command: cloudtrain sweep plan {tmp_path}/sweep.yaml"
