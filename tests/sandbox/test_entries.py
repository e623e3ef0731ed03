"""Jobs that start with a command, or include code outside of the code folder, in the sandbox."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from support.code_folders import write_tree
from support.jobs import Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

JOB = """\
name: demo
code: {{directory: code, include: [libs/shared_lib], {entry}}}
cluster: {{instance_type: ml.p4d.24xlarge, instances: 2}}
"""
SHARED = "import os\nWHERE = os.path.relpath(__file__)\n"
WHERE = "cloudtrain_include/shared_lib/__init__.py"
TRAIN = """\
import multiprocessing, os
import shared_lib
def work():
    print('child sees', shared_lib.WHERE, flush=True)
if __name__ == '__main__':
    print('rank', os.environ['RANK'], 'sees', shared_lib.WHERE, flush=True)
    process = multiprocessing.get_context('spawn').Process(target=work)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
SHELL = """\
set -e
echo "words: $*"
torchrun --nproc-per-node 2 --nnodes "$2" --node-rank "$1" \\
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" train.py
echo "$SM_CURRENT_HOST" > "$SM_MODEL_DIR/$SM_CURRENT_HOST.txt"
"""


def submit(
    sandbox: Served, cli: Cli, folder: Path, entry: str, *options: str
) -> tuple[str, list[str]]:
    """Run a job to its end; return its id and its log."""
    write_tree(folder, code__train_py=TRAIN, **{"code/train.sh": SHELL})
    (write_tree(folder / "libs" / "shared_lib") / "__init__.py").write_text(SHARED)
    (folder / "job.yaml").write_text(JOB.format(entry=entry))
    environ = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    done = cli(
        "submit",
        folder / "job.yaml",
        "--skip-check",
        "--follow",
        "--json",
        *options,
        environ=environ,
    )
    run = done.json["run"]
    lines = [line for host in ("algo-1", "algo-2") for line in sandbox.lines(run, host)]
    assert done.code == 0, lines
    return run, lines


def test_a_command_starts_its_own_ranks(sandbox: Served, cli: Cli, tmp_path: Path) -> None:
    run, lines = submit(
        sandbox,
        cli,
        tmp_path / "job",
        "command: [bash, train.sh, $RANK, $WORLD_SIZE, 'a  b', $$HOME]",
    )
    assert [f"words: {node} 2 a  b $HOME" in lines for node in (0, 1)] == [True, True], lines
    assert sorted(line for line in lines if line.startswith("rank ")) == [
        f"rank {n} sees {WHERE}" for n in range(4)
    ]
    assert lines.count(f"child sees {WHERE}") == 4
    bucket, key = sandbox.describe(run)["ModelArtifacts"]["S3ModelArtifacts"][5:].split("/", 1)
    sandbox.client("s3").download_file(bucket, key, str(tmp_path / "model.tar.gz"))
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        assert archive.getnames() == ["algo-1.txt"]


def test_a_job_of_the_toolkit_imports_an_include(sandbox: Served, cli: Cli, tmp_path: Path) -> None:
    """The code is unpacked as AWS's toolkit does; torchrun replaces its mpirun (tests/local/test_mpirun.py)."""
    _, lines = submit(
        sandbox,
        cli,
        tmp_path / "job",
        "script: train.py",
        "--set=cluster.distribution=smdistributed",
    )
    text = "\n".join(lines)  # each line has a prefix
    assert all(f"rank {rank} sees {WHERE}" in text for rank in range(4)), text
    assert text.count(f"child sees {WHERE}") == 4, text
