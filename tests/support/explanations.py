"""Corpus of logs for `explain`, each with the expected explanation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.status import State, Status

CORPUS = Path(__file__).parents[1] / "explain" / "corpus"
_LINE = re.compile(r"\+(?P<seconds>\d+\.\d+) (?P<host>\S+) ?(?P<text>.*)")
_BEGAN = 1_795_247_000.0
FACTS = {
    "cluster.instance_type": "ml.p4d.24xlarge",
    "cluster.instances": "2",
    "cluster.volume": "200GB",
    "cluster.image": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker",
    "cluster.spot.max_wait": "36h",
    "cluster.max_pending": "6h",
    "cluster.network.security_groups": "sg-1234",
    "limits.runtime": "24h",
    "code.requirements": "requirements.txt",
    "train.batch_size": "16",
    "train.accumulate": "4",
    "train.precision": "fp32",
    "checkpoint.keep": "3",
    "checkpoint.uri": "s3://bucket/prefix/checkpoints",
    "checkpoint.resume": "auto",
    "role": "training",
}


SCRIPT_FACTS = {
    **{name: value for name, value in FACTS.items() if not name.startswith("train.")},
    "code.script": "train.py",
}


@dataclass(frozen=True)
class Case:
    """A run that has ended, and the expected output of `explain`."""

    name: str
    status: Status
    lines: tuple[LogLine, ...]
    facts: dict[str, str]
    expected: dict[str, Any]


def read_case(path: Path) -> Case:
    """Read a case. Its log is ordered by time, with `+seconds host text` in each line."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML allows no control characters, so the files contain their symbols.
    log = (
        content.get("log", "")
        .replace("\N{SYMBOL FOR ESCAPE}", "\x1b")
        .replace("\N{SYMBOL FOR CARRIAGE RETURN}", "\r")
    )
    lines = [_LINE.fullmatch(line) for line in log.rstrip("\n").split("\n") if line]
    assert all(lines), path
    status = Status(
        "gpt-261121-074318-1a2b3c",
        "sagemaker",
        State(content.get("state", "FAILED")),
        content.get("reason", ""),
        world_size=content.get("world_size"),
    )
    read = (LogLine(m["host"], m["text"], _BEGAN + float(m["seconds"])) for m in lines if m)
    facts = SCRIPT_FACTS if content.get("job") == "script" else FACTS
    return Case(path.stem, status, tuple(read), facts, content["expect"])


CASES = tuple(read_case(path) for path in sorted(CORPUS.glob("*.yaml")))
