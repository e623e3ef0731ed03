"""What a function or class of a notebook needs: its source and that of the names it uses, or why these cannot travel."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from cloudtrain.errors import Problem, SpecError, did_you_mean
from cloudtrain.features.functions.cells import UNREAD, Cell, ExecutedCode
from cloudtrain.features.functions.definitions import bare_names, changed_part
from cloudtrain.features.functions.history import History
from cloudtrain.features.functions.literals import Expression, write_value
from cloudtrain.features.functions.local_modules import is_local_module
from cloudtrain.features.functions.names import UsedNames, bound_names, called_names, used_names
from cloudtrain.features.functions.pieces import Collection, Piece, needed_before
from cloudtrain.features.functions.refusals import (
    IN_A_FILE,
    Refusal,
    refuse_content,
    refuse_function,
    refuse_object,
)
from cloudtrain.features.functions.remote_mark import Remote, function_of, is_remote_decorator
from cloudtrain.features.functions.unchanged import Unchanged

_OF_EVERY_MODULE: Final = frozenset({"__name__", "__file__", "__doc__", "__package__", "__spec__"})
_OWN_MODULES: Final = frozenset({"__main__", "builtins"})
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_RANDOM: Final = re.compile(r"\b(rand\w*|shuffle|permutation|choice|normal_?|uniform_?)\(")
"""Calls that draw random numbers."""


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
    collector.refuse_circles()
    collector.note_random_numbers()
    found = collector.found
    if found.problems:
        raise SpecError(tuple(found.problems))
    return found


class _Collector:
    def __init__(self, code: ExecutedCode) -> None:
        self.code = code
        self.found = Collection()
        self._history = History(code)
        self._unchanged = Unchanged(code, self._history)
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
        if vars(builtins).get(name) is value:
            return
        refusal = refuse_object(name, value)
        if refusal:
            self._refuse(refusal, why, place)
        elif isinstance(value, types.ModuleType):
            self._add_module(name, value.__name__, why, place)
        elif isinstance(value, types.FunctionType | type):
            self._add_definition(name, value, why, place)
        else:
            self._add_value(name, value, why, place)

    def refuse_circles(self) -> None:
        """Refuse values that need a definition which itself needs them, such as a registry that decorators fill."""
        pieces = self.found.pieces
        for name, piece in pieces.items():
            circle = [
                each for each in sorted(piece.needs & pieces.keys())
                if not piece.place and name in needed_before(pieces, each)
            ]  # fmt: skip
            if circle:
                refusal = (
                    f"{name} has {circle[0]}, whose definition uses {name}",
                    "fill it inside the function",
                )
                self._refuse(refusal, "", Place(self.code.title))

    def note_random_numbers(self) -> None:
        """Note objects that the run makes again with other random numbers."""
        pieces = self.found.pieces
        for name in self.found.remade:
            parts = [
                pieces[each] for each in (name, *needed_before(pieces, name)) if each in pieces
            ]
            if any(_RANDOM.search(each.code) for each in parts):
                self.found.notes.append(f"{name} may draw other random numbers there than here")

    def _refuse(self, refusal: Refusal, why: str, place: Place) -> None:
        text = f"{refusal[0]}{f' ({why})' if why else ''}"
        problem = Problem(place.cell, place.line, place.column, "", text, refusal[1])
        self.found.problems.append(problem)

    def _add_module(self, name: str, module: str, why: str, place: Place) -> None:
        is_local = is_local_module(module, self.code.folder)
        refusal = self._unchanged.refuse_module(name, is_local=is_local)
        if refusal:
            self._refuse(refusal, why, place)
            return
        for each in self._unchanged.settings_of_module(name):
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
                self._add_module(name, each.name, "", Place(self.code.title))
            elif (
                isinstance(statement, ast.Import)
                and each.asname is None
                and each.name.partition(".")[0] == name
            ):
                self._add_module(name, name, "", Place(self.code.title))
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
            refusal = self._unchanged.refuse_imported(name)
            if refusal:
                self._refuse(refusal, why, place)
                return
            self._add_import(name, *source)
            return
        if value.__module__ == "builtins":
            self._add_alias(name, value)
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
            refusal: Refusal | None = (
                f"{name} is an earlier definition of {real}",
                f"give it a name of its own, and run the cells again that use {name}",
            )
        elif is_decorated and not isinstance(value, type):
            self._add_made(name, cell, statement, why, place)
            return
        else:
            refusal = self._refuse_definition(name, value, cell, statement)
        if refusal:
            self._refuse(refusal, why, place)
            return
        self._add_statement(name, cell, statement)

    def _refuse_definition(
        self, name: str, value: Any, cell: Cell, statement: ast.stmt
    ) -> Refusal | None:
        """Return why a function or class is not what its statement defines now; None if it is."""
        if isinstance(value, types.FunctionType):
            refusal = refuse_function(name, value)
            if refusal:
                return refusal
        if isinstance(value, type) and (stale := self._stale_base(value)):
            return (
                f"{stale} was defined again after {name}, which has the older one",
                f"run the cell of {name} again",
            )
        part = changed_part(value, statement, self.code.names, self._write)
        if part is not None:
            return (
                f"{name} was defined when {part} was another than its cell gives it now",
                f"run the cell of {name} again",
            )
        moment = self._history.moment_of(cell, statement)
        if moment is None:
            return None
        used = self._used(cell, statement)
        reached = self._reached(used.at_import - bare_names(statement), called_names(statement))
        return self._unchanged.refuse_definition(name, moment, reached)

    def _used(self, cell: Cell, statement: ast.stmt) -> UsedNames:
        _, text = cell.code_of(statement, self._decorators(statement)[1])
        return used_names(text, is_lazy=self.code.is_lazy)

    def _reached(self, names: frozenset[str], called: frozenset[str]) -> set[str]:
        """Return names, and what the definitions of those use that are called."""
        waiting, found = set(names & called), set(names)
        while waiting:
            name = waiting.pop()
            found.add(name)
            binding = self.code.find_binding(name)
            if binding is not None and isinstance(binding[1], _DEFINITION):
                waiting |= self._used(*binding).all - found
        return found

    def _write(self, value: Any) -> Expression | None:
        is_local = functools.partial(is_local_module, folder=self.code.folder)
        return write_value(value, self.code.names, is_local=is_local)

    def _stale_base(self, value: type) -> str:
        for base in value.__bases__:
            newest = self.code.names.get(base.__name__)
            if base.__module__ == "__main__" and isinstance(newest, type) and newest is not base:
                return base.__name__
        return ""

    def _add_alias(self, name: str, value: Any) -> None:
        if vars(builtins).get(name) is not value:
            self.found.pieces[name] = Piece(name, f"{name} = {value.__name__}\n")

    def _find_source(self, name: str, value: Any) -> tuple[Cell, ast.stmt] | None:
        """Return the statement that defined a function or class, or what was decorated."""
        real = getattr(value, "__name__", name)
        for function in _functions_of(value):
            cell = self.code.cell_of_code(function.__code__.co_filename)
            if cell is None:
                continue
            for each in (name, real):
                statement = cell.statement_at(function.__code__.co_firstlineno, each)
                if statement is not None:
                    return cell, statement
        return self.code.find_binding(name) or self.code.find_binding(real)

    def _add_value(self, name: str, value: Any, why: str, place: Place) -> None:
        written = self._write(value)
        changed = self._unchanged.refuse_imported(name) if self._is_of_local_module(name) else None
        if changed:
            # The module's own functions have the object, too.
            self._refuse(changed, why, place)
            return
        if written is not None:
            self._add_expression(name, written, place)
            return
        imported = self._imported_object(name, value)
        if imported is not None:
            changed = self._unchanged.refuse_imported(name)
            if changed:
                self._refuse(changed, why, place)
                return
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
        """Add an object that the run makes again by its statement, if this gives the same one."""
        used = self._used(cell, statement)
        is_definition = isinstance(statement, _DEFINITION)
        reached = self._reached(used.at_import, called_names(statement))
        moment = self._history.moment_of(cell, statement)
        refusal = None
        if moment is not None:
            check = (
                self._unchanged.refuse_definition if is_definition else self._unchanged.refuse_value
            )
            refusal = check(name, moment, reached)
        if refusal is not None:
            self._refuse(refusal, why, place)
            return
        value = self.code.names.get(name)
        is_type = type(value).__module__ == "typing"
        if not is_definition and value is not UNREAD and not is_type:
            self.found.remade[name] = cell.place
        self._add_statement(name, cell, statement)

    def _is_of_local_module(self, name: str) -> bool:
        found = self.code.find_binding(name)
        if found is None or not isinstance(found[1], ast.ImportFrom):
            return False
        return is_local_module(found[1].module or "", self.code.folder)

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
            if each == "display" and is_builtin:
                # A run has no notebook that could show it.
                self.found.pieces[each] = Piece(each, "display = print\n")
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
        inner = (getattr(each, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        waiting += [one for one in inner if one is not None]
        if isinstance(each, types.FunctionType):
            yield each
            waiting += _functions_inside(each)


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
