"""Runs each script named in the arguments in a process of its own, one after the other; torch is imported once."""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

import torch


def agree_on_port(name: str) -> str:
    """Return a free port that rank 0 has chosen for a script: each script has a process group of its own."""
    path = Path(f"{name}.port")
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            path.with_suffix(".part").write_text(str(free.getsockname()[1]))
        path.with_suffix(".part").replace(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


if __name__ == "__main__":
    assert torch.cuda.is_available()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    for name in sys.argv[1:]:
        os.environ["MASTER_PORT"] = agree_on_port(name)
        process = multiprocessing.get_context("fork").Process(
            target=runpy.run_path, args=(f"{name}.py", None, "__main__")
        )
        process.start()
        process.join()
        print(f"ended {name} {process.exitcode}", flush=True)
