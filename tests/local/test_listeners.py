"""What runs listen on, and what other users of the machine can read in the arguments of their processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.jobs import Cli, command, until

pytestmark = pytest.mark.processes

SCRIPT = """\
import time, torch, torch.distributed as dist
for attempt in range(2):  # a script may create its group again
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    time.sleep(1)
    rank = dist.get_rank()
    dist.destroy_process_group()
    time.sleep(rank)  # a rank that connects to the first group's store fails or hangs, also in plain torch
"""
TASK = """\
import time, torch
from cloudtrain_runtime import Task

class Slow(Task):
    def datasets(self): return dict.fromkeys(["train", "validation"], torch.utils.data.TensorDataset(torch.ones(8, 2)))
    def model(self): return torch.nn.Linear(2, 1)
    def loss(self, model, batch):
        time.sleep(0.5)
        return model(batch[0]).mean()
"""
CLUSTER = "cluster: {instance_type: ml.m5.large, instances: INSTANCES, processes_per_instance: 2}\n"
KINDS = {
    "script": "code: {script: train.py}\n",
    "command": "code: {command: [python, train.py]}\n",
    "task": "code: {task: 'train:Slow'}\ntrain: {epochs: 2, batch_size: 2}\ncheckpoint: {every: 1 steps}\n",
}


SWEEP = """\
name: meets
job: job.yaml
objective: validation/loss
space: {train.learning_rate: {uniform: [0.1, 0.2]}}
trials: 1
"""
LONG = """\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
time.sleep(300)
"""
NOBODY = 65534
PICKLE_SECONDS = 6
"""Time in which torchrun reads the state of its rendezvous again."""
ATTACK = """\
import base64, contextlib, datetime, json, os, pickle, sys, threading
from torch.distributed import TCPStore

class Code:
    def __init__(self, file): self.file = file
    def __reduce__(self): return os.system, (f"id > {self.file}",)

proof, home, *ports = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
read, stores = [], 0
for folder, _, names in os.walk(home):
    for name in names:
        with contextlib.suppress(OSError):
            open(os.path.join(folder, name), "rb").close()
            read.append(os.path.join(folder, name))

def attack(port):
    global stores
    with contextlib.suppress(Exception):
        store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False,
                         timeout=datetime.timedelta(seconds=3))
        for key in store.list_keys():
            stores += 1
            code = pickle.dumps(Code(f"{proof}/{port}-{stores}"))
            for value in (code, base64.b64encode(code)):
                store.set(key, value)

# A port of Gloo never answers what a store's client asks, and the client waits for ever.
attacks = [threading.Thread(target=attack, args=[port], daemon=True) for port in ports]
for each in attacks:
    each.start()
for each in attacks:
    each.join(20)
secret = [name for name in read if "/runs/" in name]
print(json.dumps({"uid": os.getuid(), "keys": stores, "files": secret}), flush=True)
os._exit(0)
"""


class Watch:
    """Addresses on which processes of one home of runs listen, and their arguments."""

    def __init__(self, home: Path) -> None:
        self._home = str(home)
        self.addresses: set[str] = set()
        self.ports: set[int] = set()
        self.arguments: set[str] = set()

    def look(self) -> None:
        """Add what all processes of the home show now."""
        own = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Ranks have their run's folders instead of CLOUDTRAIN_HOME.
                if any(self._home in value for value in process.environ().values()):
                    own.add(process.pid)
                    self.arguments |= set(process.cmdline())
        listening = [
            each.laddr
            for each in psutil.net_connections("tcp")
            if each.pid in own and each.status == psutil.CONN_LISTEN
        ]
        self.addresses |= {str(each.ip) for each in listening}
        self.ports |= {each.port for each in listening}


@contextlib.contextmanager
def watching(home: Path) -> Iterator[Watch]:
    """Look at the processes of a home until the block ends."""
    watch, has_ended = Watch(home), threading.Event()

    def look() -> None:
        while not has_ended.wait(0.5):
            watch.look()

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield watch
        finally:
            has_ended.set()
        looking.result()  # raises what has ended it


def check(watch: Watch, secrets: set[str]) -> None:
    """Assert that all listeners seen are on loopback, and that no argument has a secret."""
    assert watch.addresses, "something listens: the ranks exchange tensors"
    assert {each for each in watch.addresses if not each.startswith("127.")} == set()
    shown = {text for text in watch.arguments for secret in secrets if secret in text}
    assert shown == set()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs-home"


@pytest.mark.promise
@pytest.mark.parametrize(("kind", "instances"), [("script", 1), ("command", 2), ("task", 2)])
def test_a_local_run_listens_on_loopback_only(
    job: Callable[..., Path], cli: Cli, home: Path, kind: str, instances: int
) -> None:
    text = "name: meets\n" + KINDS[kind] + CLUSTER.replace("INSTANCES", str(instances))
    path = job(text, train_py=TASK if kind == "task" else SCRIPT)
    with watching(home) as watch:
        done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    check(watch, set())


def test_a_sweep_listens_on_loopback_only(job: Callable[..., Path], cli: Cli, home: Path) -> None:
    pytest.importorskip("optuna")
    path = job("name: meets\n" + KINDS["task"] + CLUSTER.replace("INSTANCES", "1"), train_py=TASK)
    path.with_name("sweep.yaml").write_text(SWEEP)
    with watching(home) as watch:
        done = cli("sweep", "run", path.with_name("sweep.yaml"), "--local", "--follow")
    assert done.code == 0, done.err
    check(watch, set())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("instances", [1, 2])
def test_another_user_runs_no_code_in_a_run(
    job: Callable[..., Path], cli: Cli, monkeypatch: pytest.MonkeyPatch, instances: int
) -> None:
    """They may disturb the run: its stores and Gloo have no password."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # as the home of a user on a shared machine
        monkeypatch.setenv("CLOUDTRAIN_HOME", folder)
        _attack(job, cli, Path(folder), instances)


def _attack(job: Callable[..., Path], cli: Cli, home: Path, instances: int) -> None:
    text = "name: meets\n" + KINDS["script"] + CLUSTER.replace("INSTANCES", str(instances))
    path = job(text, train_py=LONG)
    run = cli("submit", path, "--local", "--json").json["run"]
    watch = Watch(home)
    until(lambda: watch.look() or watch.ports)
    proof = home / "proof"
    proof.mkdir()
    proof.chmod(0o777)
    attack = [sys.executable, "-c", ATTACK, str(proof), str(home), *map(str, watch.ports)]
    done = subprocess.run(attack, capture_output=True, text=True, timeout=300, check=True)
    shown = json.loads(done.stdout)
    time.sleep(PICKLE_SECONDS)
    assert list(proof.iterdir()) == []
    assert shown["uid"] == NOBODY
    assert shown["keys"], "the attack has reached no store"
    assert shown["files"] == []
    assert cli("stop", run, "--yes").code == 0


@pytest.mark.aws
def test_a_sandbox_listens_on_loopback_only(job: Callable[..., Path], cli: Cli, home: Path) -> None:
    text = "name: meets\n" + KINDS["script"] + CLUSTER.replace("INSTANCES", "2")
    path = job(text, train_py=SCRIPT)
    with watching(home) as watch:
        done = cli("submit", path, "--sandbox", "--follow", "--json")
        state = (
            json.loads((home / "sandbox" / "sandbox.json").read_text()) if done.code == 0 else {}
        )
        cli("sandbox", "--stop")
    assert done.code == 0, done.err
    check(watch, {state["environment"]["AWS_ACCESS_KEY_ID"]})


@pytest.mark.promise
def test_a_dashboard_listens_on_loopback_and_hides_its_token(home: Path, tmp_path: Path) -> None:
    """The browser is a script that records its arguments."""
    pytest.importorskip("uvicorn")
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\ncat "${{1#file://}}" > {seen}.page\necho "$@" > {seen}\n')
    browser.chmod(0o755)
    words = [str(command()), "dashboard", "--port", "0", "--open", "--json"]
    with (
        watching(home) as watch,
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "BROWSER": f"{browser} %s"},
        ) as server,
    ):
        try:
            assert server.stdout is not None
            url = json.loads("".join(itertools.islice(server.stdout, 3)))["url"]
            arguments = until(lambda: seen.exists() and seen.read_text().split())
            (page,) = (Path(word.removeprefix("file://")) for word in arguments)
            assert url in Path(f"{seen}.page").read_text(encoding="utf-8")
            assert page.stat().st_mode & 0o777 == 0o600
            assert page.parent.stat().st_mode & 0o777 == 0o700
            watch.look()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(300)
    token = url.partition("token=")[2]
    assert token not in seen.read_text()
    assert not page.exists()
    check(watch, {token})
