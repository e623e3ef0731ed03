"""Checkpoints as they lie in a folder or in S3: listed, found, verified, exported.

The runtime reads them, in a process of its own: the rules by which one is whole exist once, and this process needs
neither torch nor what else they are read with.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloudtrain.errors import (
    CloudError,
    CloudtrainError,
    DamagedCheckpointError,
    MissingExtraError,
    UserError,
)

COMPLETE: Final = "complete"
DAMAGED: Final = "damaged"
UNREADABLE: Final = "unreadable"
SAFETENSORS: Final = "safetensors"
TORCH: Final = "torch"
_SUFFIXES: Final = {SAFETENSORS: ".safetensors", TORCH: ".pt"}

Progress = Callable[[int, int], None]
"""Told how many bytes have been read, and how many there are."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint as it lies there.

    Attributes:
        step: Optimizer steps done.
        name: Its folder.
        state: `complete`, `unfinished` or `damaged`; after a verification also `unreadable`: its bytes are those that
            were written, and this version of PyTorch cannot load them.
        why: Why it is not complete, or what a verification could not compare; else empty.
        bytes: Size of all its files.
        files: Their number.
        run: Run that has written it, or None where nothing tells.
        time: When it was complete, in seconds since 1970.
        torch: Version of PyTorch that has written it.
        best: Whether it has the best weights of its run so far, where the run looks for them (`train.export: best`).
    """

    step: int
    name: str
    uri: str
    state: str
    why: str
    bytes: int
    files: int
    run: str | None = None
    time: float | None = None
    world_size: int | None = None
    torch: str | None = None
    best: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether a run can go on from it, as far as is known."""
        return self.state == COMPLETE

    def age_seconds(self, now: float | None = None) -> float | None:
        """Return how long ago it was complete; None when it is not."""
        return None if self.time is None else max(0.0, (time.time() if now is None else now) - self.time)

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return its entry in `checkpoints --json`."""
        age = self.age_seconds(now)
        return {
            "step": self.step,
            "name": self.name,
            "uri": self.uri,
            "state": self.state,
            "why": self.why,
            "bytes": self.bytes,
            "files": self.files,
            "time": self.time,
            "age_seconds": None if age is None else round(age, 1),
            "world_size": self.world_size,
            "torch": self.torch,
            "run": self.run,
            "best": self.best,
        }


@dataclass(frozen=True)
class ExportedCheckpoint:
    """A file that was made of a checkpoint.

    Attributes:
        elements: Numbers in all tensors together.
        skipped: Names of what is no tensor and was left out.
    """

    path: Path
    checkpoint: SavedCheckpoint
    bytes: int
    tensors: int
    elements: int
    skipped: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that `checkpoints export --json` prints."""
        return {
            "path": str(self.path),
            "checkpoint": self.checkpoint.to_json(),
            "bytes": self.bytes,
            "tensors": self.tensors,
            "elements": self.elements,
            "skipped": list(self.skipped),
        }


@dataclass(frozen=True)
class CheckpointFolder:
    """A place where checkpoints lie.

    Attributes:
        uri: `s3://bucket/prefix`, `file:///...` or a path; of a folder of checkpoints or of one of them.
        run: Whose checkpoints are meant where several runs share the folder; an empty string for any.
        environ: Environment of the process that reads them: credentials, region and endpoint.
    """

    uri: str
    run: str = ""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    def list(self) -> tuple[SavedCheckpoint, ...]:
        """Return all that lie there, of whatever run, the newest step first.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        return _entries(self._ask("list"))

    def find(self, step: int | None = None) -> SavedCheckpoint:
        """Return the run's newest complete checkpoint, or its complete one of a step.

        Raises:
            UserError: there is none; the message names the nearest.
            CloudError: AWS refused or cannot be reached.
        """
        return SavedCheckpoint(**self._ask("find", *self._of(step))["checkpoint"])

    def verify(self, step: int | None = None, progress: Progress | None = None) -> tuple[SavedCheckpoint, ...]:
        """Compare every block with what was written, and parse what a load parses; return what is known then.

        Raises:
            UserError: there is none, or none of this step.
            CloudError: AWS refused or cannot be reached.
        """
        asked = () if step is None else ("--step", str(step))
        return _entries(self._ask("verify", *asked, progress=progress))

    def export(
        self, form: str, *, step: int | None = None, target: Path | None = None, part: str = "model"
    ) -> ExportedCheckpoint:
        """Write the tensors of a checkpoint, each of them whole, into one file.

        Args:
            form: `safetensors` or `torch`.
            step: Of which; by default the newest complete one.
            target: The file; by default named after run and step, here.
            part: `model` for its weights, or `all`.

        Raises:
            MissingExtraError: torch or safetensors is not installed.
            UserError: there is no such checkpoint, it holds no model, or the file is there already.
            DamagedCheckpointError: it is not what was written.
            CloudError: AWS refused or cannot be reached.
        """
        _require_parts(form)
        if target is not None:
            _refuse_existing(target)
        found = self.find(step)
        path = target or Path(f"{found.run or 'checkpoint'}-{found.name}{_SUFFIXES[form]}")
        _refuse_existing(path)
        one = CheckpointFolder(found.uri, environ=self.environ)
        told = one._ask("export", "--to", form, "--part", part, "--output", str(path.absolute()))
        return ExportedCheckpoint(
            path=path,
            checkpoint=SavedCheckpoint(**told["checkpoint"]),
            bytes=told["bytes"],
            tensors=told["tensors"],
            elements=told["elements"],
            skipped=tuple(told["skipped"]),
        )

    def _of(self, step: int | None) -> tuple[str, ...]:
        asked = () if step is None else ("--step", str(step))
        return (*asked, "--run", self.run)

    def _ask(self, verb: str, *arguments: str, progress: Progress | None = None) -> dict[str, Any]:
        """Let the runtime answer.

        Raises:
            CloudtrainError: of the kind that it tells.
        """
        # -P: what lies in the working folder must not be imported.
        command = [sys.executable, "-P", "-m", "cloudtrain_runtime.checkpoint.inspection", verb, self.uri, *arguments]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True, env=self.environ
            ) as process:
                answer = _last(process, progress)
            errors.seek(0)
            if answer is None:
                raise CloudtrainError(f"{self.uri} could not be read:\n{errors.read()[-2000:].strip()}")
        if answer["event"] == "error":
            raise self._refusal(answer["kind"], answer["message"])
        return answer

    def _refusal(self, kind: str, message: str) -> CloudtrainError:
        if kind == "input":
            return UserError(message, f"see what is there: cloudtrain checkpoints {self.run or self.uri}")
        if kind == "damaged":
            hint = f"see which others there are: cloudtrain checkpoints verify {self.run or self.uri}"
            return DamagedCheckpointError(f"the checkpoint {self.uri} is damaged: {message}", hint)
        if self.uri.startswith("s3://"):
            return CloudError(f"{self.uri}: {message}", "check the credentials, the region and AWS_ENDPOINT_URL")
        return UserError(f"{self.uri}: {message}")


def _entries(answer: Mapping[str, Any]) -> tuple[SavedCheckpoint, ...]:
    return tuple(SavedCheckpoint(**entry) for entry in answer["checkpoints"])


def _last(process: subprocess.Popen[str], progress: Progress | None) -> dict[str, Any] | None:
    """Return the answer that comes last, or None when the process ended without one."""
    for event in _events(process):
        if event["event"] != "progress":
            return event
        if progress is not None:
            progress(event["done"], event["total"])
    return None


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a library that prints
        if isinstance(event, dict) and "event" in event:
            yield event


def _require_parts(form: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("an export needs torch", "pip install 'cloudtrain[local]'")
    if form == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        hint = "pip install 'cloudtrain[checkpoints]', or export --to torch"
        raise MissingExtraError("an export to safetensors needs safetensors", hint)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} is there already", "name another file: -o PATH")
