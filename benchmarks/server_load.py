"""Effect of malformed requests on `reprieve serve`: refusals, slowdown of streams, memory.

    python benchmarks/server_load.py --turns 4 --seconds 30

Ten streams request one greedy answer after another from the bundled pair. In one of the two phases of each turn, other
processes send malformed bodies of many kinds and sizes, each over one connection and with `--pause` seconds in between.
A stream's speed is that of its complete answers in a phase; its slowdown compares the two phases of a turn. Under load
the engine's thread also waits for a core: `stream_ratio_own_core` excludes that time. Memory is the resident size of
the server and its children, above that of the idle server.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = 1 << 20  # the server's default --max-body-bytes
SETTLE_S = 1.0  # not measured, at the start of a phase


def filled(before: str, item: str, after: str, *, separator: str = ",", size: int = LIMIT - 64) -> bytes:
    """Return a body just under the limit that repeats `item`."""
    count = (size - len(before) - len(after)) // (len(item.encode()) + len(separator))
    return (before + separator.join([item] * count) + after).encode()


def bodies(seed: int = 0) -> dict[str, tuple[str, bytes]]:
    """Return malformed requests by kind: path and body."""
    draw = random.Random(seed)
    fields = '{"messages": [{"role": "user", "content": "?"}], '
    numbered = ",".join(f'"x{number}":1' for number in range(90_000))
    completions = {
        "empty": b"",
        "cut short": b"{",
        "no object": b"[1]",
        "no UTF-8": b"\xff\xfe\x00",
        "a wrong type": b'{"prompt": "x", "temperature": "hot"}',
        "an unknown field": b'{"prompt": "x", "surprise": 1}',
        "a value out of range": b'{"prompt": "x", "reprieve_threshold": 7}',
        "1 MB of garbage": b"x" * (LIMIT - 64),
        "1 MB of random bytes": draw.randbytes(LIMIT - 64),
        "1 MB of blanks": b" " * (LIMIT - 64),
        "1 MB of brackets": b"[" * (LIMIT - 64),
        "1 MB of objects in objects": b'{"a":' * (LIMIT // 5 - 64),
        "balanced, 900 deep": b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        "balanced, 500,000 deep": b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        "numbers as prompt": filled('{"prompt": [', "1", "]}"),
        "90,000 token ids": filled('{"prompt": [', "1", "]}", size=180_000),
        "fractions as prompt": filled('{"prompt": [', "1.5e-3", "]}"),
        "texts as prompt": filled('{"prompt": [', '"a"', "]}"),
        "different texts as prompt": ('{"prompt": [' + ",".join(f'"{n}"' for n in range(110_000)) + "]}").encode(),
        "lists as prompt": filled('{"prompt": [', "[]", "]}"),
        "objects as prompt": filled('{"prompt": [', "{}", "]}"),
        "a number of 1 MB": b'{"prompt": "x", "seed": ' + b"9" * (LIMIT - 128) + b"}",
        "a stop text of 1 MB": filled('{"prompt": "x", "stop": "', "y", '"}', separator=""),
        "escapes as stop text": filled('{"prompt": "x", "stop": "', "\\u0041", '"}', separator=""),
        "stop texts": filled('{"prompt": "x", "stop": [', '"a"', "]}"),
        "a prompt of 1 MB": filled('{"prompt": "', "many words", '"}', separator=" "),
        "a prompt without blanks": filled('{"prompt": "', "a", '"}', separator=""),
        "a prompt of emoji": filled('{"prompt": "', "🔑", '"}', separator=""),
        "128 prompts of 8 kB": filled('{"prompt": [', f'"{"word " * 1600}"', "]}", size=1_020_000),
        "a field's name of 1 MB": filled('{"prompt": "x", "', "n", '": 1}', separator=""),
        "an unknown field of 1 MB": filled('{"prompt": "x", "surprise": "', "n", '"}', separator=""),
        "an unknown list of 1 MB": filled('{"prompt": "x", "surprise": [', "{}", "]}"),
        "user of 1 MB cut short": filled('{"prompt": "x", "user": "', "n", "", separator=""),
        "over the limit": b"x" * (2 * LIMIT),
    }
    chats = {
        "chat: 90,000 fields": f"{fields}{numbered}}}".encode(),
        "chat: 90,000 metadata": f'{fields}"metadata": {{{numbered}}}}}'.encode(),
        "chat: 90,000 xargs": f'{fields}"vllm_xargs": {{{numbered}}}}}'.encode(),
        "chat: empty messages": filled('{"messages": [', "{}", "]}"),
        "chat: empty parts": filled('{"messages": [{"role": "user", "content": [', "{}", "]}]}"),
        "chat: whole messages": filled('{"messages": [', '{"role":"user","content":"a"}', "]}"),
        "chat: parts": filled('{"messages": [{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"),
        "chat: a message of 1 MB": filled(
            '{"messages": [{"role": "user", "content": "', "words", '"}]}', separator=" "
        ),
        "chat: tools": filled(f'{fields}"tools": [', "{}", "]}"),
    }
    return {kind: (COMPLETIONS, body) for kind, body in completions.items()} | {
        kind: (CHAT, body) for kind, body in chats.items()
    }


def send_malformed(port: int, seconds: float, pause: float, out: Path, seed: int) -> None:
    """Send malformed bodies over one connection; write each one's kind, seconds and status."""
    kinds, draw = bodies(), random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    seen: list[tuple[str, float, int | str]] = []
    deadline = time.monotonic() + seconds
    order: list[str] = []
    while time.monotonic() < deadline:
        if not order:
            order = draw.sample(sorted(kinds), len(kinds))
        kind = order.pop()
        path, body = kinds[kind]
        began = time.perf_counter()
        status: int | str
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
            connection.close()
        seen.append((kind, time.perf_counter() - began, status))
        time.sleep(pause)
    out.write_text(json.dumps(seen))


class Streams:
    """Clients that request one streamed answer after another."""

    def __init__(self, port: int, count: int, num_tokens: int) -> None:
        self.port = port
        self.num_tokens = num_tokens
        self.ended: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # end time and tokens of answers
        self.health: list[tuple[float, float]] = []  # start and duration, in seconds
        self.tasks = [asyncio.create_task(self._stream(number)) for number in range(count)]
        self.tasks.append(asyncio.create_task(self._watch_health()))

    async def _stream(self, number: int) -> None:
        request = {"prompt": f"Question: {number} and 2?\nAnswer:", "max_tokens": self.num_tokens, "temperature": 0}
        body = json.dumps({**request, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}})
        while True:
            payload = await self._ask("POST", COMPLETIONS, body)
            usage = re.search(rb'"completion_tokens": ?(\d+)', payload)
            assert usage and b"[DONE]" in payload, payload[-300:]
            self.ended[number].append((time.monotonic(), int(usage[1])))

    async def _watch_health(self) -> None:
        while True:
            began = time.monotonic()
            await self._ask("GET", "/health", "")
            self.health.append((began, time.monotonic() - began))
            await asyncio.sleep(0.2)

    async def _ask(self, method: str, path: str, body: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = await reader.read()
        writer.close()
        return answer

    def speeds(self, began: float, ended: float) -> list[float]:
        """Return tokens per second of each stream between its first and last end of an answer in this interval."""
        found = []
        for answers in self.ended:
            inside = [(when, tokens) for when, tokens in answers if began <= when <= ended]
            if len(inside) > 1:
                found.append(sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0]))
            else:  # stalled
                found.append(sum(tokens for _, tokens in inside) / (ended - began))
        return found


class Memory:
    """Largest resident size of a process and its children, sampled ten times a second."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.idle_mb = self.largest_mb = self.now_mb()
        threading.Thread(target=self._watch, daemon=True).start()

    def now_mb(self) -> float:
        from reprieve.tasks.usage import descendants

        return sum(map(resident_mb, [self.pid, *descendants(self.pid)]))

    def _watch(self) -> None:
        while True:
            self.largest_mb = max(self.largest_mb, self.now_mb())
            time.sleep(0.1)

    def take_largest_mb(self) -> float:
        """Return the largest size since the last call."""
        largest, self.largest_mb = self.largest_mb, self.now_mb()
        return largest


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:  # ended meanwhile
        return 0.0


def threads_s(pid: int) -> dict[int, tuple[float, float]]:
    """Return the seconds that each thread of a process ran, and the seconds that it waited for a core."""
    found = {}
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        ran, waited, _ = map(int, Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split())
        found[thread] = ran / 1e9, waited / 1e9
    return found


@contextlib.contextmanager
def served(options: argparse.Namespace, log: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server on a free port and wait until it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "reprieve.cli.main", "serve", "--port", str(port), "--target", options.target]
    with log.open("w") as out:
        server = subprocess.Popen([*command, "--num-threads", "1"], stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while "Uvicorn running on" not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield port, server
    finally:
        server.terminate()
        server.wait(60)


async def measure(options: argparse.Namespace, port: int, memory: Memory, folder: Path) -> dict[str, Any]:
    """Alternate phases without and with malformed bodies."""
    streams = Streams(port, options.streams, options.tokens)
    await asyncio.sleep(5)
    warm_mb = memory.take_largest_mb()
    phases: list[dict[str, Any]] = []
    refusals: dict[str, list[tuple[float, int | str]]] = collections.defaultdict(list)
    for turn in range(options.turns):
        for hostile in (False, True) if turn % 2 == 0 else (True, False):
            clients = []
            for number in range(options.connections if hostile else 0):
                out = folder / f"{turn}-{number}.json"
                arguments = ["--port", str(port), "--seconds", str(options.seconds), "--pause", str(options.pause)]
                arguments += ["--malformed", str(out), "--seed", str(100 * turn + number)]
                clients.append((out, await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments)))
            await asyncio.sleep(SETTLE_S)
            began, before = time.monotonic(), threads_s(memory.pid)
            await asyncio.sleep(options.seconds - SETTLE_S)
            ended, after = time.monotonic(), threads_s(memory.pid)
            engine = max(set(before) - {memory.pid}, key=lambda thread: before[thread])  # the one that ran most
            waited = after[engine][1] - before[engine][1]
            for out, client in clients:
                assert await client.wait() == 0
                for kind, seconds, status in json.loads(out.read_text()):
                    refusals[kind].append((seconds, status))
            health = [seconds for when, seconds in streams.health if began <= when <= ended]
            phases.append(
                {
                    "malformed": hostile,
                    "tokens_per_s": streams.speeds(began, ended),
                    "engine_waited_for_core": waited / (ended - began),
                    "event_loop_ran": (after[memory.pid][0] - before[memory.pid][0]) / (ended - began),
                    "health_median_s": statistics.median(health) if health else None,  # None: stalled
                    "health_max_s": max(health, default=None),
                    "largest_mb": memory.take_largest_mb(),
                }
            )
            print(json.dumps({**phases[-1], "tokens_per_s": sum(phases[-1]["tokens_per_s"])}), flush=True)
            await asyncio.sleep(SETTLE_S)
    for task in streams.tasks:
        task.cancel()
    failed = [task.exception() for task in streams.tasks if task.done() and not task.cancelled()]
    assert not failed, failed
    return {
        "idle_mb": memory.idle_mb,
        "streams_alone_mb": warm_mb,
        "phases": phases,
        "refusals": summary_by_kind(refusals),
        **summary(phases, refusals, memory.idle_mb),
    }


def summary_by_kind(refusals: dict[str, list[tuple[float, int | str]]]) -> dict[str, Any]:
    """Number, statuses and seconds of each kind's refusals."""
    return {
        kind: {
            "n": len(seen),
            "statuses": sorted({str(status) for _, status in seen}),
            **latencies([seconds for seconds, _ in seen]),
        }
        for kind, seen in refusals.items()
    }


def latencies(seconds: list[float]) -> dict[str, float]:
    return {
        "median_s": statistics.median(seconds),
        "p95_s": sorted(seconds)[int(0.95 * (len(seconds) - 1))],
        "max_s": max(seconds),
    }


def summary(
    phases: list[dict[str, Any]], refusals: dict[str, list[tuple[float, int | str]]], idle_mb: float
) -> dict[str, Any]:
    """Ratios of streams within a turn, seconds of all refusals, and memory above idle."""

    def kept(hostile: bool) -> list[dict[str, Any]]:
        return [phase for phase in phases if phase["malformed"] is hostile]

    def own_core(phase: dict[str, Any]) -> float:
        return float(sum(phase["tokens_per_s"]) / (1 - phase["engine_waited_for_core"]))

    by_turn = [
        [loaded / alone for alone, loaded in zip(quiet["tokens_per_s"], attacked["tokens_per_s"], strict=True)]
        for quiet, attacked in zip(kept(False), kept(True), strict=True)
    ]
    by_stream = [statistics.median(ratios) for ratios in zip(*by_turn, strict=True)]
    every = [seconds for seen in refusals.values() for seconds, _ in seen]
    return {
        "num_refusals": len(every),
        "refusals_per_s": len(every) / sum(phase["malformed"] for phase in phases),
        "refusal": latencies(every),
        "share_within_50_ms": sum(seconds <= 0.05 for seconds in every) / len(every),
        "stream_ratio_by_turn": [statistics.median(ratios) for ratios in by_turn],
        "stream_ratio_own_core": [own_core(b) / own_core(a) for a, b in zip(kept(False), kept(True), strict=True)],
        "stream_ratio_median": statistics.median(by_stream),
        "stream_ratio_worst": min(by_stream),
        "above_idle_mb": {
            name: max(phase["largest_mb"] for phase in kept(hostile)) - idle_mb
            for name, hostile in (("without", False), ("with", True))
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="tokens per answer")
    parser.add_argument("--turns", type=int, default=4, help="turns of two phases, one with malformed bodies")
    parser.add_argument("--seconds", type=float, default=30, help="seconds per phase")
    parser.add_argument("--connections", type=int, default=1, help="connections that send malformed bodies")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two bodies of a connection")
    parser.add_argument("--out", type=Path, default=Path("runs/server-load"))
    parser.add_argument("--malformed", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.malformed:
        send_malformed(options.port, options.seconds, options.pause, options.malformed, options.seed)
        return
    from reprieve.bench.runner import environment
    from reprieve.files import replace_file

    with tempfile.TemporaryDirectory() as folder, served(options, Path(folder) / "log.txt") as (port, server):
        found = asyncio.run(measure(options, port, Memory(server.pid), Path(folder)))
    found["refusals_per_s"] /= options.seconds
    replace_file(options.out / "results.json", json.dumps({**environment(), **found}, indent=2) + "\n")
    for kind, row in sorted(found["refusals"].items(), key=lambda item: -item[1]["max_s"]):
        times = ", ".join(f"{1000 * row[name]:.0f}" for name in ("median_s", "p95_s", "max_s"))
        print(f"{kind:28} n = {row['n']:4}  {times} ms  {' '.join(row['statuses'])}")
    print(json.dumps({name: found[name] for name in found if name not in ("refusals", "phases")}, indent=2))


if __name__ == "__main__":
    main()
