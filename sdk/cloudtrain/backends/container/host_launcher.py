"""The containers of a job: what starts, watches and ends them, and how each of them starts on its machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cloudtrain.backends.container import mount_namespace, process_tree
from cloudtrain.backends.container.background import start_logged
from cloudtrain.backends.container.channel_copies import original_of
from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.container.machine import (
    count_cards,
    free_port,
    host_addresses,
    share_gpus,
    visible_gpus,
)
from cloudtrain.backends.container.ml_paths import map_values, seen_tree
from cloudtrain.support.proxies import exclude_loopback
from cloudtrain_runtime.contract import (
    ADDRESSES_VARIABLE,
    CARDS_VARIABLE,
    GPUS_VARIABLE,
    GRACE_VARIABLE,
    HOSTS_HERE_VARIABLE,
    INSTANCE_VARIABLE,
    MAX_PROCESSES_VARIABLE,
    ML_ROOT_VARIABLE,
    PORT_VARIABLE,
    RENDEZVOUS_FILE_VARIABLE,
    STOP_GRACE_SECONDS,
)
from cloudtrain_runtime.contract.strict_json import dump_json

PASS_VARIABLE = "CLOUDTRAIN_PASS_ENVIRONMENT"  # noqa: S105 (the name of a variable)
"""Names of additional variables of the shell for the containers, separated by commas."""

_PASSED_VARIABLES = (
    *(
        "HOME",
        "LANG",
        "LC_ALL",
        "TMPDIR",
        "TZ",
        "USER",
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
    ),
    *(
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "PYTHONHASHSEED",
    ),
)
"""Containers start with a clean environment, so they get only these variables of the shell."""


def passed_names(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables of an environment that containers get."""
    given = environ.get(PASS_VARIABLE, "").split(",")
    names = [*_PASSED_VARIABLES, *filter(None, (part.strip() for part in given))]
    names += [name for name in environ if name.startswith("AWS_")]
    return [name for name in names if name in environ]


class HostLauncher(Protocol):
    """Starts one container per host, and observes their ends.

    Attributes:
        shares_disk: Whether the hosts share one folder of checkpoints; otherwise each has its own, as on SageMaker.
    """

    shares_disk: bool

    def start(self) -> None:
        """Start all containers. Their trees are prepared."""
        ...

    def poll(self) -> Mapping[str, int]:
        """Return the exit codes of the containers that have ended, by host; -9 means SIGKILL."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait for this time, or until a container has ended."""
        ...

    def stop(self) -> None:
        """Send SIGTERM to each container's first process, as SageMaker does."""
        ...

    def kill(self) -> None:
        """End all processes of all containers."""
        ...


@dataclass(frozen=True)
class Container:
    """A container of a job on this machine: its command and its environment.

    Attributes:
        request: The CreateTrainingJob document.
        folder: The run's folder.
        host: Name of the host, such as algo-1.
        environ: Environment with the credentials and variables to pass on.
        gpus: Ids of its GPUs, in the form of CUDA_VISIBLE_DEVICES.
        hosts_here: Hosts of this job on this machine.
    """

    request: Mapping[str, Any]
    folder: JobFolder
    host: str
    environ: Mapping[str, str]
    gpus: tuple[str, ...]
    hosts_here: int

    def start(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the container with its output in the host's log; `variables` are added to its environment."""
        tree = self.folder.tree(self.host).root
        return start_logged(
            mount_namespace.wrap(str(tree), self._command()),
            self.folder.log(self.host),
            cwd=tree,
            env={**self._environment(), **variables},
            preexec_fn=process_tree.end_with_parent,
        )

    def _command(self) -> list[str]:
        algorithm = self.request["AlgorithmSpecification"]
        if entrypoint := algorithm.get("ContainerEntrypoint"):
            return [*entrypoint, *algorithm.get("ContainerArguments", [])]
        hyperparameters = self.request.get("HyperParameters", {})
        has_torchrun = hyperparameters.get("sagemaker_torch_distributed_enabled") == "true"
        tree = self.folder.tree(self.host)
        # The request of an estimator without our code, or a trial of a tuning job.
        if has_torchrun or not original_of(tree, tree.run_config).is_file():
            return [sys.executable, "-P", "-m", "cloudtrain_runtime.launcher.toolkit"]
        # AWS's toolkit would start mpirun, which this machine may lack; torchrun starts the same root script.
        return [
            "/bin/sh",
            "-c",
            f'cd "${ML_ROOT_VARIABLE}/code" && exec python -m cloudtrain_runtime.launch',
        ]

    def _environment(self) -> dict[str, str]:
        passed = {name: self.environ[name] for name in passed_names(self.environ)}
        tree = self.folder.tree(self.host)
        python = self.folder.python
        own = [] if python == sys.executable else [str(Path(python).parent)]
        most = self.environ.get(MAX_PROCESSES_VARIABLE)
        name = self.request["TrainingJobName"]
        beside = str(Path(sys.executable).parent)
        return {
            **passed,
            **exclude_loopback(passed),
            # Commands such as torchrun are beside the interpreter, whose environment may not be activated.
            "PATH": ":".join(
                [f"{self.folder.root}/bin", *own, self.environ.get("PATH", os.defpath), beside]
            ),
            process_tree.RUN_VARIABLE: str(name),
            "TRAINING_JOB_ARN": self.environ.get(
                "TRAINING_JOB_ARN", f"arn:aws:sagemaker:local:000000000000:training-job/{name}"
            ),
            ML_ROOT_VARIABLE: str(seen_tree(tree).root),
            INSTANCE_VARIABLE: str(tree.root),
            HOSTS_HERE_VARIABLE: str(self.hosts_here),
            GRACE_VARIABLE: str(grace_seconds(self.environ)),
            GPUS_VARIABLE: str(len(self.gpus)),
            CARDS_VARIABLE: str(count_cards(visible_gpus(self.environ))),
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            **({MAX_PROCESSES_VARIABLE: most} if most else {}),
            **map_values(self.request.get("Environment", {}), seen_tree(tree)),
        }


class LocalHosts:
    """The containers of a job on this machine, which share its GPUs; each host has a loopback address.

    Args:
        request: The CreateTrainingJob document.
        folder: The run's folder.
        hosts: Names of the hosts.
        environ: Environment with the credentials, the variables to pass on, and the GPUs.
    """

    shares_disk = False

    def __init__(
        self,
        request: Mapping[str, Any],
        folder: JobFolder,
        hosts: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._addresses = host_addresses(hosts)
        shares = share_gpus(visible_gpus(environ), len(hosts))
        self._containers = [
            Container(request, folder, host, environ, gpus, len(hosts))
            for host, gpus in zip(hosts, shares, strict=True)
        ]
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._exit_codes: dict[str, int] = {}

    def start(self) -> None:
        """Start all containers."""
        variables = {
            PORT_VARIABLE: str(free_port()),
            RENDEZVOUS_FILE_VARIABLE: str(self._write_rendezvous_file()),
            ADDRESSES_VARIABLE: dump_json(self._addresses),
        }
        for container in self._containers:
            self._started[container.host] = container.start(variables)

    def _write_rendezvous_file(self) -> Path:
        """Write the file through which the hosts' agents agree; only this user may read and write it."""
        folder = self._folder.root
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            # torch opens no file there. The other folder lives as long as this object.
            self._utf8_folder = tempfile.TemporaryDirectory(prefix="cloudtrain-")
            folder = Path(self._utf8_folder.name)
        path = folder / "rendezvous"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        return path

    def poll(self) -> Mapping[str, int]:
        """Return the exit codes of the containers that have ended."""
        for host, process in self._started.items():
            code = process.poll()
            if code is not None and host not in self._exit_codes:
                self._exit_codes[host] = code
                # The kernel ends all processes of a container with its first one.
                process_tree.kill(process_tree.processes_of_host(self._folder.tree(host).root))
        return dict(self._exit_codes)

    def wait(self, seconds: float) -> None:
        """Wait for this time, or until a container has ended."""
        running = [each for host, each in self._started.items() if host not in self._exit_codes]
        process_tree.wait_for_end(running, seconds)

    def stop(self) -> None:
        """Send SIGTERM to each container's first process."""
        for process in self._started.values():
            process.terminate()

    def kill(self) -> None:
        """End all processes of all containers."""
        process_tree.kill(process_tree.descendants())


def write_python(folder: JobFolder) -> None:
    """Create a command `python` for the containers that starts the run's interpreter with its packages."""
    command = folder.root / "bin" / "python"
    command.parent.mkdir(parents=True, exist_ok=True)
    # A path is bytes, and not always UTF-8.
    command.write_bytes(os.fsencode(f'#!/bin/sh\nexec {shlex.quote(folder.python)} "$@"\n'))
    command.chmod(0o755)


def grace_seconds(environ: Mapping[str, str]) -> float:
    """Return the time between SIGTERM and SIGKILL."""
    return float(environ.get(GRACE_VARIABLE, STOP_GRACE_SECONDS))
