"""The documentation's first page: its job file, the plan beside it, its picture, and how little it links."""

import re
import shlex
import xml.etree.ElementTree as ET

import pytest
import yaml
from support.jobs import EXAMPLES, REPOSITORY, Cli

PAGE = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
BODY = PAGE.partition("```{toctree}")[0]
PICTURE = REPOSITORY / "docs" / "pictures" / "demo.svg"


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", BODY, flags=re.DOTALL)
    return str(text)


def test_install_comes_first_and_links_are_few() -> None:
    assert block("sh").startswith("make demo ")
    assert "pip install '.[local,sagemaker]'" in block("sh")
    assert len(re.findall(r"\]\(|^:link:", BODY, flags=re.MULTILINE)) <= 15


def test_the_job_file_is_the_example() -> None:
    text = (EXAMPLES / "digits" / "job.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(block("yaml")) == yaml.safe_load(text)


def test_the_plans_lines_are_real(cli: Cli) -> None:
    """A line that ends with an ellipsis is the beginning of one."""
    command, *shown = block("console").splitlines()
    words = shlex.split(command.removeprefix("$ cloudtrain "))
    done = cli(*words, cwd=EXAMPLES / "digits")
    assert done.code == 0, done.err
    printed = done.out.splitlines()
    for line in shown:
        beginning = line.removesuffix(" …")
        is_whole = beginning == line
        assert any(each == line if is_whole else each.startswith(beginning) for each in printed), (
            line
        )


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_recording_is_shown(page: str) -> None:
    assert re.search(r"!\[[^\]]+\]\((docs/)?pictures/demo\.svg\)", (REPOSITORY / page).read_text())


def test_the_recording_has_no_script_and_is_small() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    root = ET.fromstring(text)  # noqa: S314, written by this project
    names = {element.tag.partition("}")[2] for element in root.iter()}
    assert names <= {"svg", "title", "style", "defs", "g", "text", "rect", "circle", "use"}
    assert "@keyframes" in text
    assert "prefers-reduced-motion" in text
    assert not re.search(r"(?:href|src)=\"(?!#)|url\(", text)
