"""YAML reader that keeps the line and column of every value.

PyYAML's composer parses the text and constructs no objects, so that a job file cannot execute code. Scalars follow
YAML 1.2: `no`, `on` and `12:30` are text, and `1e-4` is a number.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cloudtrain.errors import Problem, SpecError, UserError, did_you_mean
from cloudtrain.support.atomic_write import read_bounded
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.units import number_with_commas
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_MAX_BYTES = 1_000_000
_SURROGATE = lazy_pattern("[\ud800-\udfff]")
_MAX_DEPTH = 32
_MOST_NAMES = 5
_MAX_NODES = 100_000
_MERGE = "<<"
_MAX_NUMBER_CHARACTERS = 100
"""Longest text that is parsed as a number."""
_NULL = lazy_pattern(r"~|null|Null|NULL|")
SWITCH_WORDS = ("yes", "no", "on", "off")
"""Words that are booleans in YAML 1.1 and text in YAML 1.2."""
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = lazy_pattern(r"[-+]?[0-9]+(?:_[0-9]+)*")
_FLOAT = lazy_pattern(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = lazy_pattern(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_STANDARD_TAGS = tuple(
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "timestamp", "value", "merge")
)


@dataclass(frozen=True)
class SourceLocation:
    """Where a value comes from: line and column of a file, or the text of a command-line option without a line."""

    file: str
    line: int | None = None
    column: int | None = None


@dataclass
class Document:
    """A tree of plain values, each with its location.

    Attributes:
        file: Name of the file in messages.
        data: dict, list and scalar values.
        values: Location of each value by path.
        keys: Location of each mapping key by path.
        problems: Parts that job files do not allow, such as a field given twice; `data` has the rest.
        tildes: Paths of the values that are null because of a `~`.
    """

    file: str
    data: Any
    values: dict[FieldPath, SourceLocation] = field(default_factory=dict)
    keys: dict[FieldPath, SourceLocation] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    tildes: set[FieldPath] = field(default_factory=set)

    def location_of(self, path: FieldPath, *, is_key: bool = False) -> SourceLocation:
        """Return the location of a value (or of its key), or of the nearest parent that has one."""
        if is_key and path in self.keys:
            return self.keys[path]
        for length in range(len(path), -1, -1):
            location = self.values.get(path[:length])
            if location is not None:
                return location
        return SourceLocation(self.file, 1, 1)

    def override(self, path: FieldPath, value: Any, origin: str) -> None:
        """Set one value, as the option `--set` does, whose text is the origin. Missing parents are created.

        Raises:
            UserError: a parent of the value is not a mapping.
        """
        target = self.data
        for depth, part in enumerate(path[:-1], start=1):
            # `spot: true` is short for a mapping.
            if target.get(part) is None or isinstance(target[part], bool):
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                kind = "a list" if isinstance(target, list) else "a value"
                raise UserError(
                    f"{origin}: {dotted(path[:depth])} is {kind} in {self.file}", "set all of it"
                )
        target[path[-1]] = value
        for locations in (self.values, self.keys):
            for old in [known for known in locations if known[: len(path)] == path]:
                del locations[old]
            locations[path] = SourceLocation(origin)


def read_document(path: Path, *, kind: str = "job") -> Document:
    """Read a YAML file, which messages name by the path as given.

    Args:
        path: The file.
        kind: What it describes: `job` or `sweep`.

    Raises:
        UserError: the file cannot be read.
        SpecError: the file is not valid YAML, uses a feature of YAML that job files do not allow, or is of another
            kind.
    """
    label = str(path)
    try:
        raw = read_bounded(path, _MAX_BYTES)
    except FileNotFoundError:
        hint = f"give the path of a {kind} file, or work in the folder that has the {kind}.yaml"
        hint = did_you_mean(path.name, _yaml_files(path.parent), hint)
        raise UserError(f"{label}: no such file", hint) from None
    except IsADirectoryError:
        hint = f"give the path of a {kind} file"
        if names := _yaml_files(path):
            hint = f"give the {kind} file in it; it has {', '.join(names[:_MOST_NAMES])}"
        raise UserError(f"{label} is a folder", hint) from None
    except (OSError, ValueError) as error:
        # ValueError: a NUL in the name.
        why = getattr(error, "strerror", error)
        raise UserError(
            f"{label}: cannot be read: {why}", f"give the path of a {kind}.yaml"
        ) from None
    if len(raw) > _MAX_BYTES:
        message = f"file of {path.stat().st_size} bytes; a {kind} file has at most {_MAX_BYTES}"
        raise SpecError([Problem(label, 1, 1, "", message, f"give the {kind} file itself")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SpecError(
            [Problem(label, line, 1, "", "not UTF-8 text", "save the file as UTF-8")]
        ) from None
    if kind != "job" or path.suffix not in _PROGRAMS:
        document = parse_document(text, label)
        _refuse_other_kind(document, kind)
        return document
    try:
        document = parse_document(text, label)
        is_job = not _FIELDS_OF_JOBS.isdisjoint(document.data)
    except SpecError:
        is_job = False
    if is_job:
        return document
    use = _PROGRAMS[path.suffix].format(name=path.name)
    hint = f"name it in a job.yaml: {use}; cloudtrain init DIR writes an example"
    raise SpecError([Problem(label, 1, 1, "", "a program, not a job file", hint)])


_PROGRAMS = {
    ".ipynb": "code: {{script: ...}}, after an export of its cells to a .py file",
    ".py": "code: {{script: {name}}}",
    ".sbatch": "code: {{command: [bash, {name}]}}, or what it starts as a script",
    ".sh": "code: {{command: [bash, {name}]}}, or what it starts as a script",
    ".slurm": "code: {{command: [bash, {name}]}}, or what it starts as a script",
}
"""Suffixes of files that are given in place of a job file, and the field that names such a file."""
_FIELDS_OF_JOBS = frozenset(("name", "code", "cluster"))

_KINDS = {
    "job": (frozenset(("code", "cluster")), "plan"),
    "sweep": (frozenset(("space", "objective")), "sweep plan"),
}
"""Fields that only one kind of file has, and the command that reads it."""


def _refuse_other_kind(document: Document, kind: str) -> None:
    """Refuse a file that has fields of another kind only, whose every field would be an error.

    Raises:
        SpecError: it is a file of another kind.
    """
    if not _KINDS[kind][0].isdisjoint(document.data):
        return
    for other, (fields, command) in _KINDS.items():
        if not fields.isdisjoint(document.data):
            message = f"a {other} file, not a {kind} file"
            hint = f"its command: cloudtrain {command} {shlex.quote(document.file)}"
            raise SpecError([Problem(document.file, 1, 1, "", message, hint)])


def _yaml_files(folder: Path) -> list[str]:
    """Return the names of the YAML files in a folder; none of a folder that cannot be read."""
    try:
        return sorted(each.name for each in folder.iterdir() if each.suffix in (".yaml", ".yml"))
    except (OSError, ValueError):
        return []


def parse_document(text: str, label: str) -> Document:
    """Parse YAML text, which `label` names in messages.

    Raises:
        SpecError: the text is not valid YAML, or uses a feature of YAML that job files do not allow.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        from cloudtrain.job.yaml_mistakes import explain

        found = explain(text, error)
        problem = Problem(label, found.line, found.column, "", found.message, found.hint)
        raise SpecError([problem]) from None
    except yaml.YAMLError as error:
        message = f"not valid YAML: {str(error).splitlines()[0]}"
        raise SpecError(
            [Problem(label, 1, 1, "", message, "save the file as plain text")]
        ) from None
    except RecursionError:
        raise SpecError(
            [Problem(label, 1, 1, "", "nested too deeply", "a job file has four levels")]
        ) from None
    document = Document(label, {})
    if node is None:
        document.values[()] = SourceLocation(label, 1, 1)
        return document
    reader = _Reader(document, text.splitlines())
    document.data = reader.read(node, ())
    if reader.is_too_large:
        raise SpecError(document.problems)
    if not isinstance(document.data, dict):
        from cloudtrain.job.yaml_mistakes import field_of_line

        message = "expected a mapping of fields such as name: and code:"
        hint = f"write {field_of_line(text.splitlines()) or 'key: value'}"
        if isinstance(document.data, list) and any(
            isinstance(each, dict) for each in document.data
        ):
            hint = "remove the - that begins a line in column 1"
        raise SpecError([*document.problems, Problem(label, 1, 1, "", message, hint)])
    return document


def parse_scalar(text: str, origin: str = "--set") -> Any:
    """Return the value of a plain scalar or flow collection, such as the value of the option `--set path=value`.

    Raises:
        UserError: the text is an invalid list or mapping, or a value that job files do not allow.
    """
    if _SURROGATE.search(text):
        raise UserError(f"{origin}: not UTF-8 text", "give the value in UTF-8")
    try:
        document = parse_document(f"value: {text}", "--set")
    except SpecError:
        if text.lstrip().startswith(("[", "{")):
            raise UserError(f"{origin}: not valid YAML", "close every bracket and quote") from None
        return text
    if document.problems:
        problem = document.problems[0]
        raise UserError(f"{origin}: {problem.message}", problem.hint)
    return document.data["value"]


class _Reader:
    def __init__(self, document: Document, lines: Sequence[str]) -> None:
        self.document = document
        self.lines = lines
        self.count = 0
        self.is_too_large = False

    def read(self, node: yaml.Node, path: FieldPath) -> Any:
        """Return the value of a node; `path` is its place in the document."""
        self.count += 1
        self.document.values[path] = self._location(node)
        if self.count > _MAX_NODES or len(path) > _MAX_DEPTH:
            if not self.is_too_large:
                self.is_too_large = True
                self._report(
                    node,
                    path,
                    "too many or too deeply nested values",
                    "write the values out without aliases",
                )
            return None
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._read_scalar(node, path)

    def _read_mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        inherited: dict[str, Any] = {}
        skipped = 0
        for index, (key_node, value_node) in enumerate(node.value):
            if skipped:
                skipped -= 1
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._report_key(key_node, path, in_braces=node.flow_style)
                continue
            key = key_node.value
            pieces = list(_pieces_of_number(node, index))
            if pieces:
                skipped = len(pieces)
                meant = self._report_comma(key_node, value_node, pieces, (*path, key))
                if key not in mapping and not _is_absent(value_node):
                    # The value that is meant causes no second error about the same mistake.
                    self.document.keys[(*path, key)] = self._location(key_node)
                    value = self.read(value_node, (*path, key))
                    mapping[key] = _resolve(meant) if meant else value
                continue
            if self._is_without_space(node, key_node, value_node, path, mapping):
                continue
            if _SURROGATE.search(key):
                self._report(key_node, path, "a field name must not contain a lone surrogate")
                continue
            if key == _MERGE and key_node.style is None:
                self._merge(value_node, path, inherited)
                continue
            if key in mapping:
                first = self.document.keys[(*path, key)]
                self._report(
                    key_node,
                    (*path, key),
                    f"given twice; the first is on line {first.line}",
                    "remove one",
                )
                continue
            self.document.keys[(*path, key)] = self._location(key_node)
            mapping[key] = self.read(value_node, (*path, key))
        return {**{key: value for key, value in inherited.items() if key not in mapping}, **mapping}

    def _report_key(self, key_node: yaml.Node, path: FieldPath, *, in_braces: bool) -> None:
        """Report a field name that is a list or a mapping."""
        hint = "put it in quotes"
        if in_braces and isinstance(key_node, yaml.MappingNode):
            hint = "{{...}} is not expanded in a job file: write the value, or pass it by --set"
        self._report(key_node, path, "a field name must be text", hint)

    def _report_comma(
        self,
        key_node: yaml.ScalarNode,
        value_node: yaml.Node,
        pieces: list[yaml.ScalarNode],
        path: FieldPath,
    ) -> str:
        """Report a value that continues after a comma, which ends a field within braces; return what it may mean."""
        # In {64, 32} the first piece is a key without a value, too.
        is_first = _is_absent(value_node)
        first = key_node if is_first else value_node
        texts = [str(each.value) for each in (first, *pieces) if isinstance(each, yaml.ScalarNode)]
        texts = [text[:_SHOWN_CHARACTERS] for text in texts[:_MOST_PIECES]]
        written = ",".join(texts)
        text, _, unit = written.partition(" ")
        meant = ""
        ways = [f"[{', '.join(texts)}] for a list", f'"{written}" for text']
        if number := number_with_commas(text):
            meant = f"{number} {unit}".strip()
            ways.insert(0, f"{meant} for a number")
        message = (
            f"{written} is not one value: within braces a comma begins the next field, and {texts[-1]} is a name "
            "without a value (null)"
        )
        self._report(
            pieces[0], path[:-1] if is_first else path, message, f"write {', or '.join(ways)}"
        )
        return meant

    def _is_without_space(
        self,
        node: yaml.MappingNode,
        key_node: yaml.ScalarNode,
        value_node: yaml.Node,
        path: FieldPath,
        mapping: dict[str, Any],
    ) -> bool:
        """Report a field without a space after its colon, which is one name without a value within braces."""
        found = _NO_SPACE.fullmatch(key_node.value)
        is_plain = key_node.style is None and _is_absent(value_node)
        if not node.flow_style or not is_plain or found is None:
            return False
        key, value = found.groups()
        hint = f"write {key}: {value} (with a space after the colon)"
        written = key_node.value[:_SHOWN_CHARACTERS]
        self._report(key_node, (*path, key), f"{written} is a name without a value (null)", hint)
        if key not in mapping:
            # The value that is meant causes no second error about the same mistake.
            self.document.keys[(*path, key)] = self._location(key_node)
            self.document.values[(*path, key)] = self._location(key_node)
            mapping[key] = _resolve(value)
        return True

    def _merge(self, node: yaml.Node, path: FieldPath, inherited: dict[str, Any]) -> None:
        """Copy the fields of other mappings, as `<<: *anchor` requests; the first of several mappings wins."""
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                self._report(source, path, "expected a mapping after <<", "write <<: *anchor")
                continue
            before = dict(self.document.values), dict(self.document.keys)
            for key, value in self._read_mapping(source, path).items():
                inherited.setdefault(key, value)
            # Fields that are given here keep their own locations.
            self.document.values.update(before[0])
            self.document.keys.update(before[1])

    def _read_scalar(self, node: yaml.Node, path: FieldPath) -> Any:
        if node.tag not in _STANDARD_TAGS:
            self._report(
                node, path, f"the YAML tag {node.tag} is not allowed", "write a plain value"
            )
            return None
        text = str(node.value)
        if "\0" in text:
            self._report(node, path, "a value must not contain the character NUL", "remove it")
            return None
        if _SURROGATE.search(text):
            self._report(node, path, "a value must not contain a lone surrogate", "remove it")
            return text.encode("utf-8", "replace").decode()
        if getattr(node, "style", None) is not None:
            return text
        if text == "~":
            self.document.tildes.add(path)
        if _is_absent(node):
            mark = node.start_mark
            # The end of the text is a line of its own.
            rest = "".join(self.lines[mark.line : mark.line + 1])[mark.column :]
            found = _COMMENTED_VALUE.fullmatch(rest)
            value = "" if found is None else found["value"]
            if value[:1] in ("'", '"') or isinstance(_resolve(value), int | float):
                hint = f'write {value}, or "#{value}" for text with a #'
                self._report(node, path, f"no value: #{value} is a comment", hint)
        return _resolve(text)

    def _report(self, node: yaml.Node, path: FieldPath, message: str, hint: str = "") -> None:
        at = self._location(node)
        self.document.problems.append(
            Problem(at.file, at.line, at.column, dotted(path), message, hint)
        )

    def _location(self, node: yaml.Node) -> SourceLocation:
        return SourceLocation(
            self.document.file, node.start_mark.line + 1, node.start_mark.column + 1
        )


_COMMENTED_VALUE = lazy_pattern(r"\s*#(?![#!-])(?P<value>[^\s,}\]]{1,100})\s*")
"""What follows a field without a value: a comment of one word. A number, true, false or a quoted text was meant."""
_SHOWN_CHARACTERS = 40
_MOST_PIECES = 6
_PIECE = lazy_pattern(r"[-+]?\d[\d_.]*(?:[eE][-+]?\d+)?(?:\s*[A-Za-z%$]+)?")
"""A number, or the rest of one after a comma, perhaps with a unit."""


def _pieces_of_number(mapping: yaml.MappingNode, index: int) -> Iterator[yaml.ScalarNode]:
    """Yield the keys after a field that are numbers without a value, within braces: `001` in `{lr: 0,001}`."""
    if not mapping.flow_style or mapping.value[index][0].value == _MERGE:
        return
    for key, value in itertools.islice(mapping.value, index + 1, None):
        is_plain = isinstance(key, yaml.ScalarNode) and key.style is None
        if not is_plain or not _PIECE.fullmatch(str(key.value)) or not _is_absent(value):
            return
        yield key


_NO_SPACE = lazy_pattern(r"([A-Za-z_][\w-]*):([^:].*)")


def _is_absent(value: yaml.Node) -> bool:
    """Return whether a field has no value, not even `null` or `~`."""
    return isinstance(value, yaml.ScalarNode) and value.style is None and value.value == ""


class SpelledInt(int):
    """An integer with its spelling in the file, such as `007`."""

    text: str


class SpelledFloat(float):
    """A number with its spelling in the file, such as `2.10` or `1e-4`."""

    text: str


def _resolve(text: str) -> Any:
    """Return the value of a plain scalar by the rules of YAML 1.2."""
    if _NULL.fullmatch(text):
        return None
    if text in _BOOL:
        return _BOOL[text]
    number: SpelledInt | SpelledFloat
    # Python refuses to parse very long integers, and no field needs them.
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return text
    if _INT.fullmatch(text):
        number = SpelledInt(text)
    elif _FLOAT.fullmatch(text):
        number = SpelledFloat(text)
    elif _SPECIAL_FLOAT.fullmatch(text):
        # float() parses inf, -INF and NaN.
        number = SpelledFloat(text.replace(".", "", 1))
    else:
        return text
    number.text = text
    return number


def dotted(path: Sequence[str | int]) -> str:
    """Return `data.train` or `tags[0]` for a path."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
