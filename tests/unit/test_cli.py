import contextlib
import json
import os
import pty
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli

import cloudtrain
from cloudtrain import console
from cloudtrain.cli import _COMMANDS, COMMAND_GROUPS
from cloudtrain.cli.first_words import MEANT, hint_of_word
from cloudtrain.errors import SpecError
from cloudtrain.job.spec import JobSpec

WriteJob = Callable[..., Path]

THREE_MISTAKES = """\
name: demo
code: {task: "mine:Mine"}
cluster:
  instance_type: ml.p4d.24xlarge
  instnces: 2
train:
  epochs: three
  precision: bf61
"""


def test_help_names_every_command(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for name in (
        "validate",
        "plan",
        "files",
        "check",
        "submit",
        "status",
        "logs",
        "follow",
        "download",
        "explain",
        "list",
        "stop",
        "prices",
        "schema",
    ):
        assert f"  {name} " in done.out
        assert cli(name, "--help").code == 0


def test_help_has_each_command_in_one_group_and_line(cli: Cli) -> None:
    shown = cli("--help").out.splitlines()
    assert all(len(line) <= 80 for line in shown)
    assert sum(map(len, COMMAND_GROUPS.values())) == len(_COMMANDS)
    for title, commands in COMMAND_GROUPS.items():
        start = shown.index(f"{title}:") + 1
        rows = shown[start : start + len(commands) + 1]
        assert rows == [*(f"  {name:<11}  {text}" for name, (_, text) in commands.items()), ""]


def test_help_ends_with_the_first_steps(cli: Cli) -> None:
    title, *steps = cli("--help").out.splitlines()[-4:]
    assert title == "First steps:"
    names = [step.split()[:2] for step in steps]
    assert names == [["cloudtrain", name] for name in ("init", "plan", "submit")]


@pytest.mark.parametrize(
    "example", sorted(path.parent.name for path in EXAMPLES.glob("*/job.yaml"))
)
def test_every_example_validates_and_plans(cli: Cli, example: str) -> None:
    path = EXAMPLES / example / "job.yaml"
    assert cli("validate", path).code == 0
    assert cli("validate", path, "--json").json == {"ok": True, "problems": []}
    assert cli("plan", path, "--json").json["request"]["TrainingJobName"].startswith(f"{example}-")


def test_three_mistakes_are_three_lines_and_exit_code_2(cli: Cli, job: WriteJob) -> None:
    path = job(THREE_MISTAKES, mine_py="class Mine(Task):\n    def __init__(self, layers=2): ...\n")
    for command in (["validate"], ["plan"], ["submit", "--local"], ["submit"]):
        done = cli(command[0], path, *command[1:])
        assert done.code == 2
        assert done.out == ""
        lines = done.err.splitlines()
        assert [line.split()[0] for line in lines] == [
            f"{path}:5:3",
            f"{path}:7:11",
            f"{path}:8:14",
            "3",
        ]
        assert "Traceback" not in done.err


def test_mistakes_of_task_and_job_are_reported_together(cli: Cli, job: WriteJob) -> None:
    """The task's mistakes have file, line and column; its code is not imported."""
    source = """\
raise SystemExit("imported")
from base import Base

class Mine(Base):
    def loss(self, batch): return 1
    def optimiser(self, model): return 1
"""
    base = "from cloudtrain_runtime import Task\nclass Base(Task):\n    def model(self): return 1\n"
    path = job(THREE_MISTAKES, mine_py=source, base_py=base)
    code = path.parent / "mine.py"
    expected = [
        f'{code}:4:1  Mine has no datasets(self); return a mapping such as {{"train": dataset}}',
        f"{code}:5:5  loss(self, batch): expected loss(self, model, batch)",
        f'{code}:6:5  optimiser(self, model): a Task has no such method; did you mean "optimizer"?',
    ]
    for command in (["validate"], ["plan"], ["submit", "--local"], ["submit"], ["check"]):
        done = cli(command[0], path, *command[1:])
        assert done.code == 2
        assert done.out == ""
        lines = done.err.splitlines()
        assert [line.split()[0] for line in lines[:3]] == [
            f"{path}:5:3",
            f"{path}:7:11",
            f"{path}:8:14",
        ]
        assert lines[3:-1] == expected
    done = cli("plan", path, "--json")
    assert done.json["problems"][4] == {
        "file": str(code),
        "line": 5,
        "column": 5,
        "path": "",
        "message": "loss(self, batch): expected loss(self, model, batch)",
        "hint": "",
    }


def test_the_task_of_a_job_built_in_python_is_checked(
    job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a file below the working folder is relative to it."""
    folder = job("", mine_py="class Mine: ...\n").parent
    monkeypatch.chdir(folder)
    spec = JobSpec(
        name="demo",
        code={"task": "mine:Mine"},
        cluster={"instance_type": "ml.g5.xlarge"},
        train={"steps": 1},
    )
    with pytest.raises(SpecError, match=r"^mine.py:1:1  Mine is not a Task"):
        cloudtrain.plan(spec)


def test_problems_as_json(cli: Cli, job: WriteJob) -> None:
    path = job(THREE_MISTAKES, mine_py="class Mine(Task):\n    def __init__(self, layers=2): ...\n")
    done = cli("validate", path, "--json")
    assert done.code == 2
    assert done.json["ok"] is False
    assert done.json["problems"][0] == {
        "file": str(path),
        "line": 5,
        "column": 3,
        "path": "cluster.instnces",
        "message": "unknown field",
        "hint": 'did you mean "instances"?',
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["validate", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["validate"], "job.yaml: no such file"),
        (["sbumit", "job.yaml"], 'did you mean "submit"?'),
        (["plan", "job.yaml", "--instances", "0"], "--instances"),
        (["status", "digits"], "there is no run 'digits'"),
        (["status", "digits-261120-101500-1a2b3c"], "there is no local run"),
        (["logs", "local:digits-261120-101500-1a2b3c"], "there is no local run"),
        (["stop", "local:digits-261120-101500-1a2b3c"], "there is no local run"),
    ],
)
def test_a_users_mistake_is_exit_code_2_without_a_traceback(
    cli: Cli, arguments: list[str], expected: str
) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert expected in done.err
    assert "Traceback" not in done.err
    as_json = cli(*arguments, "--json")
    assert as_json.code == 2
    assert json.loads(as_json.out)["error"]["exit_code"] == 2


def test_options_change_the_plan(cli: Cli) -> None:
    path = EXAMPLES / "digits" / "job.yaml"
    done = cli(
        "plan",
        path,
        "--instances",
        "4",
        "--set",
        "train.batch_size=8",
        "--region",
        "us-west-2",
        "--bucket",
        "bucket",
        "--json",
    )
    assert done.json["cluster"]["world_size"] == 32
    assert done.json["batch"]["global"] == 256
    assert done.json["checkpoint"]["uri"].startswith("s3://bucket/cloudtrain/digits-")


def test_plan_prints_the_request_alone(cli: Cli) -> None:
    done = cli("plan", EXAMPLES / "digits" / "job.yaml", "--request")
    assert done.json["AlgorithmSpecification"]["TrainingInputMode"] == "File"


def test_plan_shows_a_table(cli: Cli) -> None:
    out = cli("plan", EXAMPLES / "digits" / "job.yaml", "--instances", "2").out
    assert "2 x ml.p4d.24xlarge, 8 ranks each, world size 16" in out
    assert "50.50 USD per hour" in out


def test_submit_without_settings_names_what_is_missing(cli: Cli) -> None:
    done = cli("submit", EXAMPLES / "digits" / "job.yaml")
    assert done.code == 2
    assert "role, bucket, region" in done.err
    assert "no AWS credentials" in done.err
    assert "--local" in done.err
    assert "Traceback" not in done.err
    assert cli("list", "--json").json == {"runs": []}


def test_submit_without_credentials_is_a_cloud_error(cli: Cli) -> None:
    environ = {
        "CLOUDTRAIN_ROLE": "arn:aws:iam::123456789012:role/r",
        "CLOUDTRAIN_BUCKET": "bucket",
        "CLOUDTRAIN_REGION": "us-west-2",
    }
    done = cli("submit", EXAMPLES / "digits" / "job.yaml", environ=environ)
    assert done.code == 3
    assert "no AWS credentials" in done.err
    assert "--local" in done.err


def test_an_empty_list_shows_the_first_command(cli: Cli) -> None:
    assert "cloudtrain submit JOB --local" in cli("list").out


def test_a_damaged_run_does_not_hide_others(cli: Cli, tmp_path: Path) -> None:
    runs = tmp_path / "runs-home" / "runs"
    good = "good-261120-101500-1a2b3c"
    for name, state in (
        (good, '{"state": "SUCCEEDED", "started": null, "ended": null}'),
        ("bad-261120-101500-1a2b3c", "{"),
        ("odd-261120-101500-1a2b3c", '{"state": 3}'),
    ):
        (runs / name).mkdir(parents=True)
        (runs / name / "state.json").write_text(state)
    listed = cli("list", "--json")
    assert listed.code == 0, listed.err
    assert {run["run"]: run["state"] for run in listed.json["runs"]} == {
        good: "SUCCEEDED",
        "bad-261120-101500-1a2b3c": "UNKNOWN",
        "odd-261120-101500-1a2b3c": "UNKNOWN",
    }
    done = cli("status", "bad-261120-101500-1a2b3c")
    assert done.code == 2
    assert "state.json is damaged: it is not valid JSON" in done.err
    done = cli("status", "odd-261120-101500-1a2b3c")
    assert done.code == 2
    assert "state.json is damaged: state: expected one of " in done.err
    assert ", found 3\n" in done.err


def test_an_unusable_home_is_a_user_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli(
        "submit",
        EXAMPLES / "script-ddp" / "job.yaml",
        "--local",
        environ={"CLOUDTRAIN_HOME": str(tmp_path / "file")},
    )
    assert done.code == 2, done.err
    assert "CLOUDTRAIN_HOME" in done.err


@pytest.mark.parametrize(
    ("code", "column", "name"),
    [
        ("task: 'mine:Mine'", 14, "mine.py"),
        ("script: ./train.py", 16, "train.py"),
        ("script: train.py, requirements: extra.txt", 40, "extra.txt"),
    ],
)
def test_an_ignored_file_of_the_job_is_rejected(
    cli: Cli, job: Callable[..., Path], code: str, column: int, name: str
) -> None:
    train = "train: {epochs: 1}\n" if "task" in code else ""
    path = job(
        f"name: demo\ncode: {{{code}}}\ncluster: {{instance_type: ml.g5.xlarge}}\n{train}",
        mine_py="class Mine(Task): ...\n",
        train_py="",
        **{"extra.txt": ""},
    )
    assert cli("plan", path, "--json").code == 0
    ignored = path.parent / ".gitignore"
    ignored.write_text(f"{name}\n")
    (problem,) = cli("plan", path, "--json").json["problems"]
    assert (problem["line"], problem["column"]) == (2, column)
    assert problem["message"] == f"{name} would not be in the container: .gitignore:1: {name}"
    (path.parent / ".cloudtrainignore").write_text(problem["hint"].split()[1] + "\n")
    assert cli("plan", path, "--json").code == 0


SCRIPT_JOB = """\
name: demo
code: {script: train.py}
cluster: {instance_type: ml.g5.xlarge}
"""


def test_files_lists_included_and_excluded_files(cli: Cli, job: WriteJob) -> None:
    path = job(SCRIPT_JOB, train_py="x = 1\n")
    (path.parent / "model.pt").write_text("weights")
    (path.parent / "notes.md").write_text("mine")
    (path.parent / "red\x1b[31m").write_text("")
    (path.parent / ".gitignore").write_text("# my own\nnotes.md\n")
    out = cli("files", path).out
    assert "       6 B  train.py  (code)\n" in out
    assert "cloudtrain_worker.py  (runtime of cloudtrain)\n" in out
    assert "  red\\x1b[31m  (code)\n" in out
    assert "       4 B  notes.md  (.gitignore:2: notes.md)\n" in out
    assert "       7 B  model.pt  (weights or a checkpoint)\n" in out
    content = cli("files", path, "--json").json
    assert set(content) == {"files", "left_out", "refused", "bytes", "count", "digest"}
    assert {"name": "train.py", "bytes": 6, "why": "code"} in content["files"]
    assert {"name": "model.pt", "bytes": 7, "reason": "weights or a checkpoint"} in content[
        "left_out"
    ]
    planned = cli("plan", path, "--json").json
    assert (content["digest"], content["bytes"], content["count"]) == tuple(
        planned["bundle"][name] for name in ("digest", "bytes", "files")
    )
    assert any(line.startswith("not sent: model.pt ") for line in planned["decisions"])
    assert planned["source"] is None


def test_files_groups_long_lists_by_folder(cli: Cli, job: WriteJob) -> None:
    path = job(SCRIPT_JOB, train_py="x = 1\n")
    (path.parent / "package").mkdir()
    for number in range(50):
        (path.parent / "package" / f"{number}.py").write_text("xx")
    out = cli("files", path).out
    assert "     100 B  package/ 50 files  (code)\n" in out
    assert "package/7.py" not in out
    assert "       2 B  package/7.py  (code)\n" in cli("files", path, "--all").out


def test_files_lists_secrets_and_other_commands_reject_them(cli: Cli, job: WriteJob) -> None:
    path = job(SCRIPT_JOB, train_py="x = 1\n")
    (path.parent / ".env").write_text("x")
    done = cli("files", path)
    assert done.code == 2
    assert "train.py  (code)" in done.out
    assert "  .env: environment file\n" in done.err
    as_json = cli("files", path, "--json")
    assert as_json.code == 2
    assert as_json.json["refused"] == [{"name": ".env", "line": None, "reason": "environment file"}]
    for arguments in (["plan", path], ["submit", path, "--local"]):
        done = cli(*arguments)
        assert done.code == 2
        assert ".env: environment file" in done.err
        assert "!/.env" in done.err


def _read_all(terminal: int) -> str:
    shown = b""
    with contextlib.suppress(
        OSError
    ):  # the terminal raises EIO after the last writer has closed it
        while data := os.read(terminal, 100_000):
            shown += data
    os.close(terminal)
    return shown.decode()


def test_the_progress_bar_needs_a_terminal_and_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", terminal)
        with console.progress_bar("reading the code") as show:
            show(1, 2)
        monkeypatch.setattr(console, "PROGRESS_DELAY_SECONDS", 0.0)
        with console.progress_bar("packing the code") as show:
            show(1, 2)
            show(2, 2)
    shown = _read_all(ours)
    assert "packing the code" in shown
    assert "reading the code" not in shown


def test_the_progress_bar_disappears_and_reappears(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setattr(console, "PROGRESS_DELAY_SECONDS", 0.0)
        with console.progress_bar("packing the code") as show:
            for done, total in ((1, 2), (2, 2), (1, 3)):
                show(done, total)
    bars = _read_all(ours).split("\x1b[?25h")  # this sequence shows the cursor again after a bar
    assert ["packing the code" in bar for bar in bars] == [True, True, False]


def test_ctrl_c_is_reported_as_message_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cloudtrain.client.shortcuts.get_run", interrupted)
    from cloudtrain.cli import run

    assert run(["status", "digits-261121-074043-d30c68", "--json"]) == 130
    output = capsys.readouterr()
    assert json.loads(output.out)["error"]["exit_code"] == 130
    assert "cloudtrain list" in output.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sweep", "stauts", "latest"), "there is no command 'stauts'; did you mean \"status\"?"),
        (
            ("checkpoints", "verfy", "digits"),
            "there is no command 'verfy'; did you mean \"verify\"?",
        ),
        (("sandbox", "stop"), 'sandbox has only options; did you mean "--stop"?'),
        (
            ("sweep", "run", "missing.yaml"),
            "give the path of a sweep file, or work in the folder that has the sweep.yaml",
        ),
        (("sweep", "missing.yaml"), "missing.yaml: no such file"),
    ],
)
def test_a_misspelt_word_names_the_nearest(cli: Cli, words: tuple[str, ...], message: str) -> None:
    done = cli(*words)
    assert (done.code, message in done.err) == (2, True), done.err


@pytest.mark.parametrize("word", sorted(MEANT))
def test_a_word_of_another_tool_means_a_command(word: str) -> None:
    command = MEANT[word].split()[0]
    assert word not in _COMMANDS
    assert command in (*_COMMANDS, "--version", "--help")
    assert shlex.split(MEANT[word])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["ls"], "list"),
        (["ps"], "list"),
        (["run", "job.yaml"], "submit JOB --local"),
        (["train"], "submit JOB --local"),
        (["kill", "digits"], "stop RUN"),
        (["cancel"], "stop RUN"),
        (["delete"], "rm RUN"),
        (["LS"], "list"),
        (["top"], "dashboard"),
        (["down", "digits"], "stop RUN"),
        (["destroy"], "rm RUN"),
        (["quit"], "stop RUN"),
        (["sbatch", "job.sh"], "submit JOB"),
        (["help"], "--help"),
        (["help", "submit"], "submit --help"),
        (["help", "nothing"], "--help"),
        (["job.yaml"], "plan job.yaml"),
        (["my job.yaml"], "plan 'my job.yaml'"),
        (["describe-training-job"], "status RUN"),
        (["stop-training-job"], "stop"),
        (["list_runs"], "list"),
        (["check-account"], "check"),
        (["STATUS"], "status"),
        (["eval"], "evaluate"),
        (["dash"], "dashboard"),
    ],
)
def test_a_first_word_names_the_command(cli: Cli, words: list[str], meant: str) -> None:
    done = cli(*words)
    assert done.code == 2
    assert f'there is no command {words[0]!r}; did you mean "cloudtrain {meant}"?' in done.err


@pytest.mark.parametrize("word", ["upload", "rollout", "compute", "nothing", "train.py", "in"])
def test_no_command_is_invented_for_a_word(word: str) -> None:
    """A word such as `quit` is similar enough to `submit` for a guess, which would start a run."""
    hint = hint_of_word([word], list(_COMMANDS))
    assert hint == f"one of: {', '.join(_COMMANDS)}"


@pytest.mark.parametrize(
    ("word", "command"),
    [("stauts", "status"), ("sumbit", "submit"), ("lsit", "list")],
)
def test_a_misspelt_command_has_its_name(word: str, command: str) -> None:
    assert hint_of_word([word], list(_COMMANDS)) == f'did you mean "{command}"?'


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["submit", "--nodes", "2"], 'did you mean "--instances"?'),
        (["submit", "-n", "2"], 'did you mean "--instances"?'),
        (["submit", "--gpus", "8"], "--set cluster.instance_type=TYPE"),
        (["plan", "--spot"], "--set cluster.spot=true"),
        (["plan", "--name", "x"], "--set name=NAME"),
        (["plan", "--env", "A=B"], "--set code.env.NAME=VALUE"),
        (["plan", "--max_run", "3"], "--set limits.runtime=VALUE"),
        (["submit", "--lr", "1"], "or --set code.args.lr=VALUE (of a script)?"),
        (["submit", "--my-arg", "1"], "to pass it to the script: --set code.args.my-arg=VALUE"),
        (["validate", "--region", "x"], "CLOUDTRAIN_REGION"),
        (["submit", "--dry-run"], 'did you mean "cloudtrain plan JOB"?'),
        (["sweep", "run", "--dry-run"], 'did you mean "cloudtrain sweep plan FILE"?'),
        (["deploy", "--dry-run", "x"], 'did you mean "--plan"?'),
        (["submit", "--yes"], "leave it out"),
        (["submit", "-y"], "leave it out"),
        (["submit", "--watch"], 'did you mean "--follow"?'),
        (["submit", "-d"], 'did you mean "--detach"?'),
        (["submit", "-f", "job.yaml"], "the job file is an argument: cloudtrain submit JOB"),
        (["plan", "--file=job.yaml"], "the job file is an argument: cloudtrain plan JOB"),
        (["plan", "-o", "json"], 'did you mean "--json"?'),
        (["plan", "--verbose"], "leave it out"),
        (["logs", "--lines", "10"], 'did you mean "--tail"?'),
        (["logs", "-n", "10"], 'did you mean "--tail"?'),
        (["list", "--limit", "5"], 'did you mean "-n"?'),
        (["status", "--watch"], 'did you mean "cloudtrain follow RUN"?'),
        (["stop", "--latest"], "the run is an argument: cloudtrain stop latest"),
        (["rm", "-f", "x"], 'did you mean "--yes"?'),
        (["rm", "--all"], "see cloudtrain rm --help"),
        (["download", "--output", "x"], 'did you mean "--to"?'),
        (["logs", "--tial", "3"], 'did you mean "--tail"?'),
        (["-v"], 'did you mean "--version"?'),
        (["--json"], "write it behind the command"),
    ],
)
def test_an_option_of_another_tool_has_its_own(cli: Cli, words: list[str], hint: str) -> None:
    done = cli(*words)
    assert done.code == 2
    assert hint in done.err.splitlines()[-1]


def test_a_folder_means_its_job_file(cli: Cli, job: WriteJob) -> None:
    path = job("name: tiny\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.xlarge}\n")
    folder = path.parent
    (folder / "train.py").write_text("")
    assert cli("validate", folder).out == f"{path}: tiny is valid\n"
    path.rename(folder / "job.yml")
    for arguments, shown in (
        ([folder], folder / "job.yml"),
        ([path], folder / "job.yml"),
        ([], Path("job.yml")),
    ):
        done = cli("validate", *arguments, cwd=folder)
        assert (done.code, done.out, done.err) == (0, f"{shown}: tiny is valid\n", "")


def test_the_other_job_file_is_named(cli: Cli, job: WriteJob) -> None:
    path = job("name: tiny\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.xlarge}\n")
    (path.parent / "train.py").write_text("")
    (path.parent / "job.yml").write_text("name: other\n")
    done = cli("validate", "--json", cwd=path.parent)
    assert (done.json["ok"], done.err) == (True, "job.yaml is used, and not job.yml beside it\n")
    assert cli("validate", "job.yml", cwd=path.parent).code == 2


def test_a_folder_without_a_job_file_is_an_error(cli: Cli, tmp_path: Path) -> None:
    assert f"{tmp_path} is a folder" in cli("plan", tmp_path).err
    (tmp_path / "other.yaml").touch()
    assert "it has other.yaml" in cli("plan", tmp_path).err
    assert "job.yaml: no such file" in cli("plan", cwd=tmp_path).err
    assert 'did you mean "other.yaml"?' in cli("plan", "othr.yaml", cwd=tmp_path).err


READING = ("status", "explain", "logs", "follow", "metrics", "checkpoints", "card")
CHANGING = ("stop", "resume", "rm", "download", "deploy", "evaluate", "serve")


@pytest.mark.parametrize("verb", READING)
def test_reading_commands_take_the_newest_run(cli: Cli, verb: str) -> None:
    done = cli(verb)
    assert (done.code, "there is no local run yet" in done.err) == (2, True)


@pytest.mark.parametrize("verb", CHANGING)
def test_other_commands_take_no_run_by_themselves(cli: Cli, verb: str) -> None:
    done = cli(verb)
    assert done.code == 2
    assert "there is no local run yet" not in done.err


@pytest.mark.parametrize("verb", [("submit",), ("resume",), ("evaluate",), ("sweep", "run")])
def test_whatever_starts_a_run_takes_follow_and_detach(cli: Cli, verb: tuple[str, ...]) -> None:
    options = [line for line in cli(*verb, "--help").out.splitlines() if "--detach" in line]
    assert ["--follow" in line for line in options] == [True]
