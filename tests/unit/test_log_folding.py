"""The followed log: equal tracebacks of ranks, frames of packages and equal hosts are one line, and nothing is lost."""

from __future__ import annotations

import random

from cloudtrain.console.log_folding import LogFolder, ShownLine
from cloudtrain.runs.log_lines import LogLine
from cloudtrain_runtime.contract import format_event

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/opt/ml/code/train.py", line 34, in metrics',
    "    right = model(points) == labels",
    "                             ^^^^^^",
    "NameError: name 'labels' is not defined",
)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(lines: list[LogLine], folder: LogFolder | None = None) -> list[str]:
    folding = LogFolder() if folder is None else folder
    found = [each for line in lines for each in folding.fold(line)]
    return [f"{each.host}  {each.text}" for each in (*found, *folding.end())]


def traceback(rank: int, host: str = "algo-1", lines: tuple[str, ...] = TRACEBACK) -> list[LogLine]:
    return [LogLine(host, f"[rank{rank}]: {text}") for text in lines]


def test_equal_tracebacks_of_ranks_are_one() -> None:
    lines = [*traceback(1), *traceback(0), *traceback(3, "algo-2"), *traceback(2, "algo-2")]
    assert shown(lines) == [
        *(f"algo-1  [rank1]: {text}" for text in TRACEBACK),
        "algo-1, algo-2  the same traceback on ranks 0, 2-3",
    ]


def test_interleaved_tracebacks_are_one() -> None:
    generator = random.Random(3)  # noqa: S311 (an order, no secret)
    waiting = [traceback(rank) for rank in range(4)]
    lines = []
    while any(waiting):
        lines.append(generator.choice([each for each in waiting if each]).pop(0))
    found = shown(lines)
    assert len(found) == len(TRACEBACK) + 1
    assert found[-1].startswith("algo-1  the same traceback on ranks ")


def test_another_error_of_a_rank_is_shown_whole() -> None:
    other = (*TRACEBACK[:-1], "NameError: name 'targets' is not defined")
    lines = [*traceback(0), *traceback(1, lines=other)]
    assert shown(lines) == [
        *(f"algo-1  [rank0]: {text}" for text in TRACEBACK),
        *(f"algo-1  [rank1]: {text}" for text in other),
    ]


def test_the_launcher_does_not_repeat_the_message() -> None:
    lines = traceback(0)
    again = "rank 0 on algo-1 (local rank 0) failed: NameError: name 'labels' is not defined"
    other = "rank 1 on algo-1 (local rank 1) failed: it was killed by SIGKILL"
    lines += [LogLine("algo-1", again), LogLine("algo-1", other)]
    assert shown(lines)[len(TRACEBACK) :] == [f"algo-1  {other}"]


def test_frames_of_packages_are_one_line() -> None:
    text = (
        "Traceback (most recent call last):",
        '  File "/opt/ml/code/train.py", line 3, in loss',
        "    return model(batch)",
        '  File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1, in _wrapped_call_impl',
        "    return self._call_impl(*args, **kwargs)",
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        '  File "/usr/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 2, in forward',
        "    return F.linear(input, self.weight, self.bias)",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x3 and 2x4)",
    )
    assert shown(traceback(0, lines=text)) == [
        "algo-1  [rank0]: Traceback (most recent call last):",
        'algo-1  [rank0]:   File "/opt/ml/code/train.py", line 3, in loss',
        "algo-1  [rank0]:     return model(batch)",
        "algo-1  [rank0]:   ... 2 frames of torch",
        "algo-1  [rank0]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x3 and 2x4)",
    ]


def test_equal_hosts_are_one_line() -> None:
    def environment(host: str, python: str = "3.12.1") -> LogLine:
        fields = {"host": host, "python": python, "packages": {"torch": "2.13.0"}}
        return LogLine(host, format_event("environment", fields))

    hosts = [f"algo-{number}" for number in range(1, 6)]
    words = "no GPU, torch 2.13.0, Python 3.12.1"
    lines = [*map(environment, hosts), LogLine("algo-1", "begins")]
    several = "algo-1, algo-2, algo-3 and 2 more"
    assert shown(lines) == [f"{several}  {words}", "algo-1  begins"]
    assert shown([environment("algo-1"), environment("algo-1")]) == [f"algo-1  {words}"]
    lines = [environment("algo-1"), environment("algo-2", "3.11.9")]
    assert shown(lines) == [
        f"algo-1  {words}",
        "algo-2  no GPU, torch 2.13.0, Python 3.11.9",
    ]


def test_lines_wait_for_two_seconds_at_most() -> None:
    clock = Clock()
    folder = LogFolder(clock)
    for line in (*traceback(0), *traceback(1)):
        list(folder.fold(line))
    assert list(folder.due()) == []
    clock.now = 2.5
    assert list(folder.due()) == [ShownLine("algo-1", "the same traceback on rank 1")]
    assert list(folder.due()) == []
    after = LogLine("algo-1", "[rank1]: continues")
    assert list(folder.fold(after)) == [ShownLine("algo-1", after.text)]


def test_a_rank_that_goes_on_loses_no_line() -> None:
    """Ranks that print a handled traceback, and continue with lines of their own: one of them, or all."""
    for going_on in ((0, 1), (1,), (0,)):
        lines = [*traceback(0), *traceback(1)]
        lines += [
            LogLine("algo-1", f"[rank{rank}]: epoch {n} of rank {rank}")
            for n in range(3)
            for rank in going_on
        ]
        found = shown(lines)
        for line in lines[2 * len(TRACEBACK) :]:
            assert f"algo-1  {line.text}" in found
        assert sum("NameError" in line for line in found) == 1
        assert "algo-1  the same traceback on rank 1" in found


def test_a_cut_traceback_is_not_called_the_same() -> None:
    cut = traceback(1)[:2]
    assert shown([*traceback(0), *cut])[-2:] == [f"algo-1  {line.text}" for line in cut]


def test_a_traceback_of_the_same_rank_is_shown_again() -> None:
    assert sum("NameError" in line for line in shown([*traceback(0), *traceback(0)])) == 2


def test_after_a_restart_equal_tracebacks_are_one_again() -> None:
    attempt = [*traceback(0), *traceback(1), LogLine("algo-1", "restarting")]
    found = shown([*attempt, *attempt])
    assert sum("NameError" in line for line in found) == 2


def test_a_chain_of_exceptions_is_one_traceback() -> None:
    chain = (
        *TRACEBACK,
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *TRACEBACK,
    )
    found = shown([*traceback(0, lines=chain), *traceback(1, lines=chain)])
    assert found == [
        *(f"algo-1  [rank0]: {text}" for text in chain),
        "algo-1  the same traceback on rank 1",
    ]


def test_frames_of_one_rank_take_no_lines_of_another() -> None:
    package = '  File "/x/site-packages/torch/nn/modules/module.py", line 1, in forward'
    begin = [LogLine("algo-1", f"[rank0]: {text}") for text in (TRACEBACK[0], package)]
    other = LogLine("algo-2", "    epoch   3   loss 0.123")
    last = LogLine("algo-1", "[rank0]: ValueError: x")
    assert shown([*begin, other, last]) == [
        "algo-2  " + other.text,
        "algo-1  [rank0]: Traceback (most recent call last):",
        "algo-1  [rank0]:   ... 1 frame of torch",
        "algo-1  [rank0]: ValueError: x",
    ]


def test_a_dump_of_stacks_is_shown_whole() -> None:
    dump = [
        "Current thread 0x00007f (most recent call first):",
        '  File "/usr/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier',
        '  File "/opt/ml/code/train.py", line 3 in <module>',
    ]
    assert shown([LogLine("algo-1", text) for text in dump]) == [f"algo-1  {text}" for text in dump]


def test_a_failure_of_another_rank_is_never_dropped() -> None:
    message = "NameError: name 'labels' is not defined"
    other = LogLine("algo-2", f"rank 9 on algo-2 (local rank 1) failed: {message}")
    assert shown([*traceback(0), other])[-1] == f"algo-2  {other.text}"


def test_many_ranks_with_long_tracebacks_cost_little() -> None:
    deep = (
        TRACEBACK[0],
        *[f'  File "/opt/ml/code/a.py", line {n}, in f' for n in range(120)],
        "E: x",
    )
    waiting = [traceback(rank, lines=deep) for rank in range(256)]
    lines = [line for together in zip(*waiting, strict=True) for line in together]
    found = shown(lines)
    assert found[-1] == "algo-1  the same traceback on ranks 1-255"
    assert len(found) == len(deep) + 1


def test_ordinary_lines_pass_at_once_and_unchanged() -> None:
    folder = LogFolder()
    for text in ("", "loss 0.5", "[rank2]: warning", "  File without a traceback", "Traceback"):
        assert list(folder.fold(LogLine("algo-1", text))) == [ShownLine("algo-1", text)]


def test_what_torchrun_says_in_each_run_is_left_out() -> None:
    noise = "W1129 15:41:06 112 torch/distributed/run.py:855] master_addr is only used for static rdzv_backend and ..."
    mine = LogLine("algo-1", "why master_addr is only used for static rdzv_backend")
    assert shown([mine]) == [f"algo-1  {mine.text}"]
    assert shown([LogLine("algo-1", noise), LogLine("algo-1", "begins")]) == ["algo-1  begins"]
