"""Measure training on one GPU: a Task against other loops, checkpoints, start-up, and the data pipeline.

    python benchmarks/gpu.py --write benchmarks/results/gpu-NAME.json [--minutes 9] [--wheels FOLDER]
    python benchmarks/gpu.py --cpu-trial                    # everything with a tiny model: tests this script only

Runs from an unpacked source tree with Python, PyTorch and NumPy; nothing has to be installed. A GPT of 124 million
parameters (nanoGPT's layout) is trained with bf16 autocast, torch.compile and 1,024 tokens per sample. cloudtrain's
launcher trains it as a Task, as it does in a container and in a local run. The other programs train it with the same
data, batch, optimizer and clipping. All are started one after the other, with a compile cache of their own, and then
train in short turns. Checkpoints are measured as in checkpoints.py, and data is loaded without a model.

`--write PATH` merges the figures into a JSON file (gpu_figures.py), after each part. What does not fit into
`--minutes` is left out and listed. Without CUDA the exit code is 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_figures
import torch
import turns
from gpu_figures import Figure, Results
from measure import REPOSITORY, Benchmark, Session, free_port

HERE = Path(__file__).resolve().parent
PATHS = (HERE, REPOSITORY / "entrypoints")
sys.path[:0] = [str(path) for path in PATHS]
NAMES = {
    "hand": "plain PyTorch loop",
    "cloudtrain": "cloudtrain",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "torchtitan": "torchtitan",
}
PACKAGES = {"fabric": "lightning", "accelerate": "accelerate", "torchtitan": "torchtitan"}
_START_SECONDS = 180.0
_TURNS, _TURN_SECONDS = 3, 5.0
"""Turns that the first two programs are to have before a third is started, and the estimate of one."""
_EXCEPTION = re.compile(
    r"(?:\[\w+\]:\s*)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Warning)\b.*)"
)
"""An exception as Python and torchrun print it, such as `[rank0]: torch.OutOfMemoryError: CUDA out of memory`."""
MIN_PROGRAMS = 2
"""Programs that are started first: the plain loop and cloudtrain."""
_SAMPLES = 500
"""Batches of an epoch where data is loaded without a model."""
_OPTIMIZER_BYTES = 12
"""Bytes of a weight and of AdamW's two moments in float32."""


def measure_data(seconds: float, settings: dict[str, Any]) -> dict[str, float]:
    """Return samples per second of loader and copy to the device, without a model: medians of three alternating turns.

    Args:
        seconds: Length of a turn.
        settings: Fields of `loop_work.Settings`.
    """
    size, device = settings["batch_size"], settings["device"]
    sources = {"cloudtrain": fed_batches(settings), "DataLoader": plain_batches(settings)}
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for batches in sources.values():
        next(batches)  # starts the processes
    for _ in range(3):
        for name, batches in sources.items():
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                next(batches)
                count += size
            if device == "cuda":
                torch.cuda.synchronize()
            rates[name].append(count / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in rates.items()}


def fed_batches(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yield batches on the device as cloudtrain's training loop gets them."""
    from loop_models import make_data
    from torch.utils.data import default_collate

    from cloudtrain_runtime.data import Loading, ReaderShare, make_feeder
    from cloudtrain_runtime.process.run_context import read_context

    context = dataclasses.replace(read_context({}), device=torch.device(settings["device"]))
    size, workers = settings["batch_size"], settings["workers"]
    data = make_data(settings["kind"], _SAMPLES * size)
    feeder = make_feeder(
        data, context, ReaderShare(0, 1), Loading(default_collate, size, workers=workers)
    )
    while True:
        for step in feeder.epoch():
            for _, batch in step:
                yield batch
            feeder.advance()


def plain_batches(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yield batches of a plain DataLoader on the device."""
    from loop_models import make_data
    from torch.utils.data import DataLoader

    size, workers, device = settings["batch_size"], settings["workers"], settings["device"]
    data, pins = make_data(settings["kind"], _SAMPLES * size), device == "cuda"
    keeps = workers > 0
    loader = DataLoader(
        data, size, shuffle=True, num_workers=workers, persistent_workers=keeps, pin_memory=pins
    )
    while True:
        for batch in loader:
            yield [each.to(device, non_blocking=True) for each in batch]


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="a plain PyTorch loop, Lightning Fabric, Accelerate, torch.save and DCP's async_save, a plain DataLoader",
    goal="at least 0.98 times the plain loop's tokens/s, a stall of at most 0.05 times torch.save's, 1 % data wait",
    mechanism="every program ran the model on the device with bf16 products, compiled, and the Task's rank was a fork "
    "of the launcher's server; each save of cloudtrain was committed",
    rounds=7,
    options={
        "minutes": (9.0, "budget"),
        "wheels": ("", "folder with wheels of packages that this machine lacks"),
        "cpu-trial": (False, "run everything on the CPU with a tiny model"),
        "peers": (
            ",".join(NAMES),
            "programs that train; those that are not installed are listed as missing",
        ),
        "gigabytes": ((1.5, 10.0), "sizes of the saved states"),
    },
    children=(measure_data,),
    writes_page=False,
)


@dataclass
class Report:
    """Figures so far, and what was left out.

    Attributes:
        path: JSON file, or None.
        until: End of the budget, as time.monotonic counts.
    """

    path: Path | None
    until: float
    figures: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """Rest of the budget."""
        return max(0.0, self.until - time.monotonic())

    def leave_out(self, what: str, reason: object) -> None:
        """Record that something was not measured."""
        self.left_out.append(f"{what}: {short_reason(str(reason))}")
        print(f"left out: {what}: {reason}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Merge the figures into the file."""
        if self.path is None:
            return
        machine = gpu_figures.describe_machine() | {
            "left_out": "; ".join(self.left_out) or "nothing"
        }
        versions = gpu_figures.describe_versions(*PACKAGES.values(), "numpy")
        missing = {
            package: "not installed" for package in PACKAGES.values() if package not in versions
        }
        gpu_figures.update(self.path, Results(machine, versions | missing, tuple(self.figures)))


def short_reason(text: str) -> str:
    """Return the line of a program's output that says why it failed: its last exception, or else its last words."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [match[1] for line in lines if (match := _EXCEPTION.match(line))]
    if errors:
        return errors[-1]
    words = [line for line in lines if any(character.isalpha() for character in line)]
    return words[-1] if words else "no reason was given"


def measure(session: Session) -> list[str]:
    """Measure all parts; return the figures as Markdown."""
    from loop_work import Settings

    options = session.options
    report = Report(options.write, time.monotonic() + 60 * options.minutes)
    if not options.cpu_trial and not torch.cuda.is_available():
        print(
            "gpu.py measures a GPU, and torch finds no CUDA device (--cpu-trial tests the script)",
            file=sys.stderr,
        )
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name)
        paths = [*PATHS, *unpack_wheels(options.wheels, folder / "wheels")]
        sys.path += [str(path) for path in paths[len(PATHS) :]]
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [*map(str, paths), os.environ.get("PYTHONPATH", "")]
        ).rstrip(":")
        sizes: dict[str, Any] = {
            "kind": "gpt-tiny",
            "batch_size": 4,
            "warm": 2,
            "counted": 10,
            "device": "cpu",
        }
        if not options.cpu_trial:
            sizes = {
                "kind": "gpt-124m",
                "batch_size": choose_batch_size(),
                "warm": 10,
                "counted": 30,
                "device": "cuda",
            }
            sizes |= {"workers": min(4, os.cpu_count() or 1), "compiles": True}
        # The last turn is never taken, so that all programs wait until they are ended.
        settings = Settings(**sizes, turns=session.rounds + 1, bf16=True, clip=1.0, is_timed=True)
        train(session, report, settings, folder)
        report.write()
        load_data(report, settings)
        report.write()
        for gigabytes in options.gigabytes:
            save(session, report, gigabytes, settings.device, folder)
            report.write()
    lines = gpu_figures.figure_lines(tuple(report.figures))
    return [*lines, "", f"Left out: {'; '.join(report.left_out) or 'nothing'}."]


def unpack_wheels(folder: str, target: Path) -> list[Path]:
    """Unpack the wheels of a folder; return the path to search for packages."""
    wheels = sorted(Path(folder).glob("*.whl")) if folder else []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return [target] if wheels else []


def choose_batch_size() -> int:
    """Return the samples of a step, such that all programs together fit into the GPU's memory."""
    gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
    return next((size for size, needed in ((32, 130), (16, 70), (8, 36)) if gigabytes >= needed), 4)


def train(session: Session, report: Report, settings: Any, folder: Path) -> None:
    """Start every program and let them train in turns; record throughput, memory, start-up and data wait."""
    until = time.monotonic() + 0.55 * report.seconds_left
    read_files(settings, folder / "warm")
    started: list[turns.Contestant] = []
    longest_start = 0.0
    with contextlib.ExitStack() as stack:
        for name in session.options.peers.split(","):
            if reason := why_not(name, until, len(started), longest_start):
                report.leave_out(NAMES[name], reason)
                continue
            began = time.monotonic()
            command = commands(name, settings, folder / name)
            try:
                contestant = stack.enter_context(
                    turns.start(
                        name, [command], folder / name, ranks=1, timeout_seconds=_START_SECONDS
                    )
                )
                (state,) = contestant.read()
                seconds = time.monotonic() - began
                longest_start = max(longest_start, seconds)
                check(session, name, state, settings)
            except SystemExit as error:
                if name == "cloudtrain":
                    raise
                report.leave_out(NAMES[name], error)
                continue
            started.append(contestant)
            note = "one start: import, model, compilation with an empty cache, and one step"
            report.figures.append(
                Figure("GPT: start to the end of the first step", seconds, "s", NAMES[name], note)
            )
        found = take_turns(session, report, started, until)
    for contestant in started:
        if contestant.name in found:
            record_training(report, settings, contestant, found)


def read_files(settings: Any, folder: Path) -> None:
    """Compile something small, so that the first program does not read PyTorch's compiler from a cold disk."""
    work = f"torch.compile(torch.sin)(torch.ones(2, device={settings.device!r}))"
    environ = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder),
    }
    command = [sys.executable, "-c", f"import torch; {work if settings.compiles else None}"]
    subprocess.run(command, check=True, env=environ)


def why_not(name: str, until: float, started: int, longest_start: float) -> str:
    """Return why a program is not started, or an empty string.

    Args:
        name: The program.
        until: End of the time for training, as time.monotonic counts.
        started: Number of programs that have been started.
        longest_start: Seconds that the slowest of them needed.
    """
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if name == "torchtitan":
        return "installed, but this script has no adapter for its trainer"
    seconds_left = until - time.monotonic()
    if seconds_left <= 0:
        return "no time left in the budget"
    # Another program costs its start and its turns. Two programs with several turns are worth more than four with one.
    needed = longest_start + _TURNS * _TURN_SECONDS * (started + 1)
    if started >= MIN_PROGRAMS and seconds_left < needed:
        return f"the time left does not suffice for its start and {_TURNS} turns of every program"
    return ""


def commands(name: str, settings: Any, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write the files of a program; return its command and environment."""
    from loop_work import write_run

    folder.mkdir()
    environ = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    if name == "cloudtrain":
        write_run(settings, folder / "ml", ranks=1)
        environ |= {
            "CLOUDTRAIN_ML_ROOT": str(folder / "ml"),
            "CLOUDTRAIN_RENDEZVOUS_PORT": str(free_port()),
        }
        environ["CLOUDTRAIN_HOST_ADDRESSES"] = json.dumps({"algo-1": "127.0.0.1"})
        if settings.device == "cpu":
            environ["CLOUDTRAIN_GPUS"] = "0"
        return [sys.executable, "-m", "cloudtrain_runtime.launch"], environ
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
    return [
        sys.executable,
        str(HERE / "loop_work.py"),
        name,
        str(folder / "settings.json"),
    ], environ


def check(session: Session, name: str, state: Mapping[str, Any], settings: Any) -> None:
    """Exit unless a program does what is measured, as it describes itself after its first step."""
    session.require(state["device"] == settings.device, f"{name} runs on {state['device']}")
    session.require(state["dtype"] == "torch.bfloat16", f"{name} computes with {state['dtype']}")
    session.require(
        state["is_compiled"] == settings.compiles, f"{name}: compiled is {state['is_compiled']}"
    )
    session.require(
        state["is_forked"] == (name == "cloudtrain"), f"{name}: forked is {state['is_forked']}"
    )


def take_turns(
    session: Session, report: Report, started: list[turns.Contestant], until: float
) -> dict[str, list[dict[str, float]]]:
    """Let the programs train alternately, each round from another one on; return the figures of each turn by name.

    A program that fails is left out, and the others take their turns.
    """
    found: dict[str, list[dict[str, float]]] = {each.name: [] for each in started}
    for number in range(session.rounds):
        began = time.monotonic()
        at = number % len(started)
        for contestant in started[at:] + started[:at]:
            if contestant.name not in found:
                continue
            try:
                found[contestant.name] += contestant.take_turn()
            except SystemExit as error:
                if contestant.name == "cloudtrain":
                    raise
                del found[contestant.name]
                report.leave_out(NAMES[contestant.name], error)
        if time.monotonic() + (time.monotonic() - began) > until:
            break
    return found


def record_training(
    report: Report,
    settings: Any,
    own: turns.Contestant,
    found: Mapping[str, list[dict[str, float]]],
) -> None:
    """Record a program's figures: medians of its turns, and the median of the ratios to the plain loop's."""
    from loop_models import SHAPES

    name, rounds = NAMES[own.name], found[own.name]
    shape = SHAPES[settings.kind]
    tokens = settings.counted * settings.batch_size * shape.context
    rates = [tokens / each["seconds"] for each in rounds]
    base = [tokens / each["seconds"] for each in found.get("hand", rounds)]
    ratio = statistics.median(a / b for a, b in zip(rates, base, strict=True))
    note = f"{len(rates)} alternating turns, {min(rates):,.0f} to {max(rates):,.0f}; {ratio:.3f} x {NAMES['hand']}"
    about = f"batch of {settings.batch_size} x {shape.context} tokens, bf16"
    rate = statistics.median(rates)
    report.figures.append(Figure("GPT: throughput", rate, "tokens/s", name, f"{about}; {note}"))
    record_utilization(report, shape, name, rate)
    peak = max(each["peak_bytes"] for each in rounds)
    kind = "torch.cuda.max_memory_allocated" if settings.device == "cuda" else "resident set"
    report.figures.append(Figure("GPT: peak memory", peak, "bytes", name, kind))
    waits = (
        [each["waited"] / each["seconds"] for each in rounds]
        if own.name == "hand"
        else logged_waits(own.log)
    )
    if own.name in ("hand", "cloudtrain") and waits:
        share = statistics.median(waits)
        report.figures.append(
            Figure("GPT: share of a step that waits for data", share, "share", name)
        )


def record_utilization(report: Report, shape: Any, name: str, rate: float) -> None:
    """Record the model FLOPs utilization, where the peak of the GPU is known."""
    from cloudtrain_runtime.metrics.flops import peak_flops

    gpu = str(gpu_figures.describe_machine()["gpu"])
    peak = peak_flops(gpu, "bf16")
    if peak is None:
        if not any(each.startswith("MFU") for each in report.left_out):
            report.leave_out("MFU", f"the peak FLOP/s of {gpu} is unknown")
        return
    note = f"tokens/s x (6 N + 12 L d T) / {peak / 1e12:,.0f} TFLOP/s, dense bf16 of the vendor's datasheet (flops.py)"
    share = rate * shape.flops_per_token / peak
    report.figures.append(Figure("GPT: model FLOPs utilization (MFU)", share, "share", name, note))


def logged_waits(log: Path) -> list[float]:
    """Return the shares of the step that waited for data, as cloudtrain's events report them."""
    from cloudtrain_runtime.contract.events import EVENT_PREFIX

    lines = [
        line.partition(EVENT_PREFIX)[2] for line in log.read_text(errors="replace").splitlines()
    ]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        each["data_wait"]
        for each in events
        if each["event"] == "step" and each.get("data_wait") is not None
    ]


def load_data(report: Report, settings: Any) -> None:
    """Record the rates of the data pipeline without a model."""
    seconds = 5.0 if settings.device == "cuda" else 0.2
    command = BENCHMARK.child(measure_data, seconds=seconds, settings=dataclasses.asdict(settings))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=report.seconds_left
        )
    except subprocess.TimeoutExpired:
        report.leave_out("data pipeline", "no time left in the budget")
        return
    if done.returncode != 0:
        report.leave_out("data pipeline", done.stderr[-4000:])
        return
    note = f"{settings.workers} processes, batches of {settings.batch_size}, copied to the device; no model"
    for name, rate in json.loads(done.stdout.splitlines()[-1]).items():
        report.figures.append(Figure("data pipeline at full speed", rate, "samples/s", name, note))


def save(session: Session, report: Report, gigabytes: float, device: str, folder: Path) -> None:
    """Record the stall and the throughput of checkpoints of one size in a folder."""
    from checkpoints import OWN, TORCH_SAVE, run_ranks

    what = f"checkpoint of {gigabytes:g} GB"
    width = 64 if device == "cpu" else round((gigabytes * 1e9 / _OPTIMIZER_BYTES) ** 0.5)
    size = _OPTIMIZER_BYTES * width**2 / 1e9
    rounds = next(
        (each for each in (3, 2, 1) if report.seconds_left > 4 * (each + 1) * gigabytes + 20), 0
    )
    if device == "cpu":
        rounds = min(1, session.rounds)
    if rounds == 0 or shutil.disk_usage(folder).free < 3e9 * size:
        report.leave_out(
            what, "not enough time in the budget" if rounds == 0 else "not enough space on the disk"
        )
        return
    place = folder / f"saved-{gigabytes:g}"
    place.mkdir()
    options = {"uri": place.as_uri(), "rounds": rounds, "device": device, "width": width}
    try:
        series, failed = run_ranks("stall", 1, timeout_seconds=report.seconds_left, **options)
    except SystemExit as error:
        report.leave_out(what, error)
        return
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for each in failed:
        report.leave_out(f"{what}: {each.name}", each.reason)
    found = {each.name: each for each in series}
    saves = found[OWN].values("saves")
    session.require(
        saves == list(range(2, rounds + 2)),
        f"cloudtrain has committed {saves} saves after its rounds",
    )
    for name, own in found.items():
        ratio = f"{own.ratio(found[TORCH_SAVE]):.3f} x {TORCH_SAVE}; {rounds} alternating rounds to {folder.parent}"
        report.figures.append(Figure(f"{what}: stall of training", own.median(), "s", name, ratio))
        rate = size / own.median("total")
        report.figures.append(
            Figure(f"{what}: throughput to complete", rate, "GB/s", name, f"{rounds} rounds")
        )


if __name__ == "__main__":
    BENCHMARK.main(measure)
