"""Runs each script named in the arguments in a process of its own, one after the other; torch is imported once."""

import multiprocessing
import os
import random
import runpy
import sys
import time
from pathlib import Path

import torch


def agree_on_port(name: str) -> str:
    """Return a port that rank 0 has chosen for a script: each script has a process group of its own."""
    path = Path(f"{name}.port")
    if os.environ["RANK"] == "0":
        # Outgoing connections have ports above these.
        path.with_suffix(".part").write_text(str(random.SystemRandom().randrange(20000, 32768)))
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
