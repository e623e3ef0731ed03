"""Storage layout of a run: uris in S3 for a cluster, and below one folder for a local run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import Diagnostics
from cloudtrain.planning.request import Locations
from cloudtrain.settings.settings import Settings
from cloudtrain.support.run_id import is_run_id
from cloudtrain_runtime.contract import BUNDLE_FILE
from cloudtrain_runtime.contract.manifest import step_of_folder_name

PLACEHOLDER_BUCKET = "cloudtrain-bucket"
_STEPS = "steps"


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
    """Return the checkpoints at a uri in `checkpoint.resume`.

    Args:
        uri: Uri of a folder of checkpoints, or of a single checkpoint.
        is_synced: Whether the job is a script on SageMaker. Such jobs have two folders, and the uri may name either.
    """
    folder, name = split_checkpoint(uri)
    if not is_synced:
        return ResumeSource(folder, uri.rstrip("/"))
    synced = synced_folder_of(folder)
    direct = direct_folder_of(folder) if synced is None else folder
    return ResumeSource(synced or folder, f"{direct}/{name}" if name else direct)


def resolve_resume(spec: JobSpec, diagnostics: Diagnostics) -> str:
    """Return `checkpoint.resume` as `auto`, `never` or a uri; a run id, which was not found, becomes an error."""
    resume = spec.checkpoint.resume
    if resume.startswith("/"):
        return Path(resume).as_uri()
    if is_run_id(resume.rpartition(":")[2]):
        diagnostics.add_error(("checkpoint", "resume"), f"there is no run {resume} here", "see: cloudtrain list")
    return resume


def s3_locations(
    spec: JobSpec,
    settings: Settings,
    digest: str,
    run: str,
    resume_folder: str | None,
    diagnostics: Diagnostics,
    *,
    is_separate: bool,
) -> Locations:
    """Return the locations of a run in S3. Runs share code with the same digest.

    Args:
        spec: The job.
        settings: The account.
        digest: Digest of the code.
        run: Run id.
        resume_folder: Folder of the earlier run, in which a script continues: unlike a Task, a script has one folder.
        diagnostics: Collects errors and warnings.
        is_separate: Use a separate folder per run, so that SageMaker does not download an earlier run's checkpoints.
    """
    base = f"s3://{settings.bucket or PLACEHOLDER_BUCKET}/{settings.prefix}".rstrip("/")
    if spec.checkpoint.uri is not None and not spec.checkpoint.uri.startswith("s3://"):
        diagnostics.add_error(
            ("checkpoint", "uri"), "a cluster saves checkpoints to S3", "use s3://bucket/prefix, or leave it out"
        )
    checkpoints = spec.checkpoint.uri
    if resume_folder is not None and checkpoints is not None and checkpoints.rstrip("/") != resume_folder.rstrip("/"):
        diagnostics.add_warning(
            f"a script or isolated job has one folder: it resumes and saves in {resume_folder}, not in {checkpoints}"
        )
    if is_separate and checkpoints is not None:
        checkpoints = f"{checkpoints.rstrip('/')}/{run}"  # SageMaker downloads all of the folder at the start
    if spec.checkpoint.resume.startswith(("/", "file:")):
        diagnostics.add_error(
            ("checkpoint", "resume"), "a cluster cannot read a path on this machine", "copy it to S3 first"
        )
    return Locations(
        code=f"{base}/code/{digest}/{BUNDLE_FILE}",
        config=f"{base}/{run}/config",
        output=base,
        checkpoints=(resume_folder or checkpoints or f"{base}/{run}/checkpoints").rstrip("/"),
        channels={
            name: channel.uri if channel.is_s3 else f"{base}/{run}/data/{name}/" for name, channel in spec.data.items()
        },
    )


def local_locations(
    spec: JobSpec, digest: str, run: str, home: Path | None, resume_folder: str | None, diagnostics: Diagnostics
) -> Locations:
    """Return the locations of a local run.

    Args:
        spec: The job.
        digest: Digest of the code.
        run: Run id.
        home: Folder of local runs; by default `.cloudtrain` in the working folder.
        resume_folder: Folder of the earlier run, in which a script continues.
        diagnostics: Collects errors and warnings.
    """
    root = (home or Path(".cloudtrain")).resolve()
    base = (root / "runs" / run).as_uri()
    for name, channel in spec.data.items():
        if channel.mode == "Pipe" and spec.train is None:  # `check_abilities` rejects it for a Task
            diagnostics.add_error(("data", name, "mode"), "local runs do not support Pipe mode", "use File or FastFile")
    return Locations(
        code=(root / "bundles" / digest / BUNDLE_FILE).as_uri(),
        config=f"{base}/config",
        output=(root / "runs").as_uri(),
        checkpoints=resume_folder or _local_checkpoints(spec, f"{base}/checkpoints", diagnostics),
        channels={name: _local_uri(spec, channel.uri) for name, channel in spec.data.items()},
    )


def _local_checkpoints(spec: JobSpec, default: str, diagnostics: Diagnostics) -> str:
    uri = spec.checkpoint.uri
    if uri is None:
        return default
    if uri.startswith("s3://") and spec.code.script is not None:
        message = "a script's checkpoints stay on this machine in a local run"
        diagnostics.add_error(("checkpoint", "uri"), message, "leave it out: --set checkpoint.uri=null")
    return uri if "://" in uri else (spec.base / uri).resolve().as_uri()


def script_checkpoint_uri(
    spec: JobSpec,
    locations: Locations,
    run: str,
    resume_folder: str | None,
    diagnostics: Diagnostics,
    *,
    is_local: bool,
) -> str:
    """Return the uri to which a script saves through `cloudtrain_runtime.checkpoint`.

    A run that resumes from another run's folder saves to its own folder, because the other run may still be active.
    """
    default = f"{locations.output}/{run}/checkpoints"
    own = _local_checkpoints(spec, default, diagnostics) if is_local else spec.checkpoint.uri or default
    if resume_folder is not None and own.rstrip("/") == resume_folder.rstrip("/"):
        own = default
    if is_local:
        return own
    shares = own != default and spec.checkpoint.resume == "never"
    return f"{direct_folder_of(own)}/{run}" if shares else direct_folder_of(own)


def _local_uri(spec: JobSpec, uri: str) -> str:
    return uri if uri.startswith("s3://") else (spec.base / uri).resolve().as_uri()
