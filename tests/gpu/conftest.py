"""GPU tests: skipped, loudly, where there is no GPU; their outcomes can be written to the file of a GPU's figures.

They need PyTorch and pytest only, and read the runtime from the source tree: `make test-gpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
for folder in ("benchmarks", "entrypoints"):
    sys.path.insert(0, str(REPOSITORY / folder))

import gpu_figures  # noqa: E402 (the path must be set first)
from running import DEVICE, GPUS, TRIAL  # noqa: E402

_NO_GPU = "PyTorch sees no CUDA GPU on this machine (CLOUDTRAIN_GPU_TRIAL=cpu tries these tests on the CPU)"
_results: dict[str, gpu_figures.TestResult] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--figures",
        type=Path,
        help="JSON file, or folder for it, to which the outcomes are written",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(count): needs this many GPUs")
    config.addinivalue_line("markers", "cuda: measures or uses something that only a GPU has")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        wanted = max((mark.args[0] for mark in item.iter_markers("gpus")), default=0)
        if DEVICE == "cuda" and GPUS == 0:
            item.add_marker(pytest.mark.skip(reason=_NO_GPU))
        elif wanted > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPUs, and there are {GPUS}"))
        elif TRIAL == "cpu" and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc,assignment]
    if report.when == "call" or report.outcome != "passed":
        _results[item.name] = gpu_figures.TestResult(
            f"{Path(item.fspath).stem}::{item.name}", report.outcome, round(report.duration, 2)
        )
    return report  # type: ignore[return-value]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    passed = sum(result.outcome == "passed" for result in _results.values())
    if DEVICE == "cuda" and GPUS == 0:
        terminalreporter.section("NO GPU: nothing has been tested on a GPU", red=True, bold=True)
    elif TRIAL == "cpu":
        terminalreporter.section(
            f"TRIAL ON THE CPU: {passed} tests passed, and none of them on a GPU", yellow=True
        )
    given: Path | None = config.getoption("--figures")
    if given is None or GPUS == 0:
        return
    machine = gpu_figures.describe_machine()
    path = gpu_figures.results_path(str(machine["gpu"]), given) if given.is_dir() else given
    versions = gpu_figures.describe_versions("numpy", "psutil")
    gpu_figures.update(path, gpu_figures.Results(machine, versions, tests=tuple(_results.values())))
    terminalreporter.write_line(f"outcomes: {path}")
