"""A real Slurm on this machine: controller, nodes, partitions, and accounting where a test asks for it.

    with cluster(folder, nodes=4) as slurm:
        job = slurm.submit("hostname", "--nodes=2")
        slurm.wait_for(job, "COMPLETED")

By hand, until Ctrl-C:

    PYTHONPATH=tests python -m support.slurm_cluster FOLDER [--nodes 4] [--accounting]

It needs root, Linux and Debian's packages (`make slurm`), and neither systemd nor a cgroup plugin. Every process is a
child in the foreground, and ends with the context manager, as do all processes of jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cloudtrain.backends.container.process_tree import end_with_parent, kill
from support.jobs import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
ACCOUNTING_PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")
PACKAGES = "slurmctld slurmd slurm-client munge"
ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"
ACCOUNT = "research"
"""The account of root, where there is accounting."""

_SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CONFIG_VARIABLE = "SLURM_CONF"
_REVOKED_SECONDS = 2

_Belongs = Callable[[psutil.Process], bool]

_ENDED = frozenset(
    {
        "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY",
        "BOOT_FAIL", "DEADLINE",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How the cluster is set up.

    Attributes:
        nodes: Number of nodes, n1 and so on; each has a loopback address of its own.
        accounting: Start a database, so that sacct, accounts and QOS exist.
        gpus: GPUs of a node. Each is an empty file: Slurm hands them out, and nothing can use them.
        cpus: CPUs of a node.
        memory_mb: Memory of a node.
        slurmd_timeout: Seconds without an answer after which a node is down.
        kill_wait: Seconds from SIGTERM to SIGKILL.
        min_job_age: Seconds for which Slurm remembers a job that has ended.
        grace_time: Seconds that a preempted job of the partition `spare` has.
        short_minutes: Time limit of the partition `short`.
        memory_limits: Let the kernel end processes of a job that use more memory than it has asked for (cgroups).
        settings: Further lines of slurm.conf.
    """

    nodes: int = 4
    accounting: bool = False
    gpus: int = 2
    cpus: int = 2
    memory_mb: int = 4000
    slurmd_timeout: int = 10
    kill_wait: int = 10
    min_job_age: int = 300
    grace_time: int = 20
    short_minutes: int = 1
    memory_limits: bool = False
    settings: tuple[str, ...] = ()


def missing(*, accounting: bool = False) -> str | None:
    """Return what this machine lacks for a cluster, and what to do; None if nothing."""
    if sys.platform != "linux":
        return "Slurm runs on Linux only"
    programs = [*PROGRAMS, *(ACCOUNTING_PROGRAMS if accounting else ())]
    absent = [name for name in programs if _program(name) is None]
    if absent:
        packages = f"{PACKAGES} {ACCOUNTING_PACKAGES}" if accounting else PACKAGES
        return (
            f"{', '.join(absent)}: not installed; as root: make slurm (apt-get install {packages})"
        )
    if os.geteuid() != 0:
        return "Slurm's daemons of the tests need root"
    if not any(each.fstype.startswith("cgroup") for each in psutil.disk_partitions(all=True)):
        return "slurmd needs a cgroup file system, mounted in /sys/fs/cgroup"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"the name of this machine, {socket.gethostname()}, is not in /etc/hosts"
    return None


def missing_memory_limits() -> str | None:
    """Return why the cluster cannot limit the memory of jobs on this machine; None if it can."""
    # Slurm needs systemd for cgroups of version 2.
    absent = [name for name in ("memory", "freezer") if not _can_make_groups(name)]
    if absent:
        return f"no cgroup of version 1 can be made in /sys/fs/cgroup/{absent[0]}"
    return None


def _can_make_groups(controller: str) -> bool:
    probe = Path("/sys/fs/cgroup", controller, f"cloudtrain-{os.getpid()}")
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def can_install() -> bool:
    """Return whether `make slurm` can install the packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def require_slurm(*, accounting: bool = False) -> None:
    """Skip the test where this machine cannot run a cluster; in CI that is a failure where it could be installed."""
    import pytest

    reason = missing(accounting=accounting)
    if reason is None:
        return
    if (
        os.environ.get("CLOUDTRAIN_TEST_STRICT") == "1"
        and "not installed" in reason
        and can_install()
    ):
        pytest.fail(reason)
    pytest.skip(reason)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SEARCHED}")


@contextlib.contextmanager
def cluster(
    folder: Path, nodes: int = 4, *, accounting: bool = False, **options: object
) -> Iterator[Cluster]:
    """Start a cluster and end all of its processes afterwards.

    Args:
        folder: Folder for its files, which is created. What an earlier cluster left there is deleted.
        nodes: Number of nodes.
        accounting: Start a database, too.
        options: Further fields of `Options`.
    """
    reason = missing(accounting=accounting)
    if reason is not None:
        raise RuntimeError(reason)
    made = Options(nodes=nodes, accounting=accounting, **options)  # type: ignore[arg-type]
    # A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as sockets:
        slurm = Cluster(folder.absolute(), Path(sockets), made)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.end()


class Cluster:
    """A Slurm cluster on this machine.

    Attributes:
        folder: A folder that all nodes share, for runs.
        environ: Environment of commands that use this cluster.
        nodes: Names of the nodes.
    """

    def __init__(self, folder: Path, sockets: Path, options: Options) -> None:
        self.options = options
        self.folder = folder / "shared"
        self._own = folder / "slurm"
        self._sockets = sockets
        # Clusters of several workers of pytest: ports, addresses and job ids of their own.
        self._block, self._ports = _free_ports(options.nodes + 2)
        self.name = f"test{self._block}x{os.getpid()}"
        self.nodes = tuple(f"n{number}" for number in range(1, options.nodes + 1))
        self._config = self._own / "slurm.conf"
        self._munge = sockets / "munge"
        self._mysql = sockets / "mysql"
        kept = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
        path = f"{os.environ.get('PATH', '')}:{_SEARCHED}"
        self.environ: Mapping[str, str] = {
            **kept,
            "PATH": path,
            _CONFIG_VARIABLE: str(self._config),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._killed: set[str] = set()

    # Commands

    def run(self, *command: str, script: str | None = None, **variables: str) -> str:
        """Run a command of Slurm in the shared folder; return its output. `variables` are added to its environment."""
        done = subprocess.run(
            command, input=script, env={**self.environ, **variables}, cwd=self.folder, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def run_as(self, user: int, *command: str) -> str:
        """Run a command of Slurm as another user of this machine; return its output."""
        # The folder of the tests is closed to others.
        with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
            Path(folder).chmod(0o755)
            config = Path(shutil.copy(self._config, folder))
            done = subprocess.run(
                command, env={**self.environ, _CONFIG_VARIABLE: str(config)}, cwd="/", user=user, group=user,
                extra_groups=[], capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Submit a script of shell; return the job's id."""
        text = f"#!/bin/bash\n{script}\n"
        return int(self.run("sbatch", "--parsable", *options, script=text).partition(";")[0])

    def state(self, job: int | str) -> str:
        """Return the state of a job, such as PENDING."""
        return self.field(job, "JobState")

    def field(self, job: int | str, name: str, **variables: str) -> str:
        """Return a field of `scontrol show job` without spaces, such as Reason."""
        shown = self.run("scontrol", "show", "job", str(job), **variables)
        # The first line has the job's name, which may look like a field.
        words = shown.partition("\n")[2].split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for(self, job: int | str, *states: str) -> str:
        """Wait until a job has one of these states; return it. A job that has ended otherwise is a failure."""

        def reached() -> str:
            state = self.state(job)
            assert state in states or state not in _ENDED, self.run(
                "scontrol", "show", "job", str(job)
            )
            return state if state in states else ""

        return str(until(reached))

    def cancel_all(self) -> None:
        """Cancel all jobs and wait for their ends."""
        jobs = self.run("squeue", "--noheader", "--format=%A").split()
        if jobs:
            self.run("scancel", *sorted(set(jobs)))
        until(lambda: not self.run("squeue", "--noheader"))

    def requeue(self, job: int | str) -> None:
        """Requeue a job, as an administrator does."""
        self.run("scontrol", "requeue", str(job))

    def start_now(self, job: int | str) -> None:
        """End the two minutes that a requeued job waits.

        A node refuses a job that starts again in the second in which it was ended there, and Slurm then fails it.
        """
        requeued = int(self.field(job, "SubmitTime", SLURM_TIME_FORMAT="%s"))
        until(lambda: time.time() > requeued + _REVOKED_SECONDS)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def preempt(self) -> None:
        """Submit a short job of high priority that needs all nodes."""
        self.submit(
            "sleep 3",
            "--partition=main",
            "--exclusive",
            f"--nodes={len(self.nodes)}",
            "--output=/dev/null",
        )

    # Nodes

    def set_down(self, *nodes: str, reason: str = "test") -> None:
        """Declare nodes down: Slurm ends their jobs at once."""
        self.run(
            "scontrol", "update", f"NodeName={','.join(nodes)}", "State=DOWN", f"Reason={reason}"
        )

    def set_drained(self, *nodes: str, reason: str = "test") -> None:
        """Let nodes take no further jobs."""
        self.run(
            "scontrol", "update", f"NodeName={','.join(nodes)}", "State=DRAIN", f"Reason={reason}"
        )

    def set_up(self, *nodes: str) -> None:
        """Return nodes to service."""
        self.run("scontrol", "update", f"NodeName={','.join(nodes)}", "State=RESUME")

    def node_state(self, node: str) -> str:
        """Return the state of a node in small letters, such as `idle` or `down`."""
        return (
            self.run("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T")
            .split()[0]
            .rstrip("*")
        )

    def is_dead(self, node: str) -> bool:
        """Return whether the daemon of a node has ended."""
        return self._daemons[node].poll() is not None

    def kill_slurmd(self, node: str) -> None:
        """End the daemon of a node. Ranks and step daemons live on, as they do behind a broken network."""
        self._killed.add(node)
        daemon = self._daemons[node]
        daemon.kill()
        daemon.wait()

    def kill_node(self, node: str) -> None:
        """End the daemon and all processes of a node at once, as a power cut does."""
        self.kill_slurmd(node)

        def belongs(process: psutil.Process) -> bool:
            return self._is_step_daemon(process, node) or self._is_of_job(
                process, SLURMD_NODENAME=node
            )

        # A process whose parent has ended gets a signal, at which it would save.
        for process in _with_children(belongs):
            with contextlib.suppress(psutil.Error):
                process.suspend()
        kill(_with_children(belongs))
        self._kill_repeatedly(belongs)

    def start_slurmd(self, node: str) -> None:
        """Start the daemon of a node, and wait until it has registered."""
        self._start(node, "slurmd", "-D", "-N", node, cwd=self._spool(node))
        until(lambda: self.node_state(node) not in {"down", "unknown", "future"})

    def restore(self) -> None:
        """Cancel all jobs and return all nodes to service, for the next test."""
        for node in self.nodes:
            if self._daemons[node].poll() is not None:
                self.start_slurmd(node)
        self.cancel_all()
        for node in self.nodes:
            state = self.node_state(node)
            if state.startswith(("down", "drain")):
                self.set_up(node)
        self._wait_for_nodes()

    def processes(self, job: int | str | None = None) -> list[psutil.Process]:
        """Return the living processes of jobs, or of one job, without the step daemons.

        Processes of a container have nothing of Slurm in their environment, and are not among them.
        """
        wanted = {} if job is None else {"SLURM_JOB_ID": str(job)}
        return _processes(lambda process: self._is_of_job(process, **wanted))

    def _is_of_job(self, process: psutil.Process, **variables: str) -> bool:
        wanted = {"SLURM_CLUSTER_NAME": self.name, **variables}
        return wanted.items() <= process.environ().items()

    def _is_step_daemon(self, process: psutil.Process, node: str = "") -> bool:
        """Return whether a process is a step daemon. It has overwritten its environment, and is in its slurmd's folder."""
        return process.name() == "slurmstepd" and Path(process.cwd()).is_relative_to(
            self._spool(node)
        )

    def _spool(self, node: str) -> Path:
        return self._own / "spool" / node

    def restart_controller(self) -> None:
        """End the controller and start it again: it reads back its jobs."""
        self.stop_controller()
        self.start_controller()

    def stop_controller(self) -> None:
        """End the controller: commands of Slurm then fail."""
        daemon = self._daemons["slurmctld"]
        daemon.terminate()
        daemon.wait(60)

    def start_controller(self) -> None:
        """Start the controller and wait until it answers."""
        self._start("slurmctld", "slurmctld", "-D")
        until(lambda: self._answers("scontrol", "ping"))

    # Start and end

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle."""
        shutil.rmtree(self._own, ignore_errors=True)
        for folder in (self.folder, self._own / "log", self._own / "state", self._own / "gpu"):
            folder.mkdir(parents=True, exist_ok=True)
        self._sockets.chmod(0o755)
        self._start_munge()
        if self.options.accounting:
            self._start_accounting()
        self._write_configuration()
        self.start_controller()
        for node in self.nodes:
            self._spool(node).mkdir(parents=True)
            self._start(node, "slurmd", "-D", "-N", node, cwd=self._spool(node))
        self._wait_for_nodes()

    def end(self) -> None:
        """End all processes of the cluster and of its jobs."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        # A step daemon may start a process while the list is read.
        self._kill_repeatedly(
            lambda process: self._is_step_daemon(process) or self._is_of_job(process)
        )

    def _kill_repeatedly(self, belongs: _Belongs) -> None:
        while found := _processes(belongs):
            kill(found)

    def _start(
        self,
        name: str,
        *command: str,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        program = _program(command[0])
        assert program is not None, f"{command[0]} is not installed"
        self._killed.discard(name)
        with (self._own / "log" / f"{name}.out").open("a") as output:
            self._daemons[name] = subprocess.Popen(
                [program, *command[1:]],
                env={**self.environ, **(environ or {})}, cwd=cwd or self._own, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True, preexec_fn=end_with_parent,  # noqa: PLW1509 (no threads yet)
            )  # fmt: skip

    def _answers(self, *command: str) -> bool:
        """Return whether a command succeeds. A daemon that has ended by itself is a failure."""
        for name, daemon in self._daemons.items():
            assert name in self._killed or daemon.poll() is None, (
                f"{name} has ended:\n{self.log(name)}"
            )
        done = subprocess.run(
            command, env=self.environ, cwd=self._own, capture_output=True, check=False, timeout=60
        )
        return done.returncode == 0

    def log(self, name: str) -> str:
        """Return the end of the log of a daemon: `slurmctld`, `n1`, `munged`, `slurmdbd` or `mariadbd`."""
        files = [self._own / "log" / f"{name}{ending}" for ending in (".log", ".out")]
        return "\n".join(
            file.read_text(errors="replace")[-3000:] for file in files if file.exists()
        )

    def _wait_for_nodes(self) -> None:
        def are_idle() -> bool:
            states = self.run(
                "sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"
            ).split()
            return states == ["idle"] * len(self.nodes)

        try:
            until(are_idle, seconds=60)
        except AssertionError:
            logs = "\n".join(f"{name}:\n{self.log(name)}" for name in self._daemons)
            raise AssertionError(
                f"the nodes do not become idle\n{self.run('sinfo')}\n{logs}"
            ) from None

    def _start_munge(self) -> None:
        private = self._own / "munge"
        private.mkdir(mode=0o700)
        key = private / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self._start(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._munge}",
            f"--pid-file={private}/pid", f"--seed-file={private}/seed", f"--log-file={private}/log",
        )  # fmt: skip
        until(self._munge.exists, seconds=60)

    def _start_accounting(self) -> None:
        data = self._own / "mysql"
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db",
             "--auth-root-authentication-method=normal"],
            env=self.environ, capture_output=True, check=True, timeout=300,
        )  # fmt: skip
        self._start(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={self._mysql}",
            "--skip-networking", f"--pid-file={data}/pid", "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
        )  # fmt: skip
        client = ("mariadb", "--no-defaults", f"--socket={self._mysql}", "--user=root")
        until(lambda: self._answers(*client, "--execute=create database if not exists slurm"))
        configuration = self._own / "slurmdbd.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(
            "\n".join(
                [
                    "DbdHost=localhost",
                    "DbdAddr=127.0.0.1",
                    f"DbdPort={self._ports[1]}",
                    "SlurmUser=root",
                    "AuthType=auth/munge",
                    f"AuthInfo=socket={self._munge}",
                    f"PidFile={self._own}/slurmdbd.pid",
                    f"LogFile={self._own}/log/slurmdbd.log",
                    "StorageType=accounting_storage/mysql",
                    "StorageHost=localhost",
                    "StorageUser=root",
                    "StorageLoc=slurm",
                    "",
                ]
            )
        )
        self._write_configuration()
        self._start("slurmdbd", "slurmdbd", "-D", environ={"MYSQL_UNIX_PORT": str(self._mysql)})
        manager = ("sacctmgr", "--immediate")
        until(lambda: self._answers("sacctmgr", "--noheader", "show", "cluster"))
        self.run(*manager, "add", "cluster", self.name)
        self.run(*manager, "add", "account", ACCOUNT, "Description=tests", "Organization=tests")
        self.run(*manager, "add", "qos", "spare,urgent")
        self.run(*manager, "add", "user", "root", f"Account={ACCOUNT}")
        self.run(*manager, "modify", "user", "root", "set", "qos=normal,spare,urgent")

    def _write_configuration(self) -> None:
        options = self.options
        everything = f"n[1-{options.nodes}]"
        host = socket.gethostname()
        first, *_, last = self._ports[2:] if options.nodes > 1 else self._ports[2:] * 2
        lines = [
            f"ClusterName={self.name}",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={self._ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self._munge}",
            f"StateSaveLocation={self._own}/state",
            f"SlurmdSpoolDir={self._own}/spool/%n",
            f"SlurmctldPidFile={self._own}/slurmctld.pid",
            f"SlurmdPidFile={self._own}/slurmd-%n.pid",
            f"SlurmctldLogFile={self._own}/log/slurmctld.log",
            f"SlurmdLogFile={self._own}/log/%n.log",
            *self._process_lines(),
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "ReturnToService=1",
            "MpiDefault=none",
            "SlurmctldTimeout=5",
            f"FirstJobId={100 * self._block + 1}",
            f"KillWait={options.kill_wait}",
            f"MinJobAge={options.min_job_age}",
            f"SlurmdTimeout={options.slurmd_timeout}",
            *self._accounting_lines(),
            *options.settings,
            *self._gpu_lines(),
            f"NodeName={everything} NodeHostname={host} NodeAddr=127.{self._block + 1}.0.[11-{10 + options.nodes}] "
            f"Port=[{first}-{last}] CPUs={options.cpus} RealMemory={options.memory_mb}"
            + (f" Gres=gpu:{options.gpus}" if options.gpus else ""),
            f"PartitionName=main Nodes={everything} Default=YES PriorityTier=10 PreemptMode=OFF",
            f"PartitionName=spare Nodes={everything} PriorityTier=1 GraceTime={options.grace_time}",
            f"PartitionName=spare-now Nodes={everything} PriorityTier=1",
            f"PartitionName=short Nodes={everything} PriorityTier=10 PreemptMode=OFF MaxTime={options.short_minutes}",
        ]
        self._config.write_text("\n".join([*lines, ""]))

    def _process_lines(self) -> list[str]:
        if not self.options.memory_limits:
            return [
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "SelectTypeParameters=CR_Core",
            ]
        (self._own / "cgroup.conf").write_text("ConstrainRAMSpace=yes\nConstrainSwapSpace=no\n")
        return [
            "ProctrackType=proctrack/cgroup",
            "TaskPlugin=task/cgroup",
            "SelectTypeParameters=CR_Core_Memory",
        ]

    def _accounting_lines(self) -> list[str]:
        if not self.options.accounting:
            return ["AccountingStorageType=accounting_storage/none"]
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={self._ports[1]}",
            f"AccountingStoragePass={self._munge}",
            "AccountingStoreFlags=job_comment",
            "AccountingStorageEnforce=associations,limits,qos",
        ]

    def _gpu_lines(self) -> list[str]:
        gpus = range(self.options.gpus)
        lines = []
        for node in self.nodes:
            for gpu in gpus:
                (self._own / "gpu" / f"{node}-{gpu}").touch()
                lines.append(f"NodeName={node} Name=gpu File={self._own}/gpu/{node}-{gpu}")
        (self._own / "gres.conf").write_text("\n".join([*lines, ""]))
        return ["GresTypes=gpu"] if lines else []


def _processes(belongs: _Belongs) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        # It has ended.
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and belongs(process)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def _with_children(belongs: _Belongs) -> set[psutil.Process]:
    """Return processes and all their children: a container's have nothing of Slurm in their environment."""
    found = set(_processes(belongs))
    for process in tuple(found):
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return found


def _free_ports(count: int) -> tuple[int, list[int]]:
    """Return a number from 0 to 89 and free ports after 10000 + 100 times this number.

    They are below the kernel's ports for connections, and below those of jobs.
    """
    blocks = list(range(90))
    random.shuffle(blocks)
    for block in blocks:
        ports = list(range(10_000 + 100 * block, 10_000 + 100 * block + count))
        if all(map(_is_free, ports)):
            return block, ports
    raise RuntimeError(f"there are no {count} free ports in a row between 10000 and 19000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def main() -> None:
    """Run a cluster until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description="Run a Slurm cluster on this machine until Ctrl-C."
    )
    parser.add_argument("folder", type=Path)
    for field in dataclasses.fields(Options):
        option = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            parser.add_argument(option, action="store_true")
        elif field.name == "settings":
            parser.add_argument("--setting", dest="settings", action="append", default=[])
        else:
            parser.add_argument(option, type=int, default=field.default)
    given = vars(parser.parse_args())
    given["settings"] = tuple(given["settings"])
    reason = missing(accounting=given["accounting"])
    if reason is not None:
        parser.exit(2, f"{reason}\n")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), cluster(**given) as slurm:
        print(f"export {_CONFIG_VARIABLE}={slurm.environ[_CONFIG_VARIABLE]}")
        print(
            f"# shared folder: {slurm.folder}; nodes: {' '.join(slurm.nodes)}; Ctrl-C ends it",
            flush=True,
        )
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
