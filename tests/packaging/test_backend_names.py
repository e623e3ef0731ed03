"""Above the backends, nothing depends on a backend's name: facts decide (`support/backend_facts.py`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cloudtrain
from cloudtrain.support.backend_facts import BACKENDS

PACKAGE = Path(cloudtrain.__file__).parent
OWN = ("backends/", "support/backend_facts.py")
"""Where names of backends are: the backends themselves, and the table."""

CONSTANTS = [name.upper() for name in BACKENDS]

OTHER_MEANINGS = {
    "client": "a service of AWS",
    "arn": "a service of AWS",
    "arn_pattern": "a service of AWS",
    "command": "a service of AWS, in a command of its CLI",
    "increase": "a service of AWS",
    "context_entry": "a service of AWS",
    "paginate": "a service of AWS",
    "Path": "a folder of botocore's data",
    "install_command": "an extra of the package",
    "find_spec": "a package of AWS",
    "_version": "a package of AWS",
}
"""Calls whose argument has the same word for something else."""

ALLOWED = {
    ("cli/__init__.py", "sandbox"): "the name of a command",
    ("cli/first_words.py", "local"): "a word that users type in place of a command",
    ("job/sections/cluster.py", "local"): "an instance type of SageMaker's SDK",
    ("features/serving/endpoint_request.py", "sagemaker"): "a namespace of AWS's scaling",
    ("features/sweeps/spec.py", "sagemaker"): "an engine of sweeps",
    ("preflight/base.py", "sagemaker"): "a service of AWS, whose client has a type",
    ("job/diagnostics.py", "slurm"): "a section of job files",
    ("runs/titles.py", "slurm"): "a section of job files",
    ("job/job_fields.py", "slurm"): "a section of job files",
    ("planning/resumed_fields.py", "slurm"): "a section of job files",
    ("settings/slurm_sites.py", "slurm"): "a table of settings files",
}


def names_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the literals and constants with a backend's name that no call explains, with their line."""
    tree = ast.parse(path.read_text())
    explained = {
        id(each)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in OTHER_MEANINGS
        for each in ast.walk(call)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in BACKENDS and id(node) not in explained:
            yield str(node.value), node.lineno
        if isinstance(node, ast.Name) and node.id in CONSTANTS:
            yield node.id, node.lineno


def test_only_the_table_names_backends() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name): line
        for path in PACKAGE.rglob("*.py")
        if not str(path.relative_to(PACKAGE)).startswith(OWN) and "templates" not in path.parts
        for name, line in names_in(path)
    }
    assert {each: line for each, line in found.items() if each not in ALLOWED} == {}
    assert sorted(each for each in ALLOWED if each not in found) == []
