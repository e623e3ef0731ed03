"""Ignore files, read as git reads them.

pathspec decides what one pattern matches. This module decides which rule applies, layer by layer, because every
exclusion names the file and line of its rule. A test compares the decisions with git on random trees. Intended
differences (docs/decisions/009): a pattern for folders (`data/`) also matches a link to a folder, matching is always
case-sensitive, and a pattern that can match nothing, which git ignores silently, is an error with file and line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.errors import BundleError
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_ODD_BRACKET = lazy_pattern(r"(?<!\\)(?:\\\\)*\[[!^]?\]?[^\]/]*?(?:[\\\[/]|([-&~|])\1|\Z)")
"""An unclosed bracket, or one with syntax that pathspec passes to `re`, where it has another meaning: `[[:digit:]]`."""


@dataclass(frozen=True)
class Rule:
    """One pattern of an ignore file.

    Attributes:
        file: Name of the ignore file, relative to the code folder.
        line: 1-based.
        text: The pattern as written.
        is_negated: Whether it begins with `!`.
        is_for_folders: Whether it ends with `/`.
        is_anchored: Whether it is matched against the path below its file, not only against the last part of the name.
        pattern: The pattern without `!` and the slashes around it.
        expression: `pattern` as a regular expression.
    """

    file: str
    line: int
    text: str
    is_negated: bool
    is_for_folders: bool
    is_anchored: bool
    pattern: str
    expression: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"

    @property
    def is_specific(self) -> bool:
        """Whether the last part of the pattern is more than wildcards: true for `!*.pt`, false for `!*/`."""
        return self.pattern.rpartition("/")[2].strip("*?") != ""


class IgnoreFile:
    """The rules of one ignore file.

    Args:
        rules: In the order of the file.
        folder: Folder of the file relative to the code folder: empty, or with `/` at the end.
        above: Path from the file's folder down to the code folder, for a file above it; with `/` at the end.
    """

    def __init__(self, rules: Iterable[Rule], *, folder: str = "", above: str = "") -> None:
        self.folder = folder
        self._rules = tuple(rules)
        self._cut = len(folder)
        self._above = above
        # One expression for all rules handles the common case, a name that no rule matches.
        self._by_base = _any_of(rule.expression for rule in self._rules if not rule.is_anchored)
        self._by_path = _any_of(rule.expression for rule in self._rules if rule.is_anchored)
        self._compiled = [lazy_pattern(rule.expression, re.DOTALL) for rule in self._rules]
        self._opened = _any_of(prefix for rule in self._rules for prefix in _folders_above(rule))

    def find(self, name: str, *, is_folder: bool) -> Rule | None:
        """Return the last rule that matches a path relative to the code folder, which decides about it, or None."""
        base = name[name.rfind("/") + 1 :]
        path = self._above + name[self._cut :]
        if not self._by_base.fullmatch(base) and not self._by_path.fullmatch(path):
            return None
        for rule, compiled in zip(reversed(self._rules), reversed(self._compiled), strict=True):
            if rule.is_for_folders and not is_folder:
                continue
            if compiled.fullmatch(path if rule.is_anchored else base):
                return rule
        return None

    def opens(self, folder: str) -> bool:
        """Whether a negation names a path below a folder, such as `!data/labels.csv` for `data`."""
        return self._opened.fullmatch(self._above + folder[self._cut :]) is not None


def read_ignore_file(
    path: Path, display_name: str, *, folder: str = "", above: str = ""
) -> IgnoreFile:
    """Read an ignore file. See `IgnoreFile` for `folder` and `above`.

    Raises:
        BundleError: The file cannot be read, is not UTF-8, or holds an invalid pattern.
    """
    try:
        # As bytes: a carriage return within a line is a character.
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BundleError(
            f"{display_name}:{line}: not valid UTF-8", "save the file as UTF-8"
        ) from error
    except OSError as error:
        raise BundleError(
            f"{display_name} cannot be read: {error.strerror}", "make it readable, or remove it"
        ) from error
    return IgnoreFile(parse(text, display_name), folder=folder, above=above)


def parse(text: str, display_name: str) -> Iterator[Rule]:
    """Yield the rules of an ignore file's text.

    Raises:
        BundleError: A pattern can match nothing, or cannot be read as git reads it.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        written = _strip(line.removesuffix("\r"))
        if not written or written.startswith("#"):
            continue
        is_negated = written.startswith("!")
        pattern = written[is_negated:]
        is_for_folders = pattern.endswith("/")
        pattern = pattern.removesuffix("/")
        is_anchored = "/" in pattern
        if not pattern:
            # git ignores a lone slash.
            continue
        try:
            pattern = pattern.removeprefix("/")
            expression = _expression(pattern)
        except (ValueError, re.error) as error:
            raise BundleError(
                f"{display_name}:{number}: {written} is not a valid pattern: {error.__cause__ or error}",
                "fix the line or remove it",
            ) from error
        yield Rule(
            file=display_name,
            line=number,
            text=written,
            is_negated=is_negated,
            is_for_folders=is_for_folders,
            is_anchored=is_anchored,
            pattern=pattern,
            expression=expression,
        )


def escape(name: str) -> str:
    """Return the pattern that matches exactly one path below the ignore file's folder."""
    special = re.sub(r"([*?\[\\])", r"\\\1", name)
    return "/" + re.sub(r"( +)$", lambda found: "\\ " * len(found[1]), special)


def _strip(line: str) -> str:
    """Remove trailing spaces that no backslash escapes."""
    kept = line.rstrip(" ")
    backslashes = len(kept) - len(kept.rstrip("\\"))
    if backslashes % 2 and len(kept) < len(line):
        # The last backslash escapes the first space.
        return f"{kept} "
    return kept


def _folders_above(rule: Rule) -> Iterator[str]:
    """Yield expressions of the folders that must be entered to reach the path that a negation names."""
    if not (rule.is_negated and rule.is_anchored and rule.is_specific):
        return
    parts = rule.pattern.split("/")
    for count in range(1, len(parts)):
        if parts[count - 1] == "**":
            # `**` would match every ignored folder, which is not what users mean.
            return
        yield _expression("/".join(parts[:count]))


def _any_of(expressions: Iterable[str]) -> re.Pattern[str]:
    return lazy_pattern(
        "|".join(f"(?:{expression})" for expression in expressions) or r"(?!)", re.DOTALL
    )


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression for the complete path.

    Raises:
        ValueError: The pattern can match nothing, or pathspec would read it differently than git.
        re.error: A range ends before it begins.
    """
    if _ODD_BRACKET.search(pattern):
        raise ValueError(
            "a bracket must be closed and hold only characters and ranges, such as [0-9] for [[:digit:]]"
        )
    # pathspec matches trailing stars at any depth, and removes trailing white space.
    pattern = re.sub(r"(^|/)\*\*(/\*)?$", r"\1**/?*", pattern)
    pattern = re.sub(r"(?<!\\)(\s)$", r"[\1]", pattern)
    regex = _to_regex(f"/{pattern}")
    if regex is None:
        raise ValueError("it matches nothing")
    if "[" in pattern:
        # Only a range can be invalid, and this names its line.
        re.compile(regex)
    # git matches one level at a time: a match ends at the name itself, and a bracket never matches a slash.
    return re.sub(r"(?<!\\)\[(?!\^/\])", "(?!/)[", regex.replace("(?P<ps_d>/)", "(?!)"))


def _to_regex(pattern: str) -> str | None:
    """Return pathspec's regular expression of a pattern, without compiling it; None if the pattern matches nothing."""
    found: str | None = _pattern_class().pattern_to_regex(pattern)[0]
    return found


@functools.cache
def _pattern_class() -> Any:
    from pathspec import GitIgnoreSpec

    return type(GitIgnoreSpec.from_lines(["name"]).patterns[0])
