"""Shell scripts that hide the failure of a program that they start, read from their source. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cloudtrain.job.rank_starters import TRAINING_PROGRAMS

_MAX_BYTES = 200_000
_MOST_SCRIPTS = 20
_SHELLS = ("bash", "sh", "dash", "zsh")
_OPERATORS = ("||", "&&", "|&", ";;", "|", ";", "&")
_CONTINUED = ("||", "&&", "|&", "|")
"""Operators after which a command may be on the next line."""
_TOKEN = re.compile(
    r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`"""  # what is quoted
    r"""|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|\$\(|\$\{[^}]*\}"""  # what is replaced by other text
    r"""|(?<!\S)\#[^\n]*"""  # a comment
    r"""|[<>]&\S*|&>>?|>\|"""  # redirections, such as 2>&1
    r"""|\|\||&&|\|&|;;|[|;&]"""
    r"""|[^\\'"`$|;&<>#\s]+|\s+|.""",
    re.DOTALL,
)
_INCOMPLETE = ("'", '"', "`", "$(", "\\")
"""Tokens of a text whose quotes or brackets are closed on a later line, or that ends with a backslash."""
_WRAPPERS = r"(?:(?:exec|time|nohup|env|nice|srun|stdbuf\s+\S+)\s+)*"
_PROGRAM = re.compile(
    rf"(?:\w+=\S*\s+)*{_WRAPPERS}(?:\w+=\S*\s+)*\"?(?:\S*/)?"
    rf"(?P<name>python[\d.]*|{'|'.join(TRAINING_PROGRAMS)}|\$\{{?PYTHON\}}?)\"?(?=\s|$)(?P<rest>.*)",
    re.DOTALL,
)
_INQUIRY = re.compile(r"\s+(?:-V|--version|--help|-c|-m\s+(?:pip|torch\.utils\.collect_env)|env)\b")
"""A program that trains nothing: it prints a version, or installs packages."""
_SET = re.compile(r"set\s+(?P<options>[-+].*)")
_STRUCTURE = re.compile(r"(?:fi|done|esac|else|then|do|\}|\)|;;)\s*;?")
_CONDITION = re.compile(r"(?:if|elif|while|until|!)\s")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<word>\w+)\1")


@dataclass(frozen=True)
class _Statement:
    """A line of a script, joined with those that continue it.

    Attributes:
        line: Number of its first line.
        text: Its text without comments.
        commands: Its commands, each with the operator behind it.
    """

    line: int
    text: str
    commands: tuple[tuple[str, str], ...]


@dataclass
class _Options:
    """Options of a shell that decide whether a failure ends it."""

    errexit: bool = False
    pipefail: bool = False

    def read(self, words: Sequence[str]) -> None:
        """Read the arguments of `set` or of the shell."""
        following = False
        for word in words:
            is_on = word.startswith("-")
            if following:
                self.pipefail = self.pipefail or word == "pipefail"
                self.errexit = self.errexit or word == "errexit"
                following = False
            elif re.fullmatch(r"[-+][A-Za-z]+", word):
                self.errexit = is_on if "e" in word else self.errexit
                following = "o" in word and is_on
                self.pipefail = self.pipefail and (is_on or "o" not in word)


def find_hidden_failures(command: Sequence[str], directory: Path) -> tuple[str, ...]:
    """Return where the shell scripts of a job's command hide a failure, as `file:line: why; what to write`.

    Args:
        command: Program and arguments of the job.
        directory: The code folder, in which the command starts.
    """
    words = [*command]
    options = _Options()
    is_shell = bool(words) and PurePosixPath(words[0]).name in _SHELLS
    if is_shell:
        given = []
        for word in words[1:]:
            if not word.startswith("-") and word not in ("pipefail", "errexit"):
                break
            given.append(word)
        options.read(given)
        rest = words[1 + len(given) :]
        if rest and any(re.fullmatch(r"-[a-z]*c", each) for each in given):
            return tuple(_describe(rest[0], "code.command", options, words[0]))
        words = rest
    if not words or not words[0].endswith(".sh"):
        return ()
    return tuple(_describe_file(directory, words[0], options, words[0] if not is_shell else ""))


def _describe_file(
    directory: Path, name: str, options: _Options, own_shebang: str
) -> Iterator[str]:
    """Yield what hides a failure in a script and in those that it starts."""
    pending, seen = [name], set[str]()
    while pending and len(seen) < _MOST_SCRIPTS:
        each = pending.pop(0)
        if each in seen:
            continue
        seen.add(each)
        text = _read(directory / each)
        first = text.partition("\n")[0]
        if each == own_shebang and first.startswith("#!"):
            options.read(first.split()[1:])
        shell = "sh" if first.startswith("#!/bin/sh") and each == own_shebang else "bash"
        yield from _describe(text, each, options, shell)
        options = _Options()
        pending += [
            found.removeprefix("./")
            for found in re.findall(r"(?m)^\s*(?:(?:ba)?sh\s+|\./)(\S+\.sh)\b", text)
        ]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _describe(text: str, name: str, options: _Options, shell: str) -> Iterator[str]:
    statements = list(_statements(text))
    has_trap = any(re.match(r"trap\s.*\bERR\b", each.text) for each in statements)
    options = _Options(options.errexit or has_trap, options.pipefail)
    found = set()
    for index, statement in enumerate(statements):
        following = [
            each for each in statements[index + 1 :] if not _STRUCTURE.fullmatch(each.text)
        ]
        if (match := _SET.match(statement.text)) is not None:
            options.read(match["options"].replace(";", " ").split())
            continue
        kind, last = _hiding(statement, following, options)
        if kind and kind not in found:
            found.add(kind)
            place = name if name == "code.command" else f"{name}:{statement.line}"
            yield f"{place}: {_explain(kind, last, shell)}"


def _hiding(
    statement: _Statement, following: list[_Statement], options: _Options
) -> tuple[str, str]:
    """Return how a statement hides the failure of a program in it, and the command whose exit code counts."""
    is_checked = any("PIPESTATUS" in each.text for each in (statement, *following[:1]))
    for position, (command, operator) in enumerate(statement.commands):
        if not _is_program(command):
            continue
        if operator in ("|", "|&") and not options.pipefail and not is_checked:
            later = statement.commands[position + 1 :]
            last = next((text for text, after in later if after not in ("|", "|&")), "")
            return "pipe", last.split()[0] if last.split() else "its last command"
        if operator == "&" and any(each.text.strip() == "wait" for each in following):
            return "wait", ""
        if options.errexit or operator == "&":
            continue
        is_last = _ends_pipeline(statement.commands, position) and not following
        is_handled = is_checked or any(after == "||" for _, after in statement.commands[position:])
        is_handled = is_handled or any("$?" in each.text for each in (statement, *following[:1]))
        is_handled = is_handled or _CONDITION.match(statement.text) is not None
        is_handled = is_handled or command.lstrip().startswith("exec ")
        # The end of a chain decides, which is reached only where the program has not failed.
        is_chain = not following and operator == "&&"
        if not (is_last or is_handled or is_chain):
            return "continues", ""
    return "", ""


def _ends_pipeline(commands: Sequence[tuple[str, str]], position: int) -> bool:
    """Return whether no command follows the pipeline of a command."""
    while commands[position][1] in ("|", "|&") and position < len(commands) - 1:
        position += 1
    return position == len(commands) - 1


def _is_program(command: str) -> bool:
    match = _PROGRAM.match(command.strip())
    return match is not None and _INQUIRY.match(match["rest"]) is None


def _explain(kind: str, last: str, shell: str) -> str:
    if kind == "pipe":
        start = "start it with bash, and " if PurePosixPath(shell).name in ("sh", "dash") else ""
        return (
            f"a pipe has the exit code of {last}, so a training that fails there would be SUCCEEDED; "
            f"{start}write set -o pipefail above it"
        )
    if kind == "wait":
        return (
            "wait without a process id returns 0, so a program that fails in the background would be SUCCEEDED; "
            "wait for each id, such as wait $!"
        )
    return (
        "the script continues where this program fails, and ends with the exit code of its last command, so a failed "
        "training may be SUCCEEDED; write set -e at the beginning"
    )


def _statements(text: str) -> Iterator[_Statement]:
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        first, joined = index, lines[index]
        commands = _split(joined)
        while commands is None and index + 1 < len(lines):
            index += 1
            joined = f"{joined.removesuffix(chr(92))}\n{lines[index]}"
            commands = _split(joined)
        index += 1
        if (heredoc := _HEREDOC.search(joined)) is not None:
            while index < len(lines) and lines[index].strip() != heredoc["word"]:
                index += 1
            index += 1
        kept = [(each.strip(), operator) for each, operator in commands or () if each.strip()]
        if kept:
            source = " ".join(f"{each} {operator}".strip() for each, operator in kept)
            yield _Statement(first + 1, source, tuple(kept))


def _split(text: str) -> list[tuple[str, str]] | None:
    """Return the commands of a text with the operators behind them; None where the text continues on the next line."""
    found: list[tuple[str, str]] = []
    command = ""
    for token in _TOKEN.findall(text):
        if token in _INCOMPLETE:
            return None
        if token in _OPERATORS:
            found.append((command, token))
            command = ""
        elif not token.startswith("#"):
            command += token
    if not command.strip() and found and found[-1][1] in _CONTINUED:
        return None
    return [*found, (command, "")]
