"""What to type after a run has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from cloudtrain.errors import EXIT_RUN_FAILED
from cloudtrain.runs.early_end import STOPPED_BY_REQUEST
from cloudtrain.support.backend_facts import backend_option

if TYPE_CHECKING:
    from cloudtrain.failure_rules import Explanation, Facts
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.status import RunAttempt, Status


def explain_with_next_step(run: Run, status: Status) -> Explanation:
    """Read a run's log, and explain how it ended; the action names the way back to its checkpoint with new code."""
    return _explain(run, status, run.facts())


def explain_end(run: Run, status: Status, facts: Facts) -> Explanation:
    """Explain how a run ended, by the log of its newest attempt, and why no other attempt has begun."""
    from cloudtrain.failure_rules import explain_run
    from cloudtrain.runs.run import newest_attempt

    # The log of a run that has succeeded or was stopped is not needed.
    needs_log = status.exit_code in (None, EXIT_RUN_FAILED)
    lines = newest_attempt(run, status).logs() if needs_log else ()
    last = _last_of_chain(status)
    if last is None:
        return explain_run(status, lines, facts)
    found = explain_run(dataclasses.replace(status, reason=last.detail), lines, facts)
    return dataclasses.replace(found, action=f"{_why_last(status, last)} {found.action}".strip())


def _last_of_chain(status: Status) -> RunAttempt | None:
    """Return the attempt whose end has ended a chain; None for a chain that has succeeded, and for other runs."""
    if not status.attempts or not status.exit_code or status.reason == STOPPED_BY_REQUEST:
        return None
    last = status.attempts[-1]
    return last if last.run and last.detail else None


def _why_last(status: Status, last: RunAttempt) -> str:
    first_line = last.detail.strip().partition("\n")[0]
    why = status.reason.removeprefix(first_line).removeprefix("; ")
    why = why or "only the causes of limits.recover.on begin another one"
    return f"Attempt {len(status.attempts)} was the last one: {why}."


def _explain(run: Run, status: Status, facts: Facts) -> Explanation:
    found = explain_end(run, status, facts)
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
