"""Output about a plan and the files of its bundle, and what a plan, a check or a submit shows while it works."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cloudtrain.client.observer import Observer
from cloudtrain.console import command_name, print_message, progress_bar
from cloudtrain.console.cells import cut_text
from cloudtrain.console.facts import print_facts, print_sentence
from cloudtrain.console.terminal import is_terminal
from cloudtrain.support.backend_facts import facts_of, place_name
from cloudtrain.support.notebook.summary import Row, count
from cloudtrain.support.shown_places import shown_place
from cloudtrain.support.units import format_duration, format_size, format_usd

if TYPE_CHECKING:
    from types import TracebackType

    from cloudtrain.bundle import Contents
    from cloudtrain.job.sections.recover import Recover
    from cloudtrain.planning.batch_job import BatchJob
    from cloudtrain.planning.plan import BatchPlan, LengthPlan, Plan
    from cloudtrain.runs.run import Run
    from cloudtrain.support.checks import Check
    from cloudtrain_runtime.contract import ParallelConfig, SecretConfig, TrainConfig


_MAX_LINES = 40
_STARTING = "starting the run"
_SENDERS = {
    "estimator": "an estimator of the SageMaker SDK, whose request is compared with this plan",
    "boto3": "boto3, without the SageMaker SDK",
}


def print_plan(plan: Plan, *, is_simulated: bool = False) -> None:
    """Print a plan as a table, without its warnings.

    Args:
        plan: The plan.
        is_simulated: Whether it is for the sandbox, which bills nothing.
    """
    cluster = plan.cluster
    command = plan.to_json()["command"]
    omitted = ""
    if command["omitted"]:
        omitted = f" (null omits {', '.join(command['omitted'])})"
    rows = [
        ("run", plan.run),
        ("command", f"{command['text']}{omitted}"),
        ("cluster", _cluster(plan)),
        (
            "distribution",
            f"{cluster.distribution}, started by the {cluster.launcher} launcher, {cluster.backend}",
        ),
        ("image", plan.image if plan.uses_account else _own_software(plan)),
    ]
    if devices := plan.config.cuda_on_cpu:
        rows.append(("CUDA", f"stand-in on the CPU: {devices} devices per instance"))
    rows += _training_rows(plan)
    if plan.queue is not None:
        rows.append(("queue", _queue(plan.queue)))
    rows += _setting_rows(plan)
    rows += [
        ("secret", _secret(name, reference)) for name, reference in plan.config.secrets.items()
    ]
    rows += [
        ("code", _code(plan)),
        *_source_rows(plan),
        *_data_rows(plan),
        ("checkpoints", f"{shown_place(plan.locations.checkpoints)}, {_checkpoints(plan)}"),
        *_output_rows(plan),
        *_member_rows(plan.job_document.get("request", {})),
        ("runtime", f"stopped after {format_duration(plan.max_runtime_seconds)}"),
    ]
    if plan.max_wait_seconds is not None:
        longest = format_duration(plan.max_wait_seconds)
        rows.append(("spot", f"stopped after {longest} of waiting and training"))
    if plan.sender is not None:
        rows.append(("sent by", _SENDERS[plan.sender]))
    rows += _cost_rows(plan, is_simulated=is_simulated)
    rows += _batch_job_rows(plan.batch_job)
    rows += _rehearsal_rows(plan)
    print_facts(rows)
    for decision in plan.decisions:
        print_sentence(f"  {decision}")


def _cluster(plan: Plan) -> str:
    cluster = plan.cluster
    if plan.uses_account:
        where = f"x {cluster.instance_type}"
    else:
        plural = "" if cluster.instances == 1 else "s"
        where = f"instance{plural} {place_name(plan.target)}"
    if plan.batch_job is not None:
        where += f" ({plan.batch_job.site})"
    each = cluster.processes_per_instance
    ranks = "rank" if each == 1 else "ranks"
    world_size = cluster.world_size or "?"
    return f"{cluster.instances} {where}, {each or '?'} {ranks} each, world size {world_size}"


def _cost_rows(plan: Plan, *, is_simulated: bool) -> list[Row]:
    """Return the rows of the estimate and of what it does not cover; none where nothing is billed."""
    if not plan.uses_account:
        if not plan.cost.usd_per_hour or plan.cost.max_usd is None:
            return []
        hourly = format_usd(plan.cost.usd_per_hour)
        most = format_usd(plan.cost.max_usd)
        return [("cost", f"{hourly} per hour, estimate {most} at its time limit")]
    cost = _cost(plan)
    if is_simulated:
        cost = f"nothing in the sandbox; an account would pay {cost}"
    rows = [("cost", cost)]
    if plan.cost.ceiling_usd is not None:
        rows.append(("not covered", "; ".join(plan.cost.not_covered)))
    return rows


def _own_software(plan: Plan) -> str:
    if facts_of(plan.target).is_on_this_machine:
        return "this machine's Python and torch"
    return "Python and torch of the nodes"


def _batch_job_rows(batch_job: BatchJob | None) -> list[Row]:
    """Return one row for each option of a batch job with its origin, and one for each line of its script."""
    if batch_job is None:
        return []
    rows = [("sbatch", f"{option}  ({option.origin})") for option in batch_job.options]
    return rows + [("script", line) for line in batch_job.script.splitlines()]


def _training_rows(plan: Plan) -> list[Row]:
    """Return the rows about the length of the training, its parallel layout and its batch, where they are known."""
    rows = []
    if plan.length.steps is not None or plan.length.epochs is not None:
        rows.append(("length", _length(plan.length)))
    train = plan.config.train
    if train is not None and not train.parallel.is_plain:
        rows.append(("parallel", _parallel(train.parallel, plan.cluster.world_size)))
    if plan.batch is not None:
        rows.append(("global batch", _global_batch(plan.batch, train)))
    return rows


def _global_batch(batch: BatchPlan, train: TrainConfig | None) -> str:
    shares = "ranks"
    if train is not None and train.parallel.group_size > 1:
        shares = "data ranks"
    number = batch.global_ // (batch.per_rank * batch.accumulate)
    per_step = f"{batch.per_rank} per rank x {batch.accumulate} x {number or '?'} {shares}"
    return f"{batch.global_ or '?'} samples ({per_step})"


def _code(plan: Plan) -> str:
    """Return the row of the code, with its folders outside of the job's: whose they are is for the reader to judge."""
    bundle = plan.bundle
    text = (
        f"{count(bundle.files, 'file')}, {format_size(bundle.bytes)}, sha256 {bundle.digest[:12]}"
    )
    code = plan.job_document.get("code", {})
    folders = (code.get("directory", "."), *code.get("include", ()))
    elsewhere = [each for each in folders if os.path.normpath(each).startswith(("..", os.sep))]
    if not elsewhere:
        return text
    return f"{text}, from {', '.join(elsewhere)}"


def print_warnings(plan: Plan) -> None:
    """Print the warnings of a plan to standard error, each once."""
    for warning in dict.fromkeys(plan.warnings):
        print_message(f"warning: {warning}")


def _rehearsal_rows(plan: Plan) -> list[Row]:
    """Return the receipt of the rehearsal; `none` only for a plan that warns about it."""
    from cloudtrain.client.receipts import is_worth_rehearsing

    if plan.rehearsal is not None:
        return [("rehearsal", plan.rehearsal["text"])]
    if not is_worth_rehearsing(plan):
        return []
    return [("rehearsal", "none for this code and request")]


def _setting_rows(plan: Plan) -> list[Row]:
    """Return one row per setting from a variable or file, with its value and source; none for a local run."""
    places = {each.name: f"{each.file}:{each.line}" for each in plan.settings_beside_job}
    rows = []
    for name, source in plan.settings.sources.items():
        # The command line has a flag already.
        if not plan.uses_account or source == "flag":
            continue
        value = getattr(plan.settings, name)
        text = value if isinstance(value, str) else ", ".join(value or ())
        rows.append(("setting", f"{name} = {text}, from {places.get(name, source)}"))
    return rows


def _queue(queue: Mapping[str, Any]) -> str:
    words = [str(queue["jobQueue"])]
    if "schedulingPriority" in queue:
        words.append(f"priority {queue['schedulingPriority']}")
    if "shareIdentifier" in queue:
        words.append(f"share {queue['shareIdentifier']}")
    if "quotaShareName" in queue:
        words.append(f"quota share {queue['quotaShareName']}")
    preemptions = queue.get("preemptionConfiguration", {}).get("preemptionRetriesBeforeTermination")
    if preemptions is not None:
        words.append(f"continues after {count(preemptions, 'preemption')}")
    return f"{', '.join(words)} (AWS Batch creates the training job when its turn comes)"


def _secret(name: str, reference: SecretConfig) -> str:
    key = "" if reference.key is None else f", key {reference.key}"
    stage = "" if reference.stage is None else f", stage {reference.stage}"
    return f"{name} = secret {reference.secret}{key}{stage}"


def _source_rows(plan: Plan) -> list[Row]:
    source = plan.bundle.source
    if source is None:
        return []
    commit = f"commit {source.commit[:12]}" if source.commit else "no commit yet"
    branch = f" on {source.branch}" if source.branch else ""
    changes = ", with changes that are not committed" if source.dirty else ""
    return [("source", f"{commit}{branch}{changes}")]


def _data_rows(plan: Plan) -> list[Row]:
    """Return one row per channel with its source, mode and, on this machine, size; and one about uploads of data."""
    from cloudtrain.support.data_files import data_files
    from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL
    from cloudtrain_runtime.contract.file_uri import path_of

    uploads = {upload.uri: Path(upload.path) for upload in plan.uploads}
    rows = []
    files = plan.bundle.files
    size = plan.bundle.bytes
    for channel in plan.request["InputDataConfig"]:
        name = channel["ChannelName"]
        source = channel["DataSource"].get("S3DataSource")
        if name in (CODE_CHANNEL, CONFIG_CHANNEL):
            continue
        if source is None:
            rows.append(("data", f"{name} from {_mounted(channel['DataSource'])}"))
            continue
        uri = source["S3Uri"]
        path = uploads.get(uri) or (path_of(uri) if uri.startswith("file:") else None)
        words = [f"{name} from {path or uri}", channel.get("InputMode", "File")]
        if source["S3DataDistributionType"] == "ShardedByS3Key":
            words.append("sharded over the instances")
        if path is not None:
            sizes = [each.path.stat().st_size for each in data_files(path)]
            words.append(f"{count(len(sizes), 'file')}, {format_size(sum(sizes))}")
            if uri in uploads:
                files += len(sizes)
                size += sum(sizes)
        rows.append(("data", ", ".join(words)))
    if uploads:
        text = f"code and data, {count(files, 'file')}, {format_size(size)}; code that S3 has is not uploaded again"
        rows.append(("upload", text))
    return rows


def _mounted(source: Mapping[str, Any]) -> str:
    """Return a data source that is not in S3: a file system with its folder, or what `request` names."""
    mount = source.get("FileSystemDataSource")
    if mount is None:
        return ", ".join(source)
    words = [mount["FileSystemType"], mount["FileSystemId"], mount["DirectoryPath"]]
    mode = "read-only" if mount["FileSystemAccessMode"] == "ro" else "writable"
    return f"{' '.join(words)}, mounted {mode}"


def _output_rows(plan: Plan) -> list[Row]:
    """Return where the model goes, and the training plan; no row for what the job leaves to cloudtrain."""
    rows = []
    output = plan.request.get("OutputDataConfig", {})
    if plan.job_document.get("output") and plan.uses_account:
        is_archive = output.get("CompressionType") != "NONE"
        form = "as model.tar.gz" if is_archive else "as files"
        rows.append(("model", f"{output.get('S3OutputPath')}, {form}"))
    if (reserved := plan.request.get("ResourceConfig", {}).get("TrainingPlanArn")) is not None:
        rows.append(("training plan", reserved.rpartition("/")[2]))
    return rows


def _member_rows(members: Mapping[str, Any], above: str = "") -> list[Row]:
    """Return one row for each value in the job's `request`."""
    from cloudtrain_runtime.contract.strict_json import dump_json

    rows = []
    for name, value in members.items():
        if isinstance(value, dict):
            rows += _member_rows(value, f"{above}{name}.")
        else:
            rows.append(("request", f"{above}{name} = {dump_json(value)}"))
    return rows


def _parallel(parallel: ParallelConfig, world_size: int) -> str:
    """Return the parallelism, such as `pipeline 2 (1f1b) x fsdp 4 x tensor 2`."""
    data = world_size // parallel.group_size or "?"
    shards = f" in shards of {parallel.shard}" if parallel.shard else ""
    offload = " in host memory" if parallel.offload else ""
    parts = []
    if parallel.pipeline > 1:
        parts.append(f"pipeline {parallel.pipeline} ({parallel.schedule})")
    parts.append(f"{parallel.data} {data}{shards}{offload}")
    if parallel.tensor > 1:
        parts.append(f"tensor {parallel.tensor}")
    return " x ".join(parts)


def _length(length: LengthPlan) -> str:
    if length.steps is None:
        return f"{count(length.epochs or 0, 'epoch')}; the number of steps depends on the dataset"
    samples = f", {count(length.samples, 'sample')}" if length.samples is not None else ""
    return f"{count(length.steps, 'step')}{samples}"


def _checkpoints(plan: Plan) -> str:
    every = plan.to_json()["checkpoint"]["every"]
    if plan.config.task is None:
        return f"every {every}, by cloudtrain_runtime.checkpoint or an attached trainer"
    if plan.length.checkpoints is None:
        return f"every {every}"
    return f"every {every}, at most {plan.length.checkpoints:,} written, {plan.config.checkpoint.keep} kept"


def _cost(plan: Plan) -> str:
    cost = plan.cost
    if cost.usd_per_hour is None or cost.max_usd is None:
        return "unknown"
    if cost.usd_per_hour == 0:
        return "paid in advance by the training plan"
    on_demand = ""
    if plan.max_wait_seconds is not None:
        on_demand = " on demand; spot is cheaper"
    age = 0
    if cost.price_as_of:
        age = (plan.created.date() - date.fromisoformat(cost.price_as_of)).days
    dated = f"prices of {cost.price_as_of}, {count(age, 'day')} old"
    estimate = f"estimate {format_usd(cost.max_usd)} at its time limit"
    if cost.warm_pool_usd:
        estimate += f", {format_usd(cost.warm_pool_usd)} of it for the warm pool"
    if cost.ceiling_usd is not None:
        estimate += f", limits.cost {format_usd(cost.ceiling_usd)}"
    return f"{format_usd(cost.usd_per_hour)} per hour{on_demand}, {estimate} ({dated})"


_SHORT_DIGEST = 13


def _print_file_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print size, name and reason of files."""
    padded = [(f"{size:>10}", name, f"({why})") for size, name, why in rows]
    if is_terminal():
        from cloudtrain.console.tables import Column, print_table

        columns = (
            Column("size", is_number=True),
            Column("file", least=30),
            Column("why", least=20, is_dim=True),
        )
        print_table(columns, padded, has_header=False)
        return
    for cells in padded:
        print("  ".join(cells))


def print_files(contents: Contents, *, show_all: bool) -> None:
    """Print the included and the excluded files; where the list would be long, one line per folder."""
    from cloudtrain.bundle import printable_name

    rows = [(entry.size, printable_name(entry.name), entry.why) for entry in contents.entries]
    if not show_all and len(rows) > _MAX_LINES:
        rows = _by_folder(rows)
    _print_file_rows([(format_size(size), name, why) for size, name, why in rows])
    info = contents.info
    digest = cut_text(info.digest, _SHORT_DIGEST) if is_terminal() else info.digest
    print(f"{format_size(info.bytes):>10}  in {count(info.files, 'file')}, sha256 {digest}")
    if contents.left_out:
        print("excluded:")
        lines = [(left.bytes, left.name, left.reason) for left in contents.left_out]
        _print_file_rows(
            [
                ("" if left_bytes is None else format_size(left_bytes), name, reason)
                for left_bytes, name, reason in (lines if show_all else lines[:_MAX_LINES])
            ]
        )
        if not show_all and len(lines) > _MAX_LINES:
            print(f"{'':>10}  and {len(lines) - _MAX_LINES} more, named with --all")
        if any(left.is_by_default for left in contents.left_out):
            print("  to include a file: a line such as !/model.pt in .cloudtrainignore")
    if contents.refused:
        print_message("rejected, because they look like secrets:")
        for finding in contents.refused:
            print_message(f"  {printable_name(str(finding))}")
        print_message(f"  {contents.hint}")


def _by_folder(rows: Sequence[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Return the files of the root folder, and one row for each of its subfolders."""
    sums: dict[tuple[str, str], list[int]] = {}
    for size, name, why in rows:
        top, slash, _ = name.partition("/")
        sums.setdefault((f"{top}{slash}", why), []).append(size)
    return [
        (sum(sizes), f"{name} {count(len(sizes), 'file')}" if name.endswith("/") else name, why)
        for (name, why), sizes in sums.items()
    ]


class StepObserver(Observer):
    """Shows the steps of a call on standard error. Use it as a context manager.

    A terminal shows the present step as a line that changes, and the steps that took long as lines. Elsewhere each step
    is a line when it begins.

    Args:
        text: What is shown until the first step.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from cloudtrain.console.waiting import waiting

        self._wait = self._stack.enter_context(waiting(self._text))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if kind is not None and is_terminal(sys.stderr):
            # The step that has failed, or what it has left.
            print_message(self._text)

    def on_progress(self, text: str) -> None:
        """Begin a step."""
        self._text = text
        self._wait.begin(text, is_long=True)
        self._wait.end(f"{text}: done")

    def on_detail(self, text: str) -> None:
        """Show how far the step is."""
        self._wait.show(text)

    def on_done(self, text: str, seconds: float) -> None:
        """Leave a line about the step if it took long."""
        del seconds
        self._wait.end(text)


class ConsoleObserver(Observer):
    """Draws progress bars and prints messages on standard error. Use it as a context manager.

    The plan's warnings are printed at the end of the block: the command's output may be redirected to a file in the
    code folder, which must not change while it is packed.

    Args:
        reading: Text of the progress bar while the code is read.
    """

    def __init__(self, reading: str = "reading the code") -> None:
        self._reading = reading
        self._stack = ExitStack()
        self._plan: Plan | None = None

    def __enter__(self) -> Self:
        from cloudtrain.console.waiting import waiting

        self._wait = self._stack.enter_context(waiting(self._reading))
        self._show_read = self._stack.enter_context(progress_bar(self._reading))
        self._show_upload = self._stack.enter_context(progress_bar("uploading"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from cloudtrain.planning.resumed_fields import CHANGE_PREFIX

        self._stack.__exit__(kind, error, trace)
        if self._plan is not None:
            if self._plan.rehearsal is not None:
                print_message(f"rehearsal: {self._plan.rehearsal['text']}")
            for each in self._plan.decisions:
                if each.startswith(CHANGE_PREFIX):
                    print_message(each)
            print_warnings(self._plan)

    def on_progress(self, text: str) -> None:
        """Show what is done now."""
        self._wait.begin(text, is_long=True)

    def on_detail(self, text: str) -> None:
        """Show how far it is."""
        self._wait.show(text)

    def on_done(self, text: str, seconds: float) -> None:
        """Leave a line about it if it took long."""
        del seconds
        self._wait.end(text)
        self._wait.begin(_STARTING)

    def on_read(self, bytes_done: int, bytes_total: int) -> None:
        """Draw how much of the code has been read."""
        self._show_read(bytes_done, bytes_total)

    def on_plan(self, plan: Plan) -> None:
        """Keep the plan for the end of the block."""
        self._plan = plan
        self._wait.begin(_STARTING)

    def on_checks(self, checks: tuple[Check, ...]) -> None:
        """Print the details, warnings and unknown results of the checks."""
        for check in checks:
            if check.is_shown:
                print_message(f"{check.name}: {check.detail}")
            if check.warning:
                print_message(f"warning: {check.warning}")
        names = [check.name for check in checks if check.result == "unknown"]
        if names:
            print_message(f"could not check: {', '.join(names)} (why: {command_name()} check JOB)")

    def on_upload(self, bytes_done: int, bytes_total: int) -> None:
        """Draw how much has been uploaded."""
        self._show_upload(bytes_done, bytes_total)

    def on_sent(self, run: Run) -> None:
        """Print the run that waits for its instances."""
        print_message(
            f"{run.reference} waits for its instances; Ctrl-C ends this command, not the run"
        )
        print_message(f"  to stop it: {command_name()} stop {run.reference}")
        self._wait.begin("waiting for its instances")

    def on_recover(self, limits: Recover) -> None:
        """Print how long the run continues by itself."""
        from cloudtrain.planning.recovery import describe_recovery

        print_message(describe_recovery(limits))

    def on_wait(self, reason: str, seconds: float) -> None:
        """Print why and when the submit is retried."""
        first_line = reason.strip().splitlines()[0]
        pause = format_duration(max(1, round(seconds)))
        print_message(f"no capacity yet: {first_line}; retry in {pause}")
        self._wait.begin(f"waiting {pause} for capacity")
