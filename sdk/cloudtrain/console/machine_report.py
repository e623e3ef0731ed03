"""Output of `doctor`: the checks of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from cloudtrain.client.machine_report import MachineCheck
from cloudtrain.console import coloured

_COLOURS = {"pass": "32", "note": "33", "fail": "1;31"}


def print_machine(checks: Sequence[MachineCheck], *, is_ready: bool) -> None:
    """Print the checks, one per line, each followed by its fix, and whether local runs are possible."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{coloured(check.result, _COLOURS[check.result])}  {check.name:<{width}}  {check.detail}")
        if check.fix:
            print(f"{'':<{width + 6}}  fix: {check.fix}")
    print("local runs are possible" if is_ready else "local runs are not possible: see the failed checks")
