"""Diagnostics about a job: what is wrong with a field, and pydantic's validation errors in cloudtrain's words."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeGuard, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from cloudtrain.errors import Problem, SpecError, did_you_mean, nearest
from cloudtrain.job.document import SourceLocation, dotted, parse_document
from cloudtrain.job.request_members import FIELDS
from cloudtrain.secrets.values import is_secret_name, mask_secrets
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import number_with_commas
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.redaction import REPLACEMENT

DEFER_CROSS_FIELD_CHECKS = object()
"""Validation context that skips the checks between fields, because the caller runs them on the validated job."""


class Severity(StrEnum):
    """What a diagnostic means for the plan."""

    ERROR = "error"
    """It prevents the plan."""
    WARNING = "warning"
    DECISION = "decision"
    """What cloudtrain decided itself and why."""


@dataclass(frozen=True)
class Diagnostic:
    """An error, warning or decision about a job. `Problem` is an error with its location in the job file.

    Attributes:
        message: What is wrong and what was expected; of a warning or decision one line.
        path: Path of the field; not used for warnings and decisions.
        hint: The nearest legal value or what to do.
        compared: Every field that was compared, where `path` is not the only one. When one of them is invalid by
            itself, the diagnostic is meaningless and is dropped.
        is_key: Whether the field's name is wrong, not its value.
        location: The location of the error, if that is a file of the code.
        severity: What it means for the plan.
    """

    message: str
    path: FieldPath = ()
    hint: str = ""
    compared: tuple[FieldPath, ...] = ()
    is_key: bool = False
    location: SourceLocation | None = None
    severity: Severity = Severity.ERROR

    def below(self, prefix: FieldPath) -> Diagnostic:
        """Return the diagnostic with a prefix before its paths."""
        return replace(
            self,
            path=(*prefix, *self.path),
            compared=tuple((*prefix, *other) for other in self.compared),
        )

    def concerns(self, paths: Iterable[FieldPath]) -> bool:
        """Return whether one of the compared fields is, contains, or is contained in one of these paths."""
        return any(
            field[: len(path)] == path or path[: len(field)] == field
            for field in (self.compared or (self.path,))
            for path in paths
        )


def field_error(message: str, *, hint: str = "") -> PydanticCustomError:
    """Return an error of a field for its validator to raise."""
    return field_errors([Diagnostic(message, hint=hint)])


def field_errors(diagnostics: Iterable[Diagnostic]) -> PydanticCustomError:
    """Return one error for a validator to raise that carries several diagnostics."""
    every = tuple(diagnostics)
    # The text is for callers of pydantic; `diagnostics_of` reads the diagnostics.
    text = "; ".join(diagnostic.message for diagnostic in every)
    return PydanticCustomError("cloudtrain", "{text}", {"diagnostics": every, "text": text})


def to_problem(diagnostic: Diagnostic, location: SourceLocation) -> Problem:
    """Return the problem that reports a diagnostic, at its own location in the code or else at that of its field."""
    at = diagnostic.location or location
    path = "" if diagnostic.location is not None else dotted(diagnostic.path)
    return Problem(
        file=at.file,
        line=at.line,
        column=at.column,
        path=path,
        message=diagnostic.message,
        hint=diagnostic.hint,
    )


def diagnostics_of(model: type[BaseModel], error: ValidationError) -> list[Diagnostic]:
    """Return the diagnostics of a validation error of a model, without duplicates."""
    found: dict[tuple[FieldPath, str], Diagnostic] = {}
    for details in error.errors(include_url=False):
        for diagnostic in _translate(model, details):
            found.setdefault((diagnostic.path, diagnostic.message), diagnostic)
    # Each member of a union reports its own error: of these, keep the most specific one.
    specific = {
        each.path for each in found.values() if not each.message.startswith("expected one of")
    }
    return [
        each
        for each in found.values()
        if each.path not in specific or not each.message.startswith("expected one of")
    ]


def _translate(model: type[BaseModel], details: ErrorDetails) -> list[Diagnostic]:
    if details["type"] == "cloudtrain":
        path = _field_path(model, details["loc"])
        return [diagnostic.below(path) for diagnostic in details["ctx"]["diagnostics"]]
    path, message, hint = _describe(model, details)
    return [Diagnostic(message, path, hint, is_key=details["type"] == "extra_forbidden")]


def _describe(  # noqa: PLR0911 (one return per kind of error)
    model: type[BaseModel], details: ErrorDetails
) -> tuple[FieldPath, str, str]:
    path = _field_path(model, details["loc"])
    context: Mapping[str, Any] = details.get("ctx", {})
    kind = details["type"]
    given = _masked(path, details["input"])
    if kind == "extra_forbidden":
        section = _model_at(model, path[:-1])
        legal = sorted(section.model_fields) if section is not None else []
        return (
            path,
            "unknown field",
            _place_of(model, path, given) or _near_field(str(path[-1]), legal),
        )
    example = _example(model, path)
    if kind == "missing":
        return path, "required field is missing", example
    if kind == "literal_error":
        legal = _literals(model, path) or [str(context.get("expected", ""))]
        hint = did_you_mean(str(given), legal, f"use {legal[0]}")
        return path, f'expected one of {", ".join(legal)}, got "{given}"', hint
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return (
            path,
            f"expected a mapping of fields, got {_show(given)}",
            _fields_of(path, given) or example or "write key: value, indented below",
        )
    for bound, words in _BOUNDS.items():
        if bound in context:
            limit = context[bound]
            return path, f"expected {words} {limit:g}, got {_show(given)}", f"use {words} {limit:g}"
    for prefix, (expected, hint) in _EXPECTED.items():
        if kind.startswith(prefix):
            near = _near_value(path, kind, given)
            return path, f"expected {expected}, got {_show(given)}", near or example or hint
    message = details["msg"].replace("Input should", "must").replace("Value error, ", "")
    return path, f"{message}, got {_show(given)}", example


def _masked(path: FieldPath, given: Any) -> Any:
    """Return a value that was given for a field, without the texts that look like secrets."""
    names = [str(part) for part in path if isinstance(part, str)]
    name = next(filter(is_secret_name, names), names[-1] if names else "")
    masked = mask_secrets(given, name)
    # Lists and numbers of a job file are of classes of their own.
    return given if masked == given else masked


def _near_value(path: FieldPath, kind: str, given: Any) -> str:
    """Return a hint with the value that another one means; an empty string if nothing is known."""
    if kind.startswith(("tuple_", "list_")):
        return _list_of(path, given)
    is_one = isinstance(given, list | tuple) and len(given) == 1
    if is_one and isinstance(given[0], _SCALARS):
        return f"write {path[-1]}: {_plain(_plain_value(given[0]))}"
    if isinstance(given, str) and kind.startswith(("int_", "float_")):
        meant = _number_of(given)
        return f"did you mean {meant}?" if meant else ""
    return ""


def _number_of(text: str) -> str:
    """Return the number that a text means, such as `1000` for `1,000` and `2` for `2,`; else an empty string."""
    if text.endswith(",") and text[:-1].replace(".", "", 1).isdecimal():
        return text[:-1]
    return number_with_commas(text)


def _list_of(path: FieldPath, given: object) -> str:
    """Return a hint for a list that was written as one text; an empty string for another value."""
    if not isinstance(given, str):
        return ""
    words = [word.strip() for word in given.split(",") if word.strip()]
    if path[-1] == "command":
        try:
            words = shlex.split(given)
        except ValueError:
            # An open quote.
            return ""
    if not words:
        return ""
    return f"write {path[-1]}: {to_flow_style(words)}"


def _fields_of(path: FieldPath, given: Any) -> str:
    """Return a hint for a mapping that was written as text or as a list; an empty string for another value."""
    name = str(path[-1]) if path else ""
    if isinstance(given, str) and given.startswith("-"):
        try:
            fields = options_as_fields(shlex.split(given))
        except ValueError:
            # An open quote.
            return ""
        return f"write {name}: {fields}" if fields else ""
    if path[:1] == ("space",) and isinstance(given, list | tuple) and given:
        values = ", ".join(_plain(_plain_value(each)) for each in given)
        return f"write {name}: {{choice: [{values}]}}; a range is int, uniform or log_uniform"
    folders = [given] if isinstance(given, str) else given
    if path[:1] == ("data",) and _are_texts(folders):
        channel = name if len(path) > 1 else "train"
        rest = ", NAME: ..." if len(folders) > 1 else ""
        way = f"data: {{{channel}: {folders[0]}{rest}}}"
        return f"each channel has a name and one folder: write {way}"
    if len(path) == 1 and name in _MAIN_FIELDS and isinstance(given, str) and given.strip():
        return f"write {name}: {{{_MAIN_FIELDS[name]}: {given}}}"
    meant = mapping_of(given)
    return f"write {name}: {in_braces(meant)}" if meant else ""


def _are_texts(given: Any) -> TypeGuard[Sequence[str]]:
    is_list = isinstance(given, list | tuple) and len(given) > 0
    return is_list and all(isinstance(each, str) and each.strip() != "" for each in given)


_MAIN_FIELDS = {
    "checkpoint": "every",
    "cluster": "instance_type",
    "code": "script",
    "limits": "runtime",
    "notify": "sns",
    "output": "uri",
    "slurm": "partition",
}
"""Fields that a section is likely to mean which has one text as its value."""
_PAIR = lazy_pattern(r"([A-Za-z_][\w.-]*)=(.*)")
_NAME_AND_VALUE = (("name", "value"), ("key", "value"), ("name", "regex"))


def mapping_of(given: object) -> dict[str, Any]:
    """Return the mapping that `A=1 B=2`, `a: 1`, [A=1, B=2], [{name: A, value: 1}] or [{a: 1}, {b: 2}] means."""
    if isinstance(given, str):
        return _pairs_of(given.replace(",", " ").split()) or _yaml_mapping(given)
    if not isinstance(given, list | tuple):
        return {}
    if all(isinstance(each, str) for each in given):
        return _pairs_of(given)
    meant: dict[str, Any] = {}
    for each in given:
        if not isinstance(each, dict):
            return {}
        lower = {str(key).lower(): value for key, value in each.items()}
        names = next((pair for pair in _NAME_AND_VALUE if set(pair) == set(lower)), None)
        if names is not None:
            meant[str(lower[names[0]])] = lower[names[1]]
        elif len(each) == 1:
            meant |= each
        else:
            return {}
    return _flat(meant)


def _pairs_of(words: Iterable[str]) -> dict[str, Any]:
    found = [_PAIR.fullmatch(each.strip()) for each in words]
    pairs = {each[1]: each[2] for each in found if each is not None}
    return pairs if None not in found else {}


def _yaml_mapping(text: str) -> dict[str, Any]:
    try:
        return _flat(parse_document(text, "").data)
    except SpecError:
        return {}


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields whose values are all scalars, in their spelling; an empty mapping for others."""
    if not all(each is None or isinstance(each, _SCALARS) for each in fields.values()):
        return {}
    return {key: _plain_value(value) for key, value in fields.items()}


_SCALARS = (bool, int, float, str)


def _plain_value(value: Any) -> Any:
    """Return a value that YAML can write: numbers of a job file are of classes of their own."""
    if isinstance(value, bool | str) or value is None:
        return value
    return str(getattr(value, "text", value))


def options_as_fields(words: list[str]) -> str:
    """Return options such as `--lr 0.1 --fast` as a mapping in YAML; an empty string if other words are among them."""
    fields: dict[str, str | bool] = {}
    name = ""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            fields[name] = value if equals else True
        elif not name or fields[name] is not True:
            return ""
        else:
            fields[name] = word
    return in_braces(fields) if fields else ""


def in_braces(fields: Mapping[str, Any]) -> str:
    """Return fields as a mapping in YAML on one line, in which texts that are numbers have no quotes."""
    return "{" + ", ".join(f"{each}: {_plain(value)}" for each, value in fields.items()) + "}"


def _plain(value: Any) -> str:
    # Numbers stay numbers: as texts they would get quotes.
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) is not None
    is_plain = is_plain or value == REPLACEMENT
    return str(value) if is_plain else to_flow_style(value)


def _near_field(name: str, legal: list[str]) -> str:
    """Return a hint with the field of a section that a name is a spelling of, or else all of them."""
    # `url` has 0.67 of `uri`; longer names have so much in common by chance, such as `arguments` and `requirements`.
    cutoff = 0.6 if len(name) <= 3 else 0.75  # noqa: PLR2004 (see above)
    near = nearest(_as_field(name), legal, cutoff=cutoff)
    if near is None:
        # A field with a word before or behind it, such as `use_spot` or `runtime_hours`.
        within = [each for each in _as_field(name).split("_") if each in legal]
        near = within[0] if len(within) == 1 else None
    if near:
        return f'did you mean "{near}"?'
    return f"one of: {', '.join(legal)}"


def _as_field(name: str) -> str:
    """Return a name in the spelling of fields: `instance_type` for `InstanceType`, `instanceType` or `instance-type`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def place_of_word(model: type[BaseModel], name: str) -> str:
    """Return the field, such as `cluster.instances`, that a name means; an empty string if there is none or several."""
    found = _places_of(model, (_as_field(name),), name)
    return found[0] if len(found) == 1 else ""


def _place_of(model: type[BaseModel], path: FieldPath, given: object) -> str:
    """Return a hint for a field in the wrong section, or for a word of another tool; else an empty string."""
    written = str(path[-1])
    name = _as_field(written)
    if hint := _hint_of_word(name, path, given) or _hint_of_nesting(model, path, given):
        return hint
    own = _model_at(model, path[:-1])
    if own is not None and name in own.model_fields:
        # Another spelling of a field of its own section.
        return ""
    places = _places_of(model, (*path[:-1], name), written)
    if places == [COMMON_WORDS.get(name)] and places[0].startswith("train."):
        return f"did you mean {places[0]} (of a Task), or code.args.{name} (of a script)?"
    if not places:
        return ""
    return f"did you mean {' or '.join(places)}?"


def _hint_of_word(name: str, path: FieldPath, given: object) -> str:
    """Return a hint for a word that means no field of the same value."""
    if path[0] == "space" and name in _WORDS_OF_SPACES:
        return _WORDS_OF_SPACES[name]
    if name in _UNITS and path[:-1] in ((), ("limits",)):
        number = getattr(given, "text", "")
        value = f": {number}{_UNITS[name]}" if number else ""
        return f"did you mean limits.runtime{value}?"
    if name in OWN_ARGUMENTS:
        return f"only your code decides it: code.args.{name} passes it there"
    setting = name.removesuffix("_arn")
    if setting in _SETTINGS:
        by = f"CLOUDTRAIN_{setting.upper()}, or {setting} in cloudtrain.toml"
        return f"the {setting} is a setting of the account, not of a job: {by}"
    if name == "instance" and str(given).startswith("ml."):
        return "did you mean cluster.instance_type?"
    return ""


def _hint_of_nesting(model: type[BaseModel], path: FieldPath, given: object) -> str:
    """Return a hint for the fields of a job below another one, and for several folders in one channel."""
    name = path[-1]
    if len(path) == 1 and isinstance(given, dict) and len(given.keys() & model.model_fields) > 1:
        return f"remove the line {name}:, and begin the fields below it in column 1"
    is_in_channel = path[0] == "data" and len(path) == len(("data", "train", "images"))
    if is_in_channel and isinstance(given, str) and given.startswith(("s3://", "/", "./")):
        own = _model_at(model, path[:-1])
        if own is not None and nearest(str(name), own.model_fields) is None and name != "S3Uri":
            return f"a channel has one folder: write data.{path[1]}_{name} for another channel"
    return ""


def _places_of(model: type[BaseModel], path: FieldPath, written: str) -> list[str]:
    """Return the fields that a name may mean which its section lacks.

    Args:
        model: The job's model.
        path: The name in the spelling of fields, below its section.
        written: The name as it is written.
    """
    name = str(path[-1])
    sections = {section: _model_at(model, (section,)) for section in model.model_fields}
    places = [
        f"{section}.{name}"
        for section, fields in sections.items()
        if fields and name in fields.model_fields
    ]
    if places:
        # `outputs` at the top level is closer to `output` than to a field of another section.
        section = nearest(name, sections, cutoff=0.9)
        return places if section is None else [section, *places]
    own = _model_at(model, path[:-1])
    if own is not None and nearest(name, own.model_fields, cutoff=0.8) is not None:
        # `train.epoch` is a field of its own section.
        return []
    tables: tuple[Mapping[str, str], ...] = (ESTIMATOR_WORDS, COMMON_WORDS)
    if path[0] == "data":
        # Within a channel a word such as `labels` has another meaning.
        tables = ()
    elif "space" in model.model_fields:
        tables = (SWEEP_WORDS,)
    for words in tables:
        section, _, field = words.get(name, "").partition(".")
        if section == path[0] and own is not None and field in own.model_fields:
            return [f"{dotted(path[:-1])}.{field}"]
        if section in model.model_fields:
            return [words[name]]
    members = _places_of_member(path, written)
    return [each for each in members if each.partition(".")[0] in model.model_fields]


def _places_of_member(path: FieldPath, member: str) -> list[str]:
    """Return the fields that set a member of CreateTrainingJob, those of the section where it is written if it has any."""
    fields = [field for name, field in FIELDS.items() if member in name.split(".")]
    if path[0] == "data":
        channel = str(path[1]) if len(path) > 2 else "<name>"  # noqa: PLR2004 (data, channel, member)
        fields = [each.replace("<name>", channel) for each in fields]
    own = [each for each in fields if each.startswith(f"{path[0]}.")]
    sections = {each.partition(".")[0] for each in fields}
    # A member with members, such as ResourceConfig, is a section or a part of one.
    if len(fields) > _MOST_PLACES and len(sections) == 1:
        return [*sections]
    return list(dict.fromkeys(own or fields))[:_MOST_PLACES]


_RANGE = "a range is int: [LOW, HIGH], uniform: [LOW, HIGH] or log_uniform: [LOW, HIGH]"
_WORDS_OF_SPACES = {
    **dict.fromkeys(("distribution", "high", "low", "max", "min", "type"), _RANGE),
    "values": 'did you mean "choice"?',
}
"""Hints for words of W&B's, Ray's and Optuna's search spaces."""

_MOST_PLACES = 3
_SETTINGS = ("bucket", "region", "role")


ESTIMATOR_WORDS = {
    "base_job_name": "name",
    "checkpoint_s3_uri": "checkpoint.uri",
    "enable_network_isolation": "cluster.network",
    "entry_point": "code.script",
    "environment": "code.env",
    "framework_version": "cluster.framework",
    "hyperparameters": "code.args",
    "image_uri": "cluster.image",
    "instance_count": "cluster.instances",
    "keep_alive_period_in_seconds": "cluster.keep_alive",
    "max_retry_attempts": "limits.retries",
    "max_run": "limits.runtime",
    "max_wait": "cluster.spot",
    "metric_definitions": "metrics",
    "output_path": "output.uri",
    "security_group_ids": "cluster.network",
    "source_dir": "code.directory",
    "subnets": "cluster.network",
    "use_spot_instances": "cluster.spot",
    "volume_size": "cluster.volume",
}
"""Arguments of SageMaker's estimators, and the fields of job.yaml that stand for them."""

SWEEP_WORDS = {
    "algorithm": "strategy",
    "concurrency": "parallel",
    "direction": "objective.goal",
    "early_terminate": "pruning",
    "max_parallel_jobs": "parallel",
    "max_trials": "trials",
    "method": "strategy",
    "mode": "objective.goal",
    "n_trials": "trials",
    "num_samples": "trials",
    "num_trials": "trials",
    "parameters": "space",
    "params": "space",
    "pruner": "pruning",
    "run_cap": "trials",
    "sampler": "strategy",
    "scheduler": "pruning",
    "search_space": "space",
    "timeout": "limits.time",
}
"""Fields of a sweep by their names in W&B, Optuna, Ray Tune and SageMaker."""

COMMON_WORDS = {
    "accelerator": "cluster.instance_type",
    "accelerators": "cluster.instance_type",
    "amp": "train.precision",
    "arguments": "code.args",
    "bs": "train.batch_size",
    "budget": "limits.cost",
    "cmd": "code.command",
    "code_dir": "code.directory",
    "commands": "code.command",
    "compute": "cluster",
    "container": "cluster.image",
    "count": "cluster.instances",
    "dataset": "data",
    "datasets": "data",
    "dependencies": "code.requirements",
    "disk": "cluster.volume",
    "disk_size": "cluster.volume",
    "docker_image": "cluster.image",
    "duration": "limits.runtime",
    "email": "notify",
    "entrypoint": "code.script",
    "env_vars": "code.env",
    "environment_variables": "code.env",
    "envs": "code.env",
    "epoch": "train.epochs",
    "gpu": "cluster.instance_type",
    "gpu_type": "cluster.instance_type",
    "gpus": "cluster.instance_type",
    "grad_accum": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "gres": "cluster.instance_type",
    "hardware": "cluster",
    "hparams": "code.args",
    "hyper_parameters": "code.args",
    "inputs": "data",
    "interval": "checkpoint.every",
    "job_name": "name",
    "labels": "tags",
    "lr": "train.learning_rate",
    "machine": "cluster.instance_type",
    "machine_type": "cluster.instance_type",
    "mail_user": "notify",
    "main": "code.script",
    "max_cost": "limits.cost",
    "max_duration": "limits.runtime",
    "max_epochs": "train.epochs",
    "max_retries": "limits.retries",
    "max_runtime": "limits.runtime",
    "max_steps": "train.steps",
    "nnodes": "cluster.instances",
    "node_type": "cluster.instance_type",
    "nodes": "cluster.instances",
    "nproc": "cluster.processes_per_instance",
    "nproc_per_node": "cluster.processes_per_instance",
    "ntasks_per_node": "cluster.processes_per_instance",
    "num_epochs": "train.epochs",
    "num_gpus": "cluster.instance_type",
    "num_instances": "cluster.instances",
    "num_nodes": "cluster.instances",
    "num_train_epochs": "train.epochs",
    "num_workers": "train.workers",
    "packages": "code.requirements",
    "parameters": "code.args",
    "params": "code.args",
    "pip": "code.requirements",
    "preemptible": "cluster.spot",
    "program": "code.script",
    "replicas": "cluster.instances",
    "resources": "cluster",
    "run": "code.command",
    "save_every": "checkpoint.every",
    "source": "code.directory",
    "spot_instances": "cluster.spot",
    "storage": "cluster.volume",
    "time": "limits.runtime",
    "time_limit": "limits.runtime",
    "timeout": "limits.runtime",
    "use_spot": "cluster.spot",
    "walltime": "limits.runtime",
    "work_dir": "code.directory",
    "workdir": "code.directory",
    "working_dir": "code.directory",
    "working_directory": "code.directory",
}
"""Words of other tools and of scripts, and the fields of job.yaml that stand for them."""
OWN_ARGUMENTS = ("momentum", "optimizer", "wd", "weight_decay")
"""Words for what only the code decides."""
_PLAIN = lazy_pattern(r"[\w./+-]+")
_UNITS = {"days": "d", "hours": "h", "minutes": "m", "seconds": "s"}

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_EXPECTED = {
    "finite_number": ("a finite number", "write digits, such as 2"),
    "int_": ("an integer", "write digits only, such as 2"),
    "float_": ("a number", "such as 0.1 or 3e-4"),
    "bool_": ("true or false", "write true or false"),
    "string_": ("text", "write it in one line, in quotes where it could be read as something else"),
    "tuple_": ("a list", "write it in brackets: [first, second]"),
    "list_": ("a list", "write it in brackets: [first, second]"),
}


def _example(model: type[BaseModel], path: FieldPath) -> str:
    """Return a hint with a legal value of the field, or an empty string when the model has no example."""
    field = _field_at(model, path)
    if field is None or not field.examples:
        return ""
    return f"for example {path[-1]}: {to_flow_style(field.examples[0])}"


def _field_at(model: type[BaseModel], path: FieldPath) -> FieldInfo | None:
    section = _model_at(model, path[:-1]) if path else None
    if section is None:
        return None
    return section.model_fields.get(str(path[-1]))


def to_flow_style(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return text.removesuffix("\n...\n").rstrip()


def _show(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."  # noqa: PLR2004 (short enough for one line of a terminal)


def _field_path(model: type[BaseModel], loc: tuple[str | int, ...]) -> FieldPath:
    """Return pydantic's location without the parts that name union members instead of fields."""
    path: FieldPath = ()
    current: type[BaseModel] | None = model
    for part in loc:
        is_variable = path[:2] == ("code", "env") and len(path) == len(_VARIABLE_PATH)
        if is_variable and part in _VARIABLE_KINDS:
            continue
        # The last part may be an unknown field of the section.
        may_be_unknown = not isinstance(part, str) or part == loc[-1]
        if current is not None and part not in current.model_fields and not may_be_unknown:
            break
        is_in_union = current is None and path and path[0] != "data"
        if is_in_union and isinstance(part, str) and ("[" in part or part in _UNION_TAGS):
            break
        path = (*path, part)
        current = _model_at(model, path)
    return path


_VARIABLE_PATH = ("code", "env", "NAME")
_VARIABLE_KINDS = ("Secret", "text")
"""Parts of pydantic's location that name the kind of an environment variable."""
_UNION_TAGS = ("int", "str", "bool", "float", "constrained-int", "constrained-float", "dict")


def _model_at(model: type[BaseModel], path: FieldPath) -> type[BaseModel] | None:
    """Return the section at a path, or None when there is a plain value."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            # An entry of a list of sections.
            continue
        if not _is_section(current):
            current = next(filter(_is_section, type_arguments(current)), None)
            continue
        field = current.model_fields.get(str(part))
        if field is None:
            return None
        if getattr(field.annotation, "__origin__", None) is dict:
            # The next part is a key of this mapping.
            current = field.annotation
        else:
            current = next(filter(_is_section, type_arguments(field.annotation)), None)
    return current if _is_section(current) else None


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def type_arguments(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and everything in its type arguments."""
    yield annotation
    for argument in get_args(annotation):
        yield from type_arguments(argument)


def _literals(model: type[BaseModel], path: FieldPath) -> list[str]:
    field = _field_at(model, path)
    if field is None:
        return []
    return [kind for kind in type_arguments(field.annotation) if isinstance(kind, str)]
