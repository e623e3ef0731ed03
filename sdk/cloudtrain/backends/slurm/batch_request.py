"""The batch job of a run: the options of sbatch with their origins, and the batch script. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cloudtrain.backends.container.host_launcher import passed_names
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.batch_job import EXPORT, OWN, SIGNAL_SECONDS, BatchJob, BatchOption
from cloudtrain.planning.plan import ClusterPlan
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.sbatch_options import parse_sbatch_option

COMMENT: Final = "cloudtrain:"
"""Start of the comment of a run's job; the identity of its plan follows."""
LOG_FILE: Final = "slurm.log"
"""Output of the batch script, in the run's folder."""
BATCH_STEP: Final = "cloudtrain.backends.slurm.batch_step"
"""The module that supervises a run, in its batch step."""
AFTER_LIMIT_SECONDS: Final = 300
"""Time between the end of `limits.runtime`, which the run itself keeps, and Slurm's time limit."""

_EXPORTED: Final = (
    *("LOGNAME", "SHELL", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("MODULEPATH", "MODULESHOME", "BASH_ENV"),
)
"""Variables that the batch script and its Python get besides those of containers, if they are set."""
_NOT_EXPORTED: Final = frozenset({"TMPDIR", "CLOUDTRAIN_HOME"})
"""Paths that a node need not have."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REPLACES: Final = {
    "--no-requeue": "--requeue",
    "--oversubscribe": "--exclusive",
    **dict.fromkeys(
        ("--gres", "--gpus", "--gpus-per-task", "--gpus-per-socket"), "--gpus-per-node"
    ),
}
"""Options of a site or job that take the place of one of cloudtrain's."""


def exported_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that a run gets from the shell that submits it. Slurm adds their values."""
    names = {*passed_names(environ), *(name for name in _EXPORTED if name in environ)}
    names |= {name for name in environ if name.startswith("CLOUDTRAIN_")}
    return tuple(sorted(name for name in names - _NOT_EXPORTED if _VARIABLE.fullmatch(name)))


def render_batch_job(
    spec: JobSpec,
    cluster: ClusterPlan,
    site: SlurmSite,
    *,
    runtime_seconds: int,
    run: str,
    identity: str,
    python: str,
    exported: tuple[str, ...],
) -> BatchJob:
    """Return what sbatch receives for a run.

    Args:
        spec: The job.
        cluster: Its nodes and ranks.
        site: The Slurm cluster.
        runtime_seconds: Time limit that the run itself keeps.
        run: The run id.
        identity: The plan's identity; empty while it is computed.
        python: Absolute path of the Python that executes the batch step.
        exported: Names of the environment variables that the job gets.
    """
    folder = site.folder / "runs" / run
    options: dict[str, BatchOption] = {}
    for option in (
        *_own_options(cluster, site, folder, run, identity, exported),
        *_time_options(site, runtime_seconds),
        *_site_options(site),
        *_job_options(spec),
    ):
        # The last one of a name counts, and is where it was given.
        options.pop(_REPLACES.get(option.name, option.name), None)
        options.pop(option.name, None)
        options[option.name] = option
    return BatchJob(site.name, tuple(options.values()), _script(site, python, folder))


def _own_options(
    cluster: ClusterPlan,
    site: SlurmSite,
    folder: Path,
    run: str,
    identity: str,
    exported: tuple[str, ...],
) -> Iterator[BatchOption]:
    # A percent sign begins a pattern such as %j.
    log = str(folder / LOG_FILE).replace("%", "%%")
    yield BatchOption("--parsable", None, OWN)
    yield BatchOption("--job-name", run, "name")
    yield BatchOption("--comment", f"{COMMENT}{identity}", OWN)
    yield BatchOption("--nodes", str(cluster.instances), "cluster.instances")
    yield BatchOption("--ntasks-per-node", "1", OWN)
    if site.gpus_per_node:
        gpus = str(site.gpus_per_node)
        yield BatchOption("--gpus-per-node", gpus, site.origin_of("gpus_per_node"))
    yield BatchOption("--exclusive", None, OWN)
    yield BatchOption("--requeue", None, OWN)
    yield BatchOption("--open-mode", "append", OWN)
    yield BatchOption("--output", log, site.origin_of("folder"))
    yield BatchOption("--chdir", str(folder), site.origin_of("folder"))
    yield BatchOption(EXPORT, ",".join(exported) or "NONE", OWN)


def _time_options(site: SlurmSite, runtime_seconds: int) -> Iterator[BatchOption]:
    seconds = runtime_seconds + AFTER_LIMIT_SECONDS
    minutes = -(-seconds // 60)
    origin = "limits.runtime"
    if site.time_seconds is not None and site.time_seconds < seconds:
        minutes = max(site.time_seconds // 60, 1)
        origin = site.origin_of("time")
    yield BatchOption("--time", str(minutes), origin)
    signal_seconds = min(SIGNAL_SECONDS, minutes * 60 // 2)
    yield BatchOption("--signal", f"B:USR1@{signal_seconds}", OWN)


def _site_options(site: SlurmSite) -> Iterator[BatchOption]:
    named = {"partition": site.partition, "account": site.account, "qos": site.qos}
    for key, value in named.items():
        if value is not None:
            yield BatchOption(f"--{key}", value, site.origin_of(key))
    for text in site.sbatch:
        yield BatchOption(*parse_sbatch_option(text), site.origin_of("sbatch"))


def _job_options(spec: JobSpec) -> Iterator[BatchOption]:
    section = spec.slurm
    for key in ("partition", "qos", "constraint", "reservation"):
        value = getattr(section, key)
        if value is not None:
            yield BatchOption(f"--{key}", value, f"slurm.{key}")
    for text in section.sbatch:
        yield BatchOption(*parse_sbatch_option(text), "slurm.sbatch")


def _script(site: SlurmSite, python: str, folder: Path) -> str:
    step = shlex.join([python, "-P", "-m", BATCH_STEP, str(folder)])
    lines = [
        "#!/bin/bash",
        "# The batch step of a cloudtrain run: it starts one host of the run on each node, and supervises them.",
        # Python handles these signals later; until then they must not end the script.
        "trap '' USR1 USR2",
        # A line of the setup that fails ends the job.
        "set -e",
        *site.setup,
        f"exec {step}",
    ]
    return "\n".join(lines) + "\n"
