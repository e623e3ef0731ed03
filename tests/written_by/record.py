"""Records what the installed cloudtrain writes: real runs, and its public surface, as a fixture for later versions.

    PYTHONPATH=tests python -m written_by.record                the surface and the files; five minutes
    PYTHONPATH=tests python -m written_by.record --surface      only surface.json; a second

Each version is recorded once, by its release. The folder of a released version is never written again: a version that
cannot read it breaks what users have on their disks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import cloudtrain
from cloudtrain.settings.settings import SETTINGS
from cloudtrain_runtime.contract.serving_config import SERVING_FILE, ServingConfig
from written_by.jobs import FILES, JOBS, document_of, unnamed_fields
from written_by.surface import read_surface
from written_by.versions import ARCHIVE, EXPECTED, HERE, HOME_WORD, SURFACE

PROGRAMS = HERE / "programs"
CPU = "default"
"""The vector instructions of the recorded trainings (`ATEN_CPU_CAPABILITY`), which every CPU has."""

_LONGEST_SECONDS = 600
_SETTINGS = {
    "role": "arn:aws:iam::123456789012:role/train",
    "bucket": "my-bucket",
    "prefix": "jobs",
    "region": "us-west-2",
    "subnets": "subnet-0123456789abcdef0",
    "security_groups": "sg-0123456789abcdef0",
    "kms_key": "arn:aws:kms:us-west-2:123456789012:key/00000000-0000-0000-0000-000000000000",
    "transport": "boto3",
    "report": "false",
}
"""A value for each setting of the profile file."""

_PROJECT = """\
role = "arn:aws:iam::123456789012:role/other"
bucket = "other-bucket"
prefix = "team"
region = "eu-west-1"
subnets = ["subnet-1", "subnet-2"]
security_groups = ["sg-1"]
kms_key = "alias/team"
transport = "estimator"
report = true
"""

READ = ("succeeded", "script", "failed", "killed")
READS = ("metrics", "explain", "logs", "checkpoints")
"""Runs of which more than the status is recorded, and the commands."""


class Recorder:
    """Runs commands of the installed cloudtrain in folders of its own.

    Args:
        root: An empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.project = root / "project"
        self.home = self.project / ".cloudtrain"
        self.config = root / "home" / ".config"
        shutil.copytree(PROGRAMS, self.project)
        self._environ = {
            "PATH": os.defpath,
            "HOME": str(root / "home"),
            "LOGNAME": "ann",
            "CLOUDTRAIN_HOME": str(self.home),
            "CLOUDTRAIN_PASS_ENVIRONMENT": "ATEN_CPU_CAPABILITY",
            "ATEN_CPU_CAPABILITY": CPU,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __call__(self, *arguments: str | Path, codes: tuple[int, ...] = (0,)) -> Any:
        """Run a command with `--json`; return its object.

        Args:
            *arguments: The command.
            codes: Exit codes that are expected.
        """
        command = [Path(sys.executable).with_name("cloudtrain"), *arguments, "--json"]
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.project,
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_SECONDS,
        )
        if done.returncode not in codes:
            words = " ".join(map(str, arguments))
            raise RuntimeError(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout)

    def train(self, job: str, *options: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a job on this machine until it ends; return its id."""
        run = self("submit", job, "--local", "--follow", *_set(options), codes=codes)["run"]
        return str(run)

    def begin(self, *options: str) -> str:
        """Start a slow run; return its id when it has saved two checkpoints."""
        slow = ("code.args.step_seconds=0.3", "train.steps=400", *options)
        run = str(self("submit", "job.yaml", "--local", "--detach", *_set(slow))["run"])
        _until(lambda: (self("status", run)["last_checkpoint"] or {}).get("step", 0) >= 4)
        return run


def _set(options: tuple[str, ...]) -> Iterator[str]:
    for option in options:
        yield "--set"
        yield option


def _until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("what is recorded has not happened")
        time.sleep(0.3)
    return found


def record_runs(recorder: Recorder) -> dict[str, str]:
    """Run and end jobs in each way; return their ids by what they are."""
    succeeded = recorder.train("job.yaml")
    sharded = recorder.train(
        "job.yaml",
        "name=sharded",
        "cluster.processes_per_instance=2",
        "train.parallel.data=fsdp",
    )
    script = recorder.train("loop.yaml")
    runs = {
        "succeeded": succeeded,
        "succeeded-resumed": _resume(recorder, succeeded, "train.steps=10"),
        "sharded": sharded,
        "sharded-resumed": _resume(recorder, sharded, "train.steps=10"),
        "script": script,
        "script-resumed": _resume(recorder, script, "code.args.steps=10"),
        "failed": recorder.train("job.yaml", "code.args.fail_at=5", codes=(4,)),
    }
    stopped = recorder.begin("tags.team=ops")
    recorder("stop", stopped, codes=(0, 5))
    killed = recorder.begin()
    state = json.loads((recorder.home / "runs" / killed / "state.json").read_text())
    os.killpg(os.getpgid(state["supervisor"]), signal.SIGKILL)
    _until(lambda: recorder("status", killed)["state"] == "FAILED")
    return {**runs, "stopped": stopped, "killed": killed}


def _resume(recorder: Recorder, run: str, change: str) -> str:
    done = recorder("resume", run, "--set", change, "--follow")
    return str(done["run"])


def record_sweeps(recorder: Recorder) -> dict[str, str]:
    """Run one sweep to its end and kill the controller of another one; return their ids."""
    finished = recorder("sweep", "run", "sweep.yaml", "--local", "--follow")["sweep"]
    started = recorder("sweep", "run", "slow-sweep.yaml", "--local", "--detach")
    interrupted = started["sweep"]
    status = _until(lambda: _with_one_trial(recorder("sweep", "status", interrupted)))
    for process in _controllers(interrupted):
        os.kill(process, signal.SIGKILL)
    for trial in status["trials"]:
        # It ends without the controller, which finds the result when the sweep continues.
        _until(lambda run=trial["run"]: not run or recorder("status", run)["ended"])
    return {"finished": finished, "interrupted": interrupted}


def _with_one_trial(status: Any) -> Any:
    ended = [trial for trial in status["trials"] if trial["state"] == "SUCCEEDED"]
    return status if ended and status["state"] == "RUNNING" else None


def _controllers(sweep: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"cloudtrain.features.sweeps" in words and any(sweep.encode() in each for each in words):
            yield int(folder.name)


def record_settings(recorder: Recorder) -> dict[str, Any]:
    """Store each setting in the profile file, and in one beside a job; return what cloudtrain reads of them."""
    if missing := set(SETTINGS) - _SETTINGS.keys():
        raise RuntimeError(
            f"add a value for {', '.join(sorted(missing))} to _SETTINGS and _PROJECT"
        )
    changes = [word for item in _SETTINGS.items() for word in ("--set", "=".join(item))]
    recorder("configure", "--offline", "--yes", *changes)
    recorder("configure", "--offline", "--yes", "--profile", "team", "--set", "prefix=team")
    beside = recorder.project / "beside"
    beside.mkdir()
    (beside / "cloudtrain.toml").write_text(_PROJECT, encoding="utf-8")
    shutil.copy(PROGRAMS / "job.yaml", beside)
    shutil.copy(PROGRAMS / "small.py", beside)
    return {
        "profile": recorder("configure", "--show"),
        "team": recorder("configure", "--show", "--profile", "team"),
        "beside": recorder("configure", "--show", "--job", "beside/job.yaml"),
    }


def record_jobs(recorder: Recorder) -> dict[str, Any]:
    """Write job files with every field; return what each means, by name."""
    folder = recorder.project / "jobs"
    folder.mkdir()
    (recorder.project / "shared").mkdir()
    (recorder.project / "shared" / "__init__.py").write_text("", encoding="utf-8")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    found = {}
    for name, text in JOBS.items():
        path = folder / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        found[name] = document_of(path)
    if unnamed := unnamed_fields([folder / f"{name}.yaml" for name in JOBS]):
        raise RuntimeError(f"add to written_by/jobs.py: {', '.join(sorted(unnamed))}")
    return found


def record_output(recorder: Recorder, runs: dict[str, str], sweeps: dict[str, str]) -> Any:
    """Return the output of the commands that read, by their words."""
    recorded = {}
    commands = [("status", run) for run in runs.values()]
    commands += [(command, runs[name]) for name in READ for command in READS]
    commands += [("sweep", "status", sweep) for sweep in sweeps.values()]
    commands += [
        ("list", "--local"),
        ("compare", runs["succeeded"], runs["succeeded-resumed"]),
        ("sweep", "best", sweeps["finished"]),
        ("costs", "--local", "--since", "2026-01-01"),
        ("checkpoints", "verify", runs["sharded"]),
    ]
    for words in commands:
        text = json.dumps(recorder(*words, codes=(0, 4, 5)))
        recorded[" ".join(words)] = json.loads(text.replace(str(recorder.home), HOME_WORD))
    return recorded


def _keep(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return a member of the archive without its owner; None for what only a live run needs."""
    parts = Path(info.name).parts
    if not (info.isfile() or info.isdir()) or "hosts" in parts or "__pycache__" in parts:
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = "ann"
    return info


def record(root: Path) -> dict[str, Any]:
    """Record everything in an empty folder; return what is expected of it."""
    recorder = Recorder(root)
    # What takes a moment comes first.
    jobs = record_jobs(recorder)
    runs = record_runs(recorder)
    sweeps = record_sweeps(recorder)
    evaluation = recorder("evaluate", runs["succeeded"], "--local", "--split", "validation")
    rehearsal = recorder("rehearse", "job.yaml", "--save")
    recorder("download", runs["succeeded"], "--what", "model", "--to", "downloaded")
    recorder("report", runs["succeeded"], "-o", "report.html")
    (recorder.project / SERVING_FILE).write_text(
        ServingConfig(run=runs["succeeded"], task="small:Small", args={"width": 4}).to_json(),
        encoding="utf-8",
    )
    sandbox = recorder("submit", "job.yaml", "--sandbox", "--follow")["run"]
    recorder("sandbox", "--stop")
    output = record_output(recorder, runs, sweeps)
    # With settings, some commands ask the account, so they come last.
    settings = record_settings(recorder)
    return {
        "cloudtrain": cloudtrain.__version__,
        "torch": torch.__version__,
        "cpu": CPU,
        "runs": runs,
        "sweeps": sweeps,
        "sandbox": sandbox,
        "evaluation": evaluation["evaluations"][0]["run"],
        "receipt": rehearsal["receipt"],
        "output": output,
        "jobs": jobs,
        "settings": settings,
    }


def write_surface(folder: Path) -> None:
    """Write the public surface of the installed version."""
    text = json.dumps(read_surface(), indent=1, sort_keys=True) + "\n"
    (folder / SURFACE).write_text(text, encoding="utf-8")


def main() -> None:
    """Record the installed version."""
    folder = HERE / cloudtrain.__version__
    folder.mkdir(exist_ok=True)
    write_surface(folder)
    if "--surface" in sys.argv:
        return
    with tempfile.TemporaryDirectory(prefix="written-by-") as root:
        expected = record(Path(root))
        with tarfile.open(folder / ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(Path(root, "project"), "project", filter=_keep)
            archive.add(Path(root, "home", ".config"), "config", filter=_keep)
    text = json.dumps(expected, indent=1, sort_keys=True) + "\n"
    (folder / EXPECTED).write_text(text, encoding="utf-8")
    print(f"{folder}: {(folder / ARCHIVE).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
