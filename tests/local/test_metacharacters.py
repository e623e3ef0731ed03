"""Metacharacters of shells in all texts of a job are passed on unchanged, and no shell executes them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from support.jobs import Cli
from support.metacharacters import (
    NAME,
    TEXT,
    plant,
    traces,
)

import cloudtrain
from cloudtrain.errors import UserError

pytestmark = [pytest.mark.processes]

SCRIPT = """
import json, os, pathlib, sys
place = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"])
data = [[str(path.relative_to(os.environ["SM_CHANNEL_TRAIN"])), path.read_text()]
        for path in sorted(pathlib.Path(os.environ["SM_CHANNEL_TRAIN"]).rglob("*")) if path.is_file()]
seen = {"argv": sys.argv[1:], "environ": dict(os.environ), "script": os.path.basename(sys.argv[0]), "data": data}
(place / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Path of a job with metacharacters in the names of folders and files, in arguments and in variables."""
    base = tmp_path / "job"
    code, data = base / f"code {NAME}", base / f"data {NAME}"
    for folder in (code / NAME, data / NAME):
        folder.mkdir(parents=True)
    script = f"{NAME}/{NAME}.py"
    (code / script).write_text(SCRIPT)
    (code / f"{NAME}.txt").write_text("")
    (data / NAME / f"{NAME}.csv").write_text(TEXT)
    job = {
        "name": "meta",
        "code": {
            "directory": code.name,
            "script": script,
            "args": [
                NAME,
                TEXT,
                *plant(tmp_path).values(),
                "",
                " ",
                "--",
                "-x",
                f"--key={TEXT}",
                "é漢\u2028\U0001f600",
            ],
            "requirements": f"{NAME}.txt",
            "env": {
                "PLANTED": TEXT,
                "EMPTY": "",
                "ABSOLUTE": plant(tmp_path)["absolute"],
                "ENV": "$(touch PWNED)",
            },
        },
        "cluster": {"instance_type": "ml.m5.large", "processes_per_instance": 2},
        "data": {"train": data.name},
        "checkpoint": {"uri": str(tmp_path / f"saved {NAME}")},
    }
    path = base / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump(job, allow_unicode=True), encoding="utf-8")
    return path


def test_a_local_run_gets_every_text_unchanged(cli: Cli, planted: Path, tmp_path: Path) -> None:
    done = cli("submit", planted, "--local", "--follow", "--json", cwd=planted.parent)
    assert done.code == 0, done.err
    wanted = yaml.safe_load(planted.read_text(encoding="utf-8"))["code"]
    folder = Path(done.json["artifacts"]["folder"]) / "hosts/algo-1/opt/ml/output/data"
    for rank in (0, 1):
        seen = json.loads((folder / f"seen-{rank}.json").read_text())
        assert seen["argv"] == wanted["args"]
        assert seen["script"] == f"{NAME}.py"
        assert {name: seen["environ"][name] for name in wanted["env"]} == wanted["env"]
        assert json.loads(seen["environ"]["SM_USER_ARGS"]) == wanted["args"]
        assert seen["data"] == [[f"{NAME}/{NAME}.csv", TEXT]]
    assert cli("logs", done.json["run"], "--grep", TEXT[:20]).code == 0
    assert cli("explain", done.json["run"]).code == 0
    assert not traces(tmp_path)


def test_a_task_gets_its_arguments_unchanged(cli: Cli, planted: Path, tmp_path: Path) -> None:
    code = planted.parent / f"code {NAME}"
    (code / "task.py").write_text(TASK)
    args = {"text": TEXT, "name": NAME, "deep": {TEXT: [TEXT, {"a": NAME}]}}
    job = {
        "name": "meta",
        "code": {"directory": code.name, "task": "task:Planted", "args": args},
        "cluster": {"instance_type": "ml.m5.large", "processes_per_instance": 1},
        "train": {"steps": 1, "batch_size": 2},
    }
    planted.write_text(yaml.safe_dump(job, allow_unicode=True), encoding="utf-8")
    done = cli("submit", planted, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    folder = Path(done.json["artifacts"]["folder"]) / "hosts/algo-1/opt/ml/output/data"
    assert json.loads((folder / "args.json").read_text()) == args
    assert not traces(tmp_path)


TASK = """
import json, os, pathlib
import torch
from cloudtrain_runtime import Task

class Planted(Task):
    def __init__(self, text, name, deep):
        seen = {"text": text, "name": name, "deep": deep}
        (pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"]) / "args.json").write_text(json.dumps(seen))
    def model(self):
        return torch.nn.Linear(1, 1)
    def datasets(self):
        return {"train": [torch.ones(1)] * 4}
    def loss(self, model, batch):
        return model(batch).mean()
"""

FIELDS = (
    *(
        "name",
        "code.directory",
        "code.task",
        "code.script",
        "code.requirements",
        "code.args",
        "code.env.X",
    ),
    *(
        "cluster.instance_type",
        "cluster.image",
        "cluster.framework",
        "cluster.queue",
        "cluster.distribution",
    ),
    *(
        "data.train",
        "data.more",
        "checkpoint.uri",
        "checkpoint.resume",
        "checkpoint.every",
        "limits.runtime",
    ),
    *("limits.cost", "tracking.mlflow", "tags.team", "cluster.network.subnets", "train", "unknown"),
)


@pytest.mark.promise
@pytest.mark.parametrize("field", FIELDS)
def test_planning_executes_no_command_in_any_field(
    planted: Path, tmp_path: Path, field: str
) -> None:
    for text in (TEXT, f"s3://bucket/{NAME}", plant(tmp_path)["absolute"]):
        for is_local in (False, True):
            with contextlib.suppress(UserError):
                cloudtrain.plan(
                    cloudtrain.validate(planted, [f"{field}={json.dumps(text)}"]), local=is_local
                )
    assert not traces(tmp_path)


def test_settings_and_overrides_reach_no_shell(cli: Cli, planted: Path, tmp_path: Path) -> None:
    at = plant(tmp_path)["absolute"]
    names = (
        "ROLE",
        "BUCKET",
        "PREFIX",
        "REGION",
        "SUBNETS",
        "SECURITY_GROUPS",
        "KMS_KEY",
        "TRANSPORT",
        "PROFILE",
    )
    for name in names:
        done = cli("plan", planted, environ={f"CLOUDTRAIN_{name}": at})
        assert done.code in (0, 2), done.err
        assert "Traceback" not in done.err
    for override in (at, f"{at}=1", f"code.env.{at}={at}", f"tags.{at}={at}", f"data.{at}={at}"):
        done = cli("plan", planted, "--set", override)
        assert done.code == 2
        assert "Traceback" not in done.err
    for arguments in (
        ("status", at),
        ("logs", at),
        ("explain", at),
        ("stop", at),
        ("resume", at),
        ("checkpoints", at),
    ):
        done = cli(*arguments)
        assert done.code in (0, 2, 3), done.err
        assert "Traceback" not in done.err
    home = tmp_path / f"home {NAME}"
    done = cli(
        "submit", planted, "--local", "--follow", "--json", environ={"CLOUDTRAIN_HOME": str(home)}
    )
    assert done.code == 0, done.err
    assert not traces(tmp_path)


@pytest.mark.parametrize("name", ["BASH_ENV", "SHELLOPTS", "PS4"])
def test_variables_that_bash_executes_are_rejected(cli: Cli, planted: Path, name: str) -> None:
    """Bash starts the container, and executes commands in these variables."""
    done = cli("plan", planted, "--set", f"code.env.{name}=$(touch PWNED)")
    assert done.code == 2
    assert (
        f"code.env.{name}: the shell that starts the container executes this variable" in done.err
    )


def test_the_source_starts_shells_only_with_constant_texts() -> None:
    """The source contains no `os.system`, `shell=True` and the like. `/bin/sh` and bash get only constant texts."""
    root = Path(__file__).parent.parent.parent
    found: dict[str, list[str]] = {}
    for path in sorted([*(root / "sdk").rglob("*.py"), *(root / "entrypoints").rglob("*.py")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            if any(word in line for word in _SHELLS):
                found.setdefault(path.name, []).append(line.strip())
    assert found == {
        # The script that Slurm executes: constant lines, those of the user's own settings, and quoted paths.
        "batch_request.py": [
            '"#!/bin/bash",',
        ],
        "node_ping.py": [
            '[*options, "bash", "-c", script, "ping", *given], wait_seconds=_WAIT_SECONDS',
        ],
        "host_launcher.py": [
            '"/bin/sh",',
            "command.write_bytes(os.fsencode(f'#!/bin/sh\\nexec {shlex.quote(folder.python)} \"$@\"\\n'))",
        ],
        "completion.py": [
            '"bash": BashComplete,',
        ],
        # An example of a list without a shell, names of shells, and the scripts that click writes for them.
        "code.py": [
            'command: tuple[Text, ...] | None = Field(None, examples=[["bash", "train.sh"]])',
        ],
        "shell_scripts.py": [
            '_SHELLS = ("bash", "sh", "dash", "zsh")',
        ],
        # Names of audit events.
        "written_files.py": [
            '_COMMANDS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"})',
            'command = arguments[{"os.system": 0, "os.spawn": 2}.get(event, 1)]',
        ],
        "request.py": [
            '"/bin/bash",',
        ],
    }


_SHELLS = (
    "os.system",
    "shell=True",
    "os.popen",
    "getoutput",
    "/bin/sh",
    "/bin/bash",
    '"bash"',
    '"sh"',
    "execl",
    "spawnl",
)
