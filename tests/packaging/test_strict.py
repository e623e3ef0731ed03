"""In CI a missing package fails the tests that need it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import REPOSITORY

pytestmark = pytest.mark.promise

SKIPS = {
    "importorskip": "import pytest\ndef test(): pytest.importorskip('no_such_package')\n",
    "whole file": "import pytest\npytest.importorskip('no_such_package')\n",
    "pip install": "import pytest\ndef test(): pytest.skip('NOT TESTED: no mpi4py here: pip install mpi4py')\n",
}


def outcome(folder: Path, text: str, strict: str, *options: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "support.strict_skips",
            "-p",
            "no:cacheprovider",
            "-rs",
            *options,
            folder,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "tests"),
            "CLOUDTRAIN_TEST_STRICT": strict,
        },
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("kind", SKIPS)
def test_a_skip_for_a_missing_package_fails_in_ci(kind: str, tmp_path: Path) -> None:
    code, shown = outcome(tmp_path, SKIPS[kind], "1")
    assert code != 0, shown
    assert "install the package" in shown
    code, shown = outcome(tmp_path, SKIPS[kind], "0")
    assert "1 skipped" in shown


@pytest.mark.parametrize("mark", ["promise", "processes"])
def test_a_file_with_a_proof_is_not_skipped(mark: str, tmp_path: Path) -> None:
    """`make test` collects files whose packages only `make test-all` installs, but none of them may have a proof."""
    text = f"{SKIPS['whole file']}pytestmark = pytest.mark.{mark}\n"
    code, shown = outcome(tmp_path, text, "1", "-m", "promise")
    assert ("install the package" in shown) == (mark == "promise"), shown
    assert code == (2 if mark == "promise" else 5), shown


def test_other_skips_stay_skips_in_ci(tmp_path: Path) -> None:
    code, shown = outcome(
        tmp_path, "import pytest\ndef test(): pytest.skip('terraform is not installed')\n", "1"
    )
    assert (code, "1 skipped" in shown) == (0, True), shown
