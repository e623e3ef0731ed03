"""No source of the product, the examples or the tools reads a pickle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("sdk", "entrypoints", "examples", "benchmarks", "infra")
READERS = {
    *(
        "pickle",
        "_pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "joblib",
        "shelve",
        "marshal",
        "jsonpickle",
        "pandas",
    ),
}
ALLOWED = {
    "entrypoints/cloudtrain_runtime/checkpoint/safe_metadata.py": "pickle",
    "sdk/cloudtrain/runs/history.py": "pandas.DataFrame",
}
"""The restricted reader of metadata is a subclass of pickle.Unpickler. A DataFrame of numbers reads no file."""


def sources() -> list[Path]:
    return [path for folder in SOURCES for path in sorted((REPOSITORY / folder).rglob("*.py"))]


def findings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            allowed = ALLOWED.get(path.relative_to(REPOSITORY).as_posix())
            if name.partition(".")[0] in READERS and name != allowed:
                yield f"{path}:{node.lineno}: imports {name}"
        if isinstance(node, ast.Call):
            yield from (f"{path}:{node.lineno}: {problem}" for problem in _unsafe_calls(node))


def _unsafe_calls(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
        yield "NumPy may unpickle"
    if name in (
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "eval",
        "exec",
        "pickle.load",
        "pickle.loads",
    ):
        yield name


@pytest.mark.parametrize(
    "path", sources(), ids=lambda path: path.relative_to(REPOSITORY).as_posix()
)
def test_no_source_reads_a_pickle(path: Path) -> None:
    assert list(findings(path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "from pandas import DataFrame",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
    ],
)
def test_code_that_reads_a_pickle_is_detected(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "REPOSITORY", tmp_path)
    (tmp_path / "source.py").write_text(text)
    assert list(findings(tmp_path / "source.py"))
