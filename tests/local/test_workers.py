"""What a script finds in a forked worker is what it finds in a new interpreter."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli, processes_of, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands a forked worker to the agent"),
]

JOB = "name: probe\ncode: {script: sub/probe.py, args: [--lr, 0.1]}\ncluster: {instance_type: ml.g5.xlarge, RANKS}\n"

PROBE = """
import gc, json, logging, multiprocessing, os, random, resource, signal, sys, threading, time
is_forked = "torch" in sys.modules
main = sys.modules["__main__"]
own = multiprocessing.current_process()
found = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "flags": repr(sys.flags),
    "main": [__name__, __file__, main.__file__, repr(main.__spec__), vars(main) is globals()],
    "environ": dict(os.environ),
    "shown": [open(f"/proc/self/{name}").read().split("\\0") for name in ("cmdline", "comm")],
    "shown_environ": sorted(open("/proc/self/environ").read().split("\\0")),
    "descriptors": sorted(os.listdir("/proc/self/fd")), "input": os.readlink("/proc/self/fd/0"),
    "handlers": {s.name: repr(signal.getsignal(s)) for s in signal.Signals},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT" in name},
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "nice": os.nice(0), "umask": os.umask(0o22),
    "multiprocessing": [multiprocessing.get_start_method(allow_none=True), repr(multiprocessing.parent_process())],
    "process": [own.name, repr(type(own)), own.daemon],
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
    "logging": [repr(logging.getLogger().handlers), logging.getLogger().level],
    "threads": [[t.name for t in threading.enumerate()], os.listdir("/proc/self/task") == [str(os.getpid())]],
    "thread": [threading.current_thread() is threading.main_thread(), threading.get_native_id() == os.getpid()],
    "streams": [[repr(type(s)), s.write_through, s.line_buffering, s.encoding] for s in (sys.stdout, sys.stderr)],
    "interpreter": [gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), repr(sys.excepthook)],
    "affinity": sorted(os.sched_getaffinity(0)),
}
import torch, numpy
found["torch"] = [
    torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_initialized(), torch.is_grad_enabled(),
    repr(torch.get_default_dtype()), torch.multiprocessing.get_sharing_strategy(),
]
found["cuda"] = torch.cuda._is_in_bad_fork()
seeds = [random.random(), float(numpy.random.random()), torch.initial_seed()]
print("FOUND " + json.dumps({"found": found, "forked": is_forked, "seeds": seeds}, default=str))
"""


def write(job: Callable[..., Path], script: str, ranks: int) -> Path:
    path = job(JOB.replace("RANKS", f"processes_per_instance: {ranks}"))
    (path.parent / "sub").mkdir(exist_ok=True)
    (path.parent / "sub" / "probe.py").write_text(script)
    return path


def test_a_forked_worker_and_a_new_interpreter_look_the_same(cli: Cli, job: Callable[..., Path]) -> None:
    path = write(job, PROBE, ranks=2)

    def probe(way: str) -> list[dict[str, Any]]:
        chosen = ("--set", f"code.env.CLOUDTRAIN_WORKER_START={way}")
        done = cli("submit", path, "--local", "--follow", "--json", *chosen)
        assert done.code == 0, done.err
        lines = sorted(line for line in done.err.splitlines() if "FOUND " in line)
        return [json.loads(line.partition("FOUND ")[2].replace(done.json["run"], "RUN")) for line in lines]

    forked, fresh = probe("''"), probe("fresh")
    assert [rank["forked"] for rank in forked + fresh] == [True, True, False, False]
    for ours, theirs in zip(forked, fresh, strict=True):
        assert _lasting(ours["found"]) == _lasting(theirs["found"])
    seeds = [tuple(rank["seeds"]) for rank in forked]
    assert all(one != other for one, other in zip(*seeds, strict=True))


def _lasting(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is new in every run."""
    changing = {"MASTER_PORT", "CLOUDTRAIN_RENDEZVOUS_PORT", "TORCHELASTIC_ERROR_FILE", "CLOUDTRAIN_WORKER_START"}
    environ = {name: value for name, value in found["environ"].items() if name not in changing}
    shown = [each for each in found["shown_environ"] if each.partition("=")[0] not in changing]
    return {**found, "environ": environ, "shown_environ": shown}


LOADERS = """
import multiprocessing, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    '''A class of __main__, which workers of every kind must find.'''
    def __len__(self): return 6
    def __getitem__(self, i): return Sample(i * i)

class Sample:
    def __init__(self, value): self.value = value

def collate(samples): return [sample.value for sample in samples]

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=3, num_workers=1, collate_fn=collate, multiprocessing_context=method)
        print("LOADED", method, list(loader))
"""


def test_classes_of_the_script_reach_its_data_loaders_workers(cli: Cli, job: Callable[..., Path]) -> None:
    done = cli("submit", write(job, LOADERS, ranks=1), "--local", "--follow", "--json")
    assert done.code == 0, done.err
    for method in ("fork", "spawn", "forkserver"):
        assert f"LOADED {method} [[0, 1, 4], [9, 16, 25]]" in done.err


@pytest.mark.parametrize("victim", ["launcher.agent", "launch"])
def test_nothing_outlives_the_agent_or_the_launcher(cli: Cli, job: Callable[..., Path], victim: str) -> None:
    path = write(job, "import time\nprint('up', flush=True)\ntime.sleep(600)\n", ranks=2)
    run = cli("submit", path, "--local", "--json").json["run"]
    until(lambda: cli("logs", run, "--raw").out.count("up") == 2)
    doomed = [p for p in processes_of(run) if f"cloudtrain_runtime.{victim}" in p.cmdline()]
    assert len(doomed) == (
        2 if victim == "launcher.agent" else 1
    )  # the template shows the agent's arguments, and is younger
    min(doomed, key=lambda process: process.create_time()).kill()
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "FAILED"
    assert processes_of(run) == []


@pytest.mark.parametrize("wish", ["", "1"])
def test_launcher_compiles_the_runtime_during_torch_import(cli: Cli, job: Callable[..., Path], wish: str) -> None:
    path = write(job, "import torch\n", ranks=1)
    done = cli("submit", path, "--local", "--follow", "--json", "--set", f"code.env.PYTHONDONTWRITEBYTECODE='{wish}'")
    assert done.code == 0, done.err
    runtime = Path(done.json["artifacts"]["folder"]) / "hosts" / "algo-1" / "opt" / "ml" / "code" / "cloudtrain_runtime"
    # The script asks for nothing of it, so nobody else has.
    assert [each.name.partition(".")[0] for each in runtime.rglob("trainer*.pyc")] == ([] if wish else ["trainer"])
