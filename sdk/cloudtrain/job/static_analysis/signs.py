"""Signs of how a script starts and joins ranks, and where it saves, by names and texts in a module."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cloudtrain import catalog
from cloudtrain.job.rank_starters import (
    LAUNCHING_FUNCTIONS,
    RAY_TRAINING,
    SPAWNING_FUNCTIONS,
    is_starting_text,
)
from cloudtrain.job.standard_library import STANDARD_LIBRARY
from cloudtrain.job.static_analysis.module_search import is_below
from cloudtrain.job.static_analysis.syntax import Module
from cloudtrain.support.container_paths import CHECKPOINTS
from cloudtrain_runtime.contract import ML_ROOT_VARIABLE
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.placeholders import CHECKPOINTS_VARIABLE

CHECKPOINT_FOLDER = (CHECKPOINTS, ML_ROOT_VARIABLE, CHECKPOINTS_VARIABLE)
"""Texts by which code names the folder of checkpoints that are kept."""
_RUNTIME = "cloudtrain_runtime"
_CALLS = (f"{_RUNTIME}.process.function_call", f"{_RUNTIME}.process.notebook_cells")
"""Modules of the runtime that call a function of a notebook."""
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
_JOINING = lazy_pattern(r"(?i)distributed|ddp|fsdp|init_process_group|init_device_mesh|^dist$")
"""Parts of names by which a script, or a package that it uses, joins ranks."""
_COMPUTED = frozenset(
    {"importlib.import_module", "import_module", "__import__", "hydra.utils.instantiate"}
)
"""Functions that import a module by a name, which may be computed."""
_PATH_CHANGES = frozenset(
    {
        "autorootcwd",
        "pyrootutils.set_root",
        "pyrootutils.setup_root",
        "rootutils.set_root",
        "rootutils.setup_root",
        "site.addsitedir",
    }
)
"""Names of what puts a folder on the import path. Templates of Lightning and Hydra projects use rootutils."""
_STARTING = lazy_pattern(r"subprocess|os\.(?:system|popen|exec\w+|spawn\w+|posix_spawn\w*)")
"""Names of what starts another program."""
_ASKS_FOR_LAUNCHER = lazy_pattern(
    r"['\"](?:LOCAL_)?RANK['\"]|(?i:no_?spawn|torch_?elastic|torchrun)"
)
"""Parts of conditions that ask whether a launcher has started this rank."""
_LOCAL_RANK = ("--local_rank", "--local-rank")
"""The option that `python -m torch.distributed.launch` passes: the first before torch 2.0, the second since."""
_DEFINING = ("add_argument", "add_option", "option")
"""Calls that define an option: argparse, optparse, click."""
_EXPANDING = frozenset({"expandvars", "Template", "EnvYAML"})


def joins_ranks(module: Module) -> bool:
    """Return whether a module names torch.distributed, or a framework that joins ranks."""
    return any(part in _FRAMEWORKS or _JOINING.search(part) for part in module.name_parts)


def may_join_elsewhere(module: Module, directory: Path, includes: Mapping[str, Path]) -> bool:
    """Return whether code that is not here may join the ranks: of an unknown package, or of a computed name."""
    if not _COMPUTED.isdisjoint(module.names):
        return True
    for top in {name.partition(".")[0] for name in module.absolute_imports}:
        if top in STANDARD_LIBRARY or top in includes or top == _RUNTIME:
            continue
        if catalog.known_package_of(top) is None and not is_below(directory, top):
            return True
    return False


def changes_path(module: Module) -> bool:
    """Return whether a module changes the import path."""
    return any(name in _PATH_CHANGES or name.startswith("sys.path") for name in module.names)


def imports_runtime(module: Module) -> bool:
    """Return whether a module imports the runtime, other than to call a function."""
    return any(
        name.partition(".")[0] == _RUNTIME and not name.startswith(_CALLS)
        for name in module.imports
    )


def uses_checkpoints(module: Module) -> bool:
    """Return whether a module uses the runtime's checkpoints, or attaches a trainer to it."""
    is_used = not module.name_parts.isdisjoint({"checkpoint", "integrations"})
    return is_used and imports_runtime(module)


def names_checkpoint_folder(module: Module) -> bool:
    """Return whether a module contains the path of the checkpoint folder."""
    return any(is_kept(text) for _, text in module.texts)


def is_kept(text: str) -> bool:
    """Return whether a text names the folder of checkpoints that are kept."""
    return any(name in text for name in CHECKPOINT_FOLDER)


def ml_literals(module: Module) -> list[int]:
    """Return the lines of texts that begin with `/opt/ml/`."""
    return sorted(
        {line for line, text in module.texts if text == "/opt/ml" or text.startswith("/opt/ml/")}
    )


def find_spawn(module: Module) -> int | None:
    """Return the line in which processes are started as torch's `spawn` does, by any name of the import."""
    lines = [call.lineno for name, call in module.named_calls if name in SPAWNING_FUNCTIONS]
    return next(_without_other_starts(module, lines), None)


def find_launcher(module: Module) -> int | None:
    """Return the line that starts ranks: a call, or a command such as torchrun in a module that starts processes."""
    lines = [
        call.lineno
        for name, call in module.named_calls
        if name in LAUNCHING_FUNCTIONS or RAY_TRAINING.fullmatch(name)
    ]
    if any(map(_STARTING.match, module.names)):
        lines += _command_lines(module)
    return next(_without_other_starts(module, lines), None)


def local_rank_option(module: Module) -> str | None:
    """Return the option for the local rank that a module defines, as it spells it, or None."""
    for call in module.calls:
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in _DEFINING:
            for argument in call.args:
                if isinstance(argument, ast.Constant) and argument.value in _LOCAL_RANK:
                    return str(argument.value)
    return None


def splits_batches(module: Module) -> bool:
    """Return whether a module wraps a model in torch.nn.DataParallel, which uses all GPUs in one process."""
    return any(
        name.startswith("torch.nn.") and name.endswith(".DataParallel")
        for name, _ in module.named_calls
    )


def expands_variables(module: Module) -> bool:
    """Return whether a module may replace variables in text: os.path.expandvars, string.Template, or a shell."""
    if not module.name_parts.isdisjoint(_EXPANDING):
        return True
    return any(each.arg == "shell" for each in module.keywords)


def trackers(module: Module) -> Iterator[str]:
    """Yield the packages of trackers that a module imports or names, as in WandbLogger or report_to="wandb"."""
    words = module.name_parts | {text for _, text in module.texts}
    lower = {word.lower() for word in words}
    for name in ("wandb", "mlflow"):
        if any(name in word for word in lower):
            yield name


def _command_lines(module: Module) -> Iterator[int]:
    """Yield the lines of texts, and of lists of texts, that are commands which start ranks."""
    for node in module.nodes:
        if isinstance(node, ast.List | ast.Tuple):
            words = node.elts
        elif isinstance(node, ast.Constant):
            words = [node]
        else:
            continue
        text = " ".join(str(word.value) for word in words if isinstance(word, ast.Constant))
        if is_starting_text(text, is_alone=len(words) == 1):
            yield node.lineno


def _without_other_starts(module: Module, lines: Iterable[int]) -> Iterator[int]:
    """Yield lines that are not below an `if` that asks whether a launcher has started this rank."""
    for line in lines:
        if line not in _lines_for_other_starts(module):
            yield line


def _lines_for_other_starts(module: Module) -> set[int]:
    lines: set[int] = set()
    for node in module.of(ast.If):
        if _ASKS_FOR_LAUNCHER.search(ast.unparse(node.test)):
            lines.update(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
    return lines
