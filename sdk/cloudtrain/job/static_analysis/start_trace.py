"""What a job's code certainly does when it starts: what it imports, and what it calls.

`certain_code` decides what certainly runs. A function is read only where something certainly calls it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain.job.static_analysis.certain_code import (
    certain_pieces,
    definitions,
    leaving_lines,
    walk_certain,
)
from cloudtrain.job.static_analysis.environment import own_address_lines
from cloudtrain.job.static_analysis.module_search import find_own
from cloudtrain.job.static_analysis.syntax import (
    Function,
    Module,
    bound_names,
    written,
)

Read = Callable[[Path], Module | None]
"""Returns the syntax of a file, or None."""

_NAMESPACES = frozenset({"google", "google.cloud", "nvidia", "ruamel"})
"""Folders that several packages share: `google.protobuf` and `google.auth` are two packages."""
_TENSORBOARD = "torch.utils.tensorboard"
_CALLED_BY = frozenset({"fn", "target"})
"""Keyword arguments whose function is called: multiprocessing, torch.multiprocessing.spawn."""
_IMPORTERS = frozenset({"importlib.import_module", "__import__"})
_MOST_MODULES = 200


@dataclass(frozen=True)
class OwnModule:
    """A module of the job.

    Attributes:
        path: Its file.
        name: The name under which it is imported; empty for the script or module that is started.
        syntax: Its syntax.
    """

    path: Path
    name: str
    syntax: Module

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
    """

    name: str
    path: Path
    line: int
    own: Path | None = None
    elsewhere: Path | None = None

    @property
    def top(self) -> str:
        """Name that belongs to a package: the first part, with the next one in a namespace."""
        top, *rest = self.name.split(".")
        while top in _NAMESPACES and rest:
            top = f"{top}.{rest.pop(0)}"
        return top

    @property
    def package(self) -> str:
        """The module of the package that is needed. That of torch's TensorBoard writer is `tensorboard`."""
        if f"{self.name}.".startswith(f"{_TENSORBOARD}."):
            return "tensorboard"
        return self.top


@dataclass
class StartedCode:
    """What a job's code certainly does when it starts.

    Attributes:
        imports: Modules that it imports by an absolute name, in the order of their imports.
        relative: File, line and source of each import relative to a package that the module is not in.
        notebook: File and line of each call of `get_ipython`, which only notebooks have.
        own_address: File and line of each statement that sets MASTER_ADDR to this host.
    """

    imports: list[Import] = field(default_factory=list)
    relative: list[tuple[Path, int, str]] = field(default_factory=list)
    notebook: list[tuple[Path, int]] = field(default_factory=list)
    own_address: list[tuple[Path, int]] = field(default_factory=list)


@dataclass
class StartTrace:
    """Follows imports and calls from an entry through the modules of a job.

    Attributes:
        roots: Folders of the job on Python's import path, the first one first.
        others: Folders of the job's code that are not, and may have modules that it needs.
        includes: Folders outside of the code folder, by the name under which they are imported.
        read: Returns the syntax of a file.
        is_package: Returns whether a package that pip installs has a module of this name.
        found: What was found so far.
    """

    roots: tuple[Path, ...]
    others: tuple[Path, ...]
    includes: Mapping[str, Path]
    read: Read
    is_package: Callable[[str], bool]
    found: StartedCode = field(default_factory=StartedCode)

    def __post_init__(self) -> None:
        self.modules: dict[Path, OwnModule] = {}
        self.names: dict[Path, dict[str, str]] = {}
        self.waiting: list[tuple[OwnModule, list[ast.stmt], bool]] = []
        self.seen: set[tuple[Path, int]] = set()
        self.located: dict[tuple[str, tuple[Path, ...]], Path | None] = {}

    def run(self, entry: OwnModule, task: str) -> StartedCode:
        """Return what the code of a job certainly does when it starts.

        Args:
            entry: The module that is started, with the package that it is started in as its name; or a Task's module.
            task: Name of the Task's class, whose methods the runtime calls; empty for a program.
        """
        self._enter(entry, is_started=not task)
        self._enter_package(entry.name)
        for node in entry.syntax.tree.body:
            if task and isinstance(node, ast.ClassDef) and node.name == task:
                methods = (each for each in node.body if isinstance(each, Function))
                self.waiting += [(entry, method.body, False) for method in methods]
        while self.waiting:
            self._trace_body(*self.waiting.pop(0))
        return self.found

    def _enter(self, module: OwnModule, *, is_started: bool = False) -> None:
        if self._is_entered(module.path):
            return
        self.modules[module.path] = module
        self.names[module.path] = {}
        self.waiting.append((module, module.syntax.tree.body, is_started))

    def _is_entered(self, path: Path) -> bool:
        """Return whether a module is known, or one too many, so that it need not be parsed."""
        return path in self.modules or len(self.modules) >= _MOST_MODULES

    def _trace_body(self, module: OwnModule, body: list[ast.stmt], is_started: bool) -> None:
        pieces = list(certain_pieces(body, is_started=is_started))
        for piece in pieces:
            self._import(module, piece)
        for piece in pieces:
            self._look_at(module, piece)
        # What follows `if nodes > 1: return` may be for one instance alone.
        leaves = min(leaving_lines(body), default=None)
        lines = [line for piece in pieces for line in own_address_lines(piece)]
        self.found.own_address += [
            (module.path, line) for line in lines if leaves is None or line < leaves
        ]

    def _import(self, module: OwnModule, node: ast.AST) -> None:
        names = self.names[module.path]
        if isinstance(node, ast.Import):
            for each in node.names:
                self._follow(module, each.name, node.lineno)
            names |= bound_names(node)
        elif isinstance(node, ast.ImportFrom):
            base = self._base(module, node)
            if base is None:
                return
            is_shared = base in _NAMESPACES
            imported = not is_shared and self._follow(module, base, node.lineno)
            for each in node.names:
                name = f"{base}.{each.name}"
                names[each.asname or each.name] = name
                if imported or is_shared:
                    self._follow(module, name, node.lineno, is_maybe=imported)
                elif name == _TENSORBOARD:
                    self._follow(module, name, node.lineno)

    def _base(self, module: OwnModule, node: ast.ImportFrom) -> str | None:
        """Return the full name of the module that a `from` import names; None if it cannot work or names itself."""
        if not node.level:
            return node.module or ""
        parts = module.package.split(".") if module.package else []
        if node.level > len(parts):
            if not _sets_package(module.syntax):
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
            self._enter_package(name)
            return True
        if is_maybe or self._locate(name.partition(".")[0], self.roots) is not None:
            return False
        elsewhere = None
        if not self.is_package(name.partition(".")[0]):
            others = (*self.others, module.path.parent)
            # A module does not import itself: what it names so is a package, as in pkg/jax.py with `import jax`.
            places = (each for each in others if self._locate(name, (each,)) != module.path)
            elsewhere = next((each for each in places if self._locate(name, (each,))), None)
        self.found.imports.append(Import(name, module.path, line, elsewhere=elsewhere))
        if elsewhere is None:
            return False
        self._enter_package(name, elsewhere)
        return True

    def _enter_package(self, name: str, *others: Path) -> None:
        """Enter a module and the packages above it, which are imported with it."""
        roots = others or self.roots
        parts = name.split(".") if name else []
        for count in range(1, len(parts) + 1):
            each = ".".join(parts[:count])
            path = self._locate(each, roots)
            if path is None or self._is_entered(path) or not path.is_file():
                continue
            syntax = self.read(path)
            if syntax is not None:
                self._enter(OwnModule(path, each, syntax))

    def _locate(self, name: str, roots: tuple[Path, ...]) -> Path | None:
        """Return the file of a module of the job, or the folder of a package without one."""
        key = (name, roots)
        if key not in self.located:
            self.located[key] = self._find(name, roots)
        return self.located[key]

    def _find(self, name: str, roots: tuple[Path, ...]) -> Path | None:
        included = self.includes.get(name.partition(".")[0])
        folders = roots if included is None else (included.parent,)
        return next(filter(None, (find_own(folder, name) for folder in folders)), None)

    def _look_at(self, module: OwnModule, piece: ast.AST) -> None:
        """Find calls in a statement that certainly runs."""
        for node in walk_certain(piece):
            if not isinstance(node, ast.Call):
                continue
            called = self._full_name(module, node.func)
            if called in _IMPORTERS:
                self._import_called(module, node)
            if called == "get_ipython" and not any(
                each.name == called for each in definitions(module.syntax.tree.body)
            ):
                self.found.notebook.append((module.path, node.lineno))
            self._call(module, called)
            keywords = [each.value for each in node.keywords if each.arg in _CALLED_BY]
            for argument in (*node.args, *keywords):
                if isinstance(argument, ast.Name):
                    self._call(module, self._full_name(module, argument))

    def _import_called(self, module: OwnModule, node: ast.Call) -> None:
        name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if isinstance(name, str) and not name.startswith("."):
            self._follow(module, name, node.lineno)

    def _full_name(self, module: OwnModule, expression: ast.expr) -> str:
        if not isinstance(expression, ast.Name | ast.Attribute):
            return ""
        root, dot, rest = written(expression).partition(".")
        return f"{self.names[module.path].get(root, root)}{dot}{rest}"

    def _call(self, module: OwnModule, name: str) -> None:
        """Enter a function of the job, or the `__init__` of a class."""
        owner, _, base = name.rpartition(".")
        if owner:
            path = self._locate(owner, (*self.roots, *self.others))
            module = self.modules.get(path, module) if path is not None else module
            if path is None or module.path != path:
                return
        for node in definitions(module.syntax.tree.body):
            key = (module.path, id(node))
            if node.name != base or key in self.seen:
                continue
            self.seen.add(key)
            for function in _called_functions(node):
                self.waiting.append((module, function.body, False))


def _called_functions(node: Function | ast.ClassDef) -> list[Function]:
    """Return what a call of a function or class runs: of a class its `__init__`."""
    if not isinstance(node, ast.ClassDef):
        return [node]
    functions = [each for each in node.body if isinstance(each, Function)]
    return [each for each in functions if each.name == "__init__"]


def _sets_package(module: Module) -> bool:
    return any(node.id == "__package__" for node in module.of(ast.Name))
