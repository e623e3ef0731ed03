"""Storage layout of a run: uris in S3 for a cluster, and below one folder for a local run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain.job.spec import JobSpec
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import BUNDLE_FILE
from cloudtrain_runtime.contract.manifest import step_of_folder_name

PLACEHOLDER_BUCKET = "cloudtrain-bucket"
_STEPS = "steps"


@dataclass(frozen=True)
class Locations:
    """Uris of a run's files: `s3://` uris, or `file://` uris for a local run.

    Attributes:
        code: The bundle's archive.
        config: Folder of run.json.
        output: Prefix below which `<run>/output/model.tar.gz` appears.
        checkpoints: Folder of this run's checkpoints; the one that SageMaker syncs, where it does.
        saves: Folder to which the runtime saves checkpoints; empty for /opt/ml/checkpoints.
        channels: The user's input channels by name.
    """

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
    """

    folder: str
    checkpoints: str
    run: str = ""
    uploaded: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_single_checkpoint(self) -> bool:
        """Whether it names a single checkpoint, not the newest of a folder."""
        return split_checkpoint(self.checkpoints)[1] != ""


def direct_folder_of(synced: str) -> str:
    """Return the folder that a script's runtime writes to S3 directly, for the folder that SageMaker syncs.

    For `s3://bucket/run/checkpoints` it is `s3://bucket/run/steps/checkpoints`. It is not below the synced folder,
    because SageMaker downloads all of that folder to every host.
    """
    parent, _, last = synced.rstrip("/").rpartition("/")
    return f"{synced.rstrip('/')}/{_STEPS}" if parent == "s3:/" else f"{parent}/{_STEPS}/{last}"


def synced_folder_of(direct_folder: str) -> str | None:
    """Return the synced folder for a result of `direct_folder_of`; None for other folders."""
    parent, _, last = direct_folder.rstrip("/").rpartition("/")
    above, _, name = parent.rpartition("/")
    return f"{above}/{last}" if name == _STEPS and above != "s3:/" else None


def split_checkpoint(uri: str) -> tuple[str, str]:
    """Return folder and name of the checkpoint at a uri; an empty name when the uri is a folder of checkpoints."""
    folder, _, name = uri.rstrip("/").rpartition("/")
    return (folder, name) if step_of_folder_name(name) is not None else (uri.rstrip("/"), "")


def resume_source(uri: str, *, is_synced: bool) -> ResumeSource:
    """Return the checkpoints at a uri in `checkpoint.resume`: a folder of checkpoints, or a single one.

    With `is_synced` the job is a script on SageMaker. Such jobs have two folders, and the uri may name either.
    """
    folder, name = split_checkpoint(uri)
    if not is_synced:
        return ResumeSource(folder, uri.rstrip("/"))
    synced = synced_folder_of(folder)
    direct = direct_folder_of(folder) if synced is None else folder
    return ResumeSource(synced or folder, f"{direct}/{name}" if name else direct)


def syncs_checkpoints(spec: JobSpec) -> bool:
    """Return whether SageMaker syncs /opt/ml/checkpoints with S3.

    It does for scripts, which save there, and for isolated containers, which have no S3. The shared entrypoint writes
    to S3 itself.
    """
    return spec.code.script is not None or spec.cluster.network.isolation


def synced_resume_folder(spec: JobSpec, resumed: ResumeSource | None) -> str | None:
    """Return the folder in which a job continues an earlier run: unlike a Task, a script has one folder."""
    return resumed.folder if resumed is not None and syncs_checkpoints(spec) else None


def s3_locations(spec: JobSpec, settings: Settings, digest: str, run: str, resumed: ResumeSource | None) -> Locations:
    """Return the locations of a run in S3. Runs share code with the same digest."""
    base = f"s3://{settings.bucket or PLACEHOLDER_BUCKET}/{settings.prefix}".rstrip("/")
    own, given = f"{base}/{run}/checkpoints", spec.checkpoint.uri
    is_new = spec.checkpoint.resume == "never"
    # SageMaker downloads all of the folder at the start, so that a new training has a folder of its own.
    separate = f"{given.rstrip('/')}/{run}" if given is not None and is_new and syncs_checkpoints(spec) else given
    checkpoints = (synced_resume_folder(spec, resumed) or separate or own).rstrip("/")
    direct = _unless_resumed(given or own, own, resumed)
    shared = direct_folder_of(direct) + (f"/{run}" if direct != own and is_new else "")
    return Locations(
        code=f"{base}/code/{digest}/{BUNDLE_FILE}",
        config=f"{base}/{run}/config",
        output=base,
        checkpoints=checkpoints,
        saves=_saves(spec, task=checkpoints, script=shared),
        channels={
            name: channel.uri if channel.is_s3 else f"{base}/{run}/data/{name}/" for name, channel in spec.data.items()
        },
    )


def local_locations(spec: JobSpec, home: Path, digest: str, run: str, resumed: ResumeSource | None) -> Locations:
    """Return the locations of a local run below `home`, the folder of local runs."""
    root = home.resolve()
    base = (root / "runs" / run).as_uri()
    own = f"{base}/checkpoints"
    given = own if spec.checkpoint.uri is None else _local_uri(spec, spec.checkpoint.uri)
    checkpoints = synced_resume_folder(spec, resumed) or given
    return Locations(
        code=(root / "bundles" / digest / BUNDLE_FILE).as_uri(),
        config=f"{base}/config",
        output=(root / "runs").as_uri(),
        checkpoints=checkpoints,
        saves=_saves(spec, task=checkpoints, script=_unless_resumed(given, own, resumed)),
        channels={name: _local_uri(spec, channel.uri) for name, channel in spec.data.items()},
    )


def _saves(spec: JobSpec, *, task: str, script: str) -> str:
    if spec.cluster.network.isolation:
        return ""
    return task if spec.code.script is None else script


def _unless_resumed(uri: str, own: str, resumed: ResumeSource | None) -> str:
    """Return a uri, or the run's own folder where it is that of an earlier run, which may still be active."""
    return own if resumed is not None and uri.rstrip("/") == resumed.folder.rstrip("/") else uri


def _local_uri(spec: JobSpec, uri: str) -> str:
    return uri if "://" in uri else (spec.base / uri).resolve().as_uri()
