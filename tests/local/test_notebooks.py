"""The notebooks of examples/ in a real kernel, and `Run.follow` in cells that are interrupted and executed again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES
from support.kernels import SECONDS, Kernel

import cloudtrain
from cloudtrain import State

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
Config = pytest.importorskip("traitlets.config").Config

pytestmark = pytest.mark.processes

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def _kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the files of kernels below `tmp_path`, and start them as Jupyter does: without the settings of a shell."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))


def execute(path: Path, socket_path: Path) -> list[dict[str, Any]]:
    """Execute a notebook in its folder; return the outputs of its code cells."""
    notebook = nbformat.read(path, as_version=4)
    kernel = Config(KernelManager={"transport": "ipc", "ip": str(socket_path)})
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=SECONDS, config=kernel, resources=resources)
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        statuses = [
            (run.id, run.state, run.reason) for run in cloudtrain.list_runs(backend=["local"])
        ]
        pytest.fail(f"{error}\noutputs: {outputs}\nruns: {statuses}")
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_of_the_examples_runs(path: Path, socket_path: Path, tmp_path: Path) -> None:
    for name in ("notebooks", "digits"):
        shutil.copytree(EXAMPLES / name, tmp_path / "examples" / name)
    outputs = execute(tmp_path / "examples" / "notebooks" / path.name, socket_path)
    assert [output for output in outputs if output.output_type == "error"] == []
    shown = [output.data for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    assert any("SUCCEEDED" in data.get("text/plain", "") for data in shown)
    assert all("text/plain" in data for data in shown)
    runs = list(cloudtrain.list_runs(backend=["local"]))
    assert {run.state for run in runs} == {State.SUCCEEDED}
    if path.stem == "plan_and_train":
        assert any('did you mean "epochs"?' in output.get("text", "") for output in outputs)
        assert len([data for data in shown if "SUCCEEDED" in data["text/plain"]]) == 1, (
            "one table that is updated"
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_has_no_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.fixture
def kernel(socket_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(socket_path)
    yield kernel
    kernel.end()


SCRIPT = """
import pathlib, time
from cloudtrain_runtime import report
for step in range(1, 6):
    report(step, total=10, loss=1 / step)
while not pathlib.Path("FILE").exists():
    time.sleep(0.05)
report(10, total=10, loss=0.1)
"""


def test_a_followed_run_survives_interrupt_and_restart(
    kernel: Kernel, job: Callable[..., Path], tmp_path: Path
) -> None:
    released = tmp_path / "released"
    text = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"
    path = job(text, train_py=SCRIPT.replace("FILE", str(released)))
    kernel.begin(
        f"import cloudtrain; run = cloudtrain.submit({str(path)!r}, local=True); print(run.id)"
    )
    kernel.wait()
    name = next(output["text"] for output in kernel.outputs if output["type"] == "stream").strip()
    kernel.begin("run.follow()")
    kernel.wait_for("5/10 steps")
    kernel.interrupt()
    kernel.wait()
    assert [output["ename"] for output in kernel.outputs if output["type"] == "error"] == [
        "KeyboardInterrupt"
    ]
    assert "interrupted; the run continues" in kernel.tables[-1]
    assert cloudtrain.get_run(name).state is State.RUNNING
    kernel.restart()
    for _ in range(2):
        kernel.begin(f"import cloudtrain; cloudtrain.get_run({name!r}).follow()")
        if not released.exists():
            kernel.wait_for("5/10 steps")
            released.touch()
        kernel.wait()
        assert "SUCCEEDED" in kernel.tables[-1], kernel.outputs
        assert "10/10 steps" in kernel.tables[-1]
    kinds = [output["type"] for output in kernel.outputs]
    assert kinds.count("display_data") == 1, "later tables replace the first"
