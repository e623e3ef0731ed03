"""Output about runs that are to be deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cloudtrain.console.tables import Cell, Column, print_table, run_cell
from cloudtrain.support.run_id import job_of
from cloudtrain.support.units import format_size

if TYPE_CHECKING:
    from cloudtrain.client.removal import Removal

_COLUMNS = (
    Column("run", title="ID"),
    Column("job", least=12, only="terminal"),
    Column("state"),
    Column("size", is_number=True, keep="pipe"),
    Column("why", title="WHY", least=20, only="terminal"),
)


def print_removal(found: Removal, sizes: Mapping[str, int]) -> None:
    """Print the runs that are to be deleted with their sizes, and why others are kept.

    Args:
        found: The runs.
        sizes: Bytes of each run's folder, by its reference.
    """
    if not found.runs and not found.kept:
        print("no run matches")
        return
    rows: list[tuple[str | Cell, ...]] = []
    for each in found.runs:
        size = format_size(sizes[each.reference])
        rows.append((run_cell(each.reference), job_of(each.run), str(each.state), size, ""))
    for run, reason in found.kept.items():
        # In a pipe, the reason is in the place of the size.
        place = Cell(reason, shown="")
        rows.append((run_cell(f"local:{run}"), job_of(run), "kept", place, reason))
    print_table(_COLUMNS, rows)
