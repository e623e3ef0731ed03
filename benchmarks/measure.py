"""Helpers of the benchmarks: alternating commands, medians, tables, and files with a marked part."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
_TRIES = 5
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Command:
    """One measured command and its goal: seconds, or a ratio to another command."""

    name: str
    argv: list[str]
    cwd: Path
    goal: str = ""


def measure(
    commands: list[Command], count: int, environ: dict[str, str], failed: Counter[str]
) -> dict[str, list[float]]:
    """Run the commands in turn, once to warm up and then `count` times; return seconds by name.

    A run that fails is counted in `failed` and repeated: plain torchrun with Gloo sometimes aborts at its exit.
    """
    seconds: dict[str, list[float]] = {command.name: [] for command in commands}
    for turn in range(count + 1):
        for command in commands:
            took = run_once(command, environ, failed)
            if turn > 0:
                seconds[command.name].append(took)
    return seconds


def run_once(command: Command, environ: dict[str, str], failed: Counter[str]) -> float:
    """Run a command until it succeeds; return the seconds of that run. Exit if it never succeeds."""
    for _ in range(_TRIES):
        began = time.perf_counter()
        done = subprocess.run(command.argv, cwd=command.cwd, env=environ, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return time.perf_counter() - began
        failed[command.name] += 1
    sys.exit(f"{command.name} failed {_TRIES} times:\n{done.stderr[-3000:]}")


def table(commands: list[Command], seconds: dict[str, list[float]], base: str) -> list[str]:
    """Return a Markdown table: median, range, and the median of the ratios to the base command of the same turn."""
    lines = [f"| command | median s | min to max | x {base} | goal |", "|---|---|---|---|---|"]
    for command in commands:
        own = seconds[command.name]
        ratio = statistics.median(a / b for a, b in zip(own, seconds[base], strict=True))
        spread = f"{min(own):.2f} to {max(own):.2f}"
        lines.append(f"| {command.name} | {statistics.median(own):.2f} | {spread} | {ratio:.2f} | {command.goal} |")
    return lines


def describe_machine() -> str:
    """Return the machine, such as `2 cores, Python 3.11.7`."""
    return f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"


def replace_marked(path: Path, text: str) -> None:
    """Replace the text between the markers of a file. Exit if the file has none."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        sys.exit(f"{path} has no {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
