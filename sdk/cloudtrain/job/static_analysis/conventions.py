"""How a job's code expects to be started, and how a script trains: what the rules of this package find in its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from cloudtrain.job.static_analysis import signs
from cloudtrain.job.static_analysis.argument_kinds import (
    ArgumentKinds,
    option_kinds,
    task_argument_kinds,
)
from cloudtrain.job.static_analysis.collectives import find_gather
from cloudtrain.job.static_analysis.config_files import contains, hydra_files
from cloudtrain.job.static_analysis.environment import find_own_rank, sets_other_address
from cloudtrain.job.static_analysis.fresh_starts import find_fresh_start
from cloudtrain.job.static_analysis.job_code import JobCode
from cloudtrain.job.static_analysis.module_search import read_modules
from cloudtrain.job.static_analysis.opened_files import opened_files
from cloudtrain.job.static_analysis.syntax import Module


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
        imports: Modules of packages that it certainly imports when it starts, each with the first place (`file:line`).
        arguments: Kinds of the script's options, or of the Task's arguments, as far as the source shows them.
        hidden_failures: Where shell scripts hide the failure of a program, each with what to write.
        gathers: Place where a Task's training gathers tensors of all ranks (`file:line:column calls all_gather`), or
            None.
        trackers: Packages of trackers that it has a sign of, wandb or mlflow: it logs by itself.
        opens: Paths of files that it opens and that are written out, each with the place (`file:line`).
        fresh_start: How it starts a training that never continues from a checkpoint, and what to pass; or None.
        path_imports: Where it certainly imports a module of the code folder that is not on the import path
            (`file:line imports module`), each with the folder that has it.
        start_faults: Where it certainly fails at its start, each with what to write.
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
    imports: tuple[tuple[str, str], ...] = ()
    arguments: ArgumentKinds = ()
    hidden_failures: tuple[str, ...] = ()
    gathers: str | None = None
    trackers: frozenset[str] = frozenset()
    opens: tuple[tuple[str, str], ...] = ()
    fresh_start: str | None = None
    path_imports: tuple[tuple[str, str], ...] = ()
    start_faults: tuple[str, ...] = ()
    splits_batches: bool = False
    expands_variables: bool = False
    own_address: str | None = None


def read_conventions(
    directory: Path,
    entry: str,
    includes: Mapping[str, Path] = MappingProxyType({}),
    *,
    module: str | None = None,
    task: str = "",
    search: tuple[str, ...] = (),
) -> ScriptConventions:
    """Return how a job's code expects to be started. Its entry and the modules that it imports are parsed, not executed.

    Args:
        directory: The code folder.
        entry: Path of the script, or of the module of a module or Task, relative to the code folder.
        includes: Folders outside of the code folder, by the name under which they are imported.
        module: Name of the module that it is started as; None for a script or a Task.
        task: Name of the Task's class, for which nothing about the start of a script is looked for.
        search: Folders of PYTHONPATH, relative to the code folder.
    """
    try:
        modules = read_modules(directory, entry, includes)
        if not modules:
            return ScriptConventions()
        code = JobCode(directory, directory / entry, modules, includes, search)
        started = code.trace(module, task)
        found = ScriptConventions(
            ml_paths=tuple(
                each.place(line) for each in modules for line in signs.ml_literals(each)
            ),
            imports=code.packages(started),
            opens=tuple(opened_files(modules).items()),
            path_imports=tuple(code.path_imports(started)),
            start_faults=tuple(code.start_faults(started, entry, module or task or None)),
        )
        if task:
            kinds = task_argument_kinds(modules[0], task)
            return replace(found, arguments=kinds, gathers=find_gather(modules, task))
        return _add_signs_of_script(
            found, modules, directory, includes, code.first_own_address(started)
        )
    except RecursionError:
        # An expression is nested too deeply to be walked, as in generated code.
        return ScriptConventions()


def _add_signs_of_script(
    found: ScriptConventions,
    modules: list[Module],
    directory: Path,
    includes: Mapping[str, Path],
    own_address: str | None,
) -> ScriptConventions:
    spawn = _first(modules, signs.find_spawn)
    launcher = _first(modules, signs.find_launcher)
    saves_by_runtime = any(map(signs.uses_checkpoints, modules))
    return replace(
        found,
        local_rank=next(filter(None, map(signs.local_rank_option, modules)), None),
        spawn=spawn,
        launcher=launcher,
        own_rank=_first_own_rank(modules),
        joins=_may_join(modules, directory, includes),
        saves=saves_by_runtime or _names_checkpoint_folder(modules, directory),
        saves_by_runtime=saves_by_runtime,
        reports=any(map(signs.imports_runtime, modules)),
        starts_ranks=spawn is not None or launcher is not None,
        arguments=option_kinds(modules),
        fresh_start=None if saves_by_runtime else find_fresh_start(modules),
        splits_batches=any(map(signs.splits_batches, modules)),
        expands_variables=any(map(signs.expands_variables, modules)),
        trackers=frozenset(name for each in modules for name in signs.trackers(each)),
        own_address=None if any(map(sets_other_address, modules)) else own_address,
    )


def _first(modules: list[Module], find: Callable[[Module], int | None]) -> str | None:
    """Return the first place (`file:line`) that a sign has in a module, or None."""
    for module in modules:
        line = find(module)
        if line is not None:
            return module.place(line)
    return None


def _first_own_rank(modules: list[Module]) -> str | None:
    for module in modules:
        found = find_own_rank(module)
        if found is not None:
            return f"{module.place(found.line)} sets {found.name}"
    return None


def _may_join(modules: list[Module], directory: Path, includes: Mapping[str, Path]) -> bool:
    if any(map(signs.joins_ranks, modules)):
        return True
    return any(signs.may_join_elsewhere(each, directory, includes) for each in modules)


def _names_checkpoint_folder(modules: list[Module], directory: Path) -> bool:
    if any(map(signs.names_checkpoint_folder, modules)):
        return True
    return contains(hydra_files(directory, modules), signs.CHECKPOINT_FOLDER)
