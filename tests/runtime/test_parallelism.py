"""The table of docs/reference/parallel-layouts.md: each layout gives the losses of a single process.

Each layout runs in two of its four combinations of precision and accumulation; `CLOUDTRAIN_MATRIX=all` runs all.
To generate the table again, run `python tests/runtime/test_parallelism.py`, and review the diff.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY / "tests"))

import torch  # noqa: E402 (as a script, sys.path must be set first)
from support.parallel_training import SIX_DIGITS, TRAIN, Outcome, losses  # noqa: E402
from support.training import Steady  # noqa: E402

from cloudtrain_runtime.contract import ParallelConfig  # noqa: E402

PAGE = REPOSITORY / "docs" / "reference" / "parallel-layouts.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
GLOBAL_BATCH = 16
STEPS = 4
"""A wrong gradient changes the loss of the second step; the weights that it gives are in the step after that."""
COMBINATIONS = (("fp32", 1), ("fp32", 4), ("bf16", 4), ("fp16", 4))
BOUNDS = {
    "fp32": SIX_DIGITS,
    "bf16": torch.finfo(torch.bfloat16).eps,
    "fp16": torch.finfo(torch.float16).eps,
}
"""Relative tolerance of losses and gradient norms: the distance of two neighbouring numbers of the precision."""


@dataclass(frozen=True)
class Layout:
    """A row of the table."""

    ranks: int
    parallel: ParallelConfig
    recomputes: bool = False

    @property
    def name(self) -> str:
        default, own = ParallelConfig(), self.parallel
        changed = {key: value for key, value in vars(own).items() if value != getattr(default, key)}
        given = {"data": own.data, **changed} if own.data == "fsdp" or not changed else changed
        if "bucket_bytes" in given:
            given = {
                "bucket": f"{given['bucket_bytes'] // 1000}KB"
            }  # the name of the field in job.yaml
        words = [
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in given.items()
        ]
        return f"`{{{', '.join(words)}}}`" + (
            ", activation checkpointing" if self.recomputes else ""
        )


def layouts() -> list[Layout]:
    def of(ranks: int, **parallel: object) -> Layout:
        return Layout(ranks, ParallelConfig(**parallel))  # type: ignore[arg-type]

    return [
        *(of(ranks) for ranks in (1, 2, 4)),
        of(2, static_graph=True),
        of(2, compress="bf16"),
        of(2, bucket_bytes=10_000),
        *(of(ranks, data="fsdp") for ranks in (2, 4)),
        of(2, data="fsdp", reshard=False),
        of(2, data="fsdp", offload=True),
        of(4, data="fsdp", shard=2),
        Layout(2, ParallelConfig(data="fsdp"), recomputes=True),
        of(2, tensor=2),
        of(4, tensor=2),
        of(4, data="fsdp", tensor=2),
        *(
            of(2, pipeline=2, schedule=schedule)
            for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
        ),
        of(4, pipeline=4),
        of(4, pipeline=2),
        of(4, data="fsdp", pipeline=2),
        of(4, tensor=2, pipeline=2),
        of(8, data="fsdp", tensor=2, pipeline=2),
    ]


def precision_of(layout: Layout, precision: str) -> str:
    """Return the lowest precision in which a step of the layout computes or communicates."""
    return "bf16" if layout.parallel.compress == "bf16" else precision


def run(layout: Layout, precision: str, accumulate: int, folder: Path) -> Outcome:
    """Train with AdamW in float64, or with SGD in a lower precision, because AdamW amplifies rounding errors."""
    shares = layout.ranks // layout.parallel.group_size
    train = replace(
        TRAIN,
        steps=STEPS,
        parallel=layout.parallel,
        precision=precision,
        accumulate=accumulate,
        batch_size=GLOBAL_BATCH // shares // accumulate,
        activation_checkpointing=layout.recomputes,
    )
    if precision_of(layout, precision) == "fp32":
        return losses(train, layout.ranks, folder, dtype=torch.float64)
    return losses(replace(train, learning_rate=0.3), layout.ranks, folder, task=Steady)


@cache
def single(is_exact: bool) -> Outcome:
    """Train one process on the same samples without accumulation: in float64, or with SGD in float32."""
    train = replace(TRAIN, steps=STEPS, accumulate=1, batch_size=GLOBAL_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        if is_exact:
            return losses(train, 1, Path(folder), dtype=torch.float64)
        return losses(replace(train, learning_rate=0.3), 1, Path(folder), task=Steady)


def verdict(outcome: Outcome, layout: Layout, precision: str) -> str:
    """Return `passed`, or the reason why the layout differs or is rejected."""
    lowest = precision_of(layout, precision)
    if outcome.reason is not None:
        return re.sub(r"^\w+Error: ", "", outcome.reason).replace("|", "/")
    values, expected = (
        numbers.losses + numbers.grad_norms for numbers in (outcome, single(lowest == "fp32"))
    )
    if len(values) != len(expected):
        return f"{len(values)} values instead of {len(expected)}"
    furthest = max(abs(value / other - 1) for value, other in zip(values, expected, strict=True))
    return "passed" if furthest <= BOUNDS[lowest] else f"off by a factor of 1 + {furthest:.1g}"


def cells() -> Iterator[tuple[Layout, str, int]]:
    for layout in layouts():
        for precision, accumulate in COMBINATIONS:
            yield layout, precision, accumulate


def cells_to_run() -> Iterator[tuple[Layout, str, int]]:
    """Yield, for each layout, fp32 with accumulation or one of the other combinations in turn; two ranks have both."""
    first, *others = sorted(COMBINATIONS, key=lambda each: each != ("fp32", 4))
    for number, layout in enumerate(layouts()):
        other = others[number // 2 % len(others)]
        chosen = [first, other] if layout.ranks == 2 else [other if number % 2 else first]
        if os.environ.get("CLOUDTRAIN_MATRIX") == "all":
            chosen = [first, *others]
        for combination in chosen:
            yield layout, *combination


def documented() -> dict[tuple[str, int, str, int], str]:
    text = PAGE.read_text() if PAGE.exists() else ""
    table = text.partition(BEGIN)[2].partition(END)[0]
    found = {}
    for line in table.strip().splitlines()[2:]:
        name, ranks, *verdicts = (cell.strip() for cell in line.strip("|").split(" | "))
        found |= {
            (name, int(ranks), *each): text
            for each, text in zip(COMBINATIONS, verdicts, strict=True)
        }
    return found


def test_the_table_has_each_layout() -> None:
    assert list(documented()) == [(layout.name, layout.ranks, *rest) for layout, *rest in cells()]


def parameters() -> Iterator[Any]:
    """Yield each cell; those of two ranks in fp32 are also the short proof of each kind of parallelism."""
    kinds = (
        ParallelConfig(),
        ParallelConfig(data="fsdp"),
        ParallelConfig(tensor=2),
        ParallelConfig(pipeline=2, schedule="1f1b"),
    )
    for layout, precision, accumulate in cells_to_run():
        is_proof = precision == "fp32" and layout in [Layout(2, kind) for kind in kinds]
        name = layout.name.strip("`")
        yield pytest.param(
            layout,
            precision,
            accumulate,
            id=f"{name}-{layout.ranks}-{precision}-{accumulate}",
            marks=[pytest.mark.promise] if is_proof else [],
        )


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "precision", "accumulate"), tuple(parameters()))
def test_a_layout_gives_the_losses_of_a_single_process(
    layout: Layout, precision: str, accumulate: int, tmp_path: Path
) -> None:
    expected = documented()[layout.name, layout.ranks, precision, accumulate]
    assert verdict(run(layout, precision, accumulate, tmp_path), layout, precision) == expected


def write() -> None:
    """Run every cell and write the table."""
    heads = [f"{precision}, accumulate {accumulate}" for precision, accumulate in COMBINATIONS]
    lines = ["| `train.parallel` | ranks | " + " | ".join(heads) + " |"]
    lines.append("|" + "---|" * (2 + len(COMBINATIONS)))
    for layout in layouts():
        row = []
        for precision, accumulate in COMBINATIONS:
            with tempfile.TemporaryDirectory() as folder:
                row.append(
                    verdict(run(layout, precision, accumulate, Path(folder)), layout, precision)
                )
        lines.append(f"| {layout.name} | {layout.ranks} | " + " | ".join(row) + " |")
        print(lines[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write()
