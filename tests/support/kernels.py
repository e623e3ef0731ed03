"""A kernel of Jupyter that executes cells, as a notebook's page does."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.jobs import until

SECONDS = 300
_RESET = """\
get_ipython().reset(new_session=True)
import os
os.chdir({folder!r})
os.environ["CLOUDTRAIN_HOME"] = {home!r}
del os
"""
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")


@contextmanager
def kernel_socket() -> Iterator[Path]:
    """Give a path for the sockets of a kernel, short enough for its limit of 107 characters.

    Jupyter's default are TCP ports, which it chooses before the kernel takes them: another test can be faster.
    """
    with tempfile.TemporaryDirectory(prefix="cloudtrain-kernel-") as folder:
        yield Path(folder, "socket")


class Kernel:
    """A kernel of Jupyter, and the outputs of the cell that it executes."""

    def __init__(self, socket_path: Path) -> None:
        jupyter_client = pytest.importorskip("jupyter_client")
        self._manager = jupyter_client.KernelManager(transport="ipc", ip=str(socket_path))
        self._manager.start_kernel()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=SECONDS)
        self._cell = ""
        self.outputs: list[dict[str, Any]] = []

    def open_notebook(self, folder: Path) -> None:
        """Forget what was executed, as a kernel that has just started, and work in a folder."""
        code = _RESET.format(folder=str(folder), home=os.environ["CLOUDTRAIN_HOME"])
        self._cell = self._client.execute(code, silent=True)
        self.wait()

    def begin(self, code: str) -> None:
        """Begin to execute a cell."""
        self._cell, self.outputs = self._client.execute(code), []

    def read(self) -> bool:
        """Read the next message; return whether the cell has ended."""
        message = self._client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") != self._cell:
            return False
        kind, content = message["msg_type"], message["content"]
        self.outputs += (
            [{"type": kind, **content}] if kind not in ("status", "execute_input") else []
        )
        return bool(kind == "status" and content["execution_state"] == "idle")

    def wait_for(self, text: str) -> None:
        """Wait for a table with a text."""
        until(lambda: self.read() or any(text in table for table in self.tables), SECONDS)
        assert any(text in table for table in self.tables), self.outputs

    def wait(self) -> None:
        """Wait for the end of the cell."""
        until(self.read, SECONDS)

    def run(self, code: str) -> str:
        """Execute a cell; return what it has printed, and the message of an error."""
        self.begin(code)
        self.wait()
        printed = [output["text"] for output in self.outputs if output["type"] == "stream"]
        errors = [
            "\n".join(output["traceback"]) + f"\n{output['ename']}: {output['evalue']}"
            for output in self.outputs
            if output["type"] == "error"
        ]
        return _ESCAPE.sub("", "".join([*printed, *errors]))

    @property
    def tables(self) -> list[str]:
        """The texts of the table of the cell, one for each update."""
        return [
            output["data"]["text/plain"]
            for output in self.outputs
            if output["type"].endswith("display_data")
        ]

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        self._manager.restart_kernel(now=True)
        self._client.wait_for_ready(timeout=SECONDS)

    def end(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
