"""How a script expects to be started, read from its source."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES

from cloudtrain import plan
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.conventions import ScriptConventions, read_conventions
from cloudtrain.planning.diagnostics import run_step
from cloudtrain.planning.job_checks import find_local_rank_option
from cloudtrain.support.container_paths import below_code

PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument({}, type=int)\n"


def read(folder: Path, **files: str) -> ScriptConventions:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return read_conventions(folder, "train.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PARSER.format('"--local_rank"'), "--local_rank"),
        (PARSER.format('"--local-rank", "--local_rank"'), "--local-rank"),
        (
            "import click\n@click.option('--local-rank')\ndef main(local_rank): ...\n",
            "--local-rank",
        ),
        (PARSER.format('"--local_ranks"'), None),
        ("print('--local_rank')\n", None),
        ("# parser.add_argument('--local_rank')\n", None),
        ("def broken(:\n", None),
    ],
)
def test_an_option_for_the_local_rank_is_detected(
    tmp_path: Path, text: str, expected: str | None
) -> None:
    assert read(tmp_path, train=text).local_rank == expected


def test_a_warning_about_the_source_is_not_shown(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read(tmp_path, train="import lib\npattern = '\\d'\n", lib="pattern = '\\w'\n")
    assert found == []


def test_a_plan_parses_and_walks_each_module_once(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []
    walked: list[ast.AST] = []
    parse, walk = ast.parse, ast.walk

    def counting_parse(source: Any, *args: Any, **options: Any) -> Any:
        parsed.append(source)
        return parse(source, *args, **options)

    def counting_walk(node: ast.AST) -> Iterator[ast.AST]:
        walked.extend([node] if isinstance(node, ast.Module) else [])
        return walk(node)

    monkeypatch.setattr(ast, "parse", counting_parse)
    monkeypatch.setattr(ast, "walk", counting_walk)
    script, library = (
        "import torch.distributed, lib  # once\nlib.run()\n",
        "def run(): ...  # once\n",
    )
    text = "name: x\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge}\n"
    plan(job(text, train_py=script, lib_py=library))
    assert [each for each in parsed if each in (script, library)] == [script, library]
    assert len(walked) == len({script, library})


def test_equal_modules_are_read_one_by_one(tmp_path: Path) -> None:
    same = "def run():\n    from .relative import a\n"
    found = read(
        tmp_path,
        train="import one.code, two.code\none.code.run()\ntwo.code.run()\n",
        one__code=same,
        two__code=same,
        one__relative="import numpy as a\n",
        two__relative="import pandas as a\n",
    )
    assert [name for name, _ in found.imports] == ["numpy", "pandas"]


@pytest.mark.parametrize("path", [".", "/opt/ml/code", "/opt/ml/code/"])
def test_the_code_folder_may_be_on_the_import_path(tmp_path: Path, path: str) -> None:
    for name in ("torch/__init__.py", "sub/train.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("import torch\n")
    without = read_conventions(tmp_path, "sub/train.py")
    assert [module for module, _ in without.imports] == ["torch"]
    found = read_conventions(tmp_path, "sub/train.py", search=(below_code(path),))
    assert found.imports == ()


def test_modules_of_the_code_folder_are_read_too(tmp_path: Path) -> None:
    parser = PARSER.format('"--local_rank"')
    found = read(
        tmp_path, train="import numpy\nfrom lib import options\n", lib__options=parser, other=parser
    )
    assert found.local_rank == "--local_rank"
    assert read(tmp_path, train="import numpy\nimport train\n").local_rank is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n", "train.py:2"),
        ("import torch\n\ntorch.multiprocessing.spawn(print)\n", "train.py:3"),
        ("from torch.multiprocessing import spawn\nspawn(print)\n", "train.py:2"),
        ("from torch import multiprocessing\nmultiprocessing.spawn(print)\n", "train.py:2"),
        ("import torch.multiprocessing as mp\nmp.start_processes(print, nprocs=2)\n", "train.py:2"),
        ("from torch.multiprocessing.spawn import start_processes as go\ngo(1)\n", "train.py:2"),
        ("from torch.multiprocessing.spawn import ProcessContext as P\nP([], [])\n", "train.py:2"),
        ("from detectron2.engine import launch\nlaunch(print, 8)\n", "train.py:2"),
        ("from mine.engine import launch\nlaunch(print, 8)\n", None),
        ("import torch.multiprocessing as mp\nmp.get_context('spawn')\n", None),
        ("import torch.multiprocessing as mp\nmp.set_start_method('spawn')\n", None),
        ("import mine as mp\nmp.spawn(print)\n", None),
    ],
)
def test_a_script_that_spawns_ranks_is_detected(
    tmp_path: Path, text: str, line: str | None
) -> None:
    assert read(tmp_path, train=text).spawn == line


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"lr": 0.1}, "--local_rank"),
        ({"local_rank": 0}, None),
        ({"local-rank": 0}, None),
        (["--local_rank=0"], None),
        (["--local-rank", "0"], None),
        (["--local_rank_of", "0"], "--local_rank"),
    ],
)
def test_an_option_that_the_job_passes_is_not_added(args: Any, expected: str | None) -> None:
    code = {"script": "train.py", "args": args, "directory": str(EXAMPLES / "script-launch")}
    spec = JobSpec.model_validate(
        {"name": "x", "code": code, "cluster": {"instance_type": "ml.g5.xlarge"}}
    )
    option, diagnostics = run_step(find_local_rank_option(spec, ScriptConventions("--local_rank")))
    assert option == expected
    assert [each.message.partition(":")[0] for each in diagnostics] == (
        ["train.py defines --local_rank"] if expected else []
    )
    assert run_step(find_local_rank_option(spec, ScriptConventions())) == (None, [])


def test_other_examples_follow_no_such_convention() -> None:
    found = {
        folder.name: read_conventions(folder, "train.py")
        for folder in EXAMPLES.iterdir()
        if (folder / "train.py").is_file()
    }
    assert {name for name, each in found.items() if each.local_rank} == {"script-launch"}
    assert {name for name, each in found.items() if each.spawn} == {"script-spawn"}
