"""The page with every module and the first line of its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
_PACKAGES = ("sdk/cloudtrain", "entrypoints/cloudtrain_runtime")
_HEAD = """\
# Modules

Every module of both packages with the first line of its docstring. `make reference` generates this page, and a test compares
it with the code. [Architecture](../architecture.md) shows how the packages belong together.
"""


def modules_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(line for package in _PACKAGES for line in _of_package(package))])


def _of_package(package: str) -> Iterator[str]:
    folders = sorted({path.parent for path in _modules(package)})
    for folder in folders:
        yield f"## `{folder.relative_to(_REPOSITORY).as_posix()}`"
        yield ""
        own = folder / "__init__.py"
        if own.is_file() and (text := _first_line(own)):
            yield text
            yield ""
        rows = [path for path in _modules(package) if path.parent == folder and path != own]
        if rows:
            yield "| Module | What it has |"
            yield "|---|---|"
            yield from (f"| `{path.name}` | {_first_line(path)} |" for path in rows)
            yield ""


def _modules(package: str) -> list[Path]:
    found = (_REPOSITORY / package).rglob("*.py")
    return sorted(path for path in found if "templates" not in path.parts)


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n", 1)[0].replace("\n", " ").replace("|", "\\|")
