"""Checkpoints in a folder or in S3: list, find, verify and export.

A process of the runtime reads them, by the runtime's own rules, so that this process needs neither torch nor numpy.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cloudtrain.errors import (
    CloudError,
    CloudtrainError,
    DamagedCheckpointError,
    MissingExtraError,
    UserError,
    did_you_mean,
)
from cloudtrain.runs.previous_run import checkpoints_of
from cloudtrain.support.installation import install_command
from cloudtrain.support.shown_places import shown_place
from cloudtrain_runtime.contract.manifest import step_of_folder_name
from cloudtrain_runtime.contract.saved_checkpoint import SavedCheckpoint
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from cloudtrain.bundle import ProgressCallback

__all__ = ["SAFETENSORS", "TORCH", "CheckpointFolder", "ExportedCheckpoint", "SavedCheckpoint"]

SAFETENSORS: Final = "safetensors"
TORCH: Final = "torch"
_SUFFIXES: Final = {SAFETENSORS: ".safetensors", TORCH: ".pt"}
_PARTS: Final = ("model", "all")

HOW_TO_SAVE: Final = (
    "a script saves by cloudtrain_runtime.checkpoint; files that it writes itself are kept by code.outputs, and "
    "a run that continues by --continue finds them"
)
"""What to say where nothing was saved."""


@dataclass(frozen=True)
class ExportedCheckpoint:
    """A file that was exported from a checkpoint.

    Attributes:
        bytes: Size of the file.
        elements: Number of elements of all tensors.
        skipped: Names of entries that are no tensors and were skipped.
    """

    path: Path
    checkpoint: SavedCheckpoint
    bytes: int
    tensors: int
    elements: int
    skipped: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that `checkpoints export --json` prints."""
        return {**asdict(self), "path": str(self.path), "checkpoint": self.checkpoint.to_json()}


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Attributes:
        uri: `s3://bucket/prefix`, `file:///...` or a path of a folder of checkpoints, or of one checkpoint.
        run: Only checkpoints of this run, if several runs share the folder; empty for all.
        environ: Environment of the process that reads them, with credentials, region and endpoint.
        synced: Folder that SageMaker syncs, where it is another one: `list` includes what attached trainers keep there.
        wrap: Returns the command that is executed for a command of Python; by default the same.
    """

    uri: str
    run: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    synced: str = ""
    wrap: Callable[[Sequence[str]], Sequence[str]] = field(default=tuple, repr=False, compare=False)

    @classmethod
    def of_plan(
        cls, plan: Mapping[str, Any], run: str, environ: Mapping[str, str]
    ) -> CheckpointFolder:
        """Return the folder in which a run saves, by its plan.json.

        Raises:
            RunNotFoundError: the plan does not contain the location.
        """
        saved = checkpoints_of(plan, run)
        return cls(saved.checkpoints, saved.run, environ, saved.folder)

    def list(self) -> tuple[SavedCheckpoint, ...]:
        """Return the checkpoints of all runs, newest step first, and those that attached trainers keep.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        found = tuple(SavedCheckpoint(**entry) for entry in self._call("list")["checkpoints"])
        if self.synced not in ("", self.uri):
            others = replace(self, uri=self.synced, synced="").list()
            found += tuple(each for each in others if step_of_folder_name(each.name) is None)
        return tuple(sorted(found, key=lambda each: -each.step))

    def find(self, step: int | None = None) -> SavedCheckpoint:
        """Return the run's newest complete checkpoint, or the complete one of a step.

        Raises:
            UserError: there is none; the message names the nearest ones.
            CloudError: AWS refused or cannot be reached.
        """
        return SavedCheckpoint(
            **self._call("find", *_option(step), "--run", self.run)["checkpoint"]
        )

    def verify(
        self, step: int | None = None, progress: ProgressCallback | None = None
    ) -> tuple[SavedCheckpoint, ...]:
        """Verify the checksum of every block and parse what a load parses; return the checkpoints with their states.

        Args:
            step: Only the checkpoint of this step.
            progress: Callback `(bytes_done, bytes_total)`.

        Raises:
            UserError: there is none, or none of this step.
            CloudError: AWS refused or cannot be reached.
        """
        answer = self._call("verify", *_option(step), progress=progress)
        return tuple(SavedCheckpoint(**entry) for entry in answer["checkpoints"])

    def export(
        self,
        form: str,
        *,
        step: int | None = None,
        target: str | Path | None = None,
        part: str = "model",
    ) -> ExportedCheckpoint:
        """Write the tensors of a checkpoint, unsharded, into one file.

        Args:
            form: `safetensors` or `torch`.
            step: Step of the checkpoint; by default the newest complete one.
            target: The file; by default in the working folder, named after run and step.
            part: `model` for the weights, or `all`.

        Raises:
            MissingExtraError: torch or safetensors is not installed.
            UserError: there is no such form, part or checkpoint, it contains no model, or the file exists already.
            DamagedCheckpointError: the checkpoint is damaged.
            CloudError: AWS refused or cannot be reached.
        """
        for given, legal in ((form, tuple(_SUFFIXES)), (part, _PARTS)):
            if given not in legal:
                hint = did_you_mean(str(given), legal, f"one of {', '.join(legal)}")
                raise UserError(f"a checkpoint cannot be exported as {given!r}", hint)
        _require_packages(form)
        if target is not None:
            target = Path(target)
            _refuse_existing(target)
        found = self.find(step)
        path = target or Path(f"{found.run or 'checkpoint'}-{found.name}{_SUFFIXES[form]}")
        _refuse_existing(path)
        folder = CheckpointFolder(found.uri, environ=self.environ)
        done = folder._call(
            "export", "--to", form, "--part", part, "--output", str(path.absolute())
        )
        return ExportedCheckpoint(
            path=path,
            checkpoint=SavedCheckpoint(**done["checkpoint"]),
            bytes=done["bytes"],
            tensors=done["tensors"],
            elements=done["elements"],
            skipped=tuple(done["skipped"]),
        )

    def _call(
        self, verb: str, *arguments: str, progress: ProgressCallback | None = None
    ) -> dict[str, Any]:
        """Run a command of the runtime and return its result.

        Raises:
            CloudtrainError: the command failed; the class depends on the reported kind of error.
        """
        # -P: modules in the working folder must not be imported.
        command = [
            sys.executable,
            "-P",
            "-m",
            "cloudtrain_runtime.checkpoint.inspection",
            verb,
            self.uri,
            *arguments,
        ]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            with subprocess.Popen(
                self.wrap(command),
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                text=True,
                env=self.environ,
            ) as process:
                answer = _read_result(process, progress)
            errors.seek(0)
            if answer is None:
                raise CloudtrainError(
                    f"{self.uri} could not be read:\n{errors.read()[-2000:].strip()}"
                )
        if answer["event"] == "error":
            raise self._make_error(answer["kind"], answer["message"])
        return answer

    def _make_error(self, kind: str, message: str) -> CloudtrainError:
        message = message.replace(self.uri, shown_place(self.uri))
        if kind == "empty":
            return UserError(message, HOW_TO_SAVE)
        if kind == "input":
            return UserError(
                message, f"list the checkpoints: cloudtrain checkpoints {self.run or self.uri}"
            )
        if kind == "damaged":
            hint = f"list the others: cloudtrain checkpoints verify {self.run or self.uri}"
            return DamagedCheckpointError(f"the checkpoint {self.uri} is damaged: {message}", hint)
        if self.uri.startswith("s3://"):
            return CloudError(
                f"{self.uri}: {message}", "check the credentials, the region and AWS_ENDPOINT_URL"
            )
        return UserError(f"{self.uri}: {message}")


def _option(step: int | str | None) -> tuple[str, ...]:
    return () if step is None else ("--step", str(step_number(step)))


def step_number(given: int | str) -> int:
    """Return the step that a number, or the text of one, means.

    Raises:
        UserError: It is no step.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str) and given.isdecimal():
        return int(given)
    raise UserError(f"{given!r} is no step of a checkpoint", "a step is a number, such as 1000")


def _read_result(
    process: subprocess.Popen[str], progress: ProgressCallback | None
) -> dict[str, Any] | None:
    """Return the result, which is the last event, or None if the process ended without one."""
    for line in process.stdout or ():
        try:
            event = load_json(line)
        except ValueError:
            # The output of a library.
            continue
        if not isinstance(event, dict) or "event" not in event:
            continue
        if event["event"] != "progress":
            return event
        if progress is not None:
            progress(event["done"], event["total"])
    return None


def _require_packages(form: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("an export needs torch", install_command("local"))
    if form == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        hint = f"{install_command('checkpoints')}, or export --to torch"
        raise MissingExtraError("an export to safetensors needs safetensors", hint)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} exists already", "name another file: -o PATH")
