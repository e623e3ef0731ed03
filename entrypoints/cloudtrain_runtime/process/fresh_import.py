"""Import of a module in a fresh Python: the process that says what the run will have.

Its input is a JSON object: `paths` to import from, the `module`, the `names` in it, the `own` modules and packages of
the notebook, those of them that it has `loaded`, and the program's name in `argv`. Its output is one, too: `names` and
`loaded` with fingerprints, and `state`, names of loaded modules that change with use; or an `error` with its `place`.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract.fingerprints import CONTAINERS, Fingerprints
from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.process.notebook_cells import name_cells


def main() -> None:
    """Answer one request."""
    answer = os.fdopen(os.dup(1), "w")
    # What the code prints is no part of the answer.
    os.dup2(2, 1)
    request = load_json(sys.stdin.read())
    sys.path[:0] = request["paths"]
    sys.argv = request["argv"]
    name_cells()
    try:
        found = _compare(request)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the notebook's code may raise anything)
        found = {"error": _last_line(error), "place": _place(error)}
    with answer:
        answer.write(dump_json(found))


def _compare(request: Mapping[str, Any]) -> dict[str, Any]:
    fingerprints = Fingerprints(request["own"])
    module = importlib.import_module(request["module"])
    loaded = [importlib.import_module(each) for each in request["loaded"]]
    return {
        "names": {name: fingerprints.parts(getattr(module, name)) for name in request["names"]},
        "loaded": {each.__name__: fingerprints.of_module(each) for each in loaded},
        "state": {each.__name__: sorted(_state(each)) for each in loaded},
    }


def _state(module: types.ModuleType) -> Iterator[str]:
    """Yield names that a module's functions assign, or that are filled later, such as a cache."""
    for name, value in vars(module).items():
        if type(value) in CONTAINERS and not value:
            yield name
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_bytes())):
        if isinstance(node, ast.Global):
            yield from node.names


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _place(error: BaseException) -> tuple[str, int | None]:
    """Return the last line of the notebook's code that an error has passed; without one, where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "cell with " in each.filename]
    last = (own or frames)[-1]
    return last.filename, last.lineno


if __name__ == "__main__":
    main()
