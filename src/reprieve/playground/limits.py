"""Limits on clients: the API key, time for headers, and size of request bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from reprieve.playground.protocol import error_body

HEADERS_S = 10.0  # seconds in which a request's headers must have arrived
_LINGER = 16  # times the limit: bytes of an oversized body that are still read, and dropped
_MOST_HELD = 32  # times the limit: bytes in memory of all bodies together
_SMALL = 1 << 14  # bytes of a body that are always accepted, so that large bodies cannot block ordinary requests


@dataclass
class _Incoming:
    """The body of one request."""

    pieces: list[bytes] = field(default_factory=list)
    num_held: int = 0  # bytes that count as held, until the answer begins


class BodyLimit:
    """ASGI middleware: responds 413 to bodies of more than `max_bytes`, with or without a Content-Length.

    The response is 408 if a body has not arrived after `timeout_s` seconds, and 503 to a large body if the bodies of
    other requests leave no memory for it.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body within the limits, then pass it on whole."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        incoming = _Incoming()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._release(incoming)
            await send(message)

        try:
            app = await self._read(receive, incoming)
            if app is not None:
                await app(scope, _replay(incoming, receive), answer)
        finally:
            self._release(incoming)

    async def _read(self, receive: Receive, incoming: _Incoming) -> ASGIApp | None:
        """Return the app that responds: the wrapped app, or a refusal; None if the client has disconnected."""
        try:
            complete = await asyncio.wait_for(self._collect(receive, incoming), self.timeout_s)
        except TimeoutError:
            return _refusal(408, f"the request body must arrive within {self.timeout_s:g} s")
        except _NoMemoryError:
            return _refusal(503, "the bodies of other requests take all the memory set aside; try again later")
        if incoming.num_held > self.max_bytes:
            return _refusal(413, f"the request body must hold at most {self.max_bytes} bytes")
        return self.app if complete else None

    async def _collect(self, receive: Receive, incoming: _Incoming) -> bool:
        """Collect the body, up to slightly more than the limit; return whether the client is still connected.

        Further bytes are read and dropped, up to another limit: a client that is refused while it still sends may see a
        broken connection instead of the response.

        Raises:
            _NoMemoryError: other bodies leave no room for this one.
        """
        num_dropped, most_held = 0, _MOST_HELD * self.max_bytes
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece = message.get("body", b"")
            if incoming.num_held > self.max_bytes:
                num_dropped += len(piece)
            elif incoming.num_held + len(piece) > _SMALL and self._num_held + len(piece) > most_held:
                raise _NoMemoryError
            else:
                incoming.pieces.append(piece)
                incoming.num_held += len(piece)
                self._num_held += len(piece)
            if num_dropped > _LINGER * self.max_bytes or not message.get("more_body"):
                return True

    def _release(self, incoming: _Incoming) -> None:
        self._num_held -= incoming.num_held
        incoming.num_held = 0


class _NoMemoryError(Exception):
    """Other requests' bodies leave no room."""


def _replay(incoming: _Incoming, receive: Receive) -> Receive:
    """Return a `receive` that yields the collected body once, and then waits for the client to disconnect."""
    messages = [{"type": "http.request", "body": b"".join(incoming.pieces), "more_body": False}]
    incoming.pieces.clear()

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _refusal(status: int, message: str) -> JSONResponse:
    kind = "service_unavailable_error" if status == 503 else "invalid_request_error"
    headers = {"Connection": "close"} | ({"Retry-After": "1"} if status == 503 else {})
    return JSONResponse(error_body(message, kind=kind, code=status), status, headers=headers)


class Guard:
    """ASGI middleware: checks the API key, and counts responses."""

    def __init__(self, app: ASGIApp, admits: Callable[[Headers], bool], count: Callable[[str, int], None]) -> None:
        self.app = app
        self.admits = admits
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count(path, message["status"])
            await send(message)

        app = self.app
        if path.startswith("/v1/") and not self.admits(Headers(scope=scope)):
            refusal = "a valid API key is needed: send it as Authorization: Bearer KEY"
            app = JSONResponse(error_body(refusal, kind="authentication_error", code=401), 401)
        await app(scope, receive, counted)


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a time limit on a request's headers; `BodyLimit` has the limit on bodies."""

    _waits: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process a piece of a request and update the timer."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Run the timer while the headers of a request are outstanding; stop it while a response is in progress."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waits is None:
            self._waits = self.loop.call_later(HEADERS_S, self._expire)

    def _expire(self) -> None:
        self._waits = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
