"""Local runs of a Task that streams the files of a channel, shared by all ranks or by the ranks of a host."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

JOB = """\
name: streams
code: {task: "lines:Lines", args: {fail_at: FAIL}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, processes_per_instance: 1}
data:
  train: {uri: files, sharded: SHARDED}
train: {epochs: 2, batch_size: 4, learning_rate: 0.05}
checkpoint: {every: 2 steps}
limits: {retries: 1}
"""
TASK = '''
import json
import torch
from torch import nn
from torch.nn import functional as F
from cloudtrain_runtime import FileStream, Task, context

def read(path):
    for line in path.read_text().splitlines():
        yield torch.tensor([float(line)])

class Lines(Task):
    """Fit the numbers in files, and log the numbers of each step."""

    def __init__(self, fail_at=None):
        self.fail_at = fail_at
        self.log = (context().output_dir / f"rank-{context().rank}").open("a")

    def model(self):
        return nn.Linear(1, 1)

    def datasets(self):
        return {"train": FileStream(context().channels["train"], read, shuffle=5)}

    def loss(self, model, batch):
        place = context()
        if model.training:
            self.log.write(json.dumps([place.restarts, place.step, [int(n) for n in batch[:, 0].tolist()]]) + "\\n")
            self.log.flush()
        if place.step == self.fail_at and place.rank == 1 and not place.restarts:
            raise ValueError("broken on purpose")
        return F.mse_loss(model(batch / 96), batch)
'''


@pytest.mark.promise
@pytest.mark.parametrize("sharded", [False, True])
def test_each_line_of_a_channel_is_used_once_in_an_epoch(
    sharded: bool, cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    """One rank fails in the middle of the second epoch, and the run resumes from its last checkpoint."""
    text = JOB.replace("SHARDED", str(sharded).lower()).replace("FAIL", "17")
    path = job(text, lines_py=TASK)
    files = path.parent / "files"
    files.mkdir()
    for index in range(8):
        (files / f"part-{index}").write_text(
            "\n".join(str(12 * index + line) for line in range(12))
        )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    assert done.json["last_epoch"] == 2
    folder = Path(done.json["artifacts"]["folder"])
    newest: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for rank, log in enumerate(sorted(folder.glob("hosts/*/opt/ml/output/data/rank-*"))):
        for line in log.read_text().splitlines():
            restarts, step, samples = json.loads(line)
            newest[step, rank] = max(newest.get((step, rank), (0, [])), (restarts, samples))
    assert {restarts for restarts, _ in newest.values()} == {0, 1}
    for epoch in range(2):
        used = [n for (step, _), (_, own) in newest.items() if step // 12 == epoch for n in own]
        assert sorted(used) == list(range(96))
    files_of_first = {n // 12 for (_, rank), (_, own) in newest.items() if rank == 0 for n in own}
    assert (files_of_first == {0, 2, 4, 6}) == sharded
