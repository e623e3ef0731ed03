"""Signs in a script's source of how it trains. The script is not imported.

Each sign is read from the syntax tree of one module. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

_RANK_VARIABLES: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})

_FRAMEWORKS: Final = frozenset(
    {
        *("accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "trl", "deepspeed"),
        *("horovod", "fairscale", "fairseq", "composer", "ignite", "torchtitan", "torchtune", "megatron", "nemo"),
        *("colossalai", "mmengine", "mmcv", "detectron2", "ray", "smdistributed", "bagua", "monai", "keras"),
    }
)
"""Packages that join ranks for a script that uses them."""

_JOINING: Final = re.compile(r"(?i)distributed|ddp|fsdp|init_process_group|init_device_mesh|^dist$")
"""Parts of names by which a script, or a package that it uses, joins ranks."""

_COMMAND: Final = re.compile(
    r"(?:\S*/)?(?:torchrun|deepspeed|accelerate\s+launch|python\S*\s+(?:-\S+\s+)*-m\s+torch\.distributed\.(?:run|launch))"
    r"(?:\s|$)|torch\.distributed\.(?:run|launch)$"
)
_STARTING: Final = re.compile(r"subprocess|os\.(?:system|popen|exec\w+|spawn\w+|posix_spawn\w*)")


def joins_ranks(tree: ast.Module) -> bool:
    """Return whether a module names torch.distributed, or a framework that joins ranks."""
    return any(part in _FRAMEWORKS or _JOINING.search(part) for name in _names(tree) for part in name.split("."))


def saves_checkpoints(tree: ast.Module) -> bool:
    """Return whether a module imports the runtime, or contains the path of the checkpoint folder."""
    if any(name.partition(".")[0] == "cloudtrain_runtime" for name in _imports(tree)):
        return True
    return any("/opt/ml/checkpoints" in text or "CLOUDTRAIN_ML_ROOT" in text for _, text in _texts(tree))


def starts_launcher(tree: ast.Module) -> int | None:
    """Return the line of a command that starts ranks, such as torchrun, in a module that starts processes."""
    if not any(_STARTING.match(name) for name in _names(tree)):
        return None
    for node in ast.walk(tree):
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        text = " ".join(str(word.value) for word in words if isinstance(word, ast.Constant))
        if _COMMAND.match(text) and (len(words) > 1 or text != "deepspeed"):
            return getattr(node, "lineno", None)
    return None


def overwrites_rank(tree: ast.Module) -> tuple[int, str] | None:
    """Return line and name of one of torchrun's variables that a module overwrites.

    A new value that is computed from the old one, or that is set only if the variable is missing, does not count.
    """
    return next(_overwritten(tree, frozenset()), None)


def ml_literals(tree: ast.Module) -> list[int]:
    """Return the lines of texts that begin with `/opt/ml/`."""
    return sorted({line for line, text in _texts(tree) if text == "/opt/ml" or text.startswith("/opt/ml/")})


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


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


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
            is_environment = isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ")
            if is_environment and isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                yield str(target.slice.value), node.value, node.lineno
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.update"):
        yield from ((keyword.arg, keyword.value, node.lineno) for keyword in node.keywords if keyword.arg)
        for mapping in node.args:
            if isinstance(mapping, ast.Dict):
                pairs = zip(mapping.keys, mapping.values, strict=True)
                yield from ((str(k.value), v, node.lineno) for k, v in pairs if isinstance(k, ast.Constant))


def _constants(node: ast.AST) -> frozenset[str]:
    return frozenset(str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant))
