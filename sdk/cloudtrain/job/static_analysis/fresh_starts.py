"""Trainers of libraries that always begin at step 0, by a script's source: nothing is imported.

The trainers of Transformers, TRL and Lightning continue from a checkpoint only if the call that trains names it. An
option such as `--resume_from_checkpoint` is parsed by their argument classes and resumes nothing by itself.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from cloudtrain.job.static_analysis.syntax import Module, full_name, last_name


class _Library(NamedTuple):
    """How a library's trainers are called."""

    packages: frozenset[str]
    method: str  # what trains
    argument: str  # names the checkpoint
    value: str  # continues from the newest one, and begins anew where there is none
    integration: str  # module of the runtime whose attach() does it


_LIBRARIES = (
    _Library(
        frozenset({"transformers", "trl"}),
        "train",
        "resume_from_checkpoint",
        "transformers.trainer_utils.get_last_checkpoint(output_dir)",
        "huggingface",
    ),
    _Library(
        frozenset({"lightning", "pytorch_lightning"}), "fit", "ckpt_path", '"last"', "lightning"
    ),
)


def find_fresh_start(modules: list[Module]) -> str | None:
    """Return how a script starts a training that never continues from a checkpoint, and what to pass; or None.

    The modules must not mention the argument at all: `train.py:30 calls trainer.train without resume_from_checkpoint`.

    Args:
        modules: The modules of a script.
    """
    for library in _LIBRARIES:
        for module in modules:
            line = _line_of_call(module, library)
            if line is None or any(_mentions(each, library.argument) for each in modules):
                continue
            return (
                f"{module.place(line)} calls {library.method} of a trainer without {library.argument}, so a resumed run begins "
                f"at step 0. Pass {library.argument}={library.value}, or call attach(trainer) of "
                f"cloudtrain_runtime.integrations.{library.integration}"
            )
    return None


def _line_of_call(module: Module, library: _Library) -> int | None:
    """Return the line in which a module lets a trainer of a library train, or None."""
    classes = {
        name: full
        for name, full in module.imported_names.items()
        if full.partition(".")[0] in library.packages
    }

    def is_trainer(named: ast.expr) -> bool:
        return full_name(named, classes).endswith("Trainer")

    def has_made(value: ast.expr) -> bool:
        return isinstance(value, ast.Call) and is_trainer(value.func)

    for node in module.of(ast.ClassDef):
        if any(map(is_trainer, node.bases)):
            classes[node.name] = "Trainer"
    made = (node for node in module.of(ast.Assign) if has_made(node.value))
    trainers = {last_name(target) for node in made for target in node.targets}
    for call in module.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == library.method:
            owner = call.func.value
            if last_name(owner) in trainers or has_made(owner):
                return call.lineno
    return None


def _mentions(module: Module, argument: str) -> bool:
    words = (*module.name_parts, *(text for _, text in module.texts))
    return any(argument in word for word in words)
