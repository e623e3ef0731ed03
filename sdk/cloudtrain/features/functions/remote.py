"""`cloudtrain.remote`: a function that runs in each rank of a job, or a Task that a job trains."""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from cloudtrain.client import shortcuts
from cloudtrain.client.client import Client
from cloudtrain.errors import CloudError, UserError
from cloudtrain.features.functions.arguments import (
    bind_arguments,
    check_code,
    check_fields,
    named_space,
)
from cloudtrain.features.functions.job_of import job_of, write_job
from cloudtrain.features.functions.remote_mark import Remote, RemoteDecorator, mark
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State
from cloudtrain.support.backend_facts import PLACE_ARGUMENTS
from cloudtrain.support.features import offer
from cloudtrain.support.notebook.live_output import is_notebook
from cloudtrain_runtime.contract.returned_values import (
    RETURNED_FOLDER,
    ReturnedValueError,
    read_returned,
)

OF_A_RUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}
"""Environment variables that each rank has."""

P = ParamSpec("P")
T = TypeVar("T")


class RemoteFunction(Remote, Generic[P, T]):
    """A function that runs in each rank of a job, or a Task class that a job trains.

        train.submit(lr=0.1)   # a Run, at once
        train(lr=0.1)          # what rank 0 returned, at the end

    Attributes:
        function: The function as it was written; `train.function(lr=0.1)` calls it here.
    """

    function: Callable[P, T]

    def __init__(self, function: Callable[P, T], options: Mapping[str, Any]) -> None:
        check_code(function)
        check_fields(options, PLACE_ARGUMENTS)
        self.function = function
        self._options = dict(options)
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<remote function {self.function.__name__}{inspect.signature(self.function)}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the job, wait for its end and return what the call in rank 0 has returned; of a Task its trained model.

        A notebook shows the progress. An interrupt ends this call, not the run.

        Raises:
            SpecError: The job or its code is wrong; nothing was started.
            CloudError: The run did not succeed, or AWS refused or cannot be reached. The run's id is in the message.
            UserError: The function returned a value that does not travel back.
        """
        run = self.submit(*args, **kwargs)
        if is_notebook():
            run.follow()
        status = run.wait()
        if status.state is not State.SUCCEEDED:
            raise CloudError(
                f"{run.reference} is {status.state}: {status.reason}",
                f"see: cloudtrain explain {run.reference}",
            )
        value: Any = run.load_model() if isinstance(self.function, type) else returned_value(run)
        return cast("T", value)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec:
        """Return the job of a call.

        Raises:
            SpecError: Something that the function uses cannot travel, or a field is wrong.
            UserError: The arguments do not fit.
        """
        return job_of(self.function, bind_arguments(self.function, args, kwargs), **self._fields())

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Return the plan of a call: see `cloudtrain.plan`."""
        return shortcuts.plan(self.job(*args, **kwargs), **self._place())

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run:
        """Start the job of a call and return its run at once: see `cloudtrain.submit`.

        Raises:
            UserError: It is called inside a run.
        """
        if os.environ.keys() >= OF_A_RUN:
            raise UserError(
                f"{self.function.__name__} is called inside a run, which would start a run in each rank",
                f"call {self.function.__name__}.function(...), which runs here",
            )
        return shortcuts.submit(self.job(*args, **kwargs), **self._place())

    def write(self, folder: str | Path, *args: P.args, **kwargs: P.kwargs) -> Path:
        """Write the job of a call into a folder: `job.yaml` and the code that `submit` would send. Return the file.

        Raises:
            UserError: The folder has files already, or cannot be written.
        """
        return write_job(self.job(*args, **kwargs), folder)

    def rehearse(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Rehearse the job of a call on this machine: see `cloudtrain.rehearse`."""
        settings = self._options.get("settings")
        return offer("rehearse")(Client(settings), self.job(*args, **kwargs))

    def sweep(self, space: Mapping[str, Any], **fields: Any) -> Any:
        """Start a sweep over arguments and fields, and return it at once: see `cloudtrain.sweep`.

            train.sweep({"lr": {"log_uniform": [1e-4, 1e-1]}}, objective="train/loss", trials=8)

        Args:
            space: Values to search: arguments by their names, and fields of the job by their paths.
            fields: Further arguments of `cloudtrain.sweep`.
        """
        space = named_space(self.function, space)
        first = {
            key.removeprefix("code.args."): _first_value(value)
            for key, value in space.items()
            if key.startswith("code.args.")
        }
        job = job_of(self.function, first, **self._fields())
        return offer("sweep")(job, space, **{**self._place(), **fields})

    def options(self, **options: Any) -> RemoteFunction[P, T]:
        """Return the function with other options: `train.options(instances=4).submit(lr=0.1)`."""
        return RemoteFunction(self.function, {**self._options, **options})

    def _fields(self) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if name not in PLACE_ARGUMENTS}

    def _place(self) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if name in PLACE_ARGUMENTS}


def _first_value(domain: Any) -> Any:
    """Return a value of a domain, which the job needs before the sweep chooses."""
    if isinstance(domain, Mapping) and domain:
        values = next(iter(domain.values()))
        return values[0] if isinstance(values, list | tuple) and values else values
    return domain


@overload
def remote(function: Callable[P, T], /, **options: Any) -> RemoteFunction[P, T]: ...
@overload
def remote(
    *, job: JobSpec | str | Path | None = None, **options: Any
) -> Callable[[Callable[P, T]], RemoteFunction[P, T]]: ...
def remote(function: Any = None, /, **options: Any) -> Any:
    """Let a function run in each rank of a job, under torchrun, with the process group not yet formed.

    A Task class is given as it is: `trainer = cloudtrain.remote(MyTask, instances=2, train={"epochs": 3})`.

        @cloudtrain.remote(instances=2, backend="local")
        def train(lr): ...

        run = train.submit(lr=0.1)

    Its source travels, with that of the functions, classes, constants and local modules that it uses.

    Args:
        function: The function.
        options: Where it runs, as in `cloudtrain.submit` (`backend`, `site`), `job` with defaults, and fields of a job
            file by their names; those of `cluster` directly, such as `instances=2`.
    """
    if function is not None:
        return RemoteFunction(function, options)
    return _Decorator(options)


mark(remote)


class _Decorator(RemoteDecorator):
    """What `remote(...)` returns before it has the function."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_fields(options, PLACE_ARGUMENTS)
        self._options = options

    def __call__(self, function: Callable[P, T]) -> RemoteFunction[P, T]:
        return RemoteFunction(function, self._options)


def returned_value(run: Run) -> Any:
    """Return what the function of a run that succeeded has returned in rank 0; None if it returned nothing.

    Nothing of the run is executed: values are JSON, arrays and tensors are numbers.

    Raises:
        UserError: The value does not travel, or the run has not succeeded.
        CloudError: AWS refused or cannot be reached.
    """
    state = run.status().state
    if state is not State.SUCCEEDED:
        hint = (
            f"see: cloudtrain explain {run.reference}"
            if state.is_final
            else "wait for its end: run.wait()"
        )
        raise UserError(f"{run.reference} is {state}: it has returned nothing", hint)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run.download(folder, what="outputs", unpack=True)
        except UserError:
            # Without a value, the folder of outputs may be empty.
            return None
        found = next(Path(folder).rglob(f"{RETURNED_FOLDER}/value.json"), None)
        if found is None:
            return None
        try:
            return read_returned(found.parent)
        except ReturnedValueError as error:
            raise UserError(
                f"{run.reference}: {error}", f"see: cloudtrain logs {run.reference}"
            ) from None
