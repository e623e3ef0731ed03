"""Messages between a server and its replicas, through a pair of sockets that only these processes have."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, cast

_HEAD: Final = struct.Struct("!QHIII")
"""Number, status, and the lengths of the parts that follow."""


class Message(NamedTuple):
    """A request to a replica, or its answer.

    Attributes:
        number: Number of the request, which its answer has, too.
        status: HTTP status of an answer.
        kind: Type of the content.
        accept: Types that the client of a request accepts.
        body: The content.
    """

    number: int
    status: int = 0
    kind: str = ""
    accept: str = ""
    body: bytes = b""


READY: Final = Message(0)
"""What a replica sends first: the model is loaded."""


class Channel(asyncio.Protocol):
    """One end of the connection; `open_channel` opens it.

    Args:
        on_message: Called with each message.
        on_end: Called when the other process has ended, or closed its end.
    """

    def __init__(self, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def send(self, message: Message) -> None:
        """Send a message. It is lost if the other process has ended."""
        kind = message.kind.encode()
        accept = message.accept.encode()
        head = _HEAD.pack(message.number, message.status, len(kind), len(accept), len(message.body))
        if self._transport is not None:
            self._transport.write(b"".join((head, kind, accept, message.body)))

    def close(self) -> None:
        """Close this end after what was sent."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Give each message that has arrived."""
        self._received += data
        while (message := self._next_message()) is not None:
            self._on_message(message)

    def connection_lost(self, _: Exception | None) -> None:
        """Report the end."""
        self._on_end()

    def _next_message(self) -> Message | None:
        """Take a message that has arrived, or return None."""
        received = self._received
        if len(received) < _HEAD.size:
            return None
        number, status, *sizes = _HEAD.unpack_from(received)
        end = _HEAD.size + sum(sizes)
        if len(received) < end:
            return None
        accept_start = _HEAD.size + sizes[0]
        body_start = accept_start + sizes[1]
        message = Message(
            number=number,
            status=status,
            kind=received[_HEAD.size : accept_start].decode(),
            accept=received[accept_start:body_start].decode(),
            body=bytes(received[body_start:end]),
        )
        del received[:end]
        return message


async def open_channel(
    end: socket.socket, on_message: Callable[[Message], None], on_end: Callable[[], None]
) -> Channel:
    """Return a channel on one end of a pair of sockets.

    Args:
        end: The end of this process.
        on_message: Called with each message.
        on_end: Called when the other process has ended, or closed its end.
    """
    loop = asyncio.get_running_loop()
    _, channel = await loop.create_connection(lambda: Channel(on_message, on_end), sock=end)
    return channel
