"""Connections of the server's own kind over real sockets: how many, how long, and clients that close a half or all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from uvicorn.server import ServerState

from castiron.pipelines.generation.tokenizing import LONG, encoded
from castiron.pipelines.serve import connections
from castiron.pipelines.serve.clients import Access, Asker, Shares, TooMuch
from castiron.pipelines.serve.connections import Acceptor, Connection
from castiron.pipelines.serve.server import listen
from tests.pipelines.served import LETTERS, SPECIAL, tokenizer

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class Answers:
    """An application that answers /now at once and anything else when it may, /much with 10 MB; `left` counts clients that went
    before."""

    def __init__(self):
        self.may, self.begun, self.left = asyncio.Event(), 0, 0

    async def __call__(self, scope, receive, send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        assert message["type"] == "http.request"
        if scope["path"] != "/now":
            self.begun += 1
            tasks = [asyncio.create_task(self.may.wait()), asyncio.create_task(receive())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            if not self.may.is_set():
                self.left += 1
                return
        body = bytes(10**7) if scope["path"] == "/much" else b"yes"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


def test_no_connection_holds_small_writes_back():
    """Nagle's way: what comes after the headers would wait 40 ms for a client's acknowledgement."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def over_sockets(test, most: int = 8) -> None:
    """Runs `test(answers, port, open connections)` against an acceptor of `most` connections."""

    async def run() -> None:
        answers, state = Answers(), ServerState()
        config = uvicorn.Config(answers, log_config=None, access_log=False, http=Connection, proxy_headers=False)
        config.load()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            acceptor = Acceptor(listening, lambda: Connection(config, state, {}), state.connections, most)
            accepting = asyncio.create_task(acceptor.run())
            try:
                async with asyncio.timeout(60):
                    await test(answers, listening.getsockname()[1], state.connections)
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                for connection in list(state.connections):
                    connection.end()
                await asyncio.sleep(0.01)

    asyncio.run(run())


async def ask(port: int, path: bytes = b"now") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET % path)
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"yes")) if not reader.at_eof() else b""


async def closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


def test_connections_that_ask_for_nothing_give_way_and_answers_under_way_do_not(capsys):
    async def test(answers, port, there):
        busy = [await ask(port, b"later") for _ in range(3)]
        while answers.begun < 3:
            await asyncio.sleep(0.005)
        head = b"POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"a" * 10
        silent = []
        for i in range(30):
            silent.append(await asyncio.open_connection("127.0.0.1", port))
            silent[-1][1].write(head if i % 2 else b"GET /now HTTP/1.1\r\nHo")
            reader, writer = await ask(port)
            assert b"200" in await answer(reader)
            assert len(there) <= 8
            writer.close()
        assert await closed(silent[0][0])
        answers.may.set()
        for reader, _ in busy:
            assert b"200" in await answer(reader)
        for _, writer in (*busy, *silent):
            writer.close()

    over_sockets(test)
    assert capsys.readouterr().err.count("\n") == 1, "who is flooded is told once"


def test_headers_come_in_time_or_the_connection_ends(monkeypatch):
    async def test(answers, port, there):
        again, asking = await ask(port)
        await answer(again)
        slow, _ = await ask(port, b"later")
        while answers.begun < 1:
            await asyncio.sleep(0.005)
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.15)
        silent, kept = await asyncio.open_connection("127.0.0.1", port)
        drip, dripping = await asyncio.open_connection("127.0.0.1", port)
        asking.write(b"GET /now HT")
        with contextlib.suppress(ConnectionError):
            for byte in GET * 4:
                dripping.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if drip.at_eof() or dripping.is_closing():
                    break
            else:
                raise AssertionError("a request that comes byte by byte is waited for")
        assert await closed(silent) and await closed(again) and kept
        # What is being answered takes as long as it takes.
        await asyncio.sleep(0.2)
        answers.may.set()
        assert b"200" in await answer(slow)

    over_sockets(test)


def test_a_half_closed_client_has_its_answer_and_one_that_left_does_not():
    async def test(answers, port, there):
        half, writer = await ask(port, b"later")
        writer.write_eof()
        gone = [await ask(port, b"later") for _ in range(2)]
        while answers.begun < 3:
            await asyncio.sleep(0.005)
        for _, leaving in gone:
            leaving.close()
        while answers.left < 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert answers.left == 2
        answers.may.set()
        said = await answer(half)
        assert said.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in said and await closed(half)
        old, writer = await asyncio.open_connection("127.0.0.1", port)
        answers.may.clear()
        writer.write(b"GET /later HTTP/1.0\r\n\r\n")
        while answers.begun < 4:
            await asyncio.sleep(0.005)
        # HTTP/1.0 has no interim answers, and nothing else could be asked.
        writer.write_eof()
        assert await closed(old)
        while answers.left < 3:
            await asyncio.sleep(0.005)

    over_sockets(test)


def test_a_long_text_is_encoded_as_a_short_one_and_holds_nobody_up():
    """Its ids are those of its letters, and meanwhile this thread goes on: not only before and after."""
    text = "".join(LETTERS[i * i % 90 + 1] for i in range(10 * LONG))
    made, known = tokenizer(), {letter: i + len(SPECIAL) for i, letter in enumerate(LETTERS)}
    with ThreadPoolExecutor(1) as pool:
        found, turns = pool.submit(encoded, made, text, False), 0
        while not found.done():
            time.sleep(0.001)
            turns += 1
    assert found.result() == [known[letter] for letter in text]
    assert turns > 5


def test_whose_share_a_request_takes():
    def asker(address: str, key: str = "", **more) -> Asker:
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        return Access(("a", "b"), (), **more).asker({"headers": headers, "client": (address, 1)})

    assert asker("192.0.2.1", "b") == Asker("key 1", "key 1", 1) and asker("192.0.2.1", "b", shared_prefixes=True).owner == ""
    assert asker("192.0.2.1", "c") == Asker("192.0.2.1") != asker("192.0.2.2")
    assert asker("2001:db8::1").client == asker("2001:db8::ffff:1").client != asker("2001:db8:0:1::1").client
    assert Access(("a",), ()).asker({"headers": [(b"authorization", b"bearer a")]}).owner == "", "one key is all"


def test_hosts_that_another_site_could_have():
    def may(host: str | None, keys=(), origins=(), local=True) -> bool:
        headers = [] if host is None else [(b"host", host.encode())]
        return Access(keys, origins, local=local).named_here({"headers": headers})

    for host in (None, "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "llm.localhost", "castiron", "192.168.1.5"):
        assert may(host), host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "a.b."):
        assert not may(host), host
        assert may(host, keys=("k",)) and may(host, origins=("*",)) and may(host, local=False)
    assert may("llm.example.org", origins=("https://llm.example.org",))


def test_bodies_have_room_of_all_and_of_one_client():
    bodies = Shares("bodies", 100, 60)
    first, second, third = bodies.of("a"), bodies.of("a"), bodies.of("b")
    first.take(40)
    second.take(20)
    for body, count, says in ((second, 1, "this client's"), (third, 41, "all requests")):
        try:
            body.take(count)
        except TooMuch as error:
            assert says in str(error)
        else:
            raise AssertionError("taken")
    third.take(40)
    for body in (first, second, third):
        body.give_back()
    assert bodies.total == 0 and not bodies.held


def test_who_reads_nothing_gives_way_and_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(connections, "GIVES_WAY_SECONDS", 0.0)

    async def test(answers, port, there):
        answers.may.set()
        stalled = lambda: sum(connection.flow.write_paused for connection in there)

        async def deaf(count: int) -> socket.socket:
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            made.connect(("127.0.0.1", port))
            made.sendall(GET % b"much")
            while stalled() < count:
                await asyncio.sleep(0.005)
            return made

        held = [await deaf(count + 1) for count in range(7)]
        reader, writer = await ask(port)
        # One of the eight has made room for the next.
        assert b"200" in await answer(reader) and stalled() == 6
        writer.close()
        monkeypatch.setattr(connections, "STALLED_SECONDS", 0.1)
        held.append(await deaf(7))
        while stalled() == 7:
            await asyncio.sleep(0.005)
        for each in held:
            each.close()

    over_sockets(test)
