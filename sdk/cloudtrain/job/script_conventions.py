"""How a job's code starts and how a script trains, read from its source. Nothing is imported.

Each sign is read from the syntax tree of one module. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from cloudtrain.job.argument_kinds import ArgumentKinds, option_kinds, task_argument_kinds
from cloudtrain.job.fresh_starts import find_fresh_start
from cloudtrain.job.opened_files import opened_files
from cloudtrain.job.packages import imported_packages
from cloudtrain_runtime.contract.task_signatures import find_module

if TYPE_CHECKING:
    from cloudtrain.job.spec import JobSpec


_LOCAL_RANK = ("--local_rank", "--local-rank")
"""The option that `python -m torch.distributed.launch` passes: the first before torch 2.0, the second since."""
_DEFINING = ("add_argument", "add_option", "option")
"""Calls that define an option: argparse, optparse, click."""
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
        imports: Packages from elsewhere that it certainly imports, each with the place (`file:line`).
        arguments: Kinds of the script's options, or of the Task's arguments, as far as the source shows them.
        hidden_failures: Where shell scripts hide the failure of a program, each with what to write.
        gathers: Place where a Task's training gathers tensors of all ranks (`file:line:column calls all_gather`), or
            None.
        opens: Paths of files that it opens and that are written out, each with the place (`file:line`).
        fresh_start: How it starts a training that never continues from a checkpoint, and what to pass; or None.
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


def read_conventions(
    directory: Path, script: str, includes: Mapping[str, Path] = MappingProxyType({})
) -> ScriptConventions:
    """Return how a script expects to be started. The script and the modules that it imports are parsed, not executed.

    Args:
        directory: The code folder.
        script: The script's path, relative to the code folder.
        includes: Folders outside of the code folder, by the name under which they are imported.
    """
    modules = _modules(directory, script, includes)
    if not modules:
        return ScriptConventions()
    trees = [tree for _, tree in modules]
    spawn, launcher = (
        next((f"{file}:{line}" for file, tree in modules if (line := find(tree)) is not None), None)
        for find in (_spawn, starts_launcher)
    )
    saves_by_runtime = any(map(uses_checkpoints, trees))
    overwritten = ((file, overwrites_rank(tree)) for file, tree in modules)
    return ScriptConventions(
        local_rank=next(filter(None, map(_local_rank, trees)), None),
        spawn=spawn,
        launcher=launcher,
        own_rank=next(
            (f"{file}:{place[0]} sets {place[1]}" for file, place in overwritten if place), None
        ),
        joins=any(map(joins_ranks, trees)),
        saves=saves_by_runtime or any(map(names_checkpoint_folder, trees)),
        saves_by_runtime=saves_by_runtime,
        reports=any(map(imports_runtime, trees)),
        ml_paths=_ml_paths(modules),
        starts_ranks=spawn is not None or launcher is not None,
        src_import=_src_import(directory, (directory / script).parent, modules, includes),
        imports=tuple(_packages(modules, (directory, (directory / script).parent), includes)),
        arguments=option_kinds(trees),
        fresh_start=None if saves_by_runtime else find_fresh_start(modules),
        opens=tuple(opened_files(modules).items()),
    )


def read_task_conventions(
    directory: Path, module: str, includes: Mapping[str, Path], task: str
) -> ScriptConventions:
    """Return what `read_conventions` finds in a Task's module and its imports, without how a script is started.

    `task` is the name of the Task's class.
    """
    modules = _modules(directory, module, includes)
    packages = _packages(modules, (directory, (directory / module).parent), includes)
    return ScriptConventions(
        ml_paths=_ml_paths(modules),
        imports=tuple(packages),
        arguments=task_argument_kinds(modules[0][1], task) if modules else (),
        gathers=_first_gather(modules, task),
        opens=tuple(opened_files(modules).items()),
    )


def _first_gather(modules: list[tuple[str, ast.Module]], task: str) -> str | None:
    """Return the place and the name of the first collective in training that needs equal shapes, or None."""
    imported = {file: _imported_names(tree) for file, tree in modules}
    for file, definition in _used_definitions(modules, task):
        for call in _training_calls(definition):
            for expression in (
                call.func,
                *call.args,
            ):  # an argument: functools.partial(all_gather, ...)
                if not isinstance(expression, ast.Name | ast.Attribute):
                    continue
                name = _full_name(expression, imported[file])
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
        for node in ast.walk(tree)
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
            named = {renamed.get(name, name) for name in map(_name_in, ast.walk(node))} - seen
            seen |= named
            waiting += sorted(named)


def _name_in(node: ast.AST) -> str:
    """Return the name that an expression refers to; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what a module imports, by the names under which it does."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                found[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def _full_name(expression: ast.expr, imported: Mapping[str, str]) -> str:
    """Return the name that an expression has by a module's imports, such as `torch.distributed.all_gather`."""
    root, _, rest = ast.unparse(expression).partition(".")
    return f"{imported.get(root, '')}.{rest}".rstrip(".")


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


def _packages(
    modules: list[tuple[str, ast.Module]], folders: tuple[Path, ...], includes: Mapping[str, Path]
) -> Iterator[tuple[str, str]]:
    """Yield each imported package that is not one of the job's own modules, with the first place."""
    seen = set(includes)
    for file, tree in modules:
        for name, line in imported_packages(tree):
            if name not in seen:
                seen.add(name)
                if not any(
                    find_module(folder, name) or (folder / name).is_dir() for folder in folders
                ):
                    yield name, f"{file}:{line}"


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
        if any(name == "site.addsitedir" or name.startswith("sys.path") for name in _names(tree)):
            return None
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        for node in imports if found is None else ():
            top = (
                next(_imports(node), "").partition(".")[0] if not getattr(node, "level", 0) else ""
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


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield the names of imported modules, and imported names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.module
            above = f"{node.module}." if node.module else ""
            yield from (f"{above}{alias.name}" for alias in node.names if alias.name != "*")


def _local_rank(tree: ast.Module) -> str | None:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in calls:
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in _DEFINING:
            for argument in call.args:
                if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK:
                    return str(argument.value)
    return None


def _spawn(tree: ast.Module) -> int | None:
    """Return the line in which torch's `spawn` is called, by any name under which the file imports it."""
    imported = _imported_names(tree)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return next(
        (
            call.lineno
            for call in calls
            if _full_name(call.func, imported) == "torch.multiprocessing.spawn"
        ),
        None,
    )


_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})

_FRAMEWORKS = frozenset(
    {
        *(
            "accelerate",
            "lightning",
            "pytorch_lightning",
            "lightning_fabric",
            "transformers",
            "trl",
            "deepspeed",
        ),
        *(
            "horovod",
            "fairscale",
            "fairseq",
            "composer",
            "ignite",
            "torchtitan",
            "torchtune",
            "megatron",
            "nemo",
        ),
        *(
            "colossalai",
            "mmengine",
            "mmcv",
            "detectron2",
            "ray",
            "smdistributed",
            "bagua",
            "monai",
            "keras",
        ),
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
    names = ("/opt/ml/checkpoints", "CLOUDTRAIN_ML_ROOT", "CLOUDTRAIN_CHECKPOINT_DIR")
    return any(name in text for _, text in _texts(tree) for name in names)


def starts_launcher(tree: ast.Module) -> int | None:
    """Return the line that starts ranks: a command such as torchrun in a module that starts processes, or Ray."""
    if (line := _ray_training(tree)) is not None:
        return line
    if not any(_STARTING.match(name) for name in _names(tree)):
        return None
    for node in ast.walk(tree):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        text = " ".join(str(word.value) for word in words if isinstance(word, ast.Constant))
        if _COMMAND.match(text) and (len(words) > 1 or text not in ("deepspeed", "yolo")):
            return getattr(node, "lineno", None)
    return None


def _ray_training(tree: ast.Module) -> int | None:
    """Return the line that creates a trainer or tuner of Ray."""
    imported = _imported_names(tree)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return next(
        (
            call.lineno
            for call in calls
            if isinstance(call.func, ast.Name | ast.Attribute)
            and _RAY_TRAINING.fullmatch(_full_name(call.func, imported))
        ),
        None,
    )


def overwrites_rank(tree: ast.Module) -> tuple[int, str] | None:
    """Return line and name of one of torchrun's variables that a module overwrites.

    A new value that is computed from the old one, or that is set only if the variable is missing, does not count.
    """
    return next(_overwritten(tree, frozenset()), None)


def ml_literals(tree: ast.Module) -> list[int]:
    """Return the lines of texts that begin with `/opt/ml/`."""
    return sorted(
        {line for line, text in _texts(tree) if text == "/opt/ml" or text.startswith("/opt/ml/")}
    )


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the imports of a module, and the dotted names and keywords that it uses."""
    yield from _imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module with their lines, without docstrings and other unused texts."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def _overwritten(node: ast.AST, guarded: frozenset[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.If):
        guarded |= _constants(node.test)
    for name, value, line in _assignments(node):
        if name in _RANK_VARIABLES - guarded - _constants(value):
            yield line, name
    for child in ast.iter_child_nodes(node):
        yield from _overwritten(child, guarded)


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


def _constants(node: ast.AST) -> frozenset[str]:
    return frozenset(str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant))


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
