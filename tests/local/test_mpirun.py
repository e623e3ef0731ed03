"""Ranks that mpirun starts, as AWS's toolkit does for SMDDP: with `OMPI_*` variables, without agent and launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import REPOSITORY, until

from cloudtrain.backends.container.machine import free_port
from cloudtrain.bundle import collect
from cloudtrain.bundle.archive import write_bundle
from cloudtrain_runtime.contract import (
    INCLUDE_FOLDER,
    CheckpointConfig,
    MlTree,
    RunConfig,
    TrainConfig,
    parse_event,
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="each host needs its own loopback address"),
]

HOSTS = ("algo-1", "algo-2")
RANKS = 4
WORKER = "from cloudtrain_runtime.worker import main\nif __name__ == '__main__':\n    main()\n"
TRAIN = TrainConfig(
    epochs=2,
    steps=None,
    batch_size=6,
    accumulate=1,
    precision="fp32",
    compile=False,
    clip_grad_norm=None,
    learning_rate=0.05,
    seed=0,
    evaluate_every_steps=None,
    early_stopping=None,
)
TASK = """
import torch
from torch import nn
from cloudtrain_runtime import Task, context

class Small(Task):
    def __init__(self, fail_rank=None):
        self.fail_rank = fail_rank
    def model(self):
        return nn.Linear(3, 1)
    def datasets(self):
        inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
        return {"train": torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))}
    def loss(self, model, batch):
        if context().rank == self.fail_rank and context().step == 1:
            raise ValueError("the loss of this rank is broken on purpose")
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""

# Replaces ssh for mpirun: runs a command with the environment of a host.
LOGIN = """#!{python}
import json, os, sys
host, command = sys.argv[1], " ".join(sys.argv[2:])
environ = json.loads(open("{folder}/" + host + ".json").read())
os.execve("/bin/sh", ["sh", "-c", command], {{**os.environ, **environ}})
"""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Two hosts on this machine.

    Attributes:
        folder: Folder of both hosts.
        environs: Environment variables of a login, by host.
    """

    folder: Path
    environs: dict[str, dict[str, str]]

    def tree(self, host: str) -> MlTree:
        return MlTree(self.folder / host)

    def install(self, config: RunConfig, **files: str) -> None:
        """Write the code and run.json on each host."""
        for host in HOSTS:
            tree = self.tree(host)
            tree.run_config.parent.mkdir(parents=True, exist_ok=True)
            tree.code.mkdir(parents=True, exist_ok=True)
            tree.run_config.write_text(config.to_json())
            for name, text in {"cloudtrain_worker_py": WORKER, **files}.items():
                (tree.code / name.replace("_py", ".py")).write_text(text)

    def events(self, text: str) -> list[dict[str, Any]]:
        return [event for line in text.splitlines() if (event := parse_event(line)) is not None]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    port = free_port()
    environs = {}
    for number, host in enumerate(HOSTS, start=1):
        tree = MlTree(tmp_path / host)
        for each in (tree.config, tree.model, tree.output_data, tmp_path / f"tmp-{number}"):
            each.mkdir(parents=True)
        resources = {"hosts": list(HOSTS), "current_host": host, "network_interface_name": "lo"}
        (tree.config / "resourceconfig.json").write_text(json.dumps(resources))
        environs[host] = {
            "CLOUDTRAIN_ML_ROOT": str(tree.root),
            "CLOUDTRAIN_HOST_ADDRESSES": json.dumps(
                {host: f"127.0.0.{n}" for n, host in enumerate(HOSTS, start=1)}
            ),
            "CLOUDTRAIN_RENDEZVOUS_PORT": str(port),
            "PYTHONPATH": os.pathsep.join(
                [str(REPOSITORY / "entrypoints"), os.environ["PYTHONPATH"]]
            ),
            "TMPDIR": str(tmp_path / f"tmp-{number}"),
            # AWS's toolkit sets these values, because its script is the worker, which has no hyperparameters.
            "SM_HOSTS": json.dumps(list(HOSTS)),
            "SM_CURRENT_HOST": host,
            "SM_HPS": "{}",
            "SM_USER_ARGS": "[]",
            "SM_MODEL_DIR": str(tree.model),
        }
    return Cluster(tmp_path, environs)


def run_config(
    task: str | None = None, script: str | None = None, args: Any = (), **others: Any
) -> RunConfig:
    checkpoint = CheckpointConfig(others.pop("uri", ""), None, 1, 3, "auto")
    train = TRAIN if task else None
    return RunConfig(
        "demo", task, script, args, None, 2, "smdistributed", 0, train, checkpoint, **others
    )


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    text: str


@pytest.fixture
def mpirun(cluster: Cluster) -> Iterator[Any]:
    """Start the ranks as AWS's toolkit does: with mpirun on the first host, which logs in on each host."""
    if shutil.which("mpirun") is None:
        pytest.skip("NOT TESTED: there is no mpirun here: apt-get install openmpi-bin")
    login = cluster.folder / "login"
    login.write_text(LOGIN.format(python=sys.executable, folder=cluster.folder))
    login.chmod(0o755)
    for host, environ in cluster.environs.items():
        (cluster.folder / f"{host}.json").write_text(json.dumps(environ))
    started: list[subprocess.Popen[str]] = []

    def start(*module: str) -> subprocess.Popen[str]:
        # The options of github.com/aws/sagemaker-training-toolkit 5.1, smdataparallel.py, without EFA and smddprun.
        options = {
            "btl_tcp_if_include": "lo",
            "oob_tcp_if_include": "lo",
            "plm_rsh_no_tree_spawn": "1",
            "pml": "ob1",
            "btl": "^openib",
            "orte_abort_on_non_zero_status": "1",
            "btl_vader_single_copy_mechanism": "none",
            "plm_rsh_agent": str(login),
        }
        command = ["mpirun", "--host", ",".join(f"{host}:2" for host in HOSTS), "-np", str(RANKS)]
        command += ["--allow-run-as-root", "--tag-output", "--oversubscribe"]
        command += [word for name, value in options.items() for word in ("-mca", name, value)]
        # Both hosts have the same code, and in containers the folder has the same name on both.
        command += [
            "-wdir",
            str(cluster.tree("algo-1").code),
            sys.executable,
            *module,
            "cloudtrain_worker.py",
        ]
        # On the first host, ranks inherit the environment of the toolkit.
        process = subprocess.Popen(
            command,
            env={**os.environ, **cluster.environs["algo-1"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[str]) -> Ended:
    text = process.communicate(timeout=300)[0]
    return Ended(process.returncode, text)


def by_hand(cluster: Cluster) -> Ended:
    """Start each rank with mpirun's variables but without mpirun, so that machines without mpirun test it, too."""
    logs, ranks = [], []
    for rank in range(RANKS):
        host, local_rank = HOSTS[rank // 2], rank % 2
        own = {
            "RANK": rank,
            "SIZE": RANKS,
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": 2,
            "NODE_RANK": local_rank,
        }
        variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}
        log = cluster.folder / f"rank-{rank}.log"
        logs.append(log)
        with log.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "cloudtrain_worker.py"],
                    cwd=cluster.tree(host).code,
                    env={**os.environ, **cluster.environs[host], **variables},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    codes = [rank.wait(120) for rank in ranks]
    return Ended(max(codes), "".join(log.read_text() for log in logs))


@pytest.mark.parametrize("way", ["by hand", "mpirun"])
def test_a_task_trains_and_saves(
    cluster: Cluster, request: pytest.FixtureRequest, way: str
) -> None:
    saved = cluster.folder / "saved"
    cluster.install(run_config(task="small:Small", args={}, uri=str(saved)), small_py=TASK)
    done = by_hand(cluster) if way == "by hand" else end(request.getfixturevalue("mpirun")())
    assert done.code == 0, done.text
    events = cluster.events(done.text)
    (started,) = [event for event in events if event["event"] == "started"]
    assert (started["world_size"], started["backend"]) == (RANKS, "gloo")
    (finished,) = [event for event in events if event["event"] == "finished"]
    assert finished["step"] == 4  # two epochs of 48 samples, 24 in a step
    assert (saved / "step-00000004" / "manifest.json").is_file()
    assert not (cluster.tree("algo-2").model / "model.pt").exists()
    found = torch.load(cluster.tree("algo-1").model / "model.pt", weights_only=True)
    assert found["weight"].shape == (1, 3)


IMPORTER = """
import multiprocessing, os
import shared_lib
def work():
    os.write(1, f"child sees {shared_lib.WHERE}\\n".encode())
if __name__ == "__main__":
    os.write(1, f"rank {os.environ['RANK']} sees {shared_lib.WHERE}\\n".encode())
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


@pytest.mark.parametrize("way", ["by hand", "mpirun"])
def test_included_packages_are_imported(
    cluster: Cluster, request: pytest.FixtureRequest, way: str, tmp_path: Path
) -> None:
    """The hosts get the bundle of a code folder and an include, as AWS's toolkit unpacks it."""
    code, library = tmp_path / "mine" / "code", tmp_path / "mine" / "libs" / "shared_lib"
    for folder in (code, library):
        folder.mkdir(parents=True)
    (code / "probe.py").write_text(IMPORTER)
    (library / "__init__.py").write_text(
        "import os\nWHERE = os.path.basename(os.path.dirname(os.path.dirname(__file__)))\n"
    )
    bundle = write_bundle(collect(code, {"shared_lib": library}), tmp_path / "out")
    for host in HOSTS:
        with tarfile.open(bundle.path) as archive:
            archive.extractall(cluster.tree(host).code, filter="data")
    cluster.install(run_config(script="probe.py", args=[]))
    done = by_hand(cluster) if way == "by hand" else end(request.getfixturevalue("mpirun")())
    assert done.code == 0, done.text
    for rank in range(RANKS):
        assert f"rank {rank} sees {INCLUDE_FOLDER}" in done.text
    assert done.text.count(f"child sees {INCLUDE_FOLDER}") == RANKS


SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from cloudtrain_runtime import context

dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
place = context()
names = ("SM_CURRENT_HOST", "SM_HPS", "SM_USER_ARGS", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "LOCAL_RANK")
seen = {"argv": sys.argv[1:], "sum": total.item(), "host": place.host, "rank": place.rank}
text = json.dumps({**seen, **{name: os.environ.get(name) for name in names}})
os.write(1, ("FOUND " + text + "\\n").encode())
"""


@pytest.mark.parametrize("way", ["by hand", "mpirun"])
def test_a_script_finds_its_place(
    cluster: Cluster, request: pytest.FixtureRequest, way: str
) -> None:
    config = run_config(script="probe.py", args=["--lr", "0.1"], local_rank_option="--local-rank")
    cluster.install(config, probe_py=SCRIPT)
    done = by_hand(cluster) if way == "by hand" else end(request.getfixturevalue("mpirun")())
    assert done.code == 0, done.text
    found = sorted(
        (json.loads(each) for each in re.findall(r"FOUND (\{.*\})", done.text)),
        key=lambda f: f["rank"],
    )
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    for each in found:
        assert each["sum"] == RANKS
        assert each["argv"] == [f"--local-rank={each['rank'] % 2}", "--lr", "0.1"]
        assert each["host"] == each["SM_CURRENT_HOST"] == HOSTS[each["rank"] // 2]
        assert json.loads(each["SM_HPS"]) == {"lr": 0.1}
        assert json.loads(each["SM_USER_ARGS"]) == ["--lr", "0.1"]
        assert (each["GLOO_SOCKET_IFNAME"], each["OMP_NUM_THREADS"]) == ("lo", "1")


def test_a_failure_is_written_to_a_file_and_ends_the_job(cluster: Cluster, mpirun: Any) -> None:
    fail_rank = 3
    uri = str(cluster.folder / "saved")
    cluster.install(
        run_config(task="small:Small", args={"fail_rank": fail_rank}, uri=uri), small_py=TASK
    )
    done = end(mpirun())
    assert done.code == 1, done.text
    failed = [event for event in cluster.events(done.text) if event["event"] == "failed"]
    (cause,) = [event for event in failed if not event["secondary"]]
    host = HOSTS[fail_rank // 2]
    message = f"rank {fail_rank} on {host} (local rank {fail_rank % 2}) failed: ValueError: the loss of this rank is"
    assert cause["message"].startswith(message)
    assert (cause["rank"], cause["host"]) == (fail_rank, host)
    text = cluster.tree(host).failure.read_text()
    assert text.startswith(message)
    assert "small.py" in text
    # On the other host, the toolkit writes the file from mpirun's output.
    (other,) = set(HOSTS) - {host}
    assert not cluster.tree(other).failure.exists()
    # From this line on the toolkit quotes the output.
    first = next(line for line in done.text.splitlines() if "Error" in line and "<stdout>" in line)
    assert f"[rank{fail_rank}]: " in first
    assert "the loss of this rank is broken on purpose" in first


def test_an_exit_code_of_a_script_is_reported(cluster: Cluster, mpirun: Any) -> None:
    script = "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '2' else time.sleep(60)\n"
    cluster.install(run_config(script="probe.py", args=[]), probe_py=script)
    done = end(mpirun())
    assert done.code == 7, done.text
    assert (
        cluster.tree("algo-2").failure.read_text()
        == "rank 2 on algo-2 (local rank 0) ended with exit code 7"
    )


def test_a_rank_that_is_killed_ends_the_job(cluster: Cluster, mpirun: Any) -> None:
    """Only mpirun reports the kill, and the toolkit quotes its output."""
    script = "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '3' else 0\n"
    cluster.install(run_config(script="probe.py", args=[]), probe_py=f"{script}time.sleep(60)\n")
    done = end(mpirun())
    assert done.code == 128 + signal.SIGKILL, done.text
    assert "process rank 3" in done.text


@pytest.mark.parametrize("module", [[], ["-m", "mpi4py"]])
def test_mpi_is_finalized_if_a_script_initialized_it(
    cluster: Cluster, mpirun: Any, module: list[str]
) -> None:
    """For mpirun, a rank that exits without finalizing MPI has failed."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("NOT TESTED: there is no mpi4py here: pip install mpi4py")
    script = (
        "import os\nfrom mpi4py import MPI\nos.write(1, b'of %d\\n' % MPI.COMM_WORLD.Get_size())\n"
    )
    cluster.install(run_config(script="probe.py", args=[]), probe_py=script)
    done = end(mpirun(*module))
    assert done.code == 0, done.text
    assert done.text.count("of 4") == RANKS


def test_ranks_stop_on_sigterm(cluster: Cluster, mpirun: Any) -> None:
    """AWS's toolkit does not forward SIGTERM, but mpirun does."""
    saved = cluster.folder / "saved"
    pause = "        __import__('time').sleep(0.1)\n"
    slow = TASK.replace("        return nn.functional", f"{pause}        return nn.functional")
    config = run_config(task="small:Small", args={}, uri=str(saved))
    endless = dataclasses.replace(TRAIN, epochs=10_000)
    cluster.install(dataclasses.replace(config, train=endless), small_py=slow)
    process = mpirun()
    until(lambda: list(saved.glob("step-*/manifest.json")))
    for rank in _ranks_of(cluster):
        os.kill(rank, signal.SIGTERM)
    done = end(process)
    assert done.code == 0, done.text
    events = cluster.events(done.text)
    assert any(event["event"] == "stopped" for event in events), events


def _ranks_of(cluster: Cluster) -> list[int]:
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        line = process.info["cmdline"] or []
        if line[-1:] == ["cloudtrain_worker.py"] and "mpirun" not in line[0]:
            with contextlib.suppress(psutil.Error):  # the process has just ended
                is_of_cluster = (
                    process.environ().get("CLOUDTRAIN_ML_ROOT", "").startswith(str(cluster.folder))
                )
                found += [process.pid] if is_of_cluster else []
    return found
