"""What one request at a time may do: clients take turns, however many requests each of them has."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Of one event loop. Requests of one client go in the order in which they came.

    async with turns.of(client):
        ...
    """

    def __init__(self) -> None:
        # Whose turn it is, and those who wait, in the order of their turns.
        self._holder: str | None = None
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as this."""
        if self._holder is None:
            self._holder = client
        else:
            await self._mine(client)
        try:
            yield
        finally:
            self._pass_on()

    async def _mine(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # Who leaves in the very moment in which it is given a turn does not keep it.
            if not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """The turn is the next client's, or nobody's; the one that had it is the last of those who wait."""
        if mine := self._waiting.pop(self._holder or "", None):
            self._waiting[self._holder or ""] = mine
        self._holder = None
        while self._waiting and self._holder is None:
            client, mine = next(iter(self._waiting.items()))
            while mine and self._holder is None:
                turn = mine.popleft()
                # Who left is passed over.
                if not turn.done():
                    turn.set_result(None)
                    self._holder = client
            if not mine:
                del self._waiting[client]
