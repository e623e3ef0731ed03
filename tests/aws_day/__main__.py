"""Compare what cloudtrain assumes of SageMaker with an account, within a budget.

    make aws-day ROLE=arn:aws:iam::123456789012:role/NAME BUCKET=my-bucket BUDGET=10

Every trial reserves its largest possible bill before it starts. Whatever happens, the jobs of the day are stopped, and
what they stored below the day's own prefix is deleted. The result is one file without names of the account.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from aws_day import dry_run, report
from aws_day.account import Account
from aws_day.bench import Bench, InterruptedDayError, NoCapacityError
from aws_day.budget import Ledger, OverBudgetError
from aws_day.options import INPUT, MistakesError, Options, read_options, say_mistakes
from aws_day.page import NO_ANSWER, NOT_RUN
from aws_day.times import Times, say
from aws_day.trials import TRIALS, Trial
from cloudtrain import CloudtrainError, Result
from cloudtrain.settings.settings import load_settings

INTERRUPTED = 130
_FAIL, _REFUSED = 1, 3
_DAY_BYTES = 3
_QUOTA = "quota: "
"""Beginning of the reason of a trial without quota."""
_DELETED_PREFIX = "aws-day"


@dataclass
class Outcome:
    """What has become of a trial: `run`, `failed` or `not run`, and why."""

    name: str
    outcome: str = "run"
    reason: str = ""
    seconds: float = 0.0
    largest_bill_usd: float | None = None
    checks: dict[str, str] = field(default_factory=dict)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    was_refused: bool = False


@dataclass
class Day:
    """The day so far."""

    account: Account
    times: Times
    ledger: Ledger
    folder: Path
    benches: list[Bench] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    is_ending: threading.Event = field(default_factory=threading.Event)

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Plan the jobs of all trials, the cheapest first."""
        for trial in trials:
            bench = Bench(
                trial=trial,
                account=self.account,
                times=self.times,
                folder=self.folder / "jobs",
                home=self.folder / "home",
                is_ending=self.is_ending,
            )
            outcome = Outcome(trial.name)
            self.outcomes[trial.name] = outcome
            try:
                bench.make_plans()
            except CloudtrainError as error:
                outcome.outcome, outcome.reason = "failed", f"no plan: {error}"
                continue
            outcome.largest_bill_usd = bench.largest_bill()
            self.benches.append(bench)
        self.benches.sort(key=lambda bench: bench.largest_bill() or 0.0)

    def run(self, at_once: int) -> None:
        """Run the trials, the cheapest first; one that does not fit beside others is tried again after them."""
        waiting: list[Bench] = []
        with ThreadPoolExecutor(at_once) as pool:
            try:
                fits = list(pool.map(self._try, self.benches))
            except BaseException:
                # No worker starts anything more; those at work notice it in their waits.
                self.is_ending.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        waiting = [bench for bench, fit in zip(self.benches, fits, strict=True) if not fit]
        for bench in waiting:
            self._try(bench, is_last=True)

    def _try(self, bench: Bench, *, is_last: bool = False) -> bool:
        """Run a trial within the budget; return False if it should be tried again when others have their bills."""
        outcome = self.outcomes[bench.trial.name]
        if self.is_ending.is_set():
            outcome.outcome, outcome.reason = NOT_RUN, "the day was ended"
            return True
        usd = bench.largest_bill()
        if usd is None:
            outcome.outcome = NOT_RUN
            outcome.reason = (
                f"no price of {bench.trial.instance_type} in {self.account.settings.region} is known:"
                " cloudtrain prices --refresh fetches it"
            )
            say(f"not run  {bench.trial.name}: {outcome.reason}")
            return True
        try:
            self.ledger.reserve(bench.trial.name, usd)
        except OverBudgetError as error:
            # Reservations of trials that still run may become smaller bills.
            outcome.outcome, outcome.reason = NOT_RUN, str(error)
            if is_last:
                say(f"not run  {bench.trial.name}: {error}")
            return is_last
        started = time.monotonic()
        outcome.outcome, outcome.reason = "run", ""
        try:
            self._observe(bench, outcome)
        finally:
            outcome.seconds = round(time.monotonic() - started, 1)
            self.settle(bench)
        if outcome.reason.startswith(_QUOTA) and not is_last:
            # Instances of trials that still run may use the quota.
            return False
        reason = f": {outcome.reason}" if outcome.reason else ""
        say(f"{outcome.outcome:8} {bench.trial.name}, {outcome.seconds:.0f} s{reason}")
        return True

    def _observe(self, bench: Bench, outcome: Outcome) -> None:
        try:
            reason = self._check(bench, outcome)
            if reason:
                outcome.outcome, outcome.reason = NOT_RUN, reason
                return
            say(
                f"starting {bench.trial.name}, at most {outcome.largest_bill_usd:.2f} USD",
            )
            bench.trial.observe(bench)
        except InterruptedDayError:
            outcome.outcome, outcome.reason = NOT_RUN, "the day was ended"
        except NoCapacityError as error:
            outcome.outcome, outcome.reason = NOT_RUN, str(error)
        except Exception as error:  # noqa: BLE001 (the other trials go on)
            outcome.outcome, outcome.reason = "failed", f"{type(error).__name__}: {error}"
            with (self.folder / "errors.log").open("a", encoding="utf-8") as log:
                log.write(f"{bench.trial.name}\n{traceback.format_exc()}\n")
        outcome.was_refused = bench.has_refused

    def _check(self, bench: Bench, outcome: Outcome) -> str:
        """Check the account as a submit does; return why the trial cannot run, or an empty string."""
        for name, path in bench.paths.items():
            for check in bench.client.check(path):
                key = f"{name}: {check.name}" if len(bench.paths) > 1 else check.name
                outcome.checks[key] = str(check.result)
                if check.result is Result.FAIL and check.name == "quota":
                    return f"{_QUOTA}{check.detail}"
                if check.result is Result.FAIL:
                    outcome.checks[key] = f"fail: {check.detail}"
        return ""

    def settle(self, bench: Bench) -> None:
        """Replace the reservation of a trial by its bill, where AWS has reported it."""
        try:
            jobs = bench.bills()
        except (BotoCoreError, ClientError) as error:
            say(f"{bench.trial.name}: its bill is unknown and stays reserved: {error}")
            return
        outcome = self.outcomes[bench.trial.name]
        outcome.jobs = jobs
        if not jobs:
            # A start whose response was lost may not be listed yet: its money stays reserved.
            if not bench.plans or outcome.was_refused or outcome.outcome == NOT_RUN:
                self.ledger.release(bench.trial.name)
        elif all(each["usd"] is not None for each in jobs):
            self.ledger.settle(bench.trial.name, sum(each["usd"] for each in jobs))

    def answers(self) -> dict[str, tuple[Any, str]]:
        """Return all observations, with those that are about all trials."""
        found: dict[str, tuple[Any, str]] = {}
        for bench in self.benches:
            found |= bench.answers
        started = [each for each in self.outcomes.values() if each.jobs or each.was_refused]
        if not started:
            return found
        wrong = [
            f"{each.name}: {'refused' if each.was_refused else 'accepted'}, check: {', '.join(failed) or 'passed'}"
            for each in started
            if bool(
                failed := [
                    name for name, result in each.checks.items() if result.startswith("fail")
                ]
            )
            != each.was_refused
        ]
        found["check.predicts"] = (wrong, "")
        above = [
            f"{job['job']}: {job['usd']:.4f} USD, estimate {job['estimate_usd']:.4f}"
            for each in started
            for job in each.jobs
            if job["usd"] is not None and job["usd"] > job["estimate_usd"]
        ]
        found["bill.estimate"] = (above, "")
        return found

    def reasons(self) -> dict[str, tuple[str, str]]:
        """Return why trials have not answered, by their names."""
        found = {"all": (NOT_RUN, "no trial has started a job")}
        for name, each in self.outcomes.items():
            if each.outcome == NOT_RUN:
                found[name] = (NOT_RUN, each.reason)
            elif each.outcome == "failed":
                found[name] = (NO_ANSWER, each.reason)
        for trial in TRIALS:
            if trial.name not in self.outcomes:
                found[trial.name] = (NOT_RUN, "not among TRIALS")
        return found


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM: what ends and deletes must not be interrupted."""
    kept = {each: signal.signal(each, signal.SIG_IGN) for each in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(*_: object) -> None:
    # A second Ctrl-C must not interrupt what the first one has begun.
    for each in _ENDING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    say("ending the day: no job is started any more")
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the day.

    Returns:
        0 if every assumption holds, 1 if not, 2 if options are wrong or no trial can run, 3 if AWS does not accept
        the credentials, 130 after Ctrl-C.
    """
    try:
        options = read_options(arguments, os.environ, __doc__)
        account = _open_account(options)
        times = Times.read(options.times)
    except MistakesError as error:
        return say_mistakes(error.mistakes)
    except CloudtrainError as error:
        return say_mistakes([error.for_terminal()])
    except (BotoCoreError, OSError, TypeError, ValueError) as error:
        return say_mistakes([str(error)])
    if options.is_dry_run:
        with tempfile.TemporaryDirectory() as folder:
            return _start(options, account, times, Path(folder))
    # Every run of the day is a folder of its own, and no settings of the folder count.
    return _start(options, account, times, options.out.resolve() / account.day)


def _start(options: Options, account: Account, times: Times, folder: Path) -> int:
    day = Day(account, times, Ledger(options.budget), folder)
    day.prepare([each for each in TRIALS if not options.trials or each.name in options.trials])
    failed = {each.name: each.reason for each in day.outcomes.values() if each.reason}
    reason = dry_run.why_nothing_runs(day.benches, failed, options.budget)
    if options.is_dry_run:
        dry_run.show(day.benches, failed, options.budget)
    if reason:
        return say_mistakes([reason])
    return 0 if options.is_dry_run else _run(day, options)


def _run(day: Day, options: Options) -> int:
    account = day.account
    try:
        caller = account.caller()
    except (BotoCoreError, ClientError) as error:
        say(f"aws-day: no credentials that AWS accepts: {error}", file=sys.stderr)
        return _REFUSED
    if caller["Account"] != account.settings.account and not account.is_simulated:
        say("aws-day: the credentials are of another account than ROLE", file=sys.stderr)
        return INPUT
    say(f"day {account.day}: all jobs have this name first, and all objects are below")
    say(f"  s3://{account.settings.bucket}/{account.settings.prefix}/")
    for each in _ENDING_SIGNALS:
        signal.signal(each, _interrupt)
    is_interrupted = False
    try:
        day.run(options.at_once)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        with _signals_ignored():
            day.is_ending.set()
            left = _end(day)
    with _signals_ignored():
        return _report(day, options, caller, left, is_interrupted=is_interrupted)


def _end(day: Day) -> list[str]:
    """Stop what still runs; return what may still run."""
    say("stopping what still runs, and waiting for its end")
    left = day.account.end_everything(day.times.end, day.times.poll)
    for each in left:
        say(
            f"STILL RUNNING: {each}. Stop it: aws sagemaker stop-training-job --training-job-name {each}",
            file=sys.stderr,
        )
    return left


def _report(
    day: Day, options: Options, caller: Any, left: list[str], *, is_interrupted: bool
) -> int:
    for bench in day.benches:
        if bench.trial.name in day.ledger.reserved:
            day.settle(bench)
            day.outcomes[bench.trial.name].facts = bench.facts
    cleanup: dict[str, Any] = {"still_running": left}
    cleanup |= {} if left else day.account.clean()
    answers = report.judge(day.answers(), day.reasons(), day.times)
    trials = [dict(vars(each)) for each in day.outcomes.values()]
    content = report.document(
        account=day.account,
        version=version("cloudtrain"),
        times=day.times,
        answers=answers,
        trials=trials,
        ledger=day.ledger.to_json(),
        cleanup=cleanup,
    )
    path = options.out.resolve() / report.RESULT
    redactor = report.redactor_of(day.account.settings, caller)
    shown = content
    written = f"result: {path}"
    has_failed = bool(left)
    try:
        shown = report.write(path, content, redactor)
    except (OSError, ValueError) as error:
        written = f"no result was written: {error}"
        has_failed = True
    say(f"\n{report.table(shown)}")
    if day.account.is_simulated:
        say("compared with the sandbox, not with AWS")
    ledger = day.ledger.to_json()
    say(
        f"billed or still reserved: {ledger['committed_usd']:.2f} of {ledger['budget_usd']:.2f} USD"
    )
    for each in cleanup.get("kept", ()):
        say(f"kept: {each}")
    say(
        f"deleted: {cleanup.get('objects', 0)} objects, {cleanup.get('log_streams', 0)} log streams"
    )
    say(written)
    if has_failed:
        return _FAIL
    return INTERRUPTED if is_interrupted else report.exit_code(shown)


def _open_account(options: Options) -> Account:
    settings = load_settings(os.environ, flags=options.flags)
    settings.require()
    day = f"aws-day-{secrets.token_hex(_DAY_BYTES)}"
    prefix = f"{settings.prefix.strip('/')}/{_DELETED_PREFIX}/{day}"
    settings = load_settings(os.environ, flags={**options.flags, "prefix": prefix})
    return Account(settings, day)


if __name__ == "__main__":
    sys.exit(main())
