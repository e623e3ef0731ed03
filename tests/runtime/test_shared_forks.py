"""One import for the runs of a rehearsal: real agents, and ranks that are forks of another process."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.agents import HEAD, is_running, living, start, written
from support.jobs import until

import cloudtrain_runtime
from cloudtrain.features.rehearsal.shared_imports import SharedImports
from cloudtrain_runtime.contract import INSTANCE_VARIABLE, REHEARSAL_FORKS_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="enters namespaces")

MODULE = "cloudtrain_runtime.launcher.shared_forks"
REPORT = """
import psutil
server = os.getppid()
write('up', is_forked, os.getpid(), server, os.getcwd(), os.environ['WORD'], psutil.Process(server).ppid())
"""


@contextmanager
def importer(exit_code: int) -> Iterator[Path]:
    """Start a process that waits for the first agent, and expect its exit code; return its socket."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "forks"
        environ = {**os.environ, INSTANCE_VARIABLE: folder}
        command = [sys.executable, "-P", "-m", MODULE, str(socket)]
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE) as process:
            until(socket.exists)
            yield socket
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == exit_code


@pytest.fixture
def place() -> Iterator[Path]:
    """Return the socket of a process that waits for the first agent."""
    with importer(0) as socket:
        yield socket


def run_folder(folder: Path) -> Path:
    """Return the folder of a run, whose code is the installed runtime."""
    (folder / "code").mkdir(parents=True)
    source = Path(cloudtrain_runtime.__file__).parent
    (folder / "code" / "cloudtrain_runtime").symlink_to(source)
    return folder


def ups(folder: Path, place: Path, worker: str, word: str = "same") -> list[list[str]]:
    """Run an agent to its end; return what its ranks have written."""
    variables = {INSTANCE_VARIABLE: str(folder), REHEARSAL_FORKS_VARIABLE: str(place)}
    agent = start(folder, worker, WORD=word, **variables)
    assert agent.wait(300) == 0, (folder / "log").read_text()
    return [[*words, str(agent.pid)] for words in written(folder, "up", 2)]


def test_runs_share_one_import(tmp_path: Path, place: Path) -> None:
    """Also the environment, folder and output of each are its own. Another environment imports by itself."""
    found = []
    for name, word in (("one", "same"), ("two", "same"), ("three", "other")):
        folder = run_folder(tmp_path / name)
        found.append(ups(folder, place, REPORT, word))
        assert {words[3] for words in found[-1]} == {str(folder)}
        assert {words[4] for words in found[-1]} == {word}
        assert {words[0] for words in found[-1]} == {"True"}
        servers = {words[2] for words in found[-1]}
        assert len(servers) == 1
    # Parents of the servers: the process that imports, which is no agent, or the agent itself.
    are_own = [line[5] == line[6] for ups_of_run in found for line in ups_of_run]
    assert are_own == [False, False, False, False, True, True]
    for name in ("one", "two", "three"):
        assert "Traceback" not in (tmp_path / name / "log").read_text()


def test_children_of_ranks_have_an_empty_standard_input(tmp_path: Path, place: Path) -> None:
    folder = run_folder(tmp_path / "run")
    worker = """
import subprocess
read = "import sys; print(repr(sys.stdin.read()))"
found = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
write("up", found.stdout, found.stderr)
"""
    assert [words[0] for words in ups(folder, place, worker)] == ["''", "''"]


@pytest.mark.parametrize(("missing", "exit_code"), [("code", 0), ("python", 1)])
def test_an_agent_asks_no_process_that_cannot_import(
    tmp_path: Path, missing: str, exit_code: int
) -> None:
    """Neither does it ask again and again."""
    values = {"code": str(tmp_path), "python": sys.executable, missing: str(tmp_path / "none")}
    with importer(exit_code) as place:
        ask = f"""
import os, sys
from {MODULE} import _find_server
sys.executable = {values["python"]!r}
request = {{"environ": dict(os.environ), "code": {values["code"]!r}}}
print(_find_server({str(place)!r}, request))
"""
        command = [sys.executable, "-c", ask]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.stdout == "None\n", done.stderr


def test_a_fork_has_no_capability_that_a_rank_has_not() -> None:
    """Those of a user namespace would let it read and change files against their modes."""
    enter = f"""
import os, subprocess, sys
from {MODULE} import enter_namespaces
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
host = subprocess.Popen(
    ["unshare", "--user", "--mount", "--map-current-user", "sh", "-c", "echo up; read end"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
if not host.stdout.readline():
    sys.exit("no namespace")
handles = [os.open(f"/proc/{{host.pid}}/ns/{{name}}", os.O_RDONLY) for name in ("user", "mnt")]
enter_namespaces(handles)
own = [os.readlink(f"/proc/self/ns/{{name}}") for name in ("user", "mnt")]
print(own == [os.readlink(f"/proc/{{host.pid}}/ns/{{name}}") for name in ("user", "mnt")])
kinds = ("CapInh", "CapPrm", "CapEff", "CapAmb")
status = dict(line.split(":") for line in open("/proc/self/status"))
print([int(status[kind], 16) for kind in kinds])
host.stdin.close()
"""
    command = [sys.executable, "-c", enter]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    if "no namespace" in done.stderr:
        pytest.skip("this machine gives users no namespaces")
    assert done.stdout == "True\n[0, 0, 0, 0]\n", done.stderr


def test_ranks_end_with_their_agent(tmp_path: Path, place: Path) -> None:
    folder = run_folder(tmp_path / "run")
    worker = "write('up', os.getpid(), os.getppid())\ntime.sleep(600)\n"
    variables = {INSTANCE_VARIABLE: str(folder), REHEARSAL_FORKS_VARIABLE: str(place)}
    agent = start(folder, worker, **variables)
    ranks = written(folder, "up", 2)
    (server,) = {int(words[1]) for words in ranks}
    assert psutil.Process(server).ppid() != agent.pid
    agent.kill()
    agent.wait()
    until(lambda: not any(is_running(int(words[0])) for words in ranks))
    until(lambda: not is_running(server))


def test_what_ranks_start_apart_ends_with_their_agent(tmp_path: Path, place: Path) -> None:
    """Also a grandchild whose parent has ended."""
    folder = run_folder(tmp_path / "run")
    worker = """
import subprocess
own = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
orphan = ["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"]
write("up", own, subprocess.check_output(orphan, text=True))
"""
    started = [int(pid) for words in ups(folder, place, worker) for pid in words[:2]]
    assert len(started) == 4
    until(lambda: not any(is_running(pid) for pid in started))


def test_a_module_runs_without_the_process(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    command = [sys.executable, "-m", MODULE, "--run", str(tmp_path / "none"), "own", "word"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "['word']\n"), done.stderr


def test_a_module_runs_in_a_fork(tmp_path: Path, place: Path) -> None:
    folder = run_folder(tmp_path / "run")
    ups(folder, place, REPORT)
    own = (
        HEAD.partition("rank,")[0]
        + "print('torch' in sys.modules, sys.argv[1:], os.getcwd())\nsys.exit(4)\n"
    )
    (tmp_path / "own.py").write_text(own)
    command = [sys.executable, "-m", MODULE, "--run", str(place), "own", "word"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == f"True ['word'] {tmp_path}\n", done.stderr
    assert done.returncode == 4
    assert living(tmp_path) == []


def test_a_module_ends_by_the_signal_of_its_fork(tmp_path: Path, place: Path) -> None:
    ups(run_folder(tmp_path / "run"), place, REPORT)
    (tmp_path / "own.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    command = [sys.executable, "-m", MODULE, "--run", str(place), "own"]
    done = subprocess.run(command, cwd=tmp_path, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_a_safe_path_keeps_the_folders_of_the_environment(tmp_path: Path, place: Path) -> None:
    folder = run_folder(tmp_path / "run")
    extra = tmp_path / "extra"
    extra.mkdir()
    worker = "write('up', sys.path[0], os.getcwd() in sys.path)\n"
    variables = {
        INSTANCE_VARIABLE: str(folder),
        REHEARSAL_FORKS_VARIABLE: str(place),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(extra),
    }
    agent = start(folder, worker, **variables)
    assert agent.wait(300) == 0, (folder / "log").read_text()
    found = written(folder, "up", 2)
    assert {tuple(words) for words in found} == {(str(extra), "False")}


def test_runs_import_by_themselves_without_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with SharedImports(tmp_path) as imports:
        assert not imports.place.exists()
    assert not imports.place.parent.exists()
