"""Each feature is a folder that can be left out: the commands of the core still work, and name no module of it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.support.features import OFFERS, find_offer, offer

PACKAGE = Path(cloudtrain.__file__).parent
TABLES = {"__init__.py", "cli/__init__.py", "support/features.py"}
"""Files of the core that list modules of features: public names, commands, offers."""
FEATURES = sorted(path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py"))


def start(copy: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(copy), "CLOUDTRAIN_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, "-m", "cloudtrain", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def run(copy: Path, folder: Path, *words: str) -> str:
    done = start(copy, folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_works_without_a_feature(feature: str, tmp_path: Path) -> None:
    copy, folder = tmp_path / "site", tmp_path / "job"
    shutil.copytree(PACKAGE, copy / "cloudtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "cloudtrain" / "features" / feature)
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "job.yaml").write_text(
        "name: small\ncode: {script: train.py}\n"
        "cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}\n"
    )
    missing = [sys.executable, "-c", f"import cloudtrain.features.{feature}"]
    assert subprocess.run(missing, env={"PYTHONPATH": str(copy)}, check=False).returncode == 1
    assert "Prepare a job:" in run(copy, folder, "--help")
    assert '"request"' in run(copy, folder, "plan", "job.yaml", "--json")
    run(copy, folder, "submit", "job.yaml", "--local")
    assert "trained" in run(copy, folder, "logs", "--follow")
    assert "no run matches" in run(copy, folder, "rm", "--older-than", "1d", "--keep-best")
    if feature == "sweeps":
        refused = start(copy, folder, "schema", "--sweep")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "this installation has no feature 'sweeps'" in refused.stderr


def test_each_offer_is_a_function_of_a_feature() -> None:
    for name in OFFERS:
        assert find_offer(name) is offer(name)
        assert callable(offer(name))


def test_only_tables_of_the_core_name_modules_of_features() -> None:
    features = PACKAGE / "features"
    modules = tuple(f"{path.parent.name}.{path.stem}" for path in features.glob("*/*.py"))
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("features/") or name in TABLES:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value.removeprefix("cloudtrain.").removeprefix("features.")
                found |= {(name, node.value)} if text.startswith(modules) else set()
    assert found == set()
