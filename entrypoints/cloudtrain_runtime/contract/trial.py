"""Trials of a SageMaker tuning job: their values arrive as hyperparameters and change what `run.json` contains.

A tuning job starts all its trials with one `run.json`. `RunConfig.searched` lists what they search, by path in
job.yaml, such as `train.learning_rate` or `code.args.lr`. SageMaker gives each trial one value of each as a
hyperparameter of that name: a number as text (`0.001`), or a JSON string (`"adam"`), as the SageMaker SDK encodes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from cloudtrain_runtime.contract.run_config import RunConfig, SearchedValue
from cloudtrain_runtime.contract.strict_json import load_json

ARGUMENTS: Final = "code.args."
TRAIN: Final = "train."
NOT_SEARCHED: Final = ("sagemaker_", "_tuning_objective_metric")
"""Beginnings of hyperparameters for AWS's toolkit, not for the script (github.com/aws/sagemaker-training-toolkit,
params.py). SageMaker adds the second one to trials."""


class TrialError(ValueError):
    """The hyperparameters of a trial do not fit its `run.json`."""


def apply_trial(config: RunConfig, hyperparameters: Mapping[str, str], trial: str) -> RunConfig:
    """Return the configuration of one trial.

    Args:
        config: The configuration that all trials share.
        hyperparameters: Content of hyperparameters.json.
        trial: Name of the trial's training job, which becomes the run id.

    Raises:
        TrialError: A value is missing, unknown or of a wrong type.
    """
    values = read_values(config.searched, hyperparameters)
    args = config.args
    train = config.train
    training = dict(config.training)
    for name, value in values.items():
        field = name.removeprefix(ARGUMENTS).removeprefix(TRAIN)
        if name.startswith(TRAIN):
            if train is None or not hasattr(train, field):
                raise TrialError(
                    f"{name}: this job has no such field; plan and runtime have different versions"
                )
            train = replace(train, **{field: value})
            changed = dict(training.get("train", {}))
            changed.pop(field, None)
            if value != config.searched[name].default:
                changed[field] = value
            training["train"] = changed
            continue
        option = [f"--{field}", str(value)]
        args = {**args, field: value} if isinstance(args, dict) else [*args, *option]
        training["args"] = args
    training = {name: value for name, value in training.items() if value}
    uri = uri_of_trial(config.checkpoint.uri, config.run, trial)
    checkpoint = replace(config.checkpoint, uri=uri)
    identity = training if config.training else {}
    return replace(
        config,
        run=trial,
        args=args,
        train=train,
        training=identity,
        checkpoint=checkpoint,
        searched={},
    )


def uri_of_trial(uri: str, tuning: str, trial: str) -> str:
    """Return a trial's own folder for a folder of the tuning job: all trials share one `run.json`."""
    if not uri:
        return uri
    shared = uri.rstrip("/")
    replaced = f"{shared}/".replace(f"/{tuning}/", f"/{trial}/").rstrip("/")
    if replaced == shared:
        # The tuning job's id is no part of it.
        return f"{replaced}/{trial}"
    return replaced


def read_values(
    searched: Mapping[str, SearchedValue], hyperparameters: Mapping[str, str]
) -> dict[str, Any]:
    """Return the searched values of a trial by name.

    Raises:
        TrialError: A value is missing, unknown or of a wrong type.
    """
    given = {
        name: text for name, text in hyperparameters.items() if not name.startswith(NOT_SEARCHED)
    }
    listed = ", ".join(sorted(searched))
    for name in sorted({*given} - {*searched}):
        raise TrialError(
            f"hyperparameter {name}: this job does not search it; its tuning job must search {listed}"
        )
    for name in sorted({*searched} - {*given}):
        raise TrialError(
            f"hyperparameter {name} is missing; the trial's tuning job must search {listed}"
        )
    return {name: _read(name, given[name], value.kind) for name, value in searched.items()}


def _read(name: str, text: str, kind: str) -> Any:
    if kind not in _KINDS:
        raise TrialError(
            f"run.json: {name} has the kind {kind!r}; this runtime reads {', '.join(_KINDS)}"
        )
    read, expected = _KINDS[kind]
    try:
        return read(_decode(text))
    except (KeyError, ValueError):
        raise TrialError(
            f"hyperparameter {name}: expected {expected}, got {text!r}; correct its range in the tuning job"
        ) from None


def _decode(text: str) -> str:
    """Return a value's text: the SageMaker SDK encodes choices as JSON strings, and SageMaker sends numbers as text."""
    try:
        value = load_json(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _int(text: str) -> int:
    # SageMaker may write 16.0 for 16.
    value = float(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_KINDS: Final[Mapping[str, tuple[Callable[[str], Any], str]]] = {
    "float": (_float, "a number"),
    "int": (_int, "an integer"),
    "bool": (_bool, "true or false"),
    "text": (str, "text"),
}
"""By kind of value, its reader and what it expects."""
