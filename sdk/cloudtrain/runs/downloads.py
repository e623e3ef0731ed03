"""Downloads of a run's results: its model, its outputs and its checkpoints."""

from __future__ import annotations

import functools
import itertools
import shlex
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from cloudtrain.aws.s3_download import names_file
from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.runs.checkpoints import CheckpointFolder, SavedCheckpoint
from cloudtrain.runs.file_transfer import (
    CopiedFile,
    Source,
    SourceFile,
    copy_files,
    open_source,
    staging_folder,
)
from cloudtrain.runs.result_parts import CHECKPOINTS, MODEL, OUTPUTS, PARTS
from cloudtrain.runs.run_files import PLAN, read_fields
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import OUTPUTS_FOLDER
from cloudtrain_runtime.contract.manifest import MANIFEST_FILE, Manifest

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

    from cloudtrain.bundle import ProgressCallback

BEST: Final = "best"
LAST: Final = "last"

_ARCHIVE = ".tar.gz"
_UNPACKED_BYTES = 2**30
_UNPACKED_RATIO = 100
"""Largest size of an unpacked archive: so many bytes, or so many times its own. Weights shrink by less than half."""
_COPIED_BYTES = 2**20
_LAST_FILES = (MANIFEST_FILE, "cloudtrain.json")
"""The files that make a checkpoint complete."""
_WHY_MISSING: Mapping[str, str] = {
    MODEL: "a run stores its model folder when it ends, unless it is empty",
    OUTPUTS: "a run stores its output folder when it ends, unless it is empty; code.outputs keeps more files",
    CHECKPOINTS: "there is no complete checkpoint",
}


@dataclass(frozen=True)
class RunStorage:
    """Where a run's results are.

    Attributes:
        output: Uri of the folder with model.tar.gz and output.tar.gz.
        environ: Environment of a process that reads the checkpoints.
        make_s3: Returns boto3's S3 client for the run's files.
        finish: Stores what could not be stored when the run ended, and returns why a part still cannot be, by part.
            None where this is never needed.
    """

    output: str
    environ: Mapping[str, str] = field(repr=False)
    make_s3: Callable[[], S3Client]
    finish: Callable[[], Mapping[str, str]] | None = None

    def finish_storing(self) -> Mapping[str, str]:
        """Store what could not be stored when the run ended; return why a part still cannot be, by part."""
        return {} if self.finish is None else self.finish()

    def require_stored(self, run: str, *parts: str) -> None:
        """Store what could not be stored when a run ended.

        Raises:
            UserError: One of these parts still cannot be stored.
        """
        raise_unstored(run, self.finish_storing(), parts)


@dataclass(frozen=True)
class Download:
    """The results of a run in a folder.

    Attributes:
        run: The run id.
        folder: The folder.
        files: Its files, each verified.
        missing: Why a part is not among them, by part.
        left_out: Why a checkpoint of the run was left out, by its name.
    """

    run: str
    folder: Path
    files: tuple[CopiedFile, ...]
    missing: Mapping[str, str]
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `download --json` prints."""
        return {
            **asdict(self),
            "folder": str(self.folder),
            "files": [asdict(each) for each in self.files],
        }


@dataclass(frozen=True)
class Choice:
    """What to download.

    Attributes:
        parts: Parts of the results; none means all that exist.
        step: Only the checkpoint of this step, or the `best` or `last` one.
        unpack: Unpack model.tar.gz and output.tar.gz, too.
        force: Replace files with other content.

    Raises:
        UserError: there is no such part or step, or a step of another part.
    """

    parts: tuple[str, ...] = ()
    step: int | str | None = None
    unpack: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise UserError(f"a run has no part {part!r}", did_you_mean(part, PARTS))
        if self.step is not None and self.parts and CHECKPOINTS not in self.parts:
            raise UserError(
                "a step chooses a checkpoint, and checkpoints are not asked for",
                "add --what checkpoints",
            )
        if isinstance(self.step, str) and self.step not in (BEST, LAST):
            raise UserError(
                f"{self.step!r} is no step",
                did_you_mean(self.step, (BEST, LAST), "a number, best or last"),
            )


def raise_unstored(
    run: str, unstored: Mapping[str, str], parts: Iterable[str], more: str = ""
) -> None:
    """Raise a UserError if one of these parts could not be stored."""
    problems = [unstored[part] for part in parts if part in unstored]
    if problems:
        raise UserError(
            f"{run} has ended well, and not all of its results can be stored: {'; '.join(problems)}{more}",
            "free some space or repair that, and run the same command again",
        )


class RunResults:
    """The results that a run has stored so far.

    Args:
        run: The run id.
        storage: Where they are.
        read_plan: Returns the run's plan.json.
    """

    def __init__(
        self, run: str, storage: RunStorage, read_plan: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._run = run
        self._storage = storage
        self._make_s3 = functools.cache(storage.make_s3)
        self._read_plan = functools.cache(read_plan)
        self.left_out: dict[str, str] = {}

    def download(
        self, target: Path, choice: Choice, progress: ProgressCallback | None = None
    ) -> Download:
        """Copy the chosen results into a folder: see `Run.download`."""
        unstored = self._storage.finish_storing()
        found = {part: self._find(part, choice.step) for part in choice.parts or PARTS}
        missing = {
            part: f"{self._place(part)}: {_WHY_MISSING[part]}"
            for part, files in found.items()
            if not files
        }
        if not any(found.values()):
            raise_unstored(self._run, unstored, choice.parts or PARTS)
        if missing and (choice.parts or len(missing) == len(PARTS)):
            self._raise_missing(missing, found)
        with staging_folder(target) as staging:
            files = [each for part in found.values() for each in part]
            copied = copy_files(files, staging, force=choice.force, progress=progress)
            for archive in [
                each.path for each in copied if choice.unpack and _is_archive(each.path)
            ]:
                unpacked = self._open(str(_unpack(target / archive, staging / "unpacked")))
                inside = list(_all_files(unpacked, archive.removesuffix(_ARCHIVE)))
                copied += copy_files(inside, staging, force=choice.force)
        raise_unstored(self._run, unstored, choice.parts or PARTS, f"; the others are in {target}")
        return Download(self._run, target, tuple(copied), missing, self.left_out)

    def _raise_missing(
        self, missing: Mapping[str, str], found: Mapping[str, list[SourceFile]]
    ) -> None:
        others = [
            part for part in PARTS if (found[part] if part in found else self._find(part, None))
        ]
        text = "; ".join(f"no {part} at {why}" for part, why in missing.items())
        hint = f"see: cloudtrain status {self._run}"
        if others:
            hint = f"it has {' and '.join(others)}"
        raise UserError(f"{self._run} has {text}", hint)

    def _find(self, part: str, step: int | str | None) -> list[SourceFile]:
        if part == CHECKPOINTS:
            return list(self._checkpoints(step))
        found = []
        for each in _all_files(self._open(self._storage.output)):
            if each.path.startswith("."):
                continue
            # A folder `model` or an archive `model.tar.gz`; the other files are outputs.
            is_model = each.path.split("/")[0].split(".")[0] == MODEL
            if is_model == (part == MODEL):
                found.append(each)
        if part == OUTPUTS and (kept := self._kept_outputs()):
            found += _all_files(self._open(kept), OUTPUTS_FOLDER)
        return found

    def _place(self, part: str) -> str:
        if part == CHECKPOINTS:
            return self._checkpoint_folder().uri
        return self._storage.output

    def _open(self, uri: str) -> Source:
        return open_source(uri, self._make_s3)

    def _kept_outputs(self) -> str:
        """Return the uri of the files that code.outputs keeps, or an empty string."""
        try:
            plan = read_fields(self._read_plan(), PLAN)
        except UserError:
            # Another program submitted the job.
            return ""
        folder = plan.get("checkpoint", {}).get("uri", "")
        if not folder or not plan.get("config", {}).get("outputs"):
            return ""
        return f"{folder.rstrip('/')}/{OUTPUTS_FOLDER}"

    def _checkpoint_folder(self) -> CheckpointFolder:
        return CheckpointFolder.of_plan(self._read_plan(), self._run, self._storage.environ)

    def _checkpoints(self, step: int | str | None) -> Iterator[SourceFile]:
        """Yield the files of complete checkpoints, and without a step those that a script keeps beside them."""
        folder = self._checkpoint_folder()
        listed = _without_plain(folder.list())
        own = [each for each in listed if each.run in (None, folder.run)]
        complete = [each for each in own if each.is_complete]
        self.left_out = {
            each.name: f"{each.state}: {each.why}" for each in own if not each.is_complete
        }
        if step is not None:
            yield from self._files_of(_of_step(complete, step, folder))
            return
        for each in complete:
            yield from self._files_of(each)
        for uri in dict.fromkeys(each.rstrip("/") for each in (folder.synced, folder.uri)):
            yield from self._other_files(uri, {each.name for each in listed})

    def _files_of(self, checkpoint: SavedCheckpoint) -> list[SourceFile]:
        """Return the files of a checkpoint; those that make it complete are the last."""
        source = self._open(checkpoint.uri)
        files = list(_all_files(source, f"{CHECKPOINTS}/{checkpoint.name}"))
        manifest = None
        if MANIFEST_FILE in (each.name for each in files):
            try:
                manifest = Manifest.from_json(source.read(MANIFEST_FILE))
            except ValueError as error:
                raise UserError(f"{checkpoint.uri}: {error}") from None
        found = [
            SourceFile(each.path, source, each.name, each.bytes, each.modified, manifest)
            for each in files
        ]
        return sorted(found, key=lambda each: each.name in _LAST_FILES)

    def _other_files(self, uri: str, listed: set[str]) -> Iterator[SourceFile]:
        """Yield the files in a folder of checkpoints that belong to none of them, nor to another run or part."""
        for each in _all_files(self._open(uri), CHECKPOINTS):
            first = each.name.split("/")[0]
            is_unfinished = first.startswith(".") and "-step-" in first
            is_others = (
                first in listed
                or is_run_id(first)
                or (first == OUTPUTS_FOLDER and self._kept_outputs())
            )
            if not is_unfinished and not is_others:
                yield each


def _without_plain(listed: tuple[SavedCheckpoint, ...]) -> list[SavedCheckpoint]:
    """Leave out folders that are named as by a trainer although none is attached: they are a script's own files."""
    of_trainers = [each for each in listed if "step-" not in each.name]
    is_attached = any(each.run is not None for each in of_trainers)
    return [each for each in listed if is_attached or each not in of_trainers]


def _all_files(source: Source, folder: str = "") -> Iterator[SourceFile]:
    prefix = f"{folder}/" if folder else ""
    return itertools.starmap(
        lambda name, size, modified: SourceFile(f"{prefix}{name}", source, name, size, modified),
        source.files(),
    )


def _of_step(
    complete: list[SavedCheckpoint], step: int | str, folder: CheckpointFolder
) -> SavedCheckpoint:
    """Return the checkpoint of a step, or the best or last one.

    Raises:
        UserError: there is none.
    """
    if step == BEST:
        fitting = [each for each in complete if each.best]
    elif step == LAST:
        fitting = complete[:1]
    else:
        fitting = [each for each in complete if each.step == step]
    if fitting:
        return fitting[0]
    steps = ", ".join(str(each.step) for each in complete)
    what = {
        BEST: "checkpoint that is marked as best (train.export: best)",
        LAST: "complete checkpoint with a step",
    }
    wanted = what.get(str(step), f"complete checkpoint of step {step}")
    hint = "without --step, all files there are downloaded"
    if steps:
        hint = f"complete: {steps}"
    raise UserError(f"{folder.run} has no {wanted} at {folder.uri}", hint)


def _is_archive(path: str) -> bool:
    return "/" not in path and path.endswith(_ARCHIVE)


def _copy(content: IO[bytes], path: Path, left: int) -> int:
    """Write a content while bytes of the limit are left; return how many are, less than 0 if it is larger."""
    with path.open("wb") as file:
        while left >= 0 and (part := content.read(_COPIED_BYTES)):
            left -= len(part)
            file.write(part)
    return left


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack the files of an archive; links become copies of the files in it.

    Raises:
        UserError: it is damaged, has a member that would be written outside of the folder, or is much larger unpacked.
    """
    target = folder / archive.name.removesuffix(_ARCHIVE)
    limit = left = max(_UNPACKED_BYTES, _UNPACKED_RATIO * archive.stat().st_size)
    try:
        with tarfile.open(archive, "r:gz") as members:
            for member in members:
                name = member.name.removeprefix("./")
                if member.isdir():
                    continue
                if not names_file(name) or not (
                    member.isfile() or member.islnk() or member.issym()
                ):
                    raise UserError(
                        f"{archive} has an unsafe member {member.name!r}; it is kept packed"
                    )
                content = members.extractfile(member)
                if content is not None:
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    left = _copy(content, target / name, left)
                if left < 0:
                    raise UserError(
                        f"{archive} has more than {format_size(limit)} unpacked; it is kept packed",
                        f"if you trust it: tar -xzf {shlex.quote(str(archive))}",
                    )
    except (
        tarfile.TarError,
        zlib.error,
        EOFError,
        OSError,
        KeyError,
        ValueError,
        RecursionError,
    ) as error:
        raise UserError(f"{archive} cannot be unpacked: {error}", "it is kept packed") from None
    return target
