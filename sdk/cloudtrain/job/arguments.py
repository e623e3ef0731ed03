"""Arguments of scripts (`code.args`): their validation, the argv, and the command line that a plan shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.job.diagnostics import Diagnostic, in_braces, mapping_of
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.strict_json import dump_json

Arguments = Mapping[str, Any] | tuple[Any, ...]


def script_argv(args: Arguments) -> list[str]:
    """Return the argv of a script: a list as it is, a mapping as `--key value`.

    In a mapping, `true` becomes a bare `--key`, a list `--key one two`, and `null` omits the argument (see
    `omitted_arguments`).
    """
    if not isinstance(args, Mapping):
        return [spelling(value) for value in args]
    argv: list[str] = []
    for key, value in args.items():
        if value is None:
            continue
        argv.append(f"--{key}")
        if isinstance(value, list | tuple):
            argv += map(spelling, value)
        elif value is not True:
            argv.append(spelling(value))
    return argv


def omitted_arguments(args: Arguments) -> tuple[str, ...]:
    """Return the arguments of a script whose value is `null`, which omits them, as `--key`."""
    if not isinstance(args, Mapping):
        return ()
    return tuple(f"--{key}" for key, value in args.items() if value is None)


def spelling(value: Any) -> str:
    """Return a value as it is spelled in the job file: `1e-4` stays `1e-4`."""
    return str(getattr(value, "text", value))


def to_document(args: Arguments) -> Any:
    """Return a script's arguments for a job document: numbers in unusual spelling become text, to keep the spelling."""
    if not isinstance(args, Mapping):
        return _keep_spelling(args)
    return {key: _keep_spelling(value) for key, value in args.items()}


def _keep_spelling(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_keep_spelling(part) for part in value]
    return value if spelling(value) == str(value) else spelling(value)


def check_script_arguments(args: Arguments) -> Iterator[Diagnostic]:
    """Yield an error for each argument that has no unambiguous text in an argv."""
    if not isinstance(args, Mapping):
        has_mapping = any(isinstance(each, dict) for each in args)
        if has_mapping and (fields := mapping_of(args)):
            hint = f"write args: {in_braces(fields)}"
            yield Diagnostic("a list has the words of a command line, not fields", ("args",), hint)
        else:
            yield from _check_words(args, ("args",))
        return
    for key, value in args.items():
        at = ("args", key)
        if str(key).startswith("-"):
            yield _without_dashes(str(key))
        elif value is False:
            explicit = (
                f"""to pass --{key} False write {key}: "False" (--set 'code.args.{key}="False"')"""
            )
            hint = f"{explicit}; to leave the flag out remove the key, or write null"
            yield Diagnostic(
                f"false is ambiguous: it can mean --{key} False or no argument", at, hint
            )
        elif value in ([], ()):
            hint = f"remove the key, or write true for --{key} alone"
            yield Diagnostic(f"an empty list has no values for --{key}", at, hint)
        elif isinstance(value, list | tuple):
            yield from _check_words(value, at)
        elif isinstance(value, dict):
            yield _expected_text(value, at)


def _without_dashes(key: str) -> Diagnostic:
    name = key.lstrip("-")
    is_short = len(name) == 1 and not key.startswith("--")
    hint = f"write {name}"
    if is_short:
        hint = f"a list passes words as they are: args: [{key}, ...]"
    message = f"the script would get --{key}, as -- is added to each name"
    return Diagnostic(message, ("args", key), hint, is_key=True)


def _check_words(words: Sequence[Any], at: FieldPath) -> Iterator[Diagnostic]:
    for index, word in enumerate(words):
        if word is None or isinstance(word, bool | dict | list | tuple):
            yield _expected_text(word, (*at, index))


def _expected_text(value: Any, at: FieldPath) -> Diagnostic:
    text = dump_json(value, default=str)
    hint = f"write it in quotes, as the script parses it: '{text}'"
    return Diagnostic(f"expected text or a number for a script's argument, got {text}", at, hint)


def command_line(config: RunConfig) -> str:
    """Return what each rank executes: a Python command in shell syntax, or the Task with its arguments."""
    if isinstance(config.args, dict):
        given = ", ".join(f"{name}={value!r}" for name, value in config.args.items())
        return f"{config.task}({given})"
    if config.command:
        return " ".join(map(_quote, [*config.command, *config.args]))
    words = ["python"]
    if config.module is not None:
        words += ["-m", config.module]
    else:
        words.append(_quote(config.script or ""))
    if config.local_rank_option:
        # The shell replaces the variable, so this word has no quotes.
        words.append(f"{config.local_rank_option}=$LOCAL_RANK")
    words += map(_quote, config.args)
    return " ".join(words)


def _quote(word: str) -> str:
    """Return a word in shell syntax on one line; unprintable characters are escaped in `$'...'`."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_escape(char) for char in word) + "'"


def _escape(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\x{ord(char):02x}" if char.isascii() else f"\\U{ord(char):08x}"
