"""Completions from one server or several: prompts as token ids, retries, and others where one has died."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reprieve.errors import EngineError, ReprieveError, import_extra
from reprieve.settings import SamplingParams

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
        """Tokens of each forward, in no order: a server tells how many blocks of each length there were."""
        counts = self.speculation.get("acceptance_histogram")
        if not counts:
            return [1] * len(self.token_ids)
        return [1, *(length for length, count in enumerate(counts, start=1) for _ in range(count))]


class Client:
    """Asks servers that all hold the same model; each request goes where the fewest are under way.

    For use in one event loop.

    Args:
        urls: of the servers, without /v1.
        model: its name there.
        timeout: seconds.
        why: says why a server may have died, for the message; its log, say.
    """

    def __init__(self, urls: Sequence[str], model: str, *, timeout: float, why: Any = lambda: "") -> None:
        openai = import_extra("openai", "api")
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.model = model
        self._errors = openai
        self._clients = {
            url: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=_RETRIES, timeout=timeout)
            for url in urls
        }
        self._under_way = dict.fromkeys(urls, 0)
        self._why = why

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
        while self._under_way:
            url = min(self._under_way, key=self._under_way.__getitem__)
            self._under_way[url] += 1
            try:
                return await self._ask(self._clients[url], prompt_ids, params, extra, num, keep_stop, stream)
            except (self._errors.APIConnectionError, self._errors.InternalServerError) as error:
                self._under_way.pop(url, None)  # the others take its share
                told = f"{url} does not answer ({' '.join(str(error).split()) or type(error).__name__}){self._why()}"
            except self._errors.APIStatusError as error:
                raise ReprieveError(f"{url} refuses: {' '.join(error.message.split())}") from None
            finally:
                if url in self._under_way:
                    self._under_way[url] -= 1
            if not self._under_way:
                raise EngineError(told)
        raise EngineError("no server answers any more")

    async def _ask(
        self,
        client: Any,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        extra: Mapping[str, Any] | None,
        num: int,
        keep_stop: bool,
        stream: bool,
    ) -> list[Completion]:
        began = time.perf_counter()
        reply = await client.completions.create(
            model=self.model,
            prompt=list(prompt_ids),
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            n=num,
            stop=list(params.stop) or None,
            extra_body=_extra_body(params, extra, keep_stop),
            **(_STREAMED if stream else {}),
        )
        if stream:
            return [await _read_stream(reply, began)]
        seconds = time.perf_counter() - began
        numbers = _speculation(reply)
        return [_completion(choice, seconds, numbers) for choice in sorted(reply.choices, key=lambda one: one.index)]

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()


def _extra_body(params: SamplingParams, extra: Mapping[str, Any] | None, keep_stop: bool) -> dict[str, Any]:
    """What OpenAI's API has no word for, in vLLM's words."""
    body: dict[str, Any] = {"return_token_ids": True, "top_k": params.top_k or -1}
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
            new = list(getattr(choice, "token_ids", None) or ())
            if new or choice.text:
                arrivals.append(time.perf_counter() - began)
            text += choice.text
            token_ids += new
            last = choice if choice.finish_reason else last
        numbers = _speculation(piece) or numbers
    seconds = time.perf_counter() - began
    return Completion(text, token_ids, _finish_reason(last), seconds, numbers, arrivals)


def _completion(choice: Any, seconds: float, numbers: Mapping[str, Any]) -> Completion:
    token_ids = list(getattr(choice, "token_ids", None) or ())
    return Completion(choice.text, token_ids, _finish_reason(choice), seconds, numbers)


def _finish_reason(choice: Any) -> str:
    """OpenAI's `stop` is the end of the text or a stop text: vLLM says which."""
    if choice is None or choice.finish_reason != "stop":
        return "length"
    return "stop" if isinstance(getattr(choice, "stop_reason", None), str) else "eos"


def _speculation(reply: Any) -> dict[str, Any]:
    metrics = (getattr(reply, "model_extra", None) or {}).get("metrics") or {}
    return dict(metrics.get("speculative_decoding") or {})
