"""Values of expressions of a notebook that are read without execution."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from cloudtrain.errors import Problem, SpecError
from cloudtrain.features.functions.cells import ExecutedCode
from cloudtrain.features.functions.history import CONSTANTS, History, Moment
from cloudtrain.support.backend_facts import PLACE_ARGUMENTS


class Values:
    """Values at a statement: those that names have been assigned last before it.

    Args:
        code: The notebook.
    """

    def __init__(self, code: ExecutedCode) -> None:
        self._title = code.title
        self._history = History(code)

    def read_all(self, given: Mapping[str, ast.expr], at: Moment) -> dict[str, Any]:
        """Return the values of keyword arguments, without those that say where a job runs.

        Raises:
            SpecError: One is known only when the notebook is executed.
        """
        found: dict[str, Any] = {}
        for name, node in given.items():
            if name in PLACE_ARGUMENTS:
                continue
            value = self.read(node, name, at)
            found |= value if name.startswith("**") else {name: value}
        return {name: value for name, value in found.items() if name not in PLACE_ARGUMENTS}

    def read(self, node: ast.expr, what: str, at: Moment) -> Any:
        """Return the value of an expression.

        Raises:
            SpecError: It is known only when the notebook is executed.
        """
        try:
            return self._read(node, at)
        except (ValueError, TypeError, RecursionError):
            message = (
                f"the value of {ast.unparse(node)} is known only when the notebook is executed"
            )
            hint = (
                "write it as a number or text, or write the job in the notebook with .write(FOLDER)"
            )
            problem = Problem(self._title, None, None, what, message, hint)
            raise SpecError((problem,)) from None

    def _read(self, node: ast.expr, at: Moment) -> Any:
        if isinstance(node, ast.Name):
            return self._read_name(node.id, at)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            return self._mapping(node.keywords, at)
        if isinstance(node, ast.Dict):
            return self._dict(node, at)
        if isinstance(node, ast.List):
            return [self._read(each, at) for each in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self._read(each, at) for each in node.elts)
        return ast.literal_eval(node)

    def _read_name(self, name: str, at: Moment) -> Any:
        before = [each for each in self._history.bindings(name) if each.index < at.index]
        if not before:
            raise ValueError(name)
        made = before[-1]
        statement = made.statement
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        if value is None or not all(isinstance(each, ast.Name) for each in targets):
            raise ValueError(name)
        found = self._read(value, made)
        change = self._history.change(name, made)
        if change is not None and change.index < at.index and not isinstance(found, CONSTANTS):
            raise ValueError(name)
        return found

    def _dict(self, node: ast.Dict, at: Moment) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            part = self._read(value, at)
            found |= part if key is None else {self._read(key, at): part}
        return found

    def _mapping(self, keywords: Iterable[ast.keyword], at: Moment) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in keywords:
            part = self._read(each.value, at)
            found |= part if each.arg is None else {each.arg: part}
        return found
