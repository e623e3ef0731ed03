"""Shell scripts that hide the failure of a program: the plan names the line and what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.job.static_analysis.shell_scripts import find_hidden_failures

BASH = ("bash", "train.sh")
PIPE, CONTINUES, WAIT = "a pipe has the exit code of", "the script continues where", "wait without"

HIDDEN = {
    "a pipe": ("#!/bin/bash\npython train.py | tee log\n", f"train.sh:2: {PIPE} tee"),
    "a pipe of three": (
        "python -u train.py 2>&1 | grep loss | tail -1",
        f"train.sh:1: {PIPE} tail",
    ),
    "a pipe with set -e": ("set -e\npython train.py |& tee log", f"train.sh:2: {PIPE} tee"),
    "a pipe of torchrun": (
        "set -eu\ntorchrun --nproc-per-node 2 \\\n  train.py --lr 1 \\\n  | tee log",
        f"train.sh:2: {PIPE} tee",
    ),
    "a pipe on two lines": ("python train.py |\n  tee log", f"train.sh:1: {PIPE} tee"),
    "a later command": ("python train.py\necho done", f"train.sh:1: {CONTINUES}"),
    "exit 0": ("export A=1\nA=2 python3 train.py > log 2>&1\nexit 0", f"train.sh:2: {CONTINUES}"),
    "a semicolon": ("accelerate launch train.py; cp log /opt/ml/model", f"train.sh:1: {CONTINUES}"),
    "a chain": ("python a.py && python b.py\ncp x y", f"train.sh:1: {CONTINUES}"),
    "set +e": ("set -e\nset +e\npython train.py\necho done", f"train.sh:3: {CONTINUES}"),
    "wait": ("set -e\npython a.py &\npython b.py &\nwait", f"train.sh:2: {WAIT}"),
    "another script": ("set -e\nbash inner.sh", f"inner.sh:2: {PIPE} tee"),
}
INNER = "\npython train.py | tee log\n"


@pytest.mark.parametrize("case", HIDDEN)
def test_a_hidden_failure_is_named(tmp_path: Path, case: str) -> None:
    text, expected = HIDDEN[case]
    (tmp_path / "train.sh").write_text(text)
    (tmp_path / "inner.sh").write_text(INNER)
    (found,) = find_hidden_failures(BASH, tmp_path)
    assert found.startswith(expected)


CLEAR = {
    "pipefail": "set -eo pipefail\npython train.py | tee log\necho done",
    "pipefail alone": "set -o pipefail\npython train.py | tee log",
    "two settings": "set -e; set -o pipefail\npython train.py | tee log\ncp x y",
    "PIPESTATUS": "python train.py | tee log\nexit ${PIPESTATUS[0]}",
    "the last command": "nvidia-smi\npip list | grep torch\npython train.py",
    "exec": "exec python train.py",
    "an inquiry": "python --version\npython -c 'import torch; print(torch.__version__)' | cat\npython train.py",
    "a chain at the end": "python prepare.py && python train.py",
    "a test": "if python check.py; then\n  echo good\nfi\npython train.py",
    "or": "python check.py || exit 3\npython train.py",
    "a code": "python train.py\ncode=$?\ncp log /opt/ml/model\nexit $code",
    "a trap": "trap 'exit 1' ERR\npython train.py\necho done",
    "quotes": "echo 'python train.py | tee log'\n# python train.py | tee log\npython train.py",
    "a document": "cat > x.sh <<EOF\npython train.py | tee log\nEOF\npython train.py",
    "a substitution": "set -e\nN=$(python count.py | tail -1)\npython train.py --n $N",
    "an input": "set -e\ncat data | python train.py",
    "a block": 'if [ -n "$A" ]; then\n  python train.py\nfi\n',
    "wait for each": "python a.py &\nA=$!\npython b.py\nB=$?\nwait $A && exit $B",
    "options": "#!/bin/bash\npython train.py | tee log\necho done",
}


@pytest.mark.parametrize("case", CLEAR)
def test_a_script_that_fails_is_not_named(tmp_path: Path, case: str) -> None:
    (tmp_path / "train.sh").write_text(CLEAR[case])
    command = ("bash", "-eo", "pipefail", "train.sh") if case == "options" else BASH
    assert find_hidden_failures(command, tmp_path) == ()


def test_a_command_without_a_file_is_read(tmp_path: Path) -> None:
    (found,) = find_hidden_failures(("bash", "-c", "python train.py | tee log"), tmp_path)
    assert found.startswith(f"code.command: {PIPE} tee")
    (found,) = find_hidden_failures(("sh", "-c", "python train.py | tee log"), tmp_path)
    assert "write set -o pipefail above it" in found
    assert find_hidden_failures(("bash", "-eo", "pipefail", "-c", "python a | cat"), tmp_path) == ()


def test_a_shebang_counts_where_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/bash -e\npython train.py\necho done\n")
    assert find_hidden_failures(("./train.sh",), tmp_path) == ()
    assert len(find_hidden_failures(BASH, tmp_path)) == 1


def test_the_plan_warns_of_it(job: Callable[..., Path]) -> None:
    path = job(
        "name: a\ncode: {command: [bash, train.sh]}\ncluster: {instance_type: ml.g5.xlarge}\n"
    )
    (path.parent / "train.sh").write_text("python train.py | tee log\n")
    warnings = cloudtrain.plan(path, local=True).warnings
    assert [each for each in warnings if each.startswith(f"train.sh:1: {PIPE} tee")]
