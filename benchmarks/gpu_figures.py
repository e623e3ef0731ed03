"""Results of the GPU benchmark and of the GPU tests: one JSON file per GPU, and the page that shows all of them.

    python benchmarks/gpu_figures.py        # writes docs/reference/gpu.md, as `make docs` does

A file is `benchmarks/results/gpu-<gpu name>.json` (`results_path`) and has the fields of `Results`; `SCHEMA` describes
it as JSON Schema. Its writers are `benchmarks/gpu.py` and the tests in tests/gpu, each of which replaces its own
entries (`update`). Uses the standard library only, so that it runs on any machine with a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "reference" / "gpu.md"
OUTCOMES = ("passed", "failed", "skipped")

_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_FIGURE = {"name": _TEXT, "value": _NUMBER, "unit": _TEXT, "peer": _TEXT, "note": _TEXT}
_TEST = {"name": _TEXT, "outcome": {"enum": list(OUTCOMES)}, "seconds": _NUMBER}


def _object(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(fields),
        "required": list(fields),
        "additionalProperties": False,
    }


SCHEMA = _object(
    {
        "date": _TEXT,
        "machine": {
            "type": "object",
            "required": ["gpu"],
            "additionalProperties": {"type": ["string", "number"]},
        },
        "versions": {"type": "object", "additionalProperties": _TEXT},
        "figures": {"type": "array", "items": _object(_FIGURE)},
        "tests": {"type": "array", "items": _object(_TEST)},
    }
)
"""JSON Schema of a results file."""


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        name: What was measured, such as `GPT 124M: throughput`.
        value: The median, in `unit`.
        unit: `tokens/s`, `bytes`, `s`, `GB/s`, `samples/s` or `share` (0 to 1).
        peer: Who was measured: `cloudtrain`, or the program that it is compared with.
        note: Number of runs, range, settings, goal; empty if there is nothing to say.
    """

    name: str
    value: float
    unit: str
    peer: str = "cloudtrain"
    note: str = ""


@dataclass(frozen=True)
class TestResult:
    """Outcome of one test on a GPU: one of `OUTCOMES`, and its duration in seconds."""

    __test__ = False  # pytest would collect the class by its name

    name: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Results:
    """Content of one results file.

    Attributes:
        machine: `gpu` is the name that CUDA reports; see `describe_machine` for the others.
        versions: Versions of the packages that took part, by name.
        figures: One per name and peer.
        tests: One per name.
        date: Day of the last change, UTC, such as `2026-11-23`.
    """

    machine: Mapping[str, str | float]
    versions: Mapping[str, str]
    figures: tuple[Figure, ...] = ()
    tests: tuple[TestResult, ...] = ()
    date: str = dataclasses.field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d}")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the results of a file's text.

        Raises:
            ValueError: the text is not JSON, or a field is missing, unknown or has a wrong type.
        """
        content = json.loads(text)
        _check(content, SCHEMA, "results")
        figures = tuple(Figure(**each) for each in content.pop("figures"))
        tests = tuple(TestResult(**each) for each in content.pop("tests"))
        return cls(**content, figures=figures, tests=tests)

    def to_json(self) -> str:
        """Return the text of the file. Raise ValueError for a value that is not finite or of a wrong type."""
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"
        _check(json.loads(text), SCHEMA, "results")
        return text


_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
}


def _check(value: Any, schema: Mapping[str, Any], path: str) -> None:
    """Raise ValueError unless a value matches the few keywords of JSON Schema that `SCHEMA` uses."""
    kinds = schema.get("type", [])
    expected = tuple(
        type_ for kind in ([kinds] if isinstance(kinds, str) else kinds) for type_ in _TYPES[kind]
    )
    if (expected and not isinstance(value, expected)) or isinstance(value, bool):
        raise ValueError(f"{path}: expected {kinds}, found {value!r:.40}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{path}: expected one of {schema['enum']}, found {value!r:.40}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        others = schema.get("additionalProperties")
        missing = [name for name in schema.get("required", []) if name not in value]
        unknown = [name for name in value if others is False and name not in fields]
        if missing or unknown:
            raise ValueError(f"{path}: missing fields {missing}, unknown fields {unknown}")
        for name, item in value.items():
            _check(item, fields.get(name, others), f"{path}.{name}")


def load(path: Path) -> Results:
    """Return the content of a results file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a results file.
    """
    try:
        return Results.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def merge(old: Results, new: Results) -> Results:
    """Return both results in one: an entry of `new` replaces the entry of `old` with the same name (and peer).

    Raises:
        ValueError: they were measured on different GPUs, so that one file would mix them.
    """
    if old.machine["gpu"] != new.machine["gpu"]:
        raise ValueError(
            f"measured on {new.machine['gpu']}, and the file is of {old.machine['gpu']}"
        )
    return Results(
        machine={**old.machine, **new.machine},
        versions={**old.versions, **new.versions},
        figures=_merged(old.figures, new.figures, lambda figure: (figure.name, figure.peer)),
        tests=_merged(old.tests, new.tests, lambda test: (test.name,)),
        date=new.date,
    )


def _merged(
    old: tuple[Any, ...], new: tuple[Any, ...], key: Callable[[Any], tuple[str, ...]]
) -> tuple[Any, ...]:
    return tuple({key(each): each for each in (*old, *new)}.values())


def write(path: Path, results: Results) -> None:
    """Replace a results file atomically. Raise OSError or ValueError like `load` and `to_json`."""
    text = results.to_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def update(path: Path, new: Results) -> None:
    """Merge results into a file, which need not exist yet. Raise like `load`, `merge` and `write`."""
    write(path, merge(load(path), new) if path.exists() else new)


def results_path(gpu: str, folder: Path = RESULTS) -> Path:
    """Return the file of a GPU, such as `gpu-nvidia-h200.json` for the name `NVIDIA H200`."""
    return folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def describe_machine() -> dict[str, str | float]:
    """Return this machine: its GPUs with memory and driver as PyTorch reports them, processor cores and memory."""
    import torch

    machine: dict[str, str | float] = {
        "gpu": "none (CPU)",
        "gpus": torch.cuda.device_count(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
        machine["compute_capability"] = f"{properties.major}.{properties.minor}"
    return machine


def describe_versions(*packages: str) -> dict[str, str]:
    """Return the versions of cloudtrain, Python, PyTorch, CUDA and NCCL, and of installed further packages."""
    import torch

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {
        "cloudtrain": project["version"],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def page(folder: Path = RESULTS) -> str:
    """Return docs/reference/gpu.md: all results files of a folder. Raise like `load`."""
    lines = [
        "# Measured on GPUs",
        "",
        "`make docs` generates this page from the files `benchmarks/results/gpu-*.json`. `python benchmarks/gpu.py`",
        "measures the figures and `make test-gpu` runs the tests, each on the machine where it is started. Figures are",
        "medians of alternating runs in one session; compare them within one table only.",
    ]
    found = [load(path) for path in sorted(folder.glob("gpu-*.json"))]
    if not found:
        lines += ["", "Nothing of the GPU path has been measured on a GPU yet."]
    for results in found:
        lines += ["", f"## {results.machine['gpu']}", "", *_machine_lines(results)]
        lines += figure_lines(results.figures) + _test_lines(results.tests)
    return "\n".join(lines) + "\n"


def _machine_lines(results: Results) -> list[str]:
    machine = ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} {_amount(value, 'bytes' if name.endswith('_bytes') else '')}"
        for name, value in results.machine.items()
        if name != "gpu"
    )
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    return [
        f"Machine: {machine}.",
        "",
        f"Versions: {versions}.",
        "",
        f"Last measured on {results.date}.",
    ]


def figure_lines(figures: tuple[Figure, ...]) -> list[str]:
    """Return a Markdown table of figures."""
    if not figures:
        return []
    rows = [
        f"| {each.name} | {each.peer} | {_amount(each.value, each.unit)} | {each.note} |".replace(
            "  ", " "
        )
        for each in figures
    ]
    return ["", "| figure | measured | median | note |", "|---|---|---|---|", *rows]


def _test_lines(tests: tuple[TestResult, ...]) -> list[str]:
    if not tests:
        return ["", "The tests of `tests/gpu` have not run on this GPU yet."]
    counts = [f"{sum(test.outcome == outcome for test in tests)} {outcome}" for outcome in OUTCOMES]
    rows = [
        f"| `{test.name.replace('|', '/')}` | {test.outcome} | {test.seconds:.1f} |"
        for test in tests
    ]
    return [
        "",
        f"Tests: {', '.join(counts)}.",
        "",
        "| test | outcome | seconds |",
        "|---|---|---|",
        *rows,
    ]


def _amount(value: str | float, unit: str) -> str:
    """Return a value with its unit, readable: bytes as GB, shares as percent."""
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    if unit == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.4g} {unit}".strip() if abs(value) < 1000 else f"{value:,.0f} {unit}".strip()  # noqa: PLR2004


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
