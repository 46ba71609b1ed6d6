"""Soak test of `reprieve serve` with many clients: complete responses or clean errors, and constant memory.

    python benchmarks/soak.py --clients 64 --minutes 10

Clients send requests (streaming or not), disconnect midway, send malformed bodies and choose thresholds at random. One
in eight is always hostile: it sends half a request, a body a byte at a time, no body, data that is not HTTP or half a
million stop characters, or never reads the response. Defects are: a greedy answer that differs from the server's answer
before the test, a response without an end, an error that is not JSON or has an unexpected status, a hostile connection
that stays open, `/health` slower than ten seconds, and a server that stops responding. Memory is reported for the
second and the last quarter of the test.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from reprieve.bench.environment import Environment
from reprieve.files import replace_file

BAD = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe\x00",
    b'{"prompt": ""}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "x", "reprieve_threshold": 7}',
    b'{"prompt": "x", "max_tokens": 99999}',
    b'{"prompt": "x", "surprise": 1}',
]
# Well-formed requests that exceed a limit: each must be refused immediately.
TOO_MUCH = [
    b'{"prompt": "x", "stop": "' + b"y" * 500_000 + b'"}',
    json.dumps({"prompt": "x", "stop": [str(number) for number in range(1000)]}).encode(),
    b'{"prompt": "x", "max_tokens": ' + b"9" * 6000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "x", "n": 1e999}',
    b'{"prompt": "' + b"x" * 3_000_000 + b'"}',
]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# Bytes to send, and seconds to wait after each (0: send all at once). None is ever a complete request.
NEVER_WHOLE = {
    "half a head": (HEAD[:40], 0.0),
    "a head by bytes": (HEAD, 0.5),
    "a body that never comes": (HEAD + b"Content-Length: 100\r\n\r\n{", 0.0),
    "a body by bytes": (HEAD + b"Content-Length: 1000\r\n\r\n" + b" " * 900, 0.05),
    "a body of a terabyte": (HEAD + b"Content-Length: 1000000000000\r\n\r\n{", 0.0),
    "no HTTP": (bytes(range(256)) * 8 + b"\r\n\r\n", 0.0),
}
THRESHOLDS = (0.0, 0.04, 0.2)
PATIENCE_S = 60.0  # limit for a hostile connection; the server's own is 10 s per stage


async def ask(port, body, *, leave_after=None):
    """Send a request over its own connection; return status and payload, or None after leaving on purpose."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            return None
        answer = await reader.read()
    finally:
        writer.close()
    header, _, payload = answer.partition(b"\r\n\r\n")
    chunked = b"transfer-encoding: chunked" in header.lower()
    return int(header.split()[1]), _dechunk(payload) if chunked else payload


def _dechunk(data):
    parts = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return b"".join(parts)
        parts.append(rest[:length])
        data = rest[length + 2 :]
    raise ValueError("a chunked response without its end")


class Soak:
    """Clients of one server, and the responses that they count."""

    def __init__(self, port, prompts, expected, seed):
        self.port = port
        self.prompts = prompts
        self.expected = expected  # by prompt and threshold: the server's text before the test
        self.counts = collections.Counter()
        self.defects = []
        self.seed = seed
        self.slowest_health = 0.0  # seconds

    async def client(self, number, deadline):
        draw = random.Random(self.seed * 1000 + number)
        act = self.hostile if number % 8 == 7 else self.once
        while time.monotonic() < deadline:
            try:
                await act(draw)
            except Exception as error:
                self.defects.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(draw.random() * 0.5)

    async def once(self, draw):
        kind = draw.random()
        if kind < 0.15:
            status, payload = await ask(self.port, draw.choice(BAD))
            self.note("malformed", status == 400 and json.loads(payload)["error"]["message"], payload)
            return
        index, threshold = draw.randrange(len(self.prompts)), draw.choice(THRESHOLDS)
        stream = draw.random() < 0.5
        request = {"prompt": self.prompts[index], "max_tokens": 80, "temperature": 0, "stream": stream}
        body = json.dumps({**request, "reprieve_threshold": threshold}).encode()
        if kind < 0.4:
            await ask(self.port, body, leave_after=draw.random() * 2)
            self.counts["left"] += 1
            return
        status, payload = await ask(self.port, body)
        if status in (429, 504):
            self.note(f"status {status}", json.loads(payload)["error"]["message"], payload)
            return
        text = _streamed(payload) if stream else json.loads(payload)["choices"][0]["text"]
        if text is None:  # a clean error in the middle of a stream
            self.counts["stream ended by an error"] += 1
            return
        good = status == 200 and text == self.expected[index, threshold]
        self.note("streamed" if stream else "whole", good, payload)

    async def hostile(self, draw):
        kind = draw.choice([*NEVER_WHOLE, "asks too much", "never reads"])
        if kind == "asks too much":
            status, payload = await ask(self.port, draw.choice(TOO_MUCH))
            self.note(kind, status in (400, 413) and json.loads(payload)["error"]["message"], payload)
        elif kind == "never reads":
            _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
            body = json.dumps({"prompt": self.prompts[0], "max_tokens": 80, "stream": True}).encode()
            writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.sleep(5)
            writer.transport.abort()
            self.counts[kind] += 1
        else:
            await asyncio.wait_for(self.never_whole(*NEVER_WHOLE[kind]), PATIENCE_S)
            self.counts[kind] += 1

    async def never_whole(self, sent, wait):
        """Send bytes, one at a time if `wait` is not 0, and wait until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            answered = asyncio.create_task(reader.read())
            for byte in [sent] if not wait else [sent[offset : offset + 1] for offset in range(len(sent))]:
                if answered.done():
                    break
                writer.write(byte)
                await asyncio.sleep(wait)
            await answered
        except ConnectionError:
            pass  # closed by the server, as it should be
        finally:
            writer.close()

    async def watch_health(self, deadline):
        """Request `/health` every second and record the slowest response."""
        while time.monotonic() < deadline:
            began = time.monotonic()
            try:
                await asyncio.wait_for(health_of(self.port), 10)
            except (TimeoutError, OSError, ValueError) as error:
                self.defects.append(f"health: {type(error).__name__}")
            self.slowest_health = max(self.slowest_health, time.monotonic() - began)
            await asyncio.sleep(1)

    def note(self, kind, good, payload):
        self.counts[kind] += 1
        if not good:
            self.defects.append(f"{kind}: {payload[:300]!r}")


def _streamed(payload):
    lines = [line.removeprefix("data: ") for line in payload.decode().split("\n\n") if line]
    if lines[-1] != "[DONE]":
        assert "error" in json.loads(lines[-1]), f"a stream without its end: {lines[-1]!r}"
        return None
    return "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])


async def health_of(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    health = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    writer.close()
    return health


def resident_mib(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(options, port, server):
    from reprieve.tasks import load_task

    prompts = [problem.prompt for problem in load_task("word_problems").problems("test", options.prompts)]
    expected = {}
    for index, prompt in enumerate(prompts):
        for threshold in THRESHOLDS:
            body = {"prompt": prompt, "max_tokens": 80, "temperature": 0, "reprieve_threshold": threshold}
            _, payload = await ask(port, json.dumps(body).encode())
            expected[index, threshold] = json.loads(payload)["choices"][0]["text"]
    run = Soak(port, prompts, expected, options.seed)
    deadline = time.monotonic() + 60 * options.minutes
    clients = [asyncio.create_task(run.client(number, deadline)) for number in range(options.clients)]
    clients.append(asyncio.create_task(run.watch_health(deadline)))
    memory = []
    while time.monotonic() < deadline:
        await asyncio.sleep(min(15, max(0.1, deadline - time.monotonic())))
        memory.append(resident_mib(server.pid))
        print(f"{memory[-1]:.0f} MiB, {dict(run.counts)}, {len(run.defects)} defects", flush=True)
    await asyncio.gather(*clients)
    await asyncio.sleep(1)
    return run, memory, await health_of(port)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--port", type=int, default=8179)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    command = [sys.executable, "-m", "reprieve.cli.main", "serve", "--port", str(options.port), "--timeout", "60"]
    server = subprocess.Popen([*command, "--target", "reprieve/miniature", "--max-waiting", "32"])
    try:
        while server.poll() is None:
            try:
                run, memory, health = asyncio.run(soak(options, options.port, server))
                break
            except ConnectionRefusedError:
                time.sleep(1)
    finally:
        server.terminate()
        status = server.wait(60)
    if status not in (0, 130):  # 130: ended by the signal above
        run.defects.append(f"the server ended with status {status}")
    quarter = max(1, len(memory) // 4)
    first, last = (sum(part) / len(part) for part in (memory[quarter : 2 * quarter] or memory, memory[-quarter:]))
    report = {
        **asdict(Environment.here()),
        "counts": dict(run.counts),
        "defects": run.defects[:50],
        "num_defects": len(run.defects),
        "slowest_health_s": run.slowest_health,
        "memory_mib": memory,
        "second_quarter_mib": first,
        "last_quarter_mib": last,
        "health": health,
        "exit_status": status,
    }
    replace_file(options.out / "results.json", json.dumps(report, indent=2) + "\n")
    print(f"{sum(run.counts.values())} requests {dict(run.counts)}; {len(run.defects)} defects {run.defects[:3]}")
    print(f"slowest /health: {run.slowest_health:.1f} s")
    print(f"memory: {first:.0f} MiB in the second quarter, {last:.0f} in the last; at the end {health}, exit {status}")


if __name__ == "__main__":
    main()
