"""The README of each example begins with what it needs, and the commands that it prints can be planned."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, REPOSITORY, Cli

FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
NEEDS = re.compile(r"Needs `pip install '\.\[(?P<extras>[a-z,]+)\]'` in the clone")


def printed_submits(example: str) -> list[list[str]]:
    """Return the arguments of each `cloudtrain submit` in a README's blocks, without comments.

    Those with a variable of the shell are left out: it holds the id of a run.
    """
    text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    pattern = r"^(?: {4})?(?:\w+=\$\()?cloudtrain submit (.*?)\)?(?: +#.*)?$"
    lines = re.findall(pattern, text, re.MULTILINE)
    return [line.split() for line in lines if "$" not in line]


PRINTED = [
    pytest.param(name, words, id=f"{name}-{number}")
    for name in FOLDERS
    for number, words in enumerate(printed_submits(name))
]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_readme_begins_with_what_it_needs(name: str) -> None:
    title, _, first, *_ = (EXAMPLES / name / "README.md").read_text(encoding="utf-8").splitlines()
    assert title == f"# {name}"
    match = NEEDS.match(first)
    assert match is not None, first
    known = importlib.metadata.metadata("cloudtrain").get_all("Provides-Extra") or []
    assert set(match["extras"].split(",")) <= set(known)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_readme_has_a_result_and_its_time(name: str) -> None:
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    (result,) = re.findall(r"^Result: .*?(?:\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert re.search(r"(?:minute|second)s?\b.* on\s+2 CPU\s+cores", result, flags=re.DOTALL), result


def test_the_list_of_examples_has_each() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[([\w-]+)\]\(\1/README\.md\)", text, re.MULTILINE)) == FOLDERS


@pytest.mark.parametrize(("name", "words"), PRINTED)
def test_a_printed_submit_can_be_planned(
    cli: Cli, name: str, words: list[str], tmp_path: Path
) -> None:
    """From the folder in which the README runs it. What a program of the README writes is replaced by a file."""
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    folder = REPOSITORY
    if f"cd examples/{name}" in text:
        folder = tmp_path / name
        folder.symlink_to(EXAMPLES / name)
    made = re.findall(r"data\.\w+\.uri=(\w+)", " ".join(words))
    options = [f"--set=data.base.uri={tmp_path}/{each}" for each in made]
    for each in made:
        (tmp_path / each).mkdir()
        (tmp_path / each / "config.json").write_text("{}")
    given = [word for word in words if word not in ("--follow", "--sandbox")]
    place = () if "--local" in given else ("--region", "us-west-2")
    done = cli("plan", *given, *options, *place, "--json", cwd=folder)
    assert done.code == 0, done.err
