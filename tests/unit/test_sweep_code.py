"""The code of a sweep: kept at its start, and used by all its trials, whatever happens to the code folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain import SpecError, UserError
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.client.client import Client
from cloudtrain.features.sweeps import service
from cloudtrain.features.sweeps.loader import load_sweep
from cloudtrain.features.sweeps.stored_sweep import StoredSweep

pytest.importorskip("optuna")

FILE = """\
job:
  name: kept
  code: {directory: code, script: train.py, include: [helpers], requirements: requirements.txt}
  cluster: {instance_type: ml.m5.large}
  metrics: {loss: "loss=([0-9.]+)"}
space: {code.args.x: {choice: [1, 2]}}
objective: train/loss
strategy: grid
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], StoredSweep]:
    """Return a function that starts a sweep without its controller."""
    for name, text in {
        "code/train.py": "import helpers\n",
        "code/run.sh": "true\n",
        "code/requirements.txt": "wheel\n",
        "helpers/__init__.py": "",
        "sweep.yaml": FILE,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "code" / "run.sh").chmod(0o755)

    def start_sweep() -> StoredSweep:
        return service.open_sweep(load_sweep(tmp_path / "sweep.yaml"), backend="local")[0]

    return start_sweep


def test_the_code_of_the_start_is_planned_and_packed(
    start: Callable[[], StoredSweep], tmp_path: Path
) -> None:
    stored = start()
    assert not stored.code.has_changed
    for name in ("code", "helpers"):
        shutil.rmtree(tmp_path / name)
    code = StoredSweep.read(stored.folder).code.read()
    client = Client(home=stored.home, code=code)
    plan = client.planner(stored.sweep.job, backend="local")(stored.sweep.job)
    assert plan.bundle.digest == stored.digest
    assert plan.bundle.requirements.names == {"wheel"}
    assert plan.job_document["code"]["directory"] == "code"
    shutil.rmtree(stored.home / "bundles")
    assert write_bundle(code, stored.home / "bundles").path.is_file()


def test_an_edited_folder_continues_with_the_kept_code(
    start: Callable[[], StoredSweep], tmp_path: Path
) -> None:
    stored = start()
    (tmp_path / "code" / "train.py").write_text("raise SystemExit('edited')\n")
    again = start()
    assert (again.id, again.code.has_changed) == (stored.id, True)
    assert again.code.read().info.digest == stored.digest


@pytest.mark.parametrize("damage", ["none", "no list", "half a list", "a file"])
def test_without_a_copy_only_the_same_code_continues(
    start: Callable[[], StoredSweep], tmp_path: Path, damage: str
) -> None:
    stored = start()
    text = (stored.folder / "code.json").read_text()
    if damage == "a file":
        (stored.folder / "code" / "train.py").unlink()
    elif damage == "half a list":
        (stored.folder / "code.json").write_text(text[: len(text) // 2])
    elif damage == "no list":
        (stored.folder / "code.json").unlink()
    script = tmp_path / "code" / "train.py"
    script.write_text("raise SystemExit('edited')\n")
    if damage != "none":
        with pytest.raises(UserError, match="differs from the code with which kept-") as caught:
            service.start(stored)
        assert caught.value.hint.endswith("or start another: --new")
        assert service.read_status(stored).state == "INTERRUPTED"
        script.write_text("import helpers\n")
    assert stored.code.read().folder == stored.folder / "code"


def test_the_folders_of_the_code_cannot_be_searched(
    start: Callable[[], StoredSweep], tmp_path: Path
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        FILE.replace("code.args.x: {choice: [1, 2]}", "code.directory: {choice: [code]}")
    )
    with pytest.raises(SpecError, match="packed once, so all its trials have the same folders"):
        start()
