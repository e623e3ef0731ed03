"""Reports of the hosts of a run: lost files, an empty model folder, ranks that train alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.support.units import format_size

_MOST_NAMED = 4


@dataclass(frozen=True)
class LostFiles:
    """Lost files: one file in the code folder, or all files below a folder of it, whose path ends with `/`."""

    path: str
    files: int
    size_bytes: int

    def __str__(self) -> str:
        count = f"{self.files} files, " if self.path.endswith("/") and self.files > 1 else ""
        return f"{self.path} ({count}{format_size(self.size_bytes)})"


@dataclass(frozen=True)
class HostFiles:
    """The event `outputs` of a host.

    Attributes:
        host: Name of the host.
        model_is_empty: Whether its model folder was empty at the end.
        lost: The largest of the lost files, which the job created in its code folder, largest first.
        files: Number of lost files.
        size_bytes: Size of the lost files.
        is_complete: Whether all files were counted.
        unwritten: Declared outputs of the job that the host has not written.
    """

    host: str
    model_is_empty: bool
    lost: tuple[LostFiles, ...]
    files: int
    size_bytes: int
    is_complete: bool
    unwritten: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a message about the lost files with the host's name."""
        return f"{self.host}: {self.describe()}"

    def describe(self) -> str:
        """Return a message about the lost files."""
        named = ", ".join(map(str, self.lost[:_MOST_NAMED]))
        more = ", ..." if len(self.lost) > _MOST_NAMED else ""
        least = "" if self.is_complete else "at least "
        count = f"{least}{self.files} file{'' if self.files == 1 else 's'} ({format_size(self.size_bytes)})"
        return (
            f"{count} in the code folder are not kept: {named}{more}. "
            "Only SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and a script's code.outputs are kept"
        )


def read_host_files(event: Mapping[str, Any]) -> HostFiles:
    """Return the report in an event `outputs`, whose fields have the types of the schema."""
    return HostFiles(
        host=event["host"],
        model_is_empty=event["model_is_empty"],
        lost=tuple(LostFiles(each["path"], each["files"], each["bytes"]) for each in event["unkept"]),
        files=event["unkept_files"],
        size_bytes=event["unkept_bytes"],
        is_complete=event.get("is_complete", True),
        unwritten=tuple(event.get("unwritten", ())),
    )


def file_warnings(reports: Iterable[HostFiles], *, has_succeeded: bool) -> list[str]:
    """Return warnings about lost and missing files of an ended run, one sentence each."""
    hosts = sorted(reports, key=lambda report: report.host)
    found = [str(report) for report in hosts if report.files]
    missing = set.intersection(*(set(report.unwritten) for report in hosts)) if hosts else set()
    if missing:
        names = ", ".join(sorted(missing))
        found.append(f"code.outputs: no host wrote {names}, so it can be neither kept nor restored")
    if has_succeeded and hosts and all(report.model_is_empty for report in hosts):
        found.append("the model folder is empty: nothing was written to SM_MODEL_DIR, so there is no model.tar.gz")
    return found


@dataclass(frozen=True)
class HostRanks:
    """The newest event `ranks` of a host, which only scripts have.

    Attributes:
        host: Name of the host.
        ranks: Number of ranks that the host started.
        alone: Number of ranks that joined no process group so far, or before they ended.
        joined: Number of ranks that joined one.
        has_saved: Whether a file in /opt/ml/checkpoints is newer than the start.
        has_progressed: Whether a rank has reported a step; None if limits.hang is off.
    """

    host: str
    ranks: int
    alone: int
    joined: int
    has_saved: bool
    has_progressed: bool | None


def read_host_ranks(event: Mapping[str, Any]) -> HostRanks:
    """Return the report in an event `ranks`, whose fields have the types of the schema."""
    return HostRanks(
        host=event["host"],
        ranks=event["ranks"],
        alone=event["alone"],
        joined=event["joined"],
        has_saved=event["saved"],
        has_progressed=event.get("progressed"),
    )


def rank_warnings(reports: Collection[HostRanks], *, has_checkpoint: bool) -> list[str]:
    """Return warnings about ranks that train alone, missing checkpoints and missing progress, one sentence each.

    Args:
        reports: The newest report of each host.
        has_checkpoint: Whether the run has reported a checkpoint.
    """
    ranks = sum(report.ranks for report in reports)
    found = []
    if ranks > 1 and ranks == sum(report.alone for report in reports):
        found.append(
            f"{ranks} independent copies: no rank has joined a process group of torch.distributed, so each trains a "
            "separate model. Call init_process_group (Accelerate and Lightning do), or, for a script that starts "
            "its own ranks, set cluster.processes_per_instance: 1"
        )
    is_used = has_checkpoint or any(report.has_progressed for report in reports)
    if reports and not is_used and not any(report.has_saved for report in reports):
        found.append(
            "no checkpoint so far: the script has written nothing to /opt/ml/checkpoints and does not use "
            "cloudtrain_runtime.checkpoint, so an interrupted run starts from the beginning"
        )
    if reports and all(report.has_progressed is False for report in reports):
        found.append(
            "limits.hang has no effect: the script reports no progress, as cloudtrain_runtime.checkpoint.save would"
        )
    return found
