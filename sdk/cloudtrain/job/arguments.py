"""`code.args`: what a script may be given, the argv that it becomes, and the command line that a plan shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.job.problems import Finding
from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.strict_json import dump_json

Arguments = Mapping[str, Any] | tuple[Any, ...]


def script_argv(args: Arguments) -> list[str]:
    """Return the argv of a script: a list as it is, a mapping as `--key value`.

    `true` becomes a bare `--key`, and `null` omits its argument (see `omitted_arguments`); no other value is left out.
    """
    if not isinstance(args, Mapping):
        return [spelled(value) for value in args]
    argv: list[str] = []
    for key, value in args.items():
        if value is not None:
            argv += [f"--{key}"] if value is True else [f"--{key}", spelled(value)]
    return argv


def omitted_arguments(args: Arguments) -> tuple[str, ...]:
    """Return the arguments of a script that `null` omits, as `--key`."""
    return tuple(f"--{key}" for key, value in args.items() if value is None) if isinstance(args, Mapping) else ()


def spelled(value: Any) -> str:
    """Return a value as the job file spells it: `1e-4` stays `1e-4`."""
    return str(getattr(value, "text", value))


def to_document(args: Arguments) -> Any:
    """Return a script's arguments for a document that is read again: numbers spelled in another way become text."""
    if not isinstance(args, Mapping):
        return [_keep_spelling(value) for value in args]
    return {key: _keep_spelling(value) for key, value in args.items()}


def _keep_spelling(value: Any) -> Any:
    return value if spelled(value) == str(value) else spelled(value)


def check_script_arguments(args: Arguments) -> Iterator[Finding]:
    """Yield what a script cannot be given: argv is text, and `false` has two meanings."""
    for key, value in args.items() if isinstance(args, Mapping) else enumerate(args):
        at = ("args", key)
        if value is False and isinstance(args, Mapping):
            passes = f"""to pass --{key} False write {key}: "False" (--set 'code.args.{key}="False"')"""
            hint = f"{passes}; for a flag that is off leave the key out, or write null"
            yield Finding(f"false can mean --{key} False or no argument, so it is refused", at, hint)
        elif isinstance(value, dict | list | tuple) or (not isinstance(args, Mapping) and _is_bare(value)):
            text = dump_json(value, default=str)
            message = f"a script's argument is text, and this is {text}"
            yield Finding(message, at, f"write it in quotes, as the script reads it: '{text}'")


def _is_bare(value: object) -> bool:
    return value is None or isinstance(value, bool)


def command_line(config: RunConfig) -> str:
    """Return what each rank starts: the script with its argv as a shell reads it, or the Task with its arguments."""
    if isinstance(config.args, dict):
        given = ", ".join(f"{name}={value!r}" for name, value in config.args.items())
        return f"{config.task}({given})"
    local_rank = [f"{config.local_rank_option}=$LOCAL_RANK"] if config.local_rank_option else []
    return " ".join(["python", _quote(config.script or ""), *local_rank, *map(_quote, config.args)])


def _quote(word: str) -> str:
    """Return a word as a shell reads it, in one line: what cannot be printed is escaped, as `$'...'` allows."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_escape(char) for char in word) + "'"


def _escape(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\x{ord(char):02x}" if char.isascii() else f"\\U{ord(char):08x}"
