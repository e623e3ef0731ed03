"""The requirements of a job: whether they contradict each other, and whether pip installs them."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from support.plans import CODE, NOW, SETTINGS
from support.wheels import write_wheel

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.catalog import bundled_prices
from cloudtrain.catalog.images import images
from cloudtrain.features.rehearsal.starting import check_requirements, find_contradiction, torch_of
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.support.checks import Check, Result

BACKEND = """
import os

def prepare_metadata_for_build_wheel(folder, settings=None):
    os.makedirs(os.path.join(folder, "built-1.0.dist-info"))
    with open(os.path.join(folder, "built-1.0.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: built\\nVersion: 1.0\\n")
    return "built-1.0.dist-info"

def build_wheel(folder, settings=None, metadata=None):
    raise SystemExit("command 'gcc' failed: No such file or directory")
"""
"""The build of a package whose metadata are known, and which cannot be compiled here."""
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "psutil==5.9.8\nnumpy>=2\nPSUtil == 6.0.0  # newer\n",
            "psutil==5.9.8 and PSUtil == 6.0.0",
        ),
        ("a.b[x]==1.0\na-b==2\n", "a.b[x]==1.0 and a-b==2"),
        ("psutil==5.9\npsutil==5.9.0\n", ""),
        ('psutil==5.9; python_version < "3.12"\npsutil==6.0; python_version >= "3.12"\n', ""),
        (
            "psutil==5.*\npsutil==5.9.8\npsutil>=6\n-r more.txt\n--index-url https://example.org/a==b\n",
            "",
        ),
    ],
)
def test_contradicting_pins_are_found(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "requirements.txt").write_text(text)
    problem = find_contradiction(tmp_path, "requirements.txt")
    assert problem.startswith(found)
    assert bool(problem) == bool(found)


@dataclass(frozen=True)
class Requirements:
    """A job with requirements, whose packages pip finds in a folder of wheels only.

    Attributes:
        plan: Its plan, with an image of the Python that runs the tests.
        code: Its code folder.
        folder: Where the environment is created.
        torch: Version of torch in the image.
    """

    plan: Plan
    code: Path
    folder: Path
    torch: str

    def add_wheel(self, name: str, version: str, *requires: str) -> None:
        """Add a package."""
        write_wheel(self.code / "wheels", name, version, requires=requires)

    def check(self, text: str) -> Check:
        """Return the check of these requirements."""
        (self.code / "requirements.txt").write_text(f"--no-index\n--find-links wheels\n{text}\n")
        start = partial(subprocess.run, cwd=self.code, capture_output=True, text=True, check=False)
        found = check_requirements(self.plan, self.code, self.folder, start, 100.0)
        assert found is not None
        return found


@pytest.fixture
def requirements(job: Callable[..., Path], tmp_path: Path) -> Requirements:
    """Return a job with an image of the Python that runs the tests."""
    image = next((each for each in images() if each.python == PYTHON), None)
    if image is None:
        pytest.skip(f"no image has Python {PYTHON}")
    cluster = f"{{instance_type: ml.p4d.24xlarge, framework: '{image.framework}'}}"
    path = job(f"name: demo\ncode: {{script: train.py}}\ncluster: {cluster}\n", train_py="")
    (path.parent / "requirements.txt").touch()
    spec = JobSpec.from_yaml(path, ["code.requirements=requirements.txt"])
    plan = make_plan(spec, CODE, SageMakerTarget(SETTINGS, bundled_prices()), now=NOW, suffix="1")
    return Requirements(plan, path.parent, tmp_path / "checks", torch_of(image))


def test_requirements_install_beside_the_image_s_torch(requirements: Requirements) -> None:
    requirements.add_wheel("tiny", "1.0", "torch>=2", "other")
    requirements.add_wheel("other", "2.0")
    found = requirements.check("tiny")
    text = f"2 packages of requirements.txt installed in a clean environment of Python {PYTHON}"
    assert (found.result, found.detail) == (Result.PASS, text)
    assert not (requirements.folder / "environment").exists()


def test_a_package_that_must_be_compiled_is_unknown(requirements: Requirements) -> None:
    """The compiler, or the CUDA, may be in the image."""
    wheels = requirements.code / "wheels"
    wheels.mkdir()
    with tarfile.open(wheels / "built-1.0.tar.gz", "w:gz") as archive:
        for name, text in {
            "PKG-INFO": "Metadata-Version: 2.1\nName: built\nVersion: 1.0\n",
            "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
            "backend.py": BACKEND,
        }.items():
            member = tarfile.TarInfo(f"built-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    found = requirements.check("built")
    assert found.result == Result.UNKNOWN, found.detail
    assert "requirements.txt could not be installed on this machine" in found.detail


def test_another_torch_than_the_image_s_is_unknown(requirements: Requirements) -> None:
    requirements.add_wheel("tiny", "1.0", "torch==2.4.9")
    requirements.add_wheel("torch", "2.4.9")
    found = requirements.check("tiny")
    assert found.result == Result.UNKNOWN, found.detail
    assert found.detail.startswith(
        f"requirements.txt replaces torch {requirements.torch} of the image by 2.4.9"
    )


def test_a_missing_package_is_named(requirements: Requirements) -> None:
    requirements.add_wheel("tiny", "1.0", "absent>=3")
    found = requirements.check("tiny")
    assert found.result == Result.FAIL
    assert "requirements.txt does not resolve: ERROR: " in found.detail
    assert "absent>=3" in found.detail
