"""Commands with a full disk, damaged files or runs of other users print one clear message, and `stop` works."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.jobs import (
    Cli,
    Finished,
    command,
    processes_of,
    until,
)

import cloudtrain
from cloudtrain.backends.container.state_file import RecordedState, write_state
from cloudtrain.errors import CloudtrainError
from cloudtrain.runs.status import State

JOB = "name: spin\ncode: {script: spin.py}\ncluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"
SPIN = "import time\nprint('spinning', flush=True)\nwhile True:\n    time.sleep(0.1)\n"
RUN = "dead-261120-101500-1a2b3c"
NOBODY = 65534


def everything_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the times and contents of all files in a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def spinning(cli: Cli, job: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[str, Path]]:
    """Return a function that starts an endless run, and returns its id and folder after its first output."""

    def start(home: Path | None = None) -> tuple[str, Path]:
        home = home or tmp_path / "runs-home"
        environ = {"CLOUDTRAIN_HOME": str(home)}
        done = cli("submit", job(JOB, spin_py=SPIN), "--local", "--json", environ=environ)
        assert done.code == 0, done.err
        folder = home / "runs" / done.json["run"]
        log = folder / "logs" / "algo-1.log"
        until(lambda: log.exists() and "spinning" in log.read_text())
        return done.json["run"], folder

    return start


def fill(disk: Path, *, left_bytes: int = 0) -> None:
    """Fill a disk but for some bytes."""
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    filler_bytes = (disk / "filler").stat().st_size
    os.truncate(disk / "filler", max(0, filler_bytes - left_bytes))


@pytest.mark.processes
def test_commands_work_with_a_full_disk(
    cli: Cli, disk: Path, spinning: Callable[..., tuple[str, Path]]
) -> None:
    run, folder = spinning(disk)
    fill(disk)
    environ = {"CLOUDTRAIN_HOME": str(disk)}
    job = disk.parent / "job" / "job.yaml"
    for words in (["list"], ["status", run], ["explain", run], ["logs", run], ["plan", job]):
        done = cli(*words, environ=environ)
        assert "Traceback" not in done.err
        assert done.code == 0, done.err
    failed = cli("submit", job, "--local", environ=environ)
    assert failed.code == 2
    assert "No space left on device" in failed.err
    assert "Traceback" not in failed.err
    stopped = cli("stop", run, "--json", environ=environ)
    assert stopped.code == 0, stopped.err
    assert stopped.json["state"] == "STOPPED"
    assert processes_of(run) == []
    assert json.loads((folder / "state.json").read_text())["state"] == "STOPPED"


@pytest.fixture
def almost_full(cli: Cli, disk: Path, job: Callable[..., Path]) -> Callable[[int], Finished]:
    """Return a function that submits a job to a disk with some free bytes, which holds the job's code already."""
    environ = {"CLOUDTRAIN_HOME": str(disk)}
    path = job(JOB, spin_py="print('not reached')")
    submit = ("submit", path, "--local", "--follow", "--json")
    first = cli(*submit, environ=environ)
    assert first.code == 0, first.err
    shutil.rmtree(disk / "runs" / first.json["run"])

    def call(left_bytes: int) -> Finished:
        fill(disk, left_bytes=left_bytes)
        return cli(*submit, environ=environ)

    return call


@pytest.mark.processes
@pytest.mark.parametrize("left_bytes", [0, 4096, 12_288, 20_480])
def test_a_disk_without_space_for_a_run_gets_no_run(
    almost_full: Callable[[int], Finished], cli: Cli, disk: Path, left_bytes: int
) -> None:
    failed = almost_full(left_bytes)
    assert failed.code == 2
    assert f"error: {disk / 'runs'}/" in failed.err
    assert "cannot be created: No space left on device" in failed.err
    assert list((disk / "runs").iterdir()) == []
    assert cli("list", "--json", environ={"CLOUDTRAIN_HOME": str(disk)}).json["runs"] == []


@pytest.mark.processes
@pytest.mark.parametrize("left_bytes", [65_536, 400_000])
def test_a_disk_that_is_full_at_the_start_is_named(
    almost_full: Callable[[int], Finished], cli: Cli, disk: Path, left_bytes: int
) -> None:
    done = almost_full(left_bytes)
    assert done.code == 4, done.err
    assert "the disk is full" in done.json["reason"]
    environ = {"CLOUDTRAIN_HOME": str(disk)}
    explained = cli("explain", done.json["run"], "--json", environ=environ).json
    assert explained["class"] == "disk_full", explained


@pytest.mark.processes
@pytest.mark.parametrize("instances", [1, 2])
def test_a_folder_whose_name_is_not_utf8_holds_runs(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, instances: int
) -> None:
    home = tmp_path / os.fsdecode(b"caf\xe9")
    (tmp_path / "job" / "data").mkdir(parents=True)
    (tmp_path / "job" / "data" / "x.csv").write_text("1")
    saves = (
        "import os, torch\nfrom cloudtrain_runtime import checkpoint\n"
        "assert os.listdir(os.environ['SM_CHANNEL_TRAIN']) == ['x.csv']\n"
        "torch.distributed.init_process_group('gloo')\n"
        "torch.distributed.all_reduce(torch.ones(1))\n"
        "checkpoint.save(3, model=torch.nn.Linear(2, 2), force=True)\n"
    )
    environ = {"CLOUDTRAIN_HOME": str(home)}
    path = job(f"{JOB}data: {{train: data}}\n", spin_py=saves)
    shape = ("--instances", str(instances), "--set", "cluster.processes_per_instance=1")
    done = cli("submit", path, "--local", "--follow", "--json", *shape, environ=environ)
    assert done.code == 0, done.err
    listed = cli("checkpoints", done.json["run"], "--json", environ=environ)
    assert [each["step"] for each in listed.json["checkpoints"]] == [3], listed.err


@pytest.mark.processes
def test_a_damaged_state_does_not_prevent_a_stop(
    cli: Cli, spinning: Callable[..., tuple[str, Path]]
) -> None:
    run, folder = spinning()
    (folder / "state.json").write_text('{"state": "RUNN')
    for verb in ("status", "follow", "explain"):
        done = cli(verb, run)
        assert done.code == 2
        assert "state.json is damaged: it is not valid JSON" in done.err
    stopped = cli("stop", run, "--no-wait")
    assert "Traceback" not in stopped.err
    assert f"stopping local:{run}" in stopped.err
    until(lambda: not processes_of(run))
    until(lambda: '"state": "STOPPED"' in cli("status", run, "--json").out)


@pytest.mark.processes
def test_the_hosts_end_with_their_supervisor(
    cli: Cli, spinning: Callable[..., tuple[str, Path]]
) -> None:
    run, folder = spinning()
    os.kill(json.loads((folder / "state.json").read_text())["supervisor"], signal.SIGKILL)
    until(lambda: not processes_of(run))
    before = everything_in(folder)
    status = cli("status", run, "--json").json
    assert status["state"] == "FAILED"
    assert "the supervisor of this run died" in status["reason"]
    assert cli("status", run, "--json").json["ended"] == status["ended"]
    assert everything_in(folder) == before
    assert cli("stop", run).code == 0
    assert json.loads((folder / "state.json").read_text())["state"] == "FAILED"


def test_a_supervisor_that_cannot_start_is_reported(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(
        CloudtrainError, match=r"the local backend did not start:\n(.*\n)*.*encodings"
    ) as caught:
        cloudtrain.submit(job(JOB, spin_py=SPIN), local=True)
    log = Path(caught.value.hint.removeprefix("see "))
    assert log.name == "supervisor.log"
    assert "encodings" in log.read_text()
    assert json.loads((log.parent / "state.json").read_text())["state"] == "FAILED"


@pytest.mark.promise
def test_an_invalid_job_starts_no_process(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("nam: x\n")
    done = cli("submit", tmp_path / "job.yaml", "--local", environ={"OWNER": str(tmp_path)})
    assert done.code == 2
    assert not [
        each for each in psutil.process_iter() if _has_variable(each, "OWNER", str(tmp_path))
    ]


def _has_variable(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.environ().get(name) == value
    except psutil.Error:
        return False


def dead(home: Path) -> Path:
    """Write a run whose supervisor has died."""
    folder = home / "runs" / RUN
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "algo-1.log").write_text("ValueError: x\n")
    (folder / "supervisor.lock").write_text("")
    write_state(folder, RecordedState(State.RUNNING, supervisor=2**22 + 1))
    return folder


@pytest.mark.promise
def test_commands_that_read_write_nothing(cli: Cli, tmp_path: Path) -> None:
    folder = dead(tmp_path / "runs-home")
    before = everything_in(tmp_path)
    for verb, code in (("status", 0), ("explain", 0), ("logs", 0), ("follow", 4)):
        done = cli(verb, RUN)
        assert done.code == code, done.err
    assert "FAILED" in cli("list").out
    assert everything_in(tmp_path) == before
    assert cli("stop", RUN).code == 0
    assert json.loads((folder / "state.json").read_text())["state"] == "FAILED"


WITHOUT_CAPABILITIES = [
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search,-kill,-fowner",
    "--inh-caps=-all",
]
"""Runs a command as root without access to other users' files."""


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Callable[..., Finished]]:
    """Write a run of another user; return a function that runs a command without access to it."""
    home = tmp_path / "runs-home"
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can make files of another user")
    dead(home)
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    environ = {**os.environ, "CLOUDTRAIN_HOME": str(home), "HOME": str(tmp_path)}

    def call(*words: str) -> Finished:
        line = [*WITHOUT_CAPABILITIES, str(command()), *words]
        done = subprocess.run(
            line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Finished(done.returncode, done.stdout, done.stderr)

    yield call
    home.chmod(0o755)


def test_errors_for_the_run_of_another_user(
    foreign: Callable[..., Finished], tmp_path: Path
) -> None:
    home, folder = tmp_path / "runs-home", tmp_path / "runs-home" / "runs" / RUN
    for verb in ("status", "logs", "explain"):
        done = foreign(verb, RUN)
        assert done.code == 0, done.err  # the files are readable, including the lock
    (folder / "state.json").chmod(0o600)
    listed = foreign("list")
    assert listed.code == 0, listed.err
    assert "UNKNOWN" in listed.out
    assert "Permission denied" in listed.out
    for verb in ("status", "explain", "follow"):
        done = foreign(verb, RUN)
        assert done.code == 2
        assert f"{folder}/state.json: cannot be read: Permission denied" in done.err
        assert f"the run belongs to {folder.owner()}: ask" in done.err
    (folder / "logs").chmod(0o700)
    done = foreign("logs", RUN)
    assert (done.code, "logs: cannot be read: Permission denied" in done.err) == (2, True)
    home.chmod(0o700)
    for words in (["list"], ["status", RUN], ["stop", RUN]):
        done = foreign(*words)
        assert done.code == 2, done.err
        assert "Permission denied" in done.err


FILLS = """
import os, time
from pathlib import Path
import cloudtrain_runtime

context, disk = cloudtrain_runtime.context(), Path(DISK)
context.checkpoint_dir.mkdir(parents=True, exist_ok=True)
(context.checkpoint_dir / f"{context.host}.bin").write_bytes(os.urandom(1 << 20))
if context.rank == 1:
    (disk / "written").touch()
else:
    (context.model_dir / "weights.bin").write_bytes(os.urandom(4 << 20))
    (context.output_dir / "curve.bin").write_bytes(os.urandom(1 << 20))
    while not (disk / "written").exists():
        time.sleep(0.01)
    # Some space is left, but not for a second copy of anything above.
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(max(0, free - (1 << 19))))
"""


@pytest.mark.processes
def test_a_full_disk_at_the_end_is_no_failed_training(
    cli: Cli, disk: Path, job: Callable[..., Path], tmp_path: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
    environ = {"CLOUDTRAIN_HOME": str(disk)}
    path = job(JOB, spin_py=FILLS.replace("DISK", repr(str(disk))))
    done = cli("submit", path, "--local", "--follow", "--json", "--instances", "2", environ=environ)
    assert done.code == 0, done.err
    run, reason = done.json["run"], done.json["reason"]
    assert done.json["state"] == "SUCCEEDED"
    for part in ("model.tar.gz", "output.tar.gz", "the hosts' checkpoints"):
        assert f"{part} cannot be" in reason
    assert reason.count("the disk is full; it is in ") == 3
    assert f"cloudtrain download {run}" in reason
    for verb in ("status", "explain"):
        assert f"cloudtrain download {run}" in cli(verb, run, environ=environ).out
    assert Path(done.json["artifacts"]["model_folder"], "weights.bin").stat().st_size == 4 << 20

    target = tmp_path / "results"
    for words in (["download", run, "--to", target], ["resume", run]):
        again = cli(*words, environ=environ)
        assert again.code == 2
        assert "not all of its results can be stored: " in again.err
        assert "the hosts' checkpoints cannot be merged: the disk is full" in again.err

    # Now there is space for the smaller parts only.
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - (6 << 19))
    again = cli("download", run, "--to", target, environ=environ)
    assert again.code == 2
    assert "model.tar.gz cannot be stored: the disk is full" in again.err
    assert f"the others are in {target}" in again.err
    assert not list(target.rglob("model.tar.gz"))
    assert cli("download", run, "--to", target, "--what", "outputs", environ=environ).code == 0

    (disk / "filler").unlink()
    again = cli("download", run, "--to", target, environ=environ)
    assert again.code == 0, again.err
    found = {path.name for path in target.rglob("*") if path.is_file()}
    assert {"model.tar.gz", "output.tar.gz", "algo-1.bin", "algo-2.bin"} <= found
    status = cli("status", run, "--json", environ=environ).json
    assert (status["state"], status["reason"]) == ("SUCCEEDED", "")
    assert Path(status["artifacts"]["model"]).is_file()
    (disk / "runs" / run / "checkpoints" / "algo-2.bin").unlink()
    assert cli("download", run, "--to", tmp_path / "more", environ=environ).code == 0
    assert not (tmp_path / "more" / "checkpoints" / "algo-2.bin").exists()


PACKS_LONG = """
import cloudtrain_runtime
with (cloudtrain_runtime.context().model_dir / "weights.bin").open("wb") as weights:
    weights.truncate(1 << 40)
"""


@pytest.mark.processes
def test_a_kill_while_results_are_stored_loses_none(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    run = cloudtrain.submit(job(JOB, spin_py=PACKS_LONG), local=True).id
    folder = tmp_path / "runs-home" / "runs" / run
    state = until(
        lambda: (now := json.loads((folder / "state.json").read_text()))["ending"] and now
    )
    assert (state["state"], state["ending"]) == ("RUNNING", "SUCCEEDED")
    os.kill(state["supervisor"], signal.SIGKILL)

    status = until(lambda: (now := cli("status", run, "--json").json)["ended"] and now)
    assert status["state"] == "SUCCEEDED"
    assert (
        "not all results are stored: the supervisor died while it stored them" in status["reason"]
    )
    assert f"cloudtrain download {run}" in status["reason"]

    request = (folder / "request.json").read_bytes()
    for content in (request[:100], b"[]", b'{"TrainingJobName": []}'):
        (folder / "request.json").write_bytes(content)
        damaged = cli("download", run, "--to", tmp_path / "none")
        assert damaged.code != 0
        assert "request.json is damaged: it is not the request of a run" in damaged.err
    (folder / "request.json").write_bytes(request)

    os.truncate(folder / "hosts/algo-1/opt/ml/model/weights.bin", 1 << 20)
    downloads = [
        subprocess.Popen([command(), "download", run, "--to", tmp_path / str(number)])
        for number in range(2)
    ]
    assert [each.wait(120) for each in downloads] == [0, 0]
    first, second = (tmp_path / str(number) / "model.tar.gz" for number in range(2))
    with tarfile.open(first) as archive:
        assert archive.getmember("weights.bin").size == 1 << 20
    assert first.read_bytes() == second.read_bytes()
    assert cli("status", run, "--json").json["reason"] == ""
