"""One per rank: trains the Task, or runs the user's script unchanged."""

from __future__ import annotations

import gc
import os
import runpy
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from cloudtrain_runtime.context import context, read_run_config, torchrun_variables
from cloudtrain_runtime.contract import RunConfig


@record
def main() -> None:
    """Run this rank. An exception's traceback goes to torchrun's error file, and from there to `output/failure`."""
    config = read_run_config(os.environ)
    if config is None:
        sys.exit("no run.json: this script is started by cloudtrain's launcher or by AWS's training toolkit")
    os.environ.update(torchrun_variables(os.environ))
    code = str(Path.cwd())
    if code not in sys.path:
        sys.path.insert(0, code)
    if config.script is not None:
        run_script(config)
    else:
        run_task(config)


def run_script(config: RunConfig) -> None:
    """Run the user's script as `python script.py ARGS` would."""
    script = Path(config.script or "").absolute()
    sys.argv = [str(script), *(config.args if isinstance(config.args, list) else [])]
    sys.path[0] = str(script.parent)
    code: str | int | None = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exit_:
        code = exit_.code
    # What the script has left in its globals goes now. A process group that is still held by a model there would
    # otherwise be destroyed while the interpreter shuts down, and abort a run that had succeeded: with Gloo, plain
    # torchrun 2.13 fails so in up to half of the runs of an ordinary script (the cause is that of pytorch#179291).
    gc.collect()
    if code:
        sys.exit(code)


def run_task(config: RunConfig) -> None:
    """Train the Task."""
    from cloudtrain_runtime import parallel
    from cloudtrain_runtime.loop import Trainer
    from cloudtrain_runtime.task import load_task

    if config.task is None or config.train is None or not isinstance(config.args, dict):
        raise ValueError("run.json has neither a script nor a Task with a train section")
    place = context()
    checkpoint = config.checkpoint
    if not checkpoint.uri:
        from dataclasses import replace

        checkpoint = replace(checkpoint, uri=str(place.checkpoint_dir))
    with parallel.process_group(place):
        task = load_task(config.task, config.args)
        Trainer(task, config.train, checkpoint, place).run()
    gc.collect()  # as above


if __name__ == "__main__":
    main()
