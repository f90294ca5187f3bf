"""What a running server has open, for forked children to let go of."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    import socket

    from aiohttp import web


@final
class ServedSockets:
    """The listening socket and the connections that came through it."""

    def __init__(self, listening: socket.socket, server: web.Server) -> None:
        self._listening = listening
        self._server = server

    def descriptors(self) -> list[int]:
        """See `transports.forked.Owner`."""
        transports = [connection.transport for connection in self._server.connections]
        found = [t.get_extra_info("socket") for t in transports if t is not None]
        return [sock.fileno() for sock in (self._listening, *found) if sock is not None]
