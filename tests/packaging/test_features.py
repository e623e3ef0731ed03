"""Each feature is a folder that can be left out: the commands of the core still work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cloudtrain

PACKAGE = Path(cloudtrain.__file__).parent
FEATURES = sorted(path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py"))


def run(copy: Path, folder: Path, *words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(copy), "CLOUDTRAIN_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
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
    assert "Commands" in run(copy, folder, "--help")
    assert '"request"' in run(copy, folder, "plan", "job.yaml", "--json")
    run(copy, folder, "submit", "job.yaml", "--local")
    assert "trained" in run(copy, folder, "logs", "--follow")
