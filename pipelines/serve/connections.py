"""Connections: how many there may be, how long one may say or read nothing, and clients that close their half or all of one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections import Counter
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from castiron.pipelines.progress import say

# Connections at once, where the process may have the descriptors.
CONNECTIONS = 1000
# Descriptors that are left to files, sockets of the loop and libraries.
RESERVED = 56
# From a connection's begin, or the first byte of its next request, to the end of that request's headers.
HEADER_SECONDS = 10.0
# How long what is written for a client may wait for it to read, and after how long its connection gives way to a new one.
STALLED_SECONDS, GIVES_WAY_SECONDS = 60.0, 5.0
# How soon it is asked again whether a client that will send no more still reads.
PROBES = (0.01, 0.05, 0.2, 1.0)


class Connection(H11Protocol):
    """One client's connection, over which requests come one after another."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.half_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._expect_headers()

    @property
    def unanswered(self) -> bool:
        """Whether a request is here that has not been answered to its end."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def incomplete(self) -> bool:
        """Whether nothing is being done for it: it is idle, a request is still on its way, or its client does not read."""
        waits = self._stalled is not None and self._stalled.when() - self.loop.time() < STALLED_SECONDS - GIVES_WAY_SECONDS
        return waits or not self.unanswered or self.cycle.more_body and not self.cycle.response_started

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.unanswered:
            self._stop_timer()
        elif self._timer is None:
            self._expect_headers()

    def _expect_headers(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.end)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.end)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read()

    def _read(self) -> None:
        if self._stalled:
            self._stalled.cancel()
            self._stalled = None

    def end(self) -> None:
        """Closes it, whatever it is doing."""
        if not self.transport.is_closing():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._read()
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        """Keeps a connection whose client has only closed its own half and waits for an answer.

        One that is gone looks the same, until what is sent to it is refused: so the interim answer is sent that HTTP/1.1
        has for any client at any time, 100 Continue.
        """
        waits = self.unanswered and not self.cycle.more_body and self.scope["http_version"] == "1.1"
        if waits:
            self.half_closed, self.cycle.keep_alive = True, False
            self._probe(0)
        return waits

    def _probe(self, count: int) -> None:
        if self.unanswered and not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])))
            self.loop.call_later(PROBES[min(count, len(PROBES) - 1)], self._probe, count + 1)


class Acceptor:
    """Takes connections from a listening socket, `most` at once.

    Beyond these the one that has been incomplete longest is closed, of the client that has most of such; while all are
    being answered, new ones wait with the system.
    """

    def __init__(self, listening: socket.socket, make: Callable[[], Connection], connections: set, most: int):
        self.listening, self.make, self.connections, self.most = listening, make, connections, most
        # In the order in which they came.
        self._order: dict[Connection, None] = {}
        self._said = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.listening.setblocking(False)
        while True:
            while not self._room():
                await asyncio.sleep(0.05)
            try:
                accepted, _ = await loop.sock_accept(self.listening)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED):
                    raise
                self._give_up_one()
                await asyncio.sleep(0.05)
                continue
            # The client may have gone already.
            with contextlib.suppress(OSError):
                _, connection = await loop.connect_accepted_socket(self.make, accepted)
                self._order[connection] = None

    def _room(self) -> bool:
        for gone in self._order.keys() - self.connections:
            del self._order[gone]
        return len(self._order) < self.most or self._give_up_one()

    def _give_up_one(self) -> bool:
        """Closes one connection for which nothing is being done; False if there is none."""
        incomplete = [connection for connection in self._order if connection.incomplete]
        if not incomplete:
            return False
        if not self._said:
            self._said = True
            say(f"{self.most} connections are open: of those that ask for nothing the oldest are closed for new ones")
        held = Counter(_address(connection) for connection in incomplete)
        oldest = max(incomplete, key=lambda connection: held[_address(connection)])
        del self._order[oldest]
        oldest.end()
        return True


def _address(connection: Connection) -> str:
    return connection.client[0] if connection.client else ""


def most_connections() -> int:
    """How many connections this process may have; takes as many descriptors as that needs and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(CONNECTIONS, soft - RESERVED))
