"""Trainers of libraries that always begin at step 0, by a script's source: nothing is imported.

The trainers of Transformers, TRL and Lightning continue from a checkpoint only if the call that trains names it. An
option such as `--resume_from_checkpoint` is parsed by their argument classes and has no effect of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class _Library(NamedTuple):
    """How a library's trainers are called."""

    packages: frozenset[str]
    method: str  # what trains
    argument: str  # names the checkpoint
    value: str  # continues from the newest one, and begins anew where there is none
    integration: str  # module of the runtime whose attach() does it


_LIBRARIES = (
    _Library(
        frozenset({"transformers", "trl"}),
        "train",
        "resume_from_checkpoint",
        "transformers.trainer_utils.get_last_checkpoint(output_dir)",
        "huggingface",
    ),
    _Library(
        frozenset({"lightning", "pytorch_lightning"}), "fit", "ckpt_path", '"last"', "lightning"
    ),
)


def find_fresh_start(modules: Iterable[tuple[str, ast.Module]]) -> str | None:
    """Return how a script starts a training that never continues from a checkpoint, and what to pass; or None.

    The modules must not mention the argument at all: `train.py:30 calls trainer.train without resume_from_checkpoint`.

    Args:
        modules: The parsed modules of a script with their paths.
    """
    parsed = list(modules)
    words = {word for _, tree in parsed for word in _words(tree)}
    for library in _LIBRARIES:
        if any(library.argument in word for word in words):
            continue
        for file, tree in parsed:
            line = _line_of_call(tree, library)
            if line is not None:
                call = (
                    f"{file}:{line} calls {library.method} of a trainer without {library.argument}"
                )
                return (
                    f"{call}, so a resumed run begins at step 0. Pass {library.argument}={library.value}, or call "
                    f"attach(trainer) of cloudtrain_runtime.integrations.{library.integration}"
                )
    return None


def _line_of_call(tree: ast.Module, library: _Library) -> int | None:
    """Return the line in which a module lets a trainer of a library train, or None."""
    nodes = list(ast.walk(tree))
    classes = _TrainerClasses(nodes, library.packages)
    trainers = {
        _last(target)
        for node in nodes
        if isinstance(node, ast.Assign) and classes.has_made(node.value)
        for target in node.targets
    }
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            is_trainer = _last(owner) in trainers or classes.has_made(owner)
            if node.func.attr == library.method and is_trainer:
                return node.lineno
    return None


class _TrainerClasses:
    """The trainer classes of a library that a module imports, and those that it derives from them."""

    def __init__(self, nodes: Iterable[ast.AST], packages: frozenset[str]) -> None:
        self._names: set[str] = set()
        self._packages: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                if (node.module or "").partition(".")[0] in packages:
                    named = (
                        each.asname or each.name for each in node.names if _is_trainer(each.name)
                    )
                    self._names.update(named)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    top = each.name.partition(".")[0]
                    if top in packages:
                        self._packages.add(each.asname or top)
            elif isinstance(node, ast.ClassDef) and any(map(self._includes, node.bases)):
                self._names.add(node.name)

    def has_made(self, value: ast.expr) -> bool:
        """Return whether an expression creates an object of one of the classes."""
        return isinstance(value, ast.Call) and self._includes(value.func)

    def _includes(self, named: ast.expr) -> bool:
        if isinstance(named, ast.Attribute):
            return _first(named) in self._packages and _is_trainer(named.attr)
        return isinstance(named, ast.Name) and named.id in self._names


def _is_trainer(name: str) -> bool:
    return name.endswith("Trainer")


def _first(name: ast.expr) -> str:
    """Return the first part of a dotted name."""
    while isinstance(name, ast.Attribute):
        name = name.value
    return _last(name)


def _last(name: ast.expr) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    if isinstance(name, ast.Attribute):
        return name.attr
    return name.id if isinstance(name, ast.Name) else ""


def _words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            yield node.arg or "**"
        elif isinstance(node, ast.Attribute | ast.Name):
            yield _last(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
