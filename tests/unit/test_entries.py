"""What a job can start besides a Task: a script or a module; what is refused, and what a plan shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.code_folders import write_tree
from support.jobs import Cli

from cloudtrain import plan

MODULE = "name: demo\ncode: {directory: code, module: package.train, args: {lr: 1e-4}}\n"
CLUSTER = "cluster: {instance_type: ml.p4d.24xlarge}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job whose code folder has one package with a module."""
    write_tree(
        tmp_path / "code", package____init___py="", package__train_py="import torch.distributed\n"
    )
    (tmp_path / "job.yaml").write_text(MODULE + CLUSTER)
    return tmp_path


def problems_of(cli: Cli, folder: Path, entry: str = "module: package.train") -> list[str]:
    """Return the problems that `validate` reports about an entry, as `line: path: message; hint`."""
    (folder / "job.yaml").write_text(MODULE.replace("module: package.train", entry) + CLUSTER)
    done = cli("validate", folder / "job.yaml", "--json")
    found = done.json.get("problems", [])
    return [f"{each['line']}: {each['path']}: {each['message']}; {each['hint']}" for each in found]


def test_a_plan_shows_how_a_module_starts(cli: Cli, folder: Path) -> None:
    planned = cli("plan", folder / "job.yaml", "--json").json
    assert planned["command"]["text"] == "python -m package.train --lr 1e-4"
    assert planned["command"]["entry"] == "package.train"


def test_a_package_with_a_main_module_can_start(cli: Cli, folder: Path) -> None:
    assert problems_of(cli, folder, "module: package") == [
        f"2: code.module: {folder}/code/package has no __main__.py; name a module in it, such as package.train"
    ]
    (folder / "code" / "package" / "__main__.py").write_text("")
    assert problems_of(cli, folder, "module: package") == []


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("package.trian", 'no such file: {code}/package/trian.py; did you mean "train.py"?'),
        ("pakage.train", 'there is no module pakage in {code}; did you mean "package"?'),
        (
            "axolotl.cli.train",
            "there is no module axolotl in {code}; for a module of an installed package, name the",
        ),
        (
            "package/train.py",
            'expected a module as python -m takes it, such as package.train, got "package/train.py"',
        ),
        ("train.py", "for package/train.py write package.train, or script: package/train.py"),
    ],
)
def test_a_wrong_module_is_refused(cli: Cli, folder: Path, module: str, problem: str) -> None:
    (found,) = problems_of(cli, folder, f"module: {module}")
    assert found.startswith("2: code.module: ")
    assert problem.format(code=folder / "code") in found


def test_a_module_is_parsed_before_it_starts(cli: Cli, folder: Path) -> None:
    (folder / "code" / "package" / "train.py").write_text("x = 1\nif:\n")
    (found,) = problems_of(cli, folder)
    assert "code/package/train.py:2 is not valid Python" in found


def test_an_installed_module_needs_requirements(cli: Cli, folder: Path) -> None:
    (folder / "code" / "requirements.txt").write_text("axolotl\n")
    options = (
        "--set=code.module=axolotl.cli.train",
        "--set=code.requirements=requirements.txt",
        "--json",
    )
    planned = cli("plan", folder / "job.yaml", *options).json
    assert (
        "axolotl.cli.train is not in the code folder: an installed package must have it"
        in planned["decisions"]
    )


def test_an_ignored_module_is_refused(cli: Cli, folder: Path) -> None:
    (folder / "code" / ".cloudtrainignore").write_text("train.py\n")
    done = cli("plan", folder / "job.yaml")
    assert done.code == 2
    assert (
        "code.module: package/train.py would not be in the container: .cloudtrainignore:1: train.py"
        in done.err
    )


def test_an_ignored_file_that_the_code_opens_is_named(cli: Cli, folder: Path) -> None:
    code = folder / "code"
    (code / "package" / "train.py").write_text("words = open('data/words.txt').read()\n")
    (code / "data").mkdir()
    (code / "data" / "words.txt").write_text("a")
    (code / ".gitignore").write_text("data/\n")
    warnings = cli("plan", folder / "job.yaml", "--json").json["warnings"]
    (found,) = [each for each in warnings if "data/words.txt" in each]
    assert found.startswith("package/train.py:1 opens data/words.txt, which does not travel")
    (code / ".cloudtrainignore").write_text(found.split("Write ")[1].split()[0] + "\n")
    assert "words.txt" not in cli("plan", folder / "job.yaml", "--json").out


def test_the_signs_of_a_module_are_those_of_a_script(cli: Cli, folder: Path) -> None:
    (folder / "code" / "package" / "train.py").write_text("from package import parts\n")
    (folder / "code" / "package" / "parts.py").write_text("parser.add_argument('--local_rank')\n")
    planned = cli("plan", folder / "job.yaml", "--json").json
    assert (
        planned["command"]["text"] == "python -m package.train --local_rank=$LOCAL_RANK --lr 1e-4"
    )
    assert any(
        text.startswith("package.train shows no sign of torch.distributed")
        for text in planned["warnings"]
    )


def test_two_entries_are_refused(cli: Cli, folder: Path) -> None:
    (found,) = problems_of(cli, folder, "module: package.train, script: package/train.py")
    assert found == (
        "2: code: give exactly one of task, script, module and command; "
        "task: module:Class, script: train.py, module: package.train, or command: [bash, train.sh]"
    )


def test_run_json_names_a_module_only_if_there_is_one(folder: Path) -> None:
    config = json.loads(plan(folder / "job.yaml").config.to_json())
    assert (config["module"], config["script"], config["task"]) == ("package.train", None, None)
    text = (
        (folder / "job.yaml")
        .read_text()
        .replace("module: package.train", "script: package/train.py")
    )
    (folder / "job.yaml").write_text(text)
    assert "module" not in json.loads(plan(folder / "job.yaml").config.to_json())


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            "[bash, package/trian.sh]",
            'code.command[1]: no such file: {code}/package/trian.sh; did you mean "train.sh"?',
        ),
        (
            "[python, lost.py]",
            "code.command[1]: no such file: {code}/lost.py; name a file of the code folder",
        ),
        (
            "[run.sh]",
            "code.command[0]: run.sh is not on the search path of programs; write ./run.sh, or [bash, run.sh]",
        ),
        (
            "[./run.sh]",
            "code.command[0]: {code}/run.sh is not executable; chmod +x ./run.sh, or start it by its",
        ),
        (
            "['true', $SM_MODEL_DIRS]",
            "code.command[1]: there is no variable $SM_MODEL_DIRS for commands; did you mean $SM",
        ),
        (
            '[bash, -c, "echo ${i}"]',
            "code.command[2]: there is no variable $i for commands; for the text $i write $$i",
        ),
        (
            "['true'], args: {out: $NOWHERE}",
            "code.args.out: there is no variable $NOWHERE for commands; for the text",
        ),
        ("[]", "code.command: expected a program and its arguments; for example [bash, train.sh]"),
    ],
)
def test_a_wrong_command_is_refused(cli: Cli, folder: Path, command: str, problem: str) -> None:
    (folder / "code" / "package" / "train.sh").write_text("")
    (folder / "code" / "run.sh").write_text("echo 1\n")
    text = f"name: demo\ncode: {{directory: code, command: {command}}}\n"
    (folder / "job.yaml").write_text(text + CLUSTER)
    (found,) = cli("validate", folder / "job.yaml", "--json").json["problems"]
    assert found["line"] == 2
    assert f"{found['path']}: {found['message']}; {found['hint']}".startswith(
        problem.format(code=folder / "code")
    )


def test_a_command_starts_once_per_instance(cli: Cli, folder: Path) -> None:
    command = 'command: [torchrun, --nnodes, $WORLD_SIZE, package/train.py, --data, "${SM_CHANNEL_TRAIN}/a"]'
    text = (
        MODULE.replace("module: package.train", command)
        + CLUSTER
        + "data: {train: s3://bucket/data}\n"
    )
    (folder / "job.yaml").write_text(text)
    planned = cli("plan", folder / "job.yaml", "--instances", "2", "--json").json
    assert planned["cluster"]["processes_per_instance"] == 1
    assert planned["cluster"]["world_size"] == 2
    words = "'$WORLD_SIZE' package/train.py --data '${SM_CHANNEL_TRAIN}/a' --lr 1e-4"
    assert planned["command"]["text"] == f"torchrun --nnodes {words}"
    assert not any("shows no sign" in text for text in planned["warnings"])


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("[torchrun, train.py]", "--nnodes"),
        ("[python, -m, torch.distributed.run, --node-rank, $RANK, train.py]", "--nnodes"),
        ("[accelerate, launch, train.py]", "--num_machines"),
        ("[torchrun, --nnodes=$WORLD_SIZE, train.py]", ""),
        ("[accelerate, launch, --num-machines, '2', train.py]", ""),
        ("[accelerate, launch, --config_file, a.yaml, train.py]", ""),
        ("[torchrun, train.py], env: {PET_NNODES: '2'}", ""),
        ("[bash, train.sh]", ""),
    ],
)
def test_a_launcher_that_joins_no_hosts_has_a_warning(
    cli: Cli, folder: Path, command: str, option: str
) -> None:
    write_tree(folder / "code", train_py="", **{"train.sh": "", "a.yaml": ""})
    (folder / "job.yaml").write_text(
        f"name: demo\ncode: {{directory: code, command: {command}}}\n{CLUSTER}"
    )
    for instances in ("1", "2"):
        words = ("plan", folder / "job.yaml", "--json", "--instances", instances)
        warnings = cli(*words).json["warnings"]
        found = [text for text in warnings if "trains a model of its own. Add" in text]
        assert bool(found) == bool(option and instances == "2"), warnings
        assert all(f"has no {option}: each of the 2 instances" in text for text in found)


RANKS = "RANK, LOCAL_RANK and WORLD_SIZE"


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("[yolo, train, data=a.yaml]", "own, yolo starts its own ranks"),
        ("[/opt/venv/bin/torchrun, --standalone, x]", "own, torchrun starts its own ranks"),
        (
            "[python, -m, torch.distributed.run, x]",
            "own, torch.distributed.run starts its own ranks",
        ),
        ("[python3.11, -u, -m, accelerate.commands.launch, x]", "own, accelerate launch starts"),
        ("[uv, run, accelerate, launch, x]", "own, accelerate launch starts its own ranks"),
        ("[env, A=1, ray, job, submit]", "own, ray starts its own ranks"),
        ("[ray, start, '--address=$MASTER_ADDR:6379']", "own, ray starts its own ranks"),
        ("[deepspeed, x, --of, '${RANK}']", "torchrun, its words use $RANK"),
        ("[bash, train.sh]", "torchrun, bash is not known to start ranks of its own"),
        ("[python, train.py, -m, deepspeed]", "torchrun, python is not known"),
        ("[accelerate, config]", "torchrun, accelerate is not known"),
        ("[bash, train.sh], launcher: own", "own, as code.launcher says"),
        ("[yolo, train], launcher: torchrun", "torchrun, as code.launcher says"),
        ("[bash, '$RANK'], launcher: own", "own, as code.launcher says"),
    ],
)
def test_a_plan_says_how_a_command_starts(
    cli: Cli, folder: Path, command: str, launcher: str
) -> None:
    write_tree(folder / "code", train_py="", **{"train.sh": ""})
    (folder / "job.yaml").write_text(
        f"name: demo\ncode: {{directory: code, command: {command}}}\n{CLUSTER}"
    )
    planned = cli("plan", folder / "job.yaml", "--json").json
    (found,) = (text for text in planned["decisions"] if text.startswith("launcher: "))
    assert found.startswith(f"launcher: {launcher}")
    is_own = launcher.startswith("own")
    assert found.endswith(f"the command {'does not get' if is_own else 'gets'} {RANKS}")
    assert plan(folder / "job.yaml").config.launcher == ("own" if is_own else "")


def test_several_commands_per_instance_are_ranks(cli: Cli, folder: Path) -> None:
    text = f"name: demo\ncode: {{directory: code, command: [torchrun, x]}}\n{CLUSTER}"
    (folder / "job.yaml").write_text(text)
    several = ("plan", folder / "job.yaml", "--json", "--set=cluster.processes_per_instance=8")
    assert any("starts it as several ranks" in each for each in cli(*several).json["decisions"])
    done = cli(*several, "--set=code.launcher=own")
    assert (
        "code.launcher: a command with a launcher of its own starts once per instance" in done.err
    )


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("module: package.train, launcher: own", "only a command has a launcher"),
        ("command: [ray], launcher: ray", 'expected one of own, torchrun, got "ray"'),
    ],
)
def test_a_launcher_is_checked(cli: Cli, folder: Path, entry: str, problem: str) -> None:
    (found,) = problems_of(cli, folder, entry)
    assert found.startswith(f"2: code.launcher: {problem}")


def test_a_local_plan_needs_the_program_here(cli: Cli, folder: Path) -> None:
    (folder / "job.yaml").write_text(
        f"name: demo\ncode: {{directory: code, command: [no-such-program]}}\n{CLUSTER}"
    )
    assert cli("plan", folder / "job.yaml").code == 0
    done = cli("plan", folder / "job.yaml", "--local")
    assert done.code == 2
    assert "job.yaml:2:35  code.command[0]: this machine has no program no-such-program" in done.err


def test_mpirun_starts_no_command(cli: Cli, folder: Path) -> None:
    text = f"name: demo\ncode: {{directory: code, command: ['true']}}\n{CLUSTER}"
    (folder / "job.yaml").write_text(text)
    done = cli("plan", folder / "job.yaml", "--set=cluster.distribution=smdistributed")
    assert (
        "code.command: cloudtrain's launcher starts a command, and smdistributed does not use"
        in done.err
    )


def test_a_plan_lists_channels_and_uploads(cli: Cli, folder: Path) -> None:
    write_tree(folder / "data", a_txt="12345", deep__b_txt="678")
    data = (
        "data: {train: {uri: data, sharded: true}, test: {uri: s3://bucket/test, mode: FastFile}}\n"
    )
    (folder / "job.yaml").write_text(MODULE + CLUSTER + data)
    text = cli("plan", folder / "job.yaml").out
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "data test from s3://bucket/test, FastFile" in rows
    assert f"data train from {folder}/data, File, sharded over the instances, 2 files, 8 B" in rows
    files = cli("files", folder / "job.yaml", "--json").json["count"]
    (upload,) = [row for row in rows if row.startswith("upload ")]
    assert upload.startswith(f"upload code and data, {files + 2} files, ")
    assert any(row.startswith("checkpoints s3://<your bucket>/") for row in rows)
    (folder / "job.yaml").write_text(MODULE + CLUSTER + "data: {train: data}\n")
    local = cli("plan", folder / "job.yaml", "--local").out
    assert "2 files, 8 B" in local
    assert "upload" not in local


@pytest.mark.parametrize("entry", ["module: lib.train", 'task: "lib.train:Mine"'])
def test_a_src_layout_gets_the_fix(cli: Cli, folder: Path, entry: str) -> None:
    write_tree(folder / "code" / "src" / "lib", __init___py="", train_py="class Mine: ...\n")
    train = "train: {epochs: 1, batch_size: 1}\n" if entry.startswith("task") else ""
    text = f"name: demo\ncode: {{directory: code, {entry}}}\n{CLUSTER}{train}"
    (folder / "job.yaml").write_text(text)
    (found,) = cli("validate", folder / "job.yaml", "--json").json["problems"]
    assert found["hint"].startswith("the code has a src layout: end code.directory with /src")
    assert "requirements" not in found["hint"]
    (folder / "code" / "needs.txt").write_text("flask\n")
    text = text.replace("directory: code", "directory: code, requirements: needs.txt")
    (folder / "job.yaml").write_text(text)
    (found,) = cli("validate", folder / "job.yaml", "--json").json["problems"]
    assert found["hint"].endswith(
        "; copy needs.txt into src, where code.requirements then finds it"
    )
    if not train:
        (folder / "code" / "needs.txt").rename(folder / "code" / "src" / "needs.txt")
        (folder / "job.yaml").write_text(text.replace("directory: code", "directory: code/src"))
        assert cli("validate", folder / "job.yaml").code == 0


def test_a_module_that_is_installed_here_starts_here(cli: Cli, folder: Path) -> None:
    use = ("--set=code.module=xdist.main", "--json")
    assert cli("plan", folder / "job.yaml", *use, "--local").code == 0
    (found,) = cli("plan", folder / "job.yaml", *use).json["problems"]
    assert found["message"].startswith("neither the code folder nor AWS's image of PyTorch 2.")
    assert found["hint"] == "name xdist in code.requirements"
    for module in ("torch.distributed.run", "timeit"):
        assert cli("plan", folder / "job.yaml", f"--set=code.module={module}", "--json").code == 0
