"""Generated parts of docs/reference.

    PYTHONPATH=tests python -m support.reference_pages --write           write every page again (`make reference`)

A test compares the pages with what this module generates.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from cloudtrain.catalog import service_limits
from cloudtrain.job.request_members import DERIVED, FIELDS, REFUSED
from cloudtrain.job.schema import reference_page
from cloudtrain_runtime.contract.events import EVENTS
from cloudtrain_runtime.contract.json_checks import MismatchError, ObjectSchema, Validator
from support.command_pages import command_index, command_pages
from support.errors_page import errors_page
from support.module_index import modules_page
from support.outside_inputs import modules_table, sources_table

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
_GENERATED = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", flags=re.DOTALL)

_COMMON = ("event", "time")

EVENT_MEANINGS: Mapping[str, str] = {
    "environment": "A host is about to start its ranks: what it has. One event per host.",
    "attempt": "The ranks of a script or command start, at the start of a run or after a restart. Rank 0 prints it.",
    "started": "Training begins, at the start of a run or after a restart.",
    "step": "An optimizer step whose values are logged: the first one and every tenth.",
    "evaluation": "A split was evaluated. Each further field is the mean of the loss or of one metric.",
    "best": "An evaluation is better than all before it.",
    "skipped": "A step was left out because its gradient is not finite.",
    "checkpoint": "A checkpoint is complete.",
    "checkpoint_missed": "A checkpoint that was due was not written.",
    "checkpoint_damaged": "A checkpoint was found damaged and set aside.",
    "straggler": "A rank has become slower than the others, or has caught up again.",
    "bandwidth": "The bandwidth of an all-reduce over all ranks was measured.",
    "pipeline": "The layers were divided into pipeline stages.",
    "tracking": "A Task is logged to MLflow, or what went wrong and how many values were not logged.",
    "profile": "A rank has stored its profile.",
    "failed": "A rank or a host has failed.",
    "hang": "A host has ended its ranks because none made progress.",
    "left": "All ranks of one of several hosts have ended with exit code 0; those of other hosts may wait for them.",
    "analysis": "The predictions for a classified split, by class; after the end of the training.",
    "outputs": "The ranks of a script's host have ended: the files it created that are not kept.",
    "fresh_start": "A trainer of Transformers, TRL or Lightning begins at step 0, although its folder has a checkpoint.",
    "patterns": "The ranks have ended, and patterns of the job's `metrics` have found no value.",
    "ranks": "State of the ranks of a script on one host.",
    "leaving": "A rank has done its work, and is ended because threads or children held it for `limits.hang`.",
    "stopped": "Training ended before its last step, after a notice to stop. Rank 0 prints it when its checkpoint is saved; a "
    "host prints it when the signal has ended ranks that save nothing.",
    "finished": "Training is complete.",
}
FIELD_MEANINGS: Mapping[str, str] = {
    "held_by": "Threads and children that the rank waited for.",
    "signal": "Signal that has ended the ranks of this host, such as SIGTERM.",
    "checkpoint": "The newest checkpoint there.",
    "method": "Method of the trainer that was called.",
    "argument": "Its argument that names the checkpoint to continue from.",
    "restarts": "Restarts of the ranks in this container so far.",
    "analysis.samples": "Samples that have a class.",
    "classes": "The classes, by class number; at most 200.",
    "classes.name": "Name of the class.",
    "classes.support": "Samples of the class.",
    "classes.precision": "Share of the samples predicted as this class that belong to it; null without any.",
    "classes.recall": "Share of the samples of this class that were predicted as it; null without any.",
    "classes.f1": "Harmonic mean of precision and recall; null without samples and predictions.",
    "confusion": "Samples by true class (row) and predicted class (column); null above 50 classes.",
    "step": "Optimizer steps done.",
    "epoch": "Epochs done.",
    "host": "Host that the event is about, such as `algo-1`.",
    "rank": "Rank that the event is about.",
    "run": "Run id.",
    "total_steps": "Steps of the whole run; null when the length of the data is unknown.",
    "world_size": "Number of ranks.",
    "hosts": "Number of hosts.",
    "device": "`cuda` or `cpu`.",
    "backend": "Backend of torch.distributed: `nccl` or `gloo`.",
    "parameters": "Number of parameters of the model.",
    "train_samples": "Length of the training split; null for a stream.",
    "global_batch": "Samples of one optimizer step over all ranks.",
    "resumed_from": "Checkpoint that the run continues from, or null.",
    "step.metrics": "Further metrics that a script has reported, by name.",
    "step.total_steps": "Steps of the whole run, as a script has reported them; null when unknown.",
    "loss": "Mean loss over the samples of the step; null when it is not finite.",
    "samples_per_second": "Samples per second of all ranks together.",
    "tokens_per_second": "Tokens per second of all ranks together; null without `tokens_per_sample`.",
    "grad_norm": "Global gradient norm before clipping; null when it is not finite.",
    "data_wait": "Share of the step that waits for data, 0 to 1.",
    "mfu": "Model FLOPs utilization, 0 to 1; null when the peak of the device is unknown.",
    "memory_bytes": "Peak memory of rank 0: of its GPU, else of its process.",
    "learning_rate": "Learning rate of the step.",
    "split": "Name of the split.",
    "step.split": "Seconds of the step by part: `data`, `forward`, `backward`, `optimizer`, `checkpoint`.",
    "samples": "Samples of the split.",
    "continues": "Run whose checkpoint it continues from, or null.",
    "tracking.detail": "What went wrong.",
    "dropped": "Number of values that were not logged.",
    "tracker": "Name of the tracker: `mlflow` or `wandb`.",
    "mlflow_run": "Id of the MLflow run.",
    "wandb_run": "Id of the run at Weights & Biases.",
    "url": "Address of the run's page.",
    "files": "Folder of offline files.",
    "metric": "Metric that is compared, such as `validation/loss`.",
    "value": "Value of the metric.",
    "in_row": "Number of steps left out in a row.",
    "uri": "Where the checkpoint or the profile is.",
    "bytes": "Size in bytes.",
    "seconds": "Duration in seconds.",
    "stall_seconds": "Seconds for which training waited for the save.",
    "reason": "Short reason, such as `late`, `stalled` or `failed`.",
    "detail": "The reason in a sentence.",
    "missed": "Number of checkpoints missed in a row.",
    "repeated": "Whether the previous one had the same reason, so that `follow` and `logs` leave it out.",
    "alarm": "Whether `status` reports it as an alarm, from the third in a row on.",
    "ratio": "The rank's own time per step, as a multiple of the median of all ranks.",
    "part": "Part of the step that makes most of the difference.",
    "is_over": "Whether the rank keeps up again.",
    "gbps": "Bus bandwidth in Gbit/s.",
    "rated_gbps": "Rated bandwidth of one host's network in Gbit/s, or null.",
    "warning": "What to check when the bandwidth is far below the rating, or null.",
    "links": "Number of modules in each stage.",
    "stage_seconds": "Measured seconds of each stage.",
    "imbalance": "Slowest stage as a multiple of the mean; 1 is a perfect balance.",
    "first_step": "First step that was recorded.",
    "last_step": "Last step that was recorded.",
    "message": "What failed, in one line.",
    "exit_code": "Exit code of the process.",
    "local_rank": "Rank within the host.",
    "secondary": "Whether the failure only follows another rank's failure.",
    "failed_at": "When the rank failed, in seconds since 1970.",
    "ranks": "Number of ranks that the host started.",
    "hang.ranks": "Ranks that differ from the others.",
    "stacks": "Where the stacks of all threads are stored, or null.",
    "model_is_empty": "Whether the model folder is empty.",
    "unkept_files": "Number of files that the job created and that are not kept.",
    "unkept_bytes": "Their size in bytes.",
    "unkept": "The largest of them.",
    "unkept.path": "Name from the code folder, the home folder (`~`) or the root; a folder ends with `/`.",
    "unkept.files": "Number of files.",
    "unkept.bytes": "Size in bytes.",
    "is_complete": "Whether all files were counted within the time limit.",
    "unmatched": "Names in the job's `metrics` without a value.",
    "python": "Version of Python.",
    "driver": "Version of the host's NVIDIA driver, or null.",
    "cuda": "CUDA version that the installed torch was built for, or null.",
    "cuda_compat": "Folder of the image's own driver libraries that the ranks use, as the driver is too old; or null.",
    "gpus": "Model of each GPU.",
    "efa": "Names of the EFA devices.",
    "efa_provider": "Provider that libfabric finds for them, or null.",
    "shm_bytes": "Size of `/dev/shm` in bytes, or null.",
    "disk_free_bytes": "Free bytes of the disk of `/opt/ml`.",
    "environment.memory_bytes": "Memory of the host in bytes.",
    "packages": "Versions of the installed packages that matter, by name.",
    "warnings": "What the host lacks, a sentence each.",
    "unwritten": "Names in `code.outputs` that this host has not written.",
    "joined": "Ranks that have moved data in a process group of several ranks: by a collective other than a barrier, or DDP.",
    "alone": "Ranks that have not, so far or at their end; 0 for a script that starts its ranks itself.",
    "unused": "Ranks that have such a group, and have moved no data in it.",
    "saved": "Whether a checkpoint is complete, or a file in `/opt/ml/checkpoints` is newer than the start.",
    "progressed": "Whether a rank has reported a step; null when `limits.hang` is off.",
    "cuda_on_cpu": "Devices of CUDA per host that were the CPU (`--cuda-on-cpu`).",
    "epochs": "Epochs done.",
    "best_step": "Step of the best weights.",
    "start_step": "Step that this attempt has continued from; absent where it has begun at 0.",
    "skipped": "Number of steps left out.",
}


def pages() -> dict[Path, str]:
    """Return the expected content of each page."""
    names = ("command-line.md", "events.md", "request.md", "outside-inputs.md")
    made = {REFERENCE / name: _with_generated_parts(REFERENCE / name) for name in names}
    return {
        REFERENCE / "job-yaml.md": reference_page(),
        REFERENCE / "modules.md": modules_page(),
        REFERENCE / "errors.md": errors_page(),
        **command_pages(),
        **made,
    }


def _with_generated_parts(page: Path) -> str:
    parts = {
        "commands": command_index,
        "events": _events,
        "members": _members,
        "inputs": sources_table,
        "modules": modules_table,
    }
    return _GENERATED.sub(
        lambda found: f"{found[1]}{parts[found[2]]()}\n{found[3]}", page.read_text(encoding="utf-8")
    )


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a group and every command below it, each with its full name."""
    yield name, group
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {each}")
        elif command is not None:
            yield f"{name} {each}", command


def _events() -> str:
    return "\n".join(
        f"\n## {kind}\n\n{EVENT_MEANINGS[kind]}\n\n{_table(kind, fields)}"
        for kind, fields in EVENTS.items()
    )


def _table(kind: str, fields: ObjectSchema) -> str:
    rows = [*_rows(kind, fields, "")]
    if not rows:
        return "It has the common fields only."
    return "\n".join(["| field | type | always | |", "|---|---|---|---|", *rows])


def _rows(kind: str, fields: ObjectSchema, above: str) -> Iterator[str]:
    named = [(name, check, True) for name, check in fields.required.items()]
    named += [
        (name, check, False)
        for name, check in fields.optional.items()
        if name not in fields.required
    ]
    for name, check, is_required in named:
        path = f"{above}{name}"
        if path in _COMMON or (
            not is_required and name in ("step", "epoch", "host", "rank") and not above
        ):
            continue
        item = item_of(check)
        type_ = "list of objects" if isinstance(item, ObjectSchema) else type_of(check)
        meaning = FIELD_MEANINGS.get(f"{kind}.{path}") or FIELD_MEANINGS[path]
        yield f"| `{path}` | {type_} | {'yes' if is_required else ''} | {meaning} |"
        if isinstance(item, ObjectSchema):
            yield from _rows(kind, item, f"{path}.")


def _members() -> str:
    rows = (f"| `{member}` | {source} |" for member, source in describe_members())
    return "\n".join(["", "| member | set by |", "|---|---|", *rows])


def item_of(check: Validator) -> Any:
    """Return the schema of a list's items if they are objects, else None."""
    found = [cell.cell_contents for cell in getattr(check, "__closure__", None) or ()]
    return next((each for each in found if isinstance(each, ObjectSchema)), None)


def type_of(check: Validator) -> str:
    """Return the type that a check accepts, in words. The function tries values."""

    def accepts(value: Any) -> bool:
        with contextlib.suppress(MismatchError):
            check(value)
            return True
        return False

    or_null = " or null" if accepts(None) else ""
    if accepts([]):
        item = "text" if accepts([""]) else "integer" if not accepts([0.5]) else "number"
        return f"list of {item}{'s' if item != 'text' else ''}{or_null}"
    if accepts({}):
        return f"object of {'text' if check({'a': ''}) else 'numbers'}{or_null}"
    if accepts("a"):
        return f"text{or_null}"
    if accepts(True):
        return f"true or false{or_null}"
    if not accepts(0.5):
        return f"integer{or_null}"
    return f"{'number' if accepts(-1.0) else 'seconds since 1970'}{or_null}"


def main() -> None:
    """Write the pages with `--write`; without it, print those that are out of date."""
    for path, text in pages().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if "--write" in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{'wrote' if '--write' in sys.argv else 'out of date'}: {path}")


def describe_members() -> Iterator[tuple[str, str]]:
    """Yield every member of CreateTrainingJob in the installed AWS model, by its path, and what sets it.

    A member is followed by those below it only where different things set them.
    """
    return _describe_members((), {**FIELDS, **DERIVED, **REFUSED})


def _describe_members(path: tuple[str, ...], known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in service_limits.members_of(*path):
        below = (*path, name)
        member = ".".join(part for part in below if part != "[]")
        if member in FIELDS:
            yield member, f"`{FIELDS[member]}`"
        elif member in DERIVED:
            yield member, f"{DERIVED[member].partition(':')[0]}"
        elif member in REFUSED:
            yield member, f"refused, because {REFUSED[member].partition(':')[0]}"
        elif any(each.startswith(f"{member}.") for each in known):
            yield from _describe_members(
                (*below, "[]") if service_limits.limit_of(*below)["type"] == "list" else below,
                known,
            )
        else:
            yield member, "`request`"


if __name__ == "__main__":
    main()
