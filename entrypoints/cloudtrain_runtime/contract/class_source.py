"""Static analysis of the classes in a code folder: modules, names, bases. No code is imported.

Standard library only. What the source cannot prove is `ExternalClass.UNKNOWN`: an external base, a name that is bound
twice, a class that a decorator may replace. Callers must not report errors about it.
"""

from __future__ import annotations

import ast
import enum
import sys
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

RUNTIME: Final = "cloudtrain_runtime"


class ExternalClass(enum.Enum):
    """A class that is not defined in the code folder."""

    TASK = "Task"
    PLAIN = "object, or a base such as ABC that brings nothing"
    UNKNOWN = "anything"


_PLAIN: Final = {("abc", "ABC"), ("typing", "Generic"), ("typing", "Protocol"), ("builtins", "object")}
_HARMLESS_DECORATORS: Final = {"dataclass", "final"}
_REACHES_EVERYTHING: Final = {"exec", "eval", "globals", "locals", "vars", "setattr", "delattr"}
"""Calls with which a module or class may bind names that its source does not show."""
_ANY_NAME: Final = "*"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class UnreadableFile:
    """A file that Python cannot read or parse; line and column count from 1."""

    file: str
    line: int | None
    column: int | None
    message: str


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """The analyzed source of a module.

    Attributes:
        name: Dotted, from the code folder.
        file: Path from the code folder.
        bound: By name, the statements at the module's outermost level that bind it; None for any other binding.
        patched: By class name, the attributes that are set from outside of the class.
        is_open: Whether it may bind names that its text does not show.
    """

    name: str
    file: str
    bound: Mapping[str, Sequence[ast.stmt | None]]
    patched: Mapping[str, frozenset[str]]
    is_open: bool

    @property
    def classes(self) -> list[str]:
        """Names of the classes at its outermost level."""
        return [name for name, nodes in self.bound.items() if any(isinstance(node, ast.ClassDef) for node in nodes)]

    def only(self, name: str) -> ast.stmt | None:
        """Return the one statement that binds a name; None where there is none, or a choice."""
        nodes = self.bound.get(name, ())
        return nodes[0] if len(nodes) == 1 else None

    def absolute(self, statement: ast.ImportFrom) -> str | None:
        """Return the dotted name of the module that a statement imports from; None where it leaves the code folder."""
        if statement.level == 0:
            return statement.module
        parts = self.name.split(".")
        if not self.file.endswith("__init__.py"):
            parts.pop()
        if len(parts) < statement.level:  # the first dot is the package itself
            return None
        parts = parts[: len(parts) - statement.level + 1]
        return ".".join([*parts, *([statement.module] if statement.module else [])])


@dataclass(frozen=True, eq=False)
class ClassSource:
    """The analyzed source of a class.

    Attributes:
        bound: By name, the statement that binds it last; None where that is not an ordinary `def`.
        is_opaque: Whether a decorator, a metaclass or the like may make another class of it.
    """

    module: ModuleSource
    node: ast.ClassDef
    bound: Mapping[str, ast.stmt | None]
    is_opaque: bool

    @property
    def name(self) -> str:
        """The class's own name."""
        return self.node.name


@dataclass(frozen=True)
class Member:
    """A method and the class that defines it; `node` is None if the source does not show its definition."""

    owner: ClassSource
    node: Function | None


ResolutionOrder = Sequence[ClassSource | ExternalClass]
"""A method resolution order, without `object`."""


@dataclass(frozen=True)
class SourceFolder:
    """The modules of a code folder, each read once.

    Attributes:
        broken: The files that could not be read.
    """

    directory: Path
    broken: list[UnreadableFile] = field(default_factory=list)
    _modules: dict[str, ModuleSource | None] = field(default_factory=dict)
    _classes: dict[ast.ClassDef, ClassSource] = field(default_factory=dict)

    def module(self, name: str) -> ModuleSource | None:
        """Return a module of the folder, or None if it does not exist or Python cannot read it."""
        if name not in self._modules:
            path = find_module(self.directory, name)
            self._modules[name] = None if path is None else self._read(name, path)
        return self._modules[name]

    def resolve(self, module: ModuleSource, name: str) -> ClassSource | ExternalClass:
        """Return the class that a name in a module refers to."""
        return self._resolve(module, name, frozenset())

    def order(self, found: ClassSource) -> ResolutionOrder:
        """Return a class's method resolution order, up to the first unknown class."""
        return self._order(found, frozenset())

    def _read(self, name: str, path: Path) -> ModuleSource | None:
        file = path.relative_to(self.directory).as_posix()
        tree = parse(path, file)
        if isinstance(tree, UnreadableFile):
            self.broken.append(tree)
            return None
        return _module(name, file, tree) if tree is not None else ModuleSource(name, file, {}, {}, is_open=True)

    def _resolve(
        self, module: ModuleSource, name: str, seen: frozenset[tuple[str, str]]
    ) -> ClassSource | ExternalClass:
        if (module.file, name) in seen:
            return ExternalClass.UNKNOWN
        seen |= {(module.file, name)}
        statement = module.only(name)
        if isinstance(statement, ast.ClassDef):
            return self._class(module, statement)
        if isinstance(statement, ast.ImportFrom):
            source = module.absolute(statement)
            alias = _alias(statement, name)
            return self._imported(source, alias.name, seen) if source and alias else ExternalClass.UNKNOWN
        is_builtin = name not in module.bound and not module.is_open
        return self._imported("builtins", name, seen) if is_builtin else ExternalClass.UNKNOWN

    def _imported(self, source: str, name: str, seen: frozenset[tuple[str, str]]) -> ClassSource | ExternalClass:
        """Return the class that `from source import name` imports."""
        top = source.partition(".")[0]
        if (source, name) in _PLAIN:
            return ExternalClass.PLAIN
        if top == RUNTIME:
            return ExternalClass.TASK if name == "Task" else ExternalClass.UNKNOWN
        module = None if top in sys.stdlib_module_names else self.module(source)
        return ExternalClass.UNKNOWN if module is None else self._resolve(module, name, seen)

    def _base(
        self, module: ModuleSource, node: ast.expr, seen: frozenset[tuple[str, str]]
    ) -> ClassSource | ExternalClass:
        """Return the class that an expression in a class's bases refers to."""
        if isinstance(node, ast.Subscript):  # Base[Settings]
            return self._base(module, node.value, seen)
        *prefix, name = dotted_name(node).split(".")
        if not prefix:
            return self._resolve(module, name, seen) if name else ExternalClass.UNKNOWN
        statement = module.only(prefix[0])
        alias = _alias(statement, prefix[0]) if isinstance(statement, ast.Import | ast.ImportFrom) else None
        if alias is None:
            return ExternalClass.UNKNOWN
        source: str | None = alias.name if alias.asname else prefix[0]
        if isinstance(statement, ast.ImportFrom):
            package = module.absolute(statement)
            source = f"{package}.{alias.name}" if package else None
        return self._imported(".".join([source, *prefix[1:]]), name, seen) if source else ExternalClass.UNKNOWN

    def _class(self, module: ModuleSource, node: ast.ClassDef) -> ClassSource:
        if node not in self._classes:
            self._classes[node] = _class(module, node)
        return self._classes[node]

    def _order(self, found: ClassSource, seen: frozenset[tuple[str, str]]) -> ResolutionOrder:
        key = (found.module.file, found.name)
        if found.is_opaque or key in seen:
            return [ExternalClass.UNKNOWN]
        seen |= {key}
        bases = [self._base(found.module, node, seen) for node in found.node.bases]
        known = [base for base in bases if base is not ExternalClass.PLAIN]
        orders = [self._order(base, seen) if isinstance(base, ClassSource) else [base] for base in known]
        if len(orders) > 1 and any(ExternalClass.UNKNOWN in order for order in orders):
            return [found, ExternalClass.UNKNOWN]  # it may come before any of them
        merged = _merge([*orders, known])
        return [found, *(merged if merged is not None else [ExternalClass.UNKNOWN])]


def find_module(directory: Path, module: str) -> Path | None:
    """Return the file of a module below a code folder, or None."""
    name = module.replace(".", "/")
    # A package hides a module of the same name.
    for candidate in (directory / name / "__init__.py", directory / f"{name}.py"):
        try:
            if candidate.is_file():
                return candidate
        except (OSError, ValueError):  # a name that no file system takes
            continue
    return None


def parse(path: Path, name: str) -> ast.Module | UnreadableFile | None:
    """Return a file's syntax tree, or why Python cannot read it; None if it is nested too deeply to parse.

    Args:
        path: The file.
        name: Name of the file for errors.
    """
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's text, such as an escape that is none
            return ast.parse(file.read())
    except OSError as error:
        return UnreadableFile(name, None, None, f"cannot be read: {error.strerror}")
    except (RecursionError, MemoryError):  # of the tree; Python itself may read the file
        return None
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        line, column = getattr(error, "lineno", None), getattr(error, "offset", None)
        return UnreadableFile(name, line, max(column or 1, 1) if line else None, f"is not valid Python: {reason}")


def find_member(order: ResolutionOrder, name: str) -> Member | ExternalClass:
    """Return the member with a name in a resolution order; `ExternalClass.PLAIN` if no class binds it."""
    for found in order:
        if found is ExternalClass.UNKNOWN or (found is ExternalClass.TASK and not name.startswith("__")):
            return found
        if isinstance(found, ClassSource) and name in found.bound:
            node = found.bound[name]
            return Member(found, node if isinstance(node, Function) else None)
    return ExternalClass.PLAIN


def nodes_in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or statement, without those inside of nested functions and classes."""
    waiting = list(ast.iter_child_nodes(node))  # no recursion: a sum of a thousand terms is a thousand levels deep
    while waiting:
        child = waiting.pop()
        yield child
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(child)


def dotted_name(node: ast.expr) -> str:
    """Return `a.b` for such an expression, or an empty string for another one."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted_name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def _module(name: str, file: str, tree: ast.Module) -> ModuleSource:
    bound = _bound(tree.body)
    patched: dict[str, frozenset[str]] = {}
    is_open = "__getattr__" in bound
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            bound |= {each: [*bound.get(each, []), None] for each in node.names}
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = dotted_name(node.value)
            patched[owner] = patched.get(owner, frozenset()) | {node.attr}
        elif isinstance(node, ast.Call) and dotted_name(node.func) in ("setattr", "delattr") and node.args:
            patched[dotted_name(node.args[0])] = frozenset({_ANY_NAME})
        elif (isinstance(node, ast.Name) and node.id in _REACHES_EVERYTHING) or (
            isinstance(node, ast.alias) and node.name == "*"
        ):
            is_open = True
    return ModuleSource(name, file, bound, patched, is_open)


def _class(module: ModuleSource, node: ast.ClassDef) -> ClassSource:
    decorators = [dotted_name(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list]
    names = [each.rpartition(".")[2] for each in decorators]
    bound = {name: nodes[-1] for name, nodes in _bound(node.body).items()}
    patched = module.patched.get(node.name, frozenset())
    bound |= dict.fromkeys(patched)
    bound |= dict.fromkeys(name for name in _set_on_self(node) if name in bound)  # hides the method of that name
    if "dataclass" in names:
        bound.setdefault("__init__", None)
    used = {each.id for each in nodes_in_scope(node) if isinstance(each, ast.Name)}
    is_opaque = (
        bool(set(names) - _HARMLESS_DECORATORS)
        or bool(node.keywords)
        or "__init_subclass__" in bound
        or _ANY_NAME in patched
        or bool(used & _REACHES_EVERYTHING)
        or any(isinstance(base, ast.Starred) for base in node.bases)
    )
    return ClassSource(module, node, bound, is_opaque)


def _set_on_self(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and dotted_name(each.value) == "self":
            yield each.attr


def _bound(body: Sequence[ast.stmt]) -> dict[str, list[ast.stmt | None]]:
    found: dict[str, list[ast.stmt | None]] = {}
    for statement in body:
        for name in _names(statement):
            found.setdefault(name, []).append(statement)
        if not isinstance(statement, Function | ast.ClassDef):
            for node in nodes_in_scope(statement):
                for name in _names(node) if not isinstance(node, ast.alias) else ():
                    found.setdefault(name, []).append(None)
    return found


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds itself."""
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield node.rest


def _alias(statement: ast.Import | ast.ImportFrom, name: str) -> ast.alias | None:
    for alias in statement.names:
        if (alias.asname or alias.name.partition(".")[0]) == name:
            return alias
    return None


def _merge(orders: Sequence[ResolutionOrder]) -> ResolutionOrder | None:
    """Return Python's C3 linearization of the bases' orders, or None where there is none."""
    merged: list[ClassSource | ExternalClass] = []
    while orders := [order for order in orders if order]:
        heads = (order[0] for order in orders if not any(order[0] in other[1:] for other in orders))
        head = next(heads, None)
        if head is None:
            return None
        merged.append(head)
        orders = [order[1:] if order[0] is head else order for order in orders]
    return merged
