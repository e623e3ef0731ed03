"""How a job's code starts and how a script trains, read from its source. Nothing is imported.

Each sign is read from the syntax tree of one module. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from cloudtrain import catalog
from cloudtrain.job.argument_kinds import ArgumentKinds, option_kinds, task_argument_kinds
from cloudtrain.job.config_files import contains, hydra_files
from cloudtrain.job.fresh_starts import find_fresh_start
from cloudtrain.job.opened_files import opened_files
from cloudtrain.job.packages import STANDARD_LIBRARY, package_of
from cloudtrain.job.started_code import (
    Import,
    OwnModule,
    StartedCode,
    has_modules,
    sets_other_address,
    trace_start,
)
from cloudtrain.job.syntax_names import full_name, imported_names, last_name, nodes_of
from cloudtrain_runtime.contract.task_signatures import find_module

if TYPE_CHECKING:
    from cloudtrain.job.spec import JobSpec


_LOCAL_RANK = ("--local_rank", "--local-rank")
"""The option that `python -m torch.distributed.launch` passes: the first before torch 2.0, the second since."""
_DEFINING = ("add_argument", "add_option", "option")
"""Calls that define an option: argparse, optparse, click."""
CHECKPOINT_FOLDER = ("/opt/ml/checkpoints", "CLOUDTRAIN_ML_ROOT", "CLOUDTRAIN_CHECKPOINT_DIR")
"""Texts by which code names the folder of checkpoints that are kept."""
_MOST_FILES = 200
_GATHERING = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_tensor"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    }
)
"""Collectives that need tensors of equal shapes on all ranks."""
_EVALUATING = frozenset({"metrics", "after_evaluation", "predict", "analyze", "predict_output"})
"""Methods of a Task that are called in evaluations only."""


@dataclass(frozen=True)
class ScriptConventions:
    """What a script expects of its launcher.

    Attributes:
        local_rank: Option for the local rank, as the script spells it, or None.
        spawn: Place where it starts the ranks of its host itself (`file:line`), or None.
        launcher: Place where it starts torchrun, Ray or another launcher (`file:line`), or None.
        own_rank: Place where it sets one of torchrun's variables (`file:line sets RANK`), or None.
        joins: Whether it has a sign of torch.distributed or of a framework that uses it.
        saves: Whether it has a sign of checkpoints in a folder that is kept.
        saves_by_runtime: Whether it saves by the runtime, or attaches a trainer to it.
        reports: Whether it imports the runtime, which reports progress.
        ml_paths: Places that name a path below /opt/ml (`file:line`).
        starts_ranks: Whether it starts its own ranks, by `spawn` or a launcher.
        src_import: Place where it imports a package of the folder `src`, which is not on the path
            (`file:line imports package`), or None.
        imports: Modules of packages that it certainly imports when it starts, each with the first place (`file:line`).
        arguments: Kinds of the script's options, or of the Task's arguments, as far as the source shows them.
        hidden_failures: Where shell scripts hide the failure of a program, each with what to write.
        gathers: Place where a Task's training gathers tensors of all ranks (`file:line:column calls all_gather`), or
            None.
        opens: Paths of files that it opens and that are written out, each with the place (`file:line`).
        fresh_start: How it starts a training that never continues from a checkpoint, and what to pass; or None.
        computed_import: Place where it imports a module by a computed name (`file:line`), or None.
        path_imports: Where it certainly imports a module of the code folder that is not on the import path
            (`file:line imports module`), each with the folder that has it.
        namesakes: Modules of packages that it imports and that a folder of the code has, too, each with the folder,
            which is not on the import path.
        start_faults: Where it certainly fails at its start, each with what to write.
        names_hosts: Place where it makes an address from the names of hosts (`file:line`), or None.
        rpc: Place where it joins the ranks by torch.distributed.rpc (`file:line`), or None.
        rpc_rank: Place where it gives RPC a rank that is not from the launcher (`file:line`), or None.
        splits_batches: Whether one process may use several GPUs, by torch.nn.DataParallel.
        expands_variables: Whether it has a sign of replacing variables such as `$NAME` in text itself.
        own_address: Place where it certainly sets MASTER_ADDR to its own host (`file:line`), and nothing else sets or
            replaces it; or None.
    """

    local_rank: str | None = None
    spawn: str | None = None
    launcher: str | None = None
    own_rank: str | None = None
    joins: bool = True
    saves: bool = True
    saves_by_runtime: bool = False
    reports: bool = True
    ml_paths: tuple[str, ...] = ()
    starts_ranks: bool = False
    src_import: str | None = None
    imports: tuple[tuple[str, str], ...] = ()
    arguments: ArgumentKinds = ()
    hidden_failures: tuple[str, ...] = ()
    gathers: str | None = None
    opens: tuple[tuple[str, str], ...] = ()
    fresh_start: str | None = None
    computed_import: str | None = None
    path_imports: tuple[tuple[str, str], ...] = ()
    namesakes: tuple[tuple[str, str], ...] = ()
    start_faults: tuple[str, ...] = ()
    names_hosts: str | None = None
    rpc: str | None = None
    rpc_rank: str | None = None
    splits_batches: bool = False
    expands_variables: bool = False
    own_address: str | None = None


def read_conventions(
    directory: Path,
    script: str,
    includes: Mapping[str, Path] = MappingProxyType({}),
    *,
    module: str | None = None,
    search: tuple[str, ...] = (),
) -> ScriptConventions:
    """Return how a script expects to be started. The script and the modules that it imports are parsed, not executed.

    Args:
        directory: The code folder.
        script: The script's path, relative to the code folder.
        includes: Folders outside of the code folder, by the name under which they are imported.
        module: Name of the module that it is started as; None for a script.
        search: Folders of PYTHONPATH, relative to the code folder.
    """
    modules = _modules(directory, script, includes)
    if not modules:
        return ScriptConventions()
    trees = [tree for _, tree in modules]
    code = _Code(directory, directory / script, modules, includes, search)
    started = code.trace(module or "")
    spawn, launcher = (
        next((f"{file}:{line}" for file, tree in modules if (line := find(tree)) is not None), None)
        for find in (_spawn, starts_launcher)
    )
    launcher = launcher or next((code.place(*each) for each in started.launchers), None)
    saves_by_runtime = any(map(uses_checkpoints, trees))
    overwritten = ((file, overwrites_rank(tree)) for file, tree in modules)
    rpc = _first(modules, starts_rpc)
    is_of_launcher = any(map(names_launcher_rank, trees))
    return ScriptConventions(
        local_rank=next(filter(None, map(_local_rank, trees)), None),
        spawn=spawn,
        launcher=launcher,
        own_rank=next(
            (f"{file}:{place[0]} sets {place[1]}" for file, place in overwritten if place), None
        ),
        joins=any(map(joins_ranks, trees)) or code.may_join_elsewhere(),
        saves=saves_by_runtime
        or any(map(names_checkpoint_folder, trees))
        or contains(hydra_files(directory, modules), CHECKPOINT_FOLDER),
        saves_by_runtime=saves_by_runtime,
        reports=any(map(imports_runtime, trees)),
        ml_paths=_ml_paths(modules),
        starts_ranks=spawn is not None or launcher is not None,
        src_import=_src_import(directory, (directory / script).parent, modules, includes),
        imports=code.packages(started),
        arguments=option_kinds(trees),
        fresh_start=None if saves_by_runtime else find_fresh_start(modules),
        opens=tuple(opened_files(modules).items()),
        computed_import=code.first_computed(started),
        path_imports=tuple(code.path_imports(started)),
        namesakes=code.namesakes(started),
        start_faults=tuple(code.start_faults(started, script, module)),
        names_hosts=_first(modules, names_hosts),
        rpc=rpc,
        rpc_rank=None if is_of_launcher else _first(modules, gives_rpc_a_rank),
        splits_batches=any(map(splits_batches, trees)),
        expands_variables=any(map(expands_variables, trees)),
        own_address=None if any(map(has_other_address, trees)) else code.first_own_address(started),
    )


def read_task_conventions(
    directory: Path, module: str, includes: Mapping[str, Path], task: str
) -> ScriptConventions:
    """Return what `read_conventions` finds in a Task's module and its imports, without how a script is started.

    `task` is the name of the Task's class.
    """
    modules = _modules(directory, module, includes)
    if not modules:
        return ScriptConventions()
    code = _Code(directory, directory / module, modules, includes)
    started = code.trace(_module_name(directory, directory / module, includes), task)
    return ScriptConventions(
        ml_paths=_ml_paths(modules),
        imports=code.packages(started),
        arguments=task_argument_kinds(modules[0][1], task),
        gathers=_first_gather(modules, task),
        opens=tuple(opened_files(modules).items()),
        computed_import=code.first_computed(started),
        path_imports=tuple(code.path_imports(started)),
        namesakes=code.namesakes(started),
        start_faults=tuple(code.start_faults(started, module, task)),
    )


_Find = Callable[[ast.Module], int | None]
"""Returns a line of a module, or None."""


def _first(modules: Iterable[tuple[str, ast.Module]], find: _Find) -> str | None:
    return next(
        (f"{file}:{line}" for file, tree in modules if (line := find(tree)) is not None), None
    )


def _module_name(directory: Path, path: Path, includes: Mapping[str, Path]) -> str:
    """Return the name under which a file of the code folder or an include is imported."""
    roots = [directory, *(folder.parent for folder in includes.values())]
    root = next((each for each in roots if path.is_relative_to(each)), path.parent)
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class _Code:
    """The code of a job: its modules, and where Python looks for others.

    Args:
        directory: The code folder.
        entry: The file that is started or imported first.
        modules: Names of files and their syntax trees, the entry first.
        includes: Folders outside of the code folder, by the name under which they are imported.
        search: Folders of PYTHONPATH, relative to the code folder.
    """

    def __init__(
        self,
        directory: Path,
        entry: Path,
        modules: list[tuple[str, ast.Module]],
        includes: Mapping[str, Path],
        search: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.entry = Path(os.path.normpath(entry))
        self.modules = modules
        self.includes = includes
        self.search = tuple(Path(os.path.normpath(directory / each)) for each in search)
        self.trees = {Path(os.path.normpath(directory / name)): tree for name, tree in modules}
        self.changes_path = any(changes_path(tree) for _, tree in modules)

    def trace(self, name: str, task: str = "") -> StartedCode:
        """Return what the code certainly does when it starts, as the module of this name or as a script."""
        first = self.directory if name else self.entry.parent
        above = [each for each in self.entry.parents if each.is_relative_to(self.directory)]
        others = [self.directory, self.directory / "src", *above]
        entry = OwnModule(self.entry, name, self.modules[0][1])
        roots = (first, *self.search)
        return trace_start(
            entry, roots, others, self.includes, self._tree, self._is_package, task=task
        )

    def _is_package(self, module: str) -> bool:
        return may_be_installed(module, self.directory)

    def _tree(self, path: Path) -> ast.Module | None:
        return self.trees[path] if path in self.trees else _parse(path)

    def packages(self, started: StartedCode) -> tuple[tuple[str, str], ...]:
        """Return the modules that are neither the job's own nor Python's, each with the first place."""
        found: dict[str, str] = {}
        for each in started.imports:
            name = package_of(each)
            if name not in found and not self._is_own(each, name):
                found[name] = self.place(each.path, each.line)
        return tuple(found.items())

    def _is_own(self, each: Import, name: str) -> bool:
        top = name.partition(".")[0]
        if each.own is not None or (each.elsewhere is not None and not each.is_package):
            return True
        if top in STANDARD_LIBRARY or top in self.includes or top in ("cloudtrain_runtime", ""):
            return True
        return (self.changes_path or bool(self.search)) and _is_below(self.directory, top)

    def first_computed(self, started: StartedCode) -> str | None:
        """Return the place of the first import of a computed name, or None."""
        return next((self.place(*each) for each in started.computed), None)

    def first_own_address(self, started: StartedCode) -> str | None:
        """Return the place that sets MASTER_ADDR to this host, or None."""
        return next((self.place(*each) for each in started.own_address), None)

    def namesakes(self, started: StartedCode) -> tuple[tuple[str, str], ...]:
        """Return the modules of packages that a folder of the job has, too, with the folder, which is not on the path."""
        found = {}
        for each in started.imports:
            if each.is_package and each.elsewhere is not None:
                found[package_of(each)] = os.path.relpath(each.elsewhere, self.directory)
        return tuple(found.items())

    def path_imports(self, started: StartedCode) -> Iterator[tuple[str, str]]:
        """Yield imports of the job's own modules that are not on the import path, each with the folder to add."""
        if self.changes_path:
            return
        seen = {"src"}
        for each in started.imports:
            if each.elsewhere is None or each.is_package:
                continue
            folder = os.path.relpath(each.elsewhere, self.directory)
            if folder in seen or folder.startswith(".."):
                continue
            seen.add(folder)
            yield f"{self.place(each.path, each.line)} imports {each.top}", folder

    def start_faults(self, started: StartedCode, script: str, module: str | None) -> Iterator[str]:
        """Yield why the code cannot start, each with what to write."""
        for path, line, text in started.relative[:1]:
            yield self._describe_relative(path, line, text, script, module)
        for path, line in started.notebook[:1]:
            yield (
                f"{self.place(path, line)} calls get_ipython(), which only notebooks have, so the code cannot start: "
                "remove the lines with it, which the export of a notebook made from its magic commands (%, !)"
            )

    def _describe_relative(
        self, path: Path, line: int, text: str, script: str, module: str | None
    ) -> str:
        what = f"{self.place(path, line)}: {text} is relative to a package, and Python"
        if path != self.entry or module is not None:
            return f"{what} imports this module without one: use the absolute name in place of the dots"
        name = script.removesuffix(".py").replace("/", ".")
        level = len(text.removeprefix("from ")) - len(text.removeprefix("from ").lstrip("."))
        if level <= name.count(".") and all(map(str.isidentifier, name.split("."))):
            return f"{what} starts a script without one, so it cannot start: in place of code.script use code.module: {name}"
        return f"{what} starts a script without one, so it cannot start: use the absolute name in place of the dots"

    def place(self, path: Path, line: int) -> str:
        """Return `file:line`, relative to the code folder."""
        return f"{os.path.relpath(path, self.directory)}:{line}"

    def may_join_elsewhere(self) -> bool:
        """Return whether code that is not here may join the ranks: of an unknown package, or of a computed name."""
        for _, tree in self.modules:
            if any(name in _COMPUTED for name in _names(tree)):
                return True
            for name in _absolute_imports(tree):
                top = name.partition(".")[0]
                if top in STANDARD_LIBRARY or top == "cloudtrain_runtime":
                    continue
                if not any(map(catalog.is_known_package, catalog.packages_of(top))) and not (
                    _is_below(self.directory, top) or top in self.includes
                ):
                    return True
        return False


_PATH_CHANGES = frozenset(
    {
        *("autorootcwd", "pyrootutils.set_root", "pyrootutils.setup_root", "rootutils.set_root"),
        *("rootutils.setup_root", "site.addsitedir"),
    }
)
"""Names of what puts a folder on the import path. Templates of Lightning and Hydra projects use rootutils."""
_COMPUTED = frozenset(
    {"importlib.import_module", "import_module", "__import__", "hydra.utils.instantiate"}
)
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
_MOST_FOLDERS = 2000


def _is_below(directory: Path, name: str) -> bool:
    """Return whether a code folder has a module or package of this name anywhere, outside of virtual environments."""
    for count, (path, folders, files) in enumerate(os.walk(directory)):
        if count > _MOST_FOLDERS:
            break
        if f"{name}.py" in files or (name in folders and has_modules(Path(path) / name)):
            return True
        folders[:] = [
            each
            for each in folders
            if not each.startswith(".")
            and each not in _SKIPPED_FOLDERS
            and not Path(path, each, "pyvenv.cfg").exists()
        ]
    return False


def may_be_installed(module: str, directory: Path) -> bool:
    """Return whether a package that is installed here, or that is widely used, has a module of this name."""
    top = module.partition(".")[0]
    if top in STANDARD_LIBRARY or any(map(catalog.is_known_package, catalog.packages_of(module))):
        return True
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    return any(
        each is not None and not Path(each).resolve().is_relative_to(directory.resolve())
        for each in places
    )


def changes_path(tree: ast.Module) -> bool:
    """Return whether a module changes the import path."""
    return any(name in _PATH_CHANGES or name.startswith("sys.path") for name in _names(tree))


def _absolute_imports(tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _first_gather(modules: list[tuple[str, ast.Module]], task: str) -> str | None:
    """Return the place and the name of the first collective in training that needs equal shapes, or None."""
    imported = {file: imported_names(tree) for file, tree in modules}
    for file, definition in _used_definitions(modules, task):
        for call in _training_calls(definition):
            for expression in (
                call.func,
                *call.args,
            ):  # an argument: functools.partial(all_gather, ...)
                if not isinstance(expression, ast.Name | ast.Attribute):
                    continue
                name = full_name(expression, imported[file])
                if name.startswith("torch.distributed.") and name.rpartition(".")[2] in _GATHERING:
                    at = f"{file}:{call.lineno}:{call.col_offset + 1}"
                    return f"{at} calls {name.rpartition('.')[2]}"
    return None


def _used_definitions(
    modules: list[tuple[str, ast.Module]], task: str
) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions and classes that a Task uses, itself first, by the names that occur in them."""
    definitions: dict[str, list[tuple[str, ast.stmt]]] = {}
    renamed = {
        each.asname: each.name
        for _, tree in modules
        for node in nodes_of(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.asname
    }
    for file, tree in modules:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                definitions.setdefault(node.name, []).append((file, node))
    seen, waiting = {task}, [task]
    while waiting:
        for file, node in definitions.get(waiting.pop(), ()):
            yield file, node
            named = {renamed.get(name, name) for name in map(last_name, ast.walk(node))} - seen
            seen |= named
            waiting += sorted(named)


def _training_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls below a node that are not in a method for evaluations alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name in _EVALUATING:
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _training_calls(child)


def _ml_paths(modules: Iterable[tuple[str, ast.Module]]) -> tuple[str, ...]:
    return tuple(f"{file}:{line}" for file, tree in modules for line in ml_literals(tree))


def _modules(
    directory: Path, script: str, includes: Mapping[str, Path]
) -> list[tuple[str, ast.Module]]:
    """Return the script and the modules that it imports with their paths in the code folder, the nearest first."""
    found = _walk_imports(directory, Path(os.path.normpath(directory / script)), includes)
    return [(os.path.relpath(path, directory), tree) for path, tree in found]


def _walk_imports(
    directory: Path, script: Path, includes: Mapping[str, Path]
) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the script and the modules of the code folder and its includes that it imports, the nearest first."""
    waiting, seen = [script], {script}
    while waiting and len(seen) <= _MOST_FILES:
        path = waiting.pop(0)
        tree = _parse(path)
        if tree is None:
            continue
        yield path, tree
        for name in _imports(tree):
            included = includes.get(name.partition(".")[0])
            for folder in {
                script.parent,
                directory,
                path.parent,
                *([included.parent] if included else []),
            }:
                found = find_module(folder, name)
                if found is not None and found not in seen:
                    seen.add(found)
                    waiting.append(found)


def _src_import(
    directory: Path,
    path: Path,
    modules: Iterable[tuple[str, ast.Module]],
    includes: Mapping[str, Path],
) -> str | None:
    """Return the first import of a package of `src` that is not in the folder `path`.

    Return None if there is none, or if a module changes the import path.
    """
    found = None
    for file, tree in modules:
        if changes_path(tree):
            return None
        imports = (node for node in nodes_of(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        for node in imports if found is None else ():
            top = (
                next(_names_of_import(node), "").partition(".")[0]
                if not getattr(node, "level", 0)
                else ""
            )
            is_found = (
                top in includes or (path / top).is_dir() or find_module(path, top) is not None
            )
            if top and not is_found and is_in_src(directory, top):
                found = f"{file}:{node.lineno} imports {top}"
    return found


def _parse(path: Path) -> ast.Module | None:
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the script itself was checked before; another module may be for another version of Python


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names of imported modules, and imported names that may be modules."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _names_of_import(node)


def _names_of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    if node.module:
        yield node.module
    above = f"{node.module}." if node.module else ""
    yield from (f"{above}{alias.name}" for alias in node.names if alias.name != "*")


def _local_rank(tree: ast.Module) -> str | None:
    calls = (node for node in nodes_of(tree) if isinstance(node, ast.Call))
    for call in calls:
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in _DEFINING:
            for argument in call.args:
                if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK:
                    return str(argument.value)
    return None


_SPAWNING = frozenset(
    {
        *("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"),
        *("torch.multiprocessing.spawn.spawn", "torch.multiprocessing.spawn.start_processes"),
        *("torch.multiprocessing.SpawnContext", "torch.multiprocessing.ProcessContext"),
        *("torch.multiprocessing.spawn.SpawnContext", "torch.multiprocessing.spawn.ProcessContext"),
        *("detectron2.engine.launch", "detectron2.engine.launch.launch"),
    }
)
"""Functions and classes that start processes in the way of `torch.multiprocessing.spawn`, or wait for them."""


def _spawn(tree: ast.Module) -> int | None:
    """Return the line in which processes are started as torch's `spawn` does, by any name of the import."""
    imported = imported_names(tree)
    calls = (node for node in nodes_of(tree) if isinstance(node, ast.Call))
    lines = (call.lineno for call in calls if full_name(call.func, imported) in _SPAWNING)
    line = next(lines, None)
    if line is None:
        return None
    other = _lines_for_other_starts(tree)
    return next((each for each in (line, *lines) if each not in other), None)


_ASKS_FOR_LAUNCHER = re.compile(r"['\"](?:LOCAL_)?RANK['\"]|(?i:no_?spawn|torch_?elastic|torchrun)")
"""Parts of conditions that ask whether a launcher has started this rank."""


def _lines_for_other_starts(tree: ast.Module) -> set[int]:
    """Return the lines below an `if` that asks whether a launcher has started this rank."""
    lines: set[int] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.If) and _ASKS_FOR_LAUNCHER.search(ast.unparse(node.test)):
            lines.update(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return lines


_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_RANK_CALLS = frozenset({"get_rank", "get_world_size", "get_local_rank", "get_node_local_rank"})
_OTHER_WAY = re.compile(
    r"(?i)slurm|(?<![a-z])mpi|openmpi|ompi_|pmi_|pmix|lsf|lsb_|pbs|jsm_|mv2_|sge_|azureml|az_batch|kubernetes|k8s|launcher|notebook|colab"
    r"|standalone|single|debug|(?-i:(?<![A-Za-z])ray_|(?<![A-Z])Ray(?=[A-Z_]|$))"
)
"""Parts of names and texts by which code chooses another way to start ranks than torchrun."""
_HOST_NAMES = re.compile(
    r"^algo-\d|^SM_(?:HOSTS|CURRENT_HOST|RESOURCE_CONFIG)$|resourceconfig\.json$"
)
_ADDRESS = re.compile(r"^MASTER_ADDR$|^tcp://")
_SM_ROLES = re.compile(
    r"^(?:RANK|SM_HOSTS|SM_CURRENT_HOST|GROUP_RANK|NODE_RANK|SLURM_PROCID|LOCAL_RANK)$"
)

_FRAMEWORKS = frozenset(
    {
        *("accelerate", "axolotl", "bagua", "catalyst", "colossalai", "composer", "deepspeed"),
        *("detectron2", "espnet2", "fairscale", "fairseq", "fastai", "fastreid", "fvcore"),
        *("horovod", "ignite", "keras", "lightly_train", "lightning", "lightning_fabric"),
        *("llamafactory", "megatron", "mmcv", "mmdet", "mmengine", "mmpretrain", "mmseg"),
        *("monai", "nanotron", "nemo", "nemo_run", "neuronx_distributed", "open_clip_train"),
        *("openrlhf", "pytorch_lightning", "ray", "sentence_transformers", "smdistributed"),
        *("speechbrain", "super_gradients", "swift", "torch_xla", "torchrec", "torchtitan"),
        *("torchtune", "transformers", "trl", "ultralytics", "unsloth", "verl", "vissl"),
        "xtuner",
    }
)
"""Packages that join ranks for a script that uses them."""

_JOINING = re.compile(r"(?i)distributed|ddp|fsdp|init_process_group|init_device_mesh|^dist$")
"""Parts of names by which a script, or a package that it uses, joins ranks."""

_COMMAND = re.compile(
    r"(?:\S*/)?(?:torchrun|deepspeed|yolo|accelerate\s+launch|ray\s+(?:start|job\s+submit)|python\S*\s+(?:-\S+\s+)*-m\s+torch\.distributed\.(?:run|launch))"
    r"(?:\s|$)|torch\.distributed\.(?:run|launch)$"
)
_RAY_TRAINING = re.compile(r"ray\.train\.(?:\w+\.)*\w*Trainer|ray\.tune\.(?:Tuner|run)")
"""Names that start workers of Ray, each of which is a rank."""

_STARTING = re.compile(r"subprocess|os\.(?:system|popen|exec\w+|spawn\w+|posix_spawn\w*)")


def joins_ranks(tree: ast.Module) -> bool:
    """Return whether a module names torch.distributed, or a framework that joins ranks."""
    return any(
        part in _FRAMEWORKS or _JOINING.search(part)
        for name in _names(tree)
        for part in name.split(".")
    )


def imports_runtime(tree: ast.Module) -> bool:
    """Return whether a module imports the runtime."""
    return any(name.partition(".")[0] == "cloudtrain_runtime" for name in _imports(tree))


def uses_checkpoints(tree: ast.Module) -> bool:
    """Return whether a module uses the runtime's checkpoints, or attaches a trainer to it."""
    parts = {part for name in _names(tree) for part in name.split(".")}
    return imports_runtime(tree) and bool(parts & {"checkpoint", "integrations"})


def names_checkpoint_folder(tree: ast.Module) -> bool:
    """Return whether a module contains the path of the checkpoint folder."""
    return any(name in text for _, text in _texts(tree) for name in CHECKPOINT_FOLDER)


def starts_launcher(tree: ast.Module) -> int | None:
    """Return the line that starts ranks: a command such as torchrun in a module that starts processes, or Ray."""
    if (line := _ray_training(tree)) is not None:
        return line
    if not any(_STARTING.match(name) for name in _names(tree)):
        return None
    for node in nodes_of(tree):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        text = " ".join(str(word.value) for word in words if isinstance(word, ast.Constant))
        is_launcher = _COMMAND.match(text) and (len(words) > 1 or text not in ("deepspeed", "yolo"))
        line = getattr(node, "lineno", None)
        if is_launcher and line not in _lines_for_other_starts(tree):
            return line
    return None


def _ray_training(tree: ast.Module) -> int | None:
    """Return the line that creates a trainer or tuner of Ray."""
    imported = imported_names(tree)
    calls = (node for node in nodes_of(tree) if isinstance(node, ast.Call))
    return next(
        (
            call.lineno
            for call in calls
            if isinstance(call.func, ast.Name | ast.Attribute)
            and _RAY_TRAINING.fullmatch(full_name(call.func, imported))
        ),
        None,
    )


def overwrites_rank(tree: ast.Module) -> tuple[int, str] | None:
    """Return line and name of one of torchrun's variables that a module overwrites.

    A new value that is computed from the old one does not count, nor one that is set only where torchrun has set none,
    or where something else has started the ranks, such as Slurm.
    """
    return next(_overwritten(tree.body, _Ways(tree)), None)


def names_hosts(tree: ast.Module) -> int | None:
    """Return the line in which a module names hosts of SageMaker, if it also sets the address of the first rank."""
    texts = list(_texts(tree))
    sets_address = any(_ADDRESS.search(text) for _, text in texts)
    return next((line for line, text in texts if sets_address and _HOST_NAMES.search(text)), None)


def starts_rpc(tree: ast.Module) -> int | None:
    """Return the line in which a module joins the ranks by torch.distributed.rpc, or None."""
    return next((call.lineno for call in _rpc_calls(tree)), None)


def gives_rpc_a_rank(tree: ast.Module) -> int | None:
    """Return the line in which a module joins RPC with a rank of its own, or None."""
    return next(
        (
            call.lineno
            for call in _rpc_calls(tree)
            if any(each.arg == "rank" for each in call.keywords)
        ),
        None,
    )


def splits_batches(tree: ast.Module) -> bool:
    """Return whether a module wraps a model in torch.nn.DataParallel, which uses all GPUs in one process."""
    imported = imported_names(tree)
    calls = (node for node in nodes_of(tree) if isinstance(node, ast.Call))
    return any(
        name.startswith("torch.nn.") and name.endswith(".DataParallel")
        for name in (full_name(call.func, imported) for call in calls)
    )


def has_other_address(tree: ast.Module) -> bool:
    """Return whether a module sets MASTER_ADDR to another value, or lets the ranks meet by `init_method` or a store."""
    for node in nodes_of(tree):
        if sets_other_address(node):
            return True
        if isinstance(node, ast.keyword) and node.arg in ("init_method", "store"):
            is_default = isinstance(node.value, ast.Constant) and node.value.value == "env://"
            if not is_default:
                return True
    return False


def expands_variables(tree: ast.Module) -> bool:
    """Return whether a module may replace variables in text: os.path.expandvars, string.Template, or a shell."""
    parts = {part for name in _names(tree) for part in name.split(".")}
    return bool(parts & {"expandvars", "Template", "EnvYAML"}) or any(
        node.arg == "shell" for node in nodes_of(tree) if isinstance(node, ast.keyword)
    )


def names_launcher_rank(tree: ast.Module) -> bool:
    """Return whether a module names a variable by which a launcher says which rank this is."""
    return any(_SM_ROLES.search(text) for _, text in _texts(tree)) or _local_rank(tree) is not None


def _rpc_calls(tree: ast.Module) -> Iterator[ast.Call]:
    imported = imported_names(tree)
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = full_name(node.func, imported)
            if name in ("torch.distributed.rpc.init_rpc", "torch.distributed.rpc.api.init_rpc"):
                yield node


def ml_literals(tree: ast.Module) -> list[int]:
    """Return the lines of texts that begin with `/opt/ml/`."""
    return sorted(
        {line for line, text in _texts(tree) if text == "/opt/ml" or text.startswith("/opt/ml/")}
    )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the imports of a module, and the dotted names and keywords that it uses."""
    yield from _imports(tree)
    for node in nodes_of(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module with their lines, without docstrings and other unused texts."""
    alone = {id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Expr)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def _overwritten(body: list[ast.stmt], ways: _Ways) -> Iterator[tuple[int, str]]:
    """Yield the places that overwrite torchrun's variables in statements that run where torchrun starts the ranks."""
    for node in body:
        yield from _overwritten_in(node, ways)
        if isinstance(node, ast.If) and ways.decide(node.test) and _leaves(node.body):
            # What follows `if "RANK" in os.environ: return` is for another way to start.
            return


def _overwritten_in(node: ast.stmt, ways: _Ways) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
        _OTHER_WAY.search(node.name) or _is_of_ray(node)
    ):
        return
    if isinstance(node, ast.If) and ways.decide(node.test):
        return
    for name, value, line in _assignments(node.value if isinstance(node, ast.Expr) else node):
        if name in _RANK_VARIABLES and not ways.derives(value):
            yield line, name
    for body in _bodies(node, ways):
        yield from _overwritten(body, ways)


def _is_of_ray(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Return whether Ray runs a function or class in a process of its own, which is no rank of torchrun."""
    return any(
        re.match(r"(?:ray\.)?remote\b", ast.unparse(each)) is not None
        for each in node.decorator_list
    )


def _bodies(node: ast.stmt, ways: _Ways) -> Iterator[list[ast.stmt]]:
    """Yield the parts of a statement, without handlers and cases that are for another way to start."""
    for field in ("body", "orelse", "finalbody"):
        yield getattr(node, field, [])
    if isinstance(node, ast.Try | ast.TryStar) and not any(map(ways.decide, node.body)):
        yield from (each.body for each in node.handlers)
    if isinstance(node, ast.Match) and not ways.decide(node.subject):
        yield from (each.body for each in node.cases if not ways.decide(each.pattern))


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


class _Ways:
    """Names of a module that depend on torchrun's variables, or on another way to start the ranks.

    Args:
        tree: The module.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._of_torchrun: set[str] = set()
        self._of_others: set[str] = set()
        for node in nodes_of(tree):
            if (
                isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
                and node.value is not None
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {
                    ast.unparse(each) for each in targets if not isinstance(each, ast.Subscript)
                }
                if _mentions_rank(node.value):
                    self._of_torchrun |= names
                elif _OTHER_WAY.search(ast.unparse(node.value)):
                    self._of_others |= names

    def derives(self, value: ast.AST) -> bool:
        """Return whether a value is computed from torchrun's variables."""
        return _mentions_rank(value) or not self._of_torchrun.isdisjoint(_names_below(value))

    def decide(self, node: ast.AST) -> bool:
        """Return whether an expression or statement asks how the ranks were started."""
        if self.derives(node) or _OTHER_WAY.search(ast.unparse(node)):
            return True
        return not self._of_others.isdisjoint(_names_below(node))


def _mentions_rank(node: ast.AST) -> bool:
    constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return not _RANK_VARIABLES.isdisjoint(filter(_is_text, constants)) or any(
        name.rpartition(".")[2] in _RANK_CALLS for name in _names_below(node)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _names_below(node: ast.AST) -> set[str]:
    return {
        ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)
    }


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.AST, int]]:
    """Yield name, value and line of each environment variable that a statement sets."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            is_environment = isinstance(target, ast.Subscript) and ast.unparse(
                target.value
            ).endswith("environ")
            if (
                is_environment
                and isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Constant)
            ):
                yield str(target.slice.value), node.value, node.lineno
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.update"):
        yield from (
            (keyword.arg, keyword.value, node.lineno) for keyword in node.keywords if keyword.arg
        )
        for mapping in node.args:
            if isinstance(mapping, ast.Dict):
                pairs = zip(mapping.keys, mapping.values, strict=True)
                yield from (
                    (str(k.value), v, node.lineno) for k, v in pairs if isinstance(k, ast.Constant)
                )


def entry_file(spec: JobSpec) -> Path | None:
    """Return the file of the code folder or an include that is started or imported first; None if there is none."""
    code = spec.code
    if code.script is not None:
        return spec.code_directory / code.script
    if code.module is not None:
        return runnable_file(spec.import_root(code.module), code.module)
    return (
        find_module(spec.import_root(code.task), code.task.partition(":")[0])
        if code.task is not None
        else None
    )


def runnable_file(directory: Path, module: str) -> Path | None:
    """Return the file that `python -m module` would run, or None: of a package its `__main__.py`."""
    found = find_module(directory, module)
    main = directory / module.replace(".", "/") / "__main__.py"
    if found is not None and found.name != "__init__.py":
        return found
    return main if main.is_file() else None


def is_in_src(directory: Path, package: str) -> bool:
    """Return whether a package is in the folder `src` of a code folder, and not in the code folder itself."""
    name = package.partition(":")[0]
    found = find_module(directory / "src", name) is not None or (directory / "src" / name).is_dir()
    return found and not (directory / name).exists()
