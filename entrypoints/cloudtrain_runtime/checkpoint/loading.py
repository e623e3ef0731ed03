"""Resuming: find the newest complete checkpoint and load it, verified, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from cloudtrain_runtime.checkpoint.listing import CheckpointRecord, list_checkpoints, mark_damaged
from cloudtrain_runtime.checkpoint.shards import CheckpointReader, PlainLoadPlanner, version_difference
from cloudtrain_runtime.checkpoint.storage import Storage, open_storage
from cloudtrain_runtime.checkpoint.training_state import (
    States,
    optimizer_mismatch,
    saved_optimizer,
    saved_shapes,
    shape_mismatches,
    tensor_shapes,
)
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.contract.manifest import Manifest, step_of_folder_name
from cloudtrain_runtime.contract.training_identity import describe_differences, is_same_training
from cloudtrain_runtime.errors import CheckpointError, DamagedError
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A complete checkpoint: its folder below the uri of a storage."""

    location: str
    folder: str
    manifest: Manifest

    @property
    def uri(self) -> str:
        """Uri of the checkpoint."""
        return f"{self.location}/{self.folder}"


@dataclass(frozen=True)
class _Examination:
    """The result of examining a checkpoint before or after it is loaded."""

    damage: tuple[str, ...] = ()  # descriptions of damaged data
    error: str = ""  # why it cannot be loaded, or an empty string
    stepped: frozenset[str] = frozenset()  # parameters for which it holds optimizer state


def resume(
    config: CheckpointConfig, storage: Storage, context: Context, states: Callable[[], States]
) -> tuple[CompleteCheckpoint, States, Collection[str]] | None:
    """Load the newest complete checkpoint. All ranks call this together.

    A checkpoint that turns out to be damaged is marked as such, and the previous one is loaded.

    Args:
        config: Which checkpoint to load. `auto` selects this run's newest under its own uri, or else the newest of the
            same training. `never` and a uri select only what this run has saved itself (a restarted attempt continues
            from its own checkpoint); a uri then selects the newest one there.
        storage: Where this run saves.
        context: This rank's context.
        states: Returns the states to load into; tensors are loaded in place.

    Returns:
        The checkpoint, the loaded states and the names of the parameters for which it holds optimizer state; None for a
        new run.

    Raises:
        CheckpointError: `resume` names a location without a complete checkpoint, all are damaged, or the checkpoint
            belongs to another model.
    """
    damaged: list[CompleteCheckpoint] = []
    while True:
        found = _newest(config, storage, context, damaged)
        if found is None:
            return None
        target = states()
        result = _load(found, target, context)
        if not result.damage:
            return found, target, result.stepped
        damaged.append(found)
        if context.is_main:
            _report_damage(found, result.damage)


def peek_state(config: CheckpointConfig, storage: Storage, context: Context) -> Mapping[str, Any]:
    """Return the `state` in the manifest of the checkpoint that `resume` will load; empty for a new run."""
    found = _newest(config, storage, context, [])
    return {} if found is None else found.manifest.state


def load_step(storage: Storage, step: int, context: Context, target: States, *, is_shared: bool) -> bool:
    """Load the complete checkpoint of a step; return whether there is one. All ranks call this together.

    Entries of the checkpoint that `target` does not have are ignored. With `is_shared` another run of the same training
    may have written it; this run's own is preferred.

    Raises:
        CheckpointError: it belongs to another model, or it cannot be read.
    """
    found: CompleteCheckpoint | None = gather(
        _of_step(storage, step, context, is_shared) if context.is_main else None, context
    )[0]
    if found is None:
        return False
    result = _load(found, target, context)
    if result.damage and context.is_main:
        _report_damage(found, result.damage)
    return not result.damage


def load_folder(
    uri: str,
    target: States,
    context: Context,
    field: str,
    mismatch: Callable[[Mapping[str, Any], Mapping[str, Any]], str],
) -> str:
    """Load the newest complete checkpoint of a folder, or a single one, for a new run; return its uri.

    All ranks call this together.

    Args:
        uri: The folder of checkpoints, or the checkpoint.
        target: The states to load into, of the full model.
        context: This rank's context.
        field: The field of the job that names the uri, for messages.
        mismatch: Returns how the saved shapes differ from the model's, both by name; empty if they do not.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another model.
    """
    parent, _, name = uri.rpartition("/")
    step = step_of_folder_name(name)
    found: CompleteCheckpoint | None = None
    failure = f"{field}: there is no complete checkpoint, and no model.pt, at {uri}"
    if context.is_main:
        try:
            found = _newest_at(open_storage(uri if step is None else parent), [], step=step)
            if found is not None:
                metadata = CheckpointReader(open_storage(found.location), found.folder, found.manifest).read_metadata()
                wrong = mismatch(saved_shapes(metadata), tensor_shapes(target["model"]))
                failure = f"{field}: {found.uri} does not fit this model: {wrong}" if wrong else ""
        except (CheckpointError, OSError) as error:
            failure = f"{field}: {error}"
    found, failure = gather((found, failure), context)[0]
    if failure or found is None:
        raise CheckpointError(failure)
    if damage := _load(found, target, context).damage:
        raise CheckpointError(f"{field}: {found.uri} is damaged: {'; '.join(damage)}")
    return found.uri


def _of_step(storage: Storage, step: int, context: Context, is_shared: bool) -> CompleteCheckpoint | None:
    try:
        records = list_checkpoints(storage)
        chosen = newest_complete(records, run=context.run, step=step)
        if chosen is None and is_shared:
            chosen = newest_complete([record for record in records if _is_of_training(record, context)], step=step)
    except OSError as error:
        log_line(f"the checkpoints at {storage.uri} cannot be listed: {error}")
        return None
    return _at(storage, chosen)


def _at(storage: Storage, record: CheckpointRecord | None) -> CompleteCheckpoint | None:
    if record is None or record.manifest is None:
        return None
    return CompleteCheckpoint(storage.uri, record.folder, record.manifest)


def newest_complete(
    records: list[CheckpointRecord], *, run: str = "", step: int | None = None, without: tuple[str, ...] = ()
) -> CheckpointRecord | None:
    """Return the newest complete checkpoint of a run (empty for any) and a step (None for any), or None.

    `records` are sorted, oldest first; the folders in `without` are ignored.
    """
    for record in reversed(records):
        is_wanted = record.folder not in without and step in (None, record.step) and record.may_belong_to(run)
        if record.is_complete and is_wanted:
            return record
    return None


def _newest(
    config: CheckpointConfig, storage: Storage, context: Context, damaged: list[CompleteCheckpoint]
) -> CompleteCheckpoint | None:
    """Return the checkpoint to load, chosen on rank 0 for all ranks."""
    chosen: CompleteCheckpoint | None = None
    failure: str | None = None
    if context.is_main:
        try:
            chosen = _choose(config, storage, context, damaged)
        except CheckpointError as error:
            failure = str(error)
        except OSError as error:
            failure = f"the run does not start, because its checkpoints cannot be listed: {error}"
    chosen, failure = gather((chosen, failure), context)[0]
    if failure is not None:
        raise CheckpointError(failure)
    return chosen


def _choose(
    config: CheckpointConfig, storage: Storage, context: Context, damaged: list[CompleteCheckpoint]
) -> CompleteCheckpoint | None:
    run = context.run
    if config.resume == "auto":
        return _of_training(storage, context, damaged)
    own = _newest_at(storage, damaged, run=run) if run else None
    if own is not None or config.resume == "never":
        return own
    parent, _, name = config.resume.rstrip("/").rpartition("/")
    step = step_of_folder_name(name)
    found = _newest_at(open_storage(parent if step is not None else config.resume), damaged, config.resume_run, step)
    if found is None:
        raise CheckpointError(f"checkpoint.resume: there is no complete checkpoint at {config.resume}")
    return found


def _of_training(storage: Storage, context: Context, damaged: list[CompleteCheckpoint]) -> CompleteCheckpoint | None:
    """Return this run's newest checkpoint, or else the newest one of the same training."""
    records, without = _list_reported(storage, damaged)
    of_training = [record for record in records if _is_of_training(record, context)]
    own = newest_complete(records, run=context.run, without=without) if context.run else None
    chosen = _at(storage, own or newest_complete(of_training, without=without))
    if chosen is not None:
        if context.training and not chosen.manifest.training:
            log_line(
                f"warning: {chosen.uri} does not name its training (cloudtrain 0.1 saved it): "
                "it is assumed to be of this training"
            )
        return chosen
    _refuse_damaged(storage, of_training)
    foreign = newest_complete([record for record in records if record not in of_training], without=without)
    if foreign is not None and foreign.manifest is not None:
        differences = describe_differences(foreign.manifest.training, context.training)
        raise CheckpointError(
            f"checkpoint.resume is auto, and the checkpoints at {storage.uri} belong to another training (step "
            f"{foreign.step} of run {foreign.manifest.run}: {differences}). To continue from it: "
            f"checkpoint.resume={foreign.manifest.run or 'its uri'}; to start from the beginning: another "
            "checkpoint.uri, or checkpoint.resume=never"
        )
    return None


def _is_of_training(record: CheckpointRecord, context: Context) -> bool:
    return record.manifest is None or is_same_training(record.manifest.training, context.training)


def _list_reported(
    storage: Storage, damaged: list[CompleteCheckpoint]
) -> tuple[list[CheckpointRecord], tuple[str, ...]]:
    """Return the checkpoints of a storage and the damaged folders among them, and log what is not used."""
    records = list_checkpoints(storage)
    for name in storage.strays():
        log_line(f"warning: {storage.uri}/{name} is a file and not a checkpoint: ignored")
    for record in records:
        if not record.is_complete:
            log_line(f"{storage.uri}/{record.folder} is {record.verdict} and not used: {record.why}")
    return records, tuple(each.folder for each in damaged if each.location == storage.uri)


def _newest_at(
    storage: Storage, damaged: list[CompleteCheckpoint], run: str = "", step: int | None = None
) -> CompleteCheckpoint | None:
    records, without = _list_reported(storage, damaged)
    chosen = _at(storage, newest_complete(records, run=run, step=step, without=without))
    if chosen is None:
        _refuse_damaged(storage, [record for record in records if record.may_belong_to(run)])
    return chosen


def _refuse_damaged(storage: Storage, records: list[CheckpointRecord]) -> None:
    """Refuse to start from the beginning where every checkpoint is damaged."""
    # Starting over silently would be worse than stopping: days of work may still be recovered by hand.
    damaged = [other.folder for other in records if other.verdict == "damaged"]
    if damaged:
        raise CheckpointError(
            f"every checkpoint at {storage.uri} is damaged ({', '.join(damaged)}): "
            "checkpoint.resume=never starts from the beginning, a uri resumes from elsewhere"
        )


def _load(found: CompleteCheckpoint, target: States, context: Context) -> _Examination:
    """Load a checkpoint into the states, on all ranks; return the result of the examination."""
    reader = CheckpointReader(open_storage(found.location), found.folder, found.manifest)
    # Each stage of a pipeline holds a part of the model.
    shapes = {name: shape for part in gather(tensor_shapes(target["model"]), context) for name, shape in part.items()}
    result: _Examination = gather(_examine(reader, target, shapes) if context.is_main else _Examination(), context)[0]
    if result.damage:
        return result
    if result.error:
        raise CheckpointError(f"the checkpoint {found.uri} {result.error}")
    try:
        load(target, storage_reader=reader, planner=PlainLoadPlanner())
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        damages = sorted({str(cause) for cause in causes if isinstance(cause, DamagedError)})
        if damages:
            return _Examination(damage=tuple(damages))
        why = f"{causes[0]}{version_difference(found.manifest)}"
        raise CheckpointError(f"the checkpoint {found.uri} cannot be read: {why}") from error
    return result


def _examine(reader: CheckpointReader, target: States, shapes: Mapping[str, list[int]]) -> _Examination:
    """Examine the metadata: whether it is damaged, can be read, and matches the model."""
    try:
        metadata = reader.read_metadata()
    except DamagedError as error:
        return _Examination(damage=(str(error),))
    except (OSError, CheckpointError) as error:
        return _Examination(error=f"cannot be read: {error}")  # raised on all ranks
    stepped, kinds = saved_optimizer(metadata)
    # Checked before loading: torch 2.5 silently loads the overlapping part of a tensor of another shape.
    mismatch = next(shape_mismatches(metadata, shapes), None) or optimizer_mismatch(kinds, target.get("optimizer", {}))
    return _Examination(error=f"does not fit this model: {mismatch}" if mismatch else "", stepped=stepped)


def _report_damage(found: CompleteCheckpoint, damage: Collection[str]) -> None:
    detail = "; ".join(damage)
    log_line(f"{found.uri} is damaged and is not used: {detail}")
    emit("checkpoint_damaged", uri=found.uri, step=found.manifest.step, detail=detail)
    try:
        mark_damaged(open_storage(found.location), found.folder, damage)
    except OSError as error:
        # The checkpoint may belong to another run, which this one may only read. This load ignores it anyway.
        log_line(f"{found.uri} could not be marked as damaged: {error}")
