"""What a command imports, and that offline commands open no socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli

from cloudtrain.settings.settings import profile_file

REPOSITORY = Path(__file__).parent.parent.parent
HEAVY = ("torch", "sagemaker", "boto3", "botocore", "moto", "numpy")


def imported_by(*arguments: str) -> tuple[int, set[str]]:
    """Run the command line in a separate process; return its exit code and the modules that it imported."""
    program = (
        "import sys; from cloudtrain.cli import run; code = run(sys.argv[1:]); "
        "print('\\n'.join(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    return done.returncode, {name.partition(".")[0] for name in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["validate", "examples/digits/job.yaml"],
        ["plan", "examples/digits/job.yaml", "--json"],
        ["plan", "examples/digits/job.yaml", "--local"],
        ["files", "examples/digits/job.yaml"],
        ["list", "--local"],
        ["prices"],
        ["configure", "--show"],
        ["configure", "--set", "bucket=my-bucket", "--offline"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_offline_commands_import_no_heavy_module(arguments: list[str]) -> None:
    code, modules = imported_by(*arguments)
    assert code == 0
    assert "cloudtrain" in modules
    assert modules.isdisjoint(HEAVY)
    assert "rich" not in modules


@pytest.mark.parametrize("line", ["validate JOB", "plan JOB", "plan JOB --local", "files JOB"])
def test_offline_commands_import_nothing_of_runs(line: str) -> None:
    program = (
        "import sys; from cloudtrain.cli import run; code = run(sys.argv[1:]); "
        "print('\\n'.join(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *line.replace("JOB", "examples/digits/job.yaml").split()],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    imported = set(done.stderr.splitlines())
    assert "cloudtrain.client.offline" in imported
    runs = {"cloudtrain.client.client", "cloudtrain.backends.base", "cloudtrain.runs.status"}
    assert imported.isdisjoint({*runs, "cloudtrain.backends.container.job", "ctypes", "tarfile"})


def test_help_imports_no_pydantic() -> None:
    assert imported_by("--help")[1].isdisjoint({"pydantic", "yaml", "rich"})


def test_only_an_edit_of_settings_imports_tomlkit() -> None:
    file = profile_file(os.environ)
    file.parent.mkdir(parents=True)
    file.write_text("bucket = 'one'\n")
    for arguments in (
        ["plan", "examples/digits/job.yaml"],
        ["configure", "--show"],
        ["configure", "--list"],
    ):
        assert "tomlkit" not in imported_by(*arguments)[1], arguments
    assert "tomlkit" in imported_by("configure", "--set", "region=us-west-2", "--offline")[1]


def test_importing_the_package_imports_nothing_else() -> None:
    program = "import sys, cloudtrain; print(sorted(m for m in sys.modules if m.startswith(('cloudtrain', 'pydantic'))))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['cloudtrain']"


SEALED = {"CLOUDTRAIN_TEST_GUARD": "sealed"}


@pytest.mark.parametrize(
    "line",
    [
        "validate JOB",
        "plan JOB",
        "plan JOB --request",
        "plan JOB --local",
        "files JOB",
        "schema",
        "prices",
        "list",
    ],
)
def test_offline_commands_open_no_socket(cli_process: Cli, line: str) -> None:
    done = cli_process(
        *line.replace("JOB", str(EXAMPLES / "digits" / "job.yaml")).split(), environ=SEALED
    )
    assert done.code == 0, done.err
    assert "offline" not in done.err


def test_the_socket_guard_works() -> None:
    code = "import socket; socket.socket()"
    sealed = {**os.environ, **SEALED}
    done = subprocess.run(
        [sys.executable, "-c", code], env=sealed, capture_output=True, text=True, check=False
    )
    assert "PermissionError: this command is offline" in done.stderr


def test_help_of_each_command_imports_no_pydantic() -> None:
    program = (
        "import sys, click; from cloudtrain.cli import cli; context = click.Context(cli); "
        "[cli.get_command(context, name).get_help(context) for name in cli.list_commands(context)]; "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules = {name.partition(".")[0] for name in done.stdout.split()}
    assert "cloudtrain" in modules
    assert modules.isdisjoint({"pydantic", "yaml", "rich", *HEAVY})


def test_the_supervisor_of_a_run_imports_no_planner() -> None:
    """A submit waits for the supervisor, which knows a run from its request."""
    program = "import sys, cloudtrain.backends.container.__main__; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert imported.isdisjoint({*HEAVY, "pydantic", "yaml"})
    above = ("cloudtrain.job", "cloudtrain.planning.plan", "cloudtrain.bundle")
    assert imported.isdisjoint(above)
