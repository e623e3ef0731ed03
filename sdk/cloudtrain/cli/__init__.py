"""The command line: parse, call `api`, print. Commands are loaded when they are used."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from typing import Any

import click

from cloudtrain import console
from cloudtrain.cli.machine import describe_os_error, discard_output
from cloudtrain.cli.options import profile_option, trust_option
from cloudtrain.console.terminal import filtered_streams
from cloudtrain.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USER, CloudtrainError, UntrustedSettingsError

_OBJECTS_BEFORE_COLLECTION = 50_000
_COMMANDS = {
    "validate": ("job", "Check a job file: offline, without credentials."),
    "plan": ("job", "Show everything that a submit would send: offline, without credentials."),
    "files": ("job", "Show what code travels, its size and why, and what stays behind."),
    "check": ("account", "Ask the account whether the job can run there; changes nothing."),
    "submit": ("job", "Start a run on SageMaker, or with --local on this machine."),
    "resume": ("job", "Start a new run from the last checkpoint of one that has ended."),
    "status": ("runs", "Tell the truth about a run."),
    "logs": ("runs", "Print a run's log."),
    "follow": ("runs", "Come back to a run and watch it to its end."),
    "checkpoints": ("checkpoints", "List, verify and export what a run has saved."),
    "explain": ("explain", "Tell why a run has failed, and what to do."),
    "list": ("runs", "List runs, newest first."),
    "stop": ("runs", "End a run and every process of it."),
    "sandbox": ("sandbox", "Serve a local AWS whose training jobs really run."),
    "configure": ("configure", "Store the account's settings, and show where each comes from."),
    "schema": ("schema", "Print the JSON Schema of job.yaml."),
    "prices": ("prices", "Show what instances cost, and how old the prices are."),
}


class _LazyGroup(click.Group):
    """Knows its commands by name and help, and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{_COMMANDS[name][0]}")
        command: click.Command = getattr(module, "list_" if name == "list" else name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A reader that has seen enough (`cloudtrain logs ... | head`) is no error."""
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
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from cloudtrain.errors import did_you_mean

            ctx.fail(f"there is no command {args[0]!r}; {did_you_mean(args[0], list(_COMMANDS))}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cloudtrain", prog_name="cloudtrain")
@profile_option
@trust_option
def cli() -> None:
    """What is planned is what is rehearsed is what is sent.

    Plan, rehearse and submit multi-instance PyTorch training jobs to SageMaker from one job file.
    """


def run(argv: list[str]) -> int:
    """Run a command line; return its exit code. Only a bug of ours shows a traceback."""
    with filtered_streams():
        return _run(argv)


def _run(argv: list[str]) -> int:
    # Start-up makes many objects and little garbage: collecting it again and again takes a tenth of a plan's time.
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    # Else pydantic reads the entry points of every installed package to find plugins for itself.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    as_json = "--json" in argv
    try:
        result = cli.main(args=argv, prog_name="cloudtrain", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # click makes the first of the second
        message = "interrupted; whether something was started tells: cloudtrain list"
        console.print_message(message)
        if as_json:
            console.print_json_error(message, "cloudtrain list", EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        if as_json:
            console.print_json_error(error.format_message(), "", EXIT_USER)
        return EXIT_USER
    except UntrustedSettingsError as error:
        return _run_trusted(argv, error, as_json=as_json)
    except CloudtrainError as error:
        console.print_error(error, as_json=as_json)
        return error.exit_code
    except OSError as error:
        if (described := describe_os_error(error)) is None:
            return _report_bug(error, as_json=as_json)
        console.print_error(described, as_json=as_json and error.filename is not None)
        return described.exit_code
    except Exception as error:  # noqa: BLE001 (the last line of defence: everything else is our bug)
        return _report_bug(error, as_json=as_json)
    return result if isinstance(result, int) else 0


def _run_trusted(argv: list[str], error: UntrustedSettingsError, *, as_json: bool) -> int:
    """Run a command line again after the user has agreed to the settings beside the job; nothing was done before."""
    from cloudtrain.client.account import trust_settings

    try:
        if "--trust" not in argv and not console.confirm_trust(error):
            console.print_error(error, as_json=as_json)
            return error.exit_code
        trust_settings(error.file, error.values)
    except click.Abort:  # Ctrl-C instead of an answer
        return EXIT_INTERRUPTED
    except CloudtrainError as refusal:
        console.print_error(refusal, as_json=as_json)
        return refusal.exit_code
    return _run(argv)


def _report_bug(error: Exception, *, as_json: bool) -> int:
    console.print_message(traceback.format_exc().rstrip())
    console.print_bug(error, as_json=as_json)
    return EXIT_BUG
