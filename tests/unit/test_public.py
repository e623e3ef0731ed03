import os
import subprocess
import sys
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.settings import profile_file

REPOSITORY = Path(__file__).parent.parent.parent
HEAVY = ("torch", "sagemaker", "boto3", "botocore", "moto", "numpy")


def imported_by(*arguments: str) -> tuple[int, set[str]]:
    """Run the command line in a process of its own; return its exit code and the modules that it has imported."""
    program = (
        "import sys; from cloudtrain.cli import run; code = run(sys.argv[1:]); "
        "print('\\n'.join(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY
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
def test_what_is_offline_imports_nothing_heavy(arguments: list[str]) -> None:
    code, modules = imported_by(*arguments)
    assert code == 0
    assert "cloudtrain" in modules
    assert modules.isdisjoint(HEAVY)
    assert "rich" not in modules


def test_help_imports_no_pydantic() -> None:
    assert imported_by("--help")[1].isdisjoint({"pydantic", "yaml", "rich"})


def test_only_an_edit_of_settings_imports_tomlkit() -> None:
    file = profile_file(os.environ)
    file.parent.mkdir(parents=True)
    file.write_text("bucket = 'one'\n")
    for arguments in (["plan", "examples/digits/job.yaml"], ["configure", "--show"], ["configure", "--list"]):
        assert "tomlkit" not in imported_by(*arguments)[1], arguments
    assert "tomlkit" in imported_by("configure", "--set", "region=us-west-2", "--offline")[1]


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, cloudtrain; print(sorted(m for m in sys.modules if m.startswith(('cloudtrain', 'pydantic'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['cloudtrain']"


def test_every_public_name_is_there() -> None:
    for name in cloudtrain.__all__:
        assert getattr(cloudtrain, name) is not None, name
    assert dir(cloudtrain) == sorted(cloudtrain.__all__)
    with pytest.raises(AttributeError):
        cloudtrain.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "first",
    ["cloudtrain.plan", "from cloudtrain.plan import Plan", "import cloudtrain.plan", "import cloudtrain.api"],
)
def test_the_verb_plan_is_callable_whatever_was_imported_first(first: str) -> None:
    program = f"import cloudtrain\n{first}\nassert callable(cloudtrain.plan), cloudtrain.plan\nprint(cloudtrain.Plan)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["pass", "import cloudtrain_runtime.context", "import cloudtrain_runtime.worker"])
def test_a_task_gets_the_function_context_whatever_was_imported_first(first: str) -> None:
    program = f"{first}\nfrom cloudtrain_runtime import context\nprint(context().world_size)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
