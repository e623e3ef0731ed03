"""Signs of ranks and checkpoints in a script's source, and the plan's warnings about them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli

from cloudtrain.job.static_analysis.conventions import read_conventions
from cloudtrain.job.static_analysis.environment import find_own_rank
from cloudtrain.job.static_analysis.signs import (
    find_launcher,
    joins_ranks,
    ml_literals,
    names_checkpoint_folder,
    uses_checkpoints,
)
from cloudtrain.job.static_analysis.syntax import Module

JOB = """\
name: signs
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, processes_per_instance: PROCESSES}
"""
ALONE = "no sign of torch.distributed"
UNSAVED = "no sign of checkpoints"


def module_of(text: str) -> Module:
    return Module(ast.parse(text), "train.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.distributed as dist\n", True),
        ("from torch import distributed\n", True),
        ("import torch\ntorch.distributed.init_process_group()\n", True),
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n", True),
        ("import pytorch_lightning as pl\n", True),
        ("from transformers import Trainer\n", True),
        ("from accelerate import Accelerator\n", True),
        ("import timm.utils\ntimm.utils.init_distributed_device(args)\n", True),
        ("import torch\nmodel = torch.nn.Linear(1, 1)\n", False),
        ("'''Not distributed: one GPU, no DDP.'''\n# torch.distributed\nimport torch\n", False),
        ("print('torch.distributed')\n", False),
        ("from distance import distribute\n", False),
    ],
)
def test_signs_of_ranks_that_join(text: str, expected: bool) -> None:
    assert joins_ranks(module_of(text)) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from cloudtrain_runtime import checkpoint\n", True),
        ("import cloudtrain_runtime as ct\nct.checkpoint.save(1, model=model)\n", True),
        ("from cloudtrain_runtime.integrations import lightning\n", True),
        ("from cloudtrain_runtime import report\n", False),
        ("from models import checkpoint\n", False),
        ("OUT = '/opt/ml/checkpoints/a'\n", True),
        ("import os\nout = os.environ['CLOUDTRAIN_ML_ROOT'] + '/checkpoints'\n", True),
        ("import torch\ntorch.save({}, 'snapshot.pt')\n", False),
        ("'''Writes to /opt/ml/checkpoints, some day.'''\n", False),
    ],
)
def test_signs_of_checkpoints(text: str, expected: bool) -> None:
    module = module_of(text)
    assert (uses_checkpoints(module) or names_checkpoint_folder(module)) is expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import subprocess\nsubprocess.run(['torchrun', '--nproc-per-node=2', 'a.py'])\n", 2),
        (
            "import subprocess\ncmd = ['accelerate', 'launch', 'a.py']\nsubprocess.check_call(cmd)\n",
            2,
        ),
        ("import os\nos.system('deepspeed a.py')\n", 2),
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'torch.distributed.run', 'a.py'])\n",
            2,
        ),
        ("import os\nos.system(f'python3 -m torch.distributed.launch {script}')\n", 2),
        (
            "import subprocess\nsubprocess.run(['nvidia-smi'])\nprint('usage: torchrun a.py')\n",
            None,
        ),
        (
            "import os\nif 'LOCAL_RANK' not in os.environ:\n    os.execvp('torchrun', ['torchrun', 'a.py'])\n",
            None,
        ),
        ("import os\nif os.environ.get('RANKING'):\n    os.system('torchrun a.py')\n", 3),
        ("'''torchrun a.py'''\nimport accelerate\n", None),
        ("import subprocess, deepspeed\nBACKENDS = 'deepspeed'\n", None),
        ("import subprocess\nsubprocess.run(['ray', 'start', '--head'])\n", 2),
        ("import subprocess\nsubprocess.run('yolo train data=a.yaml', shell=True)\n", 2),
        ("from ray.train.torch import TorchTrainer\nTorchTrainer(f).fit()\n", 2),
        ("import ray.train.torch\nray.train.torch.TorchTrainer(f).fit()\n", 2),
        ("from ray import tune\ntune.Tuner(f).fit()\n", 2),
        ("import ray\nray.init()\nray.get(f.remote())\n", None),
        ("import ray.train\nray.train.report({})\n", None),
        ("import subprocess\nMODELS = ['yolo']\nprint('ray of light')\n", None),
    ],
)
def test_a_script_that_starts_a_launcher(text: str, line: int | None) -> None:
    assert find_launcher(module_of(text)) == line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\nos.environ['RANK'] = os.environ['SLURM_PROCID']\n", None),
        ("import os\nos.environ['RANK'] = os.environ['MY_RANK']\n", (2, "RANK")),
        ("import os\nos.environ.update({'WORLD_SIZE': '8'})\n", (2, "WORLD_SIZE")),
        ("from os import environ\nenviron['LOCAL_RANK'] = '0'\n", (2, "LOCAL_RANK")),
        ("import os\nos.environ['RANK'] = os.environ.get('RANK', '0')\n", None),
        ("import os\nos.environ.setdefault('RANK', '0')\n", None),
        ("import os\nif 'RANK' not in os.environ:\n    os.environ['RANK'] = '0'\n", None),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n", None),
        ("import os\nrank = int(os.environ['RANK'])\nos.environ['RANK'] = str(rank)\n", None),
        (
            (
                "import os\nif 'RANK' in os.environ:\n    pass\nelif 'SLURM_PROCID' in os.environ:\n"
                "    os.environ['LOCAL_RANK'] = os.environ['SLURM_LOCALID']\nelse:\n    os.environ['WORLD_SIZE'] = '1'\n"
            ),
            None,
        ),
        (
            "import os\nis_slurm = 'SLURM_JOB_ID' in os.environ\nif is_slurm:\n    os.environ['RANK'] = '3'\n",
            None,
        ),
        ("import os\ndef init_slurm():\n    os.environ['LOCAL_RANK'] = '3'\n", None),
        (
            "import os\ndef init():\n    if 'RANK' in os.environ:\n        return\n    os.environ['RANK'] = '0'\n",
            None,
        ),
        (
            "import os\ntry:\n    os.environ['RANK']\nexcept KeyError:\n    os.environ['RANK'] = '0'\n",
            None,
        ),
        ("import os\nif args.launcher == 'none':\n    os.environ['RANK'] = '0'\n", None),
        (
            "import os\nclass RayProcess:\n    def run(self, rank):\n        os.environ['RANK'] = rank\n",
            None,
        ),
        ("import os\nclass SlurmEnv:\n    os.environ['RANK'] = '1'\n", None),
        (
            "import os, ray\n@ray.remote(num_gpus=1)\nclass Worker:\n    os.environ['RANK'] = '1'\n",
            None,
        ),
        (
            "import os\nfrom ray import remote\n@remote\ndef f(rank):\n    os.environ['RANK'] = rank\n",
            None,
        ),
        (
            "import os\nclass Array:\n    def f(self, rank):\n        os.environ['RANK'] = rank\n",
            (4, "RANK"),
        ),
        ("import os\ndef load_array_of():\n    os.environ['RANK'] = '0'\n", (3, "RANK")),
        ("import os\ndef compile_it():\n    os.environ['RANK'] = '0'\n", (3, "RANK")),
        ("import os\nif args.seed:\n    os.environ['RANK'] = '0'\n", (3, "RANK")),
        (
            "import os\nfor gpu in range(8):\n    os.environ['LOCAL_RANK'] = str(gpu)\n",
            (3, "LOCAL_RANK"),
        ),
    ],
)
def test_a_script_that_sets_its_own_rank(text: str, expected: tuple[int, str] | None) -> None:
    found = find_own_rank(module_of(text))
    assert (found and (found.line, found.name)) == expected


def test_literal_paths_below_opt_ml() -> None:
    text = "'''/opt/ml/model'''\na = '/opt/ml/model'\nb = '/opt/mlflow'\nc = f'/opt/ml/input/{a}'\nd = 'in /opt/ml/x'\n"
    assert ml_literals(module_of(text)) == [2, 4]


def _warnings(cli: Cli, path: Path, *arguments: str) -> str:
    return "\n".join(cli("plan", path, "--json", *arguments).json["warnings"])


def test_ranks_of_known_packages_alone_never_join(cli: Cli, job: Callable[..., Path]) -> None:
    text = "import gymnasium as gym, torch, tyro\nfrom stable_baselines3 import PPO\n"
    path = job(JOB.replace("PROCESSES", "auto"), train_py=text)
    assert ALONE in _warnings(cli, path)
    path.with_name("train.py").write_text(f"{text}import of_a_company\n")
    assert ALONE not in _warnings(cli, path)


def test_the_plan_warns_of_ranks_that_never_join(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        JOB.replace("PROCESSES", "auto"), train_py="import torch, helper\n", helper_py="import os\n"
    )
    found = _warnings(cli, path)
    assert ALONE in found
    assert f"{UNSAVED}" in found
    assert "limits.hang" in found
    assert "limits.hang" not in _warnings(cli, path, "--set=limits.hang=off")
    assert ALONE not in _warnings(
        cli, path, "--set=cluster.processes_per_instance=1", "--instances", "1"
    )
    assert UNSAVED not in _warnings(cli, path, "--set=code.args.out=/opt/ml/checkpoints/a")
    path.with_name("helper.py").write_text("from torch.distributed import init_process_group\n")
    assert ALONE not in _warnings(cli, path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch, numpy, tqdm, einops, wandb\n", True),
        ("from mycompany.trainer import fit\nfit()\n", False),
        ("import importlib, sys\nimportlib.import_module(sys.argv[1]).main()\n", False),
        ("import fastai.vision.all\n", False),
        ("from ultralytics import YOLO\n", False),
        ("import torch.distributed.rpc as rpc\nrpc.init_rpc('ps')\n", False),
    ],
)
def test_ranks_may_join_in_a_package(
    cli: Cli, job: Callable[..., Path], text: str, expected: bool
) -> None:
    path = job(JOB.replace("PROCESSES", "auto"), train_py=text)
    assert (ALONE in _warnings(cli, path)) is expected


SPAWN = "import os, json\nimport torch.multiprocessing as mp\nmp.spawn(print, nprocs=4)\n"


HYDRA = (
    "import hydra\n@hydra.main(config_path='conf', config_name='a')\ndef main(cfg): ...\nmain()\n"
)


@pytest.mark.parametrize(
    ("text", "args", "file", "content", "is_kept"),
    [
        ("", "[--config, a.yaml]", "a.yaml", "out: /opt/ml/checkpoints/x\n", True),
        ("", "{config: conf/a.toml}", "conf/a.toml", "out = '/opt/ml/checkpoints'\n", True),
        ("", "[--out, /opt/ml/checkpoints/a]", "a.yaml", "", True),
        (
            "import os\nos.path.expandvars('')\n",
            "[--out, '$CLOUDTRAIN_CHECKPOINT_DIR/a']",
            *("a.yaml", "", True),
        ),
        ("", "[--config=a.json]", "a.json", '{"out": "/opt/ml/checkpoints"}', True),
        ("", "[/opt/ml/code/a.py]", "a.py", "out_dir = '/opt/ml/checkpoints'\n", True),
        ("", "[--conf_dir, conf, a.yml]", "conf/a.yml", "save: /opt/ml/checkpoints\n", True),
        (HYDRA, "[]", "conf/b/c.yaml", "dir: ${oc.env:CLOUDTRAIN_CHECKPOINT_DIR}\n", True),
        ("", "[--config, a.yaml]", "b.yaml", "out: /opt/ml/checkpoints\n", False),
        ("", "[--config, a.yaml]", "a.yaml", "# out: /opt/ml/checkpoints\n", False),
        ("", "[--config, a.yaml]", "a.yaml", "out: /opt/ml/model\n", False),
        ("", "[--config, missing.yaml]", "a.yaml", "out: /opt/ml/checkpoints\n", False),
        (HYDRA, "[]", "other/b.yaml", "dir: /opt/ml/checkpoints\n", False),
    ],
)
def test_a_configuration_file_may_name_the_folder(
    cli: Cli, job: Callable[..., Path], text: str, args: str, file: str, content: str, is_kept: bool
) -> None:
    path = job(JOB.replace("PROCESSES", "1"), train_py=f"import torch.distributed\n{text}")
    (path.parent / file).parent.mkdir(parents=True, exist_ok=True)
    (path.parent / file).write_text(content)
    assert (UNSAVED not in _warnings(cli, path, f"--set=code.args={args}")) is is_kept


@pytest.mark.parametrize(
    ("condition", "is_warned"),
    [
        ("if 'LOCAL_RANK' not in os.environ:", False),
        ('if os.environ.get("RANK") is None:', False),
        ("if not args.distributed_no_spawn:", False),
        ("if not torch.distributed.is_torchelastic_launched():", False),
        ("if args.multiprocessing_distributed:", True),
        ("if args.world_size > 1:", True),
        ("if 'SOME_RANKING' in os.environ:", True),
    ],
)
def test_a_spawn_for_another_start_gets_no_warning(
    cli: Cli, job: Callable[..., Path], condition: str, is_warned: bool
) -> None:
    head = "import os, torch.distributed\nimport torch.multiprocessing as mp\n"
    text = f"{head}{condition}\n    mp.spawn(print)\nelse:\n    print(1)\n"
    path = job(JOB.replace("PROCESSES", "auto"), train_py=text)
    assert ("train.py:4 starts processes with" in _warnings(cli, path)) is is_warned


def test_reports_are_no_checkpoints_but_serve_the_hang_limit(
    cli: Cli, job: Callable[..., Path]
) -> None:
    text = "from cloudtrain_runtime import report\nreport(1, loss=0.5)\n"
    found = _warnings(
        cli, job(JOB.replace("PROCESSES", "1") + "checkpoint: {every: 5 steps}\n", train_py=text)
    )
    assert UNSAVED in found
    assert "limits.hang" not in found
    assert "checkpoint.every has an effect only" in found


def test_an_interval_of_saves_by_the_runtime_is_not_questioned(
    cli: Cli, job: Callable[..., Path]
) -> None:
    text = "from cloudtrain_runtime import checkpoint\ncheckpoint.save(1)\n"
    found = _warnings(
        cli, job(JOB.replace("PROCESSES", "1") + "checkpoint: {every: 5 steps}\n", train_py=text)
    )
    assert UNSAVED not in found
    assert "checkpoint.every" not in found


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "import subprocess\nsubprocess.run(['torchrun', 'a.py'])\n",
            "train.py:2 starts a launcher",
        ),
        ("import os\nos.environ['RANK'] = '1'\n", "train.py:2 sets RANK"),
        (
            (
                "import deepspeed.launcher.runner\ndef main():\n    deepspeed.launcher.runner.main(['a.py'])\n"
                "if __name__ == '__main__':\n    main()\n"
            ),
            "train.py:3 starts a launcher",
        ),
        (
            "from torch.distributed import run\nrun.main(['--nproc-per-node', '8', 'a.py'])\n",
            "train.py:2 starts a launcher",
        ),
        (
            "from accelerate.commands.launch import main\nmain()\n",
            "train.py:2 starts a launcher",
        ),
    ],
)
def test_a_warning_about_own_ranks_names_the_remedy(
    cli: Cli, job: Callable[..., Path], text: str, place: str
) -> None:
    path = job(JOB.replace("PROCESSES", "auto"), train_py=text)
    found = [line for line in _warnings(cli, path).splitlines() if line.startswith(place)]
    assert len(found) == 1
    assert "cluster.processes_per_instance: 1" in found[0]
    assert place not in _warnings(cli, path, "--set=cluster.processes_per_instance=1")


ALONE_HERE = "os.environ['MASTER_ADDR'] = 'localhost'"
MEET = "import os, torch.distributed as dist\n"
SETUP = f"{MEET}def setup(rank):\n    {ALONE_HERE}\n    dist.init_process_group('nccl')\n"
SETUP_OF_ONE = SETUP.replace("(rank):", "(rank):\n    if rank: return")
OWN_HOST = "sets MASTER_ADDR to its own host"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"{SETUP}setup(0)\n", "train.py:3"),
        (f"{SETUP}import torch.multiprocessing as mp\nmp.spawn(setup, nprocs=8)\n", "train.py:3"),
        (f"{MEET}{ALONE_HERE}\ndist.init_process_group(init_method='env://')\n", "train.py:2"),
        (f"{MEET}{ALONE_HERE.replace('localhost', '127.0.0.1')}\n", "train.py:2"),
        (f"{MEET}os.environ.update(MASTER_ADDR='localhost')\n", "train.py:2"),
        (SETUP, None),
        (f"{MEET}os.environ.setdefault('MASTER_ADDR', 'localhost')\n", None),
        (f"{MEET}if args.nodes == 1:\n    {ALONE_HERE}\n", None),
        (f"{SETUP_OF_ONE}setup(0)\n", None),
        (f"{SETUP}setup(0)\nos.environ['MASTER_ADDR'] = args.host\n", None),
        (f"{SETUP}setup(0)\nos.environ.update(MASTER_ADDR=args.host)\n", None),
        (f"{SETUP}setup(0)\nos.environ.update({{'MASTER_ADDR': args.host}})\n", None),
        (f"{MEET}{ALONE_HERE}\ndist.init_process_group(init_method=args.url)\n", None),
        (f"{MEET}{ALONE_HERE.replace('localhost', 'algo-1')}\n", None),
    ],
)
def test_an_address_that_only_one_host_has(
    cli: Cli, job: Callable[..., Path], text: str, place: str | None
) -> None:
    path = job(JOB.replace("PROCESSES", "auto"), train_py=text)
    found = [each for each in _warnings(cli, path).splitlines() if OWN_HOST in each]
    assert [each.split(" ")[0] for each in found] == ([place] if place else [])
    assert OWN_HOST not in _warnings(cli, path, "--instances", "1")


BILLED = "1 rank uses 1 of the 8 GPUs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SPAWN, False),
        ("import subprocess\nsubprocess.run(['torchrun', 'a.py'])\n", False),
        ("from torch import nn\nmodel = nn.DataParallel(model)\n", False),
        ("import torch\nmodel = torch.nn.parallel.DataParallel(model)\n", False),
        ("from mine import DataParallel\nmodel = DataParallel(model)\n", True),
        ("import torch.distributed\n", True),
    ],
)
def test_a_process_that_uses_all_gpus_leaves_none_idle(
    cli: Cli, job: Callable[..., Path], text: str, expected: bool
) -> None:
    path = job(JOB.replace("PROCESSES", "1"), train_py=text)
    assert (BILLED in _warnings(cli, path)) is expected


def test_a_command_may_use_all_gpus(cli: Cli, job: Callable[..., Path]) -> None:
    text = JOB.replace("PROCESSES", "1").replace("script: train.py", "command: [yolo, train]")
    assert BILLED not in _warnings(cli, job(text, train_py=""))


@pytest.mark.parametrize(
    "text",
    [
        # It starts itself again where no launcher has started it.
        "import os\nfrom torch.distributed.run import main\nif 'RANK' not in os.environ:\n    main(['a.py'])\n",
        "from torch.distributed.run import get_args_parser\nget_args_parser()\n",
        "from helper import main\nmain()\n",
    ],
)
def test_a_launcher_that_may_not_run_gets_no_warning(
    cli: Cli, job: Callable[..., Path], text: str
) -> None:
    path = job(JOB.replace("PROCESSES", "auto"), train_py=text, helper_py="def main():\n    pass\n")
    assert "starts a launcher" not in _warnings(cli, path)


@pytest.mark.parametrize(
    "name", ["script-accelerate", "script-ddp", "script-launch", "script-lightning"]
)
def test_no_example_lacks_a_sign(cli: Cli, name: str) -> None:
    assert ALONE not in _warnings(cli, EXAMPLES / name / "job.yaml", "--instances", "2")


SRC = (
    "train.py:2 imports shapes, which is in src of the code folder, but Python's import path begins in the code folder, so "
    "the code cannot start: add code.env: {PYTHONPATH: src}"
)


def test_a_script_that_imports_from_src_gets_the_fix(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        JOB.replace("PROCESSES", "1"), train_py="import os\nfrom shapes.flat import square\n"
    )
    package = path.parent / "src" / "shapes"
    package.mkdir(parents=True)
    (package / "flat.py").write_text("square = 4\n")
    assert SRC in _warnings(cli, path)
    assert SRC not in _warnings(cli, path, "--set=code.env.PYTHONPATH=src")
    path.with_name("requirements.txt").write_text("-e .\n")
    path.with_name("pyproject.toml").write_text("[project]\nname = 'shapes'\n")
    assert SRC not in _warnings(cli, path, "--set=code.requirements=requirements.txt")


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("train.py", "import sys\nsys.path.insert(0, 'src')\nimport shapes\n"),
        ("train.py", "from . import shapes\n"),
        ("train.py", "import numpy\n"),
        ("src/train.py", "import shapes\n"),
    ],
)
def test_other_imports_get_no_hint_about_src(tmp_path: Path, script: str, text: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "shapes.py").touch()
    (tmp_path / script).write_text(text)
    assert read_conventions(tmp_path, script).path_imports == ()
