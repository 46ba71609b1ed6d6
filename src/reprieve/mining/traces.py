"""CoSpec's warm-up data (appendix C.1): rounds of plain speculative decoding, and the better side of each mismatch.

Each mismatch gets a soft label for accepting the draft's token: from a language model that scores both candidates, or
from rollouts of both branches graded against the right answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from reprieve.concurrency import gather_all
from reprieve.engine import SamplingParams
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request, VerifiedRound
from reprieve.engine.batches import Stepper
from reprieve.mining.draft import BlockReader
from reprieve.mining.pivot import seeded_draw
from reprieve.mining.settings import TraceMining
from reprieve.mining.store import MINED, Mismatch, ProblemLabels, TracedRound
from reprieve.mining.target import ResponseFormat, ResponseSampler, Target
from reprieve.models.cached_model import shared_length
from reprieve.models.sampling import Sampler
from reprieve.rules import LosslessRule
from reprieve.tasks import TaskProblem
from reprieve.tasks.chat import Chat, ask_until
from reprieve.types import Generation

_SCORES = re.compile(r"\[\[\s*A\s*:\s*(\d+(?:\.\d+)?)\s*,\s*B\s*:\s*(\d+(?:\.\d+)?)\s*\]\]")
_HIGHEST = 10.0
LABELS_VERSION = 2  # version 1 graded some sampled mismatches by other texts; versions do not mix
_PROMPT = """\
A solution to the request below is being written. It can go on in one of two ways. Say for each how likely it is to
end in a right and complete answer, from 0 (it cannot) to 10 (surely). A way that only words things differently is as
good as the other.

Request:
{question}

Solution so far:
{written}

It goes on with A: {draft!r}
It goes on with B: {target!r}

Explain in a sentence, then end with the two scores in exactly this form: [[A: 7, B: 9]]"""


def soft_label(draft_utility: float, target_utility: float, *, tie: float) -> float:
    """Return the value of accepting the draft's branch: 1 if it is entirely better, 0 if entirely worse.

    If both are equal, accepting costs nothing and saves a round; the label is then `tie`.
    """
    difference = draft_utility - target_utility
    return tie + difference * (1.0 - tie if difference > 0 else tie)


Traced = tuple[list[int], list[TracedRound]]  # response, and its rounds with drafted tokens, without labels
Tracer = Callable[[list[int], SamplingParams], Awaitable[Traced]]  # given a prompt


class BlockTracer:
    """Traces one prompt at a time, as a `Tracer`: a drafted token passes if it equals the target's own choice or draw.

    Args:
        make_blocks: makes the reader of one prompt's blocks.
        responses: end conditions of responses.
        num_draft_tokens: K.
    """

    def __init__(
        self, make_blocks: Callable[[SamplingParams], BlockReader], responses: ResponseFormat, num_draft_tokens: int
    ) -> None:
        self._make_blocks = make_blocks
        self._responses = responses
        self._num_draft_tokens = num_draft_tokens

    async def __call__(self, prompt_ids: list[int], params: SamplingParams) -> Traced:
        """Return the rounds of one response."""
        blocks = self._make_blocks(params)
        blocks.require_room(prompt_ids, params.max_new_tokens)
        response_ids: list[int] = []
        rounds: list[TracedRound] = []
        while (num_left := self._responses.num_left(response_ids)) > 0:
            text = [*prompt_ids, *response_ids]
            drafted, _ = await blocks.draft(text, min(self._num_draft_tokens, num_left - 1))
            logits = await blocks.read(text, drafted)
            own: list[int] = await blocks.run_blocking(partial(_own_tokens, blocks.sampler, logits))
            if drafted:
                rounds.append(TracedRound(len(response_ids), tuple(drafted), tuple(own[:-1])))
            new = own[: shared_length(drafted, own) + 1]  # accepted tokens are the target's own
            end = self._responses.length_of([*response_ids, *new], start=len(response_ids))
            response_ids = [*response_ids, *new][:end]
        return response_ids, rounds


@torch.inference_mode()
def _own_tokens(sampler: Sampler, logits: Tensor) -> list[int]:
    """Return the target's own token after each of the rows [n, V]."""
    scores = sampler.target_scores(logits)
    own: list[int] = (scores.argmax(-1) if sampler.greedy else sampler.draw(scores.softmax(-1))).tolist()
    return own


class BatchedTracer:
    """Traces all problems in flight at once, as a `Tracer`. For accelerators; greedy only.

    Args:
        decoder: with the settings' K and the task's stop texts.
    """

    def __init__(self, decoder: BatchedSpeculativeDecoder) -> None:
        self._stepper: Stepper[Request, Traced] = Stepper(decoder)

    async def __call__(self, prompt_ids: list[int], params: SamplingParams) -> Traced:
        """Return the rounds of one response."""

        def request(finish: Callable[[Traced], None]) -> Request:
            rounds: list[TracedRound] = []
            length = 0

            def watch(verified: VerifiedRound) -> bool:
                nonlocal length
                if verified.draft_ids:
                    rounds.append(TracedRound(length, tuple(verified.draft_ids), tuple(verified.target_ids)))
                length += len(verified.tokens)
                return True

            def done(generation: Generation) -> None:
                finish((generation.token_ids, rounds))

            return Request(prompt_ids, LosslessRule(), params.max_new_tokens, done, watch, params.seed)

        return await self._stepper.result(request)


@dataclass(frozen=True)
class ArbitrationMiner:
    """Traces one problem's rounds under plain speculative decoding and labels their mismatches.

    Both branches of a mismatch start from the text before it in the block, including drafted tokens. The target
    continues them, as plain speculative decoding would.

    Args:
        target: continues texts.
        trace: traces a response.
        judge: language model that scores both candidates (`score_branches`); None compares rollouts instead.
    """

    settings: TraceMining
    target: Target
    trace: Tracer
    responses: ResponseFormat
    judge: Chat | None = None

    async def mine(self, problem: TaskProblem) -> ProblemLabels:
        """Trace and label one problem."""
        params = dataclasses.replace(
            self.settings.params,
            max_new_tokens=self.responses.max_new_tokens,
            seed=self.settings.problem_seed(problem.problem_id),
            stop=tuple(self.responses.task.stop),
        )
        prompt_ids = self.responses.encode_prompt(problem)
        response_ids, traced = await self.trace(prompt_ids, params)
        branches = _Branches(self, problem, response_ids)
        rounds = await gather_all(branches.label(one) for one in traced)
        return ProblemLabels(
            problem_id=problem.problem_id,
            status=MINED,
            prompt_ids=tuple(prompt_ids),
            target_ids=(),
            response_ids=tuple(response_ids),
            target_answer=self.responses.answer(response_ids),
            mismatches=tuple(_reached(rounds)),
            num_generated=branches.texts.num_generated + len(response_ids),
            source="arbitration",
            rounds=tuple(rounds),
        )


def _reached(rounds: Iterable[TracedRound]) -> Iterable[Mismatch]:
    """Yield the first mismatch of each round, where plain decoding stopped, if it has a label."""
    for traced in rounds:
        node = next(iter(traced.mismatched_nodes), None)
        if node is None or traced.labels[node] is None:
            continue
        target_utility, draft_utility = traced.target_utilities[node], traced.draft_utilities[node]
        assert target_utility is not None and draft_utility is not None
        yield Mismatch(
            position=traced.start + node,
            target_id=traced.target_ids[node],
            draft_id=traced.draft_ids[node],
            important=draft_utility < target_utility,
            base_utility=target_utility,
            candidate_utility=draft_utility,
        )


class _Branches:
    """Branches of one problem and their utilities; known continuations are reused."""

    def __init__(self, miner: ArbitrationMiner, problem: TaskProblem, response_ids: list[int]) -> None:
        self.miner = miner
        self.settings = miner.settings
        self.responses = miner.responses
        self.problem = problem
        self.response_ids = response_ids
        self.seed = self.settings.problem_seed(problem.problem_id)
        self.texts = ResponseSampler(miner.target, miner.responses, problem)
        # Whole responses, and the position from which each is greedy; earlier tokens may be sampled or forced.
        self._known = [(0, self.response_ids)] if self.settings.sampling.greedy else []

    async def label(self, traced: TracedRound) -> TracedRound:
        """Return the round with labels for its first few mismatches."""
        nodes = traced.mismatched_nodes[: self.settings.max_mismatches]
        end = self.responses.length_of(self._text(traced, traced.draft_ids), start=traced.start)
        if end is not None:  # mismatches after the end of the response do not count
            nodes = [node for node in nodes if traced.start + node < end]
        num = len(traced.draft_ids)
        labels: list[float | None] = [None] * num
        draft_utilities, target_utilities = list(labels), list(labels)
        for node, utilities in zip(nodes, await self._score(traced, nodes), strict=True):
            if utilities is not None:
                draft_utilities[node], target_utilities[node] = utilities
                labels[node] = soft_label(*utilities, tie=self.settings.tie)
        return dataclasses.replace(
            traced,
            labels=tuple(labels),
            draft_utilities=tuple(draft_utilities),
            target_utilities=tuple(target_utilities),
        )

    def _text(self, traced: TracedRound, drafted: Iterable[int]) -> list[int]:
        """Return the response before a round, followed by tokens of its block."""
        return [*self.response_ids[: traced.start], *drafted]

    async def _score(self, traced: TracedRound, nodes: list[int]) -> list[tuple[float, float] | None]:
        """Return utilities of the draft's and the target's side of each mismatch."""
        if (judge := self.miner.judge) is not None:
            return await gather_all(self._ask(judge, traced, node) for node in nodes)
        # Draft branches first: a greedy draft branch is also the target's branch at the next mismatch.
        draft_utilities = await gather_all(
            self._utility(self._text(traced, traced.draft_ids[: p + 1]), p, 0) for p in nodes
        )
        target_utilities = await gather_all(
            self._utility(self._text(traced, (*traced.draft_ids[:p], traced.target_ids[p])), p, 1) for p in nodes
        )
        return list(zip(draft_utilities, target_utilities, strict=True))

    async def _ask(self, judge: Chat, traced: TracedRound, node: int) -> tuple[float, float] | None:
        written = self.responses.text(self._text(traced, traced.draft_ids[:node]))
        decode = self.responses.tokenizer.decode
        candidates = (decode([ids[node]]) for ids in (traced.draft_ids, traced.target_ids))
        return await score_branches(judge, self.problem.question_text, written, *candidates)

    async def _utility(self, text: list[int], node: int, side: int) -> float:
        """Return the share of right answers among the continuations of a text."""
        reference = self.problem.reference
        rollouts = await self._rollouts(text, node, side)
        right = await gather_all(self.responses.correct(response, reference) for response in rollouts)
        return sum(right) / len(right)

    async def _rollouts(self, text: list[int], node: int, side: int) -> list[list[int]]:
        """Return continuations of a text as whole responses; only one if they are greedy, and so all equal."""
        if not self.settings.continues_greedily:
            numbers = range(self.settings.num_rollouts)
            draws = [seeded_draw(self.seed, len(text), node, side, number) for number in numbers]
            return await self.texts.complete(text, draws)
        for greedy_from, known in self._known:
            if greedy_from <= len(text) and known[: len(text)] == text:
                return [known]
        whole = await self.texts.complete(text, [None])
        self._known.append((len(text), whole[0]))
        return whole


async def score_branches(
    chat: Chat, question: str, written: str, draft: str, target: str
) -> tuple[float, float] | None:
    """Ask a language model to score both candidates of a mismatch in their context, a few times until a reply does.

    Returns:
        Utilities of the draft's and the target's candidate, 0 to 1; None if no reply holds scores.
    """
    prompt = _PROMPT.format(question=question, written=written, draft=draft, target=target)
    return await ask_until(chat, prompt, _utilities)


def _utilities(reply: str) -> tuple[float, float] | None:
    scores = _SCORES.findall(reply)
    if not scores or any(float(score) > _HIGHEST for score in scores[-1]):
        return None
    draft_score, target_score = map(float, scores[-1])
    return draft_score / _HIGHEST, target_score / _HIGHEST
