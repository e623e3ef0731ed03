"""The network between the actors of a world and an account: delays, lost requests, lost responses, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

from simulation.services import Account, error, read_request
from simulation.world import World

_LONGEST_OUTAGE = 1800.0


@dataclass(frozen=True)
class Faults:
    """How often a request meets a fault, each from 0 to 1.

    Attributes:
        lost: The request does not arrive.
        unanswered: It takes effect, and the response is lost.
        refused: AWS refuses it for a while: SlowDown, throttling, an internal error.
        outage: No request arrives for up to half an hour after a response that was lost.
        late: Its response is up to 50 s old when it arrives.
    """

    lost: float = 0.0
    unanswered: float = 0.0
    refused: float = 0.0
    outage: float = 0.0
    late: float = 0.0


class Network:
    """Carries the requests of a world to an account.

    Args:
        world: The world.
        account: The account.
        faults: What single requests meet.
        outages: Begin and end of each time in which no request arrives.
    """

    def __init__(
        self,
        world: World,
        account: Account,
        faults: Faults = Faults(),
        outages: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._world, self._account, self.faults = world, account, faults
        self._outages = list(outages)
        world.network = self._carry

    def _carry(self, sent: Any) -> Any:
        world, chance = self._world, self._world.chance
        request = read_request(sent)
        what = f"{request.service} {request.operation} {request.key.rpartition('/')[2]}"
        world.sleep(chance.uniform(0.005, 0.3))
        is_down = any(begin <= world.now < end for begin, end in self._outages)
        if is_down or chance.random() < self.faults.lost:
            world.note(f"{what}: lost")
            world.sleep(10)
            raise ConnectTimeoutError(endpoint_url=sent.url)
        if chance.random() < self.faults.refused:
            code, status = (
                ("SlowDown", 503) if request.service == "s3" else ("ThrottlingException", 400)
            )
            world.note(f"{what}: {code}")
            return error(code, status, request).to_botocore(sent.url)
        answer = self._account.answer(request)
        world.note(f"{what}: {answer.status}")
        world.sleep(chance.uniform(0.005, 0.3))
        if chance.random() < self.faults.unanswered:
            world.note(f"{what}: its response is lost")
            if chance.random() < self.faults.outage:
                self._outages.append((world.now, world.now + chance.uniform(60, _LONGEST_OUTAGE)))
            world.sleep(60)
            raise ReadTimeoutError(endpoint_url=sent.url)
        if chance.random() < self.faults.late:
            world.sleep(chance.uniform(5, 50))
        return answer.to_botocore(sent.url)
