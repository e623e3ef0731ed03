"""Do the tests notice a wrong line? Choose lines of the product by a seed, make each one wrong, and run the tests.

    PYTHONPATH=tests python -m support.mutations choose --seed 1 > tests/mutations/seed-1.jsonl
    PYTHONPATH=tests python -m support.mutations run tests/mutations/seed-1.jsonl FOLDER

The list is committed before the tests run. FOLDER is a clone of this repository with its .venv: its source and its
installed package are changed, and restored after each line. A line is caught by the first level that fails. In each
level the tests that name its module run first, which saves hours.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {"cloudtrain": "sdk", "cloudtrain_runtime": "entrypoints"}
BESIDE_UNIT = ("tests", "--ignore=tests/unit", "--ignore=tests/ecosystem")
LEVELS = {
    "check": (("tests/unit",), ()),
    "test": (BESIDE_UNIT, ("-m", "promise")),
    "test-all": (BESIDE_UNIT, ("-m", "not promise")),
}
"""Tests and marker of each level."""
_NO_TESTS = 5
_OTHER_SIDE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


@dataclass(frozen=True)
class Mutation:
    """A line of the product that is made wrong.

    Attributes:
        file: Path in the repository.
        line: Its first line, from 1.
        last: Its last line.
        kind: What is done: a condition is negated, a statement is dropped, or a bound is off by one.
        before: The statement as it is, without line breaks.
        after: What replaces it.
    """

    file: str
    line: int
    last: int
    kind: str
    before: str
    after: str


def choose(seed: int, number: int = 20) -> list[Mutation]:
    """Return mutations of different files, equally many in each package, by a seed."""
    chance = random.Random(seed)  # noqa: S311 (no secret)
    chosen = []
    for package, folder in PACKAGES.items():
        files = sorted((REPOSITORY / folder / package).rglob("*.py"))
        chance.shuffle(files)
        usable = (found for file in files if (found := list(mutations_of(file))))
        for _ in range(number // len(PACKAGES)):
            found = next(usable)
            kind = chance.choice(sorted({each.kind for each in found}))
            chosen.append(chance.choice([each for each in found if each.kind == kind]))
    return chosen


def mutations_of(file: Path) -> Iterator[Mutation]:
    """Yield each mutation of a file: of the statements inside its functions, but for docstrings."""
    name = str(file.relative_to(REPOSITORY))
    for statement in _statements(ast.parse(file.read_text(encoding="utf-8"))):
        for kind, change in _changes(statement):
            mutant = copy.deepcopy(statement)
            after = change(mutant)
            yield Mutation(
                name,
                statement.lineno,
                _last_line(statement),
                kind,
                _head(statement),
                "pass" if after is None else _head(after),
            )


def apply(mutation: Mutation, text: str) -> str:
    """Return a file's text with a mutation. The lines below keep their numbers."""
    lines = text.splitlines(keepends=True)
    first = lines[mutation.line - 1]
    indent = first[: len(first) - len(first.lstrip())]
    taken = mutation.last - mutation.line + 1
    keyword = "el" if first.lstrip().startswith("elif ") else ""
    wrong = f"{indent}{keyword}{mutation.after}\n"
    lines[mutation.line - 1 : mutation.last] = [wrong, *["\n"] * (taken - 1)]
    return "".join(lines)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    inner = {id(node): node for each in functions for node in ast.walk(each)}
    for node in inner.values():
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node


_Change = Callable[[ast.stmt], ast.stmt | None]


def _changes(statement: ast.stmt) -> Iterator[tuple[str, _Change]]:
    match statement:
        case ast.If() | ast.While():
            yield "negated condition", _negate
        case ast.Expr(value=ast.Call()):
            yield "dropped statement", lambda _: None
        case ast.Return(value=ast.Compare() | ast.BoolOp()):
            yield "negated condition", _negate_value
    if any(_bounds(statement)):
        yield "off by one", _shift


def _negate(statement: ast.stmt) -> ast.stmt:
    assert isinstance(statement, ast.If | ast.While)
    statement.test = ast.UnaryOp(ast.Not(), statement.test)
    return statement


def _negate_value(statement: ast.stmt) -> ast.stmt:
    assert isinstance(statement, ast.Return)
    assert statement.value is not None
    statement.value = ast.UnaryOp(ast.Not(), statement.value)
    return statement


def _bounds(statement: ast.stmt) -> Iterator[ast.Compare]:
    for part in _own_expressions(statement):
        for node in ast.walk(part):
            if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER_SIDE:
                yield node


def _shift(statement: ast.stmt) -> ast.stmt:
    first = next(_bounds(statement))
    first.ops[0] = _OTHER_SIDE[type(first.ops[0])]()  # type: ignore[index]
    return statement


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield a statement's expressions, without the statements below it."""
    for _, value in ast.iter_fields(statement):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.expr):
                yield each


def _last_line(statement: ast.stmt) -> int:
    """Return the last line of a statement, or of the head of one that has a body."""
    body = getattr(statement, "body", None)
    if body is None:
        return statement.end_lineno or statement.lineno
    return max(body[0].lineno - 1, statement.lineno)


def _head(statement: ast.stmt) -> str:
    """Return a statement in one line, without its body."""
    if not isinstance(statement, ast.If | ast.While | ast.For | ast.With | ast.Try):
        return " ".join(ast.unparse(statement).split("\n"))
    return ast.unparse(statement).split("\n")[0]


# ---------------------------------------------------------------- run


def run(mutations: Sequence[Mutation], clone: Path) -> Iterator[dict[str, object]]:
    """Run the levels for each mutation in a clone; yield where each one was caught."""
    for mutation in mutations:
        source = clone / mutation.file
        (installed,) = (clone / ".venv" / "lib").glob(
            f"python3*/site-packages/{Path(*Path(mutation.file).parts[1:])}"
        )
        original = source.read_text(encoding="utf-8")
        wrong = apply(mutation, original)
        began = time.monotonic()
        try:
            for path in (source, installed):
                path.write_text(wrong, encoding="utf-8")
            caught = next(
                (level for level in LEVELS if not _passes(level, mutation, clone)), "nobody"
            )
        finally:
            for path in (source, installed):
                path.write_text(original, encoding="utf-8")
        yield {**asdict(mutation), "caught": caught, "seconds": round(time.monotonic() - began)}


def _passes(level: str, mutation: Mutation, clone: Path) -> bool:
    tests, marker = LEVELS[level]
    near = [file for file in _tests_of(mutation, clone) if _is_in(file, level)]
    return (not near or _run_tests(near, marker, clone)) and _run_tests(tests, marker, clone)


def _tests_of(mutation: Mutation, clone: Path) -> list[str]:
    """Return the test files that name a mutation's module."""
    module = ".".join(Path(mutation.file).with_suffix("").parts[1:])
    files = sorted((clone / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(clone)) for file in files if module in file.read_text(encoding="utf-8")
    ]


def _is_in(file: str, level: str) -> bool:
    is_unit = file.startswith("tests/unit/")
    return is_unit == (level == "check") and not file.startswith("tests/ecosystem/")


def _run_tests(tests: Sequence[str], marker: Sequence[str], clone: Path) -> bool:
    """Return whether tests pass, or there are none."""
    command = [".venv/bin/python", "-m", "pytest", "-x", "-q", "--dist", "worksteal"]
    done = subprocess.run(
        [*command, "--numprocesses", "3", *tests, *marker],
        cwd=clone,
        env={**os.environ, "CLOUDTRAIN_TEST_SIZE": "quick"},
        check=False,
        stdout=subprocess.DEVNULL,
    )
    return done.returncode in (0, _NO_TESTS)


def main() -> None:
    """Print a list of mutations, or where each one of a list is caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    choosing = commands.add_parser("choose")
    choosing.add_argument("--seed", type=int, required=True)
    choosing.add_argument("--number", type=int, default=20)
    running = commands.add_parser("run")
    running.add_argument("list", type=Path)
    running.add_argument("clone", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "choose":
        for mutation in choose(arguments.seed, arguments.number):
            print(json.dumps(asdict(mutation)))
        return
    lines = arguments.list.read_text(encoding="utf-8").splitlines()
    mutations = [Mutation(**json.loads(line)) for line in lines]
    for result in run(mutations, arguments.clone.resolve()):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
