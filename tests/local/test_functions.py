# ruff: noqa: ISC004 (a cell has several lines)
"""Functions and Tasks of a notebook's cells, in a real kernel, as local runs of one and two instances."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import Cli
from support.kernels import Kernel, kernel_socket
from support.notebook_cells import HEAD, NOTEBOOKS, REFUSED, SHOW

pytest.importorskip("ipykernel")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel for all notebooks."""
    settings = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch, kernel_socket() as socket_path:
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setenv("IPYTHONDIR", str(settings / "ipython"))
        patch.setenv("MPLCONFIGDIR", str(settings / "matplotlib"))
        patch.setenv("JPY_SESSION_NAME", "analysis.ipynb")
        kernel = Kernel(socket_path)
        yield kernel
        kernel.end()


@pytest.fixture
def kernel(started: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel that has executed nothing, in a folder of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    started.open_notebook(folder)
    return started


def run_cells(kernel: Kernel, cells: list[str]) -> str:
    """Execute cells; return what they printed."""
    return "".join(kernel.run(cell) for cell in cells)


@pytest.mark.parametrize("title", NOTEBOOKS)
def test_a_notebook_runs(kernel: Kernel, title: str) -> None:
    cells, expected = NOTEBOOKS[title]
    shown = cells if "RESULT" in cells[-1] else [*cells, SHOW]
    printed = run_cells(kernel, shown)
    found = re.search(r"RESULT (.*)", printed)
    assert found, printed
    assert json.loads(found[1]) == [expected, expected], printed


def test_a_restarted_kernel_sends_the_same_code(kernel: Kernel) -> None:
    cells = [HEAD, "@remote(**OPTIONS)\ndef train(lr=1):\n    return lr"]
    show = "print('DIGEST', train.plan(lr=2).identity)"
    first = run_cells(kernel, [*cells, show])
    kernel.restart()
    kernel.open_notebook(Path.cwd())
    again = run_cells(kernel, ["1 + 1", *cells, show])
    assert "DIGEST" in first
    assert first.split("DIGEST")[1] == again.split("DIGEST")[1]


@pytest.mark.parametrize("title", REFUSED)
def test_what_cannot_travel_is_refused_by_name(kernel: Kernel, title: str) -> None:
    cells, message = REFUSED[title]
    printed = run_cells(kernel, [*cells, "train.submit()"])
    assert message in printed
    # The sentences alone, without frames of cloudtrain's own code.
    assert "site-packages/cloudtrain/" not in printed
    assert not list(Path.cwd().glob(".cloudtrain/runs/*"))


TASK = """\
from cloudtrain_runtime import Task
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.tensor([index / 16, 1.0]), torch.tensor([index / 8])
SAMPLES = Samples()
class Line(Task):
    def __init__(self, width: int = 2):
        self.width = width
    def model(self):
        return torch.nn.Linear(self.width, 1)
    def datasets(self):
        return {"train": SAMPLES}
    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)
"""


LOOP = """\
def loop():
    from cloudtrain_runtime import GlobalOrderSampler
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sampler = GlobalOrderSampler(16, batch_size=4, seed=3, rank=0, world_size=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices in sampler:
            samples = [SAMPLES[index] for index in indices]
            inputs, targets = (torch.stack(each) for each in zip(*samples))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return [each.detach() for each in model.parameters()]
"""


def test_a_task_of_a_cell_trains_as_one_of_a_file(kernel: Kernel, tmp_path: Path) -> None:
    train = "dict(epochs=2, batch_size=4, learning_rate=0.1, seed=3)"
    fields = f"args=dict(width=2), name='line', train={train}, instance_type='ml.m5.large', processes_per_instance=1"
    work = tmp_path / "work"
    (work / "line.py").write_text(f"import torch\n{TASK}")
    (work / "job.yaml").write_text(
        "name: line\ncode: {task: line:Line, args: {width: 2}}\n"
        "cluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"
        "train: {epochs: 2, batch_size: 4, learning_rate: 0.1, seed: 3}\n"
    )
    weights = "print('WEIGHTS', [each.tolist() for each in run.load_model().state_dict().values()])"
    cells = [
        HEAD,
        TASK,
        f"run = cloudtrain.submit(Line, {fields}, backend='local'); status = run.wait(); print(status.state, status.reason)",
        weights,
        f"trainer = cloudtrain.remote(Line, {fields.partition(', ')[2]}, backend='local')\nmodel = trainer(width=2)\n"
        "print('WEIGHTS', [each.tolist() for each in model.state_dict().values()])",
        "run = cloudtrain.submit('job.yaml', backend='local'); status = run.wait(); print(status.state, status.reason)",
        weights,
        "from line import Line as OfFile\n"
        f"run = cloudtrain.submit(OfFile, {fields}, backend='local'); status = run.wait(); print(status.state, status.reason)",
        weights,
        LOOP + "print('WEIGHTS', [each.tolist() for each in loop()])",
        "print('WEIGHTS', [each.tolist() for each in cloudtrain.remote(loop, **OPTIONS)()])",
    ]
    printed = run_cells(kernel, cells)
    found = re.findall(r"WEIGHTS (.*)", printed)
    # From the cell twice, from the files twice, a loop in the kernel, and the loop as a run.
    assert len(found) == 6, printed
    assert len(set(found)) == 1, found


def test_a_cell_shows_a_run(kernel: Kernel) -> None:
    cells = [
        HEAD,
        "import cloudtrain_runtime\n@remote(**OPTIONS)\ndef train():\n    for step in (1, 2, 3):\n"
        "        cloudtrain_runtime.report(step, loss=1 / step)",
        "run = train.submit(); run.wait()",
    ]
    run_cells(kernel, cells)
    kernel.run("run")
    (shown,) = [each["data"] for each in kernel.outputs if each["type"] == "execute_result"]
    assert "SUCCEEDED" in shown["text/html"]
    assert "train/loss 0.3333" in shown["text/html"]
    assert shown["text/plain"].startswith("Run local:train-")


def test_an_event_loop_goes_on_while_a_run_is_awaited(kernel: Kernel) -> None:
    cells = [
        HEAD,
        "@remote(**OPTIONS)\ndef train():\n    for step in range(3):\n        print('step', step, flush=True)",
        "import asyncio\nturns = 0\nasync def count():\n    global turns\n    while True:\n"
        "        turns += 1\n        await asyncio.sleep(0.01)\ncounting = asyncio.ensure_future(count())",
        "run = train.submit()\nstatus = await run\nprint('STATE', status.state, turns > 3)",
        "lines = [line.text async for line in run.logs()]\nprint('LINES', [each for each in lines if each.startswith('step')])",
        "print('AGAIN', len([line for line in run.logs()]) == len(lines), run.wait().state)",
    ]
    printed = run_cells(kernel, cells)
    assert "STATE SUCCEEDED True" in printed
    assert "LINES ['step 0', 'step 1', 'step 2']" in printed, printed
    assert "AGAIN True SUCCEEDED" in printed


def test_a_traceback_names_cell_and_line(kernel: Kernel) -> None:
    cells = [
        HEAD,
        "# a comment\n\ndef broken(x):\n    return x / 0",
        "@remote(**OPTIONS)\ndef train():\n    return broken(1)",
        "run = train.submit(); print(run.wait().state, cloudtrain.explain(run))",
        "print(*[line.text for line in run.logs()], sep='\\n')",
    ]
    printed = run_cells(kernel, cells)
    assert "Fix analysis.ipynb, cell with broken:4." in printed, printed
    assert 'File "analysis.ipynb, cell with broken", line 4, in broken' in printed, printed
    assert "return x / 0" in printed


def test_what_a_function_returns_may_not_travel(kernel: Kernel) -> None:
    cells = [
        HEAD,
        "@remote(**OPTIONS)\ndef train():\n    return {'a': [object()]}",
        "train()",
        "print('STATE', next(iter(cloudtrain.list_runs(backend=['local']))).state)",
    ]
    printed = run_cells(kernel, cells)
    assert "the value['a'][0] is a object" in printed, printed
    assert "STATE SUCCEEDED" in printed


def test_a_run_of_a_function_submits_nothing(kernel: Kernel) -> None:
    cells = [
        HEAD,
        "import time\n@remote(**OPTIONS)\ndef other():\n    return 1",
        "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return cloudtrain.remote(other, **OPTIONS).submit()",
        "run = train.submit()\ncloudtrain.returned_value(run)",
        "print(run.wait().state)\nprint(*[line.text for line in run.logs()], sep='\\n')",
        "cloudtrain.returned_value(run)",
        "print('RUNS', len(list(cloudtrain.list_runs(backend=['local']))))",
    ]
    printed = run_cells(kernel, cells)
    assert "it has returned nothing" in printed, printed
    assert "other is called inside a run, which would start a run in each rank" in printed, printed
    assert "is FAILED: it has returned nothing" in printed, printed
    assert "RUNS 1" in printed, printed


def test_a_function_is_planned_rehearsed_and_swept(kernel: Kernel) -> None:
    cells = [
        HEAD,
        "@remote(**OPTIONS, metrics={'loss': 'loss=([0-9.]+)'})\ndef train(lr=0.1):\n    print(f'loss={lr}')\n    return lr",
        "print('PLAN', train.job(lr=0.3).code.args, train.plan(lr=0.3).job)",
        "sweep = train.sweep({'lr': {'choice': [0.5, 0.25]}}, objective='train/loss', strategy='grid', parallel=2)\n"
        "print('BEST', sweep.wait().best.values)",
        "print('REHEARSED', train.rehearse(lr=0.3))",
    ]
    printed = run_cells(kernel, cells)
    assert "PLAN {'lr': 0.3} train" in printed, printed
    assert "BEST {'code.args.lr': 0.25}" in printed, printed
    assert "REHEARSED" in printed


def test_a_job_is_written_for_the_command_line(kernel: Kernel, tmp_path: Path, cli: Cli) -> None:
    cells = [
        HEAD,
        "SCALE = 3",
        "@remote(**OPTIONS)\ndef train(lr, names=()):\n    print('GOT', lr * SCALE, names, flush=True)",
        "print(train.write('out', 2, names=['a', 'true']), train.plan(2, names=['a', 'true']).bundle.digest)",
        "from pathlib import Path; Path('other').mkdir(); Path('other/mine').touch(); train.write('other', 2)",
        "print('AGAIN', train.write('out', 2, names=['a', 'true']))",
    ]
    printed = run_cells(kernel, cells)
    assert "other has files already" in printed
    assert "AGAIN out/job.yaml" in printed
    folder = tmp_path / "work" / "out"
    assert sorted(each.name for each in folder.iterdir()) == [
        "analysis.py",
        "call_train.py",
        "job.yaml",
    ]
    done = cli("submit", folder / "job.yaml", "--local", "--follow")
    assert done.code == 0, done.err
    assert "GOT 6 ['a', 'true']" in done.out
