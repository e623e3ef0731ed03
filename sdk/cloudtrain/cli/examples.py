"""Commands whose `--help` ends with examples, which are declared beside each command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _Base = click.Command
else:
    _Base = object


class _ShowsExamples(_Base):
    """The end of `--help`: command lines, each with a few words that say what it does.

    Args:
        examples: What each command line does, by the command line.
    """

    examples_heading = "Examples"

    def __init__(
        self, *arguments: Any, examples: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.examples = dict(examples or {})

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples. Their lines are not wrapped, so that they can be copied."""
        super().format_epilog(ctx, formatter)
        if not self.examples:
            return
        width = max(map(len, self.examples))
        with formatter.section(self.examples_heading):
            for line, meaning in self.examples.items():
                formatter.write(f"{' ' * formatter.current_indent}{line:<{width}}  {meaning}\n")


class Command(_ShowsExamples, click.Command):
    """A command with examples: `@click.command(cls=Command, examples={...})`."""


class Group(_ShowsExamples, click.Group):
    """A group of commands with examples."""

    command_class = Command
