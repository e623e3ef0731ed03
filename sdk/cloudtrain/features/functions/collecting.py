"""What a function or class of a notebook needs: its source and that of the names it uses, or why these cannot travel."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from cloudtrain.errors import Problem, SpecError, did_you_mean
from cloudtrain.features.functions.cells import UNREAD, Cell, ExecutedCode
from cloudtrain.features.functions.history import History, changed_settings
from cloudtrain.features.functions.literals import Expression, write_value
from cloudtrain.features.functions.local_modules import is_local_module
from cloudtrain.features.functions.names import UsedNames, bound_names, called_names, used_names
from cloudtrain.features.functions.pieces import Collection, Piece
from cloudtrain.features.functions.refusals import (
    IN_A_FILE,
    IN_A_NOTEBOOK,
    Refusal,
    refuse_content,
    refuse_function,
    refuse_object,
)
from cloudtrain.features.functions.remote_mark import Remote, function_of, is_remote_decorator

SHOWN: Final = "display"
"""A function of notebooks that prints in a run."""
_OF_EVERY_MODULE: Final = frozenset({"__name__", "__file__", "__doc__", "__package__", "__spec__"})
_OWN_MODULES: Final = frozenset({"__main__", "builtins"})
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Place:
    """Where a name is used: the cell, and line and column in it, from 1."""

    cell: str
    line: int | None = None
    column: int | None = None


def collect(target: Any, name: str, code: ExecutedCode) -> Collection:
    """Return all that a function or class needs, itself included.

    Args:
        target: The function or class of the notebook.
        name: Its name there.
        code: What was executed.

    Raises:
        SpecError: Something that it uses cannot travel. The error names everything.
    """
    collector = _Collector(code)
    collector.add(name, target, "", Place(code.title))
    found = collector.found
    if found.problems:
        raise SpecError(tuple(found.problems))
    return found


class _Collector:
    def __init__(self, code: ExecutedCode) -> None:
        self.code = code
        self.found = Collection()
        self._history = History(code)
        self._seen = set[str]()

    def add(self, name: str, value: Any, why: str, place: Place) -> None:
        """Add the definition of a name with everything that it uses."""
        if name in self._seen:
            return
        self._seen.add(name)
        if value is UNREAD:
            self._add_unread(name, why, place)
            return
        value = function_of(value)
        if name in vars(builtins) and vars(builtins)[name] is value:
            return
        refusal = refuse_object(name, value)
        if refusal:
            self._refuse(refusal, why, place)
        elif isinstance(value, types.ModuleType):
            self._add_module(name, value.__name__)
        elif isinstance(value, types.FunctionType | type):
            self._add_definition(name, value, why, place)
        else:
            self._add_value(name, value, why, place)

    def _refuse(self, refusal: Refusal, why: str, place: Place) -> None:
        text = f"{refusal[0]}{f' ({why})' if why else ''}"
        problem = Problem(place.cell, place.line, place.column, "", text, refusal[1])
        self.found.problems.append(problem)

    def _add_module(self, name: str, module: str) -> None:
        is_read = self.code.names.get(name) is not UNREAD
        for each in changed_settings(self.code, name):
            if not is_read and is_local_module(module, self.code.folder):
                refusal = (
                    f"{each} sets an attribute of {module}, which the run does not",
                    IN_A_NOTEBOOK,
                )
                self._refuse(refusal, "", Place(self.code.title))
                return
            self.found.notes.append(f"{each} changes a setting of {module}, which the run does not")
        self._add_import(name, module, "")
        if name == module:
            self._add_submodules(name)

    def _add_import(self, name: str, module: str, attribute: str) -> None:
        self.found.modules.add(module)
        if attribute:
            text = f"from {module} import {attribute}" + (
                f" as {name}" if attribute != name else ""
            )
        elif name == module or module.startswith(f"{name}."):
            text = f"import {module}"
        else:
            text = f"import {module} as {name}"
        self.found.pieces[name] = Piece(name, text + "\n")

    def _add_unread(self, name: str, why: str, place: Place) -> None:
        """Add a name whose value is not known, as its last statement says."""
        found = self.code.find_binding(name)
        if found is not None and isinstance(found[1], ast.Import | ast.ImportFrom):
            self._add_import_of(name, found[1])
        elif found is not None and _defines_alone(found[1]):
            self._add_made(name, *found, why, place)
        else:
            refusal = f"no cell says how to make {name} with one assignment", IN_A_FILE
            self._refuse(refusal, why, place)

    def _add_import_of(self, name: str, statement: ast.Import | ast.ImportFrom) -> None:
        for each in statement.names:
            if isinstance(statement, ast.ImportFrom) and (each.asname or each.name) == name:
                self._add_import(name, "." * statement.level + (statement.module or ""), each.name)
            elif isinstance(statement, ast.Import) and each.asname == name:
                self._add_module(name, each.name)
            elif (
                isinstance(statement, ast.Import)
                and each.asname is None
                and each.name.partition(".")[0] == name
            ):
                self._add_module(name, name)
                self._add_submodules(name, are_known=False)

    def _add_submodules(self, package: str, *, are_known: bool = True) -> None:
        """Import the modules of a package that a cell has imported by their whole name."""
        for cell in self.code.cells:
            for statement in cell.statements:
                for each in statement.names if isinstance(statement, ast.Import) else ():
                    if (
                        each.asname is None
                        and each.name.startswith(f"{package}.")
                        and (each.name in sys.modules or not are_known)
                    ):
                        self.found.modules.add(each.name)
                        self.found.pieces[each.name] = Piece(each.name, f"import {each.name}\n")

    def _add_definition(
        self, name: str, value: types.FunctionType | type, why: str, place: Place
    ) -> None:
        source = _importable(value) if value.__module__ not in _OWN_MODULES else None
        if source is not None:
            self._add_import(name, *source)
            return
        if value.__module__ == "builtins":
            self._add_alias(name, value, why, place)
            return
        found = self._find_source(name, value)
        if found is None:
            refusal = (
                f"the code of {name} cannot be found",
                "define it at the top level of a cell, or in a module beside the notebook",
            )
            self._refuse(refusal, why, place)
            return
        self._add_found(name, value, *found, why, place)

    def _add_found(
        self, name: str, value: Any, cell: Cell, statement: ast.stmt, why: str, place: Place
    ) -> None:
        """Add a function or class whose statement was found."""
        real = value.__name__
        is_decorated = isinstance(statement, _DEFINITION) and self._decorators(statement)[0]
        if name not in bound_names(statement):
            if function_of(self.code.names.get(real)) is value:
                self.add(real, value, why, place)
                self.found.pieces[name] = Piece(name, f"{name} = {real}\n", needs=frozenset({real}))
                return
            made = self.code.find_binding(name)
            if made is not None and isinstance(getattr(made[1], "value", None), ast.Call):
                # Such as `fast = torch.compile(slow)`.
                self._add_made(name, *made, why, place)
                return
            refusal: Refusal | None = (
                f"{name} is an earlier definition of {real}",
                f"give it a name of its own, and run the cells again that use {name}",
            )
        elif is_decorated and not isinstance(value, type):
            self._add_made(name, cell, statement, why, place)
            return
        else:
            refusal = self._refuse_definition(name, value)
        if refusal:
            self._refuse(refusal, why, place)
            return
        self._add_statement(name, cell, statement)

    def _refuse_definition(self, name: str, value: Any) -> Refusal | None:
        """Return why a function or class cannot be defined by its statement; None if it can."""
        if isinstance(value, types.FunctionType):
            return refuse_function(name, value)
        stale = self._stale_base(value)
        if not stale:
            return None
        return (
            f"{stale} was defined again after {name}, which has the older one",
            f"run the cell of {name} again",
        )

    def _used(self, cell: Cell, statement: ast.stmt) -> UsedNames:
        _, text = cell.code_of(statement, self._decorators(statement)[1])
        return used_names(text, is_lazy=self.code.is_lazy)

    def _write(self, value: Any) -> Expression | None:
        is_local = functools.partial(is_local_module, folder=self.code.folder)
        return write_value(value, self.code.names, is_local=is_local)

    def _stale_base(self, value: type) -> str:
        for base in value.__bases__:
            newest = self.code.names.get(base.__name__)
            if base.__module__ == "__main__" and isinstance(newest, type) and newest is not base:
                return base.__name__
        return ""

    def _add_alias(self, name: str, value: Any, why: str, place: Place) -> None:
        """Add another name of a class of Python's own."""
        alias = value.__name__
        if getattr(builtins, alias, None) is value:
            self.found.pieces[name] = Piece(name, f"{name} = {alias}\n")
        else:
            # Such as `FunctionType`, whose name is `function`.
            self._add_unread(name, why, place)

    def _find_source(self, name: str, value: Any) -> tuple[Cell, ast.stmt] | None:
        """Return the statement that defined a function or class, or what was decorated."""
        is_definition = isinstance(value, types.FunctionType | type)
        names = (name, value.__name__) if is_definition else (name,)
        for function in _functions_of(value):
            cell = self.code.cell_of_code(function.__code__.co_filename)
            if cell is None:
                continue
            for each in names:
                statement = cell.statement_at(function.__code__.co_firstlineno, each)
                if statement is not None:
                    return cell, statement
        return self.code.find_binding(names[0]) or self.code.find_binding(names[-1])

    def _add_value(self, name: str, value: Any, why: str, place: Place) -> None:
        written = self._write(value)
        if written is not None:
            self._add_expression(name, written, place)
            return
        imported = self._imported_object(name, value)
        if imported is not None:
            self._add_import(name, *imported)
            return
        refusal = refuse_content(name, value)
        found = self._find_source(name, value)
        if refusal is None and (found is None or not _defines_alone(found[1])):
            kind = type(value).__name__
            refusal = (
                f"{name} is a {kind}, and no cell says how to make it with one assignment",
                IN_A_FILE,
            )
        if refusal is not None or found is None:
            self._refuse(refusal or ("", ""), why, place)
            return
        self._add_made(name, *found, why, place)

    def _add_expression(self, name: str, written: Expression, place: Place) -> None:
        self.found.imports |= written.imports
        self.found.modules |= written.modules
        self.found.pieces[name] = Piece(name, f"{name} = {written.text}\n", needs=written.names)
        for each in sorted(written.names):
            self.add(each, self.code.names[each], f"{name} has it", place)

    def _add_made(self, name: str, cell: Cell, statement: ast.stmt, why: str, place: Place) -> None:
        """Add what the run makes by its statement."""
        refusal = (
            self._refuse_unread(name, cell, statement)
            if self.code.names.get(name) is UNREAD
            else None
        )
        if refusal is not None:
            self._refuse(refusal, why, place)
            return
        self._add_statement(name, cell, statement)

    def _refuse_unread(self, name: str, cell: Cell, statement: ast.stmt) -> Refusal | None:
        """Return why what a statement would make is not certain, in a notebook that was not executed; None if it is."""
        made = self._history.moment_of(statement)
        change = self._history.change(name, made)
        if change is not None:
            return f"{name} may have been changed by {change}", IN_A_NOTEBOOK
        value = getattr(statement, "value", None)
        nodes = (
            []
            if value is None
            else [node for node in ast.walk(value) if isinstance(node, ast.Name)]
        )
        if any(node.id == name for node in nodes):
            return f"{name} is made from itself in {made}", IN_A_NOTEBOOK
        used = self._history.change_of_used(self._used(cell, statement).at_import, made)
        if used is not None:
            return f"{name} was made with {used[0]}, which {used[1]} changes", IN_A_NOTEBOOK
        return None

    def _imported_object(self, name: str, value: Any) -> tuple[str, str] | None:
        """Return module and attribute of an object that a cell has imported."""
        found = self.code.find_binding(name)
        if found is None or not isinstance(found[1], ast.ImportFrom) or found[1].module is None:
            return None
        for each in found[1].names:
            if (each.asname or each.name) == name:
                module = sys.modules.get(found[1].module)
                if getattr(module, each.name, None) is value:
                    return found[1].module, each.name
        return None

    def _decorators(self, statement: ast.stmt) -> tuple[list[ast.expr], list[ast.expr]]:
        """Return the decorators that are kept, and those of cloudtrain: the run calls the function itself."""
        every = getattr(statement, "decorator_list", [])
        ours = [each for each in every if is_remote_decorator(each, self.code)]
        return [each for each in every if each not in ours], ours

    def _add_statement(self, name: str, cell: Cell, statement: ast.stmt) -> None:
        kept, ours = self._decorators(statement)
        line, text = cell.code_of(statement, ours)
        if (
            isinstance(self.code.names.get(name), Remote)
            and not ours
            and _is_called(statement, kept)
        ):
            refusal = (
                f"{name} is made remote in a way that its code does not show, so the run would submit itself",
                f"decorate it with @cloudtrain.remote(...), or call cloudtrain.remote({name}, ...) under another name",
            )
            self._refuse(refusal, "", Place(cell.place, statement.lineno, 1))
            return
        used = used_names(text, is_lazy=self.code.is_lazy)
        # What an assignment calls runs while the module is imported.
        needs = used.at_import if isinstance(statement, _DEFINITION) else used.all
        # The number of a cell changes with each execution, and equal code shall have one digest.
        place = cell.place if cell.is_file else f"{self.code.title}, cell with {name}"
        if isinstance(self.code.names.get(name), Remote) and self._is_called_here(name):
            # What calls a decorated function without a run of its own goes on to do so.
            text = f"{text}{name}.function = {name}\n"
        self.found.pieces[name] = Piece(
            name=name,
            code=text,
            place=place,
            line=line,
            order=cell.order,
            needs=frozenset(needs),
            calls=called_names(statement),
            uses=used.all,
        )
        self._add_imported(statement)
        self._add_used(name, used, cell, statement)

    def _is_called_here(self, name: str) -> bool:
        return any(f"{name}.function" in each.source for each in self.code.cells)

    def _add_imported(self, statement: ast.stmt) -> None:
        """Add the modules that functions import when they are called."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                self.found.modules |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.found.modules.add(node.module)

    def _add_used(self, name: str, used: UsedNames, cell: Cell, statement: ast.stmt) -> None:
        for each in sorted(used.all | (used.assigned & self.code.names.keys())):
            place = _use_of(each, cell, statement)
            is_builtin = hasattr(builtins, each) and not self._history.bindings(each)
            if each == SHOWN and is_builtin:
                # A run has no notebook that could show it.
                self.found.pieces[each] = Piece(each, f"{SHOWN} = print\n")
            elif each in self.code.names and not is_builtin:
                self.add(each, self.code.names[each], f"{name} uses it", place)
            elif not is_builtin and each not in _OF_EVERY_MODULE:
                known = [known for known in self.code.names if not known.startswith("_")]
                hint = did_you_mean(each, [*known, *dir(builtins)], "define it in a cell")
                self._refuse((f"{each} is not defined", hint), f"{name} uses it", place)


def _is_called(statement: ast.stmt, kept: list[ast.expr]) -> bool:
    """Return whether a statement calls something when it is executed: a decorator, or what it assigns."""
    return bool(kept) or not isinstance(statement, _DEFINITION)


def _use_of(name: str, cell: Cell, statement: ast.stmt) -> Place:
    """Return where a statement uses a name first."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == name:
            return Place(cell.place, node.lineno, node.col_offset + 1)
    return Place(cell.place, statement.lineno, 1)


def _importable(value: Any) -> tuple[str, str] | None:
    """Return module and name from which a function or class of a module can be imported."""
    module = sys.modules.get(value.__module__)
    name: str = value.__qualname__
    if "." not in name and getattr(module, name, None) is value:
        return value.__module__, name
    return None


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """Yield a function, what it decorates, or the methods of a class that were written in its body."""
    if isinstance(value, type):
        for each in vars(value).values():
            for function in _functions_of(each):
                if function.__qualname__.startswith(f"{value.__qualname__}."):
                    yield function
        return
    seen = list[Any]()
    waiting = [value]
    while waiting:
        each = waiting.pop(0)
        if any(each is one for one in seen) or isinstance(each, type):
            continue
        seen.append(each)
        waiting += _inner_functions(each)
        if isinstance(each, types.FunctionType):
            yield each
            waiting += _functions_inside(each)


def _inner_functions(value: Any) -> list[Any]:
    """Return what a decorator has made something else of."""
    wrapped = _own_attribute(value, "__wrapped__")
    if isinstance(value, property):
        return [] if value.fget is None else [value.fget]
    if isinstance(value, functools.cached_property | functools.partial):
        return [value.func]
    if isinstance(value, types.MethodType | staticmethod | classmethod):
        return [value.__func__]
    return [] if wrapped is None else [wrapped]


def _own_attribute(value: Any, name: str) -> Any:
    """Return an attribute that an object has itself; its class, which may answer anything, is not asked."""
    try:
        return object.__getattribute__(value, "__dict__").get(name)
    except AttributeError:
        return None


def _functions_inside(value: types.FunctionType) -> Iterator[types.FunctionType]:
    for each in value.__closure__ or ():
        try:
            content = each.cell_contents
        except ValueError:
            # It has no value yet.
            continue
        if isinstance(content, types.FunctionType):
            yield content


def _defines_alone(statement: ast.stmt) -> bool:
    """Return whether a statement is a definition, or an assignment to one name."""
    if isinstance(statement, ast.Assign):
        return len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    if isinstance(statement, ast.AnnAssign):
        return isinstance(statement.target, ast.Name) and statement.value is not None
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
