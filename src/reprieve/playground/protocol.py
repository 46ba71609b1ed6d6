"""The part of OpenAI's protocol that this server speaks: requests as they come, checked; responses as they go."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from reprieve.backends.request_fields import LEVEL, SWITCH, THRESHOLD
from reprieve.engine import SamplingParams
from reprieve.engine.text_stream import LONGEST_CHARACTER, REPLACEMENT
from reprieve.settings import MAX_STOP_LENGTH
from reprieve.types import Generation, Token

Whole = Annotated[int, Field(strict=True)]  # true is no number
_MOST_ITEMS = 100_000  # of a prompt's token ids, and of the parts of all messages
_MOST_MESSAGES = 4096
_MOST_FIELDS = 64  # of a body, and of an object in it


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"a number is wanted, got {value}")
    return value


Real = Annotated[float, BeforeValidator(_no_boolean)]
TokenIds = Annotated[list[Whole], Field(max_length=_MOST_ITEMS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
MAX_CHOICES = 128
_GREEDY = 1e-5  # temperatures below it are 0, as in vLLM: dividing by much less overflows
_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class RequestBody(BaseModel):
    """Fields of both kinds of completion. Refuses unknown fields, and known ones that would have no effect."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    temperature: Annotated[Real, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1, le=16, strict=True)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    ignore_eos: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    vllm_xargs: dict[Literal["reprieve_threshold", "reprieve_rule", "reprieve_leniency"], Any] | None = None
    reprieve_rule: str | None = None
    reprieve_threshold: Real | None = None
    reprieve_leniency: str | None = None
    reprieve_provenance: bool = False

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, body: Any) -> Any:
        """Bound the number of fields before any of them is looked at."""
        if isinstance(body, dict):
            for name, value in [("the body", body), *list(body.items())[:_MOST_FIELDS]]:
                if isinstance(value, dict) and len(value) > _MOST_FIELDS:
                    raise ValueError(f"{str(name)[:100]} must hold at most {_MOST_FIELDS} fields, got {len(value)}")
        return body

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> RequestBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @model_validator(mode="after")
    def _extra_arguments_are_plain(self) -> RequestBody:
        for name, value in (self.vllm_xargs or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
            if isinstance(value, list | dict):
                raise ValueError(f"{name} must be a number or a text, got {type(value).__name__}")
        return self

    @property
    def leniency(self) -> dict[str, Any]:
        """The fields that choose rule and setting; as on vLLM they may also stand in `vllm_xargs`."""
        given: dict[str, Any] = {str(name): value for name, value in (self.vllm_xargs or {}).items()}
        own = {SWITCH: self.reprieve_rule, THRESHOLD: self.reprieve_threshold, LEVEL: self.reprieve_leniency}
        return {**given, **{name: value for name, value in own.items() if value is not None}}

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, *, max_new_tokens: int, seed: int, num_logprobs: int | None) -> SamplingParams:
        """For the engine."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if self.temperature is None else self.temperature if self.temperature >= _GREEDY else 0.0,
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
            seed=seed,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
            num_logprobs=num_logprobs,
        )


class CompletionBody(RequestBody):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_CHOICES)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MAX_CHOICES)]
    )
    max_tokens: Annotated[int, Field(ge=1, strict=True)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[str | TokenIds]:
        """One prompt or several, as text or token ids."""
        given = self.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        return given if several else [given]  # type: ignore[return-value, list-item]


class TextPart(BaseModel):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=_MOST_MESSAGES, fail_fast=True)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TemplateOptions(BaseModel):
    """Options of a chat template besides the messages."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enable_thinking: bool | None = None


class ChatBody(RequestBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @model_validator(mode="after")
    def _one_budget(self) -> ChatBody:
        given = {value for value in (self.max_tokens, self.max_completion_tokens) if value is not None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens must agree where both are given")
        return self


class Texts(Protocol):
    """Token ids to text."""

    def decode(self, token_ids: list[int]) -> str: ...
    def visible(self, token_ids: list[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes | None: ...


@dataclass
class _Place:
    """Position that a choice's log-probabilities have reached."""

    num_characters: int = 0
    last: int | None = None  # token
    complete: int | None = None  # the last token that ended a character
    pending: list[int] = field(default_factory=list)  # tokens of a character that is not whole yet


class Replies:
    """Builds the responses to one request.

    Args:
        kind: `completion` or `chat`.
        texts: token ids to text, for logprobs.
        spec: of the rule in force, for the summary.
    """

    def __init__(self, kind: str, request_id: str, model: str, texts: Texts, spec: str, *, provenance: bool) -> None:
        self.chat = kind == "chat"
        self.decode = texts.decode
        self.visible = texts.visible
        self.spec = spec
        self.provenance = provenance
        self._base = {"id": request_id, "created": int(time.time()), "model": model}
        self.token_bytes = texts.token_bytes
        self._places: dict[int, _Place] = {}  # of each choice

    def whole(self, made: Sequence[Generation], num_prompt_tokens: int, num_logprobs: int | None) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = []
        for index, answer in enumerate(made):
            choice: dict[str, Any] = {"index": index, "finish_reason": _FINISH[answer.finish_reason]}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            else:
                choice["text"] = answer.text
            choice["logprobs"] = self._logprobs(index, answer.tokens, num_logprobs)
            if self.provenance:
                choice["reprieve"] = {"tokens": [self.token(token) for token in answer.tokens]}
            choices.append(choice)
        return {
            **self._base,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": choices,
            "usage": usage(num_prompt_tokens, made),
            "reprieve": self.summary(made),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a streamed chat; None for completions."""
        return self._chunk(index, {"role": "assistant", "content": ""}) if self.chat else None

    def piece(self, index: int, token: Token, text: str, num_logprobs: int | None) -> dict[str, Any] | None:
        """One token of a stream; None where there is nothing to tell yet."""
        if not text and not self.provenance and num_logprobs is None:
            return None
        delta = {"content": text} if self.chat else text
        chunk = self._chunk(index, delta, logprobs=self._logprobs(index, [token], num_logprobs))
        if self.provenance:
            chunk["choices"][0]["reprieve"] = {"tokens": [self.token(token)]}
        return chunk

    def closing(self, index: int, made: Generation) -> dict[str, Any]:
        """The end of one streamed choice, with what the rule did."""
        chunk = self._chunk(index, {} if self.chat else "", finish_reason=_FINISH[made.finish_reason])
        return {**chunk, "reprieve": self.summary([made])}

    def usage(self, num_prompt_tokens: int, made: Sequence[Generation]) -> dict[str, Any]:
        """The last chunk of a stream that was asked for its usage."""
        return {**self._base, "object": self._chunk_object, "choices": [], "usage": usage(num_prompt_tokens, made)}

    def summary(self, made: Sequence[Generation]) -> dict[str, Any]:
        """Rule, tokens rescued, and how fast it was."""
        num_tokens = sum(len(answer.tokens) for answer in made)
        num_rounds = sum(answer.num_rounds for answer in made)
        seconds = sum(answer.seconds for answer in made)
        return {
            "rule": self.spec,
            "num_rounds": num_rounds,
            "num_drafted": sum(answer.num_drafted for answer in made),
            "num_accepted": sum(answer.num_accepted for answer in made),
            "num_rescued": sum(answer.num_rescued for answer in made),
            "tokens_per_round": num_tokens / max(1, num_rounds),
            "tokens_per_second": num_tokens / seconds if seconds else None,
            "seconds": seconds,
        }

    def token(self, token: Token) -> dict[str, Any]:
        """A token's provenance, as the playground shows it."""
        other = next((item for item in token.alternatives if item[0] != token.token_id), None)
        return {
            "token_id": token.token_id,
            "text": self.decode([token.token_id]),
            "provenance": token.provenance.value,
            "risk": _finite(token.risk),
            "logprob": _finite(token.logprob),
            "alternative": None if other is None else {"text": self.decode([other[0]]), "logprob": _finite(other[1])},
        }

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(
        self, index: int, content: Any, *, logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self.chat else "text": content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {**self._base, "object": self._chunk_object, "choices": [choice]}

    def _logprobs(self, index: int, tokens: Sequence[Token], num_logprobs: int | None) -> dict[str, Any] | None:
        if num_logprobs is None:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(token, num_logprobs) for token in tokens], "refusal": None}
        place = self._places.setdefault(index, _Place())
        entries = [self._completion_logprob(place, token, num_logprobs) for token in tokens]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return (
            dict(zip(names, map(list, zip(*entries, strict=True)), strict=True)) if entries else {n: [] for n in names}
        )

    def _completion_logprob(
        self, place: _Place, token: Token, num_logprobs: int
    ) -> tuple[str, float | None, dict[str, float | None], int]:
        """A token's text, log-probability and alternatives, and the character of the answer that it begins at."""
        text = self._text(place.last, token.token_id)
        top: dict[str, float | None] = {}
        for token_id, value in token.alternatives[:num_logprobs]:
            name = self._text(place.last, token_id)
            top[name if name not in top else f"token_id:{token_id}"] = _finite(value)  # two tokens with one text
        offset = place.num_characters
        place.pending.append(token.token_id)
        before = [] if place.complete is None else [place.complete]
        grown = self.visible([*before, *place.pending])[len(self.visible(before)) if before else 0 :]
        if not grown.endswith(REPLACEMENT) or len(place.pending) >= LONGEST_CHARACTER:  # else half a character
            place.num_characters += len(grown)
            place.complete, place.pending = token.token_id, []
        place.last = token.token_id
        return text, _finite(token.logprob), top, offset

    def _text(self, before: int | None, token_id: int) -> str:
        """A token's text behind another: alone, some tokenizers leave out the space that it begins with."""
        alone = self.decode([token_id])
        if before is None:
            return alone
        known, both = self.decode([before]), self.decode([before, token_id])
        return both[len(known) :] if both.startswith(known) and both[len(known) :].endswith(alone) else alone

    def _chat_logprob(self, token: Token, num_logprobs: int) -> dict[str, Any]:
        def entry(token_id: int, value: float | None) -> dict[str, Any]:
            text = self.decode([token_id])
            own = self.token_bytes(token_id)
            return {"token": text, "logprob": _finite(value), "bytes": list(text.encode() if own is None else own)}

        top = [entry(token_id, value) for token_id, value in token.alternatives[:num_logprobs]]
        return {**entry(token.token_id, token.logprob), "top_logprobs": top}


def usage(num_prompt_tokens: int, made: Sequence[Generation]) -> dict[str, int]:
    """Tokens read and written."""
    num_new = sum(len(answer.tokens) for answer in made)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new,
        "total_tokens": num_prompt_tokens + num_new,
    }


def error_body(message: str, *, kind: str, param: str | None = None, code: int | str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_SHAPES = {  # fields that take several shapes: the checks of each shape alone would mislead
    "prompt": f"must be a text, token ids, or up to {MAX_CHOICES} of either",
    "stop": f"must be a text of 1 to {MAX_STOP_LENGTH} characters, or up to 16 of them",
    "messages": "must be a list of messages, each with a role and a text (or text parts) as content",
}


def field_error(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """The first thing wrong with a body: a sentence, and the field."""
    first = errors[0]
    where = [str(part)[:100] for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']} at character {where[0]}", None
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        return (f"{'.'.join(where)}: {reason}", where[0]) if where else (reason, reason.partition(" ")[0])
    if not where:
        return "send a JSON object, with Content-Type: application/json", None
    if where[0] in _SHAPES and first["type"] != "missing":
        return f"{where[0]} {_SHAPES[where[0]]}", where[0]
    got = first.get("input")
    shown = "" if isinstance(got, dict | list) or got is None else f", got {str(got)[:80]!r}"
    return f"{'.'.join(where)}: {first['msg']}{shown}", where[0]


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
