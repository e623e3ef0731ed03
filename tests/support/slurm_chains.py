"""What the attempts of a run on Slurm have left together: samples, losses and checkpoints, as its final attempt continues them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.backends.slurm.attempts import Attempts
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.attempts import read_attempt
from cloudtrain_runtime.contract.constants import REHEARSAL_SAMPLES_VARIABLE

RECORDS_SAMPLES = ("--set", f"code.env.{REHEARSAL_SAMPLES_VARIABLE}=1")
"""Options of a training that writes a digest of each sample that it uses."""

_Samples = Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class Chain:
    """What a run has done.

    Attributes:
        attempts: Number of attempts.
        samples: The samples of each step over all ranks, sorted. Of a step that was repeated, those of the attempt that
            the final one continues.
        repeated_steps: Steps that were taken again, because an attempt could not save.
        losses: The reported losses by step, in the same way.
        stray_checkpoints: Checkpoints that an attempt published after a newer one had begun, in words.
    """

    attempts: int
    samples: _Samples
    repeated_steps: int
    losses: Mapping[int, float]
    stray_checkpoints: tuple[str, ...]


def read_chain(root: Path) -> Chain:
    """Read the chain of attempts of a run that has ended."""
    count = read_attempt(root / "attempt")
    folders = [JobFolder(root, number) for number in range(1, count + 1)]
    samples: dict[int, tuple[str, ...]] = {}
    repeated = 0
    for folder in folders:
        found = samples_of(folder)
        # An attempt continues the steps before its own first one.
        later = [step for step in samples if found and step >= min(found)]
        repeated += len(later)
        for step in later:
            del samples[step]
        samples |= found
    return Chain(
        attempts=count,
        samples=samples,
        repeated_steps=repeated,
        losses=_losses(root),
        stray_checkpoints=tuple(_strays(root, folders)),
    )


def differences(found: Chain, expected: Chain) -> Iterator[str]:
    """Yield in what a run differs from an uninterrupted one, and what else is wrong with it."""
    steps = set(expected.samples)
    if missing := steps - set(found.samples):
        yield f"{len(missing)} steps are missing, the first is {min(missing)}"
    if extra := set(found.samples) - steps:
        yield f"{len(extra)} steps are too many, the first is {min(extra)}"
    other = [
        step for step in steps & set(found.samples) if found.samples[step] != expected.samples[step]
    ]
    if other:
        yield f"{len(other)} steps used other samples, the first is {min(other)}"
    if unlike := [s for s, loss in found.losses.items() if expected.losses.get(s, loss) != loss]:
        yield f"{len(unlike)} losses differ, the first is that of step {min(unlike)}"
    if unreported := set(expected.losses) - set(found.losses):
        yield f"{len(unreported)} losses are not reported, the first is that of step {min(unreported)}"
    yield from found.stray_checkpoints


def epochs_of(samples: _Samples, steps_per_epoch: int) -> list[Counter[str]]:
    """Return how often each epoch has used each sample."""
    epochs: list[Counter[str]] = []
    for step in sorted(samples):
        number = (step - 1) // steps_per_epoch
        epochs += [Counter() for _ in range(number + 1 - len(epochs))]
        epochs[number].update(samples[step])
    return epochs


def samples_of(folder: JobFolder) -> dict[int, tuple[str, ...]]:
    """Return the samples of the steps of one attempt that all ranks have taken."""
    hosts = sorted(each.name for each in (folder.own / "hosts").glob("*"))
    records = [
        {int(line["step"]): line["samples"] for line in _lines(file)}
        for host in hosts
        for file in sorted(folder.tree(host).rehearsal.glob("steps-*.jsonl"))
    ]
    # A rank that was killed before its first step has no file.
    if len(records) < len(hosts) or not records:
        return {}
    steps = set.intersection(*(set(each) for each in records))
    return {step: tuple(sorted(s for each in records for s in each[step])) for step in steps}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines(keepends=True):
        # The last line may have been cut off.
        if line.endswith("}\n"):
            yield json.loads(line)


def _losses(root: Path) -> dict[int, float]:
    lines = (root / "events.jsonl").read_text().splitlines()
    events = (json.loads(line) for line in lines)
    return {each["step"]: each["loss"] for each in events if each["event"] == "step"}


def _strays(root: Path, folders: Iterable[JobFolder]) -> Iterator[str]:
    """Yield the checkpoints that an attempt published after a newer one had begun."""
    started = {each.number: each.started for each in Attempts.read(root).all}
    for folder in folders:
        later = min((at for number, at in started.items() if number > folder.attempt), default=None)
        for log in (root / "logs").glob("*.log"):
            if later is None or log != folder.log(log.name.partition(".")[0]):
                continue
            for event in map(parse_event, log.read_text(errors="replace").splitlines()):
                if event and event["event"] == "checkpoint" and event["time"] > later:
                    yield f"attempt {folder.attempt} saved step {event['step']} after it was replaced"
