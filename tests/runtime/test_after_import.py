"""Calls after the import of a module, beside import hooks of the job."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from cloudtrain_runtime.process import after_import

ENTRYPOINTS = str(Path(__file__).parents[2] / "entrypoints")
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


def test_the_start_of_each_process_imports_few_modules() -> None:
    """The launcher's start module is imported by every Python process that a job starts, however short."""
    program = (
        f"import sys; sys.path.append({ENTRYPOINTS!r})\n"
        "from cloudtrain_runtime.launcher import fresh_start, loopback_store, written_files\n"
        "written_files.start(sys.argv[1])\n"
        "loopback_store.listen_on_loopback()\n"
        "fresh_start.report_fresh_start()\n"
        "print('\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, os.devnull],
        capture_output=True,
        text=True,
        check=True,
    )
    slow = {
        "dataclasses",
        "importlib.resources",
        "inspect",
        "pathlib",
        "socket",
        "tempfile",
        "typing",
    }
    assert slow.isdisjoint(done.stdout.split())
