"""The containers of a job on the nodes of a Slurm job: srun starts one host step per node."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.container import process_tree
from cloudtrain.backends.container.host_launcher import PASS_VARIABLE, grace_seconds
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.host_step import KILL, TERMINATE, TERMINATED
from cloudtrain.backends.slurm.run_files import AttemptFiles, NodePlan, has_order
from cloudtrain_runtime.contract import GRACE_VARIABLE, LISTENING_PORTS

LOST = -9
"""Exit code of a container whose host step has reported none."""

_POLL_SECONDS = 0.5
_REPORT_SECONDS = 5.0
"""Time in which a file of another node becomes visible here."""
_KILL_SECONDS = 15.0
_HYPERPOD = Path("/opt/sagemaker_cluster")


class SrunHosts:
    """Starts the containers of a job on the nodes of this Slurm job.

    Args:
        request: The CreateTrainingJob document.
        folder: The run's folder.
        hosts: Names of the hosts, in the order of their ranks.
        environ: Environment of the batch step.

    Attributes:
        had_signal: Whether Slurm had sent SIGTERM to a host when the containers ended; None before.
    """

    shares_disk = True

    def __init__(
        self,
        request: Mapping[str, Any],
        folder: JobFolder,
        hosts: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> None:
        del request
        self._folder = folder
        self._files = AttemptFiles(folder)
        self._hosts = hosts
        self._environ = environ
        self._srun: subprocess.Popen[bytes] | None = None
        self._ended_at: float | None = None
        self.had_signal: bool | None = None

    @property
    def unreported(self) -> tuple[str, ...]:
        """Hosts that were started, and whose host step has reported no end."""
        if self._srun is None:
            return ()
        return tuple(host for host in self._hosts if self._files.read_exit_code(host) is None)

    def start(self) -> None:
        """Start all containers."""
        self._files.write_nodes(self._plan_nodes())
        options = [
            f"--nodes={len(self._hosts)}",
            f"--ntasks={len(self._hosts)}",
            "--ntasks-per-node=1",
            # The ranks bind themselves to cores.
            "--cpu-bind=none",
            "--export=ALL",
            "--input=none",
            # The launchers of the other hosts report the cause of a failure before they end.
            "--kill-on-bad-exit=0",
            "--wait=0",
        ]
        if _HYPERPOD.exists():
            options.append("--auto-resume=1")
        step = [sys.executable, "-P", "-m", "cloudtrain.backends.slurm.host_step"]
        with self._files.log.open("ab") as log:
            self._srun = subprocess.Popen(
                ["srun", *options, *step, str(self._folder.root), str(self._folder.attempt)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _plan_nodes(self) -> NodePlan:
        """Return which host is on which node. torchrun orders hosts by their addresses as text."""
        resolved = _resolve(Slurm().addresses(self._environ["SLURM_JOB_NODELIST"]))
        nodes = sorted(resolved, key=lambda node: (resolved[node], node))
        placed = dict(zip(nodes, self._hosts, strict=True))
        job = int(self._environ["SLURM_JOB_ID"])
        return NodePlan(
            hosts=placed,
            addresses={host: resolved[node] for node, host in placed.items()},
            # Another attempt of the job may still hold its port.
            port=LISTENING_PORTS[(job + 101 * self._folder.attempt) % len(LISTENING_PORTS)],
            variables={
                PASS_VARIABLE: self._environ.get(PASS_VARIABLE, ""),
                GRACE_VARIABLE: str(grace_seconds(self._environ)),
            },
        )

    def poll(self) -> Mapping[str, int]:
        """Return the exit codes of the containers that have ended."""
        if self._srun is None:
            return {}
        if self._srun.poll() is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
        reported = {host: self._files.read_exit_code(host) for host in self._hosts}
        codes = {host: code for host, code in reported.items() if code is not None}
        if self._ended_at is not None and time.monotonic() - self._ended_at >= _REPORT_SECONDS:
            codes |= dict.fromkeys(set(self._hosts).difference(codes), LOST)
        return codes

    def wait(self, seconds: float) -> None:
        """Wait until srun has ended, or for half a second: the files are on a network file system."""
        del seconds
        if self._srun is None or self._ended_at is not None:
            time.sleep(_POLL_SECONDS)
            return
        process_tree.wait_for_end([self._srun], _POLL_SECONDS)

    def stop(self) -> None:
        """Let the host steps send SIGTERM to each container's first process."""
        self._files.order(TERMINATE).touch()

    def kill(self) -> None:
        """End all processes of all containers, and srun."""
        if self._srun is None:
            return
        if self.had_signal is None:
            # Before srun passes on a signal of its own.
            self.had_signal = has_order(self._files.order(TERMINATED))
        # Host steps on a lost node live longer than srun.
        self._files.order(KILL).touch()
        if self._srun.poll() is not None:
            return
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            self._srun.send_signal(number)
            try:
                self._srun.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return


def _resolve(names: Mapping[str, str]) -> dict[str, str]:
    """Return the IPv4 address of each node by which the others reach it.

    Args:
        names: Name or address of each node, as Slurm gives it.

    Raises:
        OSError: A name does not resolve here.
    """
    found = {}
    for node, name in names.items():
        try:
            found[node] = socket.gethostbyname(name)
        except OSError as error:
            raise OSError(
                f"the address of node {node}, {name}, does not resolve: {error}"
            ) from None
    for node, name in names.items():
        others = [address for each, address in found.items() if each != node]
        # /etc/hosts of Debian gives a machine's own name a loopback address.
        if others and found[node].startswith("127.") and name != found[node]:
            found[node] = _own_address(others[0])
    return found


def _own_address(other: str) -> str:
    """Return the address of this machine from which packets to another one leave; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
