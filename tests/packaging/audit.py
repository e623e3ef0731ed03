"""Compare the pinned packages with the advisories of PyPI's database: `make audit`.

pip-audit calls a package that its database does not answer for "skipped", and ends well when all of them are. Here that
is told, and with CLOUDTRAIN_AUDIT=1 it is a failure: nobody shall take silence for an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SECONDS = 600


@dataclass(frozen=True)
class Verdict:
    """What an audit has found.

    Attributes:
        audited: Number of packages that the database answered for.
        skipped: Names of the others.
        found: A line for each advisory.
    """

    audited: int
    skipped: tuple[str, ...]
    found: tuple[str, ...]


def judge(document: Mapping[str, Any]) -> Verdict:
    """Return what pip-audit's JSON says."""
    packages = document["dependencies"]
    found = [
        f"{package['name']} {package['version']}: {each['id']} (fixed in {', '.join(each['fix_versions']) or 'none'})"
        for package in packages
        for each in package.get("vulns", ())
    ]
    skipped = tuple(str(package["name"]) for package in packages if "skip_reason" in package)
    return Verdict(len(packages) - len(skipped), skipped, tuple(found))


def main(argv: Sequence[str]) -> int:
    """Print the verdict; return 1 for advisories, and where it is asked for (CLOUDTRAIN_AUDIT=1) for no answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("constraints", type=Path)
    parser.add_argument("also", nargs="*", help="further requirements, such as torch==2.13.0")
    arguments = parser.parse_args(argv)
    pinned = [line for line in arguments.constraints.read_text().splitlines() if "==" in line and line[0] != "#"]
    verdict = _ask([*pinned, *arguments.also])
    if isinstance(verdict, str) or verdict.audited == 0:
        why = verdict if isinstance(verdict, str) else "the database answers for none of the packages"
        print(f"SKIPPED: no audit of {len(pinned)} pinned packages: {why}")
        return int(os.environ.get("CLOUDTRAIN_AUDIT") == "1")
    print(f"{verdict.audited} packages audited, {len(verdict.found)} advisories")
    if verdict.skipped:
        print(f"SKIPPED: the database does not answer for {', '.join(verdict.skipped)}")
    print("\n".join(verdict.found))
    return int(bool(verdict.found))


def _ask(requirements: Sequence[str]) -> Verdict | str:
    """Return the verdict, or why there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "-r", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return f"pip-audit had no answer in {_SECONDS} s"
    try:
        return judge(json.loads(done.stdout))
    except ValueError:
        return (done.stderr.strip().splitlines() or ["pip-audit says nothing"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
