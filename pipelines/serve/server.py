"""The process that serves: its socket, and its end on a signal."""

import asyncio
import os
import signal
import socket
import sys

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.progress import say
from castiron.pipelines.serve.connections import Acceptor, Connection, most_connections
from castiron.pipelines.serve.text_api import Runs

# After the requests have been told to end, how long their last bytes may take.
LAST_BYTES_SECONDS = 5


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; PipelineError if the address cannot be had. Port 0 takes any that is free."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=512)
    except (TypeError, ValueError):  # what is no text, or holds a zero byte
        raise PipelineError(f"--host is {host!r}, which is no address: give one such as 127.0.0.1") from None
    except OSError as error:
        # create_server puts the address into the system's words; those of getaddrinfo are its own.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno)
        raise PipelineError(f"cannot listen on {host}, port {port} ({reason}): choose another --host or --port") from None
    # Connections have it from here. asyncio sets it for sockets that were made by the protocol's number alone; without it what
    # is written after the headers waits for the client's acknowledgement, which Linux holds back for 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url(listening: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app, engine: Runs, listening: socket.socket, grace: float) -> None:
    """Serves until SIGTERM or SIGINT. Then /health and new requests get 503, those under way have `grace` seconds, and
    what is left is told that the server stops. A second signal ends those at once. So it ends, with what `engine.lost` says
    raised, where nothing can be run any more."""
    config = uvicorn.Config(
        app, log_config=None, log_level="error", access_log=False, server_header=False, lifespan="on",
        # Whatever else is installed: uvloop and httptools, which others bring along, change neither speed nor behaviour.
        loop="asyncio", http=Connection, ws="none",
        timeout_graceful_shutdown=LAST_BYTES_SECONDS,
    )  # fmt: skip
    # uvicorn raises the signals again when it is done; a server that was asked to end has done so, and well.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _Server(config, engine, grace).run(sockets=[listening])
    finally:
        lost = engine.lost
        engine.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    if lost:
        raise lost


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Runs, grace: float):
        super().__init__(config)
        self.engine, self.grace, self.draining = engine, grace, False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.accepting: asyncio.Task | None = None

    async def startup(self, sockets=None) -> None:
        """As uvicorn's, with connections that are counted."""
        self.loop = asyncio.get_running_loop()
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)

        def make() -> Connection:
            return Connection(self.config, self.server_state, self.lifespan.state, self.loop)

        (listening,) = sockets
        acceptor = Acceptor(listening, make, self.server_state.connections, most_connections())
        self.servers, self.accepting, self.started = [], asyncio.create_task(acceptor.run()), True

    async def on_tick(self, counter: int) -> bool:
        if self.accepting.done():
            self.accepting.result()
        if self.engine.lost and not self.draining:
            self._end()
        return await super().on_tick(counter) or self.draining and not self.engine.unfinished

    async def shutdown(self, sockets=None) -> None:
        self.accepting.cancel()
        await asyncio.gather(self.accepting, return_exceptions=True)
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame) -> None:
        # In a signal handler: the loop may be anywhere.
        self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self.draining:
            self.engine.abort()
            return
        self.draining = True
        self.engine.drain()
        if self.engine.unfinished:
            say(f"stopping; what runs has {self.grace:g} s to finish (a second signal ends it now)")
        # Those that are idle are closed, the others when they have their answers.
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self.loop.call_later(self.grace, self.engine.abort)
