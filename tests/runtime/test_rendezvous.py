"""A rendezvous reads no state that a stranger has written, and a run's listeners are on loopback."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import processes_of, until
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

import cloudtrain
from cloudtrain_runtime.launcher.rendezvous import SignedBackend

JOB = """\
name: meets
code: {script: train.py}
cluster: {instance_type: ml.m5.large, processes_per_instance: 1, instances: 2}
"""
SCRIPT = """\
import pathlib, time, torch, torch.distributed as dist
for attempt in range(2):  # a script may create its group again
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if attempt == 0:
        rank = dist.get_rank()
        dist.destroy_process_group()
        time.sleep(rank)  # a rank that connects to the first group's store fails or hangs, also in plain torch
pathlib.Path("READY", str(dist.get_rank())).touch()
while not pathlib.Path("READY", "go").exists():
    time.sleep(0.05)
dist.barrier()
"""


class Evil:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def test_hosts_with_the_key_exchange_states(store: TCPStore) -> None:
    first, second = (SignedBackend(C10dRendezvousBackend(store, "run"), b"key") for _ in range(2))
    assert first.get_state() is None
    state, token, has_set = first.set_state(b"one") or (b"", None, False)
    assert (state, has_set) == (b"one", True)
    assert second.get_state() == (b"one", token)
    assert (second.set_state(b"two", token) or (b"", None))[0] == b"two"
    lost = first.set_state(b"three", token)
    assert lost is not None
    assert (lost[0], lost[2]) == (b"two", False), "the token is that of an earlier state"


@pytest.mark.parametrize("content", ["evil", "of another run", "changed", ""])
def test_the_state_of_a_stranger_is_not_read(store: TCPStore, tmp_path: Path, content: str) -> None:
    backend = SignedBackend(C10dRendezvousBackend(store, "run"), b"key")
    backend.set_state(b"one")
    key = "torch.rendezvous.run"
    signed = base64.b64decode(store.get(key))
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    others = SignedBackend(C10dRendezvousBackend(store, "other"), b"other key")
    others.set_state(evil)
    states = {
        "evil": evil,
        "of another run": base64.b64decode(store.get("torch.rendezvous.other")),
        "changed": signed[:-1] + b"x",
        "": b"",
    }
    store.set(key, base64.b64encode(states[content]))
    with pytest.raises(RendezvousStateError, match="no host of this run has written"):
        backend.get_state()
    with pytest.raises(RendezvousStateError, match="no host of this run has written"):
        backend.set_state(b"two", b"an earlier token")
    assert not (tmp_path / "ran").exists()


@pytest.mark.processes
def test_hosts_of_one_machine_listen_on_loopback_only(
    job: Callable[..., Path], tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    run = cloudtrain.submit(job(JOB, train_py=SCRIPT.replace("READY", str(ready))), local=True)
    try:
        until(lambda: len(list(ready.iterdir())) == 2)
        listeners = [
            connection.laddr.ip
            for process in processes_of(run.id)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listeners, "Gloo and the ranks' store listen"
        assert [address for address in listeners if not address.startswith("127.")] == []
        words = [word for process in processes_of(run.id) for word in process.cmdline()]
        assert not [word for word in words if ":" in word and word.startswith("--rdzv-endpoint")]
        (file,) = {word.partition("=")[2] for word in words if word.startswith("--rdzv-endpoint")}
        assert Path(file).stat().st_mode & 0o777 == 0o600
    finally:
        (ready / "go").touch()
    assert run.wait(300).exit_code == 0
