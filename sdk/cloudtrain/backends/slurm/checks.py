"""Checks of a Slurm cluster: its answers, the site's partition and account, the shared folder, and two of its nodes."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.node_ping import NodeReport, ping_nodes
from cloudtrain.backends.slurm.queue_states import describe_time
from cloudtrain.backends.slurm.slurm_output import Partition
from cloudtrain.errors import CloudtrainError, UnreachableError, UserError, did_you_mean
from cloudtrain.planning.batch_job import BatchJob
from cloudtrain.preflight.base import start_thread
from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.checks import Check, Result, failed, passed, unknown
from cloudtrain.support.home_folder import find_owner
from cloudtrain.support.regular_files import read_regular
from cloudtrain.support.units import format_duration, format_size

SEEN_FILE = "seen-by-nodes"
"""File in the shared folder with the nodes that have read and written there."""

_LITTLE_SPACE_BYTES = 5 * 10**9
_LITTLE_CLOCK_SECONDS = 5.0
_MOST_CLOCK_SECONDS = 300.0
"""S3 refuses requests with a larger difference."""

_SEEN_SECONDS = 86400.0
_MOST_NAMES_BYTES = 1000

# Each node has its own.
_NODES_OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 (no file is made there)
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


def check_cluster(site: SlurmSite, slurm: Slurm | None = None) -> tuple[Check, ...]:
    """Return the checks of a site that need no node: Slurm, partition, account, QOS, shared folder.

    Slurm's controller is asked. A check without an answer is `unknown`.
    """
    slurm = slurm or Slurm()
    try:
        version = slurm.version()
        partitions = slurm.partitions()
    except UnreachableError as error:
        return (unknown("Slurm", error.message, error.hint), *_check_folder(site))
    except CloudtrainError as error:
        return (failed("Slurm", error.message, error.hint), *_check_folder(site))
    return (
        passed("Slurm", version),
        _check_partition(site, partitions),
        *_check_account(site, slurm),
        *_check_folder(site),
    )


def _check_partition(site: SlurmSite, partitions: tuple[Partition, ...]) -> Check:
    names = [each.name for each in partitions]
    if site.partition is None:
        found = [each for each in partitions if each.is_default]
        if not found:
            return failed(
                "partition",
                "Slurm has no default partition, and the site names none",
                f"partition = one of: {', '.join(names)} ({site.origin})",
            )
    else:
        wanted = site.partition.split(",")
        found = [each for each in partitions if each.name in wanted]
        absent = [name for name in wanted if name not in names]
        if absent:
            return failed(
                "partition",
                f"{site.origin_of('partition')}: Slurm has no partition {absent[0]}",
                did_you_mean(absent[0], names),
            )
    down = [each.name for each in found if not each.is_up]
    detail = "; ".join(map(_describe_partition, found))
    warning = f"{down[0]} starts no jobs now: sinfo --list-reasons" if down else ""
    return passed("partition", detail, warning=warning)


def _describe_partition(partition: Partition) -> str:
    limit = "no time limit"
    if partition.max_seconds is not None:
        limit = f"at most {format_duration(partition.max_seconds)} per job"
    nodes = "1 node" if partition.nodes == 1 else f"{partition.nodes} nodes"
    most = "" if partition.max_nodes is None else f", at most {partition.max_nodes} per job"
    state = "" if partition.is_up else ", down"
    return f"{partition.name}: {nodes}{most}, {limit}{state}"


def _check_account(site: SlurmSite, slurm: Slurm) -> Iterator[Check]:
    accounts = slurm.accounts()
    if accounts is None:
        yield passed("account", "this cluster has no accounting")
        return
    if site.account is not None and site.account not in accounts:
        yield failed(
            "account",
            f"{site.origin_of('account')}: you may not charge the account {site.account}",
            did_you_mean(site.account, accounts)
            if accounts
            else "ask the cluster's administrators",
        )
    elif not accounts:
        yield failed("account", "you have no account", "ask the cluster's administrators for one")
    else:
        yield passed("account", site.account or f"your default one of {', '.join(accounts)}")
    qualities = slurm.qualities() or ()
    if site.qos is not None and site.qos not in qualities:
        yield failed(
            "qos",
            f"{site.origin_of('qos')}: Slurm has no QOS {site.qos}",
            did_you_mean(site.qos, qualities),
        )


def _check_folder(site: SlurmSite) -> Iterator[Check]:
    """Check the shared folder as this machine sees it."""
    name = "shared folder"
    folder = site.folder
    fix = f"set folder to one that all nodes share ({site.origin_of('folder')})"
    if not folder.is_absolute():
        yield failed(name, f"{folder} is no absolute path", fix)
        return
    if not folder.parent.is_dir():
        yield failed(name, f"{folder}: there is no folder {folder.parent}", fix)
        return
    nearest = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not nearest.is_dir():
        yield failed(name, f"{nearest} is no folder", fix)
        return
    closed = next((each for each in (nearest, folder / "runs") if _is_closed(each)), None)
    if closed is not None:
        own = f"set folder to one of your own that all nodes share ({site.origin_of('folder')})"
        owner = find_owner(closed)
        yield failed(name, f"{closed} belongs to {owner}, and you may not write there", own)
        return
    free = shutil.disk_usage(nearest).free
    detail = f"{folder}, {format_size(free)} free"
    own = "" if was_seen(site) else _reason_to_be_unshared(folder, nearest)
    warning = ""
    if own:
        warning = f"it {own}; {fix}"
    elif free < _LITTLE_SPACE_BYTES:
        warning = "there is little space; delete runs: cloudtrain rm --older-than 30d"
    yield passed(name, detail, warning=warning)


def _is_closed(folder: Path) -> bool:
    return os.access(folder, os.F_OK) and not os.access(folder, os.R_OK | os.W_OK | os.X_OK)


def _reason_to_be_unshared(folder: Path, nearest: Path) -> str:
    """Return why the nodes can hardly share a folder, or an empty text."""
    real = Path(os.path.realpath(folder))
    for each in _NODES_OWN:
        if real.is_relative_to(each):
            return f"is in {each}, of which each node usually has its own"
    kind = _file_system(nearest)
    return f"is in memory ({kind})" if kind in _MEMORY_FILE_SYSTEMS else ""


def _file_system(folder: Path) -> str:
    """Return the kind of the file system with a folder, or an empty text."""
    real = os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mounts = [line.split()[1:3] for line in lines]
    above = [(place, kind) for place, kind in mounts if Path(real).is_relative_to(place)]
    return max(above, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _seen_file(site: SlurmSite) -> Path:
    """Return the file that nodes of a site have passed the check, with its Python and its lines of setup."""
    content = "\n".join([site.python or sys.executable, site.partition or "", *site.setup])
    return site.folder / f"{SEEN_FILE}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def was_seen(site: SlurmSite) -> bool:
    """Return whether nodes have read and written in the shared folder of a site in the last day."""
    try:
        written = _seen_file(site).stat().st_mtime
    except OSError:
        return False
    return time.time() - written < _SEEN_SECONDS


def start_checks(
    site: SlurmSite, job: BatchJob, slurm: Slurm | None = None, *, skip: bool = False
) -> Callable[[], tuple[Check, ...]]:
    """Start to check what a submit needs; the nodes are asked once a day.

    Args:
        site: The site.
        job: The job of the plan.
        slurm: Slurm's commands.
        skip: Leave out what has to wait for an answer.

    Raises:
        UserError: The shared folder cannot be used, or Slurm would refuse an option.
    """
    slurm = slurm or Slurm()
    for each in _check_folder(site):
        if each.result is Result.FAIL:
            raise UserError(f"{each.name}: {each.detail}", each.fix)
    if skip:
        return tuple
    options = check_options(job, slurm)
    cluster = start_thread(lambda: check_cluster(site, slurm))
    nodes = start_thread(lambda: check_nodes(site, job, slurm))
    return lambda: (*cluster.result(), options, *nodes.result())


def check_options(job: BatchJob, slurm: Slurm) -> Check:
    """Let Slurm check the options of a job, without a submit.

    Raises:
        UserError: Slurm would refuse one. The message names where it comes from.
    """
    try:
        start = slurm.test(job)
    except UserError:
        raise
    except CloudtrainError as error:
        return unknown("options", error.message, error.hint)
    if start is None:
        return passed("options", "Slurm accepts them")
    when = describe_time(start, datetime.now(UTC))
    return passed("options", f"Slurm accepts them, and expects the start at {when}")


def check_nodes(site: SlurmSite, job: BatchJob | None, slurm: Slurm) -> tuple[Check, ...]:
    """Run a short step on two free nodes: they must see the shared folder, and have cloudtrain and the right time.

    Nothing is asked where nodes have passed in the last day. Without free nodes there is no answer, which is a
    failure for a folder that nodes hardly share.

    Args:
        site: The site.
        job: The job whose options select the nodes, or None for those of the site.
        slurm: Slurm's commands.
    """
    if was_seen(site):
        return (passed("nodes", f"{_read_seen(site)} have used {site.folder} today"),)
    without = failed if _reason_to_be_unshared(site.folder, site.folder) else unknown
    token = uuid.uuid4().hex
    mark = site.folder / f".ping-{token}"
    try:
        site.folder.mkdir(0o700, parents=True, exist_ok=True)
        mark.write_text(token, encoding="ascii")
    except OSError as error:
        return (failed("nodes", f"{site.folder} cannot be written: {error.strerror}"),)
    began = time.time()
    try:
        reports = ping_nodes(site, job, slurm, mark, token)
        ended = time.time()
        visible = {each.node for each in reports if Path(f"{mark}.{each.node}").exists()}
    except UserError as error:
        return (failed("nodes", error.message, error.hint),)
    except CloudtrainError as error:
        return (without("nodes", error.message, error.hint),)
    finally:
        for each in site.folder.glob(f"{mark.name}*"):
            each.unlink(missing_ok=True)
    checks = tuple(_judge(site, reports, visible, began, ended))
    if all(each.result is not Result.FAIL for each in checks):
        names = ", ".join(each.node for each in reports)
        write_atomically(_seen_file(site), f"{names}\n")
    return checks


def _read_seen(site: SlurmSite) -> str:
    try:
        found = read_regular(_seen_file(site), _MOST_NAMES_BYTES)
        return found.decode("utf-8", "replace").strip()
    except OSError:
        return "nodes"


def _judge(
    site: SlurmSite, reports: tuple[NodeReport, ...], visible: set[str], began: float, ended: float
) -> Iterator[Check]:
    names = ", ".join(each.node for each in reports)
    blind = [each.node for each in reports if not each.sees_folder or each.node not in visible]
    fix = f"set folder to one that all nodes share ({site.origin_of('folder')})"
    if blind:
        yield failed("nodes", f"{blind[0]} does not share {site.folder} with this machine", fix)
        return
    closed = [each.node for each in reports if not each.writes]
    if closed:
        yield failed("nodes", f"{closed[0]} cannot write in {site.folder}", fix)
        return
    yield passed("nodes", f"{names} share {site.folder}")
    yield _judge_clocks(reports, began, ended)
    yield _judge_python(reports)


def _judge_clocks(reports: tuple[NodeReport, ...], began: float, ended: float) -> Check:
    """Compare the nodes' clocks with this one. A node has answered between two moments, so less is not known."""
    differences = {
        each.node: max(began - each.time, each.time - ended, 0.0)
        for each in reports
        if each.time is not None
    }
    if not differences:
        return unknown("clock", "the nodes did not report their time")
    node, most = max(differences.items(), key=lambda each: each[1])
    detail = f"the clock of {node} differs by {most:.0f} s from this machine's"
    fix = "ask the cluster's administrators to synchronize the clocks (chrony)"
    if most > _MOST_CLOCK_SECONDS:
        return failed("clock", detail, fix)
    if most > _LITTLE_CLOCK_SECONDS:
        return passed("clock", detail, warning=f"times of events differ as much; {fix}")
    return passed("clock", f"the same on {', '.join(differences)} as here")


def _judge_python(reports: tuple[NodeReport, ...]) -> Check:
    broken = [each for each in reports if not each.cloudtrain]
    if broken:
        return failed(
            "environment",
            f"{broken[0].node} cannot import cloudtrain: {broken[0].problem}",
            "install it where the nodes see it, too, and set python in the site's settings",
        )
    versions = sorted({each.cloudtrain for each in reports})
    return passed("environment", f"cloudtrain {', '.join(versions)} on the nodes")
