"""Compare the pinned packages with the advisories of PyPI's database: `make audit`.

pip-audit reports a package that its database does not contain as "skipped", and succeeds even if it skipped all. This
program prints the skipped packages. With CLOUDTRAIN_AUDIT=1 it fails if no package was audited.
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

_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Verdict:
    """Result of an audit.

    Attributes:
        audited: Number of packages that the database contains.
        skipped: Names of the other packages.
        found: One line for each advisory.
    """

    audited: int
    skipped: tuple[str, ...]
    found: tuple[str, ...]


def read_report(document: Mapping[str, Any]) -> Verdict:
    """Return the result from pip-audit's JSON report."""
    packages = document["dependencies"]
    found = [
        f"{package['name']} {package['version']}: {each['id']} (fixed in {', '.join(each['fix_versions']) or 'none'})"
        for package in packages
        for each in package.get("vulns", ())
    ]
    skipped = tuple(str(package["name"]) for package in packages if "skip_reason" in package)
    return Verdict(len(packages) - len(skipped), skipped, tuple(found))


def main(argv: Sequence[str]) -> int:
    """Print the result; return 1 for advisories, and with CLOUDTRAIN_AUDIT=1 also if nothing was audited."""
    parser = argparse.ArgumentParser()
    parser.add_argument("constraints", type=Path)
    parser.add_argument("also", nargs="*", help="further requirements, such as torch==2.13.0")
    arguments = parser.parse_args(argv)
    pinned = [
        line
        for line in arguments.constraints.read_text().splitlines()
        if "==" in line and line[0] != "#"
    ]
    verdict = run_audit([*pinned, *arguments.also])
    if isinstance(verdict, str) or verdict.audited == 0:
        reason = (
            verdict if isinstance(verdict, str) else "the database contains none of the packages"
        )
        print(f"SKIPPED: no audit of {len(pinned)} pinned packages: {reason}")
        return int(os.environ.get("CLOUDTRAIN_AUDIT") == "1")
    print(f"{verdict.audited} packages audited, {len(verdict.found)} advisories")
    if verdict.skipped:
        print(f"SKIPPED: the database does not contain {', '.join(verdict.skipped)}")
    print("\n".join(verdict.found))
    return int(bool(verdict.found))


def run_audit(requirements: Sequence[str]) -> Verdict | str:
    """Run pip-audit; return its verdict, or the reason why there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements) + "\n")
        file.flush()
        command = [
            sys.executable,
            "-m",
            "pip_audit",
            "-r",
            file.name,
            "--no-deps",
            "--disable-pip",
            "--format",
            "json",
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"pip-audit did not finish in {_TIMEOUT_SECONDS} s"
    try:
        return read_report(json.loads(done.stdout))
    except ValueError:
        return (done.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
