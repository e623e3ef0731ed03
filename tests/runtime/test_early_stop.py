"""Stop signals during the start of a container: while bash unpacks the code, and while Python imports modules."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import SCRIPT_RUN

from cloudtrain.planning.request import CONTAINER_ENTRYPOINT
from cloudtrain_runtime.contract import MlTree

BLOCK = "import pathlib; pathlib.Path({reached!r}).touch(); open({gate!r}).read()"
"""Creates the file `reached`, then blocks until a writer has opened and closed the gate, which is a FIFO."""

STOPPED = 128 + signal.SIGTERM


class Container:
    """The request's entry command with its own /opt/ml, which blocks at one point of its start."""

    def __init__(self, folder: Path) -> None:
        self.tree = MlTree(folder / "a folder" / "opt" / "ml")
        self.bin = folder / "a folder" / "bin"
        self.gate, self.reached, self.started = (
            folder / "gate",
            folder / "reached",
            folder / "started",
        )
        for each in (self.tree.run_config.parent, self.tree.data / "code", self.bin):
            each.mkdir(parents=True)
        self.tree.run_config.write_text(SCRIPT_RUN.to_json())
        (folder / "train.py").write_text(f"open({str(self.started)!r}, 'w')")
        with tarfile.open(self.tree.data / "code" / "sourcedir.tar.gz", "w:gz") as archive:
            archive.add(folder / "train.py", "train.py")
        os.mkfifo(self.gate)
        self.environ = {
            **os.environ,
            "CLOUDTRAIN_ML_ROOT": str(self.tree.root),
            "CLOUDTRAIN_GPUS": "0",
        }
        self.environ["PATH"] = f"{self.bin}:{os.environ['PATH']}"

    @property
    def block(self) -> str:
        return BLOCK.format(reached=str(self.reached), gate=str(self.gate))

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def stop_at_block(self, prefix: list[str]) -> int:
        """Send SIGTERM when the command has reached the block, close the gate, and return the exit code."""
        process = subprocess.Popen([*prefix, *CONTAINER_ENTRYPOINT], env=self.environ)
        try:
            with self.gate.open("w"):  # opening returns when the block opens the FIFO for reading
                assert self.reached.exists()
                (first,) = _children(process.pid) if prefix else (process.pid,)
                os.kill(first, signal.SIGTERM)
            return process.wait(300)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


@pytest.fixture(params=["as-pid-1", "as-another-pid"])
def prefix(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Return the command prefix that makes the entry command PID 1 of a namespace, as in a container, or no prefix."""
    unshare = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    if request.param == "as-another-pid":
        yield []
    elif (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("this machine allows no PID namespace")
    else:
        yield unshare


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_stop_while_the_code_is_unpacked_is_obeyed(
    container: Container, prefix: list[str]
) -> None:
    container.command(
        "tar",
        f'#!{sys.executable}\n{container.block}\nimport os; os.execv("/bin/true", ["true"])\n',
    )
    container.command("python", f"#!/bin/sh\ntouch '{container.started}'\n")
    assert container.stop_at_block(prefix) == STOPPED
    assert not container.started.exists()


def test_a_stop_while_the_launcher_imports_is_obeyed(
    container: Container, prefix: list[str]
) -> None:
    hook = container.bin / "sitecustomize.py"
    hook.write_text(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cloudtrain_runtime.contract':\n"
        f"            {container.block}\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    container.environ["PYTHONPATH"] = str(container.bin)
    container.command("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert container.stop_at_block(prefix) == STOPPED
    assert not container.started.exists()


@pytest.mark.parametrize("name", ["python", "python3"])
def test_the_entry_command_uses_python_or_python3(container: Container, name: str) -> None:
    """Custom images often have only `python3`."""
    tools = container.bin / "tools"
    tools.mkdir()
    for tool in ("bash", "mkdir", "tar", "gzip"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    container.command(name, f"#!/bin/bash\necho {name} \"$@\" > '{container.started}'\n")
    environ = {**container.environ, "PATH": f"{container.bin}:{tools}"}
    subprocess.run(CONTAINER_ENTRYPOINT, env=environ, check=True)
    assert container.started.read_text() == f"{name} -m cloudtrain_runtime.launch\n"
    assert (container.tree.code / "train.py").is_file()
