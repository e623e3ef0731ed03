"""Generator of the tables in README.md: `python infra/tables.py --write`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hcl2

HERE = Path(__file__).parent
README = HERE / "README.md"
_TABLE = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str]) -> int:
    """Write the tables, or check that they are current."""
    text = README.read_text(encoding="utf-8")
    new = with_tables(text)
    if "--write" in arguments:
        README.write_text(new, encoding="utf-8")
        return 0
    if new != text:
        print(
            f"{README} has outdated tables; run: python {Path(__file__).name} --write",
            file=sys.stderr,
        )
        return 1
    return 0


def with_tables(text: str) -> str:
    """Return the README with current tables."""
    tables = {"variables": variables, "outputs": outputs, "files": files}
    return _TABLE.sub(lambda found: f"{found[1]}{tables[found[2]]()}\n{found[3]}", text)


def variables() -> str:
    """Return the table of variables, in the order of their file."""
    rows = [
        (f"`{name}`", _code(block["type"]), _default(block), _text(block["description"]))
        for name, block in _blocks("variables.tf", "variable")
    ]
    return _table(("variable", "type", "default", "description"), rows)


def outputs() -> str:
    """Return the table of outputs."""
    rows = [
        (f"`{name}`", _text(block["description"]))
        for name, block in _blocks("outputs.tf", "output")
    ]
    return _table(("output", "description"), rows)


def files() -> str:
    """Return the table of files and the resources in each."""
    rows = []
    for path in sorted(HERE.glob("*.tf")):
        kinds = sorted(
            {_unquote(kind) for block in _load(path).get("resource", []) for kind in block}
        )
        if kinds:
            rows.append((f"[`{path.name}`]({path.name})", ", ".join(f"`{kind}`" for kind in kinds)))
    return _table(("file", "resources"), rows)


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = hcl2.loads(path.read_text(encoding="utf-8"))
    return content


def _blocks(file: str, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in _load(HERE / file)[kind]:
        for name, block in each.items():
            yield _unquote(name), block


def _default(block: dict[str, Any]) -> str:
    if "default" not in block:
        return "required"
    return f"`{json.dumps(_plain(block['default']))}`"


def _plain(value: Any) -> Any:
    """Return a value without the quotes that the parser keeps."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return _unquote(value) if isinstance(value, str) else value


def _code(value: str) -> str:
    return f"`{value.removeprefix('${').removesuffix('}')}`"


def _text(value: str) -> str:
    return json.loads(value).replace("|", r"\|") if value.startswith('"') else value


def _unquote(value: str) -> str:
    return value.strip('"')


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
