"""The words of events: a sentence for each kind, never JSON, and a name for a kind of another version."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit.test_outside_data import COMPLETE

from cloudtrain.runs.event_words import describe_analysis, describe_event, word_line
from cloudtrain.runs.log_lines import LogLine
from cloudtrain_runtime.contract import format_event
from cloudtrain_runtime.contract.events import EVENTS

NOW = 1_763_633_700.0

WORDS = {
    "environment": "1 x NVIDIA L4, driver 570.133.20 with /usr/local/cuda/compat, CUDA 13.0, 1 EFA (efa), "
    "torch 2.13.0, Python 3.12.11, 9 B memory, 9 B shared memory, 9 B free disk",
    "attempt": "its ranks start, after 1 restart",
    "started": "training 10 parameters on 4 ranks (cpu, gloo), 100 steps",
    "step": "step     12  epoch   1  loss 0.5000  10 samples/s  30% of the step waits for data",
    "evaluation": "test after step 12: loss 0.5000  accuracy 0.9000",
    "best": "best so far: loss 0.5000, at step 12",
    "skipped": "step 12 skipped: its gradient is not finite; loss not finite",
    "checkpoint": "checkpoint of step 12: 0.0 MB in 0.10 s, training waited 0.100 s",
    "checkpoint_missed": "ALARM, 3 in a row: no checkpoint of step 12, late: x; the run continues",
    "checkpoint_damaged": "the checkpoint of step 12 is damaged and set aside, at file:///c/step-00000012: x",
    "straggler": "rank 1 on algo-1 is slow: 1.50 x the median of all ranks, most of it in data",
    "bandwidth": "4 ranks exchange data at 9.5 Gbit/s, the network is rated 10",
    "pipeline": "pipeline: modules by stage 1 (100 ms), 2 (200 ms); the slowest takes 1.10 x the mean",
    "tracking": "3 values were not logged",
    "profile": "profile of steps 1 to 2 of every rank: file:///p",
    "failed": "ends with exit code 1",
    "hang": "stacks of its ranks: file:///s",
    "outputs": "2 files (9 B) are not kept: out/ (2 files, 9 B). Only SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and a script's "
    "code.outputs are kept, which these are with code: {outputs: [out/]}",
    "analysis": "test in detail: 0 of 9 wrong",
    "fresh_start": "the trainer begins at step 0, although /opt/ml/checkpoints/checkpoint-40 is there: pass "
    "resume_from_checkpoint to its train",
    "patterns": "metrics: no line of rank 0's output had a value of accuracy; compare the patterns with the log",
    "ranks": "2 of 2 ranks not in a process group of torch, the group has moved no data, "
    "nothing saved to /opt/ml/checkpoints yet",
    "left": "ranks 1 of algo-2 have ended while others work",
    "leaving": "rank 1 has done its work and waits for the thread 'uploader' (train.py:3)",
    "stopped": "stopped after step 12",
    "finished": "finished step 12: 8 steps in 9.5 s, from step 4 on",
    "of-a-newer-version": "of-a-newer-version: step 12",
}
"""What a reader sees of one event of each kind, with every field of its schema."""


def test_each_kind_of_event_has_words_here() -> None:
    assert {*EVENTS} <= {*WORDS}


@pytest.mark.parametrize("kind", WORDS)
def test_an_event_is_a_sentence(kind: str) -> None:
    event = {"event": kind, **COMPLETE[kind], "time": NOW}
    assert describe_event(event) == WORDS[kind]
    line = LogLine("algo-1", format_event(kind, {**COMPLETE[kind], "time": NOW}))
    assert str(line) == f"algo-1  {WORDS[kind]}"


@pytest.mark.parametrize("kind", WORDS)
def test_an_event_without_its_fields_is_no_json(kind: str) -> None:
    """Integrations of other trainers, scripts and other versions leave fields out."""
    complete = COMPLETE[kind]
    for left_out in (*complete, None):
        fields: dict[str, Any] = {} if left_out is None else dict(complete)
        fields.pop(left_out or "", None)
        shown = word_line(format_event(kind, fields))
        assert shown is None or (shown and "{" not in shown.replace("code: {outputs", "")), shown
        assert shown is None or "\n" not in shown


def test_a_run_from_step_0_finishes_all_its_steps() -> None:
    assert describe_event({"event": "finished", "step": 12, "seconds": 9.5}) == (
        "finished 12 steps in 9.5 s"
    )


def test_a_line_with_an_invalid_event_is_no_json() -> None:
    assert word_line('CLOUDTRAIN {"event": "step", "step": "x", "loss": [1]}') == "step: step x"
    assert word_line("CLOUDTRAIN {not JSON}") == "CLOUDTRAIN {not JSON}"
    assert word_line('CLOUDTRAIN {"no": "event"}') == 'CLOUDTRAIN {"no": "event"}'


def test_an_event_behind_text_of_another_process_is_found() -> None:
    line = 'half a line CLOUDTRAIN {"event": "best", "step": 3, "metric": "loss", "value": 0.25}'
    assert word_line(line) == "best so far: loss 0.2500, at step 3"


def test_a_long_event_of_another_version_is_short() -> None:
    fields = {f"field_{number}": "x" * 500 for number in range(50)}
    assert len(describe_event({"event": "new_kind", **fields})) < 400


def test_an_analysis_names_what_is_wrong_and_the_weakest_class() -> None:
    classes = [
        {"name": "cat", "support": 3, "precision": 1.0, "recall": 0.75, "f1": 0.8},
        {"name": "dog", "support": 4, "precision": 0.8, "recall": 1.0, "f1": 0.9},
    ]
    event = {"event": "analysis", "split": "test", "samples": 8, "classes": classes}
    assert describe_analysis(event) == "weakest: cat (recall 0.75)"
    matrix = json.loads("[[3, 1], [0, 4]]")
    assert describe_analysis({**event, "confusion": matrix}) == (
        "1 of 8 wrong; weakest: cat (recall 0.75)"
    )
    assert describe_analysis({"event": "analysis", "split": "test", "samples": 8}) == "8 samples"
