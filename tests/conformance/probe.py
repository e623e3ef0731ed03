"""Record what a script sees in its container: argv, environment, working directory and the files below /opt/ml."""

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
            is_same = not name.startswith(("watch/", "cloudtrain/"))  # pulses, and run.json, which is compared itself
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if is_same else "file"
        if not folders and not paths:
            found[str(Path(parent).relative_to(folder))] = "folder"
    return found


def meet(name: str) -> None:
    """Wait for every rank of the run, in a folder that the hosts share in this test."""
    folder = Path(os.environ["PROBE_MEETING"], name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


ml = Path(__file__).resolve().parent.parent
if os.environ["LOCAL_RANK"] == "0":
    Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("a model")
meet("started")
seen = {
    "argv": sys.argv,
    "environment": dict(os.environ),
    "cwd": str(Path.cwd()),
    "file": __file__,
    "first of sys.path": sys.path[0],
    "config": {path.name: json.loads(path.read_text()) for path in sorted((ml / "input" / "config").iterdir())},
    "run": json.loads((ml / "input" / "data" / "cloudtrain" / "run.json").read_text()),
    "trees": {name: files_below(ml / name) for name in ("code", "input/data", "model", "output")},
    "executable code": sorted(path.name for path in (ml / "code").iterdir() if os.access(path, os.X_OK)),
}
Path(os.environ["SM_OUTPUT_DATA_DIR"], f"probe-{os.environ['RANK']}.json").write_text(json.dumps(seen))
meet("recorded")
if code := int(os.environ["PROBE_EXIT"]):
    if os.environ["RANK"] == "0":
        sys.exit(code)
    signal.pause()  # until the launcher ends the other ranks
