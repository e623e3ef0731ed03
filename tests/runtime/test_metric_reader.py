"""Metrics that the launcher reads from the ranks' output: pieces, steps, and lines that are no values."""

import os

import pytest

from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.launcher.output import MetricReader, RankOutput


def events(captured: str, kind: str = "step") -> list[dict[str, object]]:
    found = [parse_event(line) for line in captured.splitlines()]
    return [event for event in found if event is not None and event["event"] == kind]


def test_values_are_read_across_pieces(capfd: pytest.CaptureFixture[str]) -> None:
    reader = MetricReader({"step": r"step (\d+)", "loss": "loss=([0-9.]+)"})
    for byte in b"step 7 loss=0.25\nloss=x\nstep 8":
        reader.feed(bytes([byte]))
    reader.end()
    found = events(capfd.readouterr().out)
    assert found[-1]["step"] == 8
    assert [event["loss"] for event in found if "loss" in event] == [0.25]


def test_a_bar_that_never_ends_its_line_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    reader = MetricReader({"step": r"(\d+)/9"})
    found: list[dict[str, object]] = []
    step = 0
    while not found:  # the reader has printed, though no line has ended
        step += 1
        reader.feed(f"\r{step}/9 it/s".encode())
        found = events(capfd.readouterr().out)
    assert int(str(found[0]["step"])) <= step


def test_patterns_without_a_value_are_reported_at_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reader = MetricReader({"loss": "loss=([0-9.]+)", "accuracy": "acc=(.*)", "lr": "lr=([0-9.]+)"})
    reader.feed(b"loss=1\nacc=high\n[rank1]: lr=3\n")
    assert events(capfd.readouterr().out, "patterns") == []
    reader.end()
    (event,) = events(capfd.readouterr().out, "patterns")
    assert event["unmatched"] == ["accuracy", "lr"]
    reader = MetricReader({"loss": "loss=([0-9.]+)"})
    reader.feed(b"loss=1")  # the last line has no end
    reader.end()
    assert events(capfd.readouterr().out, "patterns") == []


def test_lines_are_counted_without_a_pattern_of_the_step(capfd: pytest.CaptureFixture[str]) -> None:
    reader = MetricReader({"loss": "loss=([0-9.,]+)"})
    reader.feed(b"start\nloss=1,024\nother\nloss=2\r")
    reader.end()
    (event,) = events(capfd.readouterr().out)
    assert (event["step"], event["loss"]) == (2, 2.0)


def test_lines_of_rank_0_are_read_without_their_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    reader = MetricReader({"loss": "^loss=([0-9.]+)"})
    reader.feed(
        b"[rank1]: loss=9\n[rank0]: loss=1\n[rank1]: loss=9\n[rank0]: loss=2\n[rank10]: loss=9\n"
    )
    reader.end()
    found = events(capfd.readouterr().out)
    assert (found[-1]["step"], found[-1]["loss"]) == (2, 2.0)


@pytest.mark.parametrize(
    ("text", "value"), [("1,024.5", 1024.5), ("-2e-3", -0.002), ("1,5", None), ("4k", None)]
)
def test_numbers_are_read_as_printed(
    capfd: pytest.CaptureFixture[str], text: str, value: float | None
) -> None:
    reader = MetricReader({"loss": r"loss=(\S+)"})
    reader.feed(f"loss={text}\n".encode())
    reader.end()
    assert [event["loss"] for event in events(capfd.readouterr().out)] == (
        [] if value is None else [value]
    )


@pytest.mark.parametrize(
    "line",
    [b"step nan loss=1\n", b"step -3\n", b"CLOUDTRAIN {} loss=3\n", b"x" * 100_000, b"\xff\n"],
)
def test_odd_lines_are_no_progress(capfd: pytest.CaptureFixture[str], line: bytes) -> None:
    reader = MetricReader({"step": r"step (\S+)", "loss": "loss=([0-9.]+)"})
    reader.feed(line)
    reader.end()
    assert [event["step"] for event in events(capfd.readouterr().out) if event["step"]] == []


def test_output_is_copied_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    source, target = os.pipe()
    output = RankOutput([], MetricReader({"loss": "loss=([0-9.]+)"}), target=target)
    written = b"a\rloss=1\n\xff\x00 loss=2\nlast"
    os.write(output.descriptor, written)
    output.close_write_end()
    output.end()
    assert os.read(source, 1 << 16) == written
    assert events(capfd.readouterr().out)[-1]["loss"] == 2.0
    os.close(source)
    os.close(target)


def numbered(lines: list[str], capfd: pytest.CaptureFixture[str], **patterns: str) -> list[int]:
    """Return the steps under which a reader reports the losses 0, 1, 2, ... of lines."""
    reader = MetricReader({"step": r"iter (\d+)", "loss": r"loss (\S+)", **patterns})
    for index, line in enumerate(lines):
        reader.feed(line.replace("LOSS", f"loss {index}").encode() + b"\n")
        reader.flush()  # each line, whatever the time
    reader.end()
    found = {}
    for event in events(capfd.readouterr().out):
        if "loss" in event:
            found[event["loss"]] = event["step"]
    return [int(str(found[each])) for each in sorted(found)]


TOTAL = r"iter \d+/(\d+)"
EPOCH = r"epoch (\d+)"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("total", [{}, {"total": TOTAL}])
@pytest.mark.parametrize("has_header", [False, True])
def test_steps_count_through_epochs(
    capfd: pytest.CaptureFixture[str], first: int, total: dict[str, str], has_header: bool
) -> None:
    lines = []
    for epoch in range(first, first + 3):
        lines += [f"epoch {epoch}"] if has_header else []
        begin = "" if has_header else f"epoch {epoch} "
        lines += [f"{begin}iter {step}/30 LOSS" for step in (10, 20, 30)]
    steps = numbered(lines, capfd, epoch=EPOCH, **total)
    assert steps == list(range(10, 100, 10))


def test_an_epoch_after_its_steps_is_that_of_the_steps(capfd: pytest.CaptureFixture[str]) -> None:
    lines = ["iter 15/30 LOSS", "iter 30/30 LOSS", "epoch 1 done"]
    lines += ["iter 15/30 LOSS", "iter 30/30 LOSS", "epoch 2 done", "iter 15/30 LOSS"]
    assert numbered(lines, capfd, epoch=EPOCH, total=TOTAL) == [15, 30, 45, 60, 75]
    assert numbered(lines, capfd, epoch=EPOCH) == [15, 30, 45, 60, 75]


def test_steps_from_zero_do_not_meet(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"epoch {epoch} iter {step} LOSS" for epoch in range(3) for step in range(4)]
    assert numbered(lines, capfd, epoch=EPOCH) == list(range(12))


def test_a_counter_through_all_epochs_keeps_its_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"epoch {step // 30} iter {step}/90 LOSS" for step in range(10, 90, 10)]
    assert numbered(lines, capfd, epoch=EPOCH, total=TOTAL) == list(range(10, 90, 10))
    assert numbered(lines, capfd, epoch=EPOCH) == list(range(10, 90, 10))


def test_an_attempt_continues_in_its_epoch(capfd: pytest.CaptureFixture[str]) -> None:
    restart = 'CLOUDTRAIN {"event": "attempt", "host": "algo-1", "restarts": 1}'
    first = [f"epoch {epoch} iter {step}/30 LOSS" for epoch in (1, 2) for step in (15, 30)]
    again = ["epoch 2 iter 15/30 LOSS", "epoch 2 iter 30/30 LOSS", "epoch 3 iter 15/30 LOSS"]
    for total in ({}, {"total": TOTAL}):
        lines = [restart, *first, restart, *again]
        assert numbered(lines, capfd, epoch=EPOCH, **total) == [15, 30, 45, 60, 45, 60, 75]
    # In a container that replaces an interrupted one, only the total gives the place.
    assert numbered([restart, *again], capfd, epoch=EPOCH, total=TOTAL) == [45, 60, 75]


def test_steps_of_an_epoch_have_no_total_of_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    patterns = {"step": r"iter (\d+)", "total": TOTAL, "epoch": EPOCH}
    for lines, total in (
        (["epoch 0 iter 15/30", "epoch 1 iter 15/30"], None),
        (["epoch 0 iter 15/90", "epoch 1 iter 45/90"], 90),
    ):
        reader = MetricReader(patterns)
        for line in lines:
            reader.feed(f"{line}\n".encode())
        reader.end()
        assert events(capfd.readouterr().out)[-1].get("total_steps") == total
