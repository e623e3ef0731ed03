"""Following a run: what it prints, how it tolerates errors of the cloud, and how it ends."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
from rich.console import Console
from support.run_statuses import FAILED, PENDING, RUN, STOPPED, TRAINING, steps

from cloudtrain.aws.retry import OUTAGE_SECONDS, Backoff, OutagePolicy
from cloudtrain.console.follow import FOLLOW_OUTAGES, follow
from cloudtrain.console.follow_screen import EventThinner, Screen, is_live, line_segments
from cloudtrain.errors import CloudError
from cloudtrain.runs.log_lines import LogFilter, LogLine
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain_runtime.contract import format_event, parse_event

FAST = OutagePolicy(0.01, 0.02, limit_seconds=0.3, unanswered_limit_seconds=0.3, errors=CloudError)


class FakeCloud:
    """A backend with scripted results: a status to return, or an error to raise. The last one repeats."""

    name = "sagemaker"

    def __init__(
        self, *answers: Status | Exception, lines: Callable[[], Iterator[LogLine]] | None = None
    ) -> None:
        self.answers = list(answers)
        self.lines = lines or (lambda: iter(()))
        self.polled = threading.Semaphore(0)

    def status(self, run: str) -> Status:  # noqa: ARG002
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.polled.release()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def poll_backoff(self) -> Backoff:
        return Backoff(0.01)

    def logs(
        self,
        run: str,  # noqa: ARG002
        *,
        follow: bool = False,  # noqa: ARG002
        only: LogFilter,
        **_: object,
    ) -> Iterator[LogLine]:
        return filter(only.wants, self.lines())

    def facts(self, run: str) -> Mapping[str, str]:  # noqa: ARG002
        return {}

    def stop(self, run: str) -> None:
        raise NotImplementedError


DONE = dataclasses.replace(STOPPED, state=State.SUCCEEDED, reason="Training job completed")

THROTTLED = CloudError(
    "could not describe the training job: AWS says ThrottlingException: Rate exceeded", "wait"
)


def test_a_short_outage_is_reported_once_and_survived(capsys: pytest.CaptureFixture[str]) -> None:
    cloud = FakeCloud(PENDING, THROTTLED, THROTTLED, TRAINING, DONE)
    outages = dataclasses.replace(FAST, limit_seconds=60)
    assert follow(Run(RUN, cloud), as_json=True, outages=outages) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "SUCCEEDED"
    assert err.count("ThrottlingException") == 1
    assert "(retrying; the run continues)\n" in err
    assert "recovered after " in err


def test_the_time_before_the_first_output_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(Console(file=io.StringIO()))
    for state in (State.STARTING, State.RUNNING, State.RUNNING):
        screen.show(Status(RUN, "local", state, world_size=2), 0.0, "")
    assert capsys.readouterr().err.splitlines() == [
        "STARTING: preparing the code",
        "RUNNING: starting 2 ranks, which import torch before their first output",
    ]
    screen.show(
        Status(RUN, "sandbox", State.RUNNING, "Training in progress.", world_size=2), 0.0, ""
    )
    line = capsys.readouterr().err
    assert (
        line
        == "RUNNING: Training in progress; starting 2 ranks, which import torch before their first output\n"
    )
    screen = Screen(Console(file=io.StringIO()))
    screen.print([LogLine("algo-1", "step 1")])
    screen.show(Status(RUN, "local", State.RUNNING, world_size=2), 0.0, "")
    assert capsys.readouterr().err == "RUNNING\n"


def test_a_long_outage_ends_with_the_command_to_attach_again() -> None:
    with pytest.raises(CloudError) as raised:
        follow(Run(RUN, FakeCloud(PENDING, THROTTLED)), as_json=True, outages=FAST)
    assert raised.value.exit_code == 3
    assert f"follow sagemaker:{RUN}" in raised.value.hint
    assert raised.value.hint.startswith("wait\n")


def test_an_outage_after_a_success_is_tolerated_longer() -> None:
    assert FOLLOW_OUTAGES.limit_seconds == OUTAGE_SECONDS == 3600, (
        "as documented for every followed run"
    )
    outages = dataclasses.replace(FAST, limit_seconds=60, unanswered_limit_seconds=0)
    assert (
        follow(
            Run(RUN, FakeCloud(PENDING, THROTTLED, THROTTLED, DONE)), as_json=True, outages=outages
        )
        == 0
    )
    with pytest.raises(CloudError):
        follow(Run(RUN, FakeCloud(THROTTLED, THROTTLED, DONE)), as_json=True, outages=outages)


def test_other_errors_than_cloud_errors_are_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        follow(Run(RUN, FakeCloud(ZeroDivisionError("a bug"))), as_json=True, outages=FAST)

    def broken() -> Iterator[LogLine]:
        yield LogLine("algo-1", "a line")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        follow(Run(RUN, FakeCloud(PENDING, lines=broken)), as_json=True, outages=FAST)


def test_a_log_read_again_repeats_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    begun = itertools.count()

    def lines() -> Iterator[LogLine]:
        attempt = next(begun)
        for host, number in itertools.product(("algo-1", "algo-2"), range(6)):
            if attempt == 0 and (host, number) == ("algo-2", 2):
                raise CloudError("could not read the log: reset")
            yield LogLine(host, f"line {number}")

    outages = dataclasses.replace(FAST, limit_seconds=60, unanswered_limit_seconds=60)
    assert follow(Run(RUN, FakeCloud(DONE, lines=lines)), as_json=True, outages=outages) == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("algo-")]
    assert shown == [
        f"{host}  line {number}" for host in ("algo-1", "algo-2") for number in range(6)
    ]


def test_the_status_is_followed_without_a_readable_log(capsys: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()

    def lines() -> Iterator[LogLine]:
        if ended.wait(0.01):
            yield from ()
        raise CloudError("could not read the log: AccessDeniedException")

    class SlowCloud(FakeCloud):
        def status(self, run: str) -> Status:
            ended.wait(1)  # longer than the limit for the log
            return super().status(run)

    cloud = SlowCloud(TRAINING, DONE, lines=lines)
    outages = dataclasses.replace(FAST, limit_seconds=0.1, unanswered_limit_seconds=0.1)
    assert follow(Run(RUN, cloud), as_json=True, outages=outages) == 0
    err = capsys.readouterr().err
    assert (
        err.count("could not read the log: AccessDeniedException (retrying; the run continues)")
        == 1
    )
    assert "stopped reading the log: could not read the log: AccessDeniedException" in err


def test_a_slow_log_does_not_delay_the_status() -> None:
    release = threading.Event()

    def lines() -> Iterator[LogLine]:
        yield LogLine("algo-1", "first")
        release.wait(30)

    cloud = FakeCloud(*[TRAINING] * 3, DONE, lines=lines)
    ends: list[int] = []
    thread = threading.Thread(
        target=lambda: ends.append(follow(Run(RUN, cloud), as_json=True, outages=FAST))
    )
    thread.start()
    for _ in range(4):
        assert cloud.polled.acquire(timeout=10)
    assert ends == []  # `follow` waits for the last lines
    release.set()
    thread.join(10)
    assert ends == [0]


def test_a_known_checkpoint_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    without_checkpoint = dataclasses.replace(
        DONE, progress=dataclasses.replace(DONE.progress, checkpoint=None)
    )
    follow(Run(RUN, FakeCloud(TRAINING, without_checkpoint)), as_json=True, outages=FAST)
    assert json.loads(capsys.readouterr().out)["last_checkpoint"]["step"] == 600
    empty = dataclasses.replace(DONE, progress=fold_events([]))
    follow(Run(RUN, FakeCloud(TRAINING, empty)), as_json=True, outages=FAST)
    assert json.loads(capsys.readouterr().out)["last_step"] == 610


def test_the_result_is_exit_code_and_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    for status, code in ((STOPPED, 5), (FAILED, 4), (DONE, 0)):
        assert follow(Run(RUN, FakeCloud(status)), as_json=True, outages=FAST) == code
        out, err = capsys.readouterr()
        assert (json.loads(out)["exit_code"], json.loads(out)["reason"]) == (code, status.reason)
        assert "next: " in err
        assert ("\ncause " in err) == (code == 4)


def test_ctrl_c_exits_at_once_with_the_latest_status(capsys: pytest.CaptureFixture[str]) -> None:
    import signal

    def lines() -> Iterator[LogLine]:
        yield LogLine("algo-1", "first")
        for _ in range(2):  # the second call means that the first status was handled
            assert cloud.polled.acquire(timeout=10)
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(30)

    cloud = FakeCloud(TRAINING, lines=lines)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert follow(Run(RUN, cloud), as_json=True, outages=FAST) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "RUNNING"
    assert (
        f"sagemaker:{RUN} continues. To attach again: cloudtrain follow sagemaker:{RUN}"
        in err.replace("pytest", "")
    )


def test_one_step_line_per_ten_seconds_is_shown() -> None:
    events = [event for event in steps(0, 200, began=0, every=3) if event["event"] == "step"]
    lines = [LogLine("algo-1", format_event("step", event)) for event in events]
    thinner = EventThinner(10)
    assert [index for index, line in enumerate(lines) if thinner.wants(parse_event(line.text))] == [
        0,
        4,
        8,
        12,
        16,
    ]
    assert thinner.wants({"event": "evaluation", "split": "test", "time": 1.0})
    assert thinner.wants(None)
    every = EventThinner(0)
    assert all(every.wants(parse_event(line.text)) for line in lines)


def test_lines_cannot_move_the_cursor() -> None:
    def shown(line: str) -> str:
        return "".join(segment.text for segment in line_segments(line, Console(file=io.StringIO())))

    assert shown("10%|#\r20%|##\r30%|###") == "30%|###\n"
    assert shown("\x1b[31mred\x1b[0m \x1b[2J\x1b[H\x1b[3Aup") == "red up\n"
    assert shown("bell\x07 back\x08 null\x00 tab\tend\r") == "bell back null tab\tend\n"


@pytest.mark.parametrize("name", ["CI", "JPY_PARENT_PID"])
def test_the_panel_needs_an_interactive_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert is_live(Console(file=Terminal()))
    assert not is_live(Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setenv(name, "1")
    assert not is_live(Console(file=Terminal()))
    monkeypatch.delenv(name)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(Console(file=Terminal()))
