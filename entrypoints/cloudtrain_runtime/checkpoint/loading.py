"""Resuming: find the newest complete checkpoint and load it, verified, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from cloudtrain_runtime.checkpoint.listing import CheckpointRecord, list_checkpoints, mark_damaged
from cloudtrain_runtime.checkpoint.shards import (
    CheckpointReader,
    PlainLoadPlanner,
    version_difference,
)
from cloudtrain_runtime.checkpoint.storage import Storage, open_storage
from cloudtrain_runtime.checkpoint.training_state import (
    States,
    optimizer_mismatch,
    saved_optimizer,
    saved_shapes,
    shape_mismatch,
    tensor_shapes,
)
from cloudtrain_runtime.contract import MODEL_FILE, CheckpointConfig
from cloudtrain_runtime.contract.manifest import step_of_folder_name
from cloudtrain_runtime.contract.saved_checkpoint import DAMAGED, UNREADABLE
from cloudtrain_runtime.contract.training_identity import describe_differences, is_same_training
from cloudtrain_runtime.errors import CheckpointError, DamagedError
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

T = TypeVar("T")


def resume(
    config: CheckpointConfig,
    storage: Storage,
    context: Context,
    states: Callable[[CheckpointRecord], States],
) -> tuple[CheckpointRecord, States, Collection[str]] | None:
    """Load the newest complete checkpoint. All ranks call this together.

    A checkpoint that turns out to be damaged is marked as such, and the previous one is loaded.

    Args:
        config: Which checkpoint to load. `auto` selects this run's newest under its own uri, or else the newest of the
            same training. `never` and a uri select only what this run has saved itself (a restarted attempt continues
            from its own checkpoint); a uri then selects the newest one there.
        storage: Where this run saves.
        context: This rank's context.
        states: Returns the states to load a checkpoint into; tensors are loaded in place.

    Returns:
        The checkpoint, the loaded states and the names of the parameters for which it holds optimizer state; None for a
        new run.

    Raises:
        CheckpointError: `resume` names a location without a complete checkpoint, all are damaged, or the checkpoint
            belongs to another model.
    """
    damaged: list[CheckpointRecord] = []
    while True:
        found = newest(config, storage, context, damaged)
        if found is None:
            return None
        target = states(found)
        try:
            return found, target, _load(found, target, context)
        except DamagedError as error:
            damaged.append(found)
            if context.is_main:
                _report_damage(found, str(error))


def load_step(
    storage: Storage, step: int, context: Context, target: States, *, is_shared: bool
) -> bool:
    """Load the complete checkpoint of a step; return whether there is one. All ranks call this together.

    Entries of the checkpoint that `target` does not have are ignored. With `is_shared` another run of the same training
    may have written it; this run's own is preferred.

    Raises:
        CheckpointError: it belongs to another model, or it cannot be read.
    """
    found = _on_main(lambda: _of_step(storage, step, context, is_shared), context)
    if found is None:
        return False
    try:
        _load(found, target, context)
    except DamagedError as error:
        if context.is_main:
            _report_damage(found, str(error))
        return False
    return True


def load_folder(uri: str, target: States, context: Context) -> str:
    """Load the newest complete checkpoint of a folder, or a single one (`train.init_from`); return its uri.

    All ranks call this together.

    Args:
        uri: The folder of checkpoints, or the checkpoint.
        target: The states to load into, of the full model.
        context: This rank's context.

    Raises:
        CheckpointError: there is none, it is damaged, or it belongs to another model.
    """

    def find() -> CheckpointRecord:
        try:
            found = _newest_in(uri, [])
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"train.init_from: {error}") from None
        if found is None:
            raise CheckpointError(
                f"train.init_from: there is no complete checkpoint, and no {MODEL_FILE}, at {uri}"
            )
        return found

    found = _on_main(find, context)
    try:
        _load(found, target, context)
    except DamagedError as error:
        raise CheckpointError(f"train.init_from: {found.uri} is damaged: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(
            f"train.init_from: {str(error).removeprefix('the checkpoint ')}"
        ) from None
    return found.uri


def _on_main(action: Callable[[], T], context: Context) -> T:
    """Return on all ranks what an action on rank 0 returns, or raise its CheckpointError or DamagedError on all."""
    value: T | None = None
    failure: tuple[type[Exception], str] | None = None
    if context.is_main:
        try:
            value = action()
        except (CheckpointError, DamagedError) as error:
            failure = type(error), str(error)
    value, failure = gather((value, failure), context)[0]
    if failure is not None:
        kind, message = failure
        raise kind(message)
    return value


def _of_step(
    storage: Storage, step: int, context: Context, is_shared: bool
) -> CheckpointRecord | None:
    try:
        records = list_checkpoints(storage)
    except OSError as error:
        log_line(f"the checkpoints at {storage.uri} cannot be listed: {error}")
        return None
    own = _newest_complete(records, run=context.run, step=step)
    if own is not None or not is_shared:
        return own
    of_training = [record for record in records if _is_of_training(record, context)]
    return _newest_complete(of_training, step=step)


def _newest_complete(
    records: list[CheckpointRecord], *, run: str = "", step: int | None = None
) -> CheckpointRecord | None:
    """Return the newest complete checkpoint of a run (empty for any) and a step (None for any), or None.

    `records` are sorted, oldest first.

    Raises:
        CheckpointError: A newer one is of a newer cloudtrain: an older one would lose the steps since.
    """
    for each in reversed(records):
        # One that cannot be read may say of no run that it is its own.
        is_meant = (not run or each.run in (None, run)) and step in (None, each.step)
        if each.state == UNREADABLE and is_meant:
            raise CheckpointError(
                f"{each.uri} cannot be read: {each.why}; to start from the beginning: checkpoint.resume=never"
            )
        if each.is_complete and each.may_belong_to(run) and step in (None, each.step):
            return each
    return None


def newest(
    config: CheckpointConfig, storage: Storage, context: Context, damaged: list[CheckpointRecord]
) -> CheckpointRecord | None:
    """Return the checkpoint to load, chosen on rank 0 for all ranks."""

    def choose() -> CheckpointRecord | None:
        try:
            return _choose(config, storage, context, damaged)
        except OSError as error:
            message = f"the run does not start, because its checkpoints cannot be listed: {error}"
            raise CheckpointError(message) from None

    return _on_main(choose, context)


def _choose(
    config: CheckpointConfig, storage: Storage, context: Context, damaged: list[CheckpointRecord]
) -> CheckpointRecord | None:
    run = context.run
    if config.resume == "auto":
        return _of_training(storage, context, damaged)
    own = _newest_at(storage, damaged, run=run) if run else None
    if own is not None or config.resume == "never":
        return own
    found = _newest_in(config.resume.rstrip("/"), damaged, config.resume_run)
    if found is None:
        raise CheckpointError(
            f"checkpoint.resume: there is no complete checkpoint at {config.resume}"
        )
    return found


def _of_training(
    storage: Storage, context: Context, damaged: list[CheckpointRecord]
) -> CheckpointRecord | None:
    """Return this run's newest checkpoint, or else the newest one of the same training."""
    records = _list_reported(storage, damaged)
    of_training = [record for record in records if _is_of_training(record, context)]
    own = None
    if context.run:
        own = _newest_complete(records, run=context.run)
    chosen = own or _newest_complete(of_training)
    if chosen is not None and context.training and not chosen.content.training:
        log_line(
            f"warning: {chosen.uri} does not name its training (cloudtrain 0.1 saved it): "
            "it is assumed to be of this training"
        )
    if chosen is not None:
        return chosen
    _refuse_damaged(storage, of_training)
    foreign = _newest_complete([record for record in records if record not in of_training])
    if foreign is None:
        return None
    differences = describe_differences(foreign.content.training, context.training)
    raise CheckpointError(
        f"checkpoint.resume is auto, and the checkpoints at {storage.uri} belong to another training (step "
        f"{foreign.step} of run {foreign.content.run}: {differences}). To continue from it: "
        f"checkpoint.resume={foreign.run or 'its uri'}; to start from the beginning: another "
        "checkpoint.uri, or checkpoint.resume=never"
    )


def _is_of_training(record: CheckpointRecord, context: Context) -> bool:
    return record.manifest is None or is_same_training(record.manifest.training, context.training)


def _list_reported(storage: Storage, damaged: list[CheckpointRecord]) -> list[CheckpointRecord]:
    """Return the checkpoints of a storage without those that were found damaged, and log what is not used."""
    records = list_checkpoints(storage)
    for record in records:
        if not record.is_complete:
            log_line(f"{record.uri} is {record.state} and not used: {record.why}")
    known = {each.uri for each in damaged}
    return [record for record in records if not record.is_complete or record.uri not in known]


def _newest_in(uri: str, damaged: list[CheckpointRecord], run: str = "") -> CheckpointRecord | None:
    """Return the newest complete checkpoint of a folder, or the one checkpoint that the uri names."""
    parent, _, name = uri.rpartition("/")
    step = step_of_folder_name(name)
    folder = uri if step is None else parent
    return _newest_at(open_storage(folder), damaged, run, step)


def _newest_at(
    storage: Storage, damaged: list[CheckpointRecord], run: str = "", step: int | None = None
) -> CheckpointRecord | None:
    records = _list_reported(storage, damaged)
    chosen = _newest_complete(records, run=run, step=step)
    if chosen is None:
        _refuse_damaged(storage, [record for record in records if record.may_belong_to(run)])
    return chosen


def _refuse_damaged(storage: Storage, records: list[CheckpointRecord]) -> None:
    """Refuse to start from the beginning where every checkpoint is damaged."""
    # Starting over silently would be worse than stopping: days of work may still be recovered by
    # hand.
    damaged = [other.name for other in records if other.state == DAMAGED]
    if damaged:
        raise CheckpointError(
            f"every checkpoint at {storage.uri} is damaged ({', '.join(damaged)}): "
            "checkpoint.resume=never starts from the beginning, a uri resumes from elsewhere"
        )


def _load(found: CheckpointRecord, target: States, context: Context) -> frozenset[str]:
    """Load a checkpoint into the states; return the parameters for which it holds optimizer state.

    All ranks call this together, and all raise the same error.

    Raises:
        CheckpointError: it belongs to another model, or cannot be read.
        DamagedError: its bytes are not those that were written.
    """
    reader = CheckpointReader(open_storage(found.location), found.name, found.content)
    # Each stage of a pipeline holds a part of the model.
    shapes: dict[str, list[int]] = {}
    for part in gather(tensor_shapes(target["model"]), context):
        shapes |= part
    stepped = _on_main(lambda: _check_fits(reader, found.uri, target, shapes), context)
    try:
        load(target, storage_reader=reader, planner=PlainLoadPlanner())
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        damages = sorted({str(cause) for cause in causes if isinstance(cause, DamagedError)})
        if damages:
            raise DamagedError("; ".join(damages)) from None
        why = f"{causes[0]}{version_difference(found.content)}"
        raise CheckpointError(f"the checkpoint {found.uri} cannot be read: {why}") from error
    return stepped


def _check_fits(
    reader: CheckpointReader, uri: str, target: States, shapes: Mapping[str, list[int]]
) -> frozenset[str]:
    """Read the metadata, and compare it with the model; return the parameters with optimizer state."""
    try:
        metadata = reader.read_metadata()
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"the checkpoint {uri} cannot be read: {error}") from None
    stepped, kinds = saved_optimizer(metadata)
    # Checked before loading: torch 2.5 silently loads the overlapping part of a tensor of another
    # shape.
    mismatch: str | None = shape_mismatch(saved_shapes(metadata), shapes)
    if not mismatch:
        mismatch = optimizer_mismatch(kinds, target.get("optimizer", {}))
    if mismatch:
        raise CheckpointError(f"the checkpoint {uri} does not fit this model: {mismatch}")
    return stepped


def _report_damage(found: CheckpointRecord, detail: str) -> None:
    log_line(f"{found.uri} is damaged and is not used: {detail}")
    emit("checkpoint_damaged", uri=found.uri, step=found.step, detail=detail)
    try:
        mark_damaged(open_storage(found.location), found.name, [detail])
    except OSError as error:
        # The checkpoint may belong to another run, which this one may only read. This load ignores
        # it anyway.
        log_line(f"{found.uri} could not be marked as damaged: {error}")
