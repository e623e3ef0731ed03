"""Error messages about files that cannot be part of a bundle."""

from __future__ import annotations

from collections.abc import Iterable

from cloudtrain.bundle.ignore import escape
from cloudtrain.errors import BundleError
from cloudtrain.secrets.scanner import SecretMatch
from cloudtrain_runtime.contract import INCLUDE_FOLDER

OWN_IGNORE = ".cloudtrainignore"
MAX_LISTED = 10
"""Files that one message lists."""


def printable_name(name: str) -> str:
    """Return a file name in a form that a terminal can print."""
    if name.isprintable():
        return name
    return name.encode("unicode_escape", "surrogateescape").decode("ascii", "replace")


def unreadable_error(name: str, error: OSError) -> BundleError:
    """Return the error about a file or folder that cannot be read."""
    return BundleError(
        f"{printable_name(name)} cannot be read: {error.strerror}",
        f"make it readable, or name it in {OWN_IGNORE}",
    )


def secrets_error(findings: Iterable[SecretMatch]) -> BundleError:
    """Return the error about files that look like they hold secrets."""
    ordered = sorted(findings, key=finding_order)
    return BundleError(_describe_secrets(ordered), secrets_hint(ordered[0].name))


def secrets_hint(name: str) -> str:
    """Return the lines of `.cloudtrainignore` that exclude or include a file which looks like a secret."""
    ignore_file, name = ignore_file_of(name)
    pattern = escape(name)
    return (
        f"in {ignore_file} the line {pattern} excludes it, and !{pattern} includes it; "
        "a run gets secrets from its role, or from code.env.NAME: {secret: <name in AWS Secrets Manager>}"
    )


def ignore_file_of(name: str) -> tuple[str, str]:
    """Return the ignore file that decides about a file of a bundle, and the file's name relative to it."""
    if not name.startswith(f"{INCLUDE_FOLDER}/"):
        return OWN_IGNORE, name
    _, package, name = name.split("/", 2)
    return f"{package}/{OWN_IGNORE}", name


def finding_order(finding: SecretMatch) -> tuple[str, int]:
    """Return the sort key of a finding: by file, then by line."""
    return finding.name, finding.line or 0


def combined_error(problems: list[BundleError], refused: list[SecretMatch]) -> BundleError:
    """Return one error for all problems, grouped by hint, with at most `MAX_LISTED` problems in each group.

    There is at least one problem. `refused` are files that look like secrets.
    """
    if len(problems) == 1 and not refused:
        return problems[0]
    by_hint: dict[str, list[str]] = {}
    for problem in problems:
        by_hint.setdefault(problem.hint, []).append(problem.message)
    noun = "problems" if len(problems) > 1 else "problem"
    lines = [f"{len(problems)} {noun} in the code folder:"]
    for hint, messages in by_hint.items():
        lines += [f"  {message}" for message in sorted(messages)[:MAX_LISTED]]
        if len(messages) > MAX_LISTED:
            lines.append(f"  and {len(messages) - MAX_LISTED} more such")
        lines.append(f"    {hint}".replace("\n", "\n  "))
    if not refused:
        return BundleError("\n".join(lines))
    secrets = secrets_error(refused)
    return BundleError("\n".join([*lines, secrets.message]), secrets.hint)


def _describe_secrets(ordered: list[SecretMatch]) -> str:
    file_count = len({finding.name for finding in ordered})
    lines = [f"  {printable_name(str(finding))}" for finding in ordered[:MAX_LISTED]]
    if len(ordered) > MAX_LISTED:
        lines.append(f"  and {len(ordered) - MAX_LISTED} more places")
    subject = f"{file_count} files look like they hold"
    if file_count == 1:
        subject = "1 file looks like it holds"
    return "\n".join([f"{subject} secrets, which the bundle would include:", *lines])
