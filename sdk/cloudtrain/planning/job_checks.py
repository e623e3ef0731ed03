"""Checks of a job for what the container would reject later, and warnings about likely surprises."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from cloudtrain import catalog
from cloudtrain.errors import nearest
from cloudtrain.job.arguments import script_argv
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.launcher_choice import OWN, TORCHRUN, choose_launcher, find_rank_starter
from cloudtrain.job.rank_starters import HOSTS_OPTIONS
from cloudtrain.job.requirements import Requirements
from cloudtrain.job.sections.reporting import qualified_name
from cloudtrain.job.spec import JobSpec
from cloudtrain.job.static_analysis.config_files import contains, named_files
from cloudtrain.job.static_analysis.conventions import ScriptConventions
from cloudtrain.job.static_analysis.signs import CHECKPOINT_FOLDER, is_kept
from cloudtrain.planning.diagnostics import Step, decision, error, warning
from cloudtrain.planning.placement import TORCH_DISTRIBUTED
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.planning.storage_layout import ResumeSource, local_uri, split_checkpoint
from cloudtrain.secrets.values import contains_secret, is_secret_argument, is_secret_variable
from cloudtrain.support.container_paths import CHECKPOINTS
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import OUTPUTS_FOLDER
from cloudtrain_runtime.contract.file_uri import path_of

_LARGE_CODE_BYTES = 100 * 10**6


def check_abilities(spec: JobSpec) -> Iterator[Diagnostic]:
    """Reject options that the launcher or the shared entrypoint does not support."""
    yield from _check_metrics(spec)
    if spec.code.outputs and spec.cluster.distribution not in ("auto", TORCH_DISTRIBUTED):
        message = f"cloudtrain's launcher saves outputs, and {spec.cluster.distribution} does not use that launcher"
        yield error(
            ("code", "outputs"),
            message,
            f"use distribution: {TORCH_DISTRIBUTED}, or write to SM_MODEL_DIR",
        )
    if spec.code.command is not None and spec.cluster.distribution not in (
        "auto",
        TORCH_DISTRIBUTED,
    ):
        message = f"cloudtrain's launcher starts a command, and {spec.cluster.distribution} does not use that launcher"
        yield error(
            ("code", "command"), message, f"use distribution: {TORCH_DISTRIBUTED}, or a script"
        )
    if spec.cluster.network.isolation and spec.cluster.preferred_instances > 1:
        yield from _check_isolated_hosts(spec)
    for name, channel in spec.data.items():
        if channel.mode == "Pipe" and spec.train is not None:
            message = "a Task reads a channel's files, but Pipe mode delivers one stream without file names"
            yield error(
                ("data", name, "mode"), message, "use FastFile, which streams on read, or File"
            )


def _check_metrics(spec: JobSpec) -> Iterator[Diagnostic]:
    if spec.train is not None and spec.metrics:
        yield error(
            ("metrics",), "a Task reports its metrics itself; patterns are for scripts", "remove it"
        )
    if "total" in spec.metrics and "step" not in spec.metrics:
        yield error(
            ("metrics", "total"),
            "the total counts steps, and no pattern finds the step",
            "add step",
        )
    for name in spec.metrics:
        if qualified_name(name) != name and qualified_name(name) in spec.metrics:
            yield error(
                ("metrics", name),
                f"is the same metric as {qualified_name(name)}",
                "remove one of them",
            )
    if (
        spec.train is None
        and spec.metrics
        and spec.cluster.distribution not in ("auto", TORCH_DISTRIBUTED)
    ):
        yield warning(
            f"metrics: cloudtrain's launcher reads them, and {spec.cluster.distribution} does not use that launcher: "
            "they are in CloudWatch only, not in status"
        )


def _check_isolated_hosts(spec: JobSpec) -> Iterator[Diagnostic]:
    """Reject checkpoints of several hosts that cannot reach S3, because each host has its own /opt/ml/checkpoints."""
    if spec.train is not None:
        message = (
            f"a Task on {spec.cluster.preferred_instances} isolated instances could not save a checkpoint: without "
            "network access its ranks write to /opt/ml/checkpoints, which is a separate disk on each host"
        )
        hint = "use isolation: false with subnets that reach only S3, or one instance"
        yield error(("cluster", "network", "isolation"), message, hint)
    else:
        yield warning(
            "isolated instances cannot save one checkpoint together by cloudtrain_runtime.checkpoint; SageMaker keeps "
            "the files that the script writes to /opt/ml/checkpoints, those of all hosts in one folder"
        )


def check_resume_source(spec: JobSpec, resumed: ResumeSource | None) -> Iterator[Diagnostic]:
    """Reject a run that does not exist, and a single checkpoint where only the newest of a folder can be loaded."""
    if resumed is None and is_run_id(spec.checkpoint.resume.rpartition(":")[2]):
        yield error(
            ("checkpoint", "resume"),
            f"there is no run {spec.checkpoint.resume} here",
            "see: cloudtrain list",
        )
    if (
        resumed is not None
        and split_checkpoint(resumed.checkpoints)[1]
        and spec.cluster.network.isolation
    ):
        message = "an isolated container resumes from the newest checkpoint of a folder, not from a single one"
        hint = "name the folder, or set cluster.network.isolation: false"
        yield error(("checkpoint", "resume"), message, hint)


def check_initial_weights(spec: JobSpec, *, is_local: bool) -> Iterator[Diagnostic]:
    """Name the weights that a new run starts with, and reject those that it cannot read."""
    if spec.train is None or spec.train.init_from is None:
        return
    at = ("train", "init_from")
    source = spec.train.init_from
    is_path = not source.startswith("s3://")
    path = path_of(local_uri(spec, source))
    if is_run_id(source.rpartition(":")[2]):
        yield error(at, f"there is no run {source} here", "see: cloudtrain list")
    elif is_path and not is_local:
        yield error(
            at,
            "a cluster cannot read a path on this machine",
            "copy it to S3 first, and name its s3:// uri",
        )
    elif is_path and not path.exists():
        near = nearest(path.name, [each.name for each in path.parent.glob("*")])
        hint = "name a model.pt, a folder of checkpoints, or the id of a run"
        if near is not None:
            hint = f"did you mean {path.with_name(near)}?"
        yield error(at, f"there is no file or folder {path}", hint)
    elif not is_path and spec.cluster.network.isolation:
        hint = "set isolation: false, with subnets that reach only S3"
        yield error(at, "an isolated container cannot read S3", hint)
    yield decision(
        f"train.init_from: a new run starts with the weights of {source}; a resumed one has its own"
    )


def warn_about_code(
    spec: JobSpec, size: int, conventions: ScriptConventions
) -> Iterator[Diagnostic]:
    """Warn about large code, and about intervals of checkpoints and evaluations that are never reached."""
    if size > _LARGE_CODE_BYTES:
        yield warning(
            f"the code folder has {format_size(size)}: list data in .cloudtrainignore, and make it a channel"
        )
    every = spec.checkpoint.every
    train = spec.train
    if train is None:
        given = sorted(spec.checkpoint.model_fields_set & {"every", "keep"})
        if given and not conventions.saves_by_runtime:
            names = " and ".join(f"checkpoint.{name}" for name in given)
            have = "has" if len(given) == 1 else "have"
            yield warning(
                f"{names} {have} an effect only where the script saves by cloudtrain_runtime.checkpoint or an attached "
                "trainer (cloudtrain_runtime.integrations)"
            )
        return
    if train.steps is not None and every.steps is not None and every.steps > train.steps:
        yield warning(
            f"the run ends after {count(train.steps, 'step')}, before the first checkpoint at step {every.steps}"
        )
    if every.seconds is not None and every.seconds > spec.limits.runtime:
        yield warning(
            "checkpoint.every is longer than limits.runtime: only the last checkpoint would be written"
        )
    if (
        train.steps is not None
        and train.evaluate
        and (train.evaluate.every.steps or 0) > train.steps
    ):
        yield warning(
            f"the run ends after {count(train.steps, 'step')}, before the first evaluation"
        )


def describe_outputs(spec: JobSpec, checkpoints: str) -> Iterator[Diagnostic]:
    """Add where a script's outputs are kept, and warn about names that look like folders without a slash."""
    if spec.code.outputs:
        kept = f"{checkpoints.rstrip('/')}/{OUTPUTS_FOLDER}"
        yield decision(
            f"code.outputs: kept in {kept}; a run that resumes finds them in its code folder"
        )
    for name in spec.code.outputs:
        if not name.endswith("/") and not PurePosixPath(name).suffix:
            yield warning(
                f"code.outputs: {name} is treated as a file; a folder ends with a slash: {name}/"
            )


def find_local_rank_option(spec: JobSpec, conventions: ScriptConventions) -> Step[str | None]:
    """Return the option that passes each rank of a script its local rank, or None when it needs none.

    `python -m torch.distributed.launch` passed this option; torchrun does not. It is not added when the script does not
    define it, or the job passes it.
    """
    option = conventions.local_rank
    if option is None or spec.code.task is not None:
        return None
    given = [word.partition("=")[0].replace("_", "-") for word in script_argv(spec.code.args)]
    if "--local-rank" in given:
        return None
    yield decision(
        f"{spec.code.entry} defines {option}: each rank gets {option}=<its local rank>, as torch.distributed.launch "
        "passes it"
    )
    return option


def decide_launcher(spec: JobSpec, processes: int | None) -> Step[str]:
    """Return the launcher of a command, `own` or `torchrun`; empty for a job without a command.

    `processes` is the number of ranks per instance that cloudtrain starts.
    """
    choice = choose_launcher(spec.code, processes)
    if choice is None:
        return ""
    if choice.name == OWN and processes != 1:
        message = (
            f"a command with a launcher of its own starts once per instance, not {processes} times"
        )
        yield error(
            ("code", "launcher"), message, "remove cluster.processes_per_instance, or this field"
        )
    if processes == 1:
        yield from _warn_of_lone_hosts(spec)
    gets = "gets" if choice.name == TORCHRUN else "does not get"
    yield decision(
        f"launcher: {choice.name}, {choice.why}: the command {gets} RANK, LOCAL_RANK and WORLD_SIZE"
    )
    return choice.name


def _warn_of_lone_hosts(spec: JobSpec) -> Iterator[Diagnostic]:
    """Warn of a launcher that starts ranks on several instances without an option that joins them."""
    code = spec.code
    instances = spec.cluster.preferred_instances
    starter = find_rank_starter(code.command or ())
    if (
        starter is None
        or starter not in HOSTS_OPTIONS
        or instances == 1
        or "PET_NNODES" in code.env
    ):
        return
    names = [f"--{name}" for name in code.args] if isinstance(code.args, dict) else code.args
    given = {
        str(word).partition("=")[0].replace("-", "_") for word in (*(code.command or ()), *names)
    }
    options = HOSTS_OPTIONS[starter]
    own = options.partition(" ")[0]
    # A file with the configuration of accelerate may have the number, too.
    if given.isdisjoint(each.replace("-", "_") for each in (own, "--config_file")):
        yield warning(
            f"{starter} has no {own}: each of the {instances} instances trains a model of its own. Add {options}"
        )


def warn_about_script(spec: JobSpec, code: CodeInfo, processes: int | None) -> Iterator[Diagnostic]:
    """Warn about ranks and checkpoints in a script's source.

    `processes` is the number of ranks per instance that cloudtrain starts; None when it is unknown before the start.
    """
    conventions = code.conventions
    yield from map(warning, conventions.start_faults)
    if not _extends_path(spec, code.requirements):
        yield from _warn_of_import_path(spec, conventions, code.requirements)
    if spec.code.task is not None:
        return
    yield from map(warning, conventions.hidden_failures)
    if processes != 1:
        yield from _warn_of_own_ranks(conventions, processes)
    if conventions.own_address is not None and spec.cluster.preferred_instances > 1:
        yield warning(
            f"{conventions.own_address} sets MASTER_ADDR to its own host, so that the ranks of "
            f"{spec.cluster.preferred_instances} instances cannot meet: remove the line. cloudtrain sets MASTER_ADDR and "
            "MASTER_PORT, those of the first host"
        )
    is_alone = processes == 1 and spec.cluster.preferred_instances == 1
    if not conventions.joins and not conventions.starts_ranks and not is_alone:
        yield warning(
            f"{spec.code.entry} shows no sign of torch.distributed or of a framework that uses it: without a process "
            "group each rank trains a model of its own. Join the ranks (torch.distributed.init_process_group), or use "
            "one instance and cluster.processes_per_instance: 1"
        )
    if conventions.fresh_start is not None:
        yield warning(conventions.fresh_start)
    if not keeps_checkpoints(spec, conventions):
        text = (
            f"{spec.code.entry} shows no sign of checkpoints that are kept: neither cloudtrain_runtime.checkpoint, an "
            f"attached trainer nor {CHECKPOINTS}, and the job has no code.outputs. An interrupted run starts from the "
            "beginning"
        )
        if spec.limits.hang is not None and not conventions.reports:
            text += (
                ", and limits.hang cannot detect a hang without reports of progress (cloudtrain_runtime.report, or "
                "metrics: patterns)"
            )
        yield warning(text)


def may_use_several_gpus(spec: JobSpec, conventions: ScriptConventions) -> bool:
    """Return whether one process that cloudtrain starts may use several GPUs, by processes of its own or by itself."""
    if spec.code.task is not None:
        return False
    is_command = spec.code.command is not None
    return is_command or conventions.starts_ranks or conventions.splits_batches


def warn_about_last_batch(
    spec: JobSpec, conventions: ScriptConventions, world_size: int
) -> Iterator[Diagnostic]:
    """Warn about code of a Task that fails where ranks have different numbers of samples."""
    train = spec.train
    if train is None or conventions.gathers is None or train.drop_last:
        return
    if world_size > train.parallel.group_size:
        yield warning(
            f"{conventions.gathers}, which needs equal shapes on all ranks, and in the last step of an epoch and in "
            "evaluations ranks can have different numbers of samples: set train.drop_last: true, or pad the tensors"
        )


def keeps_checkpoints(spec: JobSpec, conventions: ScriptConventions) -> bool:
    """Return whether a script or its job names a place for checkpoints that are kept."""
    if conventions.saves or spec.code.outputs:
        return True
    args = spec.code.args
    arguments = args.values() if isinstance(args, dict) else args
    if any(is_kept(str(value)) for value in (*arguments, *spec.code.variables.values())):
        return True
    # The folder may be named in a configuration file of the code.
    return contains(named_files(spec.code_directory, script_argv(args)), CHECKPOINT_FOLDER)


def _warn_of_import_path(
    spec: JobSpec, conventions: ScriptConventions, requirements: Requirements
) -> Iterator[Diagnostic]:
    """Warn about modules of the job's own that Python does not find where they are, and no requirement brings."""
    starts_in = "the code folder"
    if "/" in (spec.code.script or ""):
        starts_in = str(PurePosixPath(str(spec.code.script)).parent)
    for imported, folder in conventions.path_imports:
        if _is_required(imported, requirements):
            continue
        where = f"in {folder} of the code folder"
        if folder == ".":
            where = "at the root of the code folder"
        yield warning(
            f"{imported}, which is {where}, but Python's import path begins in {starts_in}, so the code cannot start: "
            f"add code.env: {{PYTHONPATH: {folder}}}"
        )


def _is_required(imported: str, requirements: Requirements) -> bool:
    """Return whether the requirements name the package of an import, which is given as `file:line imports module`."""
    names = {each.name for each in requirements.lines}
    return not names.isdisjoint(catalog.packages_of(imported.rpartition(" ")[2]))


def _extends_path(spec: JobSpec, requirements: Requirements) -> bool:
    """Return whether the job sets PYTHONPATH, or installs a package of its code folder."""
    return "PYTHONPATH" in spec.code.env or any(each.is_folder for each in requirements.lines)


def _warn_of_own_ranks(
    conventions: ScriptConventions, processes: int | None
) -> Iterator[Diagnostic]:
    started = f"cloudtrain starts {processes or 'several'} ranks on each instance"
    if conventions.spawn is not None:
        yield warning(
            f"{conventions.spawn} starts processes with torch.multiprocessing.spawn, and {started}, each of which "
            "would do so: where these are its ranks, use cluster.processes_per_instance: 1"
        )
    if conventions.launcher is not None:
        yield warning(
            f"{conventions.launcher} starts a launcher of ranks (torchrun, accelerate launch, deepspeed, yolo or Ray), and "
            f"{started}, each of which would do so: use cluster.processes_per_instance: 1"
        )
    if conventions.own_rank is not None:
        yield warning(
            f"{conventions.own_rank}, which torchrun has set for each rank: where the script computes its own ranks, "
            "use cluster.processes_per_instance: 1"
        )


_REJECTED = "looks like a secret, and everyone who may describe the job can read it"


def check_secrets(spec: JobSpec) -> Iterator[Diagnostic]:
    """Reject values that look like keys or tokens. A field gets one error."""
    named = list(_check_named_values(spec))
    yield from named
    rejected = {each.path for each in named}
    for at, value in _texts(spec.to_document(), ()):
        if at not in rejected and contains_secret(value):
            variable = str(at[-1]) if at[:2] == ("code", "env") else "NAME"
            yield error(at, f"contains a value that {_REJECTED}", _reference(variable))


def _check_named_values(spec: JobSpec) -> Iterator[Diagnostic]:
    for name, value in spec.code.variables.items():
        if is_secret_variable(name, value):
            yield error(("code", "env", name), _REJECTED, _reference(name))
    for name, value in spec.tags.items():
        if is_secret_variable(name, value):
            yield error(("tags", name), _REJECTED, _reference(_variable(name)))
    for at, name, value in _arguments(spec):
        if is_secret_argument(name, value):
            yield error(
                at,
                _REJECTED,
                f"have the code read it from its environment: {_reference(_variable(name))}",
            )


def _variable(name: str) -> str:
    return re.sub(r"\W", "_", name).upper()


def _reference(variable: str) -> str:
    return f"store it in AWS Secrets Manager, and write code.env.{variable}: {{secret: <its name or ARN>}}"


def _arguments(spec: JobSpec) -> Iterator[tuple[FieldPath, str, str]]:
    args = spec.code.args
    if isinstance(args, dict):
        yield from ((("code", "args", name), str(name), str(value)) for name, value in args.items())
        return
    for index, (word, following) in enumerate(zip(args, [*args, "--"][1:], strict=True)):
        name, equals, value = str(word).partition("=")
        if not name.startswith("-"):
            continue
        if equals:
            yield ("code", "args", index), name.lstrip("-"), value
        elif not str(following).startswith("-"):
            # The value is the next word.
            yield ("code", "args", index + 1), name.lstrip("-"), str(following)


def _texts(value: Any, at: FieldPath) -> Iterator[tuple[FieldPath, str]]:
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in pairs:
            yield from _texts(part, (*at, key))
