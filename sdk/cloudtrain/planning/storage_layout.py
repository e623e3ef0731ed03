"""Storage layout of a run: uris in S3 for SageMaker, and below one folder for a local run or one on Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.job.spec import JobSpec
from cloudtrain_runtime.contract import BUNDLE_FILE

PLACEHOLDER_BUCKET = "<your bucket>"
PLACEHOLDER_ROLE = "<your role>"
"""Values of a plan without settings. They are not legal in a request, which a submit without settings never reaches."""

_STEPS = "steps"


@dataclass(frozen=True)
class Locations:
    """Uris of a run's files: `s3://` uris, or `file://` uris for a local run.

    Attributes:
        base: Folder below which cloudtrain itself writes, such as the submit locks.
        code: The bundle's archive.
        config: Folder of run.json.
        output: Prefix below which `<run>/output/model.tar.gz` or `<run>/output/model/` appears.
        checkpoints: Folder of this run's checkpoints; the one that SageMaker syncs, where it does.
        saves: Folder to which the runtime saves checkpoints; empty for /opt/ml/checkpoints.
        channels: The user's input channels by name.
    """

    base: str
    code: str
    config: str
    output: str
    checkpoints: str
    saves: str
    channels: dict[str, str]


@dataclass(frozen=True)
class ResumeSource:
    """The checkpoints that `checkpoint.resume` names.

    Attributes:
        folder: Folder of checkpoints; of a script on SageMaker, the folder that SageMaker syncs.
        checkpoints: What the runtime loads from: a folder of checkpoints, or a single checkpoint.
        run: The run whose checkpoints are meant, if several runs share the folder; an empty string for any.
        uploaded: Data paths in the earlier run's job file, by the uri to which that run uploaded them.
        tracked: Its names in trackers, by environment variable.
        offline_files: Folder of its offline files of Weights & Biases; an empty string without any.
        training: Identity of that run's training; empty if it is unknown.
        job: Document of that run's job; empty if it is unknown.
    """

    folder: str
    checkpoints: str
    run: str = ""
    uploaded: Mapping[str, str] = field(default_factory=dict)
    tracked: Mapping[str, str] = field(default_factory=dict)
    offline_files: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)


def direct_folder_of(synced: str) -> str:
    """Return the folder that a script's runtime writes to S3 directly, for the folder that SageMaker syncs.

    For `s3://bucket/run/checkpoints` it is `s3://bucket/run/steps/checkpoints`. It is not below the synced folder,
    because SageMaker downloads all of that folder to every host.
    """
    folder = synced.rstrip("/")
    parent, _, last = folder.rpartition("/")
    if parent == "s3:/":
        # A bucket has no parent, so its folder is within it.
        return f"{folder}/{_STEPS}"
    return f"{parent}/{_STEPS}/{last}"


def synced_folder_of(direct_folder: str) -> str | None:
    """Return the synced folder for a result of `direct_folder_of`; None for other folders."""
    parent, _, last = direct_folder.rstrip("/").rpartition("/")
    above, _, name = parent.rpartition("/")
    if name != _STEPS or above == "s3:/":
        return None
    return f"{above}/{last}"


def split_checkpoint(uri: str) -> tuple[str, str]:
    """Return folder and name of the checkpoint at a uri; an empty name when the uri is a folder of checkpoints."""
    from cloudtrain_runtime.contract.manifest import step_of_folder_name

    folder, _, name = uri.rstrip("/").rpartition("/")
    if step_of_folder_name(name) is None:
        return (uri.rstrip("/"), "")
    return (folder, name)


def resume_source(uri: str, *, is_synced: bool) -> ResumeSource:
    """Return the checkpoints at a uri in `checkpoint.resume`: a folder of checkpoints, or a single one.

    With `is_synced` the job is a script on SageMaker. Such jobs have two folders, and the uri may name either.
    """
    folder, name = split_checkpoint(uri)
    if not is_synced:
        return ResumeSource(folder, uri.rstrip("/"))
    synced = synced_folder_of(folder)
    direct = folder
    if synced is None:
        # The uri names the folder that SageMaker syncs.
        synced = folder
        direct = direct_folder_of(folder)
    if name:
        return ResumeSource(synced, f"{direct}/{name}")
    return ResumeSource(synced, direct)


def syncs_checkpoints(spec: JobSpec) -> bool:
    """Return whether SageMaker syncs /opt/ml/checkpoints with S3.

    It does for scripts, which save there, and for isolated containers, which have no S3. The shared entrypoint writes
    to S3 itself.
    """
    return spec.code.task is None or spec.cluster.network.isolation


def synced_resume_folder(spec: JobSpec, resumed: ResumeSource | None) -> str | None:
    """Return the folder in which a job continues an earlier run: unlike a Task, a script has one folder."""
    if resumed is None or not syncs_checkpoints(spec):
        return None
    return resumed.folder


def saves_of(spec: JobSpec, *, task: str, script: str) -> str:
    """Return the folder of a run's checkpoints, which is another one for a Task than for a script."""
    if spec.cluster.network.isolation:
        return ""
    return script if spec.code.task is None else task


def unless_resumed(uri: str, own: str, resumed: ResumeSource | None) -> str:
    """Return a uri, or the run's own folder where it is that of an earlier run, which may still be active."""
    if resumed is not None and uri.rstrip("/") == resumed.folder.rstrip("/"):
        return own
    return uri


def local_uri(spec: JobSpec, uri: str) -> str:
    """Return the uri of a path that is relative to the job file; another uri as it is."""
    if "://" in uri:
        return uri
    return (spec.base / uri).resolve().as_uri()


def folder_locations(
    root: Path, spec: JobSpec, digest: str, run: str, resumed: ResumeSource | None
) -> Locations:
    """Return the uris of a run whose files are below a folder, which every machine of the run can read."""
    base = (root / "runs" / run).as_uri()
    own = f"{base}/checkpoints"
    given = own
    if spec.checkpoint.uri is not None:
        given = local_uri(spec, spec.checkpoint.uri)
    checkpoints = synced_resume_folder(spec, resumed) or given
    return Locations(
        base=root.as_uri(),
        code=(root / "bundles" / digest / BUNDLE_FILE).as_uri(),
        config=f"{base}/config",
        output=(root / "runs").as_uri(),
        checkpoints=checkpoints,
        saves=saves_of(spec, task=checkpoints, script=unless_resumed(given, own, resumed)),
        channels={name: local_uri(spec, channel.source) for name, channel in spec.data.items()},
    )
