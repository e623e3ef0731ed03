"""A plugin of pytest that measures what each test costs, and prints the dearest ones.

    PYTHONPATH=tests python -m pytest -p support.costs --costs FOLDER tests/local
    PYTHONPATH=tests python -m support.costs FOLDER

A test's processor time is that of all its processes, also of those that outlive the command that started them.
Missing are processes that were killed, and programs that are not Python. Tests of the files that a run writes outside
of its folders fail, because they find those of this plugin.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROWS = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the folder."""
    parser.addoption("--costs", metavar="FOLDER", help="write each test's costs into this folder")


def pytest_configure(config: pytest.Config) -> None:
    """Let every process write into the folder. Workers of pytest-xdist inherit the variable."""
    folder = config.getoption("--costs")
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.environ["CLOUDTRAIN_TEST_COSTS"] = str(Path(folder).resolve())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure a test with its set-up, in its own process."""
    folder = os.environ.get("CLOUDTRAIN_TEST_COSTS")
    began, own = time.monotonic(), time.process_time()
    result = yield
    if folder:
        line = {
            "test": item.nodeid,
            "wall": time.monotonic() - began,
            "own": time.process_time() - own,
        }
        with Path(folder, "tests.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return result


@dataclass
class Cost:
    """What a test, or a folder of tests, costs."""

    wall: float = 0.0
    processor: float = 0.0
    facts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Cost) -> None:
        """Add another cost to this one."""
        self.wall += other.wall
        self.processor += other.processor
        self.facts += other.facts

    def row(self, name: str) -> str:
        """Return a line of the table."""
        facts = self.facts
        return (
            f"{self.wall:8.1f} {self.processor:8.1f} {facts['start']:6} {facts['fork']:6} "
            f"{facts['torch']:6}  {name}"
        )


def read_costs(folder: Path) -> dict[str, Cost]:
    """Add up the facts of each test."""
    found: dict[str, Cost] = defaultdict(Cost)
    for line in _lines(folder / "tests.jsonl"):
        cost = found[line["test"]]
        cost.wall += line["wall"]
        cost.processor += line["own"]
    for line in _lines(folder / "processes.jsonl"):
        if line["test"] not in found:  # pytest's own processes, and the work of session fixtures
            continue
        cost = found[line["test"]]
        cost.facts[line["fact"]] += 1
        cost.processor += line.get("seconds", 0.0)
    return found


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def print_costs(folder: Path) -> None:
    """Print the costs of each folder, of each file and of the dearest tests."""
    tests = read_costs(folder)
    folders: dict[str, Cost] = defaultdict(Cost)
    files: dict[str, Cost] = defaultdict(Cost)
    for name, cost in tests.items():
        file = name.partition("::")[0]
        files[file].add(cost)
        folders[str(Path(file).parent)].add(cost)
    for rows in (folders, files, tests):
        print("    wall   processor  starts  forks  torch")
        dearest = sorted(rows.items(), key=lambda row: row[1].processor, reverse=True)
        for name, cost in dearest[:ROWS]:
            print(cost.row(name))
        print()


if __name__ == "__main__":
    print_costs(Path(sys.argv[1]))
