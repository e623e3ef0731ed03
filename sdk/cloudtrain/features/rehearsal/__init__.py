"""Rehearsals: run a job on this machine, interrupt it, resume it, and report what is proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.support.lazy_names import import_lazily, modules_by_name

if TYPE_CHECKING:  # for type checkers and editors; the same names as in `_NAMES`
    from cloudtrain.client.receipts import Receipt as Receipt
    from cloudtrain.features.rehearsal.report import Rehearsal as Rehearsal

_NAMES = {
    "client.receipts": "Receipt",
    "features.rehearsal.report": "Rehearsal",
}
"""The public names by the module that defines them."""

_MODULE_OF = modules_by_name(_NAMES)

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (a list of strings, but no literal)
__getattr__ = import_lazily(__name__, _MODULE_OF)
