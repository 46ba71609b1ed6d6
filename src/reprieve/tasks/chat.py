"""Language models as judges, behind one small protocol."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from reprieve.errors import ReprieveError, SpecError, import_extra
from reprieve.specs import parse_spec

T = TypeVar("T")

_NUM_TRIES = 3  # requests until a reply can be parsed


class Chat(Protocol):
    """A model that answers a prompt."""

    async def ask(self, prompt: str, *, attempt: int = 0) -> str:
        """The reply; another `attempt` may give another one."""
        ...


class OpenAIChat:
    """A model behind an OpenAI-compatible chat API; the key comes from OPENAI_API_KEY.

    Args:
        model: its name there.
        url: base address; None for the client's default.
        temperature: of its replies; votes need one above 0 to differ.

    Raises:
        ReprieveError: the `openai` package is missing, or no key is set.
    """

    def __init__(self, model: str, *, url: str | None = None, temperature: float = 1.0, seed: int = 0) -> None:
        if not model:
            raise SpecError("a judge needs the name of a model, got an empty one")
        self.model = model
        self.temperature = temperature
        self.seed = seed
        self._client = openai_client(url)

    async def ask(self, prompt: str, *, attempt: int = 0) -> str:
        reply = await self._client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt}],
            temperature=self.temperature,
            seed=self.seed + attempt,
        )
        return reply.choices[0].message.content or ""


def make_chat(spec: str) -> Chat:
    """Return the judge model of a specification such as `openai:model=NAME,url=ADDRESS,temperature=1`.

    Raises:
        SpecError: any other specification.
        ReprieveError: the `openai` package is missing, or no key is set.
    """
    name, given = parse_spec(spec, what="judge")
    if name != "openai" or not {"model"} <= given.keys() <= {"model", "url", "temperature"}:
        raise SpecError(f"a judge is written openai:model=NAME,url=ADDRESS,temperature=1, got {spec!r}")
    try:
        temperature = float(given.get("temperature", 1.0))
    except ValueError:
        raise SpecError(f"temperature of a judge must be a number, got {given['temperature']!r}") from None
    return OpenAIChat(given["model"], url=given.get("url"), temperature=temperature)


def openai_client(url: str | None) -> Any:
    """Return an asynchronous client that retries temporary failures.

    Raises:
        ReprieveError: the `openai` package is missing, or no key is set.
    """
    openai = import_extra("openai", "api")
    try:
        return openai.AsyncOpenAI(base_url=url, max_retries=5)
    except openai.OpenAIError as error:
        raise ReprieveError(f"the API client cannot start: {error}") from None


_VERDICT = re.compile(r"\[\[(A>>B|A>B|A=B|B>A|B>>A)\]\]")
_PROMPT = """\
Two assistants, A and B, answered the same request. Compare their answers: correctness first, then how well they do
what was asked, then clarity. Ignore which came first, and do not prefer the longer one for its length.

Request:
{question}

Answer of assistant A:
{running}

Answer of assistant B:
{changed}

Explain in a sentence or two, then end with exactly one of these verdicts:
[[A>>B]] A is much better   [[A>B]] A is slightly better   [[A=B]] about the same
[[B>A]] B is slightly better   [[B>>A]] B is much better"""

FIRST_BETTER, SECOND_BETTER = ("A>>B", "A>B"), ("B>>A", "B>A")


async def ask_verdict(chat: Chat, question: str, first: str, second: str, *, number: int = 0) -> str | None:
    """One vote on two answers, `A>>B` to `B>>A`; None where no reply holds a verdict.

    Args:
        number: index of the vote; each index requests different replies.
    """
    prompt = _PROMPT.format(question=question, running=first, changed=second)

    def last_verdict(reply: str) -> str | None:
        verdicts: list[str] = _VERDICT.findall(reply)
        return verdicts[-1] if verdicts else None

    return await ask_until(chat, prompt, last_verdict, number=number)


async def ask_until(chat: Chat, prompt: str, parse: Callable[[str], T | None], *, number: int = 0) -> T | None:
    """Ask until a reply can be parsed, three times at most; None if none can.

    Args:
        parse: returns None for a reply without a result.
        number: index of the question; each index requests different replies.
    """
    for attempt in range(_NUM_TRIES):
        result = parse(await chat.ask(prompt, attempt=number * _NUM_TRIES + attempt))
        if result is not None:
            return result
    return None
