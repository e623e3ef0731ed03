"""Shell scripts that hide the failure of a program that they start, read from their source. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cloudtrain.job.rank_starters import TRAINING_PROGRAMS

_MAX_BYTES = 200_000
_MOST_SCRIPTS = 20
_SHELLS = ("bash", "sh", "dash", "zsh")
_NO_SYNTAX = re.compile(
    r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`"""  # what is quoted
    r"""|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|\$\{[^}]*\}"""  # what is replaced by other text
    r"""|(?<!\S)\#[^\n]*"""  # a comment
    r"""|<<-?\s*(['"]?)(?P<end>\w+)\1.*?\n\s*(?P=end)(?=\n|$)"""  # a document
    r"""|[<>]&\S*|&>>?|>\|""",  # redirections, such as 2>&1
    re.DOTALL,
)
"""Parts of a script in which newlines and operators have no meaning of their own."""
_CONTINUED = re.compile(r"(?:\|\||&&|\|&|\|)[ \t]*\n")
_OPERATOR = re.compile(r"(\|\||&&|\|&|;;|[|;&])")
_PIPES = ("|", "|&")
_WRAPPERS = r"(?:(?:exec|time|nohup|env|nice|srun|stdbuf\s+\S+)\s+)*"
_PROGRAM = re.compile(
    rf"(?:\w+=\S*\s+)*{_WRAPPERS}(?:\w+=\S*\s+)*\"?(?:\S*/)?"
    rf"(?P<name>python[\d.]*|{'|'.join(TRAINING_PROGRAMS)}|\$\{{?PYTHON\}}?)\"?(?=\s|$)(?P<rest>.*)",
)
_INQUIRY = re.compile(r"\s+(?:-V|--version|--help|-c|-m\s+(?:pip|torch\.utils\.collect_env)|env)\b")
"""A program that trains nothing: it prints a version, or installs packages."""
_ERREXIT = re.compile(r"(?<!\S)([-+])(?:[a-zA-Z]*e[a-zA-Z]*|o\s+errexit)(?!\S)")
_PIPEFAIL = re.compile(r"(?<!\S)([-+])[a-zA-Z]*o\s+pipefail\b")
_TRAP = re.compile(r"(?m)^\s*trap\s.*\bERR\b")
_STRUCTURE = re.compile(r"(?:fi|done|esac|else|then|do|\}|\)|;;)\s*;?")
_HANDLING = re.compile(r"(?:if|elif|while|until|!|exec)\s")
_INNER_SCRIPT = re.compile(r"(?m)^\s*(?:(?:ba)?sh\s+|\./)(\S+\.sh)\b")

_CONTINUES = (
    "the script continues where this program fails, and ends with the exit code of its last command, so a failed "
    "training may be SUCCEEDED; write set -e at the beginning"
)
_WAIT = (
    "wait without a process id returns 0, so a program that fails in the background would be SUCCEEDED; "
    "wait for each id, such as wait $!"
)


class _Statement(NamedTuple):
    """A line of a script, joined with those that continue it: its number, and its commands with what is behind each."""

    line: int
    text: str
    commands: list[tuple[str, str]]


class _Options(NamedTuple):
    """Options of a shell that decide whether a failure ends it."""

    errexit: bool = False
    pipefail: bool = False

    def after(self, words: str) -> _Options:
        """Return the options after `set` with these words, or of a shell that starts with them."""
        errexit = _ERREXIT.findall(words.replace(";", " "))
        pipefail = _PIPEFAIL.findall(words)
        return _Options(
            errexit[-1] == "-" if errexit else self.errexit,
            pipefail[-1] == "-" if pipefail else self.pipefail,
        )


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
        del words[0]
        given = []
        while words and (words[0].startswith("-") or words[0] in ("pipefail", "errexit")):
            given.append(words.pop(0))
        options = options.after(" ".join(given))
        if words and any(re.fullmatch(r"-[a-z]*c", each) for each in given):
            return tuple(f"code.command: {why}" for _, why in _find(words[0], options))
    if not words or not words[0].endswith(".sh"):
        return ()
    if not is_shell:
        # Only a script that is started itself has the options of its first line.
        first = _read(directory / words[0]).partition("\n")[0]
        options = options.after(first) if first.startswith("#!") else options
    return tuple(_find_in_files(directory, words[0], options))


def _find_in_files(directory: Path, name: str, options: _Options) -> Iterator[str]:
    """Yield what hides a failure in a script and in those that it starts."""
    pending, seen = [name], set[str]()
    while pending and len(seen) < _MOST_SCRIPTS:
        each = pending.pop(0)
        if each in seen:
            continue
        seen.add(each)
        text = _read(directory / each)
        yield from (f"{each}:{line}: {why}" for line, why in _find(text, options))
        options = _Options()
        pending += [found.removeprefix("./") for found in _INNER_SCRIPT.findall(text)]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _find(text: str, options: _Options) -> Iterator[tuple[int, str]]:
    """Yield the lines of a script that hide a failure, each with the reason, which is given once."""
    if _TRAP.search(text):
        options = options._replace(errexit=True)
    seen = set()
    statements = _statements(text)
    for index, statement in enumerate(statements):
        if statement.text.startswith("set "):
            options = options.after(statement.text)
            continue
        following = [
            each for each in statements[index + 1 :] if not _STRUCTURE.fullmatch(each.text)
        ]
        why = _why_hidden(statement, following, options)
        if why and why not in seen:
            seen.add(why)
            yield statement.line, why


def _why_hidden(statement: _Statement, following: list[_Statement], options: _Options) -> str:
    """Return how a statement hides the failure of a program in it; empty if it does not."""
    near = " ".join(each.text for each in (statement, *following[:1]))
    is_handled = "$?" in near or "PIPESTATUS" in near or "||" in statement.text
    is_handled = is_handled or _HANDLING.match(statement.text) is not None
    for position, (command, operator) in enumerate(statement.commands):
        if not _is_program(command):
            continue
        later = statement.commands[position + 1 :]
        if operator in _PIPES and not options.pipefail and "PIPESTATUS" not in near:
            ends = (text.split()[0] for text, after in later if after not in _PIPES)
            return (
                f"a pipe has the exit code of {next(ends, 'its last command')}, so a training that fails there would be SUCCEEDED; "
                "write set -o pipefail above it"
            )
        if operator == "&" and any(each.text == "wait" for each in following):
            return _WAIT
        if options.errexit or operator == "&" or is_handled:
            continue
        # The end of a chain decides, which is reached only where the program has not failed.
        operators = (after for _, after in statement.commands[position:-1])
        if following or not all(each in (*_PIPES, "&&") for each in operators):
            return _CONTINUES
    return ""


def _is_program(command: str) -> bool:
    match = _PROGRAM.match(command)
    return match is not None and _INQUIRY.match(match["rest"]) is None


def _statements(text: str) -> list[_Statement]:
    plain = _NO_SYNTAX.sub(_hide_syntax, text)
    plain = _CONTINUED.sub(lambda found: found[0].replace("\n", " "), plain)
    statements = []
    # Places are the same in both texts, but quoted newlines are no ends of lines.
    for found in re.finditer(r"[^\n]*\S[^\n]*", plain):
        parts = [each.strip() for each in (*_OPERATOR.split(found[0]), "")]
        commands = [pair for pair in zip(parts[::2], parts[1::2], strict=True) if pair[0]]
        line = text.count("\n", 0, found.start()) + 1
        statements.append(_Statement(line, found[0].strip(), commands))
    return statements


def _hide_syntax(found: re.Match[str]) -> str:
    """Return a text of the same length without newlines and operators."""
    text = found[0]
    if text.startswith(("#", "<<")) or text == "\\\n":
        return " " * len(text)
    return re.sub(r"[\n;|&]", "_", text)
