"""Measure how long a stranger waits, from the wheel to a plan and to a trained model.

    make release && .venv/bin/python benchmarks/first_install.py [--pythons python3.11 ...] [--write FILE]

Each row begins in an empty home folder with empty caches. `uv tool install` or pip, in a new environment, installs the
wheel of dist/; `cloudtrain init` and `cloudtrain plan --local` follow. Then the hint that `submit --local` prints is
executed as it is printed, and `submit --local --follow` trains what `init` wrote. It needs a package index: settings of
pip and uv in the environment are passed on (PIP_*, UV_*), such as UV_CONSTRAINT for a build of PyTorch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from measure import REPOSITORY, Benchmark, Session, markdown_table

PASSED_ON = (
    "PIP_",
    "UV_",
    "SSL_CERT_",
    "REQUESTS_CA_",
    "HTTP_",
    "HTTPS_",
    "http_",
    "https_",
    "NO_PROXY",
    "no_proxy",
)
BENCHMARK = Benchmark(
    file=__file__,
    text=__doc__,
    peers="uv and pip, on each Python",
    goal="every command works on each Python",
    mechanism="a command ended with 0, or without PyTorch with 2 and a hint",
    rounds=0,
    options={
        "pythons": (("python3.11", "python3.12", "python3.13"), "interpreters"),
        "installers": (("uv", "pip"), "installers"),
        "plan-only": (False, "end at the plan: PyTorch is not installed"),
    },
)


@dataclass
class Home:
    """The commands of one stranger, and the seconds that they took.

    Attributes:
        session: Where a command that fails ends the benchmark.
        folder: The home folder.
        environ: Environment of the commands.
    """

    session: Session
    folder: Path
    environ: Mapping[str, str]

    def seconds(self, command: str, *, status: int = 0) -> float:
        """Run a shell command in the project's folder; return its seconds."""
        return self._run(command, status)[0]

    def hint(self, command: str) -> str:
        """Run a command that lacks an extra; return the command that its hint gives."""
        _, text = self._run(command, 2)
        return next(line.strip() for line in text.splitlines() if " install " in line)

    def _run(self, command: str, status: int) -> tuple[float, str]:
        project = self.folder / "project"
        project.mkdir(exist_ok=True)
        began = time.perf_counter()
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=project,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
        print(f"{seconds:7.1f} s  {command}", file=sys.stderr)
        self.session.require(done.returncode == status, f"{command}\n{done.stdout[-3000:]}")
        return seconds, done.stdout


def measure(session: Session) -> list[str]:
    """Return the table of all interpreters and installers."""
    wheel = next(iter(sorted((REPOSITORY / "dist").glob("*.whl"))), None)
    if wheel is None:
        sys.exit("dist/ has no wheel: make release")
    headings = [
        "Python",
        "installer",
        "install, s",
        "`init`, s",
        "`plan`, s",
        "hint, s",
        "`submit --local`, s",
        "MB",
    ]
    rows = [
        _row(session, wheel, python, installer)
        for python in session.options.pythons
        for installer in session.options.installers
    ]
    return markdown_table(headings, rows)


def _row(session: Session, wheel: Path, python: str, installer: str) -> list[str]:
    found = shutil.which(python)
    if found is None:
        sys.exit(f"{python} is not installed")
    with tempfile.TemporaryDirectory(prefix="cloudtrain-stranger-") as name:
        home = Home(session, Path(name), _environ(Path(name)))
        return list(_cells(home, wheel, found, installer))


def _cells(home: Home, wheel: Path, python: str, installer: str) -> Iterator[str]:
    version = subprocess.check_output(
        [python, "-c", "import sys; print(sys.version.split()[0])"], text=True
    )
    yield version.strip()
    yield installer
    if installer == "uv":
        command = f"uv tool install --python {python} {wheel}"
    else:
        command = f"{python} -m venv $HOME/.local && pip install -q {wheel}"
    yield f"{home.seconds(command):.1f}"
    yield f"{home.seconds('cloudtrain init'):.1f}"
    yield f"{home.seconds('cloudtrain plan --local'):.1f}"
    if home.session.options.plan_only:
        yield from ("", "")
    else:
        hint = home.hint("cloudtrain submit --local")
        yield f"{home.seconds(hint):.1f}"
        yield f"{home.seconds('cloudtrain submit --local --follow'):.1f}"
    kilobytes = subprocess.check_output(
        ["du", "-sk", "--exclude=.cache", str(home.folder)], text=True
    )
    yield f"{int(kilobytes.split()[0]) / 1024:,.0f}"


def _environ(home: Path) -> dict[str, str]:
    """Return an environment as a new user has it: nothing but an empty home, and the settings of the index."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    uv = shutil.which("uv", path=f"{REPOSITORY}/.venv-release/bin:{os.environ['PATH']}")
    folders = [str(home / ".local" / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
    if uv is not None:
        # A link alone: beside uv there may be a pip of another environment.
        (home / "uv").mkdir()
        (home / "uv" / "uv").symlink_to(uv)
        folders.insert(1, str(home / "uv"))
    passed.pop("UV_CACHE_DIR", None)
    return {**passed, "HOME": str(home), "PATH": ":".join(folders), "LANG": "C.UTF-8"}


if __name__ == "__main__":
    BENCHMARK.main(measure)
