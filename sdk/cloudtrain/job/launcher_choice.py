"""Whether a job's command is a rank of cloudtrain's group, or starts the ranks of its instance without its variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from cloudtrain.job.rank_starters import starter_of_module, starter_of_program
from cloudtrain.job.sections.code import Code
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.placeholders import names_in

OWN = "own"
TORCHRUN = "torchrun"
"""Values of `code.launcher`."""

_RANK_PLACEHOLDERS = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
_PREFIXES = (("env",), ("nohup",), ("uv", "run"), ("poetry", "run"), ("pipenv", "run"))
"""Words before a program, which start it as it is."""
_ASSIGNMENT = lazy_pattern(r"[A-Za-z_]\w*=")
_PYTHON = lazy_pattern(r"python[\d.]*")


@dataclass(frozen=True)
class LauncherChoice:
    """How a command is started.

    Attributes:
        name: `own` or `torchrun`.
        why: The reason, as a part of a sentence.
    """

    name: str
    why: str


def choose_launcher(code: Code, processes: int | None) -> LauncherChoice | None:
    """Return how a job's command is started; None for a job without a command.

    Args:
        code: The job's code section.
        processes: Ranks per instance that cloudtrain starts.
    """
    if not code.command:
        return None
    if code.launcher is not None:
        return LauncherChoice(code.launcher, "as code.launcher says")
    starter = find_rank_starter(code.command)
    if starter is None:
        program = PurePosixPath(code.command[0]).name
        why = (
            f"{program} is not known to start ranks of its own; if it does, set code.launcher: own"
        )
        return LauncherChoice(TORCHRUN, why)
    values = code.args.values() if isinstance(code.args, dict) else code.args
    words = [*code.command, *map(str, values)]
    used = sorted(
        _RANK_PLACEHOLDERS.intersection(name for word in words for name in names_in(word))
    )
    if used:
        return LauncherChoice(TORCHRUN, f"its words use ${used[0]}")
    if processes != 1:
        return LauncherChoice(TORCHRUN, "cluster.processes_per_instance starts it as several ranks")
    return LauncherChoice(OWN, f"{starter} starts its own ranks")


def find_rank_starter(command: Sequence[str]) -> str | None:
    """Return the program of a command that is known to start ranks itself, or None."""
    words = list(_without_prefixes(command))
    if not words:
        return None
    program = PurePosixPath(words[0]).name
    if _PYTHON.fullmatch(program):
        return _find_module(words[1:])
    return starter_of_program([program, *words[1:]])


def _without_prefixes(command: Sequence[str]) -> Iterator[str]:
    """Yield a command's words from its program on. Options of what comes before it are not understood."""
    words = list(command)
    while words:
        prefix = next((each for each in _PREFIXES if tuple(words[: len(each)]) == each), None)
        if prefix is None:
            break
        words = words[len(prefix) :]
        while words and prefix == ("env",) and _ASSIGNMENT.match(words[0]):
            words.pop(0)
    yield from words


def _find_module(words: Sequence[str]) -> str | None:
    """Return the module of `python -m MODULE` that is known to start ranks, or None."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "-m":
            return starter_of_module(following)
        if not word.startswith("-"):
            return None
    return None
