"""Client of one or more servers: prompts as token ids, retries, and failover if a server dies."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reprieve.backends.servers import Running, answers
from reprieve.backends.settings import ServerSettings
from reprieve.errors import EngineError, ReprieveError, import_extra
from reprieve.settings import SamplingParams

T = TypeVar("T")
_RETRIES = 3
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Completion:
    """One answer of a server."""

    text: str
    token_ids: list[int]
    finish_reason: str  # eos, stop or length
    seconds: float
    speculation: Mapping[str, Any] = field(default_factory=dict)  # vLLM's per-request numbers, where it gives them
    arrivals: list[float] = field(default_factory=list)  # seconds after the request, of each piece of a stream

    @property
    def num_steps(self) -> int:
        """Target forwards: the prompt's, which gives the first token, and one for each block."""
        return int(self.speculation.get("num_spec_steps", -1)) + 1 or len(self.token_ids)

    @property
    def step_lengths(self) -> list[int]:
        """Tokens of each target forward, in no order: the server reports a histogram of block lengths."""
        counts = self.speculation.get("acceptance_histogram")
        if not counts:
            return [1] * len(self.token_ids)
        return [1, *(length for length, count in enumerate(counts, start=1) for _ in range(count))]


class Client:
    """Client of servers that hold the same model; each request goes to the server with the fewest in flight.

    For use in one event loop.

    Failed requests are retried a few times; each attempt has `settings.timeout` seconds.
    """

    def __init__(self, running: Running, settings: ServerSettings) -> None:
        openai = import_extra("openai", "api")
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.model = running.model
        self._errors = openai
        self._clients = {
            url: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=_RETRIES, timeout=settings.timeout)
            for url in running.urls
        }
        self._under_way = dict.fromkeys(running.urls, 0)
        self._why = running.why
        self._room = asyncio.Semaphore(settings.parallel)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        extra: Mapping[str, Any] | None = None,
        num: int = 1,
        keep_stop: bool = False,
        stream: bool = False,
    ) -> list[Completion]:
        """`num` answers to a prompt.

        Args:
            extra: `vllm_xargs` of the request.
            keep_stop: leave the stop text in the answer and its tokens.
            stream: note when each piece came; needs `num` = 1.

        Raises:
            EngineError: no server answers any more.
            ReprieveError: the servers refuse the request.
        """
        request = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "n": num,
            "stop": list(params.stop) or None,
            "extra_body": _extra_body(params, extra, keep_stop),
            **(_STREAMED if stream else {}),
        }
        async with self._room:
            return await self._somewhere(request, _ask)

    async def read(
        self, token_ids: Sequence[int], num_rows: int, num_candidates: int, *, extra: Mapping[str, Any] | None = None
    ) -> list[dict[int, float]]:
        """Log-probabilities, at temperature 1, of the likeliest tokens after each of the last tokens of a text.

        Args:
            num_rows: how many of the last tokens.
            num_candidates: tokens per position; servers have a limit (20).
            extra: `vllm_xargs` of the request.

        Raises:
            EngineError: no server answers any more, or it reports no log-probabilities of prompts.
            ReprieveError: the servers refuse the request.
        """
        text = [*token_ids, token_ids[-1]]  # servers report only positions that hold a token: append one
        body: dict[str, Any] = {"prompt_logprobs": num_candidates}
        if extra:
            body["vllm_xargs"] = dict(extra)
        request = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0.0, "n": 1, "extra_body": body}
        async with self._room:
            logprobs = await self._somewhere(request, functools.partial(_read_prompt, num_rows))
        if len(logprobs) < num_rows or None in logprobs:
            raise EngineError("the server reports no log-probabilities of prompts (prompt_logprobs): use a vLLM server")
        # The appended token has no meaning; `_likeliest` drops it unless it is a candidate.
        return [_likeliest(one, num_candidates) for one in logprobs]

    async def _somewhere(self, request: Mapping[str, Any], send: Callable[..., Awaitable[list[T]]]) -> list[T]:
        """Send a request to the server with the fewest in flight; if that server has died, try another."""
        while self._under_way:
            url = min(self._under_way, key=self._under_way.__getitem__)
            self._under_way[url] += 1
            try:
                return await send(self._clients[url], request)
            except self._errors.APIError as error:
                said = " ".join(str(error).split()) or type(error).__name__
                status = getattr(error, "status_code", 500)
                if status < 500 or await asyncio.to_thread(answers, url):  # the server is up: the request itself failed
                    raise ReprieveError(f"{url} refuses: {said}") from None
                self._under_way.pop(url, None)  # the others take its share
                failure = f"{url} does not answer ({said}){self._why()}"
            finally:
                if url in self._under_way:
                    self._under_way[url] -= 1
            if not self._under_way:
                raise EngineError(failure)
        raise EngineError("no server answers any more")

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()


async def _ask(client: Any, request: Mapping[str, Any]) -> list[Completion]:
    began = time.perf_counter()
    reply = await client.completions.create(**request)
    if "stream" in request:
        return [await _read_stream(reply, began)]
    seconds = time.perf_counter() - began
    numbers = _speculation(reply)
    return [
        _completion(choice, choice.text, _token_ids(choice), seconds=seconds, speculation=numbers)
        for choice in sorted(reply.choices, key=lambda one: one.index)
    ]


async def _read_prompt(num_rows: int, client: Any, request: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    reply = await client.completions.create(**request)
    return list(getattr(reply.choices[0], "prompt_logprobs", None) or ())[-num_rows:]


def _likeliest(logprobs: Mapping[str, Any] | None, num: int) -> dict[int, float]:
    """The `num` likeliest tokens of a position; servers also report the text's own token, whatever its rank."""
    ranked = sorted((logprobs or {}).items(), key=lambda item: (item[1]["rank"], int(item[0])))
    return {int(token_id): float(one["logprob"]) for token_id, one in ranked[:num]}


def _extra_body(params: SamplingParams, extra: Mapping[str, Any] | None, keep_stop: bool) -> dict[str, Any]:
    """Fields that vLLM adds to OpenAI's API."""
    # Neutral values: else a server takes those of the model's generation_config.json.
    neutral = {"repetition_penalty": 1.0, "min_p": 0.0}
    body: dict[str, Any] = {"return_token_ids": True, "top_k": params.top_k or -1, **neutral}
    if extra:
        body["vllm_xargs"] = dict(extra)
    if keep_stop:
        body["include_stop_str_in_output"] = True
    if params.ignore_eos:
        body["ignore_eos"] = True
    if params.eos_token_ids is not None:
        body["stop_token_ids"] = list(params.eos_token_ids)
    return body


async def _read_stream(pieces: Any, began: float) -> Completion:
    text, last = "", None
    token_ids: list[int] = []
    arrivals: list[float] = []
    numbers: dict[str, Any] = {}
    async for piece in pieces:
        if piece.choices:
            choice = piece.choices[0]
            new = _token_ids(choice)
            if new or choice.text:
                arrivals.append(time.perf_counter() - began)
            text += choice.text
            token_ids += new
            last = choice if choice.finish_reason else last
        numbers = _speculation(piece) or numbers
    seconds = time.perf_counter() - began
    return _completion(last, text, token_ids, seconds=seconds, speculation=numbers, arrivals=arrivals)


def _completion(choice: Any, text: str, token_ids: list[int], **more: Any) -> Completion:
    """Return an answer, given the piece of the response that ends it.

    Raises:
        EngineError: text without token ids.
    """
    if text and not token_ids:
        raise EngineError("the server returns no token ids (return_token_ids): use a vLLM server")
    finish_reason = "length"
    if choice is not None and choice.finish_reason == "stop":  # the end of the text or a stop text: vLLM says which
        finish_reason = "stop" if isinstance(getattr(choice, "stop_reason", None), str) else "eos"
    return Completion(text, token_ids, finish_reason, **more)


def _token_ids(choice: Any) -> list[int]:
    return list(getattr(choice, "token_ids", None) or ())


def _speculation(reply: Any) -> dict[str, Any]:
    metrics = (getattr(reply, "model_extra", None) or {}).get("metrics") or {}
    return dict(metrics.get("speculative_decoding") or {})
