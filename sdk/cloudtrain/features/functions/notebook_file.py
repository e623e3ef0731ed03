"""The job of a notebook's file, which is read and not executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.features.functions.cells import (
    RUNNING_MAGICS,
    UNREAD,
    Cell,
    ExecutedCode,
    without_magics,
)
from cloudtrain.features.functions.history import History, Moment
from cloudtrain.features.functions.job_of import code_of_cells, make_job
from cloudtrain.features.functions.names import bound_names, inner_statements
from cloudtrain.features.functions.notebook_values import Values
from cloudtrain.features.functions.remote_mark import is_remote_decorator
from cloudtrain.job.spec import LoadedJob
from cloudtrain.support.backend_facts import MACHINE_BACKEND, SIMULATED_BACKEND, choose_backend
from cloudtrain.support.regular_files import read_regular
from cloudtrain_runtime.contract.strict_json import load_json

_MOST_BYTES: Final = 50 * 2**20
_CALLS: Final = ("submit", "plan", "remote", "job_of", "rehearse")
"""Functions of cloudtrain that take a function or Task class first."""
_METHODS: Final = ("submit", "plan", "job", "rehearse", "write")
"""Methods of a decorated function that take its arguments."""
_RUNNING: Final = [[each] for each in RUNNING_MAGICS]


@dataclass(frozen=True)
class _Found:
    """A function or class that a notebook sends.

    Attributes:
        name: Its name.
        fields: Fields of its job, as expressions.
        moment: The statement that has them.
        args: Its arguments, as expressions.
        call: The statement that has them.
    """

    name: str
    fields: Mapping[str, ast.expr]
    moment: Moment
    args: Mapping[str, ast.expr] = field(default_factory=dict)
    call: Moment | None = None


def job_of_notebook(
    path: str | Path, overrides: Iterable[str] = (), *, instances: int | None = None
) -> LoadedJob:
    """Return the job that a notebook submits, with everything that is wrong with it. Nothing of it is executed.

    Args:
        path: The notebook; `notebook.ipynb:train` names one of several functions.
        overrides: `path=value`, as the `--set` option takes them.
        instances: Replaces `cluster.instances`.

    Raises:
        UserError: The file is no notebook, or it submits nothing.
        SpecError: Something that the code uses cannot travel, or a value is known only when the notebook is executed.
    """
    file, code, found = _open(path)
    fields, args = _read_values(code, found)
    is_task = isinstance(_definition(code, found.name), ast.ClassDef)
    args = {**dict(fields.pop("args", None) or {}), **args}
    job = fields.pop("job", None)
    written = code_of_cells(found.name, UNREAD, code, is_task=is_task)
    return make_job(
        written,
        f"{found.name}()",
        args,
        fields,
        base=file.resolve().parent,
        job=None if job is None else file.parent / str(job),
        overrides=overrides,
        instances=instances,
    )


def backend_of_notebook(path: str | Path) -> str | None:
    """Return the backend that a notebook's function or Task class names; None if it names none.

    Raises:
        UserError: The file is no notebook, it submits nothing, or there is no such backend.
        SpecError: The value is known only when the notebook is executed.
    """
    _, code, found = _open(path)
    values = Values(code)
    names = ("backend", MACHINE_BACKEND, SIMULATED_BACKEND)
    given = dict[str, Any]()
    for name, node in found.fields.items():
        if name.startswith("**"):
            given |= values.read(node, name, found.moment)
        elif name in names:
            given[name] = values.read(node, name, found.moment)
    backend, local, sandbox = (given.get(each) for each in names)
    if not (backend or local or sandbox):
        return None
    return choose_backend(backend, local=bool(local), sandbox=bool(sandbox))


def _open(path: str | Path) -> tuple[Path, ExecutedCode, _Found]:
    """Return the file of a notebook, its code, and what it submits."""
    name, _, wanted = str(path).partition(":") if ":" in Path(path).name else (str(path), "", "")
    code = read_notebook(Path(name))
    return Path(name), code, _choose(code, Path(name), wanted)


def _read_values(code: ExecutedCode, found: _Found) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the fields and of the arguments."""
    values = Values(code)
    fields = values.read_all(found.fields, found.moment)
    args = values.read_all(found.args, found.call or found.moment)
    return {name: _as_in_a_file(value) for name, value in fields.items()}, args


def _as_in_a_file(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_in_a_file(part) for key, part in value.items()}
    return [_as_in_a_file(each) for each in value] if isinstance(value, list | tuple) else value


def read_notebook(path: Path) -> ExecutedCode:
    """Return the code of a notebook's file, in the order of its cells.

    Raises:
        UserError: It cannot be read, or is no notebook.
    """
    try:
        content = load_json(read_regular(path, _MOST_BYTES))
        cells = [each for each in content["cells"] if each["cell_type"] == "code"]
        sources = ["".join(each["source"]) for each in cells]
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}", "give the path of a notebook"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: this is no notebook: {error}", "save it in Jupyter again"
        ) from None
    read = [
        Cell.read(f"{path.name}, cell {number}", number, _python_of(source))
        for number, source in enumerate(sources, start=1)
    ]
    known = tuple(each for each in read if each is not None)
    names = {
        name: UNREAD
        for each in known
        for statement in each.statements
        for name in bound_names(statement)
    }
    return ExecutedCode(path.name, names, known, path.resolve().parent)


def _python_of(source: str) -> str:
    """Return the Python code of a cell."""
    if source.lstrip().startswith("%%"):
        magic, _, code = source.lstrip().partition("\n")
        # The line of the magic is not counted, as in a kernel.
        return without_magics(code) if magic[2:].split()[:1] in _RUNNING else ""
    return without_magics(source)


def _choose(code: ExecutedCode, file: Path, wanted: str) -> _Found:
    found = {each.name: each for each in _sent(code)}
    if wanted:
        if wanted not in found:
            raise UserError(f"{file} submits no {wanted}", did_you_mean(wanted, found))
        return found[wanted]
    if not found:
        raise UserError(
            f"{file} submits no function and no Task class of its own",
            "decorate a function with @cloudtrain.remote(...), or call cloudtrain.submit(MyTask, ...)",
        )
    if len(found) > 1:
        names = ", ".join(found)
        raise UserError(f"{file} submits several: {names}", f"name one: {file}:{next(iter(found))}")
    return next(iter(found.values()))


def _sent(code: ExecutedCode) -> Iterator[_Found]:
    """Yield the functions and classes that cells decorate or pass to cloudtrain, with the arguments of their last call."""
    found: dict[str, _Found] = {}
    for moment in History(code).moments:
        for each in inner_statements(moment.statement):
            for decorator in getattr(each, "decorator_list", ()):
                if is_remote_decorator(decorator, code):
                    fields = _options(decorator, code)
                    found[each.name] = _Found(each.name, fields, moment)  # type: ignore[attr-defined]
        for node in ast.walk(moment.statement):
            if isinstance(node, ast.Call):
                _read_call(node, found, code, moment)
    yield from found.values()


def _options(decorator: ast.expr, code: ExecutedCode) -> dict[str, ast.expr]:
    """Return the options of a decorator, which another name may have: `gpu = cloudtrain.remote(instances=2)`."""
    if isinstance(decorator, ast.Name):
        decorator = getattr(_definition(code, decorator.id), "value", decorator)
    return _keywords(decorator.keywords) if isinstance(decorator, ast.Call) else {}


def _read_call(
    call: ast.Call, found: dict[str, _Found], code: ExecutedCode, moment: Moment
) -> None:
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = function.value.id
        if owner in found and function.attr in _METHODS:
            found[owner] = _with_args(found[owner], call, code, moment)
        elif owner == "cloudtrain" and function.attr in _CALLS and call.args:
            first = call.args[0]
            if isinstance(first, ast.Name) and isinstance(
                _definition(code, first.id), ast.FunctionDef | ast.ClassDef
            ):
                found[first.id] = _Found(first.id, _keywords(call.keywords), moment)
    elif isinstance(function, ast.Name) and function.id in found:
        found[function.id] = _with_args(found[function.id], call, code, moment)


def _definition(code: ExecutedCode, name: str) -> ast.stmt | None:
    binding = code.find_binding(name)
    return None if binding is None else binding[1]


def _with_args(found: _Found, call: ast.Call, code: ExecutedCode, moment: Moment) -> _Found:
    definition = _definition(code, found.name)
    given = call.args
    if isinstance(call.func, ast.Attribute) and call.func.attr == "write":
        given = given[1:]
    names = (
        [each.arg for each in definition.args.args]
        if isinstance(definition, ast.FunctionDef)
        else []
    )
    if len(given) > len(names):
        raise UserError(
            f"{found.name}(): an argument has no name ({moment})",
            "give the function a parameter with a name for it",
        )
    args = dict(zip(names, given, strict=False))
    return replace(found, args={**args, **_keywords(call.keywords)}, call=moment)


def _keywords(keywords: Iterable[ast.keyword]) -> dict[str, ast.expr]:
    """Return keyword arguments; `**options` has the name of its place."""
    return {each.arg or f"**{index}": each.value for index, each in enumerate(keywords)}
