"""Write down what each process of a test costs: its start, its import of torch, and its processor time.

CLOUDTRAIN_TEST_COSTS=FOLDER has one line of JSON per fact. `support.costs` adds them up for each test.
"""

import atexit
import importlib.abc
import json
import os
import sys
import time
from typing import Any

_FOLDER = os.environ["CLOUDTRAIN_TEST_COSTS"]


def _write(fact: str, **values: Any) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    line = json.dumps({"test": test, "fact": fact, "program": sys.argv[:2], **values})
    try:
        file = os.open(f"{_FOLDER}/processes.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    os.write(file, f"{line}\n".encode())  # with one write, lines of several processes do not mix
    os.close(file)


class _Torch(importlib.abc.MetaPathFinder):
    """Notice an import of torch by its first submodule: who only asks whether torch is installed does not pay."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        if name.startswith("torch."):
            sys.meta_path.remove(self)
            _write("torch")


def _end() -> None:
    _write("end", seconds=time.process_time())


def install() -> None:
    """Begin to write, in this process and in those that fork from it."""
    leave = os._exit

    def leave_counted(code: int) -> None:
        _end()
        leave(code)

    os._exit = leave_counted
    atexit.register(_end)
    os.register_at_fork(after_in_child=lambda: _write("fork"))
    sys.meta_path.insert(0, _Torch())
    _write("start")
