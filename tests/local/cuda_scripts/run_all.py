"""Runs each script named in the arguments in a process of its own, one after the other; torch is imported once."""

import multiprocessing
import os
import runpy
import sys

import torch

if __name__ == "__main__":
    assert torch.cuda.is_available()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    port = int(os.environ["MASTER_PORT"])
    for index, name in enumerate(sys.argv[1:], start=1):
        os.environ["MASTER_PORT"] = str(port + index)
        process = multiprocessing.get_context("fork").Process(
            target=runpy.run_path, args=(f"{name}.py", None, "__main__")
        )
        process.start()
        process.join()
        print(f"ended {name} {process.exitcode}", flush=True)
