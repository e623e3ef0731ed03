"""Warnings from the reports of a run's hosts: lost files, an empty model folder, ranks that train alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from cloudtrain.support.units import format_size

_MOST_NAMED = 4

Event = Mapping[str, Any]
"""An event `outputs` or `ranks` of a host, whose fields have the types of the schema."""


def describe_lost_files(event: Event) -> str:
    """Return a message about the files that a host loses: the job created them in its code folder."""
    lost = event["unkept"]  # the largest first; the path of a folder ends with a slash
    named = ", ".join(map(_describe_lost, lost[:_MOST_NAMED]))
    more = ", ..." if len(lost) > _MOST_NAMED else ""
    least = "" if event.get("is_complete", True) else "at least "
    files = event["unkept_files"]
    count = f"{least}{files} file{'' if files == 1 else 's'} ({format_size(event['unkept_bytes'])})"
    return (
        f"{count} in the code folder are not kept: {named}{more}. "
        "Only SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and a script's code.outputs are kept"
    )


def _describe_lost(lost: Mapping[str, Any]) -> str:
    count = f"{lost['files']} files, " if lost["path"].endswith("/") and lost["files"] > 1 else ""
    return f"{lost['path']} ({count}{format_size(lost['bytes'])})"


def file_warnings(reports: Iterable[Event], *, has_succeeded: bool) -> list[str]:
    """Return warnings about lost and missing files of an ended run, one sentence each.

    Args:
        reports: The event `outputs` of each host.
        has_succeeded: Whether the run has succeeded.
    """
    hosts = sorted(reports, key=lambda report: str(report["host"]))
    found = [f"{report['host']}: {describe_lost_files(report)}" for report in hosts if report["unkept_files"]]
    missing = set.intersection(*(set(report.get("unwritten", ())) for report in hosts)) if hosts else set()
    if missing:
        names = ", ".join(sorted(missing))
        found.append(f"code.outputs: no host wrote {names}, so it can be neither kept nor restored")
    if has_succeeded and hosts and all(report["model_is_empty"] for report in hosts):
        found.append("the model folder is empty: nothing was written to SM_MODEL_DIR, so there is no model.tar.gz")
    return found


def rank_warnings(reports: Collection[Event], *, has_checkpoint: bool) -> list[str]:
    """Return warnings about ranks that train alone, missing checkpoints and missing progress, one sentence each.

    Args:
        reports: The newest event `ranks` of each host, which only scripts have.
        has_checkpoint: Whether the run has reported a checkpoint.
    """
    ranks = sum(report["ranks"] for report in reports)
    found = []
    if ranks > 1 and ranks == sum(report["alone"] for report in reports):
        found.append(
            f"{ranks} independent copies: no rank has joined a process group of torch.distributed, so each trains a "
            "separate model. Call init_process_group (Accelerate and Lightning do), or, for a script that starts "
            "its own ranks, set cluster.processes_per_instance: 1"
        )
    # `progressed` is None if limits.hang is off.
    is_used = has_checkpoint or any(report.get("progressed") for report in reports)
    if reports and not is_used and not any(report["saved"] for report in reports):
        found.append(
            "no checkpoint so far: the script has written nothing to /opt/ml/checkpoints and does not use "
            "cloudtrain_runtime.checkpoint, so an interrupted run starts from the beginning"
        )
    if reports and all(report.get("progressed") is False for report in reports):
        found.append(
            "limits.hang has no effect: the script reports no progress, as cloudtrain_runtime.checkpoint.save would"
        )
    return found
