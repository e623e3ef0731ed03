"""Measure what a rehearsal predicts against what runs do, and how long a rehearsal takes.

    .venv/bin/python benchmarks/rehearsal.py [--write FILE]

The memory of a rank is predicted in one process for 4 ranks, and then measured in 4 ranks: the bytes of the tensors
that each holds, and how far the process's memory grows from the first forward pass to the second step. That growth also
contains buffers of Gloo and of the math library and what the C library's allocator keeps, so it exceeds the tensors.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from measure import BIN, REPOSITORY, Benchmark, Session, clean_environ, markdown_table

RANKS = 4
JOB = """\
name: measured
code: {directory: ., task: "measured:Measured", args: {layers: 4, width: 192, heads: 4, context_bytes: 192, files: 20}}
cluster: {instance_type: ml.m5.large, processes_per_instance: 4}
train: {steps: 3, batch_size: BATCH, parallel: {data: LAYOUT}}
checkpoint: {every: 3 steps}
"""
TASK = '''
import json
from pathlib import Path
from gpt import GPT
from torch.distributed.tensor import DTensor
from cloudtrain_runtime import context


def memory(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(name)[2].split()[0])


class Measured(GPT):
    """The GPT of the examples, which prints the memory of its ranks."""

    before = 0

    def optimizer(self, model):
        self.built = super().optimizer(model)
        return self.built

    def loss(self, model, batch):
        if not self.before:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self.before = memory("VmRSS:")
        return super().loss(model, batch)

    def after_step(self, model):
        if context().step == 2:
            state = [each for values in self.built.state.values() for each in values.values()]
            own = map(local, [*model.parameters(), *model.buffers(), *state])
            held = sum(each.numel() * each.element_size() for each in own)
            Path(context().output_dir, f"rank-{context().rank}.json").write_text(
                json.dumps({"held": held, "growth": memory("VmHWM:") - self.before})
            )


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
'''
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="4 real ranks of the same job (memory)",
    goal="the bytes of parameters and optimizer state exactly; a rehearsal in less than 3 minutes on 2 cores",
    mechanism="all ranks wrote their measurement, or the rehearsal had a verdict and no failed check",
    rounds=0,
    options={"examples": (("digits", "gpt-stdlib"), "examples to rehearse")},
    packages=("torch",),
)


def measure(session: Session) -> Iterator[str]:
    """Yield the tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = clean_environ(CLOUDTRAIN_HOME=str(folder / "home"))
        yield "Memory of a rank of 4, a GPT of 2 million parameters with AdamW, MB:"
        yield ""
        rows = [
            memory_row(session, folder, environ, *case)
            for case in (("ddp", 16), ("ddp", 32), ("fsdp", 16))
        ]
        headings = (
            "layout, batch",
            "parameters and optimizer",
            "measured",
            "gradients and activations",
            "measured",
        )
        yield from markdown_table(headings, rows)
        yield ""
        yield "The last checkpoint, extrapolated from the rate of 2 ranks to the state that 4 ranks have:"
        yield ""
        rows = [checkpoint_row(session, folder, environ, layout) for layout in ("ddp", "fsdp")]
        yield from markdown_table(
            ("layout", "MB predicted", "MB measured", "seconds predicted", "measured"), rows
        )
        yield ""
        yield "A rehearsal, from command to verdict:"
        yield ""
        rows = [rehearsal_row(session, each, environ) for each in session.options.examples]
        yield from markdown_table(("example", "seconds", "verdict", "unknown checks"), rows)


def memory_row(
    session: Session, folder: Path, environ: Mapping[str, str], layout: str, batch: int
) -> list[str]:
    """Predict and measure the memory of one layout."""
    code = folder / f"{layout}-{batch}"
    code.mkdir()
    (code / "gpt.py").write_text((REPOSITORY / "examples" / "gpt-stdlib" / "gpt.py").read_text())
    (code / "measured.py").write_text(TASK)
    (code / "job.yaml").write_text(JOB.replace("BATCH", str(batch)).replace("LAYOUT", layout))
    from support.rehearsals import scene_of

    scene = scene_of(code / "job.yaml", code / "scene")
    found = replace(scene, environ=dict(environ)).probe()
    command = [
        str(BIN / "cloudtrain"),
        "submit",
        str(code / "job.yaml"),
        "--local",
        "--follow",
        "--json",
    ]
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    output = folder / "home" / "runs" / json.loads(done.stdout)["run"]
    ranks = [json.loads(path.read_text()) for path in output.rglob("rank-*.json")]
    session.require(len(ranks) == RANKS, f"{len(ranks)} ranks measured")
    held = max(each["held"] for each in ranks)
    growth = sorted(each["growth"] for each in ranks)
    # From the first forward pass on, the process grows by all but the parameters.
    grown = found.gradients + found.optimizer + found.gathered + found.activation_bytes(batch)
    session.require(
        held == found.parameters + found.optimizer,
        f"{held} bytes are held, and {found} was predicted",
    )
    mb = 10**6
    return [
        f"{layout}, {batch}",
        f"{(found.parameters + found.optimizer) / mb:.3f}",
        f"{held / mb:.3f}",
        f"{grown / mb:.0f}",
        f"{growth[0] / mb:.0f} to {growth[-1] / mb:.0f}",
    ]


def checkpoint_row(
    session: Session, folder: Path, environ: Mapping[str, str], layout: str
) -> list[str]:
    """Predict the checkpoint of 4 ranks from the rate of 2 ranks, and measure it."""
    code = folder / f"{layout}-16"
    saved = {ranks: checkpoint_of(code, environ, ranks) for ranks in (RANKS // 2, RANKS)}
    from support.rehearsals import scene_of

    scene = scene_of(code / "job.yaml", code / "scene-of-checkpoint")
    found = replace(scene, environ=dict(environ)).probe()
    copies = RANKS if layout == "fsdp" else 1
    size, seconds = (
        copies * (found.parameters + found.optimizer),
        saved[RANKS // 2][1] / saved[RANKS // 2][0],
    )
    session.require(
        saved[RANKS][0] >= size, f"{saved[RANKS][0]} bytes were saved, and {size} predicted"
    )
    mb = 10**6
    cells = (size / mb, saved[RANKS][0] / mb)
    return [
        layout,
        *(f"{each:.1f}" for each in cells),
        f"{seconds * size:.2f}",
        f"{saved[RANKS][1]:.2f}",
    ]


def checkpoint_of(code: Path, environ: Mapping[str, str], ranks: int) -> tuple[int, float]:
    """Return the bytes of a run's last checkpoint, and the seconds until it was complete."""
    command = [
        str(BIN / "cloudtrain"),
        "submit",
        str(code / "job.yaml"),
        "--local",
        "--follow",
        "--json",
    ]
    command += ["--set", f"cluster.processes_per_instance={ranks}"]
    done = subprocess.run(
        command, env=environ, cwd=code, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    events = (
        Path(environ["CLOUDTRAIN_HOME"]) / "runs" / json.loads(done.stdout)["run"] / "events.jsonl"
    )
    saved = [
        each
        for each in map(json.loads, events.read_text().splitlines())
        if each.get("event") == "checkpoint"
    ]
    return int(saved[-1]["bytes"]), float(saved[-1]["seconds"])


def rehearsal_row(session: Session, example: str, environ: Mapping[str, str]) -> list[str]:
    """Rehearse an example."""
    job = REPOSITORY / "examples" / example / "job.yaml"
    began = time.monotonic()
    done = subprocess.run(
        [str(BIN / "cloudtrain"), "rehearse", str(job), "--json"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    if not re.match(r"\s*\{", done.stdout):
        sys.exit(done.stderr)
    answer = json.loads(done.stdout)
    failed = [each for each in answer["checks"] if each["result"] == "failed"]
    session.require(not failed, f"{example}: {failed}")
    unknown = ", ".join(each["name"] for each in answer["checks"] if each["result"] == "unknown")
    return [example, f"{seconds:.0f}", answer["verdict"], unknown or "none"]


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    BENCHMARK.main(measure)
