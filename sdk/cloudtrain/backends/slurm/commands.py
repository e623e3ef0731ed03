"""`Slurm`: Slurm's commands on this machine, and what their errors mean."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cloudtrain.backends.slurm.rejections import (
    explain_failure,
    find_exceeded_limit,
    is_about_busy_nodes,
    is_about_unknown_job,
    is_timeout,
    reject_options,
)
from cloudtrain.backends.slurm.slurm_output import (
    FIELD,
    HISTORY_FIELDS,
    QUEUE_FORMAT,
    Node,
    Partition,
    SlurmJob,
    parse_config,
    parse_expected_start,
    parse_history,
    parse_job,
    parse_nodes,
    parse_partitions,
    parse_queue,
)
from cloudtrain.errors import CloudError, CloudtrainError, UnreachableError, UserError
from cloudtrain.planning.batch_job import BatchJob

TIMEOUT_SECONDS = 30.0
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
_NO_NODES = "node configuration is not available"
_OUT_OF_SERVICE = "down,drain,fail,maint,no_respond,unknown"
_LONG_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


@dataclass(frozen=True)
class _Done:
    code: int
    out: str
    err: str


class Slurm:
    """Slurm's commands, as the user of this process.

    Each method raises:
        UserError: A command is missing, because this is not a login node.
        UnreachableError: Slurm's controller does not answer: the same call may succeed later.
        CloudError: Slurm refused for another reason.

    Args:
        environ: Environment of the commands; by default that of this process.
        timeout_seconds: Longest time of a command.
        attempts: How often a command is tried that changes nothing.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        attempts: int = _ATTEMPTS,
    ) -> None:
        given = os.environ if environ is None else environ
        self._environ = _without_defaults(given)
        self._timeout_seconds = timeout_seconds
        self._attempts = attempts

    # Submit

    def submit(self, job: BatchJob) -> str:
        """Submit a job with its script on standard input; return Slurm's id.

        An answer that is lost does not lead to a second job: a job of this name is looked up before another attempt.

        Raises:
            UserError: Slurm refused an option. The message names where the option comes from.
        """
        command = ["sbatch", *job.arguments]
        for _ in range(_ATTEMPTS):
            done = self._try(command, job.script, environ=self._environ)
            if done is not None and done.code == 0:
                # On a cluster of a federation, its name follows.
                return done.out.strip().partition(";")[0]
            if done is not None and not is_timeout(done.err):
                raise reject_options(done.err, job, self)
            found = self._find_submitted(job)
            if found is not None:
                return found
        raise self._no_answer(command)

    def _find_submitted(self, job: BatchJob) -> str | None:
        name = next((each.value for each in job.options if each.name == "--job-name"), None)
        if name is None:
            return None
        return next((each.id for each in self.jobs(name=name)), None)

    def test(self, job: BatchJob) -> datetime | None:
        """Check a job's options without a submit; return when Slurm expects to start it, or None.

        Raises:
            UserError: Slurm would refuse an option, or never start the job. The message names where the option
                comes from.
        """
        exceeded = find_exceeded_limit(job, self.partitions())
        if exceeded is not None:
            raise exceeded
        done = self._ask(["sbatch", "--test-only", *job.arguments], job.script)
        if done.code == 0:
            return parse_expected_start(done.err)
        # The test counts nodes in service only, as during maintenance; sbatch queues a job that others can run.
        if _NO_NODES in done.err and self._has_nodes_out_of_service():
            return None
        raise reject_options(done.err, job, self)

    def _has_nodes_out_of_service(self) -> bool:
        command = ["sinfo", "--noheader", f"--states={_OUT_OF_SERVICE}", "--format=%D"]
        return any(int(count) for count in self._read(command).split())

    def run_step(self, arguments: Sequence[str], *, wait_seconds: int) -> str | None:
        """Run a short command on free nodes with srun; return its output, or None if no nodes are free in time.

        Args:
            arguments: Options of srun, and the command.
            wait_seconds: How long it may wait for nodes.
        """
        command = ["srun", f"--immediate={wait_seconds}", *arguments]
        limit = wait_seconds + 2 * self._timeout_seconds
        # Inside an allocation, srun would start the command there.
        environ = {
            name: text
            for name, text in self._environ.items()
            if not name.startswith("SLURM_") or name == "SLURM_CONF"
        }
        done = self._try(command, "", environ=environ, timeout_seconds=limit)
        if done is None or (done.code != 0 and is_about_busy_nodes(done.err)):
            return None
        if done.code != 0:
            raise explain_failure("srun", done.err)
        return done.out

    # Jobs

    def jobs(self, ids: Iterable[str] | None = None, *, name: str = "") -> tuple[SlurmJob, ...]:
        """Return jobs that Slurm knows: those with these ids, or all of this user's that have this name.

        Slurm forgets a job some minutes after its end.
        """
        command = ["squeue", "--noheader", "--states=all", f"--format={QUEUE_FORMAT}"]
        if ids is None:
            command.append("--me")
        else:
            wanted = ",".join(ids)
            if not wanted:
                return ()
            command.append(f"--jobs={wanted}")
        if name:
            command.append(f"--name={name}")
        done = self._ask(command)
        if done.code != 0:
            if is_about_unknown_job(done.err):
                return ()
            raise explain_failure("squeue", done.err)
        return parse_queue(done.out)

    def job(self, job: str) -> SlurmJob | None:
        """Return a job with its exit code, or None if Slurm has forgotten it."""
        done = self._ask(["scontrol", "show", "job", job])
        if done.code != 0:
            if is_about_unknown_job(done.err):
                return None
            raise explain_failure("scontrol", done.err)
        return parse_job(done.out)

    def job_state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING; COMPLETING as long as it ends; empty if Slurm has forgotten it."""
        found = self.job(job)
        if found is None:
            return ""
        return "COMPLETING" if "COMPLETING" in found.flags else found.state

    def history(self, job: str) -> SlurmJob | None:
        """Return a job as accounting has recorded it; None without accounting, or if it does not know the job."""
        command = [
            "sacct",
            "--noheader",
            "--parsable2",
            f"--delimiter={FIELD}",
            "--allocations",
            f"--jobs={job}",
            f"--format={','.join(HISTORY_FIELDS)}",
        ]
        try:
            done = self._ask(command)
        except CloudtrainError:
            # Many clusters have no accounting; nothing requires it.
            return None
        return parse_history(done.out) if done.code == 0 else None

    def cancel(self, job: str) -> None:
        """Cancel a job: Slurm sends SIGTERM to all of its processes, and SIGKILL later. One that has ended stays as it is."""
        self._order(["scancel", job])

    def signal(self, job: str, signal: str = "USR1") -> None:
        """Send a signal to the batch step of a job, and to no other process. One that has ended gets none."""
        self._order(["scancel", "--batch", f"--signal={signal}", job])

    def requeue(self, job: str) -> None:
        """Let Slurm end a running job and start it again later under the same id.

        A cancelled job that has not ended yet would be started again, too: look at its state before.
        """
        done = self._ask(["scontrol", "requeue", job])
        if done.code != 0:
            raise explain_failure("scontrol requeue", done.err)

    def exclude(self, job: str, nodes: str) -> None:
        """Let a job that waits get none of some nodes.

        Args:
            job: Its id.
            nodes: All nodes that it must not get, in Slurm's notation.
        """
        done = self._ask(["scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}"])
        if done.code != 0:
            raise explain_failure("scontrol update", done.err)

    def _order(self, command: Sequence[str]) -> None:
        done = self._ask(command)
        if done.code != 0 and not is_about_unknown_job(done.err):
            raise explain_failure(command[0], done.err)

    # The cluster

    def version(self) -> str:
        """Return Slurm's version, such as 22.05.8."""
        return self._read(["sbatch", "--version"]).split()[-1]

    def options(self) -> tuple[str, ...]:
        """Return the long options of sbatch."""
        return tuple(sorted(set(_LONG_OPTION.findall(self._read(["sbatch", "--help"])))))

    def config(self) -> Mapping[str, str]:
        """Return the controller's configuration by name, such as KillWait."""
        return parse_config(self._read(["scontrol", "show", "config"]))

    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions that this user can see."""
        return parse_partitions(self._read(["scontrol", "show", "partition", "--oneliner"]))

    def nodes(self, names: str = "") -> tuple[Node, ...]:
        """Return nodes.

        Args:
            names: Names in Slurm's notation, such as `n[1-4]`; by default all nodes.
        """
        selected = [names] if names else []
        return parse_nodes(self._read(["scontrol", "show", "node", *selected, "--oneliner"]))

    def addresses(self, names: str) -> dict[str, str]:
        """Return the addresses of nodes in Slurm's notation, by the nodes' names."""
        return {each.name: each.address for each in self.nodes(names)}

    def down_nodes(self, names: str) -> tuple[str, ...]:
        """Return those of these nodes that Slurm regards as lost."""
        return tuple(each.name for each in self.nodes(names) if each.is_down)

    def features(self) -> tuple[str, ...]:
        """Return the features of nodes, which --constraint selects."""
        lines = self._read(["sinfo", "--noheader", "--format=%f"]).split()
        found = {feature for line in lines for feature in line.split(",")}
        return tuple(sorted(found - {"(null)"}))

    def reservations(self) -> tuple[str, ...]:
        """Return the reservations."""
        words = self._read(["scontrol", "show", "reservation", "--oneliner"]).split()
        names = (word.partition("=") for word in words)
        return tuple(value for name, _, value in names if name == "ReservationName")

    def accounts(self) -> tuple[str, ...] | None:
        """Return the accounts that this user may charge; None without accounting."""
        user = pwd.getpwuid(os.getuid()).pw_name
        return self._manager(["show", "associations", f"user={user}", "format=Account"])

    def qualities(self) -> tuple[str, ...] | None:
        """Return the names of all qualities of service; None without accounting."""
        return self._manager(["show", "qos", "format=Name"])

    def _manager(self, words: Sequence[str]) -> tuple[str, ...] | None:
        try:
            done = self._ask(["sacctmgr", "--noheader", "--parsable2", *words])
        except CloudtrainError:
            return None
        if done.code != 0:
            return None
        return tuple(dict.fromkeys(done.out.split()))

    # Commands

    def _read(self, command: Sequence[str]) -> str:
        """Return the output of a command that changes nothing."""
        done = self._ask(command)
        if done.code != 0:
            raise explain_failure(command[0], done.err)
        return done.out

    def _ask(self, command: Sequence[str], script: str = "") -> _Done:
        """Run a command that may run twice, and again if the controller is busy. Times are printed in UTC."""
        environ = {**self._environ, "TZ": "UTC"}
        for attempt in range(self._attempts):
            done = self._try(command, script, environ=environ)
            if done is not None and not (done.code and is_timeout(done.err)):
                return done
            if attempt < self._attempts - 1:
                time.sleep(_PAUSE_SECONDS * 2**attempt)
        raise self._no_answer(command)

    def _try(
        self,
        command: Sequence[str],
        script: str,
        *,
        environ: Mapping[str, str],
        timeout_seconds: float | None = None,
    ) -> _Done | None:
        """Run a command once; return None if it does not end in time."""
        file = environ.get("SLURM_CONF")
        if file and not Path(file).exists():
            # Slurm's commands would wait a minute for it.
            raise UserError(
                f"SLURM_CONF is {file}, and there is no such file",
                "set it to the cluster's slurm.conf, or unset it",
            )
        try:
            done = subprocess.run(
                command,
                input=script,
                env=environ,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                check=False,
                timeout=timeout_seconds or self._timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            return None
        except FileNotFoundError:
            raise UserError(
                f"{command[0]} is not on PATH, so this is not a login node of a Slurm cluster",
                "run cloudtrain on a login node, or load Slurm first, for example: module load slurm",
            ) from None
        except OSError as error:
            raise CloudError(f"{command[0]} cannot be started: {error.strerror}") from None
        return _Done(done.returncode, done.stdout, done.stderr)

    def _no_answer(self, command: Sequence[str]) -> UnreachableError:
        times = "" if self._attempts == 1 else f"{self._attempts} attempts of "
        return UnreachableError(
            f"{command[0]}: Slurm's controller does not answer: nothing in {times}{self._timeout_seconds:.0f} s",
            "try again; if it lasts, ask the cluster's administrators: scontrol ping",
        )


def _without_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without variables that add options to Slurm's commands or change their output."""
    prefixes = ("SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_", "SCONTROL_")
    kept = {name: text for name, text in environ.items() if not name.startswith(prefixes)}
    for name in ("SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_CLUSTERS"):
        kept.pop(name, None)
    return kept
