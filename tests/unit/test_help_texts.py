"""`--help` of every command fits 80 columns and ends with examples that the parser accepts."""

import re
import shlex

import click
import pytest
from support.jobs import Cli
from support.reference_pages import commands

from cloudtrain.cli import cli as root
from cloudtrain.cli.examples import Command, Group

COMMANDS = dict(commands(root, "cloudtrain"))
EXAMPLES = [(name, line) for name, each in COMMANDS.items() for line in each.examples]  # type: ignore[attr-defined]


def parse(line: str, monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """Parse a command line as the tool does; return the command that it would call."""
    called: list[click.Command] = []
    monkeypatch.setattr(click.Command, "invoke", lambda command, _: called.append(command))
    # What follows a pipe or a redirection is the shell's.
    words = shlex.split(re.split(r" (?:\||>>?) ", line)[0])
    assert words[0] == "cloudtrain"
    root.main(words[1:], prog_name="cloudtrain", standalone_mode=False)
    return called[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_ends_with_examples(cli: Cli, name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, (Command, Group))
    assert len(command.examples) >= 2
    shown = cli(*name.split()[1:], "--help").out.splitlines()
    assert [line for line in shown if len(line) > 80] == []
    last = shown[-len(command.examples) :]
    assert [line.split() for line in last] == [
        [*line.split(), *meaning.split()] for line, meaning in command.examples.items()
    ]


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_example_is_a_legal_command_line(
    monkeypatch: pytest.MonkeyPatch, name: str, line: str
) -> None:
    called = parse(line, monkeypatch)
    if isinstance(COMMANDS[name], Group):
        # An example of a group calls one of its commands.
        assert line.startswith(f"{name} ")
    else:
        assert called is COMMANDS[name]


def test_a_wrong_example_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError):
        parse("cloudtrain plan --instnces 2", monkeypatch)
