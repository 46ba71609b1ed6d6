"""Request bodies: memory limits, delayed refusals, and the process that checks large bodies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from reprieve.playground import middleware
from reprieve.playground.bodies import ChatBody, CompletionBody, Context, MalformedBodyError, read_body
from reprieve.playground.checker import BodyChecker
from reprieve.playground.middleware import BodyLimit, Turns

CONTEXT = Context(max_tokens=100, max_characters=1000)
LARGE = 100_000


def completion(**fields):
    return json.dumps({"prompt": "x", **fields}).encode()


@pytest.fixture
def checker():
    made = BodyChecker(CONTEXT)
    yield made
    made.close()


def read(checker, body, kind=CompletionBody):
    """Read a body in two pieces, as from a socket."""
    half = len(body) // 2
    return asyncio.run(checker.read(kind, [body[:half], body[half:]]))


def test_large_valid_bodies_are_read(checker):
    assert len(read(checker, completion(user="u" * LARGE)).user) == LARGE
    messages = [{"role": "user", "content": "u" * 9}] * 2000
    assert len(read(checker, json.dumps({"messages": messages}).encode(), ChatBody).messages) == 2000
    assert checker._process is not None, "small bodies only: the process was not asked"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"surprise": "n" * LARGE}, "surprise"),
        ({"prompt": "n" * LARGE}, "prompt must hold at most 100 tokens, got 100000 characters"),
        ({"prompt": ["x", "n" * LARGE]}, "prompt must hold at most 100 tokens, got 100000 characters"),
        ({"prompt": [1] * LARGE}, "prompt must hold at most 100 tokens, got 100000 tokens"),
        ({"prompt": [[]] * LARGE}, "at most 32768 lists"),
        ({"prompt": ["a"] * LARGE}, "at most 65536 texts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_small_and_large_bodies_are_refused_with_the_same_message(checker, fields, named):
    with pytest.raises(MalformedBodyError) as large:
        read(checker, completion(**fields))
    with pytest.raises(MalformedBodyError) as direct:
        read_body(CompletionBody, completion(**fields), CONTEXT)
    assert named in str(large.value)
    assert (str(large.value), large.value.parameter) == (str(direct.value), direct.value.parameter)


def test_texts_may_hold_any_number_of_brackets_commas_and_quotes():
    for text in ("[" * LARGE, "," * 200_000, '{"a": ' * LARGE, "\\" * LARGE, '\\"[' * LARGE):
        assert read_body(CompletionBody, completion(user=text), CONTEXT).user == text


def test_a_dead_checking_process_is_restarted(checker):
    for _ in range(2):
        with pytest.raises(MalformedBodyError, match="surprise"):
            read(checker, completion(surprise="n" * LARGE))
        checker._process.kill()
        checker._process.wait()


def test_the_checking_process_ends_with_the_server():
    program = (
        "import time; from reprieve.playground.checker import BodyChecker; from reprieve.playground.bodies import *\n"
        "checker = BodyChecker(Context(1, 1)); checker.start(); checker._thread.submit(int).result()\n"
        "print(checker._process.pid, flush=True); time.sleep(60)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environ)
    pid = int(server.stdout.readline())
    assert is_running(pid)
    server.send_signal(signal.SIGKILL)
    server.wait()
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, "it outlives the server"
        time.sleep(0.05)


def is_running(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_refusals_are_sent_one_at_a_time(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(middleware.asyncio, "sleep", sleep)
    monkeypatch.setattr(middleware.time, "monotonic", lambda: 100.0)

    async def refuse():
        turns = Turns()
        for num_bytes in (0, 1_000_000, 0):
            await turns.wait(100.0, num_bytes)

    asyncio.run(refuse())
    small, large = middleware._TURN_S, middleware._TURN_S + 1_000_000 * middleware._TURN_S_PER_BYTE
    assert slept == pytest.approx([small, small + large, small + large + small])


def test_a_refusal_waits_for_a_bounded_time(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(middleware.asyncio, "sleep", sleep)

    async def refuse():
        turns = Turns()
        for _ in range(1000):
            await turns.wait(time.monotonic(), 1 << 20)

    asyncio.run(refuse())
    assert max(slept) == pytest.approx(middleware._LONGEST_WAIT_S)


class Client:
    """An ASGI client that sends half of a body, and the rest when `rest` is set."""

    def __init__(self, half):
        self.half = half
        self.rest = asyncio.Event()
        self.num_received = 0
        self.statuses = []

    async def receive(self):
        self.num_received += 1
        if self.num_received > 1:
            await self.rest.wait()
        return {"type": "http.request", "body": self.half, "more_body": self.num_received == 1}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


async def accept(scope, receive, send):
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_total_body_memory_is_bounded_and_freed_when_clients_leave():
    async def clients():
        limit = BodyLimit(accept, max_bytes=100_000, timeout_s=30)
        fill = [Client(b"x" * 50_000) for _ in range(2 * middleware._MOST_HELD)]
        tasks = [asyncio.create_task(limit({"type": "http"}, one.receive, one.send)) for one in fill]
        while any(not one.num_received for one in fill):
            await asyncio.sleep(0)

        async def status(body):
            client = Client(body)
            client.rest.set()
            await limit({"type": "http"}, client.receive, client.send)
            return client.statuses

        assert await status(b"y" * 20_000) == [503]
        assert await status(b"y") == [200], "ordinary requests are kept out"
        for task in tasks[:10]:
            task.cancel()
        await asyncio.gather(*tasks[:10], return_exceptions=True)
        assert await status(b"y" * 20_000) == [200]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert limit._num_held == 0, "memory of clients that left still counts"

    asyncio.run(clients())
