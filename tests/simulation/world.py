"""A world in one process whose clock, chance, network and deaths of processes come from a seed.

An actor is a program of the product: a submit, a follow, a controller. It runs in a thread of its own, but only one
actor runs at a time: it hands over when it sleeps and when it sends a request to AWS. Who goes on is drawn from the
seed, so a failure happens again with the same seed. Nothing of the product is replaced: only the clock, chance,
threads, locks of files, process ids, and botocore's HTTP send.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import IO, Any

import pytest
from botocore.httpsession import URLLib3Session

BEGIN = 1_780_000_000.0
"""Time at the start of every world, in seconds since the epoch."""
LIMIT_SECONDS = 30 * 86_400.0
"""How long the actors of a world may take."""
_WAIT_SECONDS = 5.0
"""How often a thread that waits for another one looks."""
_start_thread = threading.Thread.start
_FIRST_PID = 100_000_000
"""Above every real process id."""


class Killed(BaseException):
    """Ends the thread of an actor whose process was killed, or whose world has ended."""


class StuckError(AssertionError):
    """The actors do not end."""


@dataclass
class Actor:
    """A program.

    Attributes:
        name: Its name in the trace.
        run: What it does.
        wakes: Time at which it goes on.
        result: What it returned.
        error: What it raised.
        state: `alive`, `ended`, or `killed`.
        process: The actor whose thread it is; itself for the main thread of a process.
        pid: Its process id.
        locked: The files that its process has locked.
    """

    name: str
    run: Callable[[], Any]
    wakes: float
    result: Any = None
    error: BaseException | None = None
    state: str = "alive"
    pid: int = 0
    locked: list[IO[Any]] = field(default_factory=list)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    process: Actor = field(init=False)

    def __post_init__(self) -> None:
        self.process = self


class World:
    """Actors, a clock and a network.

    Args:
        seed: Decides everything.
        network: Answers a request, or raises what botocore raises. It is called with the actor's name.
        deaths: How many times an actor's process is killed, at most.
    """

    def __init__(
        self, seed: int, network: Callable[[Any], Any] | None = None, deaths: int = 0
    ) -> None:
        self.seed = seed
        self.chance = random.Random(seed)  # noqa: S311 (a simulation)
        self.now = BEGIN
        self.trace: list[str] = []
        self.actors: list[Actor] = []
        self.network = network
        self._deaths_left = deaths
        self._handed_over = threading.Semaphore(0)
        self._threads: dict[int, Actor] = {}
        self._starting = threading.local()
        self._is_over = False

    # ---------------------------------------------------------------- for tests

    def start(self, name: str, run: Callable[[], Any], after: float = 0.0) -> Actor:
        """Start a program after some seconds."""
        actor = Actor(name, run, self.now + after, pid=_FIRST_PID + len(self.actors))
        self.actors.append(actor)
        self._start(threading.Thread(target=self._live, args=(actor,), daemon=True))
        return actor

    def run(self, on_death: Callable[[Actor], None] = lambda actor: None) -> None:
        """Run until no actor is alive.

        Args:
            on_death: Called for each actor whose process was killed; it may start another one.

        Raises:
            StuckError: They do not end.
        """
        with self._patches():
            while alive := [actor for actor in self.actors if actor.state == "alive"]:
                self.now = max(self.now, min(actor.wakes for actor in alive))
                if self.now - BEGIN > LIMIT_SECONDS:
                    raise StuckError(
                        f"seed {self.seed}: {[actor.name for actor in alive]} do not end"
                    )
                actor = self.chance.choice([each for each in alive if each.wakes <= self.now])
                if self._dies():
                    self._kill(actor.process)
                    on_death(actor.process)
                    continue
                self._give_turn(actor)
            self._end()

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now - BEGIN:12.3f}  {text}")

    # ---------------------------------------------------------------- in actors

    def sleep(self, seconds: float) -> None:
        """Hand over; go on after some seconds."""
        actor = self._current()
        if self._is_over:
            raise Killed
        actor.wakes = self.now + max(0.0, seconds)
        self._handed_over.release()
        actor.turn.acquire()
        if self._is_over:
            raise Killed

    def is_inside(self) -> bool:
        """Return whether the current thread is an actor of this world."""
        return threading.get_ident() in self._threads

    # ---------------------------------------------------------------- turns

    def _live(self, actor: Actor) -> None:
        self._threads[threading.get_ident()] = actor
        actor.turn.acquire()
        try:
            if not self._is_over:
                actor.result = actor.run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            actor.error = error
        if actor.state == "alive":
            actor.state = "ended"
        del self._threads[threading.get_ident()]
        self._handed_over.release()

    def _give_turn(self, actor: Actor) -> None:
        actor.turn.release()
        self._handed_over.acquire()

    def _kill(self, process: Actor) -> None:
        """End all threads of a process. The kernel unlocks its files."""
        for actor in self.actors:
            if actor.process is process and actor.state == "alive":
                actor.state = "killed"
        for file in process.locked:
            if not file.closed:
                fcntl.flock(file, fcntl.LOCK_UN)
        self.note(f"{process.name} is killed")

    def _dies(self) -> bool:
        if self._deaths_left == 0 or self.chance.random() > 0.05:
            return False
        self._deaths_left -= 1
        return True

    def _end(self) -> None:
        """End the threads of killed actors, which no one looks at any more."""
        self._is_over = True
        for actor in self.actors:
            if actor.state == "killed":
                self._give_turn(actor)

    @contextlib.contextmanager
    def _patches(self) -> Iterator[None]:
        """Replace clock, chance and network for actors; every other thread keeps the real ones."""
        patch = pytest.MonkeyPatch()
        real = time.time, time.monotonic, time.sleep, URLLib3Session.send

        def sleep(seconds: float) -> None:
            if self.is_inside():
                self.sleep(seconds)
            else:
                real[2](seconds)

        patch.setattr(time, "time", lambda: self.now if self.is_inside() else real[0]())
        patch.setattr(time, "monotonic", lambda: self.now if self.is_inside() else real[1]())
        patch.setattr(time, "sleep", sleep)
        patch.setattr(secrets, "token_hex", lambda count=32: self.chance.randbytes(count).hex())
        patch.setattr(secrets, "token_bytes", lambda count=32: self.chance.randbytes(count))
        patch.setattr(URLLib3Session, "send", lambda session, request: self._send(request))
        self._patch_threads(patch)
        self._patch_waits(patch)
        self._patch_processes(patch)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("cloudtrain"):
                for name, value in list(vars(module).items()):
                    if value is datetime:
                        patch.setattr(module, name, _datetime_of(self))
        random.seed(self.seed)
        try:
            yield
        finally:
            patch.undo()

    def _start(self, thread: threading.Thread) -> None:
        """Start a thread. That waits for the operating system, which needs no turn."""
        self._starting.now = True
        _start_thread(thread)
        self._starting.now = False

    def _patch_threads(self, patch: pytest.MonkeyPatch) -> None:
        """Make threads that an actor starts actors of the same process."""
        join = threading.Thread.join
        actors: dict[threading.Thread, Actor] = {}

        def start_actor(thread: threading.Thread) -> None:
            if self.is_inside():
                process = self._current().process
                actor = Actor(f"a thread of {process.name}", thread.run, self.now, pid=process.pid)
                actor.process = process
                actors[thread] = actor
                self.actors.append(actor)
                thread.run = lambda: self._live(actor)  # type: ignore[method-assign]
            self._start(thread)

        def join_actor(thread: threading.Thread, timeout: float | None = None) -> None:
            if not self.is_inside() or thread not in actors:
                join(thread, timeout)
                return
            while actors[thread].state == "alive" and not self._is_over:
                self.sleep(_WAIT_SECONDS)

        patch.setattr(threading.Thread, "start", start_actor)
        patch.setattr(threading.Thread, "join", join_actor)

    def _patch_waits(self, patch: pytest.MonkeyPatch) -> None:
        """Hand over while an actor waits for another thread."""
        wait, result = threading.Event.wait, Future.result

        def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
            if not self.is_inside() or getattr(self._starting, "now", False):
                return wait(event, timeout)
            end = self.now + (LIMIT_SECONDS if timeout is None else timeout)
            while not event.is_set() and self.now < end:
                self.sleep(min(_WAIT_SECONDS, end - self.now))
            return event.is_set()

        def result_of(future: Future[Any], timeout: float | None = None) -> Any:
            while self.is_inside() and not future.done():
                self.sleep(_WAIT_SECONDS)
            return result(future, timeout)

        patch.setattr(threading.Event, "wait", wait_for)
        patch.setattr(Future, "result", result_of)

    def _patch_processes(self, patch: pytest.MonkeyPatch) -> None:
        """Give actors process ids, and remember which files they lock."""
        lock, kill, own = fcntl.flock, os.kill, os.getpid

        def lock_file(file: Any, operation: int) -> None:
            lock(file, operation)
            if self.is_inside() and operation & fcntl.LOCK_EX:
                self._current().process.locked.append(file)

        def send_signal(pid: int, number: int) -> None:
            if pid < _FIRST_PID:
                kill(pid, number)
            elif not any(each.pid == pid and each.state == "alive" for each in self.actors):
                raise ProcessLookupError

        patch.setattr(fcntl, "flock", lock_file)
        patch.setattr(os, "kill", send_signal)
        patch.setattr(os, "getpid", lambda: self._current().pid if self.is_inside() else own())

    def _current(self) -> Actor:
        return self._threads[threading.get_ident()]

    def _send(self, request: Any) -> Any:
        assert self.network is not None, f"a request without a network: {request.url}"
        return self.network(request)


def _datetime_of(world: World) -> type[datetime]:
    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, datetime)

    class Simulated(datetime, metaclass=Kind):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(world.now, tz)

    return Simulated
