"""Requests of OpenAI's protocol: fields, limits, and errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reprieve.files import parse_json
from reprieve.policies.policy import FIELDS, RequestError
from reprieve.settings import MAX_STOP_LENGTH, SamplingParams

Whole = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
_MOST_ITEMS = 100_000  # of a prompt's token ids, and of the parts of all messages
_MOST_MESSAGES = 4096
_MOST_FIELDS = 64  # of a body, and of an object in it
_MOST_NESTED = 32_768  # lists, objects and fields of a body: eight for each message


TokenIds = Annotated[list[Whole], Field(max_length=_MOST_ITEMS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
MAX_CHOICES = 128
_GREEDY = 1e-5  # temperatures below it are 0, as in vLLM: dividing by much less overflows


class RequestBody(BaseModel):
    """Fields of both kinds of completion. Refuses unknown fields, and known ones that would have no effect."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    temperature: Annotated[Real, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    n: Annotated[Whole, Field(ge=1, le=16)] = 1
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: Flag = False
    stream_options: dict[Literal["include_usage"], Flag] | None = None
    ignore_eos: Flag = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    vllm_xargs: (
        dict[Literal["reprieve_threshold", "reprieve_rule", "reprieve_leniency", "reprieve_require"], Any] | None
    ) = None
    reprieve_rule: str | None = None
    reprieve_threshold: Real | None = None
    reprieve_leniency: str | None = None
    reprieve_require: str | None = None
    reprieve_provenance: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, body: Any) -> Any:
        """Limit the number of fields before any of them is validated."""
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

    @property
    def leniency(self) -> dict[str, Any]:
        """Fields that choose the rule and its setting; as in vLLM, they can also be given in `vllm_xargs`."""
        given: dict[str, Any] = {str(name): value for name, value in (self.vllm_xargs or {}).items()}
        own = {name: getattr(self, name) for name in FIELDS}
        return {**given, **{name: value for name, value in own.items() if value is not None}}

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, *, max_new_tokens: int, seed: int, num_logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters for the engine."""
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
    max_tokens: Annotated[Whole, Field(ge=1)] | None = 16
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
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
    """A part of a message; only text is supported."""

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


class ChatBody(RequestBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    chat_template_kwargs: dict[Literal["enable_thinking"], Flag | None] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @model_validator(mode="after")
    def _one_budget(self) -> ChatBody:
        given = {value for value in (self.max_tokens, self.max_completion_tokens) if value is not None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens must agree where both are given")
        return self


Body = TypeVar("Body", bound=RequestBody)


def read_body(kind: type[Body], data: bytes) -> Body:
    """Parse a request body and check its fields.

    Raises:
        RequestError: it is not JSON, holds too many values, or has fields that `kind` does not accept.
    """
    _require_few_values(data)
    try:
        return kind.model_validate(parse_json(data))
    except ValidationError as error:
        raise _field_error(error.errors(include_url=False)[0]) from None
    except ValueError as error:
        raise RequestError(None, f"the body is not JSON: {error}") from None


def _require_few_values(data: bytes) -> None:
    """Limit the number of values in a JSON text before it is parsed, which takes about 100 ns per value."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])  # of texts
    for what, most, count in (
        ("texts", 2 * _MOST_NESTED, unescaped.count(b'"') // 2),
        ("lists, objects and fields", _MOST_NESTED, sum(map(outside.count, (b"[", b"{", b":")))),
        ("values", _MOST_ITEMS + _MOST_NESTED, 1 + outside.count(b",")),
    ):
        if count > most:
            raise RequestError(None, f"the body must hold at most {most} {what}, got {count}")


_SHAPES = {  # fields that accept several types: pydantic's error for one of the types would be misleading
    "prompt": f"must be a text, token ids, or up to {MAX_CHOICES} of either",
    "stop": f"must be a text of 1 to {MAX_STOP_LENGTH} characters, or up to 16 of them",
    "messages": "must be a list of messages, each with a role and a text (or text parts) as content",
}


_REASONS = {  # by pydantic's type of error; others keep pydantic's message
    "missing": "is required",
    "extra_forbidden": "is not a field of this request",
    "none_required": "is not supported",
    "literal_error": "must be {expected}",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a text",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "list_type": "must be a list",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "too_long": "must hold at most {max_length} items",
}


def _field_error(error: Mapping[str, Any]) -> RequestError:
    """Convert an error of pydantic's to one that names the field."""
    where = [str(part)[:100] for part in error["loc"] if part != "[key]"]
    path = ".".join(where)
    if len(where) < len(error["loc"]):  # a name that an object of options does not have
        return RequestError(where[0], f"{path} is not a field of this request")
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"])
        return RequestError(where[0], f"{path}: {reason}") if where else RequestError(reason.split()[0], reason)
    if not where:
        return RequestError(None, "the body must be a JSON object")
    kind, got = error["type"], error.get("input")
    if where[0] in _SHAPES and kind not in ("missing", "extra_forbidden", "literal_error"):
        return RequestError(where[0], f"{where[0]} {_SHAPES[where[0]]}")
    reason = f" {_REASONS[kind].format_map(error.get('ctx', {}))}" if kind in _REASONS else f": {error['msg']}"
    shown = "" if isinstance(got, dict | list) else f", got {json.dumps(got)[:80]}"
    return RequestError(where[0], f"{path}{reason}{shown}")
