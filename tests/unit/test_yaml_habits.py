"""Habits of other formats, shells and tools in job.yaml: each message has its place and leads to the cure."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain.job.diagnostics import COMMON_WORDS, OWN_ARGUMENTS
from cloudtrain.job.spec import JobSpec

JOB = """\
name: tiny
code:
  script: train.py
  args: {lr: 0.1}
cluster:
  instance_type: ml.m5.xlarge
  instances: 1
limits: {runtime: 2h}
"""
ARGS = "args: {lr: 0.1}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATASETS", "/data/sets")
    monkeypatch.delenv("UNSET", raising=False)
    (tmp_path / "src").mkdir()
    for name in ("train.py", "src/train.py", "values.txt"):
        (tmp_path / name).write_text("import argparse\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems_of(text: str) -> str:
    Path("job.yaml").write_text(text)
    with pytest.raises(cloudtrain.SpecError) as caught:
        cloudtrain.validate("job.yaml", local=True)
    return "\n".join(map(str, caught.value.problems))


@pytest.mark.parametrize(
    ("old", "new", "place", "cure"),
    [
        ("limits", "data: {train: ~/data}\nlimits", "8:15", "write /home/me/data"),
        ("limits", "data: {train: ~nobody-here/data}\nlimits", "8:15", "write the whole path"),
        ("limits", "data: {train: $HOME/data}\nlimits", "8:15", '--set data.train="$HOME/data"'),
        ("limits", "data: {train: '${DATASETS}/a'}\nlimits", "8:15", "write /data/sets/a"),
        ("limits", "data: {train: $UNSET/a}\nlimits", "8:15", "write the whole path, or let your shell"),
        ("limits", "data: {train: 's3://${BUCKET}/a'}\nlimits", "8:15", "variables are not expanded in a job file"),
        ("limits", "data: {train: 'C:\\Users\\me'}\nlimits", "8:15", "a path of Windows"),
        ("limits", 'data: {train: "C:\\Users\\me"}\nlimits', "8:20", "write / instead, or use single quotes"),
        ("limits", "data: {train: *.csv}\nlimits", "8:15", "put the value in quotes: '*.csv'"),
        ("train.py", "src\\train.py", "3:11", "write / between folders: src/train.py"),
        ("train.py", '"train.py --lr 1 --fast"', "3:11", "write train.py alone, and the options below it: args: {lr: 1, fast: "),
        ("train.py", "python train.py", "3:11", "write train.py alone"),
        ("train.py", "torchrun --nproc_per_node 8 train.py --lr 1", "3:11", "write train.py alone (cloudtrain starts"),
        ("train.py", "accelerate launch train.py", "3:11", "write train.py alone (cloudtrain starts the ranks)"),
        ("train.py", "python -u train.py --lr 1", "3:11", "write train.py alone, and the options below it: args: {lr: 1}"),
        ("train.py", "python -m pkg.train --lr 1", "3:11", "write module: pkg.train in place of script"),
        ("train.py", "~/train.py", "3:11", "write /home/me/train.py"),
        ("  script", "\tscript", "3:1", "indent with spaces"),
        ("  script", "\u00a0 script", "3:1", "a no-break space"),
        ("name: tiny", "name:tiny", "1:1", "write name: tiny (with a space after the colon)"),
        ("instances: 1", "instances:1", "7:3", "write instances: 1 (with a space after the colon)"),
        ("instances: 1", "instances = 1", "7:3", "write instances: 1"),
        ("  instances: 1", "    instances: 1", "7:5", "begin it in column 3, as line 6 above it"),
        ("instances: 1", "instances: 1,", "7:14", "did you mean 1?"),
        ("instances: 1", "gpus: 8", "7:3", "did you mean cluster.instance_type?"),
        ("name: tiny", "name: tiny,", "1:7", 'did you mean "tiny"?'),
        ("name: tiny", "name: ${USER}-run", "1:7", 'on the command line: --set name="$NAME"'),
        ("name: tiny", "name: @tiny", "1:7", "put the value in quotes: '@tiny'"),
        ("name: tiny", 'name: "tiny', "1:7", "close the quote that begins here"),
        ("ml.m5.xlarge", "p4d.24xlarge", "6:18", 'did you mean "ml.p4d.24xlarge"?'),
        (ARGS, "env: {CACHE: ${HOME}/x}", "4:17", "put the value in quotes"),
        (ARGS, "env: {NOTE: a}\n  command: see: this", "5:12", "put the value in quotes: command: 'see: this'"),
        (ARGS, "outputs: a.txt, b.txt", "4:12", "write outputs: [a.txt, b.txt]"),
        (ARGS, "args: {lr:0.1}", "4:10", "write lr: 0.1 (with a space after the colon)"),
        (ARGS, "args: {a: 1, lr:1e-3}", "4:16", "write lr: 1e-3 (with a space after the colon)"),
        (ARGS, "env: {A:1}", "4:9", "write A: 1 (with a space after the colon)"),
        ("{runtime: 2h}", "{runtime:2h}", "8:10", "write runtime: 2h (with a space after the colon)"),
        ("limits", "data: {train:s3://abc/x}\nlimits", "8:8", "write train: s3://abc/x (with a"),
        (ARGS, "args: {--lr: 0.1}", "4:10", "write lr"),
        (ARGS, "args: {'-lr': 0.1}", "4:10", "write lr"),
        (ARGS, "args: {-b: 8}", "4:10", "a list passes words as they are: args: [-b, ...]"),
        (ARGS, "args: lr=0.1 fast=yes", "4:9", "write args: {lr: 0.1, fast: yes}"),
        (ARGS, "args: 'lr: 0.1'", "4:9", "write args: {lr: 0.1}"),
        (ARGS, "args: |\n    lr: 1e-3\n    fast: true\n    id: 007", "4:9", "write args: {lr: 1e-3, fast: true, id: 007}"),
        (ARGS, "args:\n    - lr: 1e-3\n    - rest: [1]", "5:7", "code.args[0]"),
        (ARGS, "args:\n    - lr: 0.1\n    - wd: 1", "5:5", "write args: {lr: 0.1, wd: 1}"),
        (ARGS, "args: {lr: {{ lr }}}", "4:14", "code.args.lr"),
        (ARGS, "env: [A=B, C=1]", "4:8", "write env: {A: B, C: 1}"),
        (ARGS, "env: A=B", "4:8", "write env: {A: B}"),
        (ARGS, "env:\n    - name: A\n      value: B", "5:5", "write env: {A: B}"),
        ("limits", "tags: [{Key: a, Value: b}]\nlimits", "8:7", "write tags: {a: b}"),
        ("limits", "metrics: [{Name: loss, Regex: 'l=(.*)'}]\nlimits", "8:10", "write metrics: {loss: l=(.*)}"),
        ("limits", "data: s3://abc/x\nlimits", "8:7", "write data: {train: s3://abc/x}"),
        ("limits", "data: {val: [s3://abc/x, s3://abc/y]}\nlimits", "8:13", "write data: {val: s3://abc/x, NAME: ...}"),
        ("{runtime: 2h}", "2h", "8:9", "write limits: {runtime: 2h}"),
        ("limits", "checkpoint: 10m\nlimits", "8:13", "write checkpoint: {every: 10m}"),
        ("train.py", "[train.py]", "3:11", "write script: train.py"),
        ("instances: 1", "instances: [2]", "7:14", "write instances: 2"),
        (ARGS, "args: --lr 0.1 --fast --mode=a", "4:9", "write args: {lr: 0.1, fast: true, mode: a}"),
        (f"script: train.py\n  {ARGS}", "command: python train.py --lr 1", "3:12", "write command: [python, train.py, --lr, '1']"),
        ("{runtime: 2h}", "{hours: 2}", "8:10", "did you mean limits.runtime: 2h?"),
        ("{runtime: 2h}", "{runtime: 2}", "8:19", "expected a duration with a unit"),
        ("ml.m5.xlarge", "ML.M5.XLARGE", "6:18", 'did you mean "ml.m5.xlarge"?'),
        ("ml.m5.xlarge", "local_gpu", "6:18", "to run on this machine: --local"),
        ("name: tiny", "name: M\u00fcller caf\u00e9", "1:7", 'did you mean "Muller-cafe"?'),
        ("name: tiny", "- name: tiny", "1:1", "remove the - here"),
        (JOB, "- " + textwrap.indent(JOB, "  ")[2:], "1:1", "remove the - that begins a line in column 1"),
        (ARGS, "args: {note: run #3}", "4:20", "what follows # is a comment, also the closing bracket"),
        (ARGS, "args: {tag: #1}", "4:15", "put the value in quotes"),
        (ARGS, "outputs: [a, #b]", "4:16", "what follows # is a comment"),
        (JOB, '{"name": "t", // a comment\n"code": {"script": "train.py"}}', "1:15", "a comment begins with #"),
        ("limits", "data: {train: *mine}\nlimits", "8:15", "put it in quotes: '*mine', or name a value above it: &mine"),
        ("limits", "name: other\nlimits", "8:1", "given twice; the first is on line 1; remove one"),
        ("limits", "---\nname: other\nlimits", "8:1", "one file describes one job"),
        ("limits", "lr: 0.1\nlimits", "8:1", "did you mean train.learning_rate (of a Task), or code.args.lr (of a script)?"),
        ("{runtime: 2h}", "{MaxRuntimeInSeconds: 7200}", "8:10", "did you mean limits.runtime?"),
        ("{runtime: 2h}", "{max-duration: 2h}", "8:10", "did you mean limits.runtime?"),
        ("limits", "time: 2h\nlimits", "8:1", "did you mean limits.runtime?"),
        ("limits", "HyperParameters: {lr: 1}\nlimits", "8:1", "did you mean code.args?"),
        ("limits", "ResourceConfig: {}\nlimits", "8:1", "did you mean cluster?"),
        ("limits", "RoleArn: x\nlimits", "8:1", "the role is a setting of the account"),
        ("limits", "region: x\nlimits", "8:1", "the region is a setting of the account"),
        ("limits", "resources: {}\nlimits", "8:1", "did you mean cluster?"),
        ("limits", "partition: gpu\nlimits", "8:1", "did you mean slurm.partition?"),
        ("limits", "working-dir: .\nlimits", "8:1", "did you mean code.directory?"),
        ("limits", "data: {train: {uri: s3://abc/x, S3Uri: s3://abc/x}}\nlimits", "8:33", "did you mean data.train.uri?"),
        ("limits", "data: {train: {uri: s3://abc/x, labels: s3://abc/y}}\nlimits", "8:33", "write data.train_labels for"),
        ("args:", "arguments:", "4:3", "did you mean code.args?"),
        ("args:", "entryPoint: a.py\n  args:", "4:3", "did you mean code.script?"),
        ("instances: 1", "EnableManagedSpotTraining: true", "7:3", "did you mean cluster.spot?"),
        ("instances: 1", "VolumeSizeInGB: 100", "7:3", "did you mean cluster.volume?"),
        ("instances: 1", "Instance-Count: 2", "7:3", "did you mean cluster.instances?"),
        ("limits", "bs: 8\nlimits", "8:1", "did you mean train.batch_size (of a Task)"),
        ("limits", "wd: 0.1\nlimits", "8:1", "code.args.wd passes it there"),
        (JOB, "name = tiny\nscript = train.py\n", "1:1", "write name: tiny"),
        (JOB, '{\n\t"name": "tiny"\n}\n', "2:1", "indent with spaces"),
    ],
)  # fmt: skip
def test_a_habit_is_named_with_its_cure(
    folder: Path, old: str, new: str, place: str, cure: str
) -> None:
    found = problems_of(JOB.replace(old, new, 1))
    assert found.startswith(f"job.yaml:{place}  "), found
    assert cure in found.splitlines()[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("instances: 1", 'instances: "2"'),
        ("instances: 1", "instances: 2\n  spot: on"),
        (ARGS, "args: {lr: 1e-3, fast: yes, note: 'a: b', path: ~/x, home: $HOME, 'a:b': 1, c::d}"),
        (ARGS, "requirements: ~"),
        (JOB, '{"name": "t", "code": {"script": "train.py",}, "cluster": {"instance_type": "ml.m5.xlarge"}}'),
        (JOB, JOB.replace("\n", "\r\n")),
        (JOB, "\ufeff" + JOB),
    ],
)  # fmt: skip
def test_other_habits_are_legal(folder: Path, old: str, new: str) -> None:
    Path("job.yaml").write_text(JOB.replace(old, new, 1))
    cloudtrain.validate("job.yaml", local=True)


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("train.py", "values with spaces.py", "alone"),
        ("instances: 1", "instances: [1", "= sign"),
        ("name: tiny", "name: [a:b", "with a space after the colon"),
        (ARGS, "env: [A, B]", "write env"),
        (ARGS, "args: 0.1", "write args"),
        ("limits", "tags: [a, b]\nlimits", "write tags"),
        ("limits", "metadata: {}\nlimits", "did you mean"),
        ("limits", "description: x\nlimits", "did you mean"),
        ("limits", "mem: 64G\nlimits", "did you mean"),
        ("limits", "nodelist: rack1\nlimits", "did you mean"),
        ("args:", "argents_of_mine: {}\n  args:", 'requirements"?'),
    ],
)
def test_no_cure_is_invented(folder: Path, old: str, new: str, wrong: str) -> None:
    assert wrong not in problems_of(JOB.replace(old, new, 1))


@pytest.mark.parametrize("name", ["job", "tiny"])
def test_a_job_below_a_name_is_moved_up(folder: Path, name: str) -> None:
    found = problems_of(f"{name}:\n" + textwrap.indent(JOB, "  "))
    assert f"remove the line {name}:, and begin the fields below it in column 1" in found


def test_folders_that_exist_are_no_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own folder may have a name that a shell would expand."""
    strange = folder / "~old" / "$HOME" / "a\\b"
    strange.mkdir(parents=True)
    monkeypatch.chdir(strange)
    assert "relative paths start at the folder of the job file" in problems_of(JOB)


@pytest.mark.parametrize("place", sorted(set(COMMON_WORDS.values())))
def test_a_word_means_a_field_that_exists(place: str) -> None:
    model: Any = JobSpec
    *sections, name = place.split(".")
    for section in sections:
        field = model.model_fields[section].annotation
        model = next(
            (each for each in getattr(field, "__args__", ()) if each is not type(None)), field
        )
    assert name in model.model_fields
    assert not set(COMMON_WORDS) & set(OWN_ARGUMENTS)


@pytest.mark.parametrize(
    ("name", "text", "use"),
    [
        ("train.py", "import argparse\np: argparse.ArgumentParser()\n", "code: {script: train.py}"),
        ("train.py", "a: int = 1\n", "code: {script: train.py}"),
        (
            "run.sbatch",
            "#!/bin/bash\n#SBATCH --nodes=2\nsrun x\n",
            "code: {command: [bash, run.sbatch]}",
        ),
        ("run.sh", "python train.py\n", "code: {command: [bash, run.sh]}"),
        ("train.ipynb", '{"cells": []}', "code: {script: ...}"),
    ],
)
def test_a_program_is_no_job_file(folder: Path, name: str, text: str, use: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(cloudtrain.SpecError) as caught:
        cloudtrain.validate(name, local=True)
    (problem,) = caught.value.problems
    assert (problem.file, problem.message) == (name, "a program, not a job file")
    assert f"name it in a job.yaml: {use}" in problem.hint


def test_a_job_file_may_have_any_suffix(folder: Path) -> None:
    Path("job.sh").write_text(JOB)
    cloudtrain.validate("job.sh", local=True)
