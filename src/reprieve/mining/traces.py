"""CoSpec's warm-up data (appendix C.1): rounds of plain speculative decoding, and which side of a mismatch ends better.

Each mismatch gets a soft label for accepting the draft's token: from a language model that scores both candidates, or,
where none is at hand, from rollouts of both branches graded against the right answer.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError, require_range, require_whole
from reprieve.mining.pivot import seeded_draw
from reprieve.mining.records import MINED, Mismatch, ProblemLabels, TracedRound
from reprieve.mining.responses import ResponseFormat
from reprieve.mining.target import Target, gather_all
from reprieve.models.batch_decoder import Session
from reprieve.tasks import TaskProblem
from reprieve.tasks.chat import Chat
from reprieve.types import Generation

_SCORES = re.compile(r"\[\[\s*A\s*:\s*(\d+(?:\.\d+)?)\s*,\s*B\s*:\s*(\d+(?:\.\d+)?)\s*\]\]")
_HIGHEST = 10.0
LABELS_VERSION = 2  # 1 graded some sampled mismatches by other texts; stores are not mixed
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
    """How much the draft's branch is worth accepting, 0 to 1: 1 where it is all better, 0 where all worse.

    Where both are worth the same, accepting costs nothing and saves a round: that is worth `tie`.
    """
    difference = draft_utility - target_utility
    return tie + difference * (1.0 - tie if difference > 0 else tie)


@dataclass(frozen=True)
class PairScorer:
    """A language model that scores both candidates of a mismatch in their context.

    Args:
        chat: the model.
        num_tries: how often a reply without scores is asked for again.
    """

    chat: Chat
    num_tries: int = 3

    async def score(self, question: str, written: str, draft: str, target: str) -> tuple[float, float] | None:
        """Utilities of the draft's and the target's candidate, 0 to 1; None where no reply holds scores."""
        prompt = _PROMPT.format(question=question, written=written, draft=draft, target=target)
        for attempt in range(self.num_tries):
            scores = _SCORES.findall(await self.chat.ask(prompt, attempt=attempt))
            if scores and all(float(score) <= _HIGHEST for score in scores[-1]):
                draft_score, target_score = map(float, scores[-1])
                return draft_score / _HIGHEST, target_score / _HIGHEST
        return None


@dataclass
class ArbitrationMiner:
    """Traces one problem's rounds under plain speculative decoding and labels their mismatches.

    Both branches of a mismatch are taken from the text that stands before it in the block, the drafted tokens
    included, and continued by the target, as plain speculative decoding would.

    Args:
        target: continues texts.
        make_decoder: plain speculative decoding (`lossless:verification=exact`) at a K.
        num_draft_tokens: K.
        max_mismatches: labelled in a round, from its first on; those behind are reached only by accepting these.
        num_rollouts: on each side; greedily all would be the same.
        greedy_branches: continue both sides greedily although the rounds were sampled: one continuation is then enough,
            where several samples would be an estimate.
        tie: label of branches that are worth the same.
        scorer: labels instead of rollouts; None for rollouts.

    Raises:
        SpecError: a number out of range.
    """

    target: Target
    responses: ResponseFormat
    params: SamplingParams
    make_decoder: Callable[[int], SpeculativeDecoder]
    make_seed: Callable[[TaskProblem], int]
    num_draft_tokens: int = 16
    max_mismatches: int = 4
    num_rollouts: int = 1
    greedy_branches: bool = False
    tie: float = 0.8
    scorer: PairScorer | None = None

    def __post_init__(self) -> None:
        for name in ("max_mismatches", "num_rollouts"):
            require_whole(name, getattr(self, name), 1)
        require_range("tie", self.tie, 0.0, 1.0)
        if self.continues_greedily:
            self.num_rollouts = 1  # all would be the same
        self._decoders = threading.local()

    def _decoder(self) -> SpeculativeDecoder:
        """This thread's own: decoders keep caches."""
        if not hasattr(self._decoders, "made"):
            self._decoders.made = self.make_decoder(self.num_draft_tokens)
        made: SpeculativeDecoder = self._decoders.made
        return made

    @property
    def continues_greedily(self) -> bool:
        return self.greedy_branches or self.params.greedy

    async def mine(self, problem: TaskProblem) -> ProblemLabels:
        """Trace and label one problem."""
        started = time.perf_counter()
        params = dataclasses.replace(
            self.params,
            max_new_tokens=self.responses.max_new_tokens,
            seed=self.make_seed(problem),
            stop=tuple(self.responses.task.stop),
        )
        prompt_ids = self.responses.encode_prompt(problem)
        made = await self.target.apart(lambda: self._decoder().generate(prompt_ids, params, trace=True))
        branches = _Branches(self, problem, prompt_ids, made)
        rounds = await gather_all(branches.label(start, traced) for start, traced in _rounds(made))
        return ProblemLabels(
            problem_id=problem.problem_id,
            status=MINED,
            prompt_ids=tuple(prompt_ids),
            target_ids=(),
            response_ids=tuple(made.token_ids),
            target_answer=self.responses.answer(made.token_ids),
            mismatches=tuple(_reached(rounds)),
            seconds=time.perf_counter() - started,
            num_generated=branches.num_generated + len(made.tokens),
            source="arbitration",
            rounds=tuple(rounds),
        )


def _rounds(made: Generation) -> Iterable[tuple[int, TracedRound]]:
    """The rounds that drafted something, and where in the response each began."""
    start = 0
    assert made.trace is not None
    for traced in made.trace:
        if traced.drafted_ids:
            nothing = (None,) * len(traced.drafted_ids)
            yield start, TracedRound(start, tuple(traced.drafted_ids), tuple(traced.target_ids), nothing)
        start += len(traced.committed)


def _reached(rounds: Iterable[TracedRound]) -> Iterable[Mismatch]:
    """The first mismatch of each round, which plain decoding refused."""
    for traced in rounds:
        for place, label in enumerate(traced.labels):
            if label is not None:
                ours, theirs = traced.target_utilities[place], traced.draft_utilities[place]
                assert ours is not None and theirs is not None
                yield Mismatch(
                    position=traced.start + place,
                    target_id=traced.target_ids[place],
                    draft_id=traced.draft_ids[place],
                    important=theirs < ours,
                    base_utility=ours,
                    candidate_utility=theirs,
                )
                break


class _Branches:
    """One problem's texts and what they are worth; a text that is known to follow from another is not made twice."""

    def __init__(self, miner: ArbitrationMiner, problem: TaskProblem, prompt_ids: list[int], made: Generation) -> None:
        self.miner = miner
        self.problem = problem
        self.prompt_ids = prompt_ids
        self.response_ids = made.token_ids
        self.seed = miner.make_seed(problem)
        self.session = Session()
        self.num_generated = 0
        # Whole responses, and from where on each is greedy: before that a token may have been drawn or forced.
        self._known = [(0, self.response_ids)] if miner.params.greedy else []

    async def label(self, start: int, traced: TracedRound) -> TracedRound:
        """The round with labels for its first few mismatches."""
        pairs = enumerate(zip(traced.draft_ids, traced.target_ids, strict=True))
        places = [place for place, (ours, theirs) in pairs if ours != theirs][: self.miner.max_mismatches]
        end = self.miner.responses.length_of(self._text(start, traced.draft_ids), start=start)
        if end is not None:  # behind it nothing is decided any more
            places = [place for place in places if start + place < end]
        num = len(traced.draft_ids)
        labels: list[float | None] = [None] * num
        ours, theirs = list(labels), list(labels)
        for place, utilities in zip(places, await self._score(start, traced, places), strict=True):
            if utilities is not None:
                ours[place], theirs[place] = utilities
                labels[place] = soft_label(*utilities, tie=self.miner.tie)
        return dataclasses.replace(
            traced, labels=tuple(labels), draft_utilities=tuple(ours), target_utilities=tuple(theirs)
        )

    def _text(self, start: int, drafted: Iterable[int]) -> list[int]:
        return [*self.response_ids[:start], *drafted]

    async def _score(self, start: int, traced: TracedRound, places: list[int]) -> list[tuple[float, float] | None]:
        """Utilities of the draft's and the target's side of each mismatch."""
        if self.miner.scorer is not None:
            return await gather_all(self._ask(start, traced, place) for place in places)
        # The draft's branches first: greedily, the target's branch at a mismatch is the draft's at the one before.
        ours = await gather_all(self._utility(self._text(start, traced.draft_ids[: p + 1]), p, 0) for p in places)
        theirs = await gather_all(
            self._utility(self._text(start, (*traced.draft_ids[:p], traced.target_ids[p])), p, 1) for p in places
        )
        return list(zip(ours, theirs, strict=True))

    async def _ask(self, start: int, traced: TracedRound, place: int) -> tuple[float, float] | None:
        assert self.miner.scorer is not None
        written = self.miner.responses.text(self._text(start, traced.draft_ids[:place]))
        decode = self.miner.responses.tokenizer.decode
        candidates = (decode([ids[place]]) for ids in (traced.draft_ids, traced.target_ids))
        return await self.miner.scorer.score(self.problem.asked, written, *candidates)

    async def _utility(self, text: list[int], place: int, side: int) -> float:
        """The share of right answers among the texts that follow from one."""
        responses = await self._continued(text, place, side)
        reference = self.problem.reference
        right = await gather_all(self.miner.responses.correct(response, reference) for response in responses)
        return sum(right) / len(right)

    async def _continued(self, text: list[int], place: int, side: int) -> list[list[int]]:
        """All rollouts from a text."""
        num, greedy = self.miner.num_rollouts, self.miner.continues_greedily
        if greedy:
            for greedy_from, known in self._known:
                if greedy_from <= len(text) and known[: len(text)] == text:
                    return [known] * num
        if (num_left := self.miner.responses.num_left(text)) < 1:
            return [text] * num
        draws = [None if greedy else seeded_draw(self.seed, len(text), place, side, number) for number in range(num)]
        made = await self.miner.target.complete_all(self.session, self.prompt_ids, text, num_left, draws)
        if made is None:
            raise SpecError("rollouts need a target that reads tokens; a text API would read others")
        self.num_generated += sum(map(len, made))
        whole = [[*text, *new] for new in made]
        if greedy:
            self._known.append((len(text), whole[0]))
        return whole
