"""Messages in the words of the Python API.

Messages name what to type on the command line. `CloudtrainError.__str__`, which Python prints, replaces that by the
arguments and functions of the Python API, where both exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_COMMANDS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(r"cloudtrain --trust COMMAND, or in Python find_settings\(job, trust=True\)"),
        "cloudtrain.find_settings(job, trust=True)",
    ),
    (
        re.compile(
            r"cloudtrain submit (?P<local>--local )?JOB(?P<also> --local)?"
            r"(?: --set (?P<path>[\w.]+)=(?P<value>[\w:/.-]*\w))?"
        ),
        lambda match: f"cloudtrain.submit({_job(match)}{', local=True' if match['local'] or match['also'] else ''})",
    ),
    (re.compile(r"cloudtrain check JOB"), "cloudtrain.check(job)"),
    (re.compile(r"cloudtrain list\b"), "cloudtrain.list_runs()"),
    (
        re.compile(r"cloudtrain (?P<verb>status|logs|explain|stop|resume) (?P<run>[\w:-]+)"),
        lambda match: f"cloudtrain.{match['verb']}({_run(match['run'])})",
    ),
    (
        re.compile(r"cloudtrain checkpoints (?!verify\b|export\b|list\b)(?P<run>[\w:-]+)(?=[\s;,.]|$)"),
        lambda match: f"cloudtrain.checkpoint_folder({_run(match['run'])}).list()",
    ),
    (
        re.compile(r"--set (?P<path>\w+\.[\w.]+)=(?P<value>[\w:/.-]*[\w/])"),
        lambda match: _job(match).removeprefix("job."),
    ),
)
"""Commands and changes of fields, which no text of a job looks like."""

_PLACES = (
    (re.compile(r"^--set ", re.MULTILINE), "override "),
    (re.compile(r"^--instances ", re.MULTILINE), "instances="),
)
"""Options at the start of a line of a message, which are the place of a mistake."""

_OPTIONS = (
    (re.compile(r"(?<![\w-])--instances (?=\d)"), "instances="),
    (re.compile(r"(?<![\w-])--from(?![\w-])"), "from_step="),
    (re.compile(r"(?<![\w-])--wait-for-capacity(?![\w-])"), "wait_for_capacity=SECONDS"),
    (re.compile(r"(?<![\w-])--skip-check(?![\w-])"), "skip_check=True"),
    (re.compile(r"(?<![\w-])--(local|sandbox|new|trust)(?![\w-])"), r"\1=True"),
)


def in_python(text: str) -> str:
    """Return a message with functions of the Python API instead of commands."""
    for pattern, place in _PLACES:
        text = pattern.sub(place, text)
    return _replace_commands(text)


def hint_in_python(text: str) -> str:
    """Return a hint with functions and arguments of the Python API instead of commands and options."""
    text = _replace_commands(text)
    for pattern, words in _OPTIONS:
        text = pattern.sub(words, text)
    return text


def _replace_commands(text: str) -> str:
    for pattern, words in _COMMANDS:
        text = pattern.sub(words, text)
    return text


def _run(name: str) -> str:
    return "run" if name == "RUN" else f'"{name}"'


def _job(match: re.Match[str]) -> str:
    """Return the job with the value that `--set` gives it."""
    if match["path"] is None:
        return "job"
    value = _CONSTANTS.get(match["value"], match["value"])
    if value == match["value"] and not value.isdecimal():
        value = "run.id" if value == "RUN" else f'"{value}"'
    return f'job.with_values({{"{match["path"]}": {value}}})'


_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
