"""Everything that a machine with a GPU can show, in one command and without a network.

    make gpu-day OUT=folder MINUTES=7

The parts run in order of value: the GPU tests (their files side by side), trials of the whole product, and the
benchmark. After each part the results are written to `OUT/gpu-<name of the GPU>.json`, the file that
`benchmarks/gpu_figures.py` describes. What the time did not suffice for is in its field `machine.left_out`.
`OUT/logs` has the output of every part.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPOSITORY / "benchmarks")]

import gpu_figures  # noqa: E402 (the path must be set first)
import product_trials  # noqa: E402

NOTHING = "nothing"
"""What the field `left_out` says where everything was run."""
PARTS = ("tests", "trials", "benchmark")
TEST_SHARE, TRIAL_SHARE = 0.55, 0.6
"""Shares of the time left that tests and trials may take at most."""
TRIALS_AT_ONCE = 3
CLOSE_SECONDS = 20.0
"""How long an interrupted program may take to write its results."""
LEAST_BENCHMARK_SECONDS = 60.0
_IS_CPU_TRIAL = os.environ.get("CLOUDTRAIN_GPU_TRIAL") == "cpu"
_CPU_SECONDS = 600.0
"""Limit of a trial without a GPU, where no rented time passes: for a hang, not for speed."""


@dataclass
class Day:
    """What has been found so far.

    Attributes:
        out: Folder of the results.
        until: End of the time, as time.monotonic counts.
        path: The results file.
        python: Interpreter that has PyTorch and the packages of the wheels.
        environ: Environment of everything that is started.
        left_out: What was not run, with reasons.
    """

    out: Path
    until: float
    path: Path
    python: str
    environ: Mapping[str, str]
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """Rest of the time."""
        return max(0.0, self.until - time.monotonic())

    def start(self) -> None:
        """Create the results file, or forget what an earlier day has left out."""
        self.add()
        self._replace_left_out(())

    def leave_out(self, what: str, reason: str) -> None:
        """Record that something was not run."""
        self.left_out.append(f"{what}: {reason}")
        print(f"left out: {what}: {reason}", flush=True)

    def add(self, *tests: gpu_figures.TestResult) -> None:
        """Merge outcomes into the results file."""
        versions = gpu_figures.describe_versions("numpy", "psutil")
        gpu_figures.update(
            self.path, gpu_figures.Results(gpu_figures.describe_machine(), versions, tests=tests)
        )

    def write_left_out(self) -> None:
        """Add what was left out to the reasons that the benchmark has recorded."""
        recorded = str(gpu_figures.load(self.path).machine["left_out"])
        benchmark = [] if recorded == NOTHING else [recorded]
        self._replace_left_out([*benchmark, *self.left_out])

    def _replace_left_out(self, reasons: Sequence[str]) -> None:
        found = gpu_figures.load(self.path)
        machine = {**found.machine, "left_out": "; ".join(reasons) or NOTHING}
        gpu_figures.write(self.path, dataclasses.replace(found, machine=machine))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; return 1 if something failed, and 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=7.0, help="time for all parts")
    parser.add_argument("--wheels", default="", help="folder with wheels that this machine lacks")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, in this order")
    parser.add_argument("--trials", default="", help="names of trials to run; all if empty")
    options = parser.parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes
    machine = gpu_figures.describe_machine()
    if machine["gpus"] == 0 and not _IS_CPU_TRIAL:
        print(
            "gpu_day.py needs a GPU, and PyTorch sees none"
            " (CLOUDTRAIN_GPU_TRIAL=cpu tries the script on the CPU)",
            file=sys.stderr,
        )
        return 2
    out: Path = options.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    python = prepare_python(options.wheels, out)
    # Nothing that is started here may look for a network.
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    path = gpu_figures.results_path(str(machine["gpu"]), out)
    day = Day(out, until, path, python, environ)
    day.start()
    wanted = options.parts.split(",")
    parts: dict[str, Callable[[], object]] = {
        "tests": lambda: run_tests(day),
        "trials": lambda: run_trials(day, [name for name in options.trials.split(",") if name]),
        "benchmark": lambda: run_benchmark(day, options.wheels),
    }
    for name in PARTS:
        if name in wanted:
            parts[name]()
    day.write_left_out()
    results = gpu_figures.load(path)
    print(f"results: {path}")
    failed = [test.name for test in results.tests if test.outcome == "failed"]
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


def prepare_python(wheels: str, out: Path) -> str:
    """Return an interpreter with this one's packages and those of a folder of wheels.

    The packages are installed into a virtual environment below `out`, because this interpreter's own folder may
    belong to the system. It finds PyTorch through a .pth file, since this interpreter may itself be of a virtual
    environment, which another one does not inherit.
    """
    found = sorted(Path(wheels).glob("*.whl")) if wheels else []
    if not found:
        return sys.executable
    folder = out / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run(
        [*install, "--no-index", "--no-deps", "--target", str(packages), *map(str, found)],
        check=True,
    )
    own = [
        path for path in sys.path if path and Path(path).name in ("site-packages", "dist-packages")
    ]
    (packages / "machine.pth").write_text("".join(f"{path}\n" for path in own))
    return str(python)


def run_tests(day: Day) -> None:
    """Run the test files side by side; merge the outcomes that each has written."""
    files = sorted(HERE.glob("test_*.py"))
    seconds = TEST_SHARE * day.seconds_left
    if seconds < CLOSE_SECONDS:
        day.leave_out("GPU tests", "no time left")
        return
    with ThreadPoolExecutor(len(files)) as pool:
        found = list(pool.map(lambda file: _run_test_file(day, file, seconds), files))
    for file, outcomes in zip(files, found, strict=True):
        if outcomes.exists():
            gpu_figures.update(day.path, gpu_figures.load(outcomes))
        else:
            day.leave_out(file.stem, f"no outcome, see logs/{file.stem}.log")


def _run_test_file(day: Day, file: Path, seconds: float) -> Path:
    """Run one file of tests; return where it has written its outcomes."""
    outcomes = day.out / "logs" / f"{file.stem}.json"
    outcomes.unlink(missing_ok=True)
    command = [day.python, "-m", "pytest", "-c", str(HERE / "pytest.ini"), str(file)]
    is_complete = _run_within(
        [*command, "--figures", str(outcomes)],
        day.environ,
        day.out / "logs" / f"{file.stem}.log",
        seconds,
    )
    if not is_complete:
        day.leave_out(f"the rest of {file.stem}", f"not ended after {seconds:.0f} s")
    return outcomes


def run_trials(day: Day, names: Sequence[str] = ()) -> None:
    """Run the trials of the product, some at a time; write each outcome at once."""
    place = [day.python, "-c", "import cloudtrain"]
    if subprocess.run(place, check=False, capture_output=True, env=day.environ).returncode != 0:
        day.leave_out("trials", "cloudtrain is not installed: WHEELS=folder names its wheel")
        return
    folder = day.out / "logs"
    writes = threading.Lock()
    until = time.monotonic() + TRIAL_SHARE * day.seconds_left

    def run(trial: product_trials.Trial) -> None:
        reason = product_trials.why_not(trial, has_gpu=not _IS_CPU_TRIAL)
        if not reason and time.monotonic() > until:
            reason = "no time left"
        if reason:
            day.leave_out(f"trial {trial.name}", reason)
            return
        command = [day.python, "-m", "cloudtrain"]
        if _IS_CPU_TRIAL:
            trial = dataclasses.replace(trial, seconds=_CPU_SECONDS)
        result = product_trials.run_trial(trial, command, day.environ, folder)
        with writes:
            day.add(result)
            print(f"{result.outcome:8}{result.seconds:7.1f} s  {result.name}", flush=True)

    wanted = [each for each in product_trials.TRIALS if not names or each.name in names]
    with ThreadPoolExecutor(TRIALS_AT_ONCE) as pool:
        list(pool.map(run, wanted))


def run_benchmark(day: Day, wheels: str) -> None:
    """Measure with the time that is left; the benchmark writes its figures after each of its parts."""
    if day.seconds_left < LEAST_BENCHMARK_SECONDS and not _IS_CPU_TRIAL:
        day.leave_out("benchmark", "no time left")
        return
    minutes = (day.seconds_left - CLOSE_SECONDS) / 60
    command = [day.python, str(REPOSITORY / "benchmarks" / "gpu.py"), "--write", str(day.path)]
    command += ["--minutes", f"{minutes:.2f}"]
    if wheels:
        command += ["--wheels", wheels]
    if _IS_CPU_TRIAL:
        command += ["--cpu-trial", "--rounds", "1"]
    if not _run_within(command, day.environ, day.out / "logs" / "benchmark.log", day.seconds_left):
        day.leave_out("the rest of the benchmark", "the time was over")


def _run_within(
    command: Sequence[str], environ: Mapping[str, str], log: Path, seconds: float
) -> bool:
    """Run a program; return whether it ended in time. One that did not is interrupted, so that it writes its results."""
    with _started(command, environ, log) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)
            return False
    return True


@contextlib.contextmanager
def _started(
    command: Sequence[str], environ: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a process group of its own, of which nothing is left at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no PyTorch: make gpu-day GPU_PYTHON=...")
    sys.exit(main())
