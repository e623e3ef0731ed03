"""The plan of a run that evaluates another run's weights, without training."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.registry import backend_package
from cloudtrain.client.client import Client, client_of
from cloudtrain.client.observer import Observer
from cloudtrain.client.submission import Submission
from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.job.loader import override_texts
from cloudtrain.planning.tracking import without_tracking
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.downloads import RunStorage
from cloudtrain.runs.evaluations import (
    EVALUATION_SUFFIX,
    INITIAL_STEP,
    evaluated_by,
    evaluations_folder,
)
from cloudtrain.runs.file_transfer import open_source
from cloudtrain.runs.history import EVENT_LINES
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.result_parts import CHECKPOINTS, MODEL
from cloudtrain.runs.run import Run, RunLike
from cloudtrain.runs.status import State
from cloudtrain.settings.settings import Settings
from cloudtrain.support.argument_types import check_type
from cloudtrain.support.backend_facts import choose_backend, facts_of
from cloudtrain.support.one_or_more import one_or_more
from cloudtrain.support.renamed import renamed_arguments
from cloudtrain_runtime.contract import CODE_CHANNEL, SPLITS, EvaluationConfig, parse_event
from cloudtrain_runtime.contract.file_uri import path_of

if TYPE_CHECKING:
    from cloudtrain.backends.base import Backend
    from cloudtrain.job.spec import JobSpec
    from cloudtrain.planning.plan import CodeInfo, Plan
    from cloudtrain.runs.status import Status

BEST = "best"
INITIAL = "initial"
_NAME_CHARACTERS = 42  # of a job
_CHANNEL = re.compile(r"([a-zA-Z0-9._-]+)=(.+)", re.DOTALL)


@dataclass(frozen=True)
class EvaluationOptions:
    """What to evaluate.

    Attributes:
        data: Uri or path of new data by channel; an empty name is the only channel.
        checkpoint: Step of a checkpoint, `best`, or `initial` for the weights that the run started with, which are
            those of `train.init_from` or of the Task's `model()`; None for the final weights.
        splits: Splits; empty for validation and test, else train.

    Raises:
        UserError: The checkpoint is neither a step, `best` nor `initial`.
    """

    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    checkpoint: int | str | None = None
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", one_or_more(self.splits))
        if isinstance(self.checkpoint, str) and self.checkpoint not in (BEST, INITIAL):
            hint = did_you_mean(
                self.checkpoint, (BEST, INITIAL), "a step, such as 1000, or best or initial"
            )
            raise UserError(f"{self.checkpoint!r} is no checkpoint", hint)


@renamed_arguments(reference="run", choice="options")
def evaluate(
    run: RunLike,
    options: EvaluationOptions | None = None,
    *,
    overrides: str | Iterable[str] = (),
    instances: int | None = None,
    backend: str | None = None,
    local: bool = False,
    sandbox: bool = False,
    settings: Settings | None = None,
    observer: Observer | None = None,
    client: Client | None = None,
    skip_check: bool = False,
) -> Run:
    """Start a run that evaluates the weights of another one, with its code and without training.

    The result is kept with the evaluated run: `run.evaluations()` returns it once the evaluation has succeeded.

    Args:
        run: The run to evaluate, of a Task.
        options: Data, checkpoint and splits; by default the final weights on the run's data.
        overrides: Changes of the job, `path=value` as the `--set` option takes them.
        instances: Replaces `cluster.instances`.
        backend: Where it runs; by default where the run was. A run of the account can be evaluated locally, too.
        local: The same as `backend="local"`.
        sandbox: The same as `backend="sandbox"`.
        settings: The account; by default from environment and files.
        observer: Receives what is reported meanwhile.
        client: The client that finds the run and starts the evaluation, in place of these.
        skip_check: Do not check the account first.

    Raises:
        RunNotFoundError: There is no such run.
        UserError: The run cannot be evaluated, or not there; nothing was started.
        SpecError: The changed job is not valid.
        CloudError: A check failed, AWS refused or cannot be reached; nothing was started.
    """
    start = prepare_evaluation(
        run,
        options,
        overrides=override_texts(overrides),
        instances=instances,
        backend=backend,
        local=local,
        sandbox=sandbox,
        client=client_of(client, settings, observer),
        skip_check=skip_check,
    )
    return start()


def prepare_evaluation(
    run: RunLike,
    options: EvaluationOptions | None = None,
    *,
    client: Client,
    overrides: Iterable[str] = (),
    instances: int | None = None,
    backend: str | None = None,
    local: bool = False,
    sandbox: bool = False,
    skip_check: bool = False,
) -> Callable[[], Run]:
    """Return the function that starts an evaluation, which has the arguments and errors of `evaluate`.

    All that can be wrong with the arguments is found before it is called.
    """
    check_type("options", options, EvaluationOptions)
    session = client.session
    found, name = session.find(run)
    chosen = choose_backend(backend, local=local, sandbox=sandbox, default=found.name)
    previous = PreviousRun(found.plan_of(name))
    spec, code = plan_evaluation(found, name, options or EvaluationOptions(), overrides, instances)
    target = found.for_previous(previous)
    if chosen != found.name:
        is_brought_here = facts_of(found.name).is_billed and not facts_of(chosen).uses_account
        if not is_brought_here:
            hint = f"leave it out: the evaluation runs where {name} was"
            raise UserError(
                f"weights of a {found.name} run cannot be evaluated with --{chosen}", hint
            )
        target = backend_package(chosen).open_backend(session.context())
    target.check_ready()
    plan = session.inputs(target.target(), target).make_plan(spec, code)

    def start() -> Run:
        session.observer.on_plan(plan)
        if target.name != found.name:
            fetch_code(found.storage_of(name), found.plan_of(name), plan)
        submission = Submission(
            target, lambda: None, session.observer, skip_check=skip_check, is_new=False
        )
        return session.record(submission.send(plan))

    return start


def parse_data(texts: Iterable[str]) -> dict[str, str]:
    """Return uris by channel from texts such as `URI` or `CHANNEL=URI`."""
    found = {}
    for text in texts:
        named = _CHANNEL.fullmatch(text)
        found[named[1] if named else ""] = named[2] if named else text
    return found


def plan_evaluation(
    backend: Backend,
    run: str,
    choice: EvaluationOptions,
    overrides: Iterable[str],
    instances: int | None,
) -> tuple[JobSpec, CodeInfo]:
    """Return the job that evaluates a run, and its code.

    Raises:
        UserError: The run is a script, has no weights, or has no such channel, checkpoint or split.
        SpecError: The changed job is not valid.
        CloudError: AWS refused or cannot be reached.
    """
    content = backend.plan_of(run)
    if evaluated := evaluated_by(content):
        raise UserError(
            f"{run} is itself an evaluation, of {evaluated}", f"cloudtrain evaluate {evaluated}"
        )
    previous = PreviousRun(content)
    changes = tuple(overrides)
    spec = previous.job([*_data_overrides(previous, choice.data), *changes], instances=instances)
    if spec.train is None or spec.code.task is None:
        raise UserError(
            f"{run} runs a script, and only a Task can be evaluated without training",
            "submit a job whose script evaluates, with the run's model as its data: cloudtrain download "
            f"{backend.name}:{run} --what model",
        )
    if spec.cluster.network.isolation:
        message = f"{run} ran with cluster.network.isolation, and an isolated container cannot read its weights from S3"
        raise UserError(message, "evaluate with --set cluster.network.isolation=false")
    status = backend.status(run)
    _check_splits(choice, status, is_changed=bool(choice.data or changes))
    source: tuple[str | None, int | None] = (spec.train.init_from, INITIAL_STEP)
    if choice.checkpoint != INITIAL:
        wanted = (MODEL, CHECKPOINTS) if choice.checkpoint is None else (CHECKPOINTS,)
        backend.storage_of(run).require_stored(run, *wanted)
        source = _find_weights(backend, run, content, status, choice.checkpoint)
    weights, step = source
    train = spec.train.model_copy(
        update={"init_from": weights, "export": "last", "early_stopping": None, "profile": None}
    )
    spec = spec.model_copy(
        update={
            "name": spec.name[: _NAME_CHARACTERS - len(EVALUATION_SUFFIX)].rstrip("-")
            + EVALUATION_SUFFIX,
            "train": train,
            "checkpoint": spec.checkpoint.model_copy(update={"resume": "never", "uri": None}),
            **without_tracking(spec),
        }
    )
    evaluation = EvaluationConfig(
        f"{backend.name}:{run}",
        evaluations_folder(backend.storage_of(run)),
        step,
        list(choice.splits),
        {name: channel.source for name, channel in sorted(spec.data.items())},
    )
    return spec, dataclasses.replace(previous.code, evaluation=evaluation)


def _check_splits(choice: EvaluationOptions, status: Status, *, is_changed: bool) -> None:
    """Refuse a split that the run's Task does not have.

    A run that has succeeded has evaluated each of its splits, but datasets() may have others for another job.

    Raises:
        UserError: There is no such split.
    """
    evaluated = {name.partition("/")[0] for name in status.progress.metrics} & set(SPLITS)
    known = evaluated | {"train"}
    # Without metrics the log cannot be read, or has expired.
    is_known = bool(evaluated) and status.state is State.SUCCEEDED and not is_changed
    legal = [split for split in SPLITS if split in known or not is_known]
    for split in choice.splits:
        if split in legal:
            continue
        if not is_known:
            raise UserError(
                f"a Task has no split {split!r}", f"datasets() may have {', '.join(legal)}"
            )
        raise UserError(
            f"the Task of {status.run} has no split {split!r}", did_you_mean(split, legal)
        )


def _data_overrides(previous: PreviousRun, data: Mapping[str, str]) -> list[str]:
    """Return the changes of a job that make its channels read other data.

    Raises:
        UserError: The job has no such channel, or several where none is named; or there is no such file or folder.
    """
    if not data:
        return []
    channels = list(previous.job().data)
    if not channels:
        hint = "its datasets() reads no channel: leave out --data, or add a channel to the job and train again"
        raise UserError(f"the job of {previous.run} has no data channel", hint)
    found = []
    for name, uri in data.items():
        channel = name or (channels[0] if len(channels) == 1 else "")
        if not channel:
            raise UserError("the job has several channels", f"name one: --data {channels[0]}={uri}")
        if channel not in channels:
            raise UserError(f"the job has no channel {channel}", did_you_mean(channel, channels))
        if "://" not in uri and not Path(uri).exists():
            raise UserError(
                f"there is no file or folder {uri}", "name a folder, a file or an s3:// uri"
            )
        found.append(f"data.{channel}.uri={uri if '://' in uri else Path(uri).resolve()}")
    return found


def _find_weights(
    backend: Backend,
    run: str,
    plan: Mapping[str, Any],
    status: Status,
    checkpoint: int | str | None,
) -> tuple[str, int | None]:
    """Return the uri of the weights, and their step if it is known.

    Raises:
        UserError: There is no such checkpoint; or neither final weights nor a complete checkpoint.
    """
    model = status.artifacts.get("model")
    if checkpoint is None and status.state is State.SUCCEEDED and model is not None:
        exports_best = plan["job"].get("train", {}).get("export") == BEST
        return model, _exported_step(backend, run) if exports_best else status.progress.last_step
    folder = CheckpointFolder.of_plan(plan, run, backend.storage_environ())
    if not isinstance(checkpoint, str):
        found = folder.find(checkpoint)
        return found.uri, found.step
    best = next(
        (each for each in folder.list() if each.best and each.run in (None, folder.run)), None
    )
    if best is None:
        hint = f"only runs with train.export: best mark one; see: cloudtrain checkpoints {run}"
        raise UserError(f"{run} has no checkpoint that is marked as best", hint)
    return best.uri, best.step


def _exported_step(backend: Backend, run: str) -> int | None:
    """Return the step of the best weights, which a run has exported; None if its log does not have it."""
    events = [parse_event(line.text) for line in backend.logs(run, only=EVENT_LINES)]
    return next(
        (
            each.get("best_step")
            for each in reversed(events)
            if each and each["event"] == "finished"
        ),
        None,
    )


def fetch_code(storage: RunStorage, plan: Mapping[str, Any], local: Plan) -> None:
    """Copy the bundle of a run in the account to where a local plan expects it.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    archive = path_of(local.locations.code)
    if archive.is_file():
        return
    channels = {channel["ChannelName"]: channel for channel in plan["request"]["InputDataConfig"]}
    if CODE_CHANNEL not in channels:
        raise UserError("the code of this run is in no channel", "leave out --local")
    folder, _, name = str(channels[CODE_CHANNEL]["DataSource"]["S3DataSource"]["S3Uri"]).rpartition(
        "/"
    )
    content = open_source(folder, storage.make_s3).read(name)
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_name(f".{archive.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(archive)
