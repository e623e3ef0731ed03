"""How a job's code expects to be started, and how a script trains: what the rules of this package find in its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from cloudtrain.job.static_analysis.module_search import find_src_import, read_modules
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
    try:
        return _read_script(directory, script, includes, module, search)
    except RecursionError:
        # An expression is nested too deeply to be walked, as in generated code.
        return ScriptConventions()


def read_task_conventions(
    directory: Path, module: str, includes: Mapping[str, Path], task: str
) -> ScriptConventions:
    """Return what `read_conventions` finds in a Task's module and its imports, without how a script is started.

    Args:
        directory: The code folder.
        module: Path of the Task's module, relative to the code folder.
        includes: Folders outside of the code folder, by the name under which they are imported.
        task: Name of the Task's class.
    """
    try:
        return _read_task(directory, module, includes, task)
    except RecursionError:
        return ScriptConventions()


def _read_script(
    directory: Path,
    script: str,
    includes: Mapping[str, Path],
    module: str | None,
    search: tuple[str, ...],
) -> ScriptConventions:
    modules = read_modules(directory, script, includes)
    if not modules:
        return ScriptConventions()
    path = directory / script
    code = JobCode(directory, path, modules, includes, search)
    started = code.trace(module or "")
    spawn = _first(modules, signs.find_spawn)
    launcher = _first(modules, signs.find_launcher)
    saves_by_runtime = any(map(signs.uses_checkpoints, modules))
    return ScriptConventions(
        local_rank=next(filter(None, map(signs.local_rank_option, modules)), None),
        spawn=spawn,
        launcher=launcher,
        own_rank=_first_own_rank(modules),
        joins=_may_join(modules, directory, includes),
        saves=saves_by_runtime or _names_checkpoint_folder(modules, directory),
        saves_by_runtime=saves_by_runtime,
        reports=any(map(signs.imports_runtime, modules)),
        ml_paths=_ml_paths(modules),
        starts_ranks=spawn is not None or launcher is not None,
        src_import=(
            None if code.changes_path else find_src_import(directory, path, modules, includes)
        ),
        imports=code.packages(started),
        arguments=option_kinds(modules),
        fresh_start=None if saves_by_runtime else find_fresh_start(modules),
        opens=tuple(opened_files(modules).items()),
        computed_import=code.first_computed(started),
        path_imports=tuple(code.path_imports(started)),
        namesakes=code.namesakes(started),
        start_faults=tuple(code.start_faults(started, script, module)),
        splits_batches=any(map(signs.splits_batches, modules)),
        expands_variables=any(map(signs.expands_variables, modules)),
        own_address=(
            None if any(map(sets_other_address, modules)) else code.first_own_address(started)
        ),
    )


def _read_task(
    directory: Path, module: str, includes: Mapping[str, Path], task: str
) -> ScriptConventions:
    modules = read_modules(directory, module, includes)
    if not modules:
        return ScriptConventions()
    code = JobCode(directory, directory / module, modules, includes)
    started = code.trace_task(task)
    return ScriptConventions(
        ml_paths=_ml_paths(modules),
        imports=code.packages(started),
        arguments=task_argument_kinds(modules[0], task),
        gathers=find_gather(modules, task),
        opens=tuple(opened_files(modules).items()),
        computed_import=code.first_computed(started),
        path_imports=tuple(code.path_imports(started)),
        namesakes=code.namesakes(started),
        start_faults=tuple(code.start_faults(started, module, task)),
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


def _ml_paths(modules: list[Module]) -> tuple[str, ...]:
    return tuple(module.place(line) for module in modules for line in signs.ml_literals(module))
