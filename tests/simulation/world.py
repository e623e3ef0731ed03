"""A world in one process whose clock, chance, network and deaths of processes come from a seed.

An actor is a program of the product: a submit, a follow, a controller. It runs in a thread of its own, but only one
actor runs at a time: it hands over when it sleeps and when it sends a request to AWS. Who goes on is drawn from the
seed, so a failure happens again with the same seed. Nothing of the product is replaced: only the clock, chance, and
botocore's HTTP send.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import Any

import pytest
from botocore.httpsession import URLLib3Session

BEGIN = 1_780_000_000.0
"""Time at the start of every world, in seconds since the epoch."""
LIMIT_SECONDS = 30 * 86_400.0
"""How long the actors of a world may take."""


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
    """

    name: str
    run: Callable[[], Any]
    wakes: float
    result: Any = None
    error: BaseException | None = None
    state: str = "alive"
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


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
        self._is_over = False

    # ---------------------------------------------------------------- for tests

    def start(self, name: str, run: Callable[[], Any], after: float = 0.0) -> Actor:
        """Start a program after some seconds."""
        actor = Actor(name, run, self.now + after)
        self.actors.append(actor)
        thread = threading.Thread(target=self._live, args=(actor,), daemon=True)
        thread.start()
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
                    actor.state = "killed"
                    self.note(f"{actor.name} is killed")
                    on_death(actor)
                    continue
                self._give_turn(actor)
            self._end()

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now - BEGIN:12.3f}  {text}")

    # ---------------------------------------------------------------- in actors

    def sleep(self, seconds: float) -> None:
        """Hand over; go on after some seconds."""
        actor = self._threads[threading.get_ident()]
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
