"""Log of every AWS call of cloudtrain and its runtime, in the processes of tests and all their child processes.

sitecustomize.py installs it if CLOUDTRAIN_TEST_RECORD names a folder. tests/support/aws_calls.py reads the log. The
product has no code for it: botocore is patched after its import. Calls that the tests or a
user's script make themselves are left out.
"""

import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

_OURS = ("cloudtrain", "cloudtrain_runtime")
_MARK = "_cloudtrain_made_by"
_TEXT_CHARACTERS = 300
_FILE = os.path.join(os.environ["CLOUDTRAIN_TEST_RECORD"], "calls.jsonl")  # noqa: PTH118 (pathlib costs each process)
_seen: set[str] = set()


def install() -> None:
    """Patch the libraries that call AWS, now or after their import. Further calls in a process have no effect."""
    if any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        return
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds modules as Python does, and patches those in `_PATCHES` after they are loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        patch = _PATCHES.get(name)
        spec = PathFinder.find_spec(name, path, target) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_botocore(module: ModuleType) -> None:
    base = module.BaseClient
    make, convert = base.__init__, base._convert_to_request_dict

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        make(self, *arguments, **named)
        setattr(self, _MARK, _stack(sys._getframe(1)))

    def _convert_to_request_dict(
        self: Any, api_params: Any, operation_model: Any, *arguments: Any, **named: Any
    ) -> Any:
        # Here the parameters contain the changes of all hooks. A hook replaces the estimator's request by the plan's.
        service = self.meta.service_model.service_name
        _write(
            service, operation_model.name, api_params, sys._getframe(1), getattr(self, _MARK, None)
        )
        return convert(self, api_params, operation_model, *arguments, **named)

    base.__init__ = __init__
    base._convert_to_request_dict = _convert_to_request_dict


_PATCHES = {"botocore.client": _patch_botocore}


def _write(
    service: str, operation: str, params: Any, frame: FrameType, made_by: list[str] | None
) -> None:
    stack = _stack(frame)
    if (
        stack is None
    ):  # a thread of a library: attribute the call to the code that created the client
        stack = made_by
    if not stack:
        return
    import json

    line = json.dumps(
        {
            "service": service,
            "operation": operation,
            "parameters": _short_parameters(params),
            "stack": stack,
            "program": [os.path.basename(sys.argv[0]), *sys.argv[1:6]],  # noqa: PTH119
        },
        sort_keys=True,
    )
    form = re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "0", line)
    if form in _seen:
        return
    _seen.add(form)
    # With one write in append mode, lines of several processes do not mix.
    try:
        file = os.open(_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except FileNotFoundError:  # the test session has ended and deleted the folder
        return
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def _short_parameters(params: Any) -> dict[str, Any]:
    """Return the parameters that are short texts, numbers or lists of texts, and under "" the names of all."""
    found: dict[str, Any] = {"": sorted(params)}
    for name, value in params.items():
        is_short = isinstance(value, str | int | bool) and len(str(value)) <= _TEXT_CHARACTERS
        if is_short or (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            found[name] = value
    if "Delete" in params:
        found["Keys"] = sorted({each["Key"] for each in params["Delete"]["Objects"]})[:10]
    return found


def _stack(frame: FrameType | None) -> list[str] | None:
    """Return cloudtrain's functions on the stack, the innermost first.

    Empty if other code than cloudtrain's or a library's makes the call, None if there are only frames of libraries.
    """
    found: list[str] = []
    while frame is not None:
        name = _module(frame)
        if name.partition(".")[0] in _OURS:
            function = f"{name}:{frame.f_code.co_qualname}"
            if function not in found:
                found.append(function)
        elif not found and not _is_library(frame.f_code.co_filename):
            return []
        frame = frame.f_back
    return found or None


def _module(frame: FrameType) -> str:
    """Return the name of a frame's module; for `python -m`, the name of the module and not `__main__`."""
    name = str(frame.f_globals.get("__name__", ""))
    spec = frame.f_globals.get("__spec__")
    return str(spec.name) if name == "__main__" and spec is not None else name


def _is_library(file: str) -> bool:
    return file.startswith("<") or "/lib/python3" in file
