"""Each how-to page begins with a recipe: what one gets, at most five lines to copy, and what they print.

Everything else is below the heading Details. Recipes that are marked with `<!-- recipe: runs -->` are run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from support.jobs import REPOSITORY, Cli

from cloudtrain.cli import cli as group

FOLDER = REPOSITORY / "docs" / "how-to"
MOST_LINES = 5
MOST_WORDS = 35
WIDEST_OUTPUT = 96
"""What the site shows without scrolling."""

FORM = re.compile(
    r"# (?P<title>[^\n]+)\n\n(?P<sentence>You get [^\n]+\.)\n\n"
    r"(?P<mark><!-- recipe: runs -->\n)?"
    r"```(?P<language>sh|python)\n(?P<code>.*?)```\n\n"
    r"(?:```text\n(?P<output>.*?)```\n\n)?"
    r"(?P<note>(?:(?!```|#)[^\n]+\n)*\n?)?"
    r"## Details\n\n(?P<details>.*)",
    re.DOTALL,
)
OLD_WORDS = (
    "phases for",
    "left behind",
    "ceiling",
    "model_folder",
    "has no effect",
    "have no effect",
)
"""Words that a stranger cannot know, or that are wrong."""


@dataclass(frozen=True)
class Recipe:
    """The beginning of a page."""

    page: str
    sentence: str
    language: str
    lines: tuple[str, ...]
    output: tuple[str, ...]
    details: str
    runs: bool

    @property
    def commands(self) -> list[list[str]]:
        """The words of each `cloudtrain` command, without what the shell does with it."""
        if self.language != "sh":
            return []
        return [found for line in self.lines if (found := command_of(line))]


def command_of(line: str) -> list[str]:
    """Return the arguments of a line's `cloudtrain`; an empty list where it has none."""
    substituted = re.sub(r"\w+=\$\((.*)\)", r"\1", line)
    words = shlex.split(substituted, comments=True)
    if "cloudtrain" not in words:
        return []
    words = words[words.index("cloudtrain") + 1 :]
    ends = [words.index(sign) for sign in (">", "|", "&", ";") if sign in words]
    return words[: min(ends, default=len(words))]


def recipe_of(path: Path) -> Recipe:
    match = FORM.fullmatch(path.read_text(encoding="utf-8"))
    assert match is not None, f"{path.name} does not begin with a recipe"
    return Recipe(
        page=path.stem,
        sentence=match["sentence"],
        language=match["language"],
        lines=tuple(line for line in match["code"].splitlines() if line.strip()),
        output=tuple((match["output"] or "").splitlines()),
        details=match["details"],
        runs=match["mark"] is not None,
    )


PAGES = sorted(FOLDER.glob("*.md"))
RECIPES = [recipe_of(path) for path in PAGES if FORM.fullmatch(path.read_text(encoding="utf-8"))]
COMMANDS = [
    pytest.param(recipe, words, id=f"{recipe.page}-{number}")
    for recipe in RECIPES
    for number, words in enumerate(recipe.commands)
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_a_recipe_and_details(path: Path) -> None:
    recipe = recipe_of(path)
    assert len(recipe.sentence.split()) <= MOST_WORDS, "one sentence"
    assert ". " not in recipe.sentence, "one sentence"
    assert 1 <= len(recipe.lines) <= MOST_LINES
    assert recipe.output, "what it prints"
    assert max(map(len, recipe.output)) <= WIDEST_OUTPUT, "shorten it with ..."
    assert "\n## " not in recipe.details, "sections are below Details"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_no_words_of_ours(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("`ceiling_usd`", "")
    assert [word for word in OLD_WORDS if word in text] == []


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Return a function that parses a command line as the program does, and runs no command.

    It raises what click raises.
    """

    def run_nothing(_command: click.Command, _context: click.Context) -> None:
        """Leave the command out."""

    def parse_words(words: list[str]) -> None:
        group.main(words, prog_name="cloudtrain", standalone_mode=False)

    # A group calls Command.invoke for itself, too, and then that of the command it has found.
    monkeypatch.setattr(click.Command, "invoke", run_nothing)
    monkeypatch.chdir(REPOSITORY)
    return parse_words


@pytest.mark.parametrize(("recipe", "words"), COMMANDS)
def test_a_command_of_a_recipe_parses(
    recipe: Recipe, words: list[str], parse: Callable[[list[str]], None]
) -> None:
    parse(words)


@pytest.mark.parametrize(
    "words",
    [["plan", "--instnces", "2"], ["plans"], ["checkpoints", "exprt", "digits"], ["rm", "--ol"]],
)
def test_a_mistake_in_a_command_is_found(
    words: list[str], parse: Callable[[list[str]], None]
) -> None:
    with pytest.raises(click.UsageError):
        parse(words)


def without_numbers(line: str) -> str:
    """Replace what differs from one machine and day to the next."""
    line = re.sub(r"-\d{6}-\d{6}-[0-9a-f]{6}", "-ID", line)
    line = re.sub(r"sha256 \S+", "sha256", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:[.,]\d+)*", "0", line)).strip()


def is_printed_in_order(shown: tuple[str, ...], printed: str) -> bool:
    """Return whether the lines of a page are those printed, in this order; `...` stands for any text."""
    rest = iter([without_numbers(line) for line in printed.splitlines()])
    for line in shown:
        if line.strip() == "...":
            continue
        parts = [re.escape(part) for part in without_numbers(line).split("...")]
        pattern = re.compile(r".*?".join(parts))
        if not any(pattern.fullmatch(each) for each in rest):
            return False
    return True


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if recipe.runs], ids=lambda recipe: recipe.page
)
def test_a_recipe_prints_what_its_page_shows(
    cli: Cli, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = ""
    for line in recipe.lines:
        for name, value in re.findall(r"(?:^|\s)([A-Z_]+)=(\S+)(?=.* cloudtrain )", line):
            monkeypatch.setenv(name, value)
        done = cli(*command_of(line), cwd=REPOSITORY)
        assert done.code == 0, done.err
        printed += done.out
    assert is_printed_in_order(recipe.output, printed), printed


def test_some_recipes_are_run() -> None:
    assert sum(recipe.runs for recipe in RECIPES) >= 4
    assert not is_printed_in_order(("cost 1 USD", "..."), "cost 2 EUR")
    assert is_printed_in_order(("...", "cost 1 USD, ..."), "run x\ncost 2.5 USD, estimate 3 USD")
