"""Going on from a checkpoint: the newest whole one, proven while it is read, at any number of ranks."""

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
    """A complete checkpoint."""

    uri: str
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def place(self) -> str:
        """Uri of the folder that it lies in, with its run's others."""
        return self.uri.rpartition("/")[0]


@dataclass(frozen=True)
class _Examination:
    """What is known of a checkpoint before or after it is loaded.

    Attributes:
        damage: What is damaged about it.
        trouble: Why it cannot be read.
        misfit: What of the model or the optimizer does not fit to it.
        stepped: Parameters for which it has a state of an optimizer.
    """

    damage: tuple[str, ...] = ()
    trouble: str | None = None
    misfit: str | None = None
    stepped: frozenset[str] = frozenset()


def resume(
    config: CheckpointConfig, storage: Storage, place: Context, states: Callable[[], States]
) -> tuple[CompleteCheckpoint, States, Collection[str]] | None:
    """Load the newest whole checkpoint; return it and what was loaded, or None for a new run.

    The third is the names of the parameters for which it has a state of an optimizer.

    One that turns out to be damaged is set aside, and the one before it is taken. Called by all ranks together.

    Args:
        config: Where to look. `auto` takes this run's newest under its own uri, or else the newest of the same
            training; `never` and a uri only what this run has saved itself (a restarted attempt continues from its
            own), and then what lies at the uri.
        storage: This run's own place.
        place: This rank's place.
        states: Returns the states to load into, in place where they are tensors.

    Raises:
        CheckpointError: `resume` names a place without a complete checkpoint, all are damaged, or it is another
            model's.
    """
    damaged: list[str] = []
    while True:
        found = _newest(config, storage, place, damaged)
        if found is None:
            return None
        target = states()
        look = _load(found, target, place)
        if not look.damage:
            return found, target, look.stepped
        damaged.append(found.uri)
        if place.is_main:
            _report_damage(found, look.damage)


def peek_state(config: CheckpointConfig, storage: Storage, place: Context) -> Mapping[str, Any]:
    """Return what the checkpoint that `resume` would begin with has in its manifest; nothing for a new run."""
    found = _newest(config, storage, place, [])
    return {} if found is None else found.manifest.state


def load_step(storage: Storage, step: int, place: Context, target: States, *, is_shared: bool) -> bool:
    """Load a complete checkpoint of a step into states; return whether there is one. Called by all ranks together.

    Args:
        storage: Where it lies.
        step: Optimizer steps done.
        place: This rank's place.
        target: The states to load into; what else is in the checkpoint is left out.
        is_shared: Whether another run of the same training may have written it; this run's own is preferred.

    Raises:
        CheckpointError: it is another model's, or it cannot be read.
    """
    found: CompleteCheckpoint | None = gather(
        _of_step(storage, step, place, is_shared) if place.is_main else None, place
    )[0]
    if found is None:
        return False
    look = _load(found, target, place)
    if look.damage and place.is_main:
        _report_damage(found, look.damage)
    return not look.damage


def _of_step(storage: Storage, step: int, place: Context, is_shared: bool) -> CompleteCheckpoint | None:
    try:
        records = list_checkpoints(storage)
        chosen = newest_complete(records, run=place.run, step=step)
        if chosen is None and is_shared:
            chosen = newest_complete([record for record in records if _is_of_training(record, place)], step=step)
    except OSError as error:
        log_line(f"what checkpoints there are cannot be told: {error}")
        return None
    if chosen is None or chosen.manifest is None:
        return None
    return CompleteCheckpoint(f"{storage.uri}/{chosen.folder}", chosen.manifest)


def newest_complete(
    records: list[CheckpointRecord], *, run: str = "", step: int | None = None, without: tuple[str, ...] = ()
) -> CheckpointRecord | None:
    """Return the newest complete one.

    Args:
        records: What lies there, oldest first.
        run: The run that must have written it; an empty string for any.
        step: The step that it must have.
        without: Folders that are out of the question.
    """
    fitting = [
        record
        for record in records
        if record.is_complete
        and record.folder not in without
        and (step is None or record.step == step)
        and record.may_belong_to(run)
    ]
    return fitting[-1] if fitting else None


def _newest(
    config: CheckpointConfig, storage: Storage, place: Context, damaged: list[str]
) -> CompleteCheckpoint | None:
    """Choose on rank 0, for all ranks."""
    chosen: CompleteCheckpoint | None = None
    problem: str | None = None
    if place.is_main:
        try:
            chosen = _choose(config, storage, place, damaged)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"nothing is begun, because it cannot be told what checkpoints there are: {error}"
    chosen, problem = gather((chosen, problem), place)[0]
    if problem is not None:
        raise CheckpointError(problem)
    return chosen


def _choose(
    config: CheckpointConfig, storage: Storage, place: Context, damaged: list[str]
) -> CompleteCheckpoint | None:
    run = place.run
    if config.resume == "auto":
        return _of_training(storage, place, damaged)
    own = _best(storage, damaged, run=run) if run else None
    if own is not None or config.resume == "never":
        return own
    parent, _, name = config.resume.rstrip("/").rpartition("/")
    step = step_of_folder_name(name)
    found = _best(open_storage(parent if step is not None else config.resume), damaged, config.resume_run, step)
    if found is None:
        raise CheckpointError(f"checkpoint.resume: there is no complete checkpoint at {config.resume}")
    return found


def _of_training(storage: Storage, place: Context, damaged: list[str]) -> CompleteCheckpoint | None:
    """Choose this run's newest checkpoint, or else the newest of the same training.

    Raises:
        CheckpointError: there are only another training's, or all are damaged.
    """
    records = list_checkpoints(storage)
    _report_unused(storage, records)
    without = tuple(uri.rpartition("/")[2] for uri in damaged if uri.rpartition("/")[0] == storage.uri)
    of_training = [record for record in records if _is_of_training(record, place)]
    chosen = (newest_complete(records, run=place.run, without=without) if place.run else None) or newest_complete(
        of_training, without=without
    )
    if chosen is not None and chosen.manifest is not None:
        if place.training and not chosen.manifest.training:
            log_line(
                f"warning: {storage.uri}/{chosen.folder} does not name its training (cloudtrain 0.1 saved it): "
                "it is taken to be this one's"
            )
        return CompleteCheckpoint(f"{storage.uri}/{chosen.folder}", chosen.manifest)
    _refuse_damaged(storage, of_training)
    stranger = newest_complete([record for record in records if record not in of_training], without=without)
    if stranger is not None and stranger.manifest is not None:
        differences = describe_differences(stranger.manifest.training, place.training)
        raise CheckpointError(
            f"checkpoint.resume is auto, and the checkpoints at {storage.uri} are another training's (step "
            f"{stranger.step} of run {stranger.manifest.run}: {differences}). To continue from it: "
            f"checkpoint.resume={stranger.manifest.run or 'its uri'}; to start anew: another checkpoint.uri, or "
            "checkpoint.resume=never"
        )
    return None


def _is_of_training(record: CheckpointRecord, place: Context) -> bool:
    return record.manifest is None or is_same_training(record.manifest.training, place.training)


def _report_unused(storage: Storage, records: list[CheckpointRecord]) -> None:
    for name in storage.strays():
        log_line(f"warning: {storage.uri}/{name} is a file and not a checkpoint: it is ignored")
    for record in records:
        if not record.is_complete:
            log_line(f"{storage.uri}/{record.folder} is {record.verdict} and not used: {record.why}")


def _best(storage: Storage, damaged: list[str], run: str = "", step: int | None = None) -> CompleteCheckpoint | None:
    records = list_checkpoints(storage)
    _report_unused(storage, records)
    without = tuple(uri.rpartition("/")[2] for uri in damaged if uri.rpartition("/")[0] == storage.uri)
    chosen = newest_complete(records, run=run, step=step, without=without)
    if chosen is not None and chosen.manifest is not None:
        return CompleteCheckpoint(f"{storage.uri}/{chosen.folder}", chosen.manifest)
    _refuse_damaged(storage, [record for record in records if record.may_belong_to(run)])
    return None


def _refuse_damaged(storage: Storage, records: list[CheckpointRecord]) -> None:
    """Refuse to start anew where every checkpoint is damaged.

    Raises:
        CheckpointError: at least one is.
    """
    # To begin anew would be worse than to stop: nobody asked for that, and days of work may still be saved by hand.
    damaged = [other.folder for other in records if other.verdict == "damaged"]
    if damaged:
        raise CheckpointError(
            f"every checkpoint at {storage.uri} is damaged ({', '.join(damaged)}): "
            "checkpoint.resume=never starts anew, a uri goes on from elsewhere"
        )


def _load(found: CompleteCheckpoint, target: States, place: Context) -> _Examination:
    """Load a checkpoint into the states, on all ranks; return what is known of it then.

    Raises:
        CheckpointError: it is another model's, or it cannot be read.
    """
    parent, _, folder = found.uri.rpartition("/")
    reader = CheckpointReader(open_storage(parent), folder, found.manifest)
    # The stages of a pipeline make up the model together.
    shapes = {name: shape for part in gather(tensor_shapes(target["model"]), place) for name, shape in part.items()}
    look: _Examination = gather(_examine(reader, target, shapes) if place.is_main else _Examination(), place)[0]
    if look.damage:
        return look
    if look.trouble is not None:
        raise CheckpointError(f"the checkpoint {found.uri} cannot be read: {look.trouble}")
    if look.misfit is not None:
        raise CheckpointError(f"the checkpoint {found.uri} does not fit this model: {look.misfit}")
    try:
        load(target, storage_reader=reader, planner=PlainLoadPlanner())
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        damages = sorted({str(cause) for cause in causes if isinstance(cause, DamagedError)})
        if damages:
            return _Examination(damage=tuple(damages))
        why = f"{causes[0]}{version_difference(found.manifest)}"
        raise CheckpointError(f"the checkpoint {found.uri} cannot be read: {why}") from error
    return look


def _examine(reader: CheckpointReader, target: States, shapes: Mapping[str, list[int]]) -> _Examination:
    """Return what is damaged about the metadata, why it cannot be read, or what of the model does not fit to it."""
    try:
        metadata = reader.read_metadata()
    except DamagedError as error:
        return _Examination(damage=(str(error),))
    except (OSError, CheckpointError) as error:
        return _Examination(trouble=str(error))  # the other ranks must hear of it
    stepped, kinds = saved_optimizer(metadata)
    # Before anything is loaded: torch 2.5 loads what overlaps of a tensor of another shape, in silence.
    misfit = next(shape_mismatches(metadata, shapes), None) or optimizer_mismatch(kinds, target.get("optimizer", {}))
    return _Examination(misfit=misfit, stepped=stepped)


def _report_damage(found: CompleteCheckpoint, damage: Collection[str]) -> None:
    parent, _, folder = found.uri.rpartition("/")
    detail = "; ".join(damage)
    log_line(f"{found.uri} is damaged and set aside: {detail}")
    emit("checkpoint_damaged", uri=found.uri, step=found.step, detail=detail)
    try:
        mark_damaged(open_storage(parent), folder, damage)
    except OSError as error:
        # It may be another run's, which this one may only read. It is left out here all the same.
        log_line(f"{found.uri} could not be marked as damaged: {error}")
