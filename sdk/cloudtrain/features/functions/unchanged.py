"""Whether what a statement of a notebook made is still what it would make: if not, it is refused."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from typing import Any, Final

from cloudtrain.features.functions.cells import UNREAD, ExecutedCode
from cloudtrain.features.functions.history import History, Moment
from cloudtrain.features.functions.refusals import Refusal
from cloudtrain.features.functions.remote_mark import Remote

_RUN_AGAIN: Final = "run the cell of {} again"
_DEFINITIONS: Final = (types.ModuleType, types.FunctionType, type, Remote)
CONSTANTS: Final = (bool, int, float, complex, str, bytes)
"""Types of values that no call changes."""
_SETTING: Final = 2
"""Steps of an attribute of a library's own object, such as `torch.backends.cudnn.benchmark`: 2 and more."""


class Unchanged:
    """Checks of names by the order in which statements were executed.

    Args:
        code: The executed code.
        history: The order.
    """

    def __init__(self, code: ExecutedCode, history: History) -> None:
        self._code = code
        self._history = history

    def refuse_value(self, name: str, moment: Moment, used: Iterable[str]) -> Refusal | None:
        """Return why the statement of an object is not executed again; None if it may be.

        Args:
            name: Name of the object.
            moment: Its statement.
            used: Names that the statement uses.
        """
        others = [
            each
            for each in self._history.bindings(name)
            if ast.dump(each.statement) != ast.dump(moment.statement)
        ]
        is_read = self._code.names.get(name) is not UNREAD
        if others and is_read:
            return (
                f"{name} is made by several statements ({others[-1]}; {moment}), and it is not certain which one it is of",
                "restart the kernel and run each cell once, or make it inside the function",
            )
        start = moment
        if is_read and moment.statement is not moment.cell.statements[0]:
            # An equal statement may have made it, if the cell ended before this one with an error.
            start = self._history.bindings(name)[0]
        is_constant = _is_constant(moment.statement)
        names = {name, *self._aliases(name)}
        change = self._history.change(names, start, is_definition=is_constant)
        if change is not None:
            return (
                f"{name} may have changed since {moment} made it ({change})",
                f"change it before, in one statement that makes {name}, or make it inside the function",
            )
        return self._refuse_used(name, moment, used)

    def refuse_definition(self, name: str, moment: Moment, used: Iterable[str]) -> Refusal | None:
        """Return why a function or class has something else than its definition gives it; None if not.

        Args:
            name: Its name.
            moment: Its definition.
            used: Names that the definition uses when it is executed.
        """
        change = self._history.change([name], moment, is_definition=True)
        if change is not None:
            return (
                f"{name} was changed after its definition ({change})",
                "write the change into its cell, or make it inside the function",
            )
        return self._refuse_used(name, moment, used)

    def refuse_module(self, name: str, *, is_local: bool) -> Refusal | None:
        """Return why a module has something else than its file gives it; None if not."""
        for moment, steps in self._history.changes_of(name):
            if is_local or steps < _SETTING:
                return (
                    f"an attribute of {name} was set in {moment}, which the run does not do",
                    "set it inside the function, or write it into the module",
                )
        return None

    def settings_of_module(self, name: str) -> list[str]:
        """Return where settings of a library were changed."""
        return [str(each) for each, steps in self._history.changes_of(name) if steps >= _SETTING]

    def refuse_imported(self, name: str) -> Refusal | None:
        """Return why a function, class or object of a module has changed since its import; None if it has not."""
        imported = self._history.bindings(name)
        value = self._code.names.get(name)
        if not imported or not isinstance(imported[-1].statement, ast.ImportFrom):
            return None
        is_fixed = isinstance(value, (*_DEFINITIONS, *CONSTANTS))
        change = self._history.change([name], imported[0], is_definition=is_fixed)
        if change is None:
            return None
        return (
            f"{name} may have changed since its import ({change})",
            "change it in its module, or inside the function",
        )

    def _aliases(self, name: str) -> list[str]:
        """Return other names of an object, and of what has it as a part."""
        value = self._code.names.get(name, UNREAD)
        if value is UNREAD:
            return []
        return [
            each
            for each, other in list(self._code.names.items())
            if other is value or any(part is value for part in _parts(other))
        ]

    def _refuse_used(self, name: str, moment: Moment, used: Iterable[str]) -> Refusal | None:
        for each in sorted(used):
            if each == name:
                continue
            found = self._history.rebinding(each, moment)
            if found is None and not self._is_module(each):
                found = self._history.change(
                    [each], moment, is_definition=self._is_definition(each)
                )  # fmt: skip
            if found is not None:
                return (
                    f"{name} was made with {each}, which {found} may have changed since",
                    _RUN_AGAIN.format(name),
                )
        return None

    def _is_module(self, name: str) -> bool:
        return isinstance(self._known(name), types.ModuleType | ast.Import)

    def _is_definition(self, name: str) -> bool:
        kinds = (*_DEFINITIONS, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        known = self._known(name)
        if isinstance(known, ast.Assign | ast.AnnAssign):
            return _is_constant(known)
        return isinstance(known, (*kinds, *CONSTANTS)) or known is None

    def _known(self, name: str) -> Any:
        """Return the value of a name; the statement that binds it where the value is not known."""
        value = self._code.names.get(name, UNREAD)
        if value is not UNREAD:
            return value
        found = self._code.find_binding(name)
        return None if found is None else found[1]


def _parts(value: Any) -> Iterable[Any]:
    """Return the elements of a container, or the attributes of an object."""
    if isinstance(value, _DEFINITIONS):
        return ()
    if type(value) is dict:
        return list(value.values())
    if type(value) in (list, tuple, set):
        return list(value)
    attributes = getattr(value, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else ()


def _is_constant(statement: ast.stmt) -> bool:
    """Return whether a statement assigns a number or text, which no call changes."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Constant)
