"""How a script expects to be started, read from its source. The script is not imported."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.job import script_analysis
from cloudtrain_runtime.contract.task_signatures import find_module

_LOCAL_RANK = ("--local_rank", "--local-rank")
"""The option that `python -m torch.distributed.launch` passes: the first before torch 2.0, the second since."""
_DEFINING = ("add_argument", "add_option", "option")
"""Calls that define an option: argparse, optparse, click."""
_MOST_FILES = 200


@dataclass(frozen=True)
class ScriptConventions:
    """What a script expects of its launcher.

    Attributes:
        local_rank: Option for the local rank, as the script spells it, or None.
        spawn: Place where it starts the ranks of its host itself (`file:line`), or None.
        launcher: Place where it starts torchrun, `accelerate launch` or deepspeed (`file:line`), or None.
        own_rank: Place where it sets one of torchrun's variables (`file:line sets RANK`), or None.
        joins: Whether it has a sign of torch.distributed or of a framework that uses it.
        saves: Whether it has a sign of checkpoints in a folder that is kept.
        ml_paths: Places that name a path below /opt/ml (`file:line`).
        starts_ranks: Whether it starts its own ranks, by `spawn` or a launcher.
    """

    local_rank: str | None = None
    spawn: str | None = None
    launcher: str | None = None
    own_rank: str | None = None
    joins: bool = True
    saves: bool = True
    ml_paths: tuple[str, ...] = ()
    starts_ranks: bool = False


def read_conventions(directory: Path, script: str) -> ScriptConventions:
    """Return how a script expects to be started.

    The script and the modules of the code folder that it imports are parsed, not executed.

    Args:
        directory: The code folder.
        script: The script's path below it.
    """
    local_rank = spawn = launcher = own_rank = None
    is_read = joins = saves = False
    ml_paths: list[str] = []
    for path, tree in _modules(directory, directory / script):
        is_read = True
        file = path.relative_to(directory).as_posix()
        local_rank = local_rank or _local_rank(tree)
        spawn = spawn or _place(file, _spawn(tree))
        launcher = launcher or _place(file, script_analysis.starts_launcher(tree))
        overwritten = script_analysis.overwrites_rank(tree)
        own_rank = own_rank or (overwritten and f"{file}:{overwritten[0]} sets {overwritten[1]}")
        joins = joins or script_analysis.joins_ranks(tree)
        saves = saves or script_analysis.saves_checkpoints(tree)
        ml_paths += [f"{file}:{line}" for line in script_analysis.ml_literals(tree)]
    if not is_read:
        return ScriptConventions()
    return ScriptConventions(
        local_rank,
        spawn,
        launcher,
        own_rank,
        joins=joins,
        saves=saves,
        ml_paths=tuple(ml_paths),
        starts_ranks=spawn is not None or launcher is not None,
    )


def _place(file: str, line: int | None) -> str | None:
    return None if line is None else f"{file}:{line}"


def _modules(directory: Path, script: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the script and the modules of the code folder that it imports, the nearest first."""
    waiting, seen = [script], {script}
    while waiting and len(seen) <= _MOST_FILES:
        path = waiting.pop(0)
        tree = _parse(path)
        if tree is None:
            continue
        yield path, tree
        for name in _imported(tree):
            for folder in {script.parent, directory, path.parent}:
                found = find_module(folder, name)
                if found is not None and found not in seen:
                    seen.add(found)
                    waiting.append(found)


def _parse(path: Path) -> ast.Module | None:
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the script itself was checked before; another module may be for another version of Python


def _imported(tree: ast.Module) -> Iterator[str]:
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
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) in _DEFINING:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK:
                    return str(argument.value)
    return None


def _spawn(tree: ast.Module) -> int | None:
    """Return the line in which torch's `spawn` is called."""
    names = {f"{name}.spawn" for name in _aliases(tree)} | set(_spawns(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            return node.lineno
    return None


def _aliases(tree: ast.Module) -> Iterator[str]:
    """Yield the names of `torch.multiprocessing` in a file."""
    yield "torch.multiprocessing"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.asname for each in node.names if each.name == "torch.multiprocessing" and each.asname)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (each.asname or each.name for each in node.names if each.name == "multiprocessing")


def _spawns(tree: ast.Module) -> Iterator[str]:
    """Yield the names of `torch.multiprocessing.spawn` in a file that imports the function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.multiprocessing":
            yield from (each.asname or each.name for each in node.names if each.name == "spawn")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
