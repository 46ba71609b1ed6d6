"""Middleware before the routes: a limit on body sizes, enforced while a body arrives, and the API key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprieve.playground.protocol import error_body

_LINGER = 16  # times the limit: how much more of a body that is too large is listened to


class BodyLimit:
    """ASGI middleware: answers 413 to bodies of more than `max_bytes`, whether or not they say how long they are.

    A body that has not arrived after `timeout_s` seconds is answered 408.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body within the limit, then pass it on whole."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(receive), self.timeout_s)
        except TimeoutError:
            await self._refusal(408, f"the request body must arrive within {self.timeout_s:g} s")(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > self.max_bytes:
            await self._refusal(413, f"the request body must hold at most {self.max_bytes} bytes")(scope, receive, send)
            return
        handed_on = False

        async def replay() -> Message:
            nonlocal handed_on
            if handed_on:
                return await receive()  # what comes now can only be the client going away
            handed_on = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or a little more than is allowed of it; None where the client goes away.

        What is too much is read and dropped, up to a limit: a client that is refused while it still sends may see a
        broken connection instead of the answer.
        """
        body, num_dropped = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            if len(body) <= self.max_bytes:
                body += message.get("body", b"")
            else:
                num_dropped += len(message.get("body", b""))
            if num_dropped > _LINGER * self.max_bytes or not message.get("more_body"):
                return bytes(body)

    def _refusal(self, status: int, refusal: str) -> JSONResponse:
        body = error_body(refusal, kind="invalid_request_error", code=status)
        return JSONResponse(body, status, headers={"Connection": "close"})


class Guard:
    """ASGI middleware: asks for the API key, and counts responses."""

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
