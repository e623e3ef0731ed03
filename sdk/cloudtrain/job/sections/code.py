"""The `code` section of job.yaml: the code folder, its entry, arguments, environment and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_serializer

from cloudtrain.job.arguments import check_script_arguments, to_document
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.fields import Section, Text, matching
from cloudtrain.support.aws_names import arn_pattern
from cloudtrain_runtime.contract import SecretConfig
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.run_variables import setter_of
from cloudtrain_runtime.contract.strict_json import dump_json

_SHELL_VARIABLES = ("BASH_ENV", "SHELLOPTS", "PS4")
"""Bash starts the container and executes commands from these variables (bash(1), "Invocation")."""
_VARIABLE = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
"""Source: botocore's model of TrainingEnvironmentKey."""
_SECRET_FORM = matching(
    lazy_pattern(rf"(?:{arn_pattern('secretsmanager', 'secret:')})?[A-Za-z0-9/_+=.@-]{{1,512}}"),
    "the name or ARN of a secret",
    "to list them: aws secretsmanager list-secrets",
)
"""Source: API reference of CreateSecret, 2026-11. AWS appends six characters to the name in an ARN."""
_TASK_FORM = matching(
    lazy_pattern(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"),
    "module:Class, such as gpt:GPT",
    "for gpt.py and its class GPT write gpt:GPT",
)
_MODULE_FORM = matching(
    lazy_pattern(r"(?!.*\.py$)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"),
    "a module as python -m takes it, such as package.train",
    "for package/train.py write package.train, or script: package/train.py",
)
_SHELL_NAME = lazy_pattern(r"~[^/]*/|~$|.*\$[\w{]")
"""A name that a shell would replace, such as `~/.cache/out/` or `$SM_MODEL_DIR/x`; here it would be a folder `~`."""
_ENTRIES = ("task", "script", "module", "command")


class Secret(Section):
    """Environment variable whose value the run reads from AWS Secrets Manager, with its role, when it starts."""

    secret: Annotated[str, _SECRET_FORM] = Field(examples=["team/wandb"])
    """Name or ARN of a secret; a name is looked up in the job's region."""
    key: str | None = Field(None, examples=["api_key"])
    """Key of a secret that is a JSON object; default: all of the secret's text."""
    stage: str | None = Field(None, examples=["AWSPREVIOUS"])
    """Staging label of the version to read; default: the current version."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        for name in ("key", "stage"):
            if getattr(self, name) == "":
                yield Diagnostic("expected a name, got nothing", (name,), "leave it out")


def _variable_tag(value: object) -> str:
    return "Secret" if isinstance(value, Mapping | Secret) else "text"


Variable = Annotated[
    Annotated[Secret, Tag("Secret")] | Annotated[Text, Tag("text")], Discriminator(_variable_tag)
]


class Code(Section):
    """The code folder and what is started in it."""

    directory: str = "."
    """Folder to upload, relative to the job file; .gitignore and .cloudtrainignore are honoured."""
    task: Annotated[str, _TASK_FORM] | None = Field(None, examples=["gpt:GPT"])
    """A Task for the shared entrypoint, as module:Class below the directory, in place of a script or module."""
    script: str | None = Field(None, examples=["train.py"])
    """A Python script that torchrun can start, unchanged, relative to the directory."""
    module: Annotated[str, _MODULE_FORM] | None = Field(None, examples=["package.train"])
    """A module that starts as `python -m package.train` would, in place of a task or script."""
    command: tuple[Text, ...] | None = Field(None, examples=[["bash", "train.sh"]])
    """Program and arguments, started once per instance without a shell; replaces $SM_MODEL_DIR and other variables."""
    args: dict[str, Any] | tuple[Any, ...] = Field(default_factory=dict, examples=[{"layers": 4}])
    """Keyword arguments of the Task, or argv of the script: a list, or a mapping (--key value, true a bare --key)."""
    requirements: str | None = Field(None, examples=["requirements.txt"])
    """Requirements file below the directory, installed in the container before the start."""
    env: dict[str, Variable] = Field(default_factory=dict, examples=[{"OMP_NUM_THREADS": "8"}])
    """Environment variables of every process of the run; reference keys and tokens by {secret: name}."""
    include: tuple[str, ...] = Field((), examples=[["../shared_lib"]])
    """Folders outside of the directory, relative to the job file, that the code imports by the folder's name."""
    outputs: tuple[str, ...] = Field((), examples=[["out/", "snapshot.pt"]])
    """Files, and folders that end with `/`, that a script writes below the directory; kept with its checkpoints."""
    launcher: Literal["own", "torchrun"] | None = Field(None, examples=["own"])
    """For a command: own starts it without RANK, LOCAL_RANK, WORLD_SIZE; default: own where its program is a launcher."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if [getattr(self, name) for name in _ENTRIES].count(None) != len(_ENTRIES) - 1:
            message = "give exactly one of task, script, module and command"
            hint = "task: module:Class, script: train.py, module: package.train, or command: [bash, train.sh]"
            yield Diagnostic(message, (), hint, tuple((name,) for name in _ENTRIES))
        if self.task is not None and not isinstance(self.args, dict):
            yield Diagnostic(
                "a Task takes keyword arguments: write a mapping", ("args",), "args: {layers: 4}"
            )
        for name in ("script", "requirements"):
            path = getattr(self, name)
            if path is not None and (
                PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts
            ):
                hint = "give it relative to code.directory; only files in that folder are uploaded"
                yield Diagnostic(
                    f'expected a path below the directory, got "{path}"', (name,), hint
                )
        if self.command is not None and not (self.command and self.command[0]):
            yield Diagnostic(
                "expected a program and its arguments", ("command",), "for example [bash, train.sh]"
            )
        if self.launcher is not None and self.command is None:
            message = "only a command has a launcher; torchrun starts the ranks of all else"
            hint = "remove it, or start the script with command: [python, train.py]"
            yield Diagnostic(message, ("launcher",), hint, is_key=True)
        yield from self._variable_errors()
        yield from self._argument_errors()
        yield from self._output_errors()

    def _variable_errors(self) -> Iterator[Diagnostic]:
        for name in self.env:
            if setter := setter_of(name):
                message = f"{setter} sets this variable for each rank"
                yield Diagnostic(message, ("env", name), "remove it", is_key=True)
            if name in _SHELL_VARIABLES:
                message = "the shell that starts the container executes this variable"
                yield Diagnostic(
                    message, ("env", name), "set it in the script, for what needs it", is_key=True
                )
        for name in self.secrets:
            if not _VARIABLE.fullmatch(name):
                message = "expected the name of a variable: letters, digits and underscores"
                yield Diagnostic(message, ("env", name), "rename it", is_key=True)

    def _argument_errors(self) -> Iterator[Diagnostic]:
        """Yield arguments that would change on their way: argv is text, and a Task's arguments are JSON."""
        if self.task is None:
            yield from check_script_arguments(self.args)
            return
        try:
            dump_json(self.args)
        except (TypeError, ValueError) as error:
            message = f"arguments are sent as JSON: {error}"
            yield Diagnostic(message, ("args",), "use text, numbers, lists and mappings")

    def _output_errors(self) -> Iterator[Diagnostic]:
        if self.outputs and self.task is not None:
            message = "outputs are for scripts; the runtime keeps a Task's model and checkpoints"
            yield Diagnostic(
                message, ("outputs",), "have the Task write to context().output_dir", is_key=True
            )
        for index, name in enumerate(self.outputs):
            path = PurePosixPath(name)
            others = [PurePosixPath(other) for other in self.outputs[:index]]
            if (
                path.is_absolute()
                or ".." in path.parts
                or not path.parts
                or _SHELL_NAME.match(name)
            ):
                message = f'expected a path below the directory, got "{name}"'
                hint = (
                    "for example out/ for a folder, snapshot.pt for a file; other files are kept if the script writes "
                    "them to $SM_MODEL_DIR, $SM_OUTPUT_DATA_DIR or /opt/ml/checkpoints"
                )
                yield Diagnostic(message, ("outputs", index), hint)
            elif re.search(r"[*?\[]", name):
                message = f'patterns are not supported, got "{name}"'
                yield Diagnostic(message, ("outputs", index), "name the folder (out/) or each file")
            elif any(path.is_relative_to(other) or other.is_relative_to(path) for other in others):
                yield Diagnostic(
                    f'"{name}" overlaps another output', ("outputs", index), "remove one of the two"
                )

    @field_serializer("args", when_used="json")
    def _serialize_args(self, args: dict[str, Any] | tuple[Any, ...]) -> Any:
        return args if self.task is not None else to_document(args)

    @property
    def entry(self) -> str:
        """What is started: the Task, script, module or command, as the job file names it."""
        return self.task or self.script or self.module or " ".join(self.command or ())

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables whose values are in the job file."""
        return {name: value for name, value in self.env.items() if isinstance(value, str)}

    @property
    def secrets(self) -> dict[str, SecretConfig]:
        """The environment variables whose values are in Secrets Manager."""
        return {
            name: SecretConfig(value.secret, value.key, value.stage)
            for name, value in self.env.items()
            if isinstance(value, Secret)
        }
