"""The schema of Terraform's AWS provider 6, of the resources in infra/, from the PyPI package cdktf-cdktf-provider-aws.

    PYTHONPATH=tests python -m support.provider_schema WHEEL    write tests/infra/provider_schema.json again

The wheel has 60 MB and is not installed: `pip download --no-deps cdktf-cdktf-provider-aws`.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MODULE = Path(__file__).parents[2] / "infra"
SCHEMA = Path(__file__).parents[1] / "infra" / "provider_schema.json"
_PROVIDER = "@cdktf/provider-aws"
_META = {"count", "depends_on", "dynamic", "for_each", "lifecycle", "provider"}
_REFERENCE = re.compile(r"\b(data\.)?(aws_\w+)\.\w+(?:\[[^\]]*\])*\.(\w+)")
"""An attribute that is read: `data.` or nothing, type and attribute."""

Schema = Mapping[str, Any]


def files() -> list[Path]:
    """Return the files of the module and its examples."""
    return sorted([*MODULE.glob("*.tf"), *MODULE.glob("examples/*/*.tf")])


def blocks(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield type and body of each resource and data source of AWS in a file; a data source's type begins with `data.`."""
    import hcl2

    document = hcl2.loads(path.read_text(encoding="utf-8"))
    for kind, prefix in (("resource", ""), ("data", "data.")):
        for block in document.get(kind, []):
            for name, named in block.items():
                if name.strip('"').startswith("aws_"):
                    for body in named.values():
                        if isinstance(body, dict):
                            yield f"{prefix}{name.strip(chr(34))}", body


def reads(path: Path) -> Iterator[tuple[str, str]]:
    """Yield type and attribute of everything that a file reads from a resource or data source."""
    for prefix, kind, attribute in _REFERENCE.findall(path.read_text(encoding="utf-8")):
        yield f"{prefix}{kind}", attribute


def mistakes(body: Mapping[str, Any], schema: Schema, place: str) -> Iterator[str]:
    """Yield what a block has that its schema lacks, and what it lacks that the schema requires."""
    arguments = schema["arguments"]
    given = _with_dynamic_blocks(body)
    for name in given.keys() - _META - arguments.keys():
        yield f"{place}: there is no {name}"
    for name, argument in arguments.items():
        if argument.get("required") and name not in given:
            yield f"{place}: {name} is required"
        if "block" in argument and isinstance(given.get(name), list):
            inner = [each for each in given[name] if isinstance(each, dict)]
            for each in inner:
                yield from mistakes(each, argument["block"], f"{place}.{name}")


def _with_dynamic_blocks(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if not name.startswith("__")}
    for each in given.pop("dynamic", []):
        for name, dynamic in each.items():
            content = dynamic.get("content", {})
            label = name.strip('"')
            given.setdefault(label, []).extend(content if isinstance(content, list) else [content])
    return given


def read_wheel(path: Path, kinds: set[str]) -> dict[str, Any]:
    """Return the schema of the resources and data sources in a wheel of cdktf-cdktf-provider-aws."""
    with zipfile.ZipFile(path) as wheel:
        (packed,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(packed))) as archive:
            content = archive.extractfile("package/.jsii")
            assert content is not None
            document = json.load(content)
    types = document["types"]
    summary = next(
        prop["docs"]["summary"]
        for kind in types.values()
        for prop in kind.get("properties", ())
        if "/hashicorp/aws/" in prop.get("docs", {}).get("summary", "")
    )
    version = re.search(r"/hashicorp/aws/([\d.]+)/", summary)
    assert version is not None
    found = {kind: _resource(types, kind) for kind in sorted(kinds)}
    return {"provider": version[1], "types": found}


def _resource(types: Mapping[str, Any], kind: str) -> dict[str, Any]:
    written = kind.removeprefix("data.")
    place = "data-sources" if kind != written else "resources"
    end = f"/docs/{place}/{written.removeprefix('aws_')} {written}}}."
    # Only the class's description has the name as Terraform writes it: names that clash get another letter.
    name, resource = next(
        (name, each)
        for name, each in types.items()
        if each["kind"] == "class" and each.get("docs", {}).get("summary", "").endswith(end)
    )
    attributes = {
        _snake(each["name"])
        for each in resource["properties"]
        if not each["name"].endswith("Input") and not each.get("static")
    }
    return {**_block(types, f"{name}Config"), "attributes": sorted(attributes)}


def _block(types: Mapping[str, Any], name: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for each in types[name].get("properties", ()):
        # The link is in the remarks of a block, and in the summary of everything else.
        written = re.search(r"/docs/[\w-]+/\w+#(\w+) ", json.dumps(each.get("docs", {})))
        if written is None:
            continue
        argument: dict[str, Any] = {} if each.get("optional") else {"required": True}
        below = next(_types_in(each["type"]), None)
        if below is not None:
            argument["block"] = _block(types, below)
        arguments[written[1]] = argument
    return {"arguments": arguments}


def _types_in(kind: Any) -> Iterator[str]:
    if isinstance(kind, dict):
        name = kind.get("fqn", "")
        if name.startswith(f"{_PROVIDER}."):
            yield name
        for each in kind.values():
            yield from _types_in(each)
    elif isinstance(kind, list):
        for each in kind:
            yield from _types_in(each)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def main(arguments: list[str]) -> int:
    """Write the schema again; return the exit code."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    kinds = {kind for path in files() for kind, _ in blocks(path)}
    found = read_wheel(Path(arguments[0]), kinds)
    SCHEMA.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
