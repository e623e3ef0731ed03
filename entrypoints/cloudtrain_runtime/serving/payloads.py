"""Content of requests and responses: JSON, NumPy arrays and images; bad content is a `RequestError`."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from cloudtrain_runtime.contract.strict_json import dump_json, load_json

JSON: Final = "application/json"
NPY: Final = "application/x-npy"
_MAX_PIXELS: Final = 2**25
_BYTES_PER_PIXEL: Final = 32
"""Measured for four channels: as bytes, as float32, and once more as the model's input."""
_BYTES_PER_IMAGE: Final = 2**26
"""Texts and profiles in an image, which Pillow unpacks up to a limit of its own."""
_BYTES_PER_JSON_BYTE: Final = 40
"""Measured for nested objects; numbers take less."""
_BYTES_PER_BYTE: Final = 10
"""Integers of one byte as float32, and once more as the model's input."""
_IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_NUMBERS: Final = "biuf"


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: HTTP status, 400 to 499, or 503.
        message: What is wrong with it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Answer(NamedTuple):
    """The answer to a request: HTTP status, content and its type."""

    status: int
    body: bytes
    kind: str


PONG: Final = Answer(200, b"", JSON)
"""The answer to GET /ping."""


def error_answer(status: int, message: str) -> Answer:
    """Return an answer with an error: `{"error": "..."}`."""
    return Answer(status, dump_json({"error": message}).encode(), JSON)


def media_type(header: str) -> str:
    """Return the media type of a Content-Type header, without its parameters; JSON if it is empty."""
    return header.partition(";")[0].strip().lower() or JSON


def decode(content_type: str, body: bytes) -> Any:
    """Return the content of a request: parsed JSON, a NumPy array, a PIL image, or the bytes of another type.

    Raises:
        RequestError: it is not of the type that its header names.
    """
    if not body:
        raise RequestError(400, "the request has no content")
    kind = media_type(content_type)
    if kind == JSON:
        return _decode_json(body)
    if kind == NPY:
        return _decode_npy(body)
    return _decode_image(body) if kind.startswith("image/") else body


def needed_bytes(content_type: str, body: bytes) -> int:
    """Return about how much memory the content of a request takes while it becomes the model's input."""
    kind = media_type(content_type)
    if kind.startswith("image/"):
        return _BYTES_PER_IMAGE + _BYTES_PER_PIXEL * _pixels(body)
    return (_BYTES_PER_JSON_BYTE if kind == JSON else _BYTES_PER_BYTE) * len(body)


def accepted_type(header: str) -> str:
    """Return the type of the response that an Accept header asks for.

    Raises:
        RequestError: it accepts neither JSON nor NumPy arrays.
    """
    wanted = [media_type(each) for each in header.split(",")]
    for kind in wanted:
        if kind in (JSON, NPY):
            return kind
        if kind in ("*/*", "application/*"):
            return JSON
    raise RequestError(406, f"Accept: expected {JSON} or {NPY}, got {', '.join(wanted)}")


def encode(content: Any, kind: str) -> bytes:
    """Return the body of a response.

    Raises:
        RequestError: the content is no single array, and the request accepts nothing else.
        TypeError: it has no JSON form.
    """
    if kind == JSON:
        return dump_json(_plain(content)).encode()
    import numpy as np

    values = list(content.values()) if isinstance(content, Mapping) else [content]
    array = np.asarray(_array(values[0])) if len(values) == 1 else np.asarray(None)
    if array.dtype.kind not in _NUMBERS:
        raise RequestError(406, f"this model's outputs are no single array: accept {JSON}")
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def _decode_json(body: bytes) -> Any:
    try:
        return load_json(body, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError as error:  # also UnicodeDecodeError
        raise RequestError(400, f"the content is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _decode_npy(body: bytes) -> Any:
    import numpy as np
    from numpy.lib import format as npy

    stream, why = io.BytesIO(body), "its header does not describe numbers of this size"
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
        # NumPy allocates what the header names, before it reads the data.
        has_all = math.prod(shape) * dtype.itemsize == len(body) - stream.tell()
        if dtype.kind in _NUMBERS and has_all and all(size >= 0 for size in shape):
            stream.seek(0)
            # In the order of rows: the order in memory can change the last bit of a product.
            return np.asarray(np.load(stream, allow_pickle=False), order="C")
    except Exception as error:  # noqa: BLE001 (numpy's parser of a header raises errors of many kinds)
        why = str(error)
    raise RequestError(400, f"the content is not a NumPy array of numbers (.npy): {why}")


def _decode_image(body: bytes) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise RequestError(415, "images need the package pillow in code.requirements") from None
    why = f"it has more than {_MAX_PIXELS} pixels"
    try:
        image = Image.open(io.BytesIO(body), formats=_IMAGE_FORMATS)
        if image.width * image.height <= _MAX_PIXELS:
            image.load()
            return image
    except UnidentifiedImageError:
        why = f"expected one of {', '.join(_IMAGE_FORMATS)}"
    except Exception as error:  # noqa: BLE001 (decoders of images raise errors of many kinds)
        why = str(error)
    raise RequestError(400, f"the content is not an image that can be read: {why}")


def _pixels(body: bytes) -> int:
    """Return the number of an image's pixels by its header; 0 for one that will not be read."""
    try:
        from PIL import Image

        image = Image.open(io.BytesIO(body), formats=_IMAGE_FORMATS)
    except Exception:  # noqa: BLE001 (the same error is reported when the image is read)
        return 0
    pixels = image.width * image.height
    return pixels if pixels <= _MAX_PIXELS else 0


def _array(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tensors and arrays."""
    if hasattr(value, "tolist"):  # tensors, arrays and their numbers
        has_objects = getattr(value.dtype, "kind", "") == "O"
        return _plain(value.tolist()) if has_objects else value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
