"""Which code of a job certainly runs when it starts, read from its source: what it imports, and what it calls.

Code below `if`, in `try` that handles a missing module, and in functions that nothing certainly calls may never run. It
is left out, so that what is found here is sure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from cloudtrain.job.syntax_names import nodes_of
from cloudtrain_runtime.contract.task_signatures import find_module

Parse = Callable[[Path], ast.Module | None]
"""Returns the syntax tree of a file, or None."""

_HANDLED = frozenset(
    {"ImportError", "ModuleNotFoundError", "NameError", "Exception", "BaseException"}
)
_NAMESPACES = frozenset({"google", "google.cloud", "nvidia", "ruamel"})
"""Folders that several packages share: `google.protobuf` and `google.auth` are two packages."""
_CALLED_BY = frozenset({"fn", "target"})
"""Keyword arguments whose function is called: multiprocessing, torch.multiprocessing.spawn."""
_IMPORTERS = frozenset({"importlib.import_module", "__import__"})
_LAUNCHERS = frozenset(
    {
        *("accelerate.commands.launch.launch_command", "accelerate.commands.launch.main"),
        *("deepspeed.launcher.runner.main", "torch.distributed.launch.main"),
        *("torch.distributed.run.main", "torch.distributed.run.run"),
    }
)
"""Functions that do what the commands accelerate launch, deepspeed and torchrun do."""
_MOST_MODULES = 200
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})  # noqa: S104 (nothing listens)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class OwnModule:
    """A module of the job.

    Attributes:
        path: Its file.
        name: The name under which it is imported; empty for the script or module that is started.
        tree: Its syntax tree.
    """

    path: Path
    name: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package that its relative imports start from; empty if there is none."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Import:
    """A module that is imported for certain.

    Attributes:
        name: Full name of the module.
        path: The importing file.
        line: Line of the import.
        own: File or folder of the job's own that Python finds on its path, or None.
        elsewhere: The folder of the job's own that has the module, and that is not on the path, or None.
        is_package: Whether a package that pip installs has a module of this name.
    """

    name: str
    path: Path
    line: int
    own: Path | None = None
    elsewhere: Path | None = None
    is_package: bool = False

    @property
    def top(self) -> str:
        """Name that belongs to a package: the first part, with the next one in a namespace."""
        top, *rest = self.name.split(".")
        while top in _NAMESPACES and rest:
            top = f"{top}.{rest.pop(0)}"
        return top


@dataclass
class StartedCode:
    """What a job's code certainly does when it starts.

    Attributes:
        imports: Modules that it imports by an absolute name, in the order of their imports.
        relative: File, line and source of each import relative to a package that the module is not in.
        computed: File and line of each import of a name that is computed.
        notebook: File and line of each call of `get_ipython`, which only notebooks have.
        own_address: File and line of each statement that sets MASTER_ADDR to this host.
        launchers: File and line of each call that starts the ranks of this host.
    """

    imports: list[Import] = field(default_factory=list)
    relative: list[tuple[Path, int, str]] = field(default_factory=list)
    computed: list[tuple[Path, int]] = field(default_factory=list)
    notebook: list[tuple[Path, int]] = field(default_factory=list)
    own_address: list[tuple[Path, int]] = field(default_factory=list)
    launchers: list[tuple[Path, int]] = field(default_factory=list)


def trace_start(
    entry: OwnModule,
    roots: Iterable[Path],
    others: Iterable[Path],
    includes: Mapping[str, Path],
    parse: Parse,
    is_package: Callable[[str], bool],
    *,
    task: str = "",
) -> StartedCode:
    """Return what the code of a job certainly does when it starts.

    Args:
        entry: The module that is started, with the package that it is started in as its name; or a Task's module.
        roots: Folders of the job on Python's import path, the first one first.
        others: Folders of the job's code that are not, and may have modules that it needs.
        includes: Folders outside of the code folder, by the name under which they are imported.
        parse: Returns the syntax tree of a file.
        is_package: Returns whether a package that pip installs has a module of this name.
        task: Name of the Task's class, whose methods the runtime calls; empty for a program.
    """
    tracer = _Tracer(tuple(roots), tuple(others), includes, parse, is_package)
    tracer.enter(entry, is_started=not task)
    tracer.enter_package(entry.name)
    if task:
        tracer.call_methods(entry, task)
    tracer.run()
    return tracer.found


class _Tracer:
    """Follows imports and calls from an entry through the modules of a job."""

    def __init__(
        self,
        roots: tuple[Path, ...],
        others: tuple[Path, ...],
        includes: Mapping[str, Path],
        parse: Parse,
        is_package: Callable[[str], bool],
    ) -> None:
        self.roots = roots
        self.others = others
        self.includes = includes
        self.parse = parse
        self.is_package = is_package
        self.found = StartedCode()
        self.modules: dict[Path, OwnModule] = {}
        self.names: dict[Path, dict[str, str]] = {}
        self.waiting: list[tuple[OwnModule, list[ast.stmt], bool]] = []
        self.seen: set[int] = set()
        self.located: dict[tuple[str, tuple[Path, ...]], Path | None] = {}

    def enter(self, module: OwnModule, *, is_started: bool = False) -> None:
        if self._is_entered(module.path):
            return
        self.modules[module.path] = module
        self.names[module.path] = {}
        self.waiting.append((module, module.tree.body, is_started))

    def _is_entered(self, path: Path) -> bool:
        """Return whether a module is known, or one too many, so that it need not be parsed."""
        return path in self.modules or len(self.modules) >= _MOST_MODULES

    def call_methods(self, module: OwnModule, name: str) -> None:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                for method in node.body:
                    if isinstance(method, _Function):
                        self.waiting.append((module, method.body, False))

    def run(self) -> None:
        while self.waiting:
            module, body, is_started = self.waiting.pop(0)
            pieces = list(_pieces(body, is_started=is_started))
            for piece in pieces:
                self._import(module, piece)
            for piece in pieces:
                self._look_at(module, piece)
            leaves = min(_leaving_lines(body), default=None)
            for piece in pieces:
                # What follows `if nodes > 1: return` may be for one instance alone.
                if sets_own_address(piece) and (leaves is None or piece.lineno < leaves):
                    self.found.own_address.append((module.path, piece.lineno))

    def _import(self, module: OwnModule, node: ast.AST) -> None:
        names = self.names[module.path]
        if isinstance(node, ast.Import):
            for each in node.names:
                self._follow(module, each.name, node.lineno)
                names[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            base = self._base(module, node)
            if base is None:
                return
            is_shared = base in _NAMESPACES
            imported = not is_shared and self._follow(module, base, node.lineno)
            for each in node.names:
                names[each.asname or each.name] = f"{base}.{each.name}"
                if imported or is_shared:
                    self._follow(module, f"{base}.{each.name}", node.lineno, is_maybe=imported)
                elif base == "torch.utils" and each.name == "tensorboard":
                    self._follow(module, f"{base}.{each.name}", node.lineno)

    def _base(self, module: OwnModule, node: ast.ImportFrom) -> str | None:
        """Return the full name of the module that a `from` import names; None if it cannot work or names itself."""
        if not node.level:
            return node.module or ""
        parts = module.package.split(".") if module.package else []
        if node.level > len(parts):
            if not _sets_package(module.tree):
                self.found.relative.append((module.path, node.lineno, ast.unparse(node)))
            return None
        kept = parts[: len(parts) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _follow(self, module: OwnModule, name: str, line: int, *, is_maybe: bool = False) -> bool:
        """Record an import, and enter the modules of the job that Python executes for it; return whether it has any.

        With `is_maybe` the name may also be that of a function or class in a module of the job.
        """
        path = self._locate(name, self.roots)
        if path is not None:
            self.found.imports.append(Import(name, module.path, line, own=path))
            self.enter_package(name)
            return True
        if is_maybe or self._locate(name.partition(".")[0], self.roots) is not None:
            return False
        is_package = self.is_package(name.partition(".")[0])
        others = self.others if is_package else (*self.others, module.path.parent)
        # A module does not import itself: what it names so is a package, as in pkg/jax.py with `import jax`.
        elsewhere = next(
            (each for each in others if self._locate(name, (each,)) not in (None, module.path)),
            None,
        )
        self.found.imports.append(
            Import(name, module.path, line, elsewhere=elsewhere, is_package=is_package)
        )
        if elsewhere is None or is_package:
            return False
        self.enter_package(name, elsewhere)
        return True

    def enter_package(self, name: str, *others: Path) -> None:
        """Enter a module and the packages above it, which are imported with it."""
        roots = others or self.roots
        parts = name.split(".") if name else []
        for count in range(1, len(parts) + 1):
            each = ".".join(parts[:count])
            path = self._locate(each, roots)
            if path is None or self._is_entered(path) or not path.is_file():
                continue
            tree = self.parse(path)
            if tree is not None:
                self.enter(OwnModule(path, each, tree))

    def _locate(self, name: str, roots: tuple[Path, ...]) -> Path | None:
        """Return the file of a module of the job, or the folder of a package without one."""
        key = (name, roots)
        if key not in self.located:
            self.located[key] = self._find(name, roots)
        return self.located[key]

    def _find(self, name: str, roots: tuple[Path, ...]) -> Path | None:
        included = self.includes.get(name.partition(".")[0])
        for root in roots if included is None else (included.parent,):
            found = find_module(root, name)
            if found is not None:
                return found
            folder = root / name.replace(".", "/")
            if has_modules(folder):
                return folder
        return None

    def _look_at(self, module: OwnModule, piece: ast.AST) -> None:
        """Find calls in a statement that certainly runs."""
        for node in _walk(piece):
            if not isinstance(node, ast.Call):
                continue
            called = self._full_name(module, node.func)
            if called in _IMPORTERS:
                self._import_called(module, node)
            if called == "get_ipython" and not _binds(module.tree, "get_ipython"):
                self.found.notebook.append((module.path, node.lineno))
            if called in _LAUNCHERS:
                self.found.launchers.append((module.path, node.lineno))
            self._call(module, called)
            for argument in (
                *node.args,
                *(each.value for each in node.keywords if each.arg in _CALLED_BY),
            ):
                if isinstance(argument, ast.Name):
                    self._call(module, self._full_name(module, argument))

    def _import_called(self, module: OwnModule, node: ast.Call) -> None:
        name = node.args[0] if node.args else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            if not name.value.startswith("."):
                self._follow(module, name.value, node.lineno)
        else:
            self.found.computed.append((module.path, node.lineno))

    def _full_name(self, module: OwnModule, expression: ast.expr) -> str:
        if not isinstance(expression, ast.Name | ast.Attribute):
            return ""
        root, dot, rest = ast.unparse(expression).partition(".")
        return f"{self.names[module.path].get(root, root)}{dot}{rest}"

    def _call(self, module: OwnModule, name: str) -> None:
        """Enter a function of the job, or the `__init__` of a class."""
        owner, _, base = name.rpartition(".")
        if owner:
            path = self._locate(owner, (*self.roots, *self.others))
            module = self.modules.get(path, module) if path is not None else module
            if path is None or module.path != path:
                return
        for node in _definitions(module.tree.body):
            if node.name != base or id(node) in self.seen:
                continue
            self.seen.add(id(node))
            inits = [node]
            if isinstance(node, ast.ClassDef):
                inits = [
                    each
                    for each in node.body
                    if isinstance(each, _Function) and each.name == "__init__"
                ]
            for function in inits:
                self.waiting.append((module, function.body, False))


def has_modules(folder: Path) -> bool:
    """Return whether a folder has Python modules, in itself or in a folder of it, so that it can be imported."""
    try:
        if not folder.is_dir():
            return False
        return any(folder.glob("*.py")) or any(folder.glob("*/*.py"))
    except (OSError, ValueError):
        return False


def sets_own_address(node: ast.AST) -> TypeGuard[ast.Assign]:
    """Return whether a statement sets MASTER_ADDR to this host, written out."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
        return False
    return node.value.value in _THIS_HOST and any(map(_is_address, node.targets))


def sets_other_address(node: ast.AST) -> bool:
    """Return whether a statement sets MASTER_ADDR to something else."""
    is_set = isinstance(node, ast.Assign) and any(map(_is_address, node.targets))
    return is_set and not sets_own_address(node)


def _is_address(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value == "MASTER_ADDR"
        and ast.unparse(target.value).endswith("environ")
    )


def _leaving_lines(body: list[ast.stmt]) -> Iterator[int]:
    """Yield the lines of a body that may end it, without those of functions in it."""
    for node in body:
        if isinstance(node, _Function | ast.ClassDef):
            continue
        yield from (
            each.lineno for each in ast.walk(node) if isinstance(each, ast.Return | ast.Raise)
        )


def _definitions(body: list[ast.stmt]) -> Iterator[_Function | ast.ClassDef]:
    for node in body:
        if isinstance(node, _Function | ast.ClassDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _definitions(node.body)


def _pieces(body: list[ast.stmt], *, is_started: bool) -> Iterator[ast.AST]:
    """Yield the statements and expressions of a body that certainly run, without the bodies of functions."""
    for node in body:
        yield from _certain(node, is_started=is_started)


def _certain(node: ast.stmt, *, is_started: bool) -> Iterator[ast.AST]:
    if isinstance(node, ast.If):
        yield node.test
        if is_started and _asks_for_main(node.test):
            yield from _pieces(node.body, is_started=True)
    elif isinstance(node, ast.Try | ast.TryStar):
        if not any(_recovers(each) for each in node.handlers):
            yield from _pieces(node.body, is_started=is_started)
        yield from _pieces(node.finalbody, is_started=is_started)
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield from (each.context_expr for each in node.items)
        if not any("suppress" in ast.unparse(each.context_expr) for each in node.items):
            yield from _pieces(node.body, is_started=is_started)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
        yield node.test if isinstance(node, ast.While) else node.iter
        yield from _pieces(node.body, is_started=is_started)
    elif isinstance(node, ast.ClassDef):
        yield from (*node.decorator_list, *node.bases)
        yield from _pieces(node.body, is_started=is_started)
    else:
        yield from _own_expressions(node)


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, ast.Match):
        yield node.subject
    elif isinstance(node, _Function):
        yield from (*node.decorator_list, *node.args.defaults)
    else:
        yield node


def _recovers(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler lets the program go on after an import that failed."""
    caught = "" if handler.type is None else ast.unparse(handler.type)
    if handler.type is not None and not _HANDLED & set(re.findall(r"\w+", caught)):
        return False
    last = handler.body[-1]
    is_exit = (
        isinstance(last, ast.Expr) and re.match(r"(sys\.)?exit\(", ast.unparse(last)) is not None
    )
    return not (isinstance(last, ast.Raise) or is_exit)


def _asks_for_main(test: ast.expr) -> bool:
    return (
        re.fullmatch(
            r"""__name__ == ['"]__main__['"]|['"]__main__['"] == __name__""", ast.unparse(test)
        )
        is not None
    )


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it that run with it: no lambdas, and no branches of an expression."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.IfExp) and child is not node.test:
            continue
        if isinstance(node, ast.BoolOp) and child is not node.values[0]:
            continue
        if not isinstance(child, ast.Lambda):
            yield from _walk(child)


def _binds(tree: ast.Module, name: str) -> bool:
    """Return whether a module gives a name a meaning of its own."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any((each.asname or each.name) in (name, "*") for each in node.names):
                return True
        elif isinstance(node, _Function | ast.ClassDef):
            if node.name == name:
                return True
        elif isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
    return False


def _sets_package(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "__package__" for node in nodes_of(tree))
