"""The checks `stops`, `resumes`, `samples` and `elastic` of a job whose steps cloudtrain sees.

All of them share the reference run, which was not interrupted, and the run that was stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cloudtrain.features.rehearsal.comparing import MARGIN, Difference
from cloudtrain.features.rehearsal.rank_counts import judge_losses
from cloudtrain.features.rehearsal.runs import (
    HOST,
    KILLS,
    Ended,
    NotShownError,
    RunDriver,
    has_succeeded,
    steps_of,
    why,
)
from cloudtrain.runs.status import State
from cloudtrain.support.checks import Check, Result, failed, passed, unknown
from cloudtrain.support.notebook.summary import count
from cloudtrain_runtime.contract import STOP_GRACE_SECONDS

STOPS = "stops"
RESUMES = "resumes"
SAMPLES = "samples"
ELASTIC = "elastic"
_STOP = "SIGTERM"
TASK_MARGIN = 3
SCRIPT_MARGIN = 18
"""Steps that a training must have left when it is stopped: the ranks of a Task that logs each step agree on a stop at
the next step, those of a script up to 17 steps later."""
LEAST_STEPS = 3
"""Steps of the shortest training that can be interrupted after a checkpoint."""
_MOST_TOLERANCE = 0.01
"""Relative difference of two uninterrupted runs, beyond which a comparison with a third one shows nothing."""


@dataclass
class Interruption:
    """A run that was interrupted, and the one that has reached the last step after it.

    Attributes:
        what: What interrupted it, in words.
        step: Step at which it was interrupted.
        ended: The interrupted run.
        resumed: The run that continued; the interrupted one itself, where its ranks were started again.
    """

    what: str
    step: int
    ended: Ended
    resumed: Ended


@dataclass
class Interruptions:
    """All interruptions of a rehearsal.

    Args:
        driver: The runs.
        reference: The uninterrupted run.
        compare: Returns how the last states of runs differ from that of the first.
        seed: Seed of the steps.
    """

    driver: RunDriver
    reference: Ended
    compare: Callable[[list[Ended]], list[Difference]]
    seed: int
    done: list[Interruption] = field(default_factory=list)

    def checks(self, on_progress: Callable[[str], None]) -> Iterator[Check]:
        """Yield `stops`, `resumes` and `samples`, after interrupting runs and resuming them."""
        steps = self._steps()
        problems: list[Check] = []
        yield from self._stop(steps[_STOP], problems, on_progress)
        for what, text in KILLS.items():
            step = steps[what]
            on_progress(f"{text} at step {step}")
            try:
                self.done.append(self._kill(what, step, on_progress))
            except NotShownError as error:
                detail = f"after {text} at step {step}: {error}"
                problems.append(Check(RESUMES, error.result, detail))
        yield from problems
        on_progress("comparing the final states")
        yield from self._compare()
        yield self._samples()

    def _steps(self) -> dict[str, int]:
        """Return a step for each interruption: after the first checkpoint, and early enough to see the stop."""
        draw = random.Random(self.seed)  # noqa: S311 (no secret)
        first = self.driver.spec.checkpoint.every.steps or 1
        is_task = self.driver.spec.code.task is not None
        margin = TASK_MARGIN if is_task else SCRIPT_MARGIN
        last = max(first + 1, self.driver.last_step - margin)
        steps = {what: draw.randint(first + 1, last) for what in (_STOP, *KILLS)}
        # As late as possible: some faults need a second epoch.
        return {**steps, HOST: last}

    def _stop(
        self, step: int, problems: list[Check], on_progress: Callable[[str], None]
    ) -> Iterator[Check]:
        on_progress(f"SIGTERM at step {step}")
        driver = self.driver
        try:
            run = driver.start(hold=step)
            driver.until_held(run, step)
            ended = driver.stop(run)
        except NotShownError as error:
            yield Check(STOPS, error.result, str(error))
            return
        yield self._judge_stop(ended, step)
        if ended.status.progress.checkpoint is None or has_succeeded(ended):
            return
        on_progress("resuming after SIGTERM")
        try:
            resumed = self._finished(driver.resume(ended))
        except NotShownError as error:
            detail = f"after SIGTERM at step {step}: {error}"
            problems.append(Check(RESUMES, error.result, detail))
            return
        self.done.append(
            Interruption(
                what="SIGTERM",
                step=step,
                ended=ended,
                resumed=resumed,
            )
        )

    def _judge_stop(self, ended: Ended, step: int) -> Check:
        saved = ended.status.progress.checkpoint
        at = f"SIGTERM at step {step} (seed {self.seed})"
        if has_succeeded(ended):
            text = f"{at}: the training ended before its ranks had agreed to stop"
            return unknown(STOPS, text)
        if ended.status.state is not State.STOPPED:
            text = f"{at}: the run ended as {ended.status.state}: {why(ended)}"
            return failed(STOPS, text)
        if saved is None:
            text = f"{at}: no final checkpoint; there is no checkpoint"
            return failed(STOPS, text)
        if saved.step < step:
            text = f"{at}: no final checkpoint; the last checkpoint is of step {saved.step}"
            return failed(STOPS, text)
        if ended.stop_seconds > STOP_GRACE_SECONDS:
            text = f"{at}: the end took {ended.stop_seconds:.0f} s, longer than the notice of {STOP_GRACE_SECONDS} s"
            return failed(STOPS, text)
        detail = f"{at}: final checkpoint of step {saved.step}, and all processes ended, after {ended.stop_seconds:.1f} s"
        return passed(STOPS, f"{detail}; the notice is {STOP_GRACE_SECONDS} s")

    def _kill(self, what: str, step: int, on_progress: Callable[[str], None]) -> Interruption:
        driver = self.driver
        run = driver.start(hold=step)
        held = driver.until_held(run, step)
        ended = driver.kill(run, what, held)
        # After limits.retries has started the ranks again, the run itself reaches the last step.
        resumed = ended
        if not has_succeeded(ended):
            on_progress(f"resuming after {KILLS[what]}")
            resumed = self._finished(driver.resume(ended))
        return Interruption(
            what=KILLS[what],
            step=step,
            ended=ended,
            resumed=resumed,
        )

    def _finished(self, resumed: Ended) -> Ended:
        """Return a resumed run that has reached the last step.

        Raises:
            NotShownError: It has not, or began again at the first step.
        """
        if not has_succeeded(resumed):
            raise NotShownError(f"the resumed run failed: {why(resumed)}")
        first = self._first_step(resumed)
        saved = resumed.status.progress.checkpoint
        if first is not None and first <= 1:
            raise NotShownError("the resumed run began again at step 1")
        if saved is None or saved.step < self.driver.last_step:
            last = "no checkpoint" if saved is None else f"step {saved.step}"
            raise NotShownError(
                f"the resumed run ended at {last}, not at step {self.driver.last_step}"
            )
        return resumed

    def _first_step(self, resumed: Ended) -> int | None:
        """Return the first step that the ranks of a run have recorded; a script's report may leave out its first."""
        steps = [record.step for record in self.driver.records(resumed.run)]
        return min(steps, default=resumed.first_step)

    def _compare(self) -> Iterator[Check]:
        """Yield whether each resumed run has the losses and the final state of the uninterrupted run."""
        if not self.done:
            return
        try:
            found = self.compare([self.reference, *(each.resumed for each in self.done)])
            # A second uninterrupted run takes time, and is needed only where something differs.
            tolerance = None
            if not all(each.is_equal for each in found):
                tolerance = self._tolerance()
        except NotShownError as error:
            yield Check(RESUMES, error.result, str(error))
            return
        equal = []
        for each, difference in zip(self.done, found, strict=True):
            losses = self._differing_losses(each)
            if difference.is_equal and not losses:
                equal.append(f"{each.what} at step {each.step}")
            else:
                after = f"after {each.what} at step {each.step}"
                yield judge_state(after, difference, losses, tolerance)
        if equal:
            text = f"losses and final state at step {self.driver.last_step} equal an uninterrupted run bit for bit"
            yield passed(RESUMES, f"{text}, after {'; '.join(equal)}")

    def _differing_losses(self, each: Interruption) -> list[int]:
        expected = self.reference.losses
        return [
            step
            for step, loss in each.resumed.losses.items()
            if step in expected and expected[step] != loss
        ]

    def _tolerance(self) -> Difference:
        """Return how two uninterrupted runs differ."""
        again = self.driver.wait(self.driver.start())
        if not has_succeeded(again):
            raise NotShownError(f"a second uninterrupted run failed: {why(again)}")
        return self.compare([self.reference, again])[0]

    def _samples(self) -> Check:
        """Return whether every step has used the samples of the uninterrupted run, over interruption and resume."""
        records = self.driver.records
        expected = steps_of(records(self.reference.run))
        if not any(expected.values()):
            text = "the samples of a script are not visible to cloudtrain; its position in the data is in its checkpoint"
            return unknown(SAMPLES, text)
        if not self.done:
            return unknown(SAMPLES, "no run was resumed")
        for each in self.done:
            found = steps_of(records(each.ended.run))
            if each.resumed is not each.ended:
                found |= steps_of(records(each.resumed.run))
            wrong = [step for step in sorted(expected) if found.get(step) != expected[step]]
            if wrong:
                text = f"after {each.what} at step {each.step}, step {wrong[0]} used other samples: repeated or lost ones"
                return failed(SAMPLES, text)
        used = [sample for samples in expected.values() for sample in samples]
        repeated = len(used) - len(set(used))
        text = f"{len(used):,} samples in {len(expected)} steps, compared one by one: the same ones in each step of "
        text += f"the uninterrupted training and of {count(len(self.done), 'interrupted one')}"
        if repeated:
            text += f"; {repeated:,} were used again in the uninterrupted one, too"
        else:
            text += "; each was used once"
        return passed(SAMPLES, text)

    def elastic(
        self, sizes: list[tuple[int, int]], on_progress: Callable[[str], None]
    ) -> Iterator[Check]:
        """Resume the stopped run with other numbers of ranks.

        Args:
            sizes: Pairs of instances and ranks per instance.
            on_progress: Receives what is done.
        """
        stopped = next((each for each in self.done if each.resumed is not each.ended), None)
        if stopped is None:
            yield unknown(ELASTIC, "no run was resumed")
            return
        expected = steps_of(self.driver.records(self.reference.run))
        for instances, ranks in sizes:
            on_progress(f"resuming with {count(instances * ranks, 'rank')}")
            text = f"{self.driver.ranks} -> {instances * ranks} ranks"
            try:
                override = f"cluster.processes_per_instance={ranks}"
                resumed = self._finished(
                    self.driver.resume(stopped.ended, override, instances=instances)
                )
            except NotShownError as error:
                yield Check(ELASTIC, error.result, f"{text}: {error}")
                continue
            yield self._judge_elastic(text, resumed, expected, instances * ranks)

    def _judge_elastic(
        self, text: str, resumed: Ended, expected: dict[int, tuple[str, ...]], ranks: int
    ) -> Check:
        found = steps_of(self.driver.records(resumed.run))
        are_seen = any(expected.values())
        wrong = []
        if are_seen:
            wrong = [step for step, samples in found.items() if expected.get(step) != samples]
        result, losses = judge_losses(
            self.reference.losses, resumed.losses, self.driver.ranks, ranks
        )
        text += f": reached step {resumed.last_step or self.driver.last_step}{losses}"
        if wrong:
            detail = f"{text}; step {wrong[0]} used other samples, or changed them at random"
            return unknown(ELASTIC, detail)
        # Where samples are not visible, the losses may be those of other samples.
        if result is Result.FAIL and not are_seen:
            return unknown(ELASTIC, text)
        if result is Result.PASS and are_seen:
            text += ", with the same samples in every step"
        return Check(ELASTIC, result, text)


def judge_state(
    after: str, difference: Difference, losses: list[int], tolerance: Difference | None
) -> Check:
    """Return whether a resumed run that differs from the uninterrupted one differs more than two such runs do.

    Args:
        after: After which interruption, in words.
        difference: How its final state differs.
        losses: Steps whose loss differs.
        tolerance: How two uninterrupted runs differ; None where all states are equal.
    """
    if tolerance is None or tolerance.is_equal:
        what = f"loss of step {losses[0]} differs; " if losses else ""
        text = (
            f"{after}: {what}final state: {difference.sentence}; two uninterrupted runs are equal"
        )
        return failed(RESUMES, text)
    text = (
        f"{after}: {difference.sentence}; two uninterrupted runs differ by {tolerance.relative:.1e}"
    )
    is_close = difference.relative <= MARGIN * tolerance.relative and not difference.missing
    if not is_close or difference.state:
        return failed(RESUMES, f"{text}, and the tolerance is {MARGIN:g} times that")
    if tolerance.relative > _MOST_TOLERANCE:
        text += ", too much for a comparison: seed all random generators of the job, so that its runs are equal"
        return unknown(RESUMES, text)
    return passed(RESUMES, f"{text}, and the tolerance is {MARGIN:g} times that")
