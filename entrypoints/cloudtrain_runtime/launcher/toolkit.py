"""A local replacement of AWS's training toolkit, which starts the script of a plain framework estimator.

It runs what a framework estimator requests by hyperparameters (`sagemaker_program` and its distribution) when the job
does not use cloudtrain. It follows github.com/aws/sagemaker-training-toolkit 5 (entry_point.py, torch_distributed.py,
errors.py): the script receives the user's hyperparameters as arguments, SIGTERM does not reach it, and a failure is
written as ExecuteUserScriptError. Requirements are not installed, and mpirun is not supported.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from cloudtrain_runtime.contract import (
    ADDRESSES_VARIABLE,
    DEFAULT_RENDEZVOUS_PORT,
    MAX_PROCESSES_VARIABLE,
    PORT_VARIABLE,
    MlTree,
)
from cloudtrain_runtime.contract.argument_variables import decode
from cloudtrain_runtime.contract.strict_json import load_json
from cloudtrain_runtime.contract.trial import NOT_SEARCHED
from cloudtrain_runtime.launcher.failure_file import fail
from cloudtrain_runtime.launcher.host import Host, count_gpus, read_host
from cloudtrain_runtime.launcher.sagemaker_environment import (
    read_config,
    sagemaker_variables,
)
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.event_log import log_line

_OWN = "sagemaker_"
_BY_TORCHRUN = (
    "torch_distributed_enabled",
    "distributed_dataparallel_enabled",
    "pytorch_ddp_enabled",
)
_TAIL_LINES = 50


def main() -> int:
    """Run this host's part of an estimator's job; return the exit code of the container."""
    # AWS's toolkit is PID 1 without a handler: it ignores a stop notice until SIGKILL.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tree = ml_tree(os.environ)
    for folder in (tree.model, tree.output_data):
        folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: decode(text) for name, text in read_config(tree, "hyperparameters").items()}
    if parameters.get("sagemaker_mpi_enabled"):
        return fail(
            "the distribution needs mpirun, which is not available here; use torch_distributed"
        )
    if (tree.code / "requirements.txt").is_file():
        log_line(
            "requirements.txt is not installed: a local run uses this machine's environment as it is"
        )
    user_args = script_arguments(parameters)
    program = str(parameters["sagemaker_program"])
    command = [*start_command(parameters, read_host(tree), os.environ), program, *user_args]
    gpus = count_gpus()
    variables = sagemaker_variables(tree, gpus=gpus, user_args=user_args, entry_point=program)
    environment = {**variables, **os.environ, "PYTHONUNBUFFERED": "1"}
    log_line(f"Invoking script with the following command: {shlex.join(command)}")
    code, tail = _run(command, tree, environment)
    if code == 0:
        return 0
    named = [line for line in tail if "Error" in line or "Exception" in line]
    message = named[-1].strip() if named else ""
    text = f'ExecuteUserScriptError:\nExitCode {code}\nErrorMessage "{message}"\nCommand "{shlex.join(command)}"'
    if tree.failure.exists():
        # The script has written it, and the toolkit keeps it (files.py).
        log_line(text)
        return 1
    return fail(text)


def script_arguments(parameters: Mapping[str, Any]) -> list[str]:
    """Return the user's hyperparameters as the script's arguments, sorted by name as the toolkit does."""
    found: list[str] = []
    for name in sorted(parameters):
        if name.startswith(NOT_SEARCHED):
            continue
        dashes = "-" if len(name) == 1 else "--"
        found += [f"{dashes}{name}", str(parameters[name])]
    return found


def start_command(
    parameters: Mapping[str, Any], host: Host, environ: Mapping[str, str]
) -> list[str]:
    """Return the command that starts the script: python, or torchrun where a distribution is requested."""
    if not any(parameters.get(f"{_OWN}{name}") for name in _BY_TORCHRUN):
        return [sys.executable]
    addresses = load_json(environ.get(ADDRESSES_VARIABLE, "{}"))
    master = host.hosts[0]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(host.hosts)}",
        f"--nproc_per_node={environ.get(MAX_PROCESSES_VARIABLE) or max(1, count_gpus())}",
        f"--master_addr={addresses.get(master, master)}",
        f"--master_port={environ.get(PORT_VARIABLE, DEFAULT_RENDEZVOUS_PORT)}",
        f"--node_rank={host.rank}",
    ]


def _run(command: list[str], tree: MlTree, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command, cwd=tree.code, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout or ():
            os.write(sys.stdout.fileno(), line)
            tail.append(line.decode("utf-8", "replace").rstrip())
    return process.returncode, list(tail)


if __name__ == "__main__":
    sys.exit(main())
