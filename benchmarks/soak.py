"""Many clients against `reprieve serve`: nothing lost, memory flat, every response complete or a clean error.

    python benchmarks/soak.py --clients 64 --minutes 10

Clients ask (streaming or not), leave in the middle, send malformed bodies, and choose thresholds at random. What is a
defect: an answer to a greedy request that is not the engine's own, a response without an end, an error that is not
JSON or not of the expected status, a server that stops answering, or one whose memory grows.
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
from pathlib import Path

from reprieve.evaluation.runner import environment
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
THRESHOLDS = (0.0, 0.04, 0.2)


async def ask(port, body, *, leave_after=None):
    """Status and payload of one request over a connection of its own; None where we left on purpose."""
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
    """What the clients saw."""

    def __init__(self, port, prompts, expected, seed):
        self.port = port
        self.prompts = prompts
        self.expected = expected  # by prompt and threshold: the engine's own text
        self.counts = collections.Counter()
        self.defects = []
        self.seed = seed

    async def client(self, number, deadline):
        draw = random.Random(self.seed * 1000 + number)
        while time.monotonic() < deadline:
            try:
                await self.once(draw)
            except Exception as error:
                self.defects.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(draw.random() * 0.5)

    async def once(self, draw):
        kind = draw.random()
        if kind < 0.15:
            status, payload = await ask(self.port, draw.choice(BAD))
            self.note("malformed", status == 400 and json.loads(payload)["error"]["message"], payload)
            return
        place, threshold = draw.randrange(len(self.prompts)), draw.choice(THRESHOLDS)
        stream = draw.random() < 0.5
        asked = {"prompt": self.prompts[place], "max_tokens": 80, "temperature": 0, "stream": stream}
        body = json.dumps({**asked, "reprieve_threshold": threshold}).encode()
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
        good = status == 200 and text == self.expected[place, threshold]
        self.note("streamed" if stream else "whole", good, payload)

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


def resident_mib(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(options, port, server):
    from reprieve.tasks import load_task

    prompts = [problem.prompt for problem in load_task("arithmetic").problems("test", options.prompts)]
    expected = {}
    for place, prompt in enumerate(prompts):
        for threshold in THRESHOLDS:
            asked = {"prompt": prompt, "max_tokens": 80, "temperature": 0, "reprieve_threshold": threshold}
            _, payload = await ask(port, json.dumps(asked).encode())
            expected[place, threshold] = json.loads(payload)["choices"][0]["text"]
    run = Soak(port, prompts, expected, options.seed)
    deadline = time.monotonic() + 60 * options.minutes
    clients = [asyncio.create_task(run.client(number, deadline)) for number in range(options.clients)]
    memory = []
    while time.monotonic() < deadline:
        await asyncio.sleep(min(15, max(0.1, deadline - time.monotonic())))
        memory.append(resident_mib(server.pid))
        print(f"{memory[-1]:.0f} MiB, {dict(run.counts)}, {len(run.defects)} defects", flush=True)
    await asyncio.gather(*clients)
    await asyncio.sleep(1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    health = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    writer.close()
    return run, memory, health


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
    server = subprocess.Popen([*command, "--max-waiting", "32"])
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
    quarter = max(1, len(memory) // 4)
    first, last = (sum(part) / len(part) for part in (memory[quarter : 2 * quarter] or memory, memory[-quarter:]))
    report = {
        **environment(),
        "counts": dict(run.counts),
        "defects": run.defects[:50],
        "num_defects": len(run.defects),
        "memory_mib": memory,
        "second_quarter_mib": first,
        "last_quarter_mib": last,
        "health": health,
        "exit_status": status,
    }
    replace_file(options.out / "results.json", json.dumps(report, indent=2) + "\n")
    print(f"{sum(run.counts.values())} requests {dict(run.counts)}; {len(run.defects)} defects {run.defects[:3]}")
    print(f"memory: {first:.0f} MiB in the second quarter, {last:.0f} in the last; at the end {health}, exit {status}")


if __name__ == "__main__":
    main()
