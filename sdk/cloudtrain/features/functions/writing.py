"""The module with the code of a notebook, as the job's code folder has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cloudtrain.features.functions.pieces import Collection, Piece, needed_before
from cloudtrain_runtime.contract.cell_format import MARK, VALUES, cell_heading


def write_module(found: Collection, title: str, *, is_lazy: bool) -> str:
    """Return the source of the module.

    Args:
        found: What it has.
        title: The notebook or script that the code is from.
        is_lazy: Whether annotations are not evaluated (`from __future__ import annotations`).
    """
    lines = [f"{MARK}{title}. Each part names its cell and its first line there.\n"]
    if is_lazy:
        lines.append("from __future__ import annotations\n")
    imports = {
        piece.code for piece in found.pieces.values() if not piece.place and _is_import(piece)
    }
    imports |= {f"{each}\n" for each in found.imports}
    lines += sorted(imports)
    pieces = [each for each in _in_order(found.pieces) if each.place or not _is_import(each)]
    for before, piece in zip([None, *pieces], pieces, strict=False):
        if piece.place:
            lines.append(f"\n{cell_heading(piece.place, piece.line)}\n")
        elif before is None or before.place:
            lines.append(f"\n{VALUES}\n")
        lines.append(piece.code)
    return "".join(lines)


def _is_import(piece: Piece) -> bool:
    return piece.code.startswith(("import ", "from "))


def _in_order(pieces: Mapping[str, Piece]) -> Iterator[Piece]:
    """Yield pieces so that each comes after what it needs, and else as the cells were executed."""
    done, active = set[str](), set[str]()

    def visit(name: str) -> Iterator[Piece]:
        if name in done or name in active or name not in pieces:
            return
        active.add(name)
        for each in sorted(needed_before(pieces, name), key=lambda each: _place(pieces[each])):
            yield from visit(each)
        active.discard(name)
        done.add(name)
        yield pieces[name]

    written = set[str]()
    for name in sorted(pieces, key=lambda each: _place(pieces[each])):
        for piece in visit(name):
            # One statement may define several names.
            key = f"{piece.place}:{piece.line}:{piece.code}"
            if key not in written:
                written.add(key)
                yield piece


def _place(piece: Piece) -> tuple[int, int, str]:
    return piece.order, piece.line, piece.name
