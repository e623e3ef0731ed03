"""The parts of the module that a function or class of a notebook is sent as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cloudtrain.errors import Problem


@dataclass(frozen=True)
class Piece:
    """A part of the module that is written.

    Attributes:
        name: The name that it defines.
        code: Its statement.
        place: What its tracebacks call the cell; empty for an import or a value, which are written as they are now.
        line: Its first line there.
        order: The place of the cell in the order of execution.
        needs: Names that must be defined before it.
        calls: Those of them that are called then.
        uses: Names that it needs when it is called, those before it included.
    """

    name: str
    code: str
    place: str = ""
    line: int = 0
    order: int = -1
    needs: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()


@dataclass
class Collection:
    """What was found so far.

    Attributes:
        pieces: By name.
        imports: Statements that values need.
        modules: Modules that the pieces import, by their full names.
        notes: What the reader should know.
        problems: What cannot travel.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def needed_before(pieces: Mapping[str, Piece], name: str) -> set[str]:
    """Return the pieces that must be complete before one: what it calls may use all that it names."""
    found = set[tuple[str, bool]]()
    first = pieces[name]
    waiting = {(each, each in first.calls) for each in first.needs & pieces.keys()}
    while waiting:
        each, is_called = waiting.pop()
        found.add((each, is_called))
        piece = pieces[each]
        needs = piece.uses if is_called else piece.needs
        waiting |= {(one, is_called or one in piece.calls) for one in needs & pieces.keys()} - found
    return {each for each, _ in found}
