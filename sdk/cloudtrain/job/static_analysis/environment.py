"""Variables of ranks that a script sets itself: torchrun's, and the address of the first rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from cloudtrain.job.static_analysis.syntax import Module, last_name, written
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_ADDRESS = "MASTER_ADDR"
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})  # noqa: S104 (nothing listens)
_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_RANK_CALLS = frozenset({"get_rank", "get_world_size", "get_local_rank", "get_node_local_rank"})
_OTHER_WAY = lazy_pattern(
    r"(?i)slurm|(?<![a-z])mpi|openmpi|ompi_|pmi_|pmix|lsf|lsb_|pbs|jsm_|mv2_|sge_"
    r"|azureml|az_batch|kubernetes|k8s|launcher|notebook|colab|standalone|single|debug"
    r"|(?-i:(?<![A-Za-z])ray(?![a-z])|(?<![A-Z])Ray(?![a-z]))"
)
"""Parts of names and texts by which code chooses another way to start ranks than torchrun."""


class Setting(NamedTuple):
    """A variable that a statement sets."""

    name: str
    value: ast.expr
    line: int


def settings_of(node: ast.AST) -> Iterator[Setting]:
    """Yield the variables that an assignment to `os.environ`, or a call of its `update`, sets."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and written(target.value).endswith("environ"):
                yield from _setting(target.slice, node.value, node.lineno)
    elif isinstance(node, ast.Call) and written(node.func).endswith("environ.update"):
        for each in node.keywords:
            if each.arg:
                yield Setting(each.arg, each.value, node.lineno)
        for mapping in node.args:
            yield from _settings_of_mapping(mapping, node.lineno)


def find_own_rank(module: Module) -> Setting | None:
    """Return the first of torchrun's variables that a module sets; None if it may know how its ranks were started.

    It may where it also reads such a variable, or names another way to start ranks, such as Slurm.
    """
    settings = [each for each in _all_settings(module) if each.name in _RANK_VARIABLES]
    if not settings:
        return None
    # Each setting names its variable once. A further time it is read, or set by `setdefault`.
    named = sum(text in _RANK_VARIABLES for _, text in module.texts)
    named += sum(each.arg in _RANK_VARIABLES for each in module.keywords)
    if named > len(settings) or any(map(_is_of_torchrun, settings)):
        return None
    defined = (getattr(node, "name", None) for node in module.nodes)
    words = [*module.name_parts, *(text for _, text in module.texts), *filter(None, defined)]
    if any(map(_OTHER_WAY.search, words)):
        return None
    return min(settings, key=lambda each: each.line)


def _is_of_torchrun(setting: Setting) -> bool:
    return any(last_name(each) in _RANK_CALLS for each in ast.walk(setting.value))


def _all_settings(module: Module) -> Iterator[Setting]:
    for node in (*module.of(ast.Assign), *module.calls):
        yield from settings_of(node)


def own_address_lines(node: ast.AST) -> Iterator[int]:
    """Yield the lines of a statement that set MASTER_ADDR to this host, written out."""
    return (
        each.line for each in settings_of(node) if each.name == _ADDRESS and _is_this_host(each)
    )


def sets_other_address(module: Module) -> bool:
    """Return whether a module sets MASTER_ADDR to another value, or lets the ranks meet by `init_method` or a store."""
    addresses = (each for each in _all_settings(module) if each.name == _ADDRESS)
    if not all(map(_is_this_host, addresses)):
        return True
    meetings = [each.value for each in module.keywords if each.arg in ("init_method", "store")]
    return not all(map(_is_environment_method, meetings))


def _is_this_host(setting: Setting) -> bool:
    return isinstance(setting.value, ast.Constant) and setting.value.value in _THIS_HOST


def _is_environment_method(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == "env://"


def _settings_of_mapping(mapping: ast.expr, line: int) -> Iterator[Setting]:
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            yield from _setting(key, value, line)


def _setting(key: ast.expr | None, value: ast.expr, line: int) -> Iterator[Setting]:
    if isinstance(key, ast.Constant):
        yield Setting(str(key.value), value, line)
