"""Export of a Task's language model in Hugging Face's layout, which vLLM serves.

    python -m cloudtrain_runtime.serving.hugging_face PACKAGE FOLDER

The Task's model must have `save_pretrained`, as those of transformers do, and the Task an attribute `tokenizer`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cloudtrain_runtime.checkpoint.initial_weights import load_initial_weights
from cloudtrain_runtime.contract import MODEL_FILE
from cloudtrain_runtime.errors import JobError, TaskError
from cloudtrain_runtime.process.run_context import context
from cloudtrain_runtime.serving.predictor import load_folder
from cloudtrain_runtime.task import checked_model
from cloudtrain_runtime.training.task_loading import load_task


def export(package: Path, folder: Path) -> None:
    """Write the model and tokenizer of a package into a folder.

    Raises:
        JobError: the Task has no such model or tokenizer, or the weights do not fit.
    """
    config = load_folder(package)
    task = load_task(config.task, config.args)
    model: Any = checked_model(task)
    tokenizer: Any = getattr(task, "tokenizer", None)
    for name, part in (("model", model), ("tokenizer", tokenizer)):
        if not hasattr(part, "save_pretrained"):
            raise TaskError(
                f"{config.task}: its {name} has no save_pretrained(), as those of transformers do"
            )
    load_initial_weights(model, str(package / MODEL_FILE), context())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Export, or print the reason on standard error."""
    package, folder = (Path(each).resolve() for each in sys.argv[1:3])
    try:
        export(package, folder)
    except JobError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
