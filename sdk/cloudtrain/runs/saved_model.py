"""The model of a run: its code and weights in files, and as an object of this process."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from cloudtrain.bundle.unpacking import UnpackError, unpack
from cloudtrain.errors import MissingExtraError, UserError
from cloudtrain.runs.checkpoints import TORCH, CheckpointFolder, step_number
from cloudtrain.runs.downloads import BEST, Download, RunStorage
from cloudtrain.runs.evaluations import evaluated_by
from cloudtrain.runs.file_transfer import open_source
from cloudtrain.runs.previous_run import checkpoints_of
from cloudtrain.runs.result_parts import CHECKPOINTS, MODEL
from cloudtrain.support.installation import install_command
from cloudtrain_runtime.contract import (
    BUNDLE_FILE,
    CODE_CHANNEL,
    INCLUDE_FOLDER,
    MODEL_FILE,
    WORKER_SCRIPT,
)

if TYPE_CHECKING:
    from torch import nn

_RUNTIME: Final = "cloudtrain_runtime"


class ModelSource(Protocol):
    """The run whose model is wanted: see `Run`."""

    id: str

    def plan_document(self) -> Mapping[str, Any]:
        """Return the run's plan.json."""

    def storage(self) -> RunStorage:
        """Return where the run's results are."""

    def download(
        self, to: str | Path | None = None, *, what: Iterable[str] = (), unpack: bool = False
    ) -> Download:
        """Copy what the run has stored into a folder."""


def task_of(
    run: str, plan: Mapping[str, Any], purpose: str, hint: str
) -> tuple[str, Mapping[str, Any]]:
    """Return the Task that a run has trained, as `module:Class`, and its arguments.

    Args:
        run: The run id.
        plan: The run's plan.json.
        purpose: What only the model of a Task can be, such as `served`.
        hint: What to do with the model of a script.

    Raises:
        UserError: it trained no Task.
    """
    config = plan.get("config") or {}
    if evaluated := evaluated_by(plan):
        raise UserError(
            f"{run} evaluates {evaluated} and has no model", f"name that run: {evaluated}"
        )
    if not config.get("task"):
        raise UserError(
            f"{run} trained a script, and only the model of a Task can be {purpose}", hint
        )
    return config["task"], config.get("args") or {}


def unpack_code(run: ModelSource, plan: Mapping[str, Any], folder: Path) -> None:
    """Unpack the code of a run into a new folder, without the runtime that was sent with it.

    Raises:
        UserError: it is missing or no archive.
        CloudError: it is in S3, which refused or cannot be reached.
    """
    channels = plan["request"].get("InputDataConfig") or []
    uri = next(
        (
            each["DataSource"]["S3DataSource"]["S3Uri"]
            for each in channels
            if each["ChannelName"] == CODE_CHANNEL
        ),
        "",
    )
    place = str(uri).removesuffix(BUNDLE_FILE).rstrip("/")
    source = open_source(place, run.storage().make_s3)
    folder.mkdir()
    archive = folder.parent / BUNDLE_FILE
    try:
        for _ in source.fetch([(BUNDLE_FILE, archive)], lambda _: None):
            pass
        unpack(archive, folder)
    except UnpackError as error:
        raise UserError(f"the code of {run.id} at {place} cannot be used: {error}") from None
    finally:
        archive.unlink(missing_ok=True)
    shutil.rmtree(folder / _RUNTIME, ignore_errors=True)
    (folder / WORKER_SCRIPT).unlink(missing_ok=True)
    included = folder / INCLUDE_FOLDER
    if not included.is_dir():
        return
    for path in included.iterdir():
        if not (folder / path.name).exists():
            path.rename(folder / path.name)


def write_weights(
    run: ModelSource, plan: Mapping[str, Any], target: Path, checkpoint: int | str | None
) -> None:
    """Write the weights of a run's model to a file that `torch.load` reads.

    Args:
        run: The run.
        plan: Its plan.json.
        target: The file.
        checkpoint: Step of a checkpoint, or `best`; None takes the weights that the run exported at its end.

    Raises:
        UserError: the run has no such weights.
        CloudError: they are in S3, which refused or cannot be reached.
    """
    if checkpoint is not None:
        run.storage().require_stored(run.id, CHECKPOINTS)
        saved = checkpoints_of(plan, run.id)
        folder = CheckpointFolder(saved.checkpoints, saved.run, run.storage().environ)
        step = _best_step(folder, run.id) if checkpoint == BEST else step_number(checkpoint)
        folder.export(TORCH, step=step, target=target)
        return
    with tempfile.TemporaryDirectory(prefix="cloudtrain-model-") as temporary:
        done = run.download(temporary, what=(MODEL,), unpack=True)
        files = {path.name: path for path in Path(temporary).rglob(MODEL_FILE)}
        if MODEL_FILE not in files:
            names = ", ".join(sorted(each.path for each in done.files)) or "nothing"
            raise UserError(
                f"the model of {run.id} has no {MODEL_FILE}; it has {names}",
                "take a checkpoint: --checkpoint STEP",
            )
        shutil.copyfile(files[MODEL_FILE], target)


def _best_step(folder: CheckpointFolder, run: str) -> int:
    found = next((each for each in folder.list() if each.best and each.is_complete), None)
    if found is None:
        raise UserError(
            f"{run} has no checkpoint that is marked as best",
            f"train with train.export: best, or name a step: cloudtrain checkpoints {run}",
        )
    return found.step


def load_model(run: ModelSource, checkpoint: int | str | None) -> nn.Module:
    """Return the model of a run: see `Run.load_model`."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("a model needs torch", install_command("local"))
    from cloudtrain_runtime.errors import JobError
    from cloudtrain_runtime.serving.model_loading import load_model

    plan = run.plan_document()
    hint = f"download its files: cloudtrain download {run.id} --what {MODEL}"
    task, arguments = task_of(run.id, plan, "loaded", hint)
    folder = Path(tempfile.mkdtemp(prefix="cloudtrain-model-"))
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        unpack_code(run, plan, folder / "code")
        write_weights(run, plan, folder / MODEL_FILE, checkpoint)
        with _importable(folder / "code"):
            try:
                model = load_model(task, arguments, folder / MODEL_FILE)
            except JobError as error:
                raise UserError(f"the model of {run.id} cannot be created: {error}") from None
            except ModuleNotFoundError as error:
                raise UserError(
                    f"the code of {run.id} needs {error.name}, which is not installed here"
                ) from None
        # Its code is read again for a traceback, or by an import within a function.
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        undo.pop_all()
    return model


@contextlib.contextmanager
def _importable(code: Path) -> Iterator[None]:
    """Import modules from a code folder, also where this process has others of the same names."""
    names = {path.stem for path in code.iterdir() if path.suffix == ".py" or path.is_dir()}
    names -= sys.stdlib_module_names
    others = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] in names
    }
    for name in others:
        del sys.modules[name]
    sys.path.insert(0, str(code))
    try:
        with contextlib.chdir(code):
            yield
    finally:
        sys.path.remove(str(code))
        sys.modules.update(others)
