"""Fingerprints of values: equal for equal content, also in another process."""

from __future__ import annotations

import bisect
import copyreg
import dis
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

_PLAIN: Final = (type(None), type(...), bool, int, float, complex, str, bytes)
CONTAINERS: Final = (list, dict, set, tuple)
_CACHED: Final[Any] = type(functools.cache(len))
"""The type of functions that `functools.cache` returns."""
_LOCKS: Final = frozenset({"_thread", "threading", "multiprocessing.synchronize"})
"""Modules of objects that cannot be copied and have no content."""
_MOST_ITEMS: Final = 100
_MOST_CHARACTERS: Final = 60
"""Longest container whose items, and longest name of an item, that a message can name."""
_WEAK: Final = frozenset({"weakref", "_weakref", "_weakrefset"})
"""Modules of references that change with use."""
_SILENT: Final = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
"""Instructions that follow from the others."""
_DERIVED: Final = frozenset(
    {
        *("_abc_impl", "__abstractmethods__", "__dict__", "__doc__", "__module__", "__weakref__"),
        *("__annotations__", "__annotations_cache__", "__dataclass_fields__", "__orig_bases__"),
        *("__firstlineno__", "__parameters__", "__slotnames__", "__static_attributes__"),
        "__type_params__",
    }
)
"""Attributes of classes that follow from others, or from the place of the class."""
_BY_NAME: Final = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)


class Fingerprints:
    """Makes fingerprints of values.

    Of a library, functions and classes are named; of the notebook and its own modules they are read: code, defaults
    and attributes. An object is what `copy` would copy of it; a lock is its type.

    Args:
        own: Names of the notebook's own modules and packages.

    Attributes:
        unknown: Kinds of objects that were found and cannot be copied, such as generators: equal ones may differ.
    """

    def __init__(self, own: Iterable[str]) -> None:
        self._own = frozenset({"__main__", *own})
        self.unknown = set[str]()
        self._known = dict[int, str]()
        self._kept = list[Any]()
        self._open = dict[int, int]()

    def parts(self, value: Any) -> dict[str, str]:
        """Return the fingerprints of a value's parts, by what messages call them."""
        if isinstance(value, types.FunctionType) and not self._reference(value):
            return {name: self.of(part) for name, part in _function_parts(value)}
        if isinstance(value, type) and self._is_own(value):
            return {name: self.of(part) for name, part in _class_parts(value)}
        return {**dict(self._items(value)), "its value": self.of(value)}

    def _items(self, value: Any) -> Iterator[tuple[str, str]]:
        """Yield what a message can name: items of a short container, attributes of an object of an own class."""
        if type(value) in (dict, list, tuple) and len(value) <= _MOST_ITEMS:
            items = value.items() if type(value) is dict else enumerate(value)
            yield from (
                (f"its item {key!r}"[:_MOST_CHARACTERS], self.of(part)) for key, part in items
            )
        state = getattr(value, "__dict__", None) if self._is_own(type(value)) else None
        if type(state) is dict and not isinstance(value, enum.Enum):
            yield from ((f"its attribute {name}", self.of(part)) for name, part in state.items())

    def of_module(self, module: types.ModuleType) -> dict[str, str]:
        """Return the fingerprints of a module's own functions and classes, and of all its other values."""
        return {
            name: self.of(value)
            for name, value in vars(module).items()
            if not name.startswith("__") and _is_content(value, module.__name__)
        }

    def of(self, value: Any) -> str:
        """Return the fingerprint of a value."""
        kind = type(value)
        if kind is int:
            # Python refuses to print long ones in decimal digits.
            return f"int {value:x}"
        if kind in _PLAIN:
            return f"{kind.__name__} {value!r}"
        key = id(value)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            return f"itself {len(self._open) - self._open[key]}"
        self._open[key] = len(self._open)
        try:
            found = _digest(self._describe(value, kind))
        finally:
            del self._open[key]
        self._known[key] = found
        # Its number is that of another object once it is gone.
        self._kept.append(value)
        return found

    def _describe(self, value: Any, kind: type) -> Iterator[str]:
        yield self._reference(kind) or kind.__name__
        if kind in (list, tuple):
            yield from map(self.of, value)
        elif kind in (set, frozenset):
            yield from sorted(map(self.of, value))
        elif kind in (dict, types.MappingProxyType):
            for key, part in value.items():
                yield self.of(key)
                yield self.of(part)
        elif isinstance(value, type | types.FunctionType):
            yield from self._definition(value)
        elif isinstance(value, enum.Enum):
            yield from (self.of(kind), str(value.name), self.of(value.value))
        else:
            yield from self._object(value, kind)

    def _definition(self, value: Any) -> Iterator[str]:
        reference = self._reference(value)
        if reference:
            yield reference
            return
        parts = _class_parts(value) if isinstance(value, type) else _function_parts(value)
        for name, part in sorted(parts, key=lambda each: each[0]):
            yield name
            yield self.of(part)

    def _object(self, value: Any, kind: type) -> Iterator[str]:
        inner = _inner(value)
        if inner is not None:
            yield from map(self.of, inner)
        elif kind.__module__ in _WEAK:
            return
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            yield from (value.dtype.str, str(value.shape), _digest([value.tobytes()]))
        elif "torch" in sys.modules and _is_dense(value, sys.modules["torch"]):
            yield from _tensor(value)
        elif kind.__name__ == "ScriptFunction":
            yield from (value.code, str(value.schema))
        else:
            yield from self._copied(value, kind)

    def _copied(self, value: Any, kind: type) -> Iterator[str]:
        """Yield what a copy of an object would get."""
        try:
            known = copyreg.dispatch_table.get(kind)
            reduced: Any = value.__reduce_ex__(4) if known is None else known(value)
        except Exception:  # noqa: BLE001 (an object's own method may raise anything)
            if kind.__module__ not in _LOCKS:
                self.unknown.add(kind.__name__)
            return
        if isinstance(reduced, str):
            yield reduced
            return
        made, args, state, *items = (*reduced, None, None, None)[:5]
        yield from (self.of(made), self.of(args))
        if type(state) is dict and all(type(each) is str for each in state):
            # Attributes may have been set in another order.
            state = dict(sorted(state.items()))
        yield self.of(state)
        for each in items:
            yield from map(self.of, each or ())

    def _is_own(self, value: Any) -> bool:
        return str(value.__module__).partition(".")[0] in self._own

    def _reference(self, value: Any) -> str:
        """Return the full name of a function or class of a library; an empty text for others."""
        if self._is_own(value):
            return ""
        module, name = str(value.__module__), value.__qualname__
        if isinstance(value, type):
            return f"{module}.{name}"
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return f"{module}.{name}" if found is value else ""


def _is_content(value: Any, module: str) -> bool:
    if isinstance(value, type | types.FunctionType):
        return value.__module__ == module
    return not isinstance(value, types.ModuleType)


def _inner(value: Any) -> tuple[Any, ...] | None:
    """Return the parts of an object that Python does not copy, or not by its content; None for others."""
    if isinstance(value, _CACHED):
        return value.__wrapped__, value.cache_parameters()
    return next((parts(value) for kinds, parts in _PARTS if isinstance(value, kinds)), None)


def _named_parts(value: Any) -> tuple[Any, ...]:
    owner = getattr(value, "__self__", None)
    return value.__qualname__, None if isinstance(owner, types.ModuleType | type) else owner


def _function_parts(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield "its code", value.__code__
    yield "its documentation", value.__doc__
    code, defaults = value.__code__, value.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    for name, default in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        yield f"the default of {name}", default
    for name, default in (value.__kwdefaults__ or {}).items():
        yield f"the default of {name}", default
    for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        yield f"{name}, which it encloses,", _content(cell)
    for name, part in vars(value).items():
        # A function of a notebook may lead to itself, and torch.compile numbers what it has compiled.
        if part is not value and not name.startswith("_torchdynamo"):
            yield f"its attribute {name}", part


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # It has no value yet.
        return ...


def _code_parts(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a code does, without its place in a file."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return list(_instructions(code)), code.co_consts, names, counts


def _instructions(code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yield what a code executes. Calls of methods have two forms, by whether the same cell imports their module."""
    every = list(dis.get_instructions(code))
    kept = [each for each in every if each.opname not in _SILENT]
    starts = [each.offset for each in kept]
    for each in kept:
        name = each.opname.replace("LOAD_METHOD", "LOAD_ATTR")
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            yield name, bisect.bisect_left(starts, each.argval)
        else:
            yield name, each.argval if isinstance(each.argval, str) else each.arg


def _bound_parts(value: Any) -> tuple[Any, ...]:
    return value.__func__, getattr(value, "__self__", None)


_PARTS: Final[tuple[tuple[Any, Callable[[Any], tuple[Any, ...]]], ...]] = (
    (types.ModuleType, lambda value: (value.__name__,)),
    (types.CodeType, _code_parts),
    (_BY_NAME, _named_parts),
    ((types.MethodType, staticmethod, classmethod), _bound_parts),
    (functools.partial, lambda value: (value.func, value.args, value.keywords, vars(value))),
    (property, lambda value: (value.fget, value.fset, value.fdel)),
)
"""The parts of objects by their types."""


def _class_parts(value: type) -> Iterator[tuple[str, Any]]:
    yield "its base", value.__bases__
    if issubclass(value, enum.Enum):
        members = value.__members__.items()
        yield "the set of its members", [(name, each.value, _added(each)) for name, each in members]
    for name, part in vars(value).items():
        is_method = isinstance(part, types.FunctionType | staticmethod | classmethod | property)
        if not is_method and _is_derived(name, part, value):
            continue
        yield f"its {'method' if is_method else 'attribute'} {name}", part


def _added(member: enum.Enum) -> dict[str, Any]:
    """Return the attributes of a member that Python has not given it."""
    return {name: part for name, part in vars(member).items() if not name.startswith("_")}


def _is_derived(name: str, part: Any, owner: type) -> bool:
    """Return whether an attribute follows from others, such as `__dataclass_fields__`."""
    if issubclass(owner, enum.Enum):
        return isinstance(part, owner) or name.startswith("_")
    if name in _DERIVED or name.startswith("__pydantic_"):
        return True
    is_special = name.startswith("__") and name.endswith("__")
    return is_special and type(part) not in (*_PLAIN, *CONTAINERS)


def _is_dense(value: Any, torch: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
    )


def _tensor(value: Any) -> Iterator[str]:
    yield from (str(value.dtype), str(tuple(value.shape)), str(value.requires_grad))
    flat = value.detach().cpu().contiguous().reshape(-1)
    yield _digest([flat.view(sys.modules["torch"].uint8).numpy().tobytes()])


def _digest(parts: Iterable[str | bytes]) -> str:
    found = hashlib.sha256()
    for each in parts:
        content = each if isinstance(each, bytes) else each.encode("utf-8", "surrogatepass")
        found.update(f"{len(content)} ".encode())
        found.update(content)
    return found.hexdigest()[:32]
