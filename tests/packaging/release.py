"""Steps of `make release` that no other tool has: whether this tree may be released, and what the SBOM lacks."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BUNDLED = "sdk/cloudtrain/features/dashboard/static/vendor/bundled.cdx.json"
_VERSION_HEADING = re.compile(r"^## \[(?P<version>\d[^\]]*)\]", flags=re.MULTILINE)
_UNRELEASED = re.compile(
    r"^## \[Unreleased\]\n(?P<text>.*?)(?=^## )", flags=re.MULTILINE | re.DOTALL
)


def problems_of(tree: Path) -> list[str]:
    """Return why a tree must not be released, one sentence each."""
    if not (tree / ".git").exists():
        return ["this folder is no git checkout: a release is built from a commit"]
    uncommitted = _uncommitted(tree)
    if uncommitted:
        return uncommitted
    version = version_of(tree)
    return [*_missing_changes(tree / "CHANGELOG.md", version), *_other_tags(tree, version)]


def version_of(tree: Path) -> str:
    """Return the version that pyproject.toml names."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def add_bundled(document: dict[str, Any], bundled: dict[str, Any]) -> None:
    """Add the components that the wheel contains to the SBOM of its dependencies."""
    document["components"] += bundled["components"]
    root = document["metadata"]["component"]["bom-ref"]
    entry = next(each for each in document["dependencies"] if each["ref"] == root)
    added = [component["bom-ref"] for component in bundled["components"]]
    entry["dependsOn"] = sorted([*entry.get("dependsOn", ()), *added])
    document["dependencies"] += [{"ref": ref} for ref in added]


def main(argv: Sequence[str]) -> int:
    """Run one step; return 1 if the tree must not be released."""
    parser = argparse.ArgumentParser()
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("check", help="refuse a tree that must not be released")
    sbom = steps.add_parser("sbom", help="write the SBOM into dist/")
    sbom.add_argument("dependencies", type=Path, help="what cyclonedx-py has written")
    arguments = parser.parse_args(argv)

    tree = Path.cwd()
    if arguments.step == "check":
        problems = problems_of(tree)
        for problem in problems:
            print(f"make release: {problem}", file=sys.stderr)
        return int(bool(problems))
    document = json.loads(arguments.dependencies.read_text(encoding="utf-8"))
    add_bundled(document, json.loads((tree / _BUNDLED).read_text(encoding="utf-8")))
    target = tree / "dist" / f"cloudtrain-{version_of(tree)}.cdx.json"
    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _uncommitted(tree: Path) -> list[str]:
    changed = _git(tree, "status", "--porcelain", "--untracked-files=all").splitlines()
    if not changed:
        return []
    first = changed[0][3:]
    others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return [f"not committed: {first}{others}; commit or remove them first"]


def _missing_changes(changelog: Path, version: str) -> list[str]:
    text = changelog.read_text(encoding="utf-8")
    newest = _VERSION_HEADING.search(text)
    if newest is None or newest["version"] != version:
        found = newest["version"] if newest else "none"
        problem = f"pyproject.toml has version {version}, and the newest section of CHANGELOG.md is {found}"
        return [f"{problem}; write the section [{version}], or correct the version"]
    unreleased = _UNRELEASED.search(text)
    if unreleased is not None and "\n- " in unreleased["text"]:
        problem = "CHANGELOG.md has changes under [Unreleased]"
        return [f"{problem}; move them to the section [{version}], or raise the version"]
    return []


def _other_tags(tree: Path, version: str) -> list[str]:
    tags = _git(tree, "tag", "--points-at", "HEAD", "v*").split()
    if not tags or f"v{version}" in tags:
        return []
    return [f"this commit has the tag {tags[0]}, and pyproject.toml has version {version}"]


def _git(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(tree), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
