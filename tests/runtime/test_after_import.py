"""Calls after the import of a module, beside import hooks of the job."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from cloudtrain_runtime.process import after_import

NAME = "module_with_hooks"


class OwnLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.seen.append("own")


class OwnFinder(importlib.machinery.PathFinder):
    """An import hook of a job, or of a tool for tracing."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname == NAME else None
        if spec is not None and spec.origin is not None:
            spec.loader = OwnLoader(fullname, spec.origin)
        return spec


def test_a_hook_of_the_job_is_called_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text("seen = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    others = [each for each in sys.meta_path if type(each).__module__ != after_import.__name__]
    monkeypatch.setattr(sys, "meta_path", [OwnFinder, *others])

    after_import.call_after_import(NAME, lambda module: module.seen.append("ours"))

    assert importlib.import_module(NAME).seen == ["own", "ours"]
