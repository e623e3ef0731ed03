"""The evidence of a rehearsal: digests of samples, differences of states, files of scripts, intervals."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
from support.jobs import EXAMPLES

import cloudtrain
from cloudtrain.features.rehearsal.comparing import Difference
from cloudtrain.features.rehearsal.resuming import judge_state
from cloudtrain.features.rehearsal.runs import Record, is_disk_full, steps_of
from cloudtrain.features.rehearsal.saving import judge_interval, seconds_between_failures
from cloudtrain.features.rehearsal.script_files import damaged_archive, partial_state, saved_files
from cloudtrain.support.checks import Result
from cloudtrain_runtime.checkpoint.comparison import compare
from cloudtrain_runtime.process.rehearsal import Rehearsal, digests


def test_equal_samples_have_equal_digests_in_any_batch() -> None:
    rows = torch.arange(12.0, dtype=torch.bfloat16).reshape(4, 3)
    labels = torch.tensor([0, 1, 0, 1])
    both = digests([rows, {"label": labels}], 4)
    assert digests([rows[2:], {"label": labels[2:]}], 2) == both[2:]
    assert len(set(both)) == 4
    assert len(digests([rows, {"label": labels}], 3)) == 3
    assert digests([rows, {"label": labels}], 0) == []
    assert len(digests(["a text", rows], 4)) == 1


def test_states_are_equal_only_bit_for_bit() -> None:
    state = {
        "model.w": torch.tensor([1.0, float("nan")]),
        "model.b": torch.zeros(2),
        "step": {"n": 3},
    }
    same = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
    found = compare((state, {"data": 1}), (same, {"data": 1}))
    assert (found["different"], found["missing"], found["state"]) == (0, 0, [])
    changed = {**same, "model.b": torch.tensor([0.0, 1e-7]), "more": 1}
    found = compare((state, {"data": 1}), (changed, {"data": 2}))
    assert (found["different"], found["missing"]) == (1, 1)
    assert (found["names"], found["state"]) == (["more", "model.b"], ["data"])
    assert found["largest"] == pytest.approx(1e-7)


@pytest.mark.parametrize(
    ("resumed", "uninterrupted", "result"),
    [
        (3e-7, 2e-7, Result.PASS),
        (5e-7, 2e-7, Result.FAIL),
        (0.9, 1.0, Result.UNKNOWN),
        (3.0, 1.0, Result.FAIL),
        (1e-9, 0.0, Result.FAIL),
    ],
)
def test_states_are_compared_with_the_difference_of_two_runs(
    resumed: float, uninterrupted: float, result: Result
) -> None:
    def differing(relative: float) -> Difference:
        return Difference(4, int(relative > 0), 0, (), relative, relative, ())

    judged = judge_state("after SIGTERM", differing(resumed), [], differing(uninterrupted))
    assert judged.result is result


def test_a_repeated_step_counts_as_its_last_time() -> None:
    records = [
        Record(1, 0, ("a",)),
        Record(1, 1, ("b",)),
        Record(2, 0, ("c",)),
        Record(2, 0, ("d",)),
    ]
    assert steps_of(records) == {1: ("a", "b"), 2: ("d",)}


def test_a_rank_ends_and_records_as_the_rehearsal_wants(tmp_path: Path) -> None:
    environ = {"CLOUDTRAIN_ML_ROOT": str(tmp_path), "CLOUDTRAIN_REHEARSAL_LAST_STEP": "3"}
    rehearsal = Rehearsal({**environ, "CLOUDTRAIN_REHEARSAL_HOLD_STEP": "2"}, rank=1)
    asked = []
    for step in (1, 2, 2, 3):
        rehearsal.at_step(step, lambda: asked.append(1) or True)
    assert len(asked) == 1  # it waits once, and a stop notice ends the wait
    assert [rehearsal.is_over(step) for step in (2, 3, 4)] == [False, True, True]
    folder = tmp_path / "output" / "rehearsal"
    assert len((folder / "steps-1.jsonl").read_text().splitlines()) == 4
    assert not Rehearsal({"CLOUDTRAIN_ML_ROOT": str(tmp_path)}, rank=0).is_over(100)


@pytest.mark.parametrize(
    "content", [b"\x80\x02ctorch.distributed.tensor\nDTensor\n.", b"\x80\x02]."]
)
def test_parts_of_sharded_tensors_are_found_unread(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "hosts" / "algo-1" / "opt" / "ml" / "checkpoints"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "last.pt", "w") as archive:
        archive.writestr("last/data.pkl", content)
    files = saved_files([folder.parent])
    assert [(file.host, file.name) for file in files] == [("algo-1", "last.pt")]
    assert ("full_state_dict" in partial_state(files, 2)) == (b"DTensor" in content)
    assert partial_state(files, 1) == ""
    assert damaged_archive(files) == ""


def test_outputs_count_as_saved_and_logs_do_not(tmp_path: Path) -> None:
    outputs = tmp_path / "checkpoints" / "outputs"
    outputs.mkdir(parents=True)
    for name in ("snapshot.pt", "run.log", "events.out.tfevents.17.host.4.0"):
        (outputs / name).write_bytes(b"content")
    assert [file.name for file in saved_files([tmp_path])] == ["outputs/snapshot.pt"]


def test_an_archive_without_an_end_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    torch.save({"weight": torch.zeros(100)}, folder / "last.pt")
    cut = (folder / "last.pt").read_bytes()[:-200]
    (folder / "next.pt.tmp").write_bytes(cut)  # it would have been renamed
    assert damaged_archive(saved_files([tmp_path])) == ""
    (folder / "last.pt").write_bytes(cut)
    assert damaged_archive(saved_files([tmp_path])) == "last.pt"


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saved = io.BytesIO()
    torch.save({"weight": torch.zeros(100)}, saved)
    content = bytearray(saved.getvalue())
    content[len(content) // 2] ^= 1
    (folder / "last.pt").write_bytes(content)
    assert damaged_archive(saved_files([tmp_path])) == "last.pt"


def test_the_interval_follows_young_and_daly() -> None:
    plan = cloudtrain.plan(cloudtrain.JobSpec.from_yaml(EXAMPLES / "digits" / "job.yaml"))
    # 8 GPUs: 50,700 / 8 hours between failures; sqrt(2 x 20 s x 22,815,000 s) is 30,209 s.
    assert seconds_between_failures(plan) == pytest.approx(50_700 * 3600 / 8)
    assert "a checkpoint each 8h23m loses least" in judge_interval(plan, 20.0, None)
    spot = cloudtrain.JobSpec.from_yaml(EXAMPLES / "digits" / "job.yaml", ["cluster.spot=true"])
    assert seconds_between_failures(cloudtrain.plan(spot)) < 3_600 * 3600


def test_a_failure_on_a_full_disk_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_disk_full(tmp_path)
    monkeypatch.setattr("cloudtrain.features.rehearsal.runs.FULL_BYTES", 10**18)
    assert is_disk_full(tmp_path)
