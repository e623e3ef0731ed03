"""/opt/ml/checkpoints of several hosts: separate folders during a run, and one merged folder after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.sandboxes import Served, request, run_here

from cloudtrain.backends.container.filesystem import store_folder
from cloudtrain.backends.container.folder_sync import HostCheckpoints
from cloudtrain_runtime.contract.manifest import checkpoint_folder_name

SCRIPT = """
folder="$CLOUDTRAIN_ML_ROOT/checkpoints"
host=$(basename "$(dirname "$(dirname "$CLOUDTRAIN_INSTANCE_FOLDER")")")
echo "$(ls "$folder" | tr '\\n' ' ')" > "$MEETING/$RUN-$host-began"
mkdir -p "$folder/deep"; echo "$RUN" > "$folder/deep/$host.txt"; echo "$RUN" > "$folder/all.txt"
touch "$MEETING/$RUN-$host"
while [ "$(ls "$MEETING" | grep -c "^$RUN-algo-[12]$")" -lt 2 ]; do sleep 0.05; done
ls "$folder/deep" | grep -v "^$host.txt$" > "$MEETING/$RUN-$host-others"
exit 0
"""


def run(sandbox: Served, where: str, tmp_path: Path, name: str, uri: str) -> dict[str, str]:
    """Run the script on two instances; return the records of the hosts by file name."""
    meeting = tmp_path / "meeting"
    meeting.mkdir(exist_ok=True)
    fields: dict[str, Any] = {"instances": 2, "Environment": {"MEETING": str(meeting), "RUN": name}}
    document = request(sandbox, name, SCRIPT, CheckpointConfig={"S3Uri": uri}, **fields)
    if where == "sandbox":
        sandbox.client("sagemaker").create_training_job(**document)
        assert sandbox.end_of(name)["TrainingJobStatus"] == "Completed"
    else:
        document["OutputDataConfig"]["S3OutputPath"] = (tmp_path / "out").as_uri()
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "request.json").write_text(json.dumps(document))
        run_here([folder], sandbox.environment)
        assert json.loads((folder / "outcome.json").read_text()) == ["SUCCEEDED", ""]
    return {path.name: path.read_text().strip() for path in meeting.glob(f"{name}-*-*-*")}


@pytest.mark.processes
@pytest.mark.parametrize("where", ["local", "sandbox"])
def test_hosts_see_their_own_files_and_all_after_the_run(
    sandbox: Served, tmp_path: Path, where: str
) -> None:
    uri = (
        f"s3://{sandbox.info['bucket']}/kept"
        if where == "sandbox"
        else (tmp_path / "kept").as_uri()
    )
    names = [f"hosts-{where}-{number}" for number in (1, 2)]
    first, second = (run(sandbox, where, tmp_path, name, uri) for name in names)
    for host in ("algo-1", "algo-2"):
        assert first[f"{names[0]}-{host}-began"] == ""
        assert first[f"{names[0]}-{host}-others"] == ""
        assert second[f"{names[1]}-{host}-began"] == "all.txt deep"
        assert (
            second[f"{names[1]}-{host}-others"]
            == {"algo-1": "algo-2.txt", "algo-2": "algo-1.txt"}[host]
        )
    if where == "sandbox":
        kept = [key.removeprefix("kept/") for key in sandbox.keys("kept/")]
    else:
        kept = sorted(
            p.relative_to(tmp_path / "kept").as_posix()
            for p in (tmp_path / "kept").rglob("*")
            if p.is_file()
        )
    assert kept == ["all.txt", "deep/algo-1.txt", "deep/algo-2.txt"]


def test_only_changed_files_are_merged(tmp_path: Path) -> None:
    merged, hosts = tmp_path / "merged", [tmp_path / "a", tmp_path / "b"]
    merged.mkdir()
    (merged / "old").write_text("old")
    own = merged / checkpoint_folder_name(3)
    own.mkdir()
    (own / "manifest.json").write_text("{}")
    checkpoints = HostCheckpoints(merged, hosts)
    checkpoints.restore()
    assert [sorted(path.name for path in host.iterdir()) for host in hosts] == [["old"], ["old"]]
    (hosts[0] / "new").write_text("a")
    (merged / "old").write_text("newer")
    checkpoints.merge()
    assert not (merged / "new").exists(), "it can be incomplete"
    checkpoints.merge()
    assert (merged / "new").read_text() == "a"
    (hosts[1] / "late").write_text("b")
    (hosts[0] / "new").unlink()
    checkpoints.merge(is_final=True)
    assert (merged / "late").read_text() == "b"
    assert (merged / "new").read_text() == "a", "nothing is deleted"
    assert (merged / "old").read_text() == "newer", "it has not changed"


def test_a_file_that_cannot_be_merged_blocks_no_other(tmp_path: Path) -> None:
    merged, hosts = tmp_path / "merged", [tmp_path / "a", tmp_path / "b"]
    long = "n" * 250
    for name in ("first/weights", "first/zz-manifest", "second/weights", long):
        path = hosts[0] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a")
    hosts[1].mkdir()
    (hosts[1] / "late").write_text("b")
    (merged / "first" / "weights").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        HostCheckpoints(merged, hosts).merge(is_final=True)
    found = sorted(str(p.relative_to(merged)) for p in merged.rglob("*") if p.is_file())
    assert found == ["late", long, "second/weights"], "half a checkpoint looks complete"


def test_a_model_folder_with_links_is_stored_again(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "stored"
    (source / "step-2").mkdir(parents=True)
    (source / "step-2" / "weights").write_text("w")
    (source / "newest").symlink_to("step-2")
    (source / "weights").symlink_to("step-2/weights")
    for _ in range(2):
        assert store_folder(source, target)
        assert (target / "newest").readlink() == Path("step-2")
        assert (target / "newest" / "weights").samefile(source / "step-2" / "weights")
        assert (target / "weights").read_text() == "w"
