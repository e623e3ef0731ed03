"""Whether the run will have what the notebook has: its module is imported here, in a fresh Python, and compared.

What a statement makes, an attribute that a cell has set, a file that has changed since its import: none of these has
to be found by reading the code. What differs is refused by its name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloudtrain.errors import Problem, SpecError, UserError
from cloudtrain.features.functions.local_modules import LocalModules
from cloudtrain.features.functions.pieces import Collection, Piece
from cloudtrain.features.functions.problem_places import in_cell
from cloudtrain.features.functions.refusals import Refusal
from cloudtrain_runtime.contract.fingerprints import Fingerprints
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_MOST_SECONDS: Final = 600
_INSIDE: Final = "make it inside the function, or save it to a file of the job's data"
_MISSING: Final = re.compile(r"NameError: name '(\w+)' is not defined")
_RANDOM: Final = re.compile(r"\b(rand\w*|shuffle|permutation|choice|normal_?|uniform_?)\(")
"""Calls that draw random numbers."""


@dataclass(frozen=True)
class Sent:
    """Code that is sent, and what it was made from.

    Attributes:
        module: Name of its module.
        values: Values of its names in the notebook.
        found: Its parts.
        local: The notebook's own modules and packages.
        title: What messages call the notebook.
        env: The job's `code.env`.
    """

    module: str
    values: Mapping[str, Any] = field(repr=False)
    found: Collection = field(repr=False)
    local: LocalModules
    title: str
    env: Mapping[str, str]


def check_sent(sent: Sent, folder: Path) -> None:
    """Compare the module in a folder with what this process has.

    Raises:
        SpecError: Something differs, or the module cannot be imported. The error names everything.
        UserError: It takes too long.
    """
    loaded = dict(_loaded(sent.local))
    request = {
        "paths": [str(folder), *sorted({str(each.parent) for each in sent.local.packages})],
        "module": sent.module,
        "names": sorted(sent.values),
        "own": sorted({sent.module, *_tops(sent.local)}),
        "loaded": sorted(loaded),
        # A parser of arguments has the name of the program.
        "argv": sys.argv[:1],
    }
    answer = _ask(request, sent, folder)
    if "error" in answer:
        file, line = answer["place"]
        message, hint = _failure(answer["error"], sent.found)
        problem = Problem(file, line, 1 if line else None, "", message, hint)
        raise SpecError((in_cell(problem, folder),))
    fingerprints = Fingerprints(request["own"])
    problems = [
        *_different_names(sent, fingerprints, answer["names"]),
        *_different_modules(loaded, fingerprints, answer, sent.found.notes),
    ]
    if problems:
        raise SpecError(tuple(problems))


def _failure(error: str, found: Collection) -> Refusal:
    """Return what an error in a fresh process means, and the way out."""
    missing = _MISSING.match(error)
    if missing is not None and missing[1] in found.pieces:
        return (
            f"{missing[1]} is filled by what itself needs {missing[1]}, such as a decorator that registers",
            f"write {missing[1]} in one statement below what it has, or fill it inside the function",
        )
    return (
        f"the code fails in a fresh Python: {error}",
        f"the run has the code and the fields of the job, not the variables of cells or the files beside the notebook: {_INSIDE}",
    )


def _ask(request: Mapping[str, Any], sent: Sent, folder: Path) -> dict[str, Any]:
    """Return the answer of a fresh process, which knows what a run knows: the code, and the job's environment."""
    # Without -P it would import what lies in the present folder.
    command = [sys.executable, "-P", "-m", "cloudtrain_runtime.process.fresh_import"]
    try:
        done = subprocess.run(
            command,
            input=dump_json(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=_MOST_SECONDS,
            cwd=folder,
            env={**_first_environ(), **sent.env},
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{sent.title}: what the function uses takes more than {_MOST_SECONDS // 60} minutes to make",
            "make it inside the function",
        ) from None
    try:
        answer: dict[str, Any] = load_json(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        return {"error": lines[-1], "place": (sent.title, None)}
    return answer


def _first_environ() -> dict[str, str]:
    """Return the environment with which this process began, without what cells have set."""
    try:
        content = Path("/proc/self/environ").read_bytes()
    except OSError:
        # Not on Linux.
        return dict(os.environ)
    pairs = (each.partition(b"=") for each in content.split(b"\0") if each)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _different_names(
    sent: Sent, fingerprints: Fingerprints, fresh: Mapping[str, dict[str, str]]
) -> Iterator[Problem]:
    # In the order of the other process: what leads back to itself has the same number there.
    for name, value in sorted(sent.values.items()):
        piece = sent.found.pieces.get(name, Piece(name, ""))
        fingerprints.unknown.clear()
        part = _difference(fingerprints.parts(value), fresh[name])
        if part is not None:
            message = f"{name} is not what its code makes: {part} differs"
            hint = f"run the cell of {name} again, or {_INSIDE}"
            if _RANDOM.search(piece.code):
                hint = f"it draws random numbers: {_INSIDE}"
        elif fingerprints.unknown:
            kind = min(fingerprints.unknown)
            message = (
                f"{name} has a {kind}, whose content cannot be compared with what the run makes"
            )
            hint = _INSIDE
        else:
            continue
        line, column = (piece.line, 1) if piece.place else (None, None)
        yield Problem(piece.place or sent.title, line, column, "", message, hint)


def _different_modules(
    loaded: Mapping[str, Any],
    fingerprints: Fingerprints,
    answer: Mapping[str, Any],
    notes: list[str],
) -> Iterator[Problem]:
    """Yield a problem for each module with other content than its file; note what may be a cache."""
    for name, module in loaded.items():
        here, fresh = fingerprints.of_module(module), answer["loaded"][name]
        state = {each for each in answer["state"][name] if here.get(each) != fresh.get(each)}
        notes += [f"{name}.{each} is here what its file does not make it" for each in sorted(state)]
        part = next((each for each in _differences(here, fresh) if each not in state), None)
        if part is not None:
            path = Path(str(module.__file__))
            message = f"{name} has another {part} here than {path.name} gives it"
            hint = f"importlib.reload({name}), or write the change into its file"
            yield Problem(str(path), None, None, "", message, hint)


def _difference(here: Mapping[str, str], fresh: Mapping[str, str]) -> str | None:
    return next(_differences(here, fresh), None)


def _differences(here: Mapping[str, str], fresh: Mapping[str, str]) -> Iterator[str]:
    return (each for each in {**here, **fresh} if here.get(each) != fresh.get(each))


def _loaded(local: LocalModules) -> Iterator[tuple[str, Any]]:
    """Yield the notebook's own modules that this process has loaded."""
    files = {each.resolve() for each in local.files}
    files |= {each.resolve() for one in local.packages for each in one.rglob("*.py")}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name != "__main__" and path is not None and Path(path).resolve() in files:
            yield name, module


def _tops(local: LocalModules) -> Iterator[str]:
    yield from (each.stem for each in local.files)
    yield from (each.name for each in local.packages)
