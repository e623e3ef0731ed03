"""Warnings about values of `code.args` that the code gets otherwise than they look."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.job.arguments import spelling
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.document import SWITCH_WORDS, dotted
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.planning.diagnostics import warning
from cloudtrain.support.units import number_with_commas
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE
from cloudtrain_runtime.contract.placeholders import (
    CHECKPOINTS_VARIABLE,
    PLACEHOLDERS,
    names_in,
)

_PATH = lazy_pattern(r"(?i)(^|[_-])(dir|directory|path|folder|home|file|cache|root)$")
_ON = ("on", "yes", "true")
_CHANNEL = "SM_CHANNEL_"
_FOLDERS = {
    "SM_MODEL_DIR": str(CONTAINER_TREE.model),
    "SM_OUTPUT_DATA_DIR": str(CONTAINER_TREE.output_data),
    CHECKPOINTS_VARIABLE: str(CONTAINER_TREE.checkpoints),
    "SM_MODULE_DIR": ". (the code starts in its folder)",
}
"""Placeholders of commands that are the same folder on every instance."""


def warn_about_arguments(spec: JobSpec, conventions: ScriptConventions) -> Iterator[Diagnostic]:
    """Warn about arguments that the code gets in another form than it reads, by its own source."""
    if spec.code.command is None and not conventions.expands_variables:
        yield from _warn_of_placeholders(spec)
    kinds = dict(conventions.arguments)
    if not isinstance(spec.code.args, Mapping):
        yield from _warn_about_words(spec.code.args, kinds)
        return
    for name, value in spec.code.args.items():
        if value is None and spec.is_tilde(("code", "args", name)) and _PATH.search(name):
            yield warning(
                f'code.args.{name}: ~ is null in YAML, not the home folder; for the folder write "~"'
            )
            continue
        text = _problem(spec, str(name), value, kinds.get(str(name), ""))
        if text:
            yield warning(f"code.args.{name}: {text}")


def _warn_of_placeholders(spec: JobSpec) -> Iterator[Diagnostic]:
    """Warn about placeholders of commands where a script, module or Task gets the text as it is."""
    seen: set[str] = set()
    for at, value in _texts(spec):
        for name in names_in(value):
            is_known = name in PLACEHOLDERS or name.startswith(_CHANNEL)
            if not is_known or name in seen:
                continue
            seen.add(name)
            yield warning(
                f"{at}: ${name} is replaced in a command only, not here; {_value_of(spec, name)}"
            )


def _texts(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the values of `code.args` and `code.env`, each with its place."""
    args = spec.code.args
    arguments = args.items() if isinstance(args, dict) else enumerate(args)
    for key, value in arguments:
        yield dotted(("code", "args", key)), str(value)
    for name, value in spec.code.variables.items():
        yield dotted(("code", "env", name)), value


def _value_of(spec: JobSpec, name: str) -> str:
    """Return what to write in place of a placeholder."""
    if name in _FOLDERS:
        return f"write {_FOLDERS[name]}"
    if not name.startswith(_CHANNEL):
        return f'read os.environ["{name}"] in the code'
    wanted = name.removeprefix(_CHANNEL)
    channel = next((each for each in spec.data if each.upper() == wanted), None)
    if channel is None:
        folder = CONTAINER_TREE.data / wanted.lower()
        return f"name the channel {wanted.lower()} in data, and write {folder}"
    return f"write {CONTAINER_TREE.data / channel}"


def _warn_about_words(words: Sequence[Any], kinds: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Warn about an option of the script with its value in one word, which argparse takes for no option."""
    for index, word in enumerate(words):
        option, _, rest = str(word).partition(" ")
        if rest and option.startswith("--") and option.removeprefix("--") in kinds:
            yield warning(
                f"code.args[{index}]: the script gets {shlex.quote(str(word))} as one word, which argparse takes for no "
                f"option; write two: {option}, {rest.strip()}"
            )


def _problem(spec: JobSpec, name: str, value: Any, kind: str) -> str:
    """Return what is wrong with a value for an argument of this kind; an empty text for nothing."""
    if isinstance(value, list | tuple | dict | bool) or value is None:
        return ""
    is_task = spec.code.task is not None
    shown = spelling(value)
    if shown.lower() in SWITCH_WORDS and kind in ("bool", "flag"):
        return _switch_problem(name, shown, is_task=is_task, kind=kind)
    if kind not in ("int", "float") or (is_task and not isinstance(value, str)):
        return ""
    if not is_task and _parses(shown, kind):
        return ""
    meant = number_with_commas(shown)
    if is_task and not meant and not _parses(shown, "float"):
        # A word may be meant, such as auto.
        return ""
    hint = "write it as the code parses it"
    if is_task or meant:
        hint = f"write {meant or shown}"
    got = f"gets --{name} {shown}"
    if is_task:
        got = f'gets the text "{shown}"'
    wanted = "an integer" if kind == "int" else "a number"
    return f"{spec.code.entry} {got} and expects {wanted}; {hint}"


def _switch_problem(name: str, shown: str, *, is_task: bool, kind: str) -> str:
    is_on = shown.lower() in _ON
    if is_task:
        meant = "true" if is_on else "false"
        return f'{shown} is the text "{shown}" in YAML 1.2, which counts as true in Python; write {meant}'
    if kind == "flag":
        meant = "remove it, or write null"
        if is_on:
            meant = f"write true for --{name} alone"
        return f"{shown} is text in YAML 1.2, and --{name} takes no value; {meant}"
    if is_on:
        return ""
    return (
        f'type=bool of argparse takes every text for true, also "{shown}"; remove it, or write ""'
    )


def _parses(text: str, kind: str) -> bool:
    try:
        int(text) if kind == "int" else float(text)
    except ValueError:
        return False
    return True
