"""The `[rankN]: ` prefix of each line in the log that several ranks share."""

import os
import subprocess
import sys
from collections import Counter

SCRIPT = """
import logging, os, subprocess, sys
from cloudtrain_runtime.process.event_log import emit
from cloudtrain_runtime.process.log_prefix import prefix_lines
prefix_lines(os.environ)
print("one", 2, "three")
print("two\\nlines")
print()
emit("step", step=1)
print("no newline", end="", flush=True)
print("\\r 50%\\r100%")
sys.stderr.write("[rank1]: prefixed already\\n")
logging.basicConfig()
logging.warning("of a logger")
sys.stdout.buffer.write(b"bytes\\n")
subprocess.run([sys.executable, "-c", "print('a child')"], stdout=sys.stdout, check=True)
print("unfinished", end="")
"""


def run(**environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-u", "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
        check=True,
    )
    return [line for line in done.stdout.decode().split("\n") if "CLOUDTRAIN" not in line]


def test_each_line_of_a_rank_gets_one_prefix() -> None:
    assert run(WORLD_SIZE="2", RANK="1") == [
        "[rank1]: one 2 three",
        "[rank1]: two",
        "[rank1]: lines",
        "",
        "[rank1]: no newline\r[rank1]:  50%",
        "[rank1]: 100%\r[rank1]: 100%",
        "[rank1]: prefixed already",
        "[rank1]: WARNING:root:of a logger",
        "[rank1]: bytes",
        "a child",
        "[rank1]: unfinished",
    ]


BARS = """
import os, sys
from cloudtrain_runtime.process.log_prefix import prefix_lines
prefix_lines(os.environ)
for step in range(1, 5):
    sys.stderr.write(f"\\r{step}/4")  # as tqdm: the end of a state comes with the next one
    sys.stdout.write(f"epoch {step}\\r")  # as others
sys.stderr.write("\\n")
print("after")
sys.stderr.write("\\rhalf: ")
sys.stderr.flush()
sys.stderr.write("1\\r      \\r")
print("2", end="", file=sys.stderr, flush=True)
raise SystemError("cause")
"""


def test_states_of_a_bar_end_before_another_rank_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-u", "-c", BARS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "WORLD_SIZE": "2", "RANK": "1"},
        check=False,
    )
    *lines, end = done.stdout.decode().split("\n")
    states = [state for line in lines for state in line.split("\r") if state]
    assert all(state.startswith("[rank1]: ") for state in states)
    shown = [line.rpartition("\r")[2].removeprefix("[rank1]: ") for line in lines]
    # A line at the beginning and one at the end of a bar; ten seconds have not passed.
    assert shown[:5] == ["1/4", "epoch 1", "4/4", "after", "Traceback (most recent call last):"]
    assert lines[4].startswith("[rank1]: half: \r[rank1]: half: 1\r[rank1]: 2\r[rank1]: Traceback")
    assert shown[-1] == "SystemError: cause"
    assert end == ""


def test_a_single_rank_and_mpirun_need_no_prefix() -> None:
    assert run(WORLD_SIZE="1", RANK="0")[0] == "one 2 three"
    assert run(WORLD_SIZE="2", RANK="0", OMPI_COMM_WORLD_RANK="0")[0] == "one 2 three"


def test_lines_printed_at_the_same_time_do_not_mix() -> None:
    code = (
        "import os\nfrom cloudtrain_runtime.process.log_prefix import prefix_lines\nprefix_lines(os.environ)\n"
        "for i in range(3000): print('line', i, 'of', os.environ['RANK'])"
    )
    read, write = os.pipe()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdout=write,
            env={**os.environ, "WORLD_SIZE": "3", "RANK": str(rank)},
        )
        for rank in range(3)
    ]
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as log:
        found = Counter(log.read().splitlines())
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert found == Counter(
        f"[rank{rank}]: line {i} of {rank}" for rank in range(3) for i in range(3000)
    )
