"""Compare cloudtrain's training loop with a plain one, Lightning's two and Accelerate's: samples per second.

    .venv/bin/python benchmarks/loops.py [--rounds 7] [--only mlp-1] [--loops hand,cloudtrain] [--write FILE]

All loops use the same models, data, batches and optimizer, one thread per rank, and Gloo. The models are an MLP of 0.1
M parameters, whose steps are mostly overhead, and a GPT of 10.8 M. The MLP reads a TensorDataset (mlp) or a custom
dataset class (rows). In each round, every loop is started once. Then the loops run short turns while all others wait.
Each turn starts with another loop. The ratio of a round is that of the medians of its turns. The tables show the median
over the rounds. The losses of all loops are compared step by step, so that the work is equal.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import turns
from loop_work import Settings, write_run
from measure import Benchmark, Session, markdown_table

from cloudtrain.backends.container.machine import free_port

HERE = Path(__file__).resolve().parent
NAMES = {
    "hand": "by hand, torch alone",
    "cloudtrain": "cloudtrain's `Task` loop",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "trainer": "Lightning Trainer",
}
MODELS = {
    "mlp": Settings("mlp", batch_size=32, warm=20, counted=200, turns=9),
    "rows": Settings("rows", batch_size=32, warm=20, counted=200, turns=9),
    "gpt": Settings("gpt", batch_size=2, warm=2, counted=10, turns=5),
}
"""Steps of a turn: warm-up steps and measured steps, with the same number of log lines in each turn."""

_TOLERANCE = 1e-3
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="a loop that is written by hand with torch alone, Lightning Fabric, Accelerate and Lightning's Trainer",
    goal="at least 0.95 times the rate of the loop by hand, and no rate below that of the other libraries",
    mechanism="all loops did the same work: the loss of every step of every rank was the same",
    options={
        "only": ("mlp-1,mlp-2,rows-1,rows-2,gpt-1,gpt-2", "tables: model and ranks"),
        "loops": (",".join(NAMES), "loops; the others are compared with the first"),
    },
    packages=("torch", "lightning", "accelerate"),
)


def commands(name: str, ranks: int, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command and the environment of each rank of a loop."""
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    shared |= {
        "TORCHELASTIC_RUN_ID": "loops",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "GROUP_RANK": 0,
        "OMP_NUM_THREADS": 1,
    }
    shared |= {"CLOUDTRAIN_ML_ROOT": folder / "ml", "PYTHONPATH": HERE}
    argv = [sys.executable, str(HERE / "loop_work.py"), name, str(folder / "settings.json")]
    return [
        (
            argv,
            {
                key: str(value)
                for key, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()
            },
        )
        for rank in range(ranks)
    ]


def play_round(
    names: list[str], settings: Settings, ranks: int, first: int
) -> tuple[dict[str, list[float]], float]:
    """Start every loop and run their turns; return seconds per turn, and the largest difference of a loss."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_run(settings, folder / "ml", ranks=ranks)
        (folder / "settings.json").write_text(json.dumps(asdict(settings)))
        started = [
            stack.enter_context(
                turns.start(each, commands(each, ranks, folder), folder / each, ranks=ranks)
            )
            for each in names
        ]
        for loop in started:
            loop.read()
        seconds: dict[str, list[float]] = {each: [] for each in names}
        for turn in range(settings.turns):
            at = (first + turn) % len(started)
            for loop in started[at:] + started[:at]:
                seconds[loop.name].append(loop.take_turn()[0]["seconds"])
        losses = {loop.name: loop.read() for loop in started}
        for loop in started:
            loop.finish()
    return seconds, _difference(losses)


def _difference(losses: Mapping[str, list[list[float]]]) -> float:
    """Return the largest difference of a loss from that of the plain loop, over all loops, ranks and steps."""
    base = next(iter(losses.values()))
    return max(
        abs(one - other)
        for ranks in losses.values()
        for own, theirs in zip(ranks, base, strict=True)
        for one, other in zip(own, theirs, strict=True)
    )


def measure_table(session: Session, model: str, ranks: int, names: list[str]) -> list[str]:
    """Return a Markdown table of the loops on one model and number of ranks."""
    settings = MODELS[model]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    worst = 0.0
    samples = settings.batch_size * ranks
    for turn in range(session.rounds):
        seconds, difference = play_round(names, settings, ranks, turn)
        worst = max(worst, difference)
        session.require(
            difference <= _TOLERANCE, f"{model}, {ranks} ranks: losses differ by {difference:.6f}"
        )
        base = statistics.median(seconds[names[0]])
        for name in names:
            own = statistics.median(seconds[name])
            ratios[name].append(base / own)
            rates[name].append(samples * settings.counted / own)
    rows = []
    for name in names:
        rate, ratio = statistics.median(rates[name]), statistics.median(ratios[name])
        spread = f"{min(ratios[name]):.3f} to {max(ratios[name]):.3f}"
        rows.append(
            (NAMES[name], f"{rate:,.0f}", f"{1000 * samples / rate:.3f}", f"{ratio:.3f}", spread)
        )
    title = f"{model}, {ranks} rank{'s' if ranks > 1 else ''}"
    lines = markdown_table((title, "samples/s", "ms per step", "x by hand", "min to max"), rows)
    print("\n".join(lines), file=sys.stderr, flush=True)  # results so far
    return [*lines, "", f"Losses differ by {worst:.6f} at most.", ""]


def measure(session: Session) -> list[str]:
    """Return one table per model and number of ranks. Faster than by hand is above 1."""
    lines: list[str] = []
    for table in session.options.only.split(","):
        model, _, ranks = table.partition("-")
        lines += measure_table(session, model, int(ranks), session.options.loops.split(","))
    return [*lines, "Faster than by hand is above 1."]


if __name__ == "__main__":
    BENCHMARK.main(measure)
