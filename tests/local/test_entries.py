"""Runs that start a module, and what their code finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.code_folders import write_tree
from support.jobs import Cli

pytestmark = pytest.mark.processes

CLUSTER = "cluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"


def follow(cli: Cli, folder: Path, code: str, *options: str) -> tuple[int, str]:
    """Run a job with this `code` section here; return the exit code and its log."""
    (folder / "job.yaml").write_text(f"name: demo\ncode: {code}\n{CLUSTER}")
    done = cli("submit", folder / "job.yaml", "--local", "--follow", "--json", *options)
    return done.code, done.err


def test_a_module_runs_as_by_python_m(cli: Cli, tmp_path: Path) -> None:
    """Relative imports work, the code folder is on the import path, and spawned processes find the module."""
    train = (
        "import multiprocessing, sys\n"
        "from .parts import NAME\n"
        "import beside\n"
        "def work(text): print('worker:', text, __name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    print('seen:', NAME, beside.NAME, __package__, __spec__.name, sys.argv[1:], flush=True)\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work, args=(NAME,))\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    parts = {"package____init___py": "", "package__parts_py": "NAME = 'part'\n", "beside_py": "NAME = 'beside'\n"}
    folder = write_tree(tmp_path / "job", package__train_py=train, **parts)
    code, log = follow(cli, folder, "{module: package.train, args: [--lr, 1e-4]}")
    assert code == 0, log
    assert "seen: part beside package package.train ['--lr', '1e-4']" in log
    assert "worker: part __mp_main__" in log


def test_a_failing_module_is_reported_from_its_own_line(cli: Cli, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "job", package____init___py="")
    (folder / "package" / "__main__.py").write_text("raise ValueError('a banana')\n")
    code, log = follow(cli, folder, "{module: package}")
    assert code == 4, log
    assert "failed: ValueError: a banana" in log
    assert "runpy" not in log
