"""Ignore files, read as git reads them.

pathspec says what one pattern matches. Which rule decides, layer by layer, is decided here, because every answer names
file and line of the rule. A test compares the answers with git on random trees; docs/decisions/009 lists what differs.
Meant differences: a pattern for folders (`data/`) also means a link to a folder, case always counts, and a pattern that
git drops in silence because it can match nothing is an error with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.errors import BundleError

_ODD_BRACKET = re.compile(r"(?<!\\)(?:\\\\)*\[[!^]?\]?[^\]/]*?(?:[\\\[/]|([-&~|])\1|\Z)")
"""A bracket that is not closed, or holds what pathspec hands to `re`, where it means something else: `[[:digit:]]`."""


@dataclass(frozen=True)
class Rule:
    """One pattern of an ignore file.

    Attributes:
        file: Name of the ignore file, relative to the code folder.
        line: 1-based.
        text: The pattern as written.
        negated: Whether it begins with `!`.
        folders_only: Whether it ends with `/`.
        anchored: Whether it is matched against the path below its file, not against the last part of the name alone.
        pattern: The pattern without `!` and the slashes around it.
        expression: `pattern` as a regular expression.
    """

    file: str
    line: int
    text: str
    negated: bool
    folders_only: bool
    anchored: bool
    pattern: str
    expression: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"

    @property
    def names_something(self) -> bool:
        """Whether the last part of the pattern says more than "all": `!*.pt` does, `!*/` does not."""
        return self.pattern.rpartition("/")[2].strip("*?") != ""


class IgnoreFile:
    """The rules of one ignore file.

    Args:
        rules: In the order of the file.
        folder: Folder of the file relative to the code folder: empty, or with `/` at the end.
        above: Path from the file's folder down to the code folder, where the file lies above it; with `/` at the end.
    """

    def __init__(self, rules: Iterable[Rule], *, folder: str = "", above: str = "") -> None:
        self.folder = folder
        self._rules = tuple(rules)
        self._cut = len(folder)
        self._above = above
        # One expression for all rules answers the common case, a name that no rule knows.
        self._by_base = _any_of(rule.expression for rule in self._rules if not rule.anchored)
        self._by_path = _any_of(rule.expression for rule in self._rules if rule.anchored)
        self._compiled = [re.compile(rule.expression, re.DOTALL) for rule in self._rules]
        self._opened = _any_of(prefix for rule in self._rules for prefix in _folders_above(rule))

    def find(self, name: str, *, is_folder: bool) -> Rule | None:
        """Return the rule that decides about a name, the last that matches; None when none does.

        Args:
            name: Path relative to the code folder, without a slash at the end.
            is_folder: Whether it is a folder.
        """
        base, path = name[name.rfind("/") + 1 :], self._above + name[self._cut :]
        if not self._by_base.fullmatch(base) and not self._by_path.fullmatch(path):
            return None
        for rule, compiled in zip(reversed(self._rules), reversed(self._compiled), strict=True):
            if (is_folder or not rule.folders_only) and compiled.fullmatch(path if rule.anchored else base):
                return rule
        return None

    def opens(self, folder: str) -> bool:
        """Tell whether a negation names something below a folder, such as `!data/labels.csv` for `data`."""
        return self._opened.fullmatch(self._above + folder[self._cut :]) is not None


def read_ignore_file(path: Path, shown: str, *, folder: str = "", above: str = "") -> IgnoreFile:
    """Read an ignore file.

    Args:
        path: The file.
        shown: Its name in messages.
        folder: See `IgnoreFile`.
        above: See `IgnoreFile`.

    Raises:
        BundleError: it cannot be read, is not UTF-8, or `parse` refuses a pattern.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a carriage return within a line is a character
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BundleError(f"{shown}:{line}: not valid UTF-8", "save the file as UTF-8") from error
    except OSError as error:
        raise BundleError(f"{shown} cannot be read: {error.strerror}", "make it readable, or remove it") from error
    return IgnoreFile(parse(text, shown), folder=folder, above=above)


def parse(text: str, shown: str) -> Iterator[Rule]:
    """Yield the rules of an ignore file's text.

    Raises:
        BundleError: a pattern can match nothing, or cannot be read as git reads it.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        written = _strip(line.removesuffix("\r"))
        if not written or written.startswith("#"):
            continue
        negated = written.startswith("!")
        pattern = written[negated:]
        folders_only = pattern.endswith("/")
        pattern = pattern.removesuffix("/")
        anchored = "/" in pattern
        if not pattern:
            continue  # a lone slash, which git takes for nothing at all
        try:
            pattern = pattern.removeprefix("/")
            expression = _expression(pattern)
        except (ValueError, re.error) as error:
            raise BundleError(
                f"{shown}:{number}: {written} is no valid pattern: {error.__cause__ or error}",
                "mend the line or remove it",
            ) from error
        yield Rule(shown, number, written, negated, folders_only, anchored, pattern, expression)


def escape(name: str) -> str:
    """Return the pattern that means exactly one path below the ignore file's folder."""
    special = re.sub(r"([*?\[\\])", r"\\\1", name)
    return "/" + re.sub(r"( +)$", lambda found: "\\ " * len(found[1]), special)


def _strip(line: str) -> str:
    """Remove the spaces at the end of a line that no backslash protects."""
    kept = line.rstrip(" ")
    backslashes = len(kept) - len(kept.rstrip("\\"))
    return f"{kept} " if backslashes % 2 and len(kept) < len(line) else kept


def _folders_above(rule: Rule) -> Iterator[str]:
    """Yield expressions of the folders that must be entered for a negation to find what it names."""
    if not (rule.negated and rule.anchored and rule.names_something):
        return
    parts = rule.pattern.split("/")
    for count in range(1, len(parts)):
        if parts[count - 1] == "**":
            return  # below any folder: nobody means every ignored one
        yield _expression("/".join(parts[:count]))


def _any_of(expressions: Iterable[str]) -> re.Pattern[str]:
    """Return one expression for many; of none, one that matches nothing."""
    return re.compile("|".join(f"(?:{expression})" for expression in expressions) or r"(?!)", re.DOTALL)


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression for the whole path.

    Raises:
        ValueError: it can match nothing, or pathspec would read it otherwise than git.
        re.error: a range ends before it begins.
    """
    from pathspec import GitIgnoreSpec

    if _ODD_BRACKET.search(pattern):
        raise ValueError("a bracket is closed and holds characters and ranges only, such as [0-9] for [[:digit:]]")
    # The library takes stars at the end as all that lies below, however deep, and drops white space there.
    pattern = re.sub(r"(^|/)\*\*(/\*)?$", r"\1**/?*", pattern)
    pattern = re.sub(r"(?<!\\)(\s)$", r"[\1]", pattern)
    regex = GitIgnoreSpec.from_lines([f"/{pattern}"]).patterns[0].regex
    if regex is None:
        raise ValueError("it names nothing")
    # git asks about one level at a time: no match ends above the name, and no bracket matches a slash.
    return re.sub(r"(?<!\\)\[(?!\^/\])", "(?!/)[", regex.pattern.replace("(?P<ps_d>/)", "(?!)"))
