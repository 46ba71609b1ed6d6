"""HTTP routes of the server: limits, errors, streaming. The worker thread does the decoding."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from reprieve.errors import ContextOverflowError, ReprieveError, SpecError
from reprieve.playground.bodies import MAX_CHOICES, Body, ChatBody, CompletionBody, RequestBody, read_body
from reprieve.playground.protocol import Prompts, Replies
from reprieve.playground.settings import PlaygroundSettings
from reprieve.playground.worker import Finished, Piece, QueuedRequest, Worker
from reprieve.policies.menu import Menu
from reprieve.policies.policy import RequestError
from reprieve.settings import NumDraftTokens, wrapped_seed
from reprieve.types import Generation


class UnknownModelError(RequestError):
    """A model that is not served here."""


_GONE = "the client went away"
_MOST_BYTES = 1 << 20  # of a request's body
_MOST_READ = 16 * _MOST_BYTES  # of a body that is too large: a client may read the response only after it has sent all
# Types of errors by status; any other is an invalid request.
_TYPES = {
    401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "disconnected",
    500: "server_error", 503: "service_unavailable_error",
}  # fmt: skip


def create_app(service: Service) -> FastAPI:
    """Create the server for a service."""
    settings, worker = service.settings, service.worker

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPI(title="Reprieve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if settings.hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))

    for kind in (HTTPException, ReprieveError, Exception):
        app.add_exception_handler(kind, _on_error)
    api = APIRouter(prefix="/v1", dependencies=[Depends(service.require_key)])
    api.add_api_route("/completions", service.complete, methods=["POST"], response_model=None)
    api.add_api_route("/chat/completions", service.chat, methods=["POST"], response_model=None)
    api.add_api_route("/models", service.models, methods=["GET"])
    api.add_api_route("/models/{name:path}", service.model, methods=["GET"])
    api.add_api_route("/reprieve", service.offer, methods=["GET"])
    app.include_router(api)
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/", _playground, methods=["GET"])
    return app


@dataclass(frozen=True)
class Service:
    """Handlers of the routes.

    Args:
        num_draft_tokens, example: shown to clients.
    """

    settings: PlaygroundSettings
    worker: Worker
    menu: Menu
    prompts: Prompts
    num_draft_tokens: NumDraftTokens
    example: str

    async def require_key(self, request: Request) -> None:
        """Refuse a request without the API key, if one is set."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        key = self.settings.api_key
        if key is not None and not (scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())):
            raise HTTPException(401, "a valid API key is needed: send it as Authorization: Bearer KEY")

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = await self._read(CompletionBody, request)
        if body.n * len(body.prompts) > MAX_CHOICES:
            message = f"n times the number of prompts must be at most {MAX_CHOICES}, got {body.n * len(body.prompts)}"
            raise RequestError("n", message)
        prompts = [await asyncio.to_thread(self.prompts.plain, prompt) for prompt in body.prompts]
        return await self._answer(body, prompts, body.max_tokens, body.logprobs, request)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await self._read(ChatBody, request)
        messages = [(message.role, message.text) for message in body.messages]
        thinking = (body.chat_template_kwargs or {}).get("enable_thinking")
        prompt = await asyncio.to_thread(self.prompts.chat, messages, thinking)
        wanted = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs", "top_logprobs needs logprobs=true")
        limit = body.max_completion_tokens or body.max_tokens
        return await self._answer(body, [prompt], limit, wanted, request)

    async def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/NAME`."""
        self._require_model(name)
        return self._model()

    async def offer(self) -> dict[str, Any]:
        """`GET /v1/reprieve`: the rules on offer, for clients that let people choose."""
        return {
            "model": self.settings.model_name,
            "num_draft_tokens": self.num_draft_tokens,
            "example": self.example,
            "rules": self.menu.describe(),
        }

    async def health(self) -> dict[str, Any]:
        """`GET /health`: the state of the queue."""
        return {"status": "ok", "waiting": self.worker.num_waiting, "busy": self.worker.busy}

    def _model(self) -> dict[str, Any]:
        return {"id": self.settings.model_name, "object": "model", "created": 0, "owned_by": "reprieve"}

    def _require_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            raise UnknownModelError("model", f"model must be {self.settings.model_name!r}, got {name!r}")

    async def _read(self, kind: type[Body], request: Request) -> Body:
        """Read a request's body.

        Raises:
            RequestError: its Content-Type is not JSON (other websites could send that through a browser), or it
                cannot be accepted.
            HTTPException: 413 if it is too large, 499 if the client went away before it was complete.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (media_type.startswith("application/") and media_type.endswith(("/json", "+json"))):
            raise RequestError(None, "send a JSON object, with Content-Type: application/json")
        pieces: list[bytes] = []
        size = 0
        try:
            async for piece in request.stream():
                size += len(piece)
                if size <= _MOST_BYTES:
                    pieces.append(piece)
                elif size > _MOST_READ:
                    break
        except ClientDisconnect:
            raise HTTPException(499, _GONE) from None
        if size > _MOST_BYTES:
            raise HTTPException(413, f"the request body must hold at most {_MOST_BYTES} bytes")
        return read_body(kind, b"".join(pieces))

    async def _answer(
        self,
        body: RequestBody,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        num_logprobs: int | None,
        request: Request,
    ) -> Response:
        self._require_model(body.model)
        choice = self.menu.choose(body.leniency)
        room = self.prompts.room(prompts, max_tokens, self.settings.max_tokens)
        # The playground shows the target's alternative to each token, which takes at least two logprobs.
        wanted = max(num_logprobs or 0, 2) if body.reprieve_provenance else num_logprobs
        seed = secrets.randbits(31) if body.seed is None else body.seed
        repeated = [prompt for prompt in prompts for _ in range(body.n)]
        params = [
            body.sampling(max_new_tokens=room, seed=wrapped_seed(seed + number), num_logprobs=wanted)
            for number in range(len(repeated))
        ]
        job = QueuedRequest(repeated, params, choice, asyncio.get_running_loop())
        self.worker.submit(job)
        replies = Replies(
            isinstance(body, ChatBody),
            self.settings.model_name or "",
            self.prompts,
            choice.rule.spec,
            num_prompt_tokens=sum(len(prompt) for prompt in prompts),
            num_logprobs=num_logprobs,
            provenance=body.reprieve_provenance,
        )
        events = self._events(job, request)
        if body.stream:
            first = await anext(events)  # an error before the first token is still an ordinary response
            lines = _lines(first, events, replies, body.include_usage)
            return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        generations = [event.generation async for event in events if isinstance(event, Finished)]
        return JSONResponse(replies.whole(generations))

    async def _events(self, job: QueuedRequest, request: Request) -> AsyncIterator[Piece | Finished]:
        """Yield the job's events until all choices are finished; cancel the job if the consumer stops earlier."""
        left = len(job.prompts)
        watcher = asyncio.create_task(_watch(job, request))
        try:
            while left:
                event = await job.events.get()
                if isinstance(event, Exception):
                    raise event
                left -= isinstance(event, Finished)
                yield event
        finally:
            watcher.cancel()
            job.cancel()


async def _lines(
    first: Piece | Finished, events: AsyncIterator[Piece | Finished], replies: Replies, include_usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events; a later error is sent as an event and ends the stream without [DONE]."""
    generations: list[Generation] = []
    opened: set[int] = set()
    try:
        event: Piece | Finished | None = first
        while event is not None:
            if event.index not in opened:
                opened.add(event.index)
                yield _line(replies.opening(event.index))
            if isinstance(event, Piece):
                yield _line(replies.piece(event.index, event.token, event.text))
            else:
                generations.append(event.generation)
                yield _line(replies.closing(event.index, event.generation))
            event = await anext(events, None)
        if include_usage:
            yield _line(replies.usage(generations))
        yield "data: [DONE]\n\n"
    except (ReprieveError, HTTPException) as error:
        yield _line(_error_of(error)[1])
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def _watch(job: QueuedRequest, request: Request) -> None:
    """End a job when its client disconnects; other messages are ignored."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()
    job.events.put_nowait(HTTPException(499, _GONE))


def _line(chunk: dict[str, Any] | None) -> str:
    return "" if chunk is None else f"data: {json.dumps(chunk)}\n\n"


def _error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error, as OpenAI's clients read them."""
    status, message, code = 500, "the engine failed; the server's log says more", None
    param = getattr(error, "parameter", None)
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, ContextOverflowError):
        status, message, param, code = 400, str(error), "max_tokens", "context_length"
    elif isinstance(error, UnknownModelError):
        status, message, code = 404, str(error), "model_not_found"
    elif isinstance(error, SpecError):
        status, message = 400, str(error)
    kind = _TYPES.get(status, "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    status, body = _error_of(error)
    return JSONResponse(body, status, headers={"Retry-After": "1"} if status == 429 else None)


async def _playground() -> HTMLResponse:
    """Return the playground: one page without a build step or external resources."""
    page = resources.files("reprieve.playground").joinpath("playground.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})
