"""The statements of a body that certainly run, and those that run before anything can change what imports find.

Code below `if`, in `try` that handles a missing module, and in functions may never run. It is left out, so that what
is found in the rest is sure.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from cloudtrain.job.static_analysis.syntax import Function, ImportStatement, written
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_HANDLED = frozenset(
    {"ImportError", "ModuleNotFoundError", "NameError", "Exception", "BaseException"}
)
"""Exceptions whose handler may continue without a module."""
_HARMLESS_CALLS = ("os.environ.", "warnings.")
"""Calls before an import that install nothing and change no import path."""
_MAIN = lazy_pattern(r"""__name__ == ['"]__main__['"]|['"]__main__['"] == __name__""")
_EXIT = lazy_pattern(r"(sys\.)?exit\(")


def certain_pieces(body: list[ast.stmt], *, is_started: bool) -> Iterator[ast.AST]:
    """Yield the statements and expressions of a body that certainly run, without the bodies of functions.

    Args:
        body: Statements of a module, class or function.
        is_started: Whether it is that of the script or module that Python starts as `__main__`.
    """
    for node in body:
        yield from _certain(node, is_started=is_started)


def first_imports(body: list[ast.stmt]) -> Iterator[ImportStatement]:
    """Yield the imports at the top of a module that run before anything else can change what they find."""
    for statement in body:
        if isinstance(statement, ImportStatement):
            yield statement
            continue
        is_simple = isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign)
        if not is_simple or not all(map(_is_harmless, ast.walk(statement))):
            return


def walk_certain(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it that run with it: no lambdas, and no branches of an expression."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.IfExp) and child is not node.test:
            continue
        if isinstance(node, ast.BoolOp) and child is not node.values[0]:
            continue
        if not isinstance(child, ast.Lambda):
            yield from walk_certain(child)


def leaving_lines(body: list[ast.stmt]) -> Iterator[int]:
    """Yield the lines of a body that may end it, without those of functions in it."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            continue
        yield from (
            each.lineno for each in ast.walk(node) if isinstance(each, ast.Return | ast.Raise)
        )


def definitions(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Yield the functions and classes that a body may define."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from definitions(node.body)


def _certain(node: ast.stmt, *, is_started: bool) -> Iterator[ast.AST]:
    if isinstance(node, ast.If):
        yield node.test
        if is_started and _MAIN.fullmatch(ast.unparse(node.test)):
            yield from certain_pieces(node.body, is_started=True)
    elif isinstance(node, ast.Try | ast.TryStar):
        if not any(map(_recovers, node.handlers)):
            yield from certain_pieces(node.body, is_started=is_started)
        yield from certain_pieces(node.finalbody, is_started=is_started)
    elif isinstance(node, ast.With | ast.AsyncWith):
        managers = [each.context_expr for each in node.items]
        yield from managers
        if not any("suppress" in ast.unparse(each) for each in managers):
            yield from certain_pieces(node.body, is_started=is_started)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
        yield node.test if isinstance(node, ast.While) else node.iter
        yield from certain_pieces(node.body, is_started=is_started)
    elif isinstance(node, ast.ClassDef):
        yield from (*node.decorator_list, *node.bases)
        yield from certain_pieces(node.body, is_started=is_started)
    else:
        yield from _own_expressions(node)


def _own_expressions(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, ast.Match):
        yield node.subject
    elif isinstance(node, Function):
        yield from (*node.decorator_list, *node.args.defaults)
    else:
        yield node


def _recovers(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler lets the program continue after an import that failed."""
    if handler.type is not None:
        caught = re.findall(r"\w+", ast.unparse(handler.type))
        if _HANDLED.isdisjoint(caught):
            return False
    last = handler.body[-1]
    if isinstance(last, ast.Raise):
        return False
    return not (isinstance(last, ast.Expr) and _EXIT.match(ast.unparse(last)))


def _is_harmless(node: ast.AST) -> bool:
    """Return whether an expression is no call, or one that changes only variables or warnings."""
    if isinstance(node, ast.Call):
        return written(node.func).startswith(_HARMLESS_CALLS)
    # `sys.path = [...]`, `sys.path += ...` and the like.
    return not (isinstance(node, ast.Attribute) and written(node).startswith("sys."))
