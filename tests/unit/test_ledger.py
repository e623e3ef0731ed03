"""The ledger: each paid second of a run has one kind, counted by hand on recorded events."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import Cli

from cloudtrain.features.costs.ledger_output import bar_lines, print_ledger
from cloudtrain.runs.ledger import Kind, Ledger, make_ledger
from cloudtrain.runs.ledger_advice import GOOD_RATIO, advise
from cloudtrain.runs.ledger_words import ledger_json, ledger_rows
from cloudtrain.runs.phases import phase_times
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.status import Phase, RunAttempt, State, Status
from cloudtrain.runs.stretches import read_stretches

RUN = "digits-261121-074043-d30c68"
ON_INSTANCES = ("Downloading", "Training", "Uploading", "Stopping")


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def phases(*named: tuple[str, float], end: float | None = None) -> tuple[Phase, ...]:
    """Return phases by their names and starts; each ends where the next one begins."""
    ends = [*(start for _, start in named[1:]), end]
    return tuple(
        Phase(name, at(start), None if ended is None else at(ended), is_billed=name in ON_INSTANCES)
        for (name, start), ended in zip(named, ends, strict=True)
    )


def started(time: float, step: int = 0) -> dict[str, Any]:
    return {"event": "started", "step": step, "time": time}


def step(number: int, time: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "time": time}


def saved(
    number: int, time: float, seconds: float | None = None, stall: float | None = None
) -> dict[str, Any]:
    event = {"event": "checkpoint", "uri": f"file:///c/{number}", "step": number, "time": time}
    more = {"seconds": seconds, "stall_seconds": stall}
    return {**event, **{name: value for name, value in more.items() if value is not None}}


def evaluated(number: int, time: float) -> dict[str, Any]:
    return {"event": "evaluation", "split": "validation", "step": number, "time": time}


def failed(time: float, **fields: Any) -> dict[str, Any]:
    return {"event": "failed", "host": "algo-1", "message": "killed", "time": time, **fields}


def local(
    events: Iterable[dict[str, Any]],
    began: float,
    ended: float | None,
    state: State = State.SUCCEEDED,
) -> Status:
    return Status(
        RUN,
        "local",
        state,
        created=at(began),
        started=at(began),
        ended=None if ended is None else at(ended),
        cost_usd=0.0,
        progress=fold_events(events),
    )


def sums(ledger: Ledger) -> dict[str, float]:
    """Return the seconds of the kinds that are not zero."""
    return {str(each.kind): round(each.seconds, 6) for each in ledger.entries if each.seconds}


def shape(ledger: Ledger) -> list[list[tuple[str, float]]]:
    return [
        [(str(span.kind), round(span.seconds, 6)) for span in attempt.spans]
        for attempt in ledger.attempts
    ]


def require_no_gaps(ledger: Ledger) -> None:
    spans = [span for attempt in ledger.attempts for span in attempt.spans]
    assert all(span.seconds > 0 for span in spans)
    for one, other in itertools.pairwise(spans):
        assert one.ended == other.began


def test_a_short_run_by_hand() -> None:
    events = [
        started(110),
        step(1, 120),
        step(10, 138),  # 2 s per step
        saved(15, 154, seconds=5, stall=1),  # begins at 149
        step(20, 159),
        evaluated(20, 169),
        step(30, 189),
        saved(30, 192, seconds=3, stall=1),  # the last one: the ranks wait for all of it
        evaluated(30, 200),
        {"event": "finished", "step": 30, "time": 202},
    ]
    found = make_ledger(local(events, 100, 205), 999)
    # The second evaluation is 200 - 189 without the save of 3 s; the training is the rest of 120 to 202.
    assert sums(found) == {
        "start": 20,
        "training": 82 - 18 - 4,
        "evaluation": 10 + 8,
        "checkpoint": 1 + 3,
        "upload": 3,
    }
    assert found.seconds == 105
    assert found.ratio == pytest.approx(60 / 105)
    assert (found.interruptions, found.saves.best) == (0, None)
    assert found.cost_usd == 0
    require_no_gaps(found)


FOUR_INTERRUPTIONS = [
    started(160),
    step(1, 170),
    step(10, 188),
    saved(50, 270, seconds=4, stall=2),  # kept until 268
    step(60, 288),
    # 1: the spot instance is taken away at 300
    started(460, step=50),
    step(60, 480),  # 2 s per step: the first step was done at 462
    step(70, 500),
    failed(512, failed_at=510),  # 2: a rank has died
    started(530, step=50),
    step(60, 550),
    step(70, 570),
    saved(70, 573, seconds=3, stall=1),  # kept until 571
    step(80, 590),
    failed(601),  # 3: a hang of 9 s, so the last work was done at 592
    {"event": "hang", "host": "algo-1", "seconds": 9, "time": 602},
    started(620, step=70),
    step(80, 640),
    step(90, 660),
    {"event": "checkpoint_damaged", "step": 70, "uri": "file:///c/70", "time": 661},
    # 4: taken away at 670; the checkpoint of step 70 was damaged, so 20 steps more are lost
    started(860, step=50),
    step(60, 880),
    step(100, 960),
    saved(100, 962, seconds=2, stall=1),
    {"event": "finished", "step": 100, "time": 970},
]
FOUR_PHASES = phases(
    ("Starting", 0),
    ("Pending", 10),
    ("Downloading", 100),
    ("Training", 130),
    ("Interrupted", 300),
    ("Starting", 310),
    ("Downloading", 400),
    ("Training", 430),
    ("Interrupted", 670),
    ("Pending", 680),
    ("Downloading", 800),
    ("Training", 830),
    ("Uploading", 980),
    ("Completed", 1000),
    end=1000,
)


def four_interruptions(**fields: Any) -> Ledger:
    status = Status(
        RUN,
        "sagemaker",
        State.SUCCEEDED,
        created=at(0),
        started=at(100),
        ended=at(1000),
        cost_usd=6.7,
        billable_seconds=670,
        phases=FOUR_PHASES,
    )
    events = read_stretches(FOUR_INTERRUPTIONS)
    return make_ledger(Status(**{**vars(status), **fields}), 9999, events)


def test_four_interruptions_by_hand() -> None:
    found = four_interruptions()
    first, second, third = shape(found)
    assert first == [
        ("waiting", 100),
        ("start", 70),
        ("training", 96),
        ("checkpoint", 2),
        ("repeated", 32),
    ]
    assert second == [
        ("waiting", 100),
        ("restart", 62),
        ("repeated", 48),
        # 510 until the next first step, 2 s after 530
        ("restart", 22),
        # 532 to 592: its checkpoint of step 70 was damaged later
        ("repeated", 60),
        ("idle", 9),
        ("restart", 21),
        ("repeated", 48),
    ]
    assert third == [
        ("waiting", 130),
        ("restart", 62),
        ("training", 106),
        ("checkpoint", 2),
        ("idle", 10),
        ("upload", 20),
    ]
    assert found.interruptions == 4
    assert found.seconds == 200 + 270 + 200 == found.billed_seconds
    assert found.waiting == 330
    assert found.ratio == pytest.approx(202 / 670)
    assert sum(each.usd or 0 for each in found.entries) == pytest.approx(6.7)
    assert found.entry(Kind.REPEATED).usd == pytest.approx(1.88)
    require_no_gaps(found)


def test_the_best_interval_follows_young_and_daly() -> None:
    found = four_interruptions().saves
    # Stalls of 2, 1 and 2 s in three saves; an interruption per 167.5 s.
    assert (found.count, found.stall_seconds) == (3, pytest.approx(5 / 3))
    assert found.best is not None
    assert found.interval is not None
    assert found.best.seconds == pytest.approx((2 * 5 / 3 * 167.5) ** 0.5)
    assert found.best.lost_seconds < min(
        each.lost_seconds for each in (found.interval, *found.others)
    )
    assert found.interval.seconds == pytest.approx((202 + 188 + 4) / 3)


def test_billed_seconds_of_aws_are_the_sum() -> None:
    found = four_interruptions(billable_seconds=673)
    assert found.seconds == pytest.approx(673)
    assert sum(each.seconds for each in found.entries) == pytest.approx(673 + 330)
    # With spot they are a discount, not a time.
    spot = four_interruptions(billable_seconds=201, is_spot=True)
    assert (spot.seconds, spot.billed_seconds) == (670, 201)


def test_a_failed_run_loses_what_it_has_not_saved() -> None:
    events = [started(10), step(1, 20), saved(10, 40, 2, 2), step(20, 60), failed(70)]
    found = make_ledger(local(events, 0, 100, State.FAILED), 999)
    assert sums(found) == {
        "start": 20,
        "training": 18,
        "checkpoint": 2,
        "repeated": 30,
        "idle": 30,
    }
    # While the run restarts its ranks, that time is a restart.
    again = make_ledger(local(events, 0, None, State.RUNNING), 100)
    assert sums(again)["restart"] == 30
    stopped = [*events[:-1], saved(22, 66, 3, 1), {"event": "stopped", "step": 22, "time": 66}]
    assert sums(make_ledger(local(stopped, 0, 70, State.STOPPED), 999)) == {
        "start": 20,
        "training": 41,
        "checkpoint": 5,
        "idle": 4,
    }


def test_scripts_are_idle_after_their_last_step() -> None:
    attempt = {"event": "attempt", "host": "algo-1", "time": 10}
    outputs = {"event": "outputs", "host": "algo-1", "time": 90}
    events = [attempt, step(5, 20), step(50, 80), outputs]
    found = make_ledger(local(events, 0, 100), 999)
    assert sums(found) == {"start": 20, "training": 60, "idle": 10, "upload": 10}
    # One that reports nothing trains from the start of its ranks to their end.
    silent = make_ledger(local([attempt, outputs], 0, 100), 999)
    assert sums(silent) == {"start": 10, "training": 80, "upload": 10}
    # One that begins again at step 1 has used no checkpoint.
    again = [attempt, step(5, 20), saved(9, 25), failed(30), {**attempt, "time": 40}, step(1, 50)]
    assert sums(make_ledger(local(again, 0, 100), 999)) == {
        "start": 20,
        "repeated": 10,
        "restart": 20,
        "idle": 50,
    }


def test_a_run_that_never_trained_has_started() -> None:
    assert sums(make_ledger(local([], 0, 50, State.FAILED), 999)) == {"start": 50}
    waiting = Status(RUN, "sagemaker", State.QUEUED, created=at(0), phases=phases(("Pending", 0)))
    found = make_ledger(waiting, 60)
    assert (sums(found), found.seconds, found.ratio) == ({"waiting": 60}, 0, None)


def test_the_queue_of_a_cluster_is_waiting() -> None:
    events = [started(20), step(1, 30), step(50, 128), saved(50, 130, 2, 2), failed(140)]
    events += [started(520, step=50), step(51, 525)]
    attempts = (RunAttempt("attempt 1", at(10), at(150)), RunAttempt("attempt 2", at(500)))
    status = Status(
        RUN,
        "slurm",
        State.RUNNING,
        created=at(0),
        started=at(10),
        attempts=attempts,
        progress=fold_events(events),
    )
    assert shape(make_ledger(status, 600)) == [
        [
            ("waiting", 10),
            ("start", 20),
            ("training", 98),
            ("checkpoint", 2),
            ("repeated", 10),
            ("restart", 10),
        ],
        [("waiting", 350), ("restart", 25), ("training", 75)],
    ]
    assert phase_times(status, 600) == [
        ("starting", 10),
        ("training", 130),
        ("waiting", 350),
        ("restarting", 20),
        ("training", 80),
    ]
    waits = dataclasses.replace(status, state=State.QUEUED, attempts=attempts[:1])
    assert phase_times(waits, 300)[-1] == ("waiting", 150)
    assert shape(make_ledger(waits, 300))[-1] == [("waiting", 150)]


def test_progress_folds_the_same_in_parts() -> None:
    once = fold_events(FOUR_INTERRUPTIONS).stretches
    assert once == read_stretches(FOUR_INTERRUPTIONS)
    for cut in range(len(FOUR_INTERRUPTIONS)):
        before = fold_events(FOUR_INTERRUPTIONS[:cut])
        assert fold_events(FOUR_INTERRUPTIONS[cut:], before).stretches == once


def test_advice_names_cause_change_and_money() -> None:
    found = four_interruptions(billable_seconds=670)
    facts = {"code.task": "digits:Digits", "code.requirements": "requirements.txt"}
    start, saves = advise(found, facts)
    assert start == (
        "the start and the restarts took 3m57s of 11m10s (35%, 2.37 USD), of it 2m9s for packages, imports and data: "
        "put the packages of code.requirements, which each start installs, into cluster.image"
    )
    assert saves == (
        "saves and lost work took 3m12s of 11m10s (29%, 1.92 USD): a save per 24s in place of 2m11s "
        "(checkpoint.every) saves about 1m44s and 1.04 USD, with 4 interruptions as in this run"
    )
    # A program of its own has no checkpoint.every; and a run in progress gets no advice.
    assert "(the interval between the saves of the program)" in advise(found, {})[1]
    assert advise(four_interruptions(state=State.RUNNING), facts) == ()


def test_a_hang_and_lost_work_get_advice() -> None:
    events = [started(10), step(1, 20), step(50, 200), failed(2000)]
    hang = {"event": "hang", "host": "algo-1", "seconds": 1790, "time": 2001}
    found = make_ledger(local([*events, hang], 0, 2010, State.FAILED), 9999)
    assert sums(found) == {"start": 20, "repeated": 190, "idle": 1800}
    lost, idle = advise(found, {"code.task": "x:X", "limits.hang": "30m"})
    assert lost.endswith(": a shorter checkpoint.every loses less")
    assert idle == (
        "nothing was trained for 30m of 33m30s (90%), mostly in a hang: a shorter limits.hang (now 30m) ends it earlier"
    )
    outputs = {"event": "outputs", "host": "algo-1", "time": 900}
    slow = [{"event": "attempt", "host": "algo-1", "time": 1}, step(1, 5), step(9, 300), outputs]
    (text,) = advise(make_ledger(local(slow, 0, 901), 9999), {})
    assert text.startswith("nothing was trained for 10m of 15m1s (67%) after the last step")


def test_the_best_case_has_no_advice() -> None:
    events = [started(1), step(1, 2), step(100, 990), {"event": "finished", "time": 995}]
    found = make_ledger(local(events, 0, 1000), 9999)
    assert found.ratio is not None
    assert found.ratio > GOOD_RATIO
    assert advise(found, {}) == ()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_bars_have_the_length_of_their_attempt(width: int) -> None:
    found = four_interruptions()
    lines = bar_lines(found, width)
    bars = [line.split()[2] for line in lines]
    assert [line[:9] for line in lines] == ["attempt 1", "attempt 2", "attempt 3"]
    assert lines[0].endswith("3m20s after 1m40s of waiting")
    assert len(bars[1]) == max(map(len, bars))
    assert len(bars[0]) == len(bars[2]) == round(len(bars[1]) * 200 / 270)
    assert bars[1].startswith("r")
    if width >= 80:
        assert max(map(len, lines)) <= width
        assert "x" in bars[0]


def test_a_ledger_is_one_fact_per_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_ledger(four_interruptions(), ("save more often",))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run            sagemaker:{RUN}"
    assert lines[1] == "ratio          30% of 11m10s was training that was kept"
    assert "repeated       3m8s, 28%, 1.88 USD" in lines
    assert lines[-1] == "advice         save more often"
    names = [line[:13].strip() for line in lines]
    assert names[11:14] == ["attempt 1", "attempt 2", "attempt 3"]


def test_the_price_of_a_spot_run_is_a_discount() -> None:
    found = four_interruptions(billable_seconds=201, is_spot=True, cost_usd=2.01)
    text = dict(ledger_rows(found, ()))["cost"]
    assert text == "2.01 USD: AWS bills 3m21s of the time on spot instances"
    # The sandbox bills nothing.
    assert "would cost" in dict(ledger_rows(four_interruptions(backend="sandbox"), ()))
    unknown = four_interruptions(cost_usd=None)
    assert unknown.entry(Kind.TRAINING).usd is None
    assert ledger_json(unknown, ())["cost_usd"] is None
    assert "cost" not in dict(ledger_rows(unknown, ()))


def test_options_of_sums_do_not_go_with_a_run(cli: Cli) -> None:
    done = cli("costs", "latest", "--by", "user")
    assert (done.code, done.out) == (2, "")
    assert "--by selects the runs of a sum, and latest is one run" in done.err


TIMES = st.floats(0, 1000, allow_nan=False)
EVENTS = st.one_of(
    st.builds(started, TIMES, st.integers(0, 50)),
    st.builds(lambda time: {"event": "attempt", "host": "algo-1", "time": time}, TIMES),
    st.builds(step, st.integers(0, 100), TIMES),
    st.builds(saved, st.integers(0, 100), TIMES, TIMES, TIMES),
    st.builds(evaluated, st.integers(0, 100), TIMES),
    st.builds(failed, TIMES, failed_at=TIMES),
    st.builds(
        lambda kind, time, seconds: {
            "event": kind,
            "host": "algo-1",
            "time": time,
            "step": 7,
            "seconds": seconds,
        },
        st.sampled_from(["hang", "finished", "stopped", "outputs", "leaving"]),
        TIMES,
        TIMES,
    ),
    st.builds(
        lambda number: {"event": "checkpoint_damaged", "step": number, "uri": "x", "time": 900.0},
        st.integers(0, 100),
    ),
)
PLACES = st.sampled_from(["phases", "attempts", "machine"])


@given(
    st.lists(EVENTS, max_size=30),
    st.booleans(),
    st.lists(st.integers(0, 1000), min_size=2, max_size=8, unique=True),
    PLACES,
    st.sampled_from([state for state in State if state is not State.UNKNOWN]),
)
def test_spans_never_overlap_or_leave_holes(
    events: list[dict[str, Any]],
    is_ordered: bool,
    times: list[int],
    place: str,
    state: State,
) -> None:
    if is_ordered:
        events = sorted(events, key=lambda event: float(event["time"]))
    times = sorted(times)
    fields: dict[str, Any] = {}
    last = times[-1]
    paid = float(last - times[0])
    if place == "phases":
        names = itertools.cycle(["Downloading", "Training", "Interrupted"])
        fields["phases"] = phases(*zip(names, times[:-1], strict=False), end=last)
        spans = [each for each in fields["phases"] if each.is_billed]
        paid = sum((each.ended - each.started).total_seconds() for each in spans)
    elif place == "attempts":
        pairs = list(zip(times[::2], times[1::2], strict=False))
        fields["attempts"] = tuple(RunAttempt("attempt", at(one), at(two)) for one, two in pairs)
        paid = float(sum(two - one for one, two in pairs))
    status = Status(
        RUN,
        "slurm",
        state,
        created=at(times[0]),
        started=at(times[0]),
        ended=at(last),
        progress=fold_events(events),
        **fields,
    )
    found = make_ledger(status, 2000)
    require_no_gaps(found)
    on_machines = sum(span.seconds for each in found.attempts for span in each.paid)
    assert found.seconds == pytest.approx(paid)
    assert on_machines == pytest.approx(paid)
    assert sum(each.seconds for each in found.entries) == pytest.approx(paid + found.waiting)
    assert all(each.seconds >= 0 for each in found.entries)
