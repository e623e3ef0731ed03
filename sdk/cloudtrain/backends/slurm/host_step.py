"""Host step: srun starts it once per node, and it runs the node's container as a local run does.

`python -m cloudtrain.backends.slurm.host_step RUN_FOLDER ATTEMPT`. Signals are no orders: Slurm sends SIGTERM to every
process of a cancelled job, and the launcher in the container acts on its own. Orders are files in the shared folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cloudtrain.backends.container import mount_namespace, process_tree
from cloudtrain.backends.container.filesystem import set_interface
from cloudtrain.backends.container.host_launcher import Container, grace_seconds
from cloudtrain.backends.container.job_folder import ATTEMPT_FILE, JobFolder
from cloudtrain.backends.container.machine import visible_gpus
from cloudtrain.backends.container.run_folders import REQUEST_FILE
from cloudtrain.backends.slurm.run_files import AttemptFiles, NodePlan, has_order
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract import ADDRESSES_VARIABLE, PORT_VARIABLE
from cloudtrain_runtime.contract.attempts import (
    ATTEMPT_FILE_VARIABLE,
    ATTEMPT_VARIABLE,
    find_replacement,
)
from cloudtrain_runtime.contract.machine_paths import mounts_of
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

TERMINATE = "terminate"
KILL = "kill"
"""Orders of the batch step."""

TERMINATED = "terminated"
"""File that a host step creates when Slurm sends it SIGTERM."""

_VISIBLE_SECONDS = 30.0
"""Time in which a file of the batch step becomes visible on other nodes."""
_SILENT_SECONDS = 600.0
"""Time without a sign of the batch step after which it is gone, and its job with it."""
_POLL_SECONDS = 0.2
_ORDER_SECONDS = 0.5
"""Time between two looks at the shared folder."""


def main(argv: list[str]) -> int:
    """Run this node's container; its exit code is written to a file of the attempt."""
    folder = JobFolder(Path(argv[0]), int(argv[1]))
    files = AttemptFiles(folder)
    # Also those that the batch script ignores: the processes of the container get their defaults.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: _note(files.order(TERMINATED)))
    nodes = _read_nodes(files)
    host = nodes.hosts[os.environ["SLURMD_NODENAME"]]
    process_tree.adopt_orphans()
    code = _run(folder, files, nodes, host)
    write_atomically(files.exit_code(host), str(code))
    return 0


def _note(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.touch()


def _read_nodes(files: AttemptFiles) -> NodePlan:
    """Return what the batch step has written, as soon as this node sees it."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        try:
            return files.read_nodes()
        except (OSError, ValueError):
            if time.monotonic() >= deadline:
                raise
            time.sleep(_ORDER_SECONDS)


def _run(folder: JobFolder, files: AttemptFiles, nodes: NodePlan, host: str) -> int:
    tree = folder.tree(host)
    if mounts_of(tree.root).is_dir() and not mount_namespace.is_available():
        node = os.environ["SLURMD_NODENAME"]
        message = f"the node {node} allows no mount namespace, and the first node of the job does"
        tree.failure.write_text(message, encoding="utf-8")
        return 1
    set_interface(tree, nodes.addresses[host])
    request = load_json((folder.root / REQUEST_FILE).read_text(encoding="utf-8"))
    environ = {**os.environ, **nodes.variables}
    container = Container(request, folder, host, environ, visible_gpus(environ), 1)
    process = container.start(
        {
            ADDRESSES_VARIABLE: dump_json(dict(nodes.addresses)),
            PORT_VARIABLE: str(nodes.port),
            ATTEMPT_VARIABLE: str(folder.attempt),
            ATTEMPT_FILE_VARIABLE: str(folder.root / ATTEMPT_FILE),
        }
    )
    try:
        return _watch(process, folder, files, grace_seconds(environ))
    finally:
        process_tree.kill(process_tree.descendants())


def _watch(
    process: subprocess.Popen[bytes], folder: JobFolder, files: AttemptFiles, grace: float
) -> int:
    """Wait for the end of a container, and carry out orders; return its exit code."""
    deadline = float("inf")
    looked_at = 0.0
    beat, beat_at = files.beats(), time.monotonic()
    while (code := process.poll()) is None:
        now = time.monotonic()
        if now - looked_at >= _ORDER_SECONDS:
            looked_at = now
            if (seen := files.beats()) != beat:
                beat, beat_at = seen, now
            # The processes of a lost node live on while another attempt runs, or after the end of the job.
            is_over = _is_replaced(folder) or now - beat_at >= _SILENT_SECONDS
            if is_over or has_order(files.order(KILL)):
                process.kill()
            elif deadline == float("inf") and has_order(files.order(TERMINATE)):
                process.terminate()
                deadline = now + grace
        if now >= deadline:
            process.kill()
        process_tree.wait_for_end([process], _POLL_SECONDS)
    return code


def _is_replaced(folder: JobFolder) -> bool:
    # Without an answer, the ranks go on: their checkpoints ask again.
    with contextlib.suppress(OSError, ValueError):
        return bool(find_replacement(folder.root / ATTEMPT_FILE, folder.attempt))
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
