"""Results that were measured on GPUs: their file, and the page that shows them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_figures
import jsonschema
import pytest
from gpu_figures import Figure, Results, TestResult

RESULTS = Results(
    machine={"gpu": "NVIDIA H200", "gpus": 1, "gpu_memory_bytes": 150_000_000_000},
    versions={"torch": "2.13.0"},
    figures=(
        Figure("throughput", 12_345.6, "tokens/s"),
        Figure("data wait", 0.125, "share", "nanoGPT", "3 runs"),
    ),
    tests=(TestResult("test_a", "passed", 1.5), TestResult("test_b", "skipped", 0.0)),
    date="2026-11-23",
)


def test_page_shows_the_files_of_this_repository() -> None:
    assert gpu_figures.PAGE.read_text() == gpu_figures.page(), (
        "run `python benchmarks/gpu_figures.py`"
    )


def test_page_without_files_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert "Nothing of the GPU path has been measured on a GPU yet." in gpu_figures.page(tmp_path)


def test_page_shows_figures_and_tests(tmp_path: Path) -> None:
    gpu_figures.write(gpu_figures.results_path("NVIDIA H200", tmp_path), RESULTS)
    page = gpu_figures.page(tmp_path)
    assert "## NVIDIA H200" in page
    assert "gpu memory 150.00 GB" in page
    assert "| throughput | cloudtrain | 12,346 tokens/s | |" in page
    assert "| data wait | nanoGPT | 12.5 % | 3 runs |" in page
    assert "Tests: 1 passed, 0 failed, 1 skipped." in page
    assert "measured on a GPU yet" not in page


def test_file_is_read_as_written_and_fits_its_schema(tmp_path: Path) -> None:
    path = gpu_figures.results_path("NVIDIA A100-SXM4-80GB", tmp_path)
    assert path.name == "gpu-nvidia-a100-sxm4-80gb.json"
    gpu_figures.write(path, RESULTS)
    assert gpu_figures.load(path) == RESULTS
    jsonschema.validate(json.loads(path.read_text()), gpu_figures.SCHEMA)


def test_update_replaces_entries_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    gpu_figures.update(path, RESULTS)
    figures = (
        Figure("throughput", 2.0, "tokens/s"),
        Figure("throughput", 1.0, "tokens/s", "Fabric"),
    )
    gpu_figures.update(
        path, replace(RESULTS, figures=figures, tests=(TestResult("test_b", "passed", 2.0),))
    )
    found = gpu_figures.load(path)
    assert found.figures == (figures[0], RESULTS.figures[1], figures[1])
    assert found.tests == (RESULTS.tests[0], TestResult("test_b", "passed", 2.0))


def test_results_of_two_gpus_are_not_merged(tmp_path: Path) -> None:
    gpu_figures.write(tmp_path / "gpu.json", RESULTS)
    with pytest.raises(ValueError, match="measured on NVIDIA L4, and the file is of NVIDIA H200"):
        gpu_figures.update(tmp_path / "gpu.json", replace(RESULTS, machine={"gpu": "NVIDIA L4"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"figures": [{"name": "x"}]},
            r"figures\[0\]: missing fields \['value', 'unit', 'peer', 'note'\]",
        ),
        (
            {"figures": [{"name": "x", "value": "1", "unit": "s", "peer": "", "note": ""}]},
            "expected number, found '1'",
        ),
        ({"tests": [{"name": "x", "outcome": "flaky", "seconds": 1}]}, "outcome: expected one of"),
        ({"machine": {}}, r"machine: missing fields \['gpu'\]"),
        ({"more": 1}, r"unknown fields \['more'\]"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(json.loads(RESULTS.to_json()) | change))
    with pytest.raises(ValueError, match=message):
        gpu_figures.load(path)


def test_value_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        gpu_figures.write(
            tmp_path / "gpu.json", replace(RESULTS, figures=(Figure("x", float("nan"), "s"),))
        )
    assert list(tmp_path.glob("*gpu.json*")) == []
