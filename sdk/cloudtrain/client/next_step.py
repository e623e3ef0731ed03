"""What to type after a run has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from cloudtrain.errors import EXIT_RUN_FAILED
from cloudtrain.support.backend_facts import backend_option

if TYPE_CHECKING:
    from cloudtrain.failure_rules import Explanation, Facts
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.status import Status


def explain_with_next_step(run: Run, status: Status) -> Explanation:
    """Read a run's log, and explain how it ended; the action names the way back to its checkpoint with new code."""
    return _explain(run, status, run.facts())


def _explain(run: Run, status: Status, facts: Facts) -> Explanation:
    from cloudtrain.failure_rules import explain_run

    # The log of a run that has succeeded or was stopped is not needed.
    lines = run.logs() if status.exit_code in (None, EXIT_RUN_FAILED) else ()
    found = explain_run(status, lines, facts)
    again = submit_again(status, found, facts)
    if again is None or run_to_continue(status, facts) is None:
        return found
    action = f"{found.action} Then begin with its checkpoint, by checkpoint.resume: {again}"
    return dataclasses.replace(found, action=action)


def explain_with_advice(run: Run, status: Status) -> Explanation:
    """Explain how a run ended; of one that has ended, also say what to change where little of its paid time was training.

    In an account, this reads the log of the host with the events once more.
    """
    facts = run.facts()
    found = _explain(run, status, facts)
    if not status.state.is_final:
        return found
    from cloudtrain.runs.ledger_advice import advise
    from cloudtrain.runs.ledger_reading import read_ledger

    return dataclasses.replace(found, advice=advise(read_ledger(run, status), facts))


def run_to_continue(status: Status, facts: Facts) -> str | None:
    """Return the run whose checkpoint continues the training: this one, or the one that it has resumed."""
    if status.progress.checkpoint is not None:
        return status.run
    return facts.get("checkpoint.resume_run")


def begin_again(run: str, earlier: str, *, program: str = "cloudtrain") -> str:
    """Return the command that repeats a resumed run without a checkpoint, from where it has begun."""
    return f"{program} resume {run} --set checkpoint.resume={earlier}"


def submit_again(
    status: Status,
    cause: Explanation,
    facts: Facts,
    job: str = "JOB",
    *,
    program: str = "cloudtrain",
    name: Callable[[str], str] = str,
) -> str | None:
    """Return the command after a mistake in the job or its code has been fixed; None for any other end.

    A resumed run has the old job and code, and would fail again.

    Args:
        status: How the run ended.
        cause: Why it has failed.
        facts: The known values of its job.
        job: The job file and its options as typed.
        program: How the command line is called.
        name: Returns the name of a run, from its id, as the command has it.
    """
    if cause.failure is None or not cause.failure.is_in_the_job:
        return None
    command = f"{program} submit {job}{backend_option(status.backend)}"
    continued = run_to_continue(status, facts)
    if continued is None:
        return command
    return f"{command} --continue {name(continued)}"
