"""The methods of a Task, and the checks of a class and its arguments that the plan and the worker share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Final

from cloudtrain_runtime.contract.nearest_name import did_you_mean, nearest


@dataclass(frozen=True)
class TaskMethod:
    """A method that the entrypoint calls on a Task: its positional parameters, and what it returns if not None."""

    parameters: tuple[str, ...]
    returns: str = ""
    is_required: bool = False


TASK_METHODS: Final[Mapping[str, TaskMethod]] = {
    "model": TaskMethod((), "an nn.Module", is_required=True),
    "datasets": TaskMethod((), 'a mapping such as {"train": dataset}', is_required=True),
    "loss": TaskMethod(("model", "batch"), "a scalar tensor", is_required=True),
    "optimizer": TaskMethod(("model",), "a torch.optim.Optimizer"),
    "parallelize": TaskMethod(("model", "mesh")),
    "pipeline": TaskMethod(("model", "stages"), "the modules of the chain"),
    "schedule": TaskMethod(("optimizer",)),
    "after_step": TaskMethod(("model",)),
    "training_step": TaskMethod(("model", "batch", "update")),
    "sampler": TaskMethod(("dataset",)),
    "metrics": TaskMethod(("model", "batch"), "a mapping from name to tensor"),
    "after_evaluation": TaskMethod(("split", "metrics")),
    "predict": TaskMethod(("model", "batch"), "the predicted and the true class of each sample"),
    "analyze": TaskMethod(("model", "split")),
    "collate": TaskMethod(("samples",), "a batch"),
    "predict_input": TaskMethod(("payload",), "the model's input"),
    "predict_output": TaskMethod(("outputs",), "the content of the response"),
}
"""Every method of a Task that the entrypoint calls, in the order of `Task`."""

_STEP_ALTERNATIVES: Final[Mapping[str, Any]] = {
    "accumulate": 1,
    "skip_nonfinite": None,
    "compile": False,
}
_STEP_LAYOUT: Final[Mapping[str, Any]] = {
    "data": "ddp",
    "tensor": 1,
    "pipeline": 1,
    "compress": "none",
    "static_graph": False,
    "find_unused": False,
}

# `schedular` and `schedule` have this ratio; `matrices` and `metrics` have 0.8.
_LIKENESS: Final = 0.82
# The difference in length to the intended name: `prediction` is not `predict`.
_MOST_LETTERS: Final = 2


@dataclass(frozen=True)
class TaskDiagnostic:
    """A mistake in a file of the code folder, or in a field of the job such as `code.args.layers`."""

    message: str
    hint: str = ""
    file: str = ""
    line: int | None = None
    column: int | None = None
    field: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it in one line, as `digits.py:31:5  loss(self, batch): expected loss(self, model, batch)`."""
        text = f"{self.message}; {self.hint}" if self.hint else self.message
        at = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        if at:
            return f"{at}  {text}"
        if self.field:
            return f"{'.'.join(self.field)}: {text}"
        return text


def missing_module(folder: Path, module: str) -> TaskDiagnostic:
    """Return the diagnostic of a module that is not in the code folder."""
    path = folder / (module.replace(".", "/") + ".py")
    names = [each.name for each in path.parent.glob("*")]
    hint = did_you_mean(path.name, names, "code.task is module:Class, a module of the code folder")
    return TaskDiagnostic(f"no such file: {path}", hint, field=("code", "task"))


def missing_class(file: str, name: str, classes: Sequence[str]) -> TaskDiagnostic:
    """Return the diagnostic of a file that has these classes only."""
    hint = did_you_mean(name, classes) if classes else "the file has no class"
    return TaskDiagnostic(f"{file} has no class {name}", hint, field=("code", "task"))


def not_a_task(name: str) -> TaskDiagnostic:
    """Return the diagnostic of a class that does not derive from Task."""
    return TaskDiagnostic(
        f"{name} is not a Task",
        f"write class {name}(Task), with from cloudtrain_runtime import Task",
    )


def check_methods(
    task: str, methods: Mapping[str, Signature | None], folder: Path
) -> Iterator[tuple[str, TaskDiagnostic]]:
    """Yield the wrong, misspelt and missing methods of a class, each with its name; a missing one has an empty name.

    `methods` has what the user's classes define: the signature of each function, with `self`, and None for the rest.
    """
    undefined = [name for name in TASK_METHODS if name not in methods]
    intended = set()
    for name, signature in methods.items():
        if signature is None or name.startswith("_"):
            continue
        if name in TASK_METHODS:
            if message := check_signature(name, signature):
                yield name, TaskDiagnostic(message)
        elif near := _intended(name, undefined, folder):
            intended.add(near)
            message = f"{show(name, signature)}: a Task has no such method"
            yield name, TaskDiagnostic(message, f'did you mean "{near}"?')
    for name in undefined:
        if TASK_METHODS[name].is_required and name not in intended:
            hint = f"return {TASK_METHODS[name].returns}"
            yield "", TaskDiagnostic(f"{task} has no {call_of(name)}", hint)


def training_step_conflicts(train: Any) -> list[tuple[str, ...]]:
    """Return the fields of a `train` section, of a job or run.json, that do not work with `training_step`."""
    own = [
        (name,) for name, default in _STEP_ALTERNATIVES.items() if getattr(train, name) != default
    ]
    layout = [
        name for name, default in _STEP_LAYOUT.items() if getattr(train.parallel, name) != default
    ]
    return [*own, *(("parallel", name) for name in layout)]


def call_of(name: str, first: Sequence[str] = ("self",)) -> str:
    """Return how a Task declares a method, such as `loss(self, model, batch)`."""
    return f"{name}({', '.join([*first, *TASK_METHODS[name].parameters])})"


def check_signature(name: str, signature: Signature, first: Sequence[str] = ("self",)) -> str:
    """Return why a function cannot be the Task's method of a name, whose parameters follow `first`; empty if it can."""
    expected = [*first, *TASK_METHODS[name].parameters]
    names = list(signature.parameters)[: len(expected)]
    try:
        signature.bind(*expected)
        # Swapped arguments have the same names in another order.
        is_wrong = names != expected and sorted(names) == sorted(expected)
    except TypeError:
        is_wrong = True
    if not is_wrong:
        return ""
    return f"{show(name, signature)}: expected {call_of(name, first)}"


def check_arguments(
    task: str, signature: Signature, arguments: Mapping[str, Any]
) -> Iterator[TaskDiagnostic]:
    """Yield the entries of `code.args` that a class with this signature does not take, and those that it requires."""
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    legal = [
        name
        for name, kind in kinds.items()
        if kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    takes_any = Parameter.VAR_KEYWORD in kinds.values()
    for name in arguments:
        if takes_any or name in legal:
            continue
        hint = did_you_mean(name, legal) if legal else "it takes none: remove args"
        yield TaskDiagnostic(f"{task} takes no such argument", hint, field=("code", "args", name))
    for name in legal:
        if signature.parameters[name].default is Parameter.empty and name not in arguments:
            yield TaskDiagnostic(
                f"{task} needs the argument {name}",
                f"args: {{{name}: ...}}",
                field=("code", "args"),
            )


def show(name: str, signature: Signature) -> str:
    """Return a function's name and parameters."""
    bare = [
        each.replace(annotation=Parameter.empty, default=Parameter.empty)
        for each in signature.parameters.values()
    ]
    return f"{name}{Signature(bare)}"


def _intended(name: str, undefined: Sequence[str], folder: Path) -> str | None:
    """Return the method that a misspelt name means; None for another word, or if a file of the code folder uses it."""
    near = nearest(name, undefined, cutoff=_LIKENESS)
    if near is None or abs(len(near) - len(name)) > _MOST_LETTERS:
        return None
    use = re.compile(rf"[.\"']{name}\b")
    for path in folder.rglob("*.py"):
        is_own = "site-packages" not in path.parts and path.is_file() and os.access(path, os.R_OK)
        if is_own and use.search(path.read_text(encoding="utf-8", errors="replace")):
            return None
    return near
