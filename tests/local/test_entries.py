"""Runs that start a module or a command, and what their code finds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.code_folders import write_tree
from support.jobs import Cli, until

from cloudtrain_runtime.contract.run_variables import setter_of

pytestmark = pytest.mark.processes

CLUSTER = "cluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"


def follow(cli: Cli, folder: Path, code: str, *options: str) -> tuple[int, str]:
    """Run a job with this `code` section here; return the exit code and its log."""
    (folder / "job.yaml").write_text(f"name: demo\ncode: {code}\n{CLUSTER}")
    done = cli("submit", folder / "job.yaml", "--local", "--follow", "--json", *options)
    return done.code, done.err


def test_a_module_runs_as_by_python_m(cli: Cli, tmp_path: Path) -> None:
    """Relative imports work, the code folder is on the import path, and spawned processes find the module."""
    train = (
        "import multiprocessing, sys\n"
        "from .parts import NAME\n"
        "import beside\n"
        "def work(text): print('worker:', text, __name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    print('seen:', NAME, beside.NAME, __package__, __spec__.name, sys.argv[1:], flush=True)\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work, args=(NAME,))\n"
        "    process.start(); process.join(); sys.exit(process.exitcode)\n"
    )
    parts = {
        "package____init___py": "",
        "package__parts_py": "NAME = 'part'\n",
        "beside_py": "NAME = 'beside'\n",
    }
    folder = write_tree(tmp_path / "job", package__train_py=train, **parts)
    code, log = follow(cli, folder, "{module: package.train, args: [--lr, 1e-4]}")
    assert code == 0, log
    assert "seen: part beside package package.train ['--lr', '1e-4']" in log
    assert "worker: part __mp_main__" in log


def test_a_failing_module_is_reported_from_its_own_line(cli: Cli, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "job", package____init___py="")
    (folder / "package" / "__main__.py").write_text("raise ValueError('a banana')\n")
    code, log = follow(cli, folder, "{module: package}")
    assert code == 4, log
    assert "failed: ValueError: a banana" in log
    assert "runpy" not in log


@pytest.mark.promise
def test_a_command_gets_its_places_without_a_shell(cli: Cli, tmp_path: Path) -> None:
    """A launcher of ranks and a script of the shell run on each instance; placeholders are the host's own values."""
    shell = (
        'set -e\necho "words: $*"\necho saved > "$CLOUDTRAIN_CHECKPOINT_DIR/$RANK.txt"\n'
        'torchrun --nnodes "$WORLD_SIZE" --node-rank "$RANK" --nproc-per-node 2 '
        '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" train.py\n'
    )
    train = (
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(f'joined: {dist.get_rank()} of {dist.get_world_size()}', flush=True)\n"
        "dist.barrier()\n"  # a rank that ends while another one connects fails it
        "dist.destroy_process_group()\n"
    )
    folder = write_tree(tmp_path / "job", train_py=train, **{"train.sh": shell})
    words = "[bash, train.sh, $RANK/$WORLD_SIZE, $SM_CURRENT_HOST, 'a  b', $$HOME]"
    code, log = follow(cli, folder, f"{{command: {words}, args: {{lr: 1e-4}}}}", "--instances", "2")
    assert code == 0, log
    for rank in (0, 1):
        assert f"words: {rank}/2 algo-{rank + 1} a  b $HOME --lr 1e-4" in log
    assert all(f"joined: {rank} of 4" in log for rank in range(4))


FACTS = """\
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK")
found = {name for name in names if name in os.environ}
host = os.environ["SM_CURRENT_HOST"]
facts = (os.environ["MASTER_ADDR"], json.loads(os.environ["SM_HOSTS"]), os.environ["SM_NUM_GPUS"])
print(f"{host} {os.environ['CLOUDTRAIN_HOST_RANK']} sees", found, facts, sys.argv[1:], flush=True)
from cloudtrain_runtime import report
report(1, loss=float(host[-1]))
"""


def test_an_own_launcher_is_no_rank(cli: Cli, tmp_path: Path) -> None:
    """A program that starts its own ranks finds no variables of a rank, and the cluster's facts."""
    folder = write_tree(tmp_path / "job", train_py=FACTS)
    code = "{command: [python, train.py, $RANK/$WORLD_SIZE], launcher: own}"
    cluster = "cluster: {instance_type: ml.m5.large, instances: 2}\n"
    (folder / "job.yaml").write_text(f"name: demo\ncode: {code}\n{cluster}")
    done = cli("submit", folder / "job.yaml", "--local", "--follow", "--json")
    assert done.code == 0, done.err
    for rank in (0, 1):
        facts = "('127.0.0.1', ['algo-1', 'algo-2'], '0')"
        assert f"algo-{rank + 1} {rank} sees set() {facts} ['{rank}/2']" in done.err
    assert done.json["metrics"]["train/loss"] == 1.0  # only the first host reports


def test_ranks_of_an_own_torchrun_train_together(cli: Cli, tmp_path: Path) -> None:
    train = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(f'joined: {dist.get_rank()} of {dist.get_world_size()}', flush=True)\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: raise ValueError('a banana')\n"
    )
    folder = write_tree(tmp_path / "job", train_py=train)
    command = "[python, -m, torch.distributed.run, --standalone, --nproc-per-node, 2, train.py]"
    code, log = follow(cli, folder, f"{{command: {command}}}")
    assert code == 4, log
    assert all(f"joined: {rank} of 2" in log for rank in range(2))
    assert "ValueError: a banana" in log


@pytest.mark.promise
def test_the_exit_code_of_a_command_is_reported(cli: Cli, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "job", **{"train.sh": "echo going; exit 7\n"})
    code, log = follow(cli, folder, "{command: [bash, train.sh]}")
    assert code == 4, log
    assert "rank 0 on algo-1 (local rank 0) ended with exit code 7" in log


def test_a_file_that_no_kernel_executes_is_reported(cli: Cli, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "job", **{"train.sh": "echo no interpreter line\n"})
    (folder / "train.sh").chmod(0o755)
    code, log = follow(cli, folder, "{command: [./train.sh]}")
    assert code == 4, log
    assert "error: code.command: ./train.sh cannot be started: Exec format error" in log


def test_metrics_of_a_commands_output_are_read(cli: Cli, tmp_path: Path) -> None:
    folder = write_tree(
        tmp_path / "job", **{"train.sh": "for i in 1 2 3; do echo iter $i loss=0.$i; done\n"}
    )
    options = ("--set=metrics.step=iter (\\d+)", "--set=metrics.loss=loss=([0-9.]+)")
    (folder / "job.yaml").write_text(f"name: demo\ncode: {{command: [bash, train.sh]}}\n{CLUSTER}")
    done = cli("submit", folder / "job.yaml", "--local", "--follow", "--json", *options)
    assert done.code == 0, done.err
    assert (done.json["last_step"], done.json["metrics"]["train/loss"]) == (3, 0.3)


def test_a_stop_reaches_all_processes_of_a_command(cli: Cli, tmp_path: Path) -> None:
    wait = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('noticed', flush=True), sys.exit(0)))\n"
    )
    folder = write_tree(
        tmp_path / "job", train_py=f"{wait}print('ready', flush=True)\ntime.sleep(600)\n"
    )
    # The shell ends after the training, as it would with more to do.
    (folder / "train.sh").write_text("trap : TERM\npython train.py\n")
    (folder / "job.yaml").write_text(f"name: demo\ncode: {{command: [bash, train.sh]}}\n{CLUSTER}")
    run = cli("submit", folder / "job.yaml", "--local").out.strip()
    until(lambda: "ready" in cli("logs", run).out)
    cli("stop", run)
    done = cli("follow", run, "--json")
    assert done.json["state"] == "STOPPED"
    assert "noticed" in cli("logs", run).out


FOR_JOBS = {
    *("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH"),
    *(
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "PYTHONUNBUFFERED",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
}
"""Variables that the launcher and torchrun set only where a job does not, or extend."""


def test_a_rank_gets_variables_that_no_job_may_set(cli: Cli, tmp_path: Path) -> None:
    """All that a rank finds is refused in code.env, passed on from this machine, or a job's to set."""
    train = "import json, os\nprint('variables:', json.dumps(sorted(os.environ)), flush=True)\n"
    folder = write_tree(tmp_path / "job", train_py=train)
    code, log = follow(cli, folder, "{script: train.py}")
    assert code == 0, log
    found = {*json.loads(log.partition("variables: ")[2].partition("\n")[0])}
    assert {"RANK", "SM_MODEL_DIR", "TORCHELASTIC_RUN_ID", "TRAINING_JOB_ARN"} <= found
    free = {name for name in found if not setter_of(name)}
    assert free - {*os.environ} - FOR_JOBS == set()
