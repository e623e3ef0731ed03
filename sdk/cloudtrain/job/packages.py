"""Packages that a job's code imports, and those that its requirements name. Nothing is imported or installed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from cloudtrain.job.requirements import read_requirements

STANDARD_LIBRARY = sys.stdlib_module_names | frozenset(
    {
        *("aifc", "annotationlib", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk"),
        *("compression", "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap", "nis"),
        *("nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib"),
        *("tomllib", "uu", "xdrlib"),
    }
)
"""Modules of the standard library of any Python of a container: of this one, and those that a version has removed."""


def imported_packages(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the packages that a module certainly imports, each with the line.

    Imports below `if` and `try` do not count: a script that has them usually works without the package.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((_package(alias.name), child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            names = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from ((_package(name), child.lineno) for name in names)
        elif not isinstance(child, ast.If | ast.Try | ast.TryStar):
            yield from imported_packages(child)


def _package(module: str) -> str:
    """Return the package of a module; torch's TensorBoard writer needs the package of that name."""
    return (
        "tensorboard"
        if f"{module}.".startswith("torch.utils.tensorboard.")
        else module.partition(".")[0]
    )


def required_packages(path: Path) -> frozenset[str] | None:
    """Return the packages in a requirements file, in normalised form; None if it includes what has no name here.

    Such are folders, addresses without a name, and a file that cannot be read.
    """
    return read_requirements(path.parent, path.name).names
