"""Record the container of a script: argv, environment, working directory and the files below /opt/ml."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def files_below(folder: Path) -> dict[str, str]:
    """Return digests of the files below a folder by relative path, and `folder` for an empty folder."""
    found = {}
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        paths = [Path(parent, name) for name in files if not name.startswith("probe-")]
        for path in paths:
            name = str(path.relative_to(folder))
            # Heartbeats differ. run.json is recorded separately.
            is_same = not name.startswith(("watch/", "cloudtrain/"))
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if is_same else "file"
        if not folders and not paths:
            found[str(Path(parent).relative_to(folder))] = "folder"
    return found


def wait_for_all_ranks(name: str) -> None:
    """Wait until every rank of the run has called this function. The hosts share a folder in this test."""
    folder = Path(os.environ["PROBE_BARRIERS"], name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


ml = Path.cwd().parent
if os.environ["LOCAL_RANK"] == "0":
    Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("a model")
wait_for_all_ranks("started")
seen = {
    "argv": sys.argv,
    "environment": dict(os.environ),
    "cwd": str(Path.cwd()),
    "file": __file__,
    "first of sys.path": sys.path[0],
    "config": {
        path.name: json.loads(path.read_text())
        for path in sorted((ml / "input" / "config").iterdir())
    },
    "run": json.loads((ml / "input" / "data" / "cloudtrain" / "run.json").read_text()),
    "trees": {name: files_below(ml / name) for name in ("code", "input/data", "model", "output")},
    "executable code": sorted(
        path.name for path in (ml / "code").iterdir() if os.access(path, os.X_OK)
    ),
}
Path(os.environ["SM_OUTPUT_DATA_DIR"], f"probe-{os.environ['RANK']}.json").write_text(
    json.dumps(seen)
)
wait_for_all_ranks("recorded")
if code := int(os.environ["PROBE_EXIT"]):
    if os.environ["RANK"] == "0":
        sys.exit(code)
    signal.pause()  # the launcher kills the other ranks
