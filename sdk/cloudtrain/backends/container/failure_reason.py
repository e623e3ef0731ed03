"""Why a job failed: the first failure that is not the consequence of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.support.regular_files import open_regular
from cloudtrain_runtime.contract import FAILURE_CHARACTERS, describe_exit
from cloudtrain_runtime.contract.early_ends import describe_early_end
from cloudtrain_runtime.contract.secondary_errors import is_secondary_error


def find_cause(
    events: Sequence[Mapping[str, Any]],
    files: Mapping[str, Path],
    exit_codes: Mapping[str, int],
    *,
    full_disk: Path | None = None,
) -> str:
    """Return the reason of a failed job: the first failure that is not the consequence of another one.

    Args:
        events: The events of all hosts. A launcher emits `failed` once, after the last restart.
        files: Path of each host's failure file, in the order of the hosts.
        exit_codes: Exit codes of the hosts that have ended.
        full_disk: Folder whose disk is full, or None. A container that cannot write its log reports no cause.
    """
    failures = sorted(
        (event for event in events if event["event"] == "failed"),
        key=_failed_at,
    )
    causes = [event for event in failures if not event.get("secondary")]
    if causes:
        return _reason_of(causes[0], files)
    left = [event for event in events if event["event"] == "left"]
    if failures and left:
        ended = describe_early_end(left[0]["ranks"], left[0]["host"], left[0].get("step"))
        return f"{ended}, while others waited for {_reason_of(failures[0], files)}"
    reported = {str(event.get("host")) for event in failures}
    silent = [host for host, code in exit_codes.items() if code != 0 and host not in reported]
    # Other launchers emit no events. AWS's toolkit writes a file on every host, also after the loss of a peer.
    written = sorted(
        (host for host in silent if files[host].is_file()),
        key=lambda host: files[host].stat().st_mtime_ns,
    )
    texts = [_read(files[host]) for host in written]
    if first := next((text for text in texts if not is_secondary_error(text)), ""):
        return first
    if ended := next((host for host in silent if host not in written), ""):
        ending = f"the container of {ended} ended with {describe_exit(exit_codes[ended])}"
        if full_disk is not None:
            return f"the disk is full ({full_disk}): {ending}, and its log may lack the cause"
        return f"{ending}; see its log"
    return _reason_of(failures[0], files) if failures else texts[0]


def _failed_at(event: Mapping[str, Any]) -> float:
    return float(event.get("failed_at", event.get("time", 0.0)))


def _reason_of(event: Mapping[str, Any], files: Mapping[str, Path]) -> str:
    path = files.get(str(event.get("host")))
    if path is not None and path.is_file():
        return _read(path)
    return str(event.get("message", ""))[:FAILURE_CHARACTERS]


def _read(path: Path) -> str:
    with open_regular(path) as file:
        text = file.read(4 * FAILURE_CHARACTERS).decode("utf-8", "replace")
    return text[:FAILURE_CHARACTERS]
