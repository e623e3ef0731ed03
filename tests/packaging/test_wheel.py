"""The wheel that users install, as opposed to the source folders."""

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, REPOSITORY, Cli

import cloudtrain
import cloudtrain_runtime

pytestmark = pytest.mark.promise


def test_the_tests_run_on_the_installed_wheel() -> None:
    for package in (cloudtrain, cloudtrain_runtime):
        assert "site-packages" in str(package.__file__)
        assert not str(package.__file__).startswith(str(REPOSITORY / "sdk"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(folder),
    ]
    subprocess.run([*command, str(REPOSITORY)], check=True)
    return zipfile.Path(next(folder.glob("*.whl")))


def test_it_holds_both_packages_and_their_data(wheel: zipfile.Path) -> None:
    assert {path.name for path in wheel.iterdir()} == {
        "cloudtrain",
        "cloudtrain_runtime",
        f"cloudtrain-{cloudtrain.__version__}.dist-info",
    }
    for package in ("sdk/cloudtrain", "entrypoints/cloudtrain_runtime"):
        for source in (REPOSITORY / package).rglob("*"):
            if source.is_file() and "__pycache__" not in source.parts:
                name = f"{Path(package).name}/{source.relative_to(REPOSITORY / package).as_posix()}"
                assert wheel.joinpath(*name.split("/")).exists(), name


def test_the_page_on_pypi_has_no_relative_link() -> None:
    """PyPI shows the wheel's description, and has no other file of the repository."""
    text = str(importlib.metadata.metadata("cloudtrain").get_payload())
    assert text.strip() == (REPOSITORY / "sdk" / "README.md").read_text(encoding="utf-8").strip()
    in_markdown = re.findall(r"\]\(\s*([^)\s]+)", text)
    in_references = re.findall(r"^\[[^]]+\]:\s*(\S+)", text, re.MULTILINE)
    in_html = re.findall(r"(?:href|src)\s*=\s*[\"']?([^\"'\s>]+)", text)
    links = [*in_markdown, *in_references, *in_html]
    assert [link for link in links if not link.startswith("https://")] == []
    assert importlib.metadata.metadata("cloudtrain")["Description-Content-Type"] == "text/markdown"


def test_the_job_on_pypi_is_the_example() -> None:
    text = (REPOSITORY / "sdk" / "README.md").read_text(encoding="utf-8")
    (job,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert job == (EXAMPLES / "digits" / "job.yaml").read_text(encoding="utf-8")


def test_the_commands_on_pypi_exist(cli: Cli) -> None:
    text = (REPOSITORY / "sdk" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^cloudtrain ([a-z].*?)(?:\s+#.*)?$", text, re.MULTILINE)
    assert len(commands) == 9
    for line in commands:
        command, *words = line.split()
        done = cli(command, "--help")
        assert done.code == 0, line
        assert [word for word in words if word.startswith("--") and word not in done.out] == []


def test_the_version_is_one() -> None:
    assert importlib.metadata.version("cloudtrain") == cloudtrain.__version__


def test_installed_files_equal_this_tree() -> None:
    """Otherwise the tests run on older code."""
    for package, module in (
        ("sdk/cloudtrain", cloudtrain),
        ("entrypoints/cloudtrain_runtime", cloudtrain_runtime),
    ):
        installed = Path(str(module.__file__)).parent
        for source in (REPOSITORY / package).rglob("*.py"):
            assert (
                installed / source.relative_to(REPOSITORY / package)
            ).read_bytes() == source.read_bytes(), source


def test_core_dependencies_are_the_promised_ones() -> None:
    requirements = importlib.metadata.requires("cloudtrain") or []
    core = {line.split(">")[0].split("<")[0] for line in requirements if "extra ==" not in line}
    assert core == {"boto3", "click", "pathspec", "pydantic", "pyyaml", "rich", "tomlkit"}
