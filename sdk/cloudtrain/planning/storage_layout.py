"""Where a run's things lie: in S3 for a cluster, below one folder for a local run."""

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
    """What `checkpoint.resume` has been found to mean.

    Attributes:
        folder: Folder of checkpoints that is meant: where the service syncs it, the folder that it brings back.
        steps: What the runtime reads: a folder of checkpoints, or one of them.
        run: Whose checkpoints are meant where several runs share the folder; an empty string for any.
        uploaded: What the user of that run wrote for its data, by the uri that the run has it at.
    """

    folder: str
    steps: str
    run: str = ""
    uploaded: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_one(self) -> bool:
        """Whether one checkpoint is named, not the newest of a folder."""
        return split_checkpoint(self.steps)[1] != ""


def direct_folder_of(synced: str) -> str:
    """Return where a script saves to S3 itself: `s3://bucket/run/steps/checkpoints` for `s3://bucket/run/checkpoints`.

    Beside the folder that the service syncs, never below it: the service would bring all of it to every host.
    """
    parent, _, last = synced.rstrip("/").rpartition("/")
    return f"{synced.rstrip('/')}/{_STEPS}" if parent == "s3:/" else f"{parent}/{_STEPS}/{last}"


def synced_folder_of(steps: str) -> str | None:
    """Return the folder whose `steps_beside` this is, or None when it is no such folder's."""
    parent, _, last = steps.rstrip("/").rpartition("/")
    above, _, name = parent.rpartition("/")
    return f"{above}/{last}" if name == _STEPS and above != "s3:/" else None


def split_checkpoint(uri: str) -> tuple[str, str]:
    """Return the folder of checkpoints and the name of the one that a uri names, or an empty string for none."""
    folder, _, name = uri.rstrip("/").rpartition("/")
    return (folder, name) if step_of_folder_name(name) is not None else (uri.rstrip("/"), "")


def resume_source(uri: str, *, is_synced: bool) -> ResumeSource:
    """Return what a uri in `checkpoint.resume` means.

    Args:
        uri: Of a folder of checkpoints, or of one of them.
        is_synced: Whether the job is a script on SageMaker, which has two folders: the uri may name either.
    """
    folder, name = split_checkpoint(uri)
    if not is_synced:
        return ResumeSource(folder, uri.rstrip("/"))
    synced = synced_folder_of(folder)
    steps = direct_folder_of(folder) if synced is None else folder
    return ResumeSource(synced or folder, f"{steps}/{name}" if name else steps)


def resolve_resume(spec: JobSpec, diagnostics: Diagnostics) -> str:
    """Return `auto`, `never` or a uri. A run id must have been looked up before."""
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
    go_on_in: str | None,
    diagnostics: Diagnostics,
    *,
    keeps_apart: bool,
) -> Locations:
    """Return where everything lies in S3; code is shared between runs by its digest.

    A script goes on in the folder `go_on_in`: unlike a Task it knows only one. With `keeps_apart` it must not see what
    an earlier run has left under the uri that it saves to.
    """
    base = f"s3://{settings.bucket or PLACEHOLDER_BUCKET}/{settings.prefix}".rstrip("/")
    if spec.checkpoint.uri is not None and not spec.checkpoint.uri.startswith("s3://"):
        diagnostics.add_error(("checkpoint", "uri"), "a cluster saves to S3", "use s3://bucket/prefix, or leave it out")
    saved = spec.checkpoint.uri
    if go_on_in is not None and saved is not None and saved.rstrip("/") != go_on_in.rstrip("/"):
        diagnostics.add_warning(
            f"what cannot reach S3 by itself knows one folder: it goes on in {go_on_in}, not in {saved}"
        )
    if keeps_apart and saved is not None:
        saved = f"{saved.rstrip('/')}/{run}"  # the service would bring back whatever lies in the folder itself
    if spec.checkpoint.resume.startswith(("/", "file:")):
        diagnostics.add_error(
            ("checkpoint", "resume"), "a cluster cannot read this machine's disk", "copy it to S3 first"
        )
    return Locations(
        code=f"{base}/code/{digest}/{BUNDLE_FILE}",
        config=f"{base}/{run}/config",
        output=base,
        checkpoints=(go_on_in or saved or f"{base}/{run}/checkpoints").rstrip("/"),
        channels={
            name: channel.uri if channel.is_s3 else f"{base}/{run}/data/{name}/" for name, channel in spec.data.items()
        },
    )


def local_locations(
    spec: JobSpec, digest: str, run: str, home: Path | None, go_on_in: str | None, diagnostics: Diagnostics
) -> Locations:
    """Return where everything lies on this machine."""
    root = (home or Path(".cloudtrain")).resolve()
    base = (root / "runs" / run).as_uri()
    for name, channel in spec.data.items():
        if channel.mode == "Pipe" and spec.train is None:  # with one it is refused everywhere
            diagnostics.add_error(("data", name, "mode"), "this machine has no Pipe mode", "use File or FastFile")
    return Locations(
        code=(root / "bundles" / digest / BUNDLE_FILE).as_uri(),
        config=f"{base}/config",
        output=(root / "runs").as_uri(),
        checkpoints=go_on_in or _local_checkpoints(spec, f"{base}/checkpoints", diagnostics),
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
    spec: JobSpec, locations: Locations, run: str, go_on_in: str | None, diagnostics: Diagnostics, *, is_local: bool
) -> str:
    """Return where a script saves through `cloudtrain_runtime.checkpoint`.

    A run that goes on in another's folder reads the checkpoints there and saves to its own: the other may still go on.
    """
    default = f"{locations.output}/{run}/checkpoints"
    own = _local_checkpoints(spec, default, diagnostics) if is_local else spec.checkpoint.uri or default
    if go_on_in is not None and own.rstrip("/") == go_on_in.rstrip("/"):
        own = default
    if is_local:
        return own
    shares = own != default and spec.checkpoint.resume == "never"
    return f"{direct_folder_of(own)}/{run}" if shares else direct_folder_of(own)


def _local_uri(spec: JobSpec, uri: str) -> str:
    return uri if uri.startswith("s3://") else (spec.base / uri).resolve().as_uri()
