"""Safe deserialization of checkpoints: loading one never runs code that it names.

DCP writes pickles and reads them with Python's unpickler, which calls any function that they name. This module reads
DCP's metadata into inert records and rebuilds DCP's classes from them; torch's `weights_only=True` reads everything
else. Values that could not be loaded this way are rejected when they are saved.

DCP takes a second to import. So its classes are imported where they are made: weights alone are read without it.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Self

import torch
from torch import nn

from cloudtrain_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

_ATOMS = frozenset({type(None), bool, float, str, bytes, torch.Tensor, nn.Parameter})
_INT_BITS = 1024
"""torch's reader takes integers of up to 255 bytes."""
_NUMPY = "__numpy__"
"""Key of the replacement of a NumPy array or number, whose own pickles name functions that accept raw memory."""
_NUMPY_KINDS = "biufcSUmM"
BROKEN = (
    *(
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ),
    *(RuntimeError, OverflowError, MemoryError, zipfile.BadZipFile, NotImplementedError),
)
"""Exceptions that readers raise for forged bytes. A RecursionError is a RuntimeError."""
# MultiStepLR stores its milestones in a Counter; newer versions of torch accept it anyway.
torch.serialization.add_safe_globals([Counter])
_ADVICE = "keep plain values in it: numbers, strings, lists, dicts, tensors, NumPy arrays"


def serialize(value: Any, name: str) -> bytes:
    """Return the bytes that torch.save writes for a value.

    Args:
        value: Plain values: numbers, strings, tensors, NumPy's arrays and numbers, and containers of them.
        name: Name of the value for errors.

    Raises:
        CheckpointError: the value could not be loaded again without running code.
    """
    data = _try_serialize(value)
    if data is None:
        raise CheckpointError(_refusal(value, name))
    return data


def deserialize(data: bytes, name: str) -> Any:
    """Return the value that `serialize`, or an earlier version's torch.save of plain values, has written.

    Raises:
        CheckpointError: the data is anything else; no code of it was run.
    """
    try:
        return _replaced(load_plain(data), _as_numpy)
    except BROKEN as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            why = f"is not what torch.save writes of plain values ({type(error).__name__}: {_first_line(error)})"
        else:
            what = named[1].rstrip(".,:;")
            why = f"names {what}: a checkpoint holds data only, and nothing of it was run"
        raise CheckpointError(f"its entry {name} {why}") from None


def check_serializable(values: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that names a value that `serialize` would reject, before the training begins."""
    for name, value in values.items():
        serialize(value, name)


def _try_serialize(value: Any) -> bytes | None:
    """Return the bytes, or None if they could not be loaded again."""
    numpy = sys.modules.get("numpy")
    buffer = io.BytesIO()
    try:
        plain = value
        if numpy is not None:
            kinds = (numpy.ndarray, numpy.generic)
            plain = _replaced(
                value, lambda part: _as_plain(part) if isinstance(part, kinds) else part
            )
        torch.save(plain, buffer)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return None
    data = buffer.getvalue()
    if not _is_plain(plain):
        try:
            load_plain(data)
        except BROKEN:
            return None
    return data


def load_plain(source: bytes | Path) -> Any:
    """Return the value that torch.save has written to memory or to a file, with its tensors in main memory.

    torch.save stores its entries as they are. A reader would also unpack compressed ones, into any amount of memory.

    Raises:
        ValueError: an entry is compressed, or its values are nested deeply.
    """
    opened = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    with opened as stream:
        return _load_plain(stream, stream.seek(0, os.SEEK_END))


def load_state_dict(source: bytes | Path, name: str) -> Mapping[str, Any]:
    """Return the values that `torch.save(model.state_dict(), ...)` has written, without running code that they name.

    Args:
        source: The bytes, or a file.
        name: What an error calls it.

    Raises:
        CheckpointError: it has no state_dict.
    """
    try:
        found = load_plain(source)
    except BROKEN as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = lines[0]
        raise CheckpointError(
            f"{name} is not a file of torch.save(model.state_dict()): {why}"
        ) from None
    if not isinstance(found, Mapping):
        kind = type(found).__name__
        raise CheckpointError(f"{name} holds a {kind}; save model.state_dict() instead")
    return found


def _load_plain(stream: BinaryIO, length: int) -> Any:
    """Return the value of a stream of so many bytes."""
    if zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed")
                if entry.filename.endswith("data.pkl"):
                    _check_pickle(archive.read(entry), length)
    else:
        stream.seek(0)
        for _ in range(_LEGACY_PICKLES):
            _check_pickle(stream, length)
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _is_plain(value: Any) -> bool:
    """Return whether torch's reader certainly accepts the value, which makes a trial read unnecessary."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is int:
        return bool(value.bit_length() <= _INT_BITS)
    if kind is bytes and not value:
        # torch.save writes empty bytes as a call.
        return False
    return kind in _ATOMS


def _refusal(value: Any, name: str) -> str:
    """Return the message that names the part of a value that cannot be saved."""
    for key, part in _parts(value):
        if _try_serialize(part) is None:
            return _refusal(part, f"{name}.{key}")
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{name} is a {kind}, which cannot be loaded again without running code: {_ADVICE}"


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a value with its parts, at any depth, replaced where `replace` returns another object."""
    found = replace(value)
    if found is not value:
        return found
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _replaced(inner, replace)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_replaced(inner, replace) for inner in value)
    return value


def _as_plain(value: Any) -> dict[str, Any]:
    if value.dtype.kind not in _NUMPY_KINDS or not value.dtype.itemsize:
        raise TypeError(f"dtype {value.dtype}")
    # A number has no shape.
    shape = value.shape if hasattr(value, "__setitem__") else None
    return {_NUMPY: value.dtype.str, "shape": shape, "data": value.tobytes() or None}


def _as_numpy(value: Any) -> Any:
    """Return the NumPy array or number of a result of `_as_plain`; other values as they are."""
    if type(value) is not dict or _NUMPY not in value:
        return value
    import numpy as np

    dtype = np.dtype(value[_NUMPY])
    shape = value["shape"]
    data = value["data"]
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"dtype {dtype}")
    array = np.empty(0, dtype)
    if data is not None:
        array = np.frombuffer(data, dtype)
    return array[0] if shape is None else array.reshape(shape).copy()


class _Record:
    """Replaces an object of a class that a pickle names: it stores its arguments and does nothing."""

    kind = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> Self:
        record = object.__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


_DCP = frozenset(
    {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
)
"""Modules of which every name becomes a record: newer versions of PyTorch add classes to them."""
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    _OLD: ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    # The path that it was written to, which is not needed.
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}
"""Other names in DCP's metadata, by module. Seen in PyTorch 2.5 to 2.15, Python 3.11 to 3.14."""


_PUSHES = frozenset(
    {
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "EMPTY_SET", "GLOBAL"),
    }
)  # fmt: skip
_MEMO_WRITES = frozenset({"BINPUT", "LONG_BINPUT", "MEMOIZE"})
_MEMO_READS = frozenset({"BINGET", "LONG_BINGET"})
_CONTAINS = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "REDUCE": 2,
    "NEWOBJ": 2,
    "NEWOBJ_EX": 3,
    "STACK_GLOBAL": 2,
    "BINPERSID": 1,
}
"""Values that an operation replaces by one that contains them."""
_ADDS = {"BUILD": 1, "APPEND": 1, "SETITEM": 2}
"""Values that an operation adds to the one below them."""
_ADDS_ABOVE_MARK = frozenset({"APPENDS", "SETITEMS", "ADDITEMS"})
_WITHOUT_EFFECT = frozenset({"PROTO", "FRAME", "STOP"})
_DEEPEST = 200
_MOST_DIMENSIONS = 64
_LONGEST_PATH = 100
_LEGACY_PICKLES = 5
"""Pickles at the beginning of a file that torch before 1.6 has written: versions, the value, the storages' keys."""


class _MetadataPickle(pickle.Unpickler):
    """Reads DCP's metadata into records.

    Each reading has record classes of its own: a pickle may change a class that it names.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if module in _DCP or name in _RECORDS.get(module, ()):
            return self._kinds.setdefault(name, type(name, (_Record,), {"kind": name}))
        if (module, name) == ("torch", "Size"):
            return _short_tuple
        if (module, name) == ("collections", "OrderedDict"):
            return _empty_dict
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(
            f"its metadata names {module}.{name}, of which no checkpoint consists: a checkpoint holds data only, and "
            "nothing of it was run"
        )


def read_metadata(data: bytes) -> Metadata:
    """Return the metadata from the bytes of DCP's `.metadata` file.

    Raises:
        CheckpointError: the bytes are something else; no code of them was run.
    """
    try:
        _check_pickle(data, len(data))
        return _metadata(_MetadataPickle(data).load(), most_chunks=len(data))
    except BROKEN as error:
        raise CheckpointError(
            f"its metadata is not DCP's ({type(error).__name__}: {_first_line(error)})"
        ) from None


class _Depths:
    """How deeply the values on the unpickler's stack are nested, as far as a sequence of operations has come.

    What is added to a list or dict after it was remembered does not count: neither has a hash.
    """

    _MARK = -1

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def add(self, name: str, argument: Any) -> None:
        """Follow one operation.

        Raises:
            ValueError: a value is nested deeper than any of a checkpoint, or the operation is of no checkpoint.
        """
        stack = self._stack
        # Most operations are of this kind, so the test comes first.
        if name in _PUSHES:
            stack.append(0)
        elif name in _MEMO_WRITES:
            place = len(self._memo) if argument is None else argument
            self._memo[place] = stack[-1] if stack else 0
        elif name in _MEMO_READS:
            stack.append(self._memo.get(argument, 0))
        elif name == "MARK":
            stack.append(self._MARK)
        elif name in _CONTAINS:
            self._push_container(self._pop(_CONTAINS[name]))
        elif name == "TUPLE":
            self._push_container(self._pop_above_mark())
        elif name in _ADDS:
            self._add_to_top(self._pop(_ADDS[name]))
        elif name in _ADDS_ABOVE_MARK:
            self._add_to_top(self._pop_above_mark())
        elif name not in _WITHOUT_EFFECT:
            raise ValueError(f"the operation {name} is of no checkpoint")

    def _pop(self, count: int) -> list[int]:
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _pop_above_mark(self) -> list[int]:
        """Remove the last mark and what is above it; return the latter."""
        taken = []
        while self._stack:
            depth = self._stack.pop()
            if depth == self._MARK:
                break
            taken.append(depth)
        return taken

    def _push_container(self, content: list[int]) -> None:
        self._stack.append(self._depth_around(content))

    def _add_to_top(self, content: list[int]) -> None:
        own = self._stack.pop() if self._stack else 0
        self._stack.append(max(own, self._depth_around(content)))

    def _depth_around(self, content: list[int]) -> int:
        depth = max(content, default=self._MARK) + 1
        if depth > _DEEPEST:
            raise ValueError(f"its values are nested deeper than {_DEEPEST} levels")
        return depth


def _check_pickle(stream: bytes | IO[bytes], size: int) -> None:
    """Refuse a pickle that would take much memory, or end the process.

    The unpickler allocates and fills its memo up to the highest place: nine bytes can ask for 12 GB. A tuple that is
    nested deeply overflows the C stack when it becomes a key, which needs its hash.

    Args:
        stream: The pickle, from where it begins.
        size: Bytes of what it is in.

    Raises:
        ValueError: it is such a pickle, or none that Python's pickler or torch writes.
    """
    depths = _Depths()
    for operation, argument, _ in pickletools.genops(stream):
        name = operation.name
        if name == "LONG_BINPUT" and int(argument or 0) > size:
            raise ValueError(f"place {argument} in the memo of {size} bytes")
        depths.add(name, argument)


def _metadata(record: Any, most_chunks: int) -> Metadata:
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    stored, places, ways = _values(
        record, "Metadata", state_dict_metadata=dict, storage_data=dict, planner_data=dict | None
    )
    if sum(map(_chunk_count, stored.values())) > most_chunks:
        raise ValueError("its tensors share their lists of parts")
    entries = {_checked(name, str): _stored(entry) for name, entry in stored.items()}
    planner_data = None
    if ways is not None:
        planner_data = {_checked(name, str): _way(way) for name, way in ways.items()}
    return Metadata(
        state_dict_metadata=entries,
        planner_data=planner_data,
        storage_data={_index(index): _info(place) for index, place in places.items()},
        storage_meta=StorageMeta(),
    )


def _chunk_count(entry: Any) -> int:
    """Return the number of parts of a tensor; 0 for what `_stored` refuses."""
    state = getattr(entry, "state", None)
    chunks = state.get("chunks") if isinstance(state, dict) else None
    return len(chunks) if isinstance(chunks, list) else 0


def _stored(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        TensorStorageMetadata,
    )

    if getattr(record, "kind", "") == "BytesStorageMetadata":
        return BytesStorageMetadata()
    properties, size, chunks = _values(
        record, "TensorStorageMetadata", properties=_Record, size=tuple, chunks=list
    )
    parts = (_values(chunk, "ChunkStorageMetadata", offsets=tuple, sizes=tuple) for chunk in chunks)
    return TensorStorageMetadata(
        properties=_properties(properties),
        size=_size(size),
        chunks=[ChunkStorageMetadata(_size(offsets), _size(sizes)) for offsets, sizes in parts],
    )


def _properties(record: _Record) -> TensorProperties:
    from torch.distributed.checkpoint.metadata import TensorProperties

    if record.kind != "TensorProperties":
        raise TypeError("properties")
    # PyTorch 2.15 adds a sixth value, the strides; what newer versions add behind them is not
    # needed either.
    dtype, _, requires_grad, _, pin_memory, *_ = _checked(record.state, tuple)
    # Layout and memory format are DCP's defaults: it has deprecated them and looks at neither.
    return TensorProperties(
        dtype=_checked(dtype, torch.dtype),
        requires_grad=bool(requires_grad),
        pin_memory=bool(pin_memory),
    )


def _short_tuple(values: Any) -> tuple[Any, ...]:
    """Return a tuple, which a pickle may ask for many times."""
    if len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"a size of {len(values)} dimensions")
    return tuple(values)


def _enum_member(kind: Any, name: Any) -> _Record:
    """Return a record in place of `getattr`, by which Python 3.11.0 to 3.11.3 names a member of an enumeration.

    No attribute is read.
    """
    if not isinstance(kind, type) or not issubclass(kind, _Record) or not isinstance(name, str):
        raise TypeError("an attribute of something else than an enumeration")
    return kind(name)


def _empty_dict() -> dict[Any, Any]:
    return {}


def _way(way: Any) -> tuple[str | int, ...]:
    if len(way) > _LONGEST_PATH:
        raise ValueError(f"a path of {len(way)} parts")
    return tuple(_checked(key, str | int) for key in way)


def _index(record: Any) -> MetadataIndex:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    name, offset, index = _values(
        record, "MetadataIndex", fqn=str, offset=tuple | None, index=int | None
    )
    return MetadataIndex(name, None if offset is None else _size(offset), index)


def _info(record: Any) -> _StorageInfo:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    *place, transforms = _values(
        record,
        "_StorageInfo",
        relative_path=str,
        offset=int,
        length=int,
        transform_descriptors=object,
    )
    if transforms:
        raise ValueError("it is transformed")
    return _StorageInfo(*place)


def _size(value: tuple[Any, ...]) -> torch.Size:
    return torch.Size(_checked(length, int) for length in _short_tuple(value))


def _values(record: Any, kind: str, **classes: Any) -> list[Any]:
    """Return some attributes of a record of this kind, each of the given class; a missing one is None."""
    if getattr(record, "kind", "") != kind:
        raise TypeError(f"no {kind}")
    state = _checked(record.state, dict)
    return [_checked(state.get(name), each) for name, each in classes.items()]


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(type(value).__name__)
    return value
