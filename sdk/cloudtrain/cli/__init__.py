"""The command line: parse, call the client, print. A command's module is imported when the command is called."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import click

from cloudtrain import console
from cloudtrain.cli.examples import Group
from cloudtrain.cli.options import profile_option, trust_option
from cloudtrain.cli.os_errors import describe_os_error, discard_output
from cloudtrain.console.terminal import filtered_streams
from cloudtrain.console.waiting import waiting_for_output
from cloudtrain.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_USER,
    CloudtrainError,
    UntrustedHomeError,
    UntrustedSettingsError,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_OBJECTS_BEFORE_COLLECTION = 50_000
COMMAND_GROUPS = {
    "Prepare a job": {
        "init": ("features.setup.commands", "Write a new job from a template."),
        "validate": ("cli.job", "Check a job file, offline."),
        "plan": ("cli.job", "Show everything that a submit would send, offline."),
        "files": ("cli.job", "List the files that are uploaded as code."),
        "rehearse": ("features.rehearsal.commands", "Run, interrupt and resume a job here."),
        "check": ("cli.job", "Check that the account can run the job; change nothing."),
    },
    "Start and stop": {
        "submit": ("cli.job", "Start a run on SageMaker, or with --local on this machine."),
        "resume": ("cli.job", "Start a new run from a run's last checkpoint."),
        "recover": ("features.recovery.commands", "Continue a run by itself after outside causes."),
        "sweep": ("features.sweeps.commands", "Search a job's fields for the best metric."),
        "stop": ("cli.runs", "Stop a run."),
    },
    "Watch": {
        "list": ("cli.runs", "List runs, newest first."),
        "status": ("cli.runs", "Show a run's status."),
        "follow": ("cli.runs", "Show a run's log and status until it ends."),
        "logs": ("cli.runs", "Print a run's log."),
        "metrics": ("cli.runs", "Print the history of a run's metrics."),
        "explain": ("cli.runs", "Explain why a run has failed, and what to do."),
        "dashboard": ("features.dashboard.commands", "Show runs in the browser, live."),
    },
    "Results": {
        "compare": ("cli.comparison", "Compare runs: settings that differ, and metrics."),
        "evaluate": ("features.evaluation.commands", "Evaluate a run's weights."),
        "checkpoints": ("cli.checkpoints", "List, verify and export a run's checkpoints."),
        "download": ("cli.runs", "Copy a run's model, outputs and checkpoints."),
        "report": ("features.dashboard.commands", "Write the page of runs into one HTML file."),
        "card": ("features.dashboard.commands", "Print the model card of a run."),
        "rm": ("cli.runs", "Delete local runs."),
    },
    "Serve a model": {
        "serve": ("features.serving.commands", "Serve a run's model on this machine."),
        "deploy": ("features.serving.commands", "Create an endpoint for a run's model."),
        "undeploy": ("features.serving.commands", "Delete an endpoint."),
    },
    "Account and costs": {
        "configure": ("features.setup.commands", "Store the account's settings, or show them."),
        "costs": ("features.costs.commands", "Sum what runs and endpoints have cost."),
        "prices": ("features.costs.commands", "Show the prices of instances, and their age."),
    },
    "This machine": {
        "doctor": ("features.setup.commands", "Check this machine, offline."),
        "sandbox": ("cli.sandbox", "Run a local AWS that executes training jobs."),
        "completion": ("features.setup.completion", "Print the completion of bash, zsh or fish."),
        "schema": ("cli.job", "Print the JSON Schema of job.yaml."),
    },
}
"""The commands in the groups of `--help`: the module and the help line of each, by its name."""

_COMMANDS = {name: entry for group in COMMAND_GROUPS.values() for name, entry in group.items()}
_NAME_WIDTH = max(map(len, _COMMANDS))


class _LazyGroup(Group):
    """A command group that imports a command's module when the command is called."""

    examples_heading = "First steps"

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"cloudtrain.{_COMMANDS[name][0]}")
        command: click.Command = getattr(module, "list_" if name == "list" else name)
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, and after them the options."""
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title, commands in COMMAND_GROUPS.items():
            with formatter.section(title):
                # Names are as wide in each group, so that all descriptions begin in one column.
                rows = [(f"{name:<{_NAME_WIDTH}}", text) for name, (_, text) in commands.items()]
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin with a text, without an import of the commands."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A closed pipe (`cloudtrain logs ... | head`) is not an error."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            discard_output()
            return 0
        except OSError as error:
            if error.filename is None:
                discard_output()
            raise
        return result

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (
            args
            and args[0] not in _COMMANDS
            and not args[0].startswith("-")
            and not ctx.resilient_parsing
        ):
            from cloudtrain.cli.first_words import hint_of_word

            ctx.fail(f"there is no command {args[0]!r}; {hint_of_word(args, list(_COMMANDS))}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples={
        "cloudtrain init my-job": "write a job that trains",
        "cloudtrain plan my-job": "show what a submit would send",
        "cloudtrain submit my-job --local --follow": "train here; no account is needed",
    },
)
@click.version_option(package_name="cloudtrain", prog_name="cloudtrain")
@profile_option
@trust_option
def cli() -> None:
    """Train PyTorch jobs on many SageMaker instances, and first on this machine.

    One job file says everything. What `plan` shows runs unchanged in each place. For the options and examples of a
    command: cloudtrain COMMAND -h
    """
    from cloudtrain.cli.variables import misspelt_variables

    for warning in misspelt_variables(os.environ):
        console.print_message(f"warning: {warning}")


def run(argv: list[str]) -> int:
    """Run a command line; return its exit code. Only a bug of cloudtrain prints a traceback."""
    command = next((word for word in argv if word in _COMMANDS), "")
    with filtered_streams(), waiting_for_output(command):
        return _run(argv)


def _run(argv: list[str]) -> int:
    # Start-up creates many objects and little garbage; frequent collections would take a tenth of a plan's time.
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    # Without this, pydantic reads the entry points of every installed package to find its plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    as_json = "--json" in argv
    try:
        result = cli.main(args=argv, prog_name="cloudtrain", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        # click converts the second to the first.
        message = "interrupted; to see whether a run was started: cloudtrain list"
        console.print_message(message)
        if as_json:
            console.print_json_error(message, "cloudtrain list", EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return _report_usage(error, as_json=as_json)
    except (UntrustedSettingsError, UntrustedHomeError) as error:
        return _run_trusted(argv, error, as_json=as_json)
    except CloudtrainError as error:
        console.print_error(error, as_json=as_json)
        return error.exit_code
    except OSError as error:
        if (described := describe_os_error(error)) is None:
            return _report_bug(error, as_json=as_json)
        console.print_error(described, as_json=as_json and error.filename is not None)
        return described.exit_code
    except Exception as error:  # noqa: BLE001 (every other exception is a bug of cloudtrain)
        return _report_bug(error, as_json=as_json)
    return result if isinstance(result, int) else 0


def _report_usage(error: click.ClickException, *, as_json: bool) -> int:
    if isinstance(error, click.NoSuchOption):
        from cloudtrain.cli.other_options import explain_option

        error = explain_option(error)
    error.show()
    if as_json:
        console.print_json_error(error.format_message(), "", EXIT_USER)
    return EXIT_USER


def _run_trusted(
    argv: list[str], error: UntrustedSettingsError | UntrustedHomeError, *, as_json: bool
) -> int:
    """Run a command line again after the user has agreed to what was found. The first try did nothing."""
    try:
        if "--trust" not in argv and not console.confirm_trust(error):
            console.print_error(error, as_json=as_json)
            return error.exit_code
        _store_agreement(error)
    except click.Abort:
        # Ctrl-C instead of an answer.
        return EXIT_INTERRUPTED
    except CloudtrainError as refusal:
        console.print_error(refusal, as_json=as_json)
        return refusal.exit_code
    return _run(argv)


def _store_agreement(error: UntrustedSettingsError | UntrustedHomeError) -> None:
    if isinstance(error, UntrustedHomeError):
        from cloudtrain.client.home import trust_home

        trust_home(error.home)
        return
    from cloudtrain.settings.trust import store_agreement

    store_agreement(os.environ, error.file, error.values)


def _report_bug(error: Exception, *, as_json: bool) -> int:
    console.print_message(traceback.format_exc().rstrip())
    console.print_message(f"error: this is a bug in cloudtrain: {type(error).__name__}: {error}")
    if as_json:
        console.print_json_error(f"bug: {type(error).__name__}: {error}", "", EXIT_BUG)
    return EXIT_BUG
