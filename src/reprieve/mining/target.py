"""Responses and the targets that continue them: on this machine, or behind an OpenAI-compatible completions API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from reprieve.concurrency import gather_all
from reprieve.engine.batches import Stepper
from reprieve.engine.continuations import ContinuationDecoder, Session, TextRequest
from reprieve.errors import ReprieveError, SpecError
from reprieve.models.sampling import Draw
from reprieve.tasks import Task, TaskProblem, run_comparison
from reprieve.tasks.prompting import prompt_ids_of

T = TypeVar("T")


@dataclass(frozen=True)
class ResponseFormat:
    """End conditions and text of a task's responses, for a tokenizer.

    Args:
        eos_ids: tokens that end a response.
        max_new_tokens: T_max, the largest whole response, including regenerated parts.
    """

    tokenizer: Any
    task: Task
    eos_ids: frozenset[int]
    max_new_tokens: int

    def encode_prompt(self, problem: TaskProblem) -> list[int]:
        return prompt_ids_of(problem, self.tokenizer)

    def text(self, response_ids: list[int]) -> str:
        """Return the response up to its first stop text, without special tokens."""
        text = str(self.tokenizer.decode(response_ids, skip_special_tokens=True))
        return text[: min((text.find(stop) for stop in self.task.stop if stop in text), default=len(text))]

    def answer(self, response_ids: list[int]) -> str | None:
        return self.task.extract_answer(self.text(response_ids))

    async def correct(self, response_ids: list[int], reference: str) -> bool:
        """Return True if a response gives the right answer."""
        return await run_comparison(self.task, self.task.equivalent, self.answer(response_ids), reference)

    def num_left(self, response_ids: list[int]) -> int:
        """Return the remaining token budget of a response; 0 once it has ended."""
        return 0 if self.ended(response_ids) else self.max_new_tokens - len(response_ids)

    def ended(self, response_ids: list[int]) -> bool:
        """Return True if the response has ended by an end-of-text token, a stop text or its budget."""
        if not response_ids:
            return False
        if response_ids[-1] in self.eos_ids or len(response_ids) >= self.max_new_tokens:
            return True
        return self.stops(response_ids)

    def length_of(self, response_ids: list[int], *, start: int = 0) -> int | None:
        """Return the smallest length above `start`, in tokens, at which a response ends; None if it does not end."""
        return next((n for n in range(start + 1, len(response_ids) + 1) if self.ended(response_ids[:n])), None)

    def stops(self, response_ids: list[int]) -> bool:
        """Return True if a stop text ends in a response's last few tokens."""
        if not self.task.stop:
            return False
        tail = str(self.tokenizer.decode(response_ids[-max(map(len, self.task.stop)) - 1 :]))
        return any(stop in tail for stop in self.task.stop)

    def until_stop(self, response_ids: list[int], new: list[int]) -> list[int]:
        """Truncate a response's new tokens after its first stop text: a server's last block can contain more tokens."""
        if not self.task.stop:
            return new
        sizes = range(1, len(new) + 1)
        return new[: next((size for size in sizes if self.stops([*response_ids, *new[:size]])), len(new))]


class TokenizationError(ReprieveError):
    """A text that the target would read or write as other tokens than the draft."""


class Target(Protocol):
    """Continues texts. One `Session` per problem caches the common prefixes of its texts."""

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
        """Return at most `max_new_tokens` tokens after prompt and response, the end-of-text token included.

        Args:
            draw: random draws of the tokens; None for greedy decoding.

        Raises:
            TokenizationError: the target would tokenize the text differently (a text API).
        """
        ...

    async def complete_all(
        self,
        session: Session,
        prompt_ids: list[int],
        response_ids: list[int],
        max_new_tokens: int,
        draws: Sequence[Draw | None],
    ) -> list[list[int]]:
        """Return a completion for each draw."""
        return await gather_all(
            self.complete(session, prompt_ids, response_ids, max_new_tokens, draw) for draw in draws
        )

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """Run a miner's own synchronous work, such as drafting, and return its result; subclasses may use a thread."""
        return work()


class ResponseSampler:
    """Whole responses to one problem that begin with given tokens."""

    def __init__(self, target: Target, responses: ResponseFormat, problem: TaskProblem) -> None:
        self.prompt_ids = responses.encode_prompt(problem)
        self.num_generated = 0  # tokens
        self._target = target
        self._responses = responses
        self._session = Session()

    async def complete(self, response_ids: list[int], draws: Sequence[Draw | None]) -> list[list[int]]:
        """Return a whole response for each draw; copies of the given one if it has ended."""
        num_left = self._responses.num_left(response_ids)
        if num_left < 1:
            return [list(response_ids)] * len(draws)
        completions = await self._target.complete_all(self._session, self.prompt_ids, response_ids, num_left, draws)
        self.num_generated += sum(map(len, completions))
        return [[*response_ids, *new] for new in completions]


class LocalTarget(Target):
    """Local target; the requests of all problems in flight share forwards."""

    def __init__(self, decoder: ContinuationDecoder) -> None:
        self._stepper: Stepper[TextRequest, list[int]] = Stepper(decoder)

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
        """Return a completion. See `Target`.

        Raises:
            ContextOverflowError: the text could exceed the model's positions.
        """
        text = [*prompt_ids, *response_ids]
        return await self._stepper.result(
            lambda finish: TextRequest(session, text, max_new_tokens, draw, finish, response_start=len(prompt_ids))
        )


class ApiTarget(Target):
    """Continues texts by requests to a completions API (AutoJudge, appendix R); greedy only.

    Most servers exchange text, and one text has many tokenizations. A swapped token can merge with its neighbours, so
    the server may continue a different token sequence than the one being judged. Such swaps are not labelled.

    Args:
        client: an asynchronous `openai` client, or an object with `completions.create`.
        model: the target's name on the server.
        responses: with the draft's tokenizer, which the target must share. Stop texts are not sent: servers remove
            the stop text and do not report whether it or the end-of-text token ended a completion.
    """

    def __init__(self, client: Any, model: str, responses: ResponseFormat) -> None:
        self.client = client
        self.model = model
        self.responses = responses
        self.tokenizer = responses.tokenizer

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int]:
        """Return a completion. See `Target`.

        Raises:
            SpecError: sampling, which a server cannot reproduce.
        """
        if draw is not None:
            raise SpecError("an API target is greedy: a server's sampling cannot be keyed by the prefix")
        prefix = [*prompt_ids, *response_ids]
        text = self._text(prefix)
        if response_ids and list(self.tokenizer.encode(text)) != prefix:
            raise TokenizationError("the target would tokenize the swapped text differently")
        reply = await self.client.completions.create(
            model=self.model, prompt=text, max_tokens=max_new_tokens, temperature=0.0
        )
        choice = reply.choices[0]
        new = self._tokens(prefix, text, choice.text)
        eos_id = self.tokenizer.eos_token_id
        stopped = self.responses.stops([*response_ids, *new])
        if choice.finish_reason == "stop" and not stopped and new[-1:] != [eos_id]:
            new.append(eos_id)
        return self.responses.until_stop(response_ids, new[:max_new_tokens])

    def _text(self, token_ids: list[int]) -> str:
        """Return the text of tokens, with special tokens except leading ones that the tokenizer adds itself."""
        added = list(self.tokenizer.encode(""))
        if added and token_ids[: len(added)] == added:
            token_ids = token_ids[len(added) :]
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _tokens(self, prefix: list[int], prefix_text: str, new_text: str) -> list[int]:
        """Return a completion's tokens after the prefix."""
        whole = list(self.tokenizer.encode(prefix_text + new_text))
        if whole[: len(prefix)] == prefix:
            return whole[len(prefix) :]
        alone = list(self.tokenizer.encode(new_text, add_special_tokens=False))
        if self._text([*prefix, *alone]) != prefix_text + new_text:
            raise TokenizationError("the target's response cannot be represented in the draft's tokens")
        return alone
