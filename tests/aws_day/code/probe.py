"""Program of the jobs of an AWS day: prints what it sees, one JSON object per line. Needs Python alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LINES = 200
STEPS = 100
STOPPED: list[float] = []


def say(kind: str, **fields: object) -> None:
    print("AWS_DAY " + json.dumps({"kind": kind, "time": time.time(), **fields}), flush=True)


def facts() -> None:
    root = Path(os.environ.get("SM_MODEL_DIR", "/opt/ml/model")).parent
    resources = json.loads((root / "input/config/resourceconfig.json").read_text())
    gpus = ""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        gpus = listed.stdout.strip()
    say(
        "facts",
        config_files=sorted(path.name for path in (root / "input/config").iterdir()),
        host=resources["current_host"],
        hosts=resources["hosts"],
        channels=sorted(path.name for path in (root / "input/data").iterdir() if path.is_dir()),
        python=sys.version.split()[0],
        cpus=os.cpu_count(),
        gpus=gpus,
    )


def complete(seconds: float) -> None:
    """Print numbered lines and two values of a metric, leave a model, and end."""
    facts()
    for number in range(LINES):
        print(f"line {number}", flush=True)
    print("loss=3.5", flush=True)
    time.sleep(seconds)
    print("loss=0.25", flush=True)
    Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("weights\n")
    say("done")


def fail() -> None:
    print("RuntimeError: planned failure", file=sys.stderr, flush=True)
    sys.exit(3)


def count(pause: float) -> None:
    """Count to STEPS. The state is a chain of digests, so that a lost or a repeated step changes the last one."""
    signal.signal(signal.SIGTERM, lambda *_: STOPPED.append(time.time()))
    state = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "state.json")
    step, digest = json.loads(state.read_text()) if state.exists() else (0, "")
    say("begin", step=step, digest=digest)
    while step < STEPS and not STOPPED:
        step += 1
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
        whole = state.with_suffix(".part")
        whole.write_text(json.dumps([step, digest]))
        whole.replace(state)
        time.sleep(pause)
    say("end", step=step, digest=digest, is_stopped=bool(STOPPED))


def forever() -> None:
    """Work until a signal comes."""
    signal.signal(signal.SIGTERM, lambda *_: STOPPED.append(time.time()))
    say("begin")
    while not STOPPED:
        time.sleep(0.1)
    say("signal", at=STOPPED[0])


if __name__ == "__main__":
    {"complete": complete, "fail": fail, "count": count, "forever": forever}[sys.argv[1]](
        *map(float, sys.argv[2:])
    )
