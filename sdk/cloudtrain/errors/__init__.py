"""Exceptions and exit codes.

CloudtrainError               exit code 1: a bug of cloudtrain, unless a subclass has another code
├── UserError                 2: the input is wrong; the hint says what to change
│   ├── SpecError             2: job.yaml, --set or constructor arguments; lists every problem
│   ├── SettingsError         2: the account's settings are missing or malformed
│   │   └── UntrustedSettingsError  2: a file beside the job gives settings that the user has not agreed to
│   ├── UntrustedHomeError    2: a folder of local runs came from elsewhere, and the user has not agreed to use it
│   ├── BundleError           2: the code folder cannot be packed
│   ├── RunNotFoundError      2: no such run
│   ├── NoCheckpointError     2: a run that is to be resumed has left no complete checkpoint
│   ├── UnreadableStateError  2: the files of a run are damaged or not readable
│   └── MissingExtraError     2: an optional dependency is not installed
├── CloudError                3: AWS refused or cannot be reached
│   ├── UnreachableError      3: no answer, a server error or throttling: the same call may succeed later
│   ├── CredentialsError      3: there are no credentials, or they have expired
│   ├── DriftError            3: the estimator was about to send a request that differs from the plan
│   └── NoCapacityError       3: no instances or quota for the job now; `--wait-for-capacity` retries it
├── DamagedCheckpointError    4: a checkpoint differs from what was written
└── (a run that fails or is stopped raises no exception: see `Status.exit_code`, 4 and 5)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.errors.python_hints import in_python
from cloudtrain_runtime.contract.nearest_name import did_you_mean as did_you_mean
from cloudtrain_runtime.contract.nearest_name import nearest as nearest
from cloudtrain_runtime.contract.redaction import redact

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_CLOUD = 3
EXIT_RUN_FAILED = 4
EXIT_RUN_ENDED_EARLY = 5
EXIT_INTERRUPTED = 130


class CloudtrainError(Exception):
    """Base class of the errors that cloudtrain raises.

    Messages may quote AWS and its clients, so keys, tokens and signed uris in them are redacted.

    Args:
        message: What is wrong, in one sentence.
        hint: What to do about it, or an empty string.
    """

    exit_code = EXIT_BUG

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = redact(message)
        self.hint = redact(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        """Return the message and the hint, as a traceback in Python shows them; see `for_terminal`."""
        return _join(self.message, in_python(self.hint))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows, which asks for it by this name: the sentence says where and what to do."""
        return [f"{type(self).__name__}: {self}"]

    def for_terminal(self) -> str:
        """Return the message and the hint with the commands to type."""
        return _join(self.message, self.hint)


def _join(message: str, hint: str) -> str:
    return f"{message}\n  {hint}" if hint else message


class UserError(CloudtrainError):
    """The input is wrong, and the user can correct it."""

    exit_code = EXIT_USER


@dataclass(frozen=True)
class Problem:
    """One mistake in a job file, in `--set` or in a constructor call.

    Attributes:
        file: Name of the job file or of a code file, or the option or constructor that gave the value.
        line: 1-based line of the value, or None where there is no file.
        column: 1-based column of the value, or None.
        path: Dotted path of the field, such as `cluster.instances`; empty for a mistake in the code.
        message: What is wrong and what was expected.
        hint: The nearest legal value or what to do; may be empty.
    """

    file: str
    line: int | None
    column: int | None
    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        body = ": ".join(part for part in (self.path, self.message) if part)
        text = f"{place}  {body}" + (f"; {self.hint}" if self.hint else "")
        # A job file may hold line breaks and terminal escapes.
        return redact("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


def _order(problem: Problem) -> tuple[bool, str, int, int, str]:
    code = problem.file if problem.file.endswith(".py") else ""
    return problem.line is None, code, problem.line or 0, problem.column or 0, problem.path


class SpecError(UserError):
    """A job is not valid. `problems` lists all mistakes in file order, those of the code last."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_order))
        super().__init__("\n".join(map(str, self.problems)))

    def __str__(self) -> str:
        return in_python(self.message)  # each problem has its hint


class SettingsError(UserError):
    """The account's settings are missing or malformed."""


class UntrustedSettingsError(SettingsError):
    """A `cloudtrain.toml` beside the job gives settings that the user has not agreed to.

    Args:
        file: Absolute path of the file.
        values: The file's values by setting name.
        own: How to use values of one's own; by default the variables of the settings.
    """

    def __init__(self, file: str, values: Mapping[str, str], own: str = "") -> None:
        self.file = file
        self.values = dict(values)
        given = ", ".join(f"{name} = {value}" for name, value in values.items())
        super().__init__(
            f"{file} gives {given}, and you have not agreed to use {'it' if len(values) == 1 else 'them'}",
            "to agree, once for these values: cloudtrain --trust COMMAND, or in Python find_settings(job, trust=True); "
            "to use your own instead: "
            + (own or ", ".join(f"CLOUDTRAIN_{name.upper()}=..." for name in values)),
        )


class UntrustedHomeError(UserError):
    """A folder of local runs is not known to be the user's own, for example because a cloned repository contains it.

    Args:
        home: The folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        super().__init__(
            f"{home} was not made by cloudtrain here, and the code in it would be executed as yours",
            "to use it from now on: cloudtrain --trust COMMAND; to use another folder: CLOUDTRAIN_HOME",
        )


class BundleError(UserError):
    """The code folder cannot be packed."""


class RunNotFoundError(UserError):
    """No run has this id."""


class NoCheckpointError(UserError):
    """A run that is to be resumed has left no complete checkpoint."""


class UnreadableStateError(UserError):
    """The state of a run cannot be read."""


class MissingExtraError(UserError):
    """An optional dependency is not installed."""


class CloudError(CloudtrainError):
    """AWS refused the call or cannot be reached."""

    exit_code = EXIT_CLOUD


class UnreachableError(CloudError):
    """AWS did not answer, failed, or throttled the request: the same call may succeed later."""


class CredentialsError(CloudError):
    """There are no credentials, or AWS does not accept them any more."""


class DriftError(CloudError):
    """The estimator was about to send a request that differs from the plan; nothing was sent."""


class NoCapacityError(CloudError):
    """A quota is used up, or AWS has no instances. Nothing was started."""


class DamagedCheckpointError(CloudtrainError):
    """A checkpoint differs from what was written."""

    exit_code = EXIT_RUN_FAILED
