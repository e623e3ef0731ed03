"""README.md matches the product: its job file validates, its commands exist, its output is what they print."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, REPOSITORY, Cli

pytestmark = pytest.mark.promise

README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def stable_lines(text: str) -> list[str]:
    text = re.sub(r"-\d{6}-\d{6}-[0-9a-f]{6}", "-DATE", text)
    text = re.sub(r"\d+ files, [\d.]+ [KM]B, sha256 [0-9a-f]{12}", "CODE", text)
    # The source is the checkout's commit; an unpacked archive has none.
    text = re.sub(r", \d+ days old", "", text)
    return [line.rstrip() for line in text.strip().splitlines() if not line.startswith("source ")]


def test_it_has_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


def test_the_two_commands_come_first() -> None:
    commands = [
        line for block in blocks("sh") for line in block.splitlines() if line.startswith("make ")
    ]
    assert [line.split("#")[0].strip() for line in commands[:2]] == ["make demo", "make test"]
    makefile = (REPOSITORY / "Makefile").read_text()
    for line in commands:
        assert f"\n{line.split()[1]}:" in makefile


def test_the_demo_is_the_main_job() -> None:
    """tests/local runs this job to its end."""
    makefile = (REPOSITORY / "Makefile").read_text()
    assert (
        "\n\t$(BIN)/cloudtrain submit examples/digits/job.yaml --local --instances 2 --follow\n"
        in makefile
    )


def test_ci_calls_what_the_readme_names() -> None:
    lines = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line.startswith("make ")]
    assert commands == ["make demo slurm test test-all"]


def test_the_job_file_is_the_examples_and_has_ten_lines() -> None:
    (text,) = blocks("yaml")
    assert text == (EXAMPLES / "digits" / "job.yaml").read_text()
    assert len(text.splitlines()) <= 14


def test_the_plans_output_is_real(cli: Cli) -> None:
    block = next(block for block in blocks("console") if "cloudtrain plan" in block)
    command, _, shown = block.partition("\n")
    assert command.startswith("$ cloudtrain plan ")
    done = cli(*command.removeprefix("$ cloudtrain ").split(), cwd=REPOSITORY)
    assert done.code == 0
    assert stable_lines(shown) == stable_lines(done.out)


def test_the_mistakes_are_real(cli: Cli, job: Callable[..., Path]) -> None:
    block = next(block for block in blocks("console") if "cloudtrain validate" in block)
    path = job(
        "name: digits\ncode:\n  task: digits:Digits\ncluster:\n  instance_type: ml.p4d.24xlarge\n  instnces: 2\n"
        "train:\n  epochs: twelve\n  precision: bf61\n",
        digits_py="class Digits(Task): ...",
    )
    done = cli("validate", "job.yaml", cwd=path.parent)
    assert done.code == 2
    assert block.splitlines()[1:] == done.err.splitlines()


COMMANDS = re.findall(
    r"^(?:\$ )?(cloudtrain [a-z].*)$", "".join(blocks("sh") + blocks("console")), flags=re.MULTILINE
)


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
def test_every_command_exists_with_its_options(cli: Cli, line: str) -> None:
    words = line.split("#", maxsplit=1)[0].split()
    done = cli(words[1], "--help")
    assert done.code == 0, line
    for word in words[2:]:
        if word.startswith("-"):
            assert re.search(rf"(^|[\s,/]){re.escape(word)}\b", done.out), f"{line}: {word}"


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_every_link_resolves(name: str) -> None:
    assert (REPOSITORY / name).exists()
