"""The syntax of a Python module: its nodes, and the names, texts, imports and calls in them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cloudtrain_runtime.contract.python_source import read_tree

Function = ast.FunctionDef | ast.AsyncFunctionDef
ImportStatement = ast.Import | ast.ImportFrom
Node = TypeVar("Node", bound=ast.AST)


class Module:
    """A module that was walked once. What rules derive from its nodes is computed once, too.

    Args:
        tree: Its syntax tree.
        file: Its path in the code folder, as messages show it.

    Attributes:
        tree: Its syntax tree.
        file: Its path in the code folder.
        nodes: All nodes below it, in the order of `ast.walk`.
    """

    def __init__(self, tree: ast.Module, file: str = "") -> None:
        self.tree = tree
        self.file = file
        self.nodes: list[ast.AST] = []
        self._by_kind: defaultdict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in ast.walk(tree):
            if node is not tree:
                self.nodes.append(node)
                self._by_kind[type(node)].append(node)

    def place(self, line: int) -> str:
        """Return a line as messages show it, `file:line`."""
        return f"{self.file}:{line}"

    def of(self, kind: type[Node]) -> list[Node]:
        """Return the nodes of a kind, in the order of `nodes`."""
        return self._by_kind[kind]

    @cached_property
    def calls(self) -> list[ast.Call]:
        """The calls."""
        return self.of(ast.Call)

    @cached_property
    def keywords(self) -> list[ast.keyword]:
        """The keyword arguments of calls and classes."""
        return self.of(ast.keyword)

    @cached_property
    def named_calls(self) -> list[tuple[str, ast.Call]]:
        """The calls of what has a name, each with its full name by the module's imports."""
        return [
            (full_name(call.func, self.imported_names), call)
            for call in self.calls
            if isinstance(call.func, ast.Name | ast.Attribute)
        ]

    @cached_property
    def import_statements(self) -> list[ImportStatement]:
        """The imports, at any depth."""
        return [node for node in self.nodes if isinstance(node, ImportStatement)]

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """The names of imported modules, and imported names that may be modules."""
        return tuple(name for node in self.import_statements for name in names_of_import(node))

    @cached_property
    def absolute_imports(self) -> tuple[str, ...]:
        """The modules that are imported by an absolute name."""
        return tuple(name for node in self.import_statements for name in absolute_names(node))

    @cached_property
    def imported_names(self) -> Mapping[str, str]:
        """The full names of what it imports, by the names under which it does."""
        found: dict[str, str] = {}
        for node in self.import_statements:
            found |= bound_names(node)
        return found

    @cached_property
    def names(self) -> frozenset[str]:
        """Its imports, and the dotted names and keywords that it uses."""
        found = set(self.imports)
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                found.add(written(node))
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
        return frozenset(found)

    @cached_property
    def name_parts(self) -> frozenset[str]:
        """The parts of `names` between the dots."""
        return frozenset(part for name in self.names for part in name.split("."))

    @cached_property
    def texts(self) -> list[tuple[int, str]]:
        """The texts with their lines, without docstrings and other unused texts."""
        unused = {id(node.value) for node in self.of(ast.Expr)}
        return [
            (node.lineno, node.value)
            for node in self.of(ast.Constant)
            if isinstance(node.value, str) and id(node) not in unused
        ]


def read_module(path: Path, file: str = "") -> Module | None:
    """Return a file's syntax; None if it cannot be read, such as one for another version of Python."""
    tree = read_tree(path)
    return None if tree is None else Module(tree, file)


def names_of_import(node: ImportStatement) -> Iterator[str]:
    """Yield the modules that a statement imports, and the imported names that may be modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    above = ""
    if node.module:
        yield node.module
        above = f"{node.module}."
    yield from (f"{above}{alias.name}" for alias in node.names if alias.name != "*")


def absolute_names(node: ImportStatement) -> Iterator[str]:
    """Yield the modules that a statement imports by an absolute name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module and not node.level:
        yield node.module


def bound_names(node: ImportStatement) -> dict[str, str]:
    """Return the full names of what a statement imports by an absolute name, by the names that it binds."""
    if isinstance(node, ast.ImportFrom):
        if not node.module or node.level:
            return {}
        return {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    found = {}
    for each in node.names:
        # `import a.b` binds a; `import a.b as c` binds a.b.
        top = each.name.partition(".")[0]
        found[each.asname or top] = each.name if each.asname else top
    return found


def full_name(expression: ast.expr, imported: Mapping[str, str]) -> str:
    """Return the name that an expression has by a module's imports, such as `torch.distributed.all_gather`."""
    root, _, rest = written(expression).partition(".")
    return f"{imported.get(root, '')}.{rest}".rstrip(".")


def written(expression: ast.expr) -> str:
    """Return an expression as text. Names with dots, which most are, need no unparsing."""
    parts: list[str] = []
    inner = expression
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        return ast.unparse(expression)
    return ".".join([inner.id, *reversed(parts)])


def last_name(node: ast.AST) -> str:
    """Return the last part of the name that an expression refers to; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
