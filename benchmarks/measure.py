"""The harness of the benchmarks: options, alternating rounds, medians and ratios, and the Markdown of the result.

A benchmark is a script that declares a `Benchmark`: its peers, its goal and the mechanism that it measures. Its
function `measure` returns Markdown, usually of `alternate` and `table`, and calls `Session.require` to check that the
mechanism was active. The harness adds machine, versions and date, and writes the result into benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
SECONDS = "seconds"
_TRIES = 5

Figures = Mapping[str, float]

sys.path.append(str(REPOSITORY / "tests"))  # for the package `support`: servers on loopback


@dataclass(frozen=True)
class Peer:
    """One of the ways that are compared.

    Attributes:
        name: Its name in the table.
        run: Runs one round; returns its seconds, or several figures by name.
        goal: What this way is to reach, as the table shows it; empty for a way that is only compared with.
    """

    name: str
    run: Callable[[], float | Figures]
    goal: str = ""


@dataclass(frozen=True)
class Series:
    """The figures of one peer, one mapping per counted round."""

    name: str
    goal: str
    rounds: Sequence[Figures]

    def values(self, figure: str = SECONDS) -> list[float]:
        """Return a figure of each round."""
        return [each[figure] for each in self.rounds]

    def median(self, figure: str = SECONDS) -> float:
        """Return the median of a figure."""
        return statistics.median(self.values(figure))

    def ratio(self, base: Series, figure: str = SECONDS) -> float:
        """Return the median of the ratios to another peer's figure of the same round."""
        return statistics.median(
            a / b for a, b in zip(self.values(figure), base.values(figure), strict=True)
        )


def alternate(peers: Sequence[Peer], rounds: int, *, warm_up: bool = True) -> list[Series]:
    """Run the peers in turn; return their figures in the same order.

    Args:
        peers: The ways that are compared.
        rounds: Number of counted rounds.
        warm_up: Whether each runs once before, uncounted.
    """
    found: dict[str, list[Figures]] = {peer.name: [] for peer in peers}
    for turn in range(0 if warm_up else 1, rounds + 1):
        for peer in peers:
            figures = peer.run()
            if turn > 0:
                found[peer.name].append(
                    figures if isinstance(figures, Mapping) else {SECONDS: figures}
                )
    return [Series(peer.name, peer.goal, found[peer.name]) for peer in peers]


def table(
    title: str,
    found: Sequence[Series],
    *,
    base: str = "",
    figure: str = SECONDS,
    unit: str = "s",
    digits: int = 2,
    columns: Mapping[str, Callable[[Series], str]] = {},
) -> list[str]:
    """Return a Markdown table: median, range, ratio to a base, goal, and further columns.

    Args:
        title: Heading of the first column.
        found: The peers, one row each.
        base: Name of the peer that the others are divided by; empty for a table without ratios.
        figure: The figure that is shown.
        unit: Its unit.
        digits: Digits after the decimal point.
        columns: Cells of further columns by heading.
    """
    cells: dict[str, Callable[[Series], str]] = {
        title: lambda own: own.name,
        f"median {unit}": lambda own: f"{own.median(figure):.{digits}f}",
        "min to max": lambda own: (
            f"{min(own.values(figure)):.{digits}f} to {max(own.values(figure)):.{digits}f}"
        ),
    }
    if base:
        (divisor,) = (each for each in found if each.name == base)
        cells[f"x {base}"] = lambda own: f"{own.ratio(divisor, figure):.{digits}f}"
    if any(each.goal for each in found):
        cells["goal"] = lambda own: own.goal
    cells |= columns
    return markdown_table(list(cells), [[cell(each) for cell in cells.values()] for each in found])


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return [*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)]


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark measures, and with what it is compared.

    Attributes:
        file: The script, `__file__`.
        text: Its module docstring.
        peers: With what it is compared.
        goal: What is to be reached.
        mechanism: What must have been active, as a statement; `Session.require` checks it.
        rounds: Default number of counted rounds; 0 for a benchmark without rounds.
        options: Further options: default value and help by name. A tuple takes several values.
        packages: Packages whose versions the result states.
        children: Functions that run in a process of their own, see `child`. They print what they return as JSON.
        writes_page: Whether --write names a Markdown page; if not, the function that measures writes the file.
    """

    file: str
    text: str | None
    peers: str
    goal: str
    mechanism: str
    rounds: int = 7
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    packages: Sequence[str] = ()
    children: Sequence[Callable[..., Any]] = ()
    writes_page: bool = True

    def main(self, measure: Callable[[Session], Iterable[str]]) -> None:
        """Measure, print, and with --write replace the marked part of a page.

        Exits with 1 if a fault was found, or if nothing has checked that the measured mechanism was active.
        """
        if sys.argv[1:2] == ["--child"]:
            called = {each.__name__: each for each in self.children}[sys.argv[2]]
            result = called(**json.loads(sys.argv[3]))
            if result is not None:
                print(json.dumps(result), flush=True)
            return
        session = Session(self._parse())
        page = self._find_page(session.options.write) if self.writes_page else None
        lines = list(measure(session))
        if not session.checks:
            sys.exit(f"this run has not checked its mechanism: {self.mechanism}")
        text = "\n".join([*lines, "", *self._about(session)])
        print(text)
        if page is not None:
            self._write(page, text)
        sys.exit(1 if session.faults else 0)

    def child(self, function: Callable[..., Any], **arguments: Any) -> list[str]:
        """Return the command that calls one of `children` in a new process."""
        return [
            sys.executable,
            "-W",
            "ignore",
            self.file,
            "--child",
            function.__name__,
            json.dumps(arguments),
        ]

    def _parse(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if self.rounds:
            parser.add_argument(
                "--rounds", type=int, default=self.rounds, help="counted rounds of each way"
            )
        for name, (default, meaning) in self.options.items():
            text = f"{meaning} (default: %(default)s)"
            if default is False:
                parser.add_argument(f"--{name}", action="store_true", help=text)
            elif isinstance(default, tuple):
                parser.add_argument(
                    f"--{name}", type=type(default[0]), nargs="+", default=default, help=text
                )
            else:
                parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
        parser.add_argument("--write", type=Path, help="file or folder for the result")
        return parser.parse_args()

    def _about(self, session: Session) -> list[str]:
        versions = "".join(f", {package} {version(package)}" for package in self.packages)
        rounds = (
            f"Medians of {session.options.rounds} alternating rounds on "
            if self.rounds
            else "Measured on "
        )
        return [
            f"- Compared with: {self.peers}.",
            f"- Goal: {self.goal}.",
            f"- Checked {session.checks} times in this run: {self.mechanism}.",
            f"- {rounds}{describe_machine()}{versions}, {datetime.now(UTC):%Y-%m-%d}.",
            *(
                f"- {name}: {count} runs failed and were repeated."
                for name, count in sorted(session.repeated.items())
            ),
            *(f"- Fault: {fault}" for fault in session.faults),
        ]

    def _find_page(self, given: Path | None) -> Path | None:
        """Return the page for the result. A wrong one ends the program before the measurement, which takes long."""
        if given is None:
            return None
        page = given / f"{Path(self.file).stem}.md" if given.is_dir() else given
        if not page.parent.is_dir():
            sys.exit(f"{page.parent} is no folder")
        if page.exists() and END not in page.read_text().partition(BEGIN)[2]:
            sys.exit(f"{page} has no {BEGIN} and {END}")
        return page

    def _write(self, path: Path, text: str) -> None:
        if not path.exists():
            path.write_text(f"# {Path(self.file).stem}\n\n{self.text}\n{BEGIN}\n{END}\n")
        before, _, rest = path.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


@dataclass
class Session:
    """One run of a benchmark.

    Attributes:
        options: The command line.
        checks: Number of checks that the measured mechanism was active.
        faults: What was found to be wrong; the run then exits with 1.
        repeated: Runs of commands that failed and were repeated, by peer.
    """

    options: argparse.Namespace
    checks: int = 0
    faults: list[str] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)

    @property
    def rounds(self) -> int:
        """Number of counted rounds."""
        return int(self.options.rounds)

    def require(self, is_active: bool, problem: str) -> None:
        """Count a check that the measured mechanism was active; exit with the problem if it was not."""
        if not is_active:
            sys.exit(f"not what this benchmark measures: {problem}")
        self.checks += 1

    def command(
        self, name: str, argv: Sequence[str], cwd: Path, environ: Mapping[str, str], goal: str = ""
    ) -> Peer:
        """Return a peer that runs a command from start to end."""
        return Peer(name, lambda: self.run_command(name, argv, cwd, environ), goal)

    def run_command(
        self, name: str, argv: Sequence[str], cwd: Path, environ: Mapping[str, str]
    ) -> float:
        """Run a command until it succeeds; return the seconds of that run. Exit if it never succeeds.

        Plain torchrun with Gloo sometimes aborts at its exit; `repeated` counts such runs.
        """
        for _ in range(_TRIES):
            began = time.perf_counter()
            done = subprocess.run(
                argv, cwd=cwd, env=environ, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return time.perf_counter() - began
            self.repeated[name] += 1
        sys.exit(f"{name} failed {_TRIES} times:\n{done.stderr[-3000:]}")


@dataclass(frozen=True)
class ChildResult:
    """A process that has ended: its output, wall-clock seconds, and peak memory in bytes."""

    output: str
    seconds: float
    peak_bytes: int


def run_child(argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> ChildResult:
    """Run a process and return its output and peak memory. Exit if it fails."""
    output = folder / "output"
    began = time.perf_counter()
    with output.open("wb") as out:
        process = os.posix_spawnp(
            argv[0], argv, environ, file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)]
        )
        _, status, usage = os.wait4(process, 0)
    if status != 0:
        sys.exit(f"{' '.join(argv)} failed: {output.read_text()}")
    return ChildResult(output.read_text(), time.perf_counter() - began, usage.ru_maxrss * 1024)


def seconds_of(
    action: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds that a call takes."""
    began = clock()
    action()
    return clock() - began


def describe_machine() -> str:
    """Return the machine, such as `2 cores (Intel Xeon), load 0, Python 3.11.7`."""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    model = f" ({models[0].partition(': ')[2]})" if models else ""
    return f"{os.cpu_count()} cores{model}, load {os.getloadavg()[0]:.0f}, Python {sys.version.split()[0]}"


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def clean_environ(**variables: str) -> dict[str, str]:
    """Return this process's environment without settings of AWS and cloudtrain, and with credentials for loopback."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CLOUDTRAIN_"))
    }
    return {
        **kept,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        **variables,
    }


_MAKE_BUCKET = """
import sys
import boto3
location = {"LocationConstraint": "us-west-2"}
boto3.client("s3").create_bucket(Bucket=sys.argv[1], CreateBucketConfiguration=location)
"""


@contextlib.contextmanager
def serve_bucket(name: str) -> Iterator[str]:
    """Serve S3 on loopback; yield the URI of a new bucket. Sets the AWS variables of this process's environment."""
    from support.s3_server import serve_s3

    with serve_s3() as server:
        os.environ |= clean_environ(AWS_ENDPOINT_URL=server.endpoint)
        # In a child process: this process may fork later and must hold no connection.
        subprocess.run([sys.executable, "-c", _MAKE_BUCKET, name], check=True)
        yield f"s3://{name}"
