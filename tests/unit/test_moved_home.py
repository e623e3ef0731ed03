"""Files of runs whose home was renamed, moved or copied."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.runs.moved_home import relocate

RUN = "digits-261126-101500-1a2b3c"
OLD = "/home/ann/old/.cloudtrain"


def written(home: str) -> dict[str, Any]:
    return {
        "checkpoint": {"uri": f"file://{home}/runs/{RUN}/checkpoints"},
        "config": {"resume": f"file://{home}/runs/digits-261125-101500-ffffff/checkpoints"},
        "bundle": f"file://{home}/bundles/abc/sourcedir.tar.gz",
        "artifacts": [f"{home}/runs/{RUN}/model", f"{home}/runs/{RUN}"],
        "elsewhere": ["file:///data/train", f"{home}er/x", "s3://bucket/runs/x", 3, None],
    }


@pytest.mark.parametrize("home", ["/home/ann/new/.cloudtrain", "/srv/a b", OLD])
@pytest.mark.parametrize("name", ["plan.json", "config/run.json"])
def test_paths_lead_to_the_present_home(home: str, name: str) -> None:
    file = Path(home) / "runs" / RUN / name
    expected = written(home)
    expected["checkpoint"]["uri"] = (Path(home) / "runs" / RUN / "checkpoints").as_uri()
    expected["config"]["resume"] = (
        Path(home) / "runs" / "digits-261125-101500-ffffff" / "checkpoints"
    ).as_uri()
    expected["bundle"] = (Path(home) / "bundles" / "abc" / "sourcedir.tar.gz").as_uri()
    expected["elsewhere"] = written(OLD)["elsewhere"]
    assert relocate(written(OLD), file) == expected


@pytest.mark.parametrize("content", [{}, [], "text", {"a": [1, None, {"b": "/x/runs/other/y"}]}])
def test_what_names_no_run_stays(content: Any) -> None:
    assert relocate(json.loads(json.dumps(content)), Path("/h/runs") / RUN / "plan.json") == content
