"""A short step on free nodes that reports what they see of the shared folder, their time and their Python."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.errors import CloudError
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.settings.slurm_sites import SlurmSite

_NODES = 2
_WAIT_SECONDS = 20
"""How long the step may wait for free nodes."""
_LINE = re.compile(r"cloudtrain-ping (\S+) (\w+) ?(.*)")
_SELECTING = frozenset(
    {
        *("--partition", "--account", "--qos", "--constraint", "--reservation"),
        *("--exclude", "--nodelist", "--export", "--licenses", "--prefer"),
    }
)
"""Options of a job that select its nodes and environment, which sbatch and srun have in common."""

_SCRIPT = """\
file=$1 token=$2 python=$3
say() { printf '%s %s %s %s\\n' cloudtrain-ping "$SLURMD_NODENAME" "$1" "$2"; }
say time "$(date +%s.%N)"
[ "$(cat "$file" 2>/dev/null)" = "$token" ] && say folder yes
{ : > "$file.$SLURMD_NODENAME"; } 2>/dev/null && say writes yes
SETUP
if found=$("$python" -P -c 'import cloudtrain; from importlib.metadata import version as v; print(v("cloudtrain"))' 2>&1)
then
  say cloudtrain "${found##*$'\\n'}"
else
  say problem "${found##*$'\\n'}"
fi
"""


@dataclass(frozen=True)
class NodeReport:
    """What a node has reported.

    Attributes:
        node: Its name.
        time: Its clock, in seconds since the epoch, or None.
        sees_folder: Whether it reads what this machine has written to the shared folder.
        writes: Whether it can write there.
        cloudtrain: Version of cloudtrain in its Python, or an empty text.
        problem: Why it cannot import cloudtrain, or an empty text.
    """

    node: str
    time: float | None = None
    sees_folder: bool = False
    writes: bool = False
    cloudtrain: str = ""
    problem: str = ""


def ping_nodes(
    site: SlurmSite, job: BatchJob | None, slurm: Slurm, mark: Path, token: str
) -> tuple[NodeReport, ...]:
    """Run the step on two nodes, or on one where the job has one.

    Args:
        site: The site.
        job: The job whose options select the nodes, or None for those of the site.
        slurm: Slurm's commands.
        mark: File in the shared folder with the token.
        token: A text that only the file has.

    Raises:
        CloudError: No nodes are free, or the step failed.
    """
    options = _options(site, job)
    script = _SCRIPT.replace("SETUP", "\n".join(site.setup))
    given = [str(mark), token, site.python or sys.executable]
    output = slurm.run_step(
        [*options, "bash", "-c", script, "ping", *given], wait_seconds=_WAIT_SECONDS
    )
    if output is None:
        raise CloudError(
            f"no nodes were free within {_WAIT_SECONDS} s to look at {site.folder}",
            "try again later: cloudtrain check",
        )
    reports = parse_reports(output)
    if not reports:
        raise CloudError("the step on the nodes reported nothing", "see: squeue, sinfo")
    return reports


def _options(site: SlurmSite, job: BatchJob | None) -> list[str]:
    fixed = ["--job-name=cloudtrain-ping", "--ntasks-per-node=1", "--time=1", "--input=none"]
    if job is None:
        given = {"--partition": site.partition, "--account": site.account, "--qos": site.qos}
        selected = [f"{name}={value}" for name, value in given.items() if value is not None]
        return [*fixed, f"--nodes={_NODES}", *selected]
    selected = [str(each) for each in job.options if each.name in _SELECTING]
    asked = next((each.value for each in job.options if each.name == "--nodes"), None)
    nodes = 1 if asked in {None, "1"} else _NODES
    return [*fixed, f"--nodes={nodes}", *selected]


def parse_reports(text: str) -> tuple[NodeReport, ...]:
    """Return the reports of nodes in the output of a step, by the nodes' names; other lines are skipped."""
    by_node: dict[str, dict[str, str]] = {}
    for node, name, value in _said(text):
        by_node.setdefault(node, {})[name] = value
    return tuple(
        NodeReport(
            node=node,
            time=_seconds(said.get("time", "")),
            sees_folder=said.get("folder") == "yes",
            writes=said.get("writes") == "yes",
            cloudtrain=said.get("cloudtrain", ""),
            problem=said.get("problem", ""),
        )
        for node, said in sorted(by_node.items())
    )


def _said(text: str) -> Iterator[tuple[str, str, str]]:
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None:
            yield match[1], match[2], match[3]


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII) else None
