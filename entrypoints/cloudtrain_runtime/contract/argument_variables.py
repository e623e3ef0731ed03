"""The `SM_*` variables with a script's arguments, whose size the plan checks before the launcher sets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.contract.trial import NOT_SEARCHED


def argument_variables(argv: list[str], parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with a script's arguments.

    Args:
        argv: Arguments of the script.
        parameters: Hyperparameters of the training job, which a tuning job adds for each trial.
    """
    own = hyperparameters(argv)
    own |= {name: value for name, value in parameters.items() if not name.startswith(NOT_SEARCHED)}
    return {
        "SM_USER_ARGS": dump_json(argv),
        "SM_HPS": dump_json(own),
        **{
            f"SM_HP_{name.upper()}": each if isinstance(each, str) else dump_json(each)
            for name, each in own.items()
        },
    }


def hyperparameters(argv: list[str]) -> dict[str, Any]:
    """Return what a script's arguments say as `--key value`: what SageMaker's own SDK calls hyperparameters.

    Values are read as JSON, as AWS's toolkit reads them; an option without a value is true.
    """
    found: dict[str, Any] = {}
    for word, following in zip(argv, [*argv, "--"][1:], strict=True):
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            continue
        if equals:
            found[name] = decode(value)
        elif following.startswith("--"):
            found[name] = True
        else:
            found[name] = decode(following)
    return found


def decode(text: Any) -> Any:
    """Return a hyperparameter's value: JSON inside a string; a plain string is allowed, too."""
    try:
        # NaN and Infinity, which JSON has not, stay text.
        return load_json(text, parse_constant=str)
    except (TypeError, ValueError):
        return text
