"""Export of a language model to safetensors in Hugging Face's layout, which vLLM's image serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from cloudtrain.errors import UserError
from cloudtrain.features.serving.package import ServingOptions, digest_folder, make_package
from cloudtrain.runs.run import Run

_CONFIG: Final = "config.json"
_WEIGHTS: Final = ".safetensors"
_TAIL_CHARACTERS: Final = 2000
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def export_model(run: Run, folder: Path, checkpoint: int | str | None) -> tuple[Path, str]:
    """Write the model of a run in Hugging Face's layout into a folder; return the folder and its digest.

    A Task's model and tokenizer are exported by `save_pretrained`. A script saves both to the model folder itself.

    Raises:
        UserError: the run's model has another layout.
    """
    if (run.plan_document().get("config") or {}).get("task"):
        _export_task(run, folder, checkpoint)
        return folder, digest_folder(folder)
    if checkpoint is not None:
        raise UserError(
            "--engine vllm serves the model folder of a script's run", "leave out --checkpoint"
        )
    with tempfile.TemporaryDirectory(prefix="cloudtrain-model-") as temporary:
        run.download(temporary, what=("model",), unpack=True)
        root = _find_root(Path(temporary), run)
        folder.mkdir(parents=True)
        for path in sorted(root.iterdir()):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    return folder, digest_folder(folder)


def _export_task(run: Run, folder: Path, checkpoint: int | str | None) -> None:
    """Export the model of a Task in a process of its own: it imports the run's code."""
    with tempfile.TemporaryDirectory(prefix="cloudtrain-package-") as temporary:
        package = Path(temporary) / "package"
        make_package(run, package, ServingOptions(checkpoint=checkpoint))
        command = [
            sys.executable,
            "-m",
            "cloudtrain_runtime.serving.hugging_face",
            str(package),
            str(folder),
        ]
        environ = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=package, env=environ, capture_output=True, text=True, check=False
        )
    if done.returncode:
        why = done.stderr.strip()[-_TAIL_CHARACTERS:].removeprefix("error: ")
        raise UserError(
            f"the model of {run.id} cannot be exported: {why}", "serve it with --engine ray"
        )


def _find_root(downloaded: Path, run: Run) -> Path:
    """Return the folder with the model, the highest one that has the layout."""
    found = sorted(downloaded.rglob(_CONFIG), key=lambda path: len(path.parts))
    for config in found:
        names = {path.name for path in config.parent.iterdir()}
        if any(name.endswith(_WEIGHTS) for name in names) and names & set(_TOKENIZERS):
            return config.parent
    raise UserError(
        f"the model of {run.id} is not in Hugging Face's layout: {_CONFIG}, a tokenizer and *{_WEIGHTS}",
        "save model and tokenizer with save_pretrained(context().model_dir)",
    )
