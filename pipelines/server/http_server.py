"""The server process: its socket, its connections, and its shutdown on a signal."""

import asyncio
import os
import signal
import socket

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.served_models import ModelPool
from castiron.pipelines.terminal import print_message

# Seconds after which a connection ends whose client does not acknowledge or read what the server sends.
UNREAD_SECONDS = 60
# Seconds that aborted requests have to send their last bytes.
LAST_BYTES_SECONDS = 5
# After an early response the server discards what the client still sends, up to these limits.
LINGER_SECONDS, LINGER_BYTES = 5.0, 64_000_000


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 selects a free port."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512)
    except (TypeError, ValueError):  # not text, or with a zero byte
        raise PipelineError(f"--host is {host!r}, which is not an address; give one such as 127.0.0.1") from None
    except OSError as error:
        # create_server appends the address to the system's message, except to that of getaddrinfo.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno)
        raise PipelineError(f"cannot listen on {host}, port {port} ({reason}); choose another --host or --port") from None
    # Connections inherit TCP_NODELAY, which asyncio sets only for sockets with an explicit protocol number. Without it, data
    # after the headers waits until the client acknowledges the headers, which Linux delays by 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Otherwise, a client that has vanished holds its slot for minutes, and one that does not read for as long as it likes.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    return listening


def url(listening: socket.socket) -> str:
    """Return the server's URL for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app, models: ModelPool, listening: socket.socket, grace: float) -> None:
    """Serve an ASGI application at the socket `listening` until the process gets SIGTERM or SIGINT.

    After the signal, /health and new requests get status 503. Running requests have `grace` seconds
    to finish, and then end with an error. A second signal ends them immediately.
    """
    config = uvicorn.Config(
        app, log_config=None, log_level="error", access_log=False, server_header=False, lifespan="on",
        # httptools, because h11 parses in Python: a body of tiny chunks would take seconds of the event loop.
        loop="asyncio", http=Connection, ws="none",
        timeout_graceful_shutdown=LAST_BYTES_SECONDS,
    )  # fmt: skip
    # uvicorn raises received signals again when it ends, which would change the exit status.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # Here an error is one line; in the event loop it would be a traceback of uvicorn.
        models.start()
        _Server(config, models, grace).run(sockets=[listening])
    finally:
        models.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, models: ModelPool, grace: float):
        super().__init__(config)
        self.models, self.grace, self.draining = models, grace, False
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets=None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.draining and not self.models.unfinished

    def handle_exit(self, sig: int, frame) -> None:
        # A signal may interrupt the event loop anywhere, so a callback of the loop shuts down.
        self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self.draining:
            self.models.abort()
            return
        self.draining = True
        self.models.drain()
        if self.models.unfinished:
            print_message(f"stopping; running requests have {self.grace:g} s to finish; a second signal ends them now")
        # Closes idle connections now, and others after their responses.
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self.loop.call_later(self.grace, self.models.abort)


class Connection(HttpToolsProtocol):
    """A uvicorn connection that can end before the client has sent its complete request.

    Closing a socket with unread data would lose the response. So only the sending half is closed,
    and data is discarded until the client closes, LINGER_SECONDS or LINGER_BYTES.
    """

    discarded: int | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(_Lingering(transport, self))

    @property
    def is_receiving(self) -> bool:
        """Whether the client is still sending its request."""
        return self.cycle is not None and self.cycle.more_body

    def linger(self, transport: asyncio.Transport) -> None:
        """Close the sending half of the connection, and discard all data received from now on."""
        if self.discarded is None:
            self.discarded = 0
            transport.write_eof()
            transport.resume_reading()
            self.loop.call_later(LINGER_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.discarded is None:
            super().data_received(data)
            return
        self.discarded += len(data)
        if self.discarded > LINGER_BYTES:
            self.transport.abort()


class _Lingering:
    """A transport whose `close` lets the client read the complete response."""

    def __init__(self, transport: asyncio.Transport, connection: Connection):
        self._transport, self._connection = transport, connection

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._connection.discarded is not None or self._transport.is_closing()

    def close(self) -> None:
        if self._connection.is_receiving and not self._transport.is_closing():
            self._connection.linger(self._transport)
        else:
            self._transport.close()
