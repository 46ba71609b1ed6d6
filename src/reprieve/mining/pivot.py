"""PAD's label collection (its Algorithm 1): rollouts on both sides of every token that speculative sampling rejects.

A language model can judge the reasoning of a correct rollout (section 3.3); for arithmetic, so can its equations.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from reprieve.concurrency import gather_all
from reprieve.engine.batched import Request, VerifiedRound
from reprieve.engine.batches import Stepper
from reprieve.files import parse_json
from reprieve.mining.draft import BlockReader
from reprieve.mining.settings import PivotMining
from reprieve.mining.store import MINED, Mismatch, ProblemLabels
from reprieve.mining.target import ResponseFormat, ResponseSampler, Target
from reprieve.models.sampling import Draw, UniformDraw
from reprieve.rules import LosslessRule
from reprieve.rules.lossless import SampledCheck, residual_probs
from reprieve.tasks import TaskProblem
from reprieve.tasks.chat import Chat, ask_until, make_chat
from reprieve.types import Generation, gather_token

SOUND, UNSOUND, NO_VERDICT, NOT_ASKED = "sound", "unsound", "no_verdict", ""
TURNS = 4  # the rollouts' batch steps this many times per step of a `BatchedSource`, whose rounds cost more
PIVOT_BLOCK = 8  # drafted tokens per verification; affects speed, and changes the random draws
SoundnessJudge = Callable[[str, str, str], Awaitable[str]]  # question, reference, correct response; to a verdict


@dataclass(frozen=True)
class Candidate:
    """Drafted token that speculative sampling rejected."""

    draft_id: int
    fallback_id: int  # drawn from the residual instead


Step = tuple[list[int], Candidate | None]  # accepted tokens, and the rejected token that ended them, if any
# Continues a text: given the prompt, the response so far, and its remaining budget in tokens.
Source = Callable[[list[int], list[int], int], Awaitable[Step]]


class CandidateSource:
    """Walks one problem's response by speculative sampling and stops at every rejected token; a `Source`.

    Args:
        block_size: drafted tokens per verification.
    """

    def __init__(self, blocks: BlockReader, *, block_size: int = PIVOT_BLOCK) -> None:
        self.blocks = blocks
        self.block_size = block_size

    async def __call__(self, prompt_ids: list[int], response_ids: list[int], num_left: int) -> Step:
        """Return the next accepted tokens of the response, and the rejected token that ended them, if any."""
        if not response_ids:
            self.blocks.require_room(prompt_ids, num_left)
        text = [*prompt_ids, *response_ids]
        drafted, draft_logits = await self.blocks.draft(text, min(self.block_size, num_left))
        logits = await self.blocks.read(text, drafted[:-1])
        step: Step = await self.blocks.run_blocking(lambda: self._verified(drafted, draft_logits, logits))
        return step

    @torch.inference_mode()
    def _verified(self, drafted: list[int], draft_logits: list[torch.Tensor], logits: torch.Tensor) -> Step:
        sampler = self.blocks.sampler
        token_ids = torch.tensor(drafted, device=logits.device)
        proposal = None if sampler.draft_greedy else sampler.draft_scores(torch.stack(draft_logits)).softmax(-1)
        check = SampledCheck(
            sampler.target_scores(logits),
            token_ids,
            slice(None),
            uniforms=sampler.uniforms(len(drafted)),
            proposal_probs=None if proposal is None else gather_token(proposal, token_ids),
        )
        rejected = next((i for i, accepted in enumerate(check.accepts.tolist()) if not accepted), None)
        if rejected is None:
            return drafted, None
        proposed = None if proposal is None else proposal[rejected]
        residual = residual_probs(check.probs[rejected], proposed, token_ids[rejected])
        return drafted[:rejected], Candidate(drafted[rejected], int(sampler.draw(residual[None])))


class BatchedSource:
    """Finds one problem's candidates in a batch with those of other problems, as a `Source`. For accelerators.

    Draws are keyed by seed and position, so they do not depend on the other problems. Tokens that the target adds after
    a fully accepted block are not drafted, so they are no candidates.

    Args:
        stepper: of a `BatchedSpeculativeDecoder` that samples, shared by the problems.
        seed: of the problem.
    """

    def __init__(self, stepper: Stepper[Request, Step], seed: int) -> None:
        self._stepper = stepper
        self._seed = seed

    async def __call__(self, prompt_ids: list[int], response_ids: list[int], num_left: int) -> Step:
        """Return the next accepted tokens of the response, and the rejected token that ended them, if any."""

        def request(finish: Callable[[Step], None]) -> Request:
            accepted: list[int] = []

            def watch(verified: VerifiedRound) -> bool:
                *kept, following = (token.token_id for token in verified.tokens)
                accepted.extend(kept)
                if len(kept) < len(verified.draft_ids):
                    finish((accepted, Candidate(verified.draft_ids[len(kept)], following)))
                    return False
                accepted.append(following)
                return True

            def done(whole: Generation) -> None:
                finish((whole.token_ids, None))

            return Request([*prompt_ids, *response_ids], LosslessRule(), num_left, done, watch, self._seed)

        return await self._stepper.result(request)


@dataclass(frozen=True)
class PivotMiner:
    """Labels a rejected token as a pivot if fewer rollouts that include it reach the right answer.

    Args:
        target: continues texts, for rollouts.
        make_source: makes a problem's source from its seed.
        responses: format of responses.
        soundness: judges the median-length correct rollout of a non-pivot and can turn it into a pivot.
    """

    settings: PivotMining
    target: Target
    make_source: Callable[[int], Source]
    responses: ResponseFormat
    soundness: SoundnessJudge | None = None

    async def mine(self, problem: TaskProblem) -> ProblemLabels:
        """Walk through one response, labelling every rejected token."""
        walk = _Walk(self, problem)
        response_ids, mismatches = walk.response_ids, []
        while (num_left := self.responses.num_left(response_ids)) > 0:
            accepted, candidate = await walk.source(walk.texts.prompt_ids, response_ids, num_left)
            for token_id in accepted:
                response_ids.append(token_id)
                if self.responses.ended(response_ids):
                    candidate = None
                    break
            if candidate is not None:
                mismatch = await walk.label(candidate)
                mismatches.append(mismatch)
                response_ids.append(candidate.fallback_id if mismatch.important else candidate.draft_id)
        return ProblemLabels(
            problem_id=problem.problem_id,
            status=MINED,
            prompt_ids=tuple(walk.texts.prompt_ids),
            target_ids=(),
            response_ids=tuple(response_ids),
            target_answer=self.responses.answer(response_ids),
            mismatches=tuple(mismatches),
            num_generated=walk.texts.num_generated,
            source="pivot",
        )


class _Walk:
    """State of one problem's walk."""

    def __init__(self, miner: PivotMiner, problem: TaskProblem) -> None:
        self.miner = miner
        self.problem = problem
        self.seed = miner.settings.problem_seed(problem.problem_id)
        self.source = miner.make_source(self.seed)
        self.texts = ResponseSampler(miner.target, miner.responses, problem)
        self.response_ids: list[int] = []

    async def label(self, candidate: Candidate) -> Mismatch:
        """Compute utilities on both sides, compare them, and check soundness."""
        settings, responses = self.miner.settings, self.miner.responses
        with_candidate = [*self.response_ids, candidate.draft_id]
        base, tried = await gather_all([self._rollouts(self.response_ids, 0), self._rollouts(with_candidate, 1)])
        reference = self.problem.reference
        base_right, tried_right = [
            await gather_all(responses.correct(response, reference) for response in rollouts)
            for rollouts in (base, tried)
        ]
        base_utility, candidate_utility = (sum(right) / len(right) for right in (base_right, tried_right))
        important = candidate_utility < settings.alpha * base_utility
        reason, verdict = "", NOT_ASKED
        correct = [response for response, right in zip(tried, tried_right, strict=True) if right]
        if not important and self.miner.soundness is not None and correct:
            text = responses.text(median_length(correct))
            verdict = await self.miner.soundness(self.problem.question_text, reference, text)
            if verdict == UNSOUND:
                important, reason = True, "the judge found its correct rollout unsound"
        return Mismatch(
            position=len(self.response_ids),
            target_id=candidate.fallback_id,
            draft_id=candidate.draft_id,
            important=important,
            reason=reason,
            continuation_ids=tuple(tried[0][len(with_candidate) :]),
            answer=responses.answer(tried[0]),
            base_utility=base_utility,
            candidate_utility=candidate_utility,
            num_rollouts=settings.num_rollouts,
            verdict=verdict,
        )

    async def _rollouts(self, response_ids: list[int], side: int) -> list[list[int]]:
        """Sample N continuations from the target, as whole responses."""
        numbers = range(self.miner.settings.num_rollouts)
        draws = [seeded_draw(self.seed, len(response_ids), side, number) for number in numbers]
        return await self.texts.complete(response_ids, draws)


def median_length(responses: list[list[int]]) -> list[int]:
    """Return the response of median length (the longer of the middle two), as representative of all."""
    return sorted(responses, key=len)[len(responses) // 2]


def seeded_draw(*key: int) -> Draw:
    """Return the random draws of one rollout, reproducible from its key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    seed = int.from_bytes(digest, "little")
    generator = torch.Generator().manual_seed(seed)
    return UniformDraw(lambda: float(torch.rand((), generator=generator, dtype=torch.float64)), seed)


_PROMPT = """\
You check the reasoning of a solution, not its final answer, which is known to be right.

Call the reasoning flawed if any of this holds:
- a step is wrong, even if a later one makes up for it: a false calculation, or one that does not follow;
- the solution jumps to a result without grounds, so that it is right by luck;
- it states something, takes it back, and starts again;
- it has steps that the result does not need;
- its logic is doubtful in any other way.

Problem:
{question}

Reference answer: {reference}

Solution to check:
{response}

Reply with one JSON object and nothing else, with exactly these keys:
{{"analysis": "one or two sentences", "flawed": true or false}}"""


async def model_soundness(chat: Chat, question: str, reference: str, response: str) -> str:
    """Ask a language model for a JSON verdict, a few times until one can be parsed.

    Returns:
        `sound`, `unsound` or `no_verdict`.
    """
    prompt = _PROMPT.format(question=question, reference=reference, response=response)
    flawed = await ask_until(chat, prompt, parse_verdict)
    if flawed is None:
        return NO_VERDICT
    return UNSOUND if flawed else SOUND


def parse_verdict(reply: str) -> bool | None:
    """Return `flawed` of the JSON object in a reply, fenced or not; None if no valid object is found."""
    braces = re.search(r"\{.*\}", reply, flags=re.DOTALL)
    if not braces:
        return None
    try:
        verdict = parse_json(braces[0])
    except ValueError:
        return None
    if not isinstance(verdict, dict) or verdict.keys() != {"analysis", "flawed"}:
        return None
    return verdict["flawed"] if isinstance(verdict["flawed"], bool) else None


_EQUATION = re.compile(r"(-?\d+)\s*([+\-*/x])\s*(-?\d+)\s*=\s*(-?\d+)(?!\s*[+\-*/x\d])")


async def equation_soundness(question: str, reference: str, response: str) -> str:
    """Return `unsound` if an equation between whole numbers in the response is false. Ours; for arithmetic tasks."""
    return SOUND if all(map(_holds, _EQUATION.findall(response))) else UNSOUND


def _holds(equation: tuple[str, str, str, str]) -> bool:
    left, right, result = int(equation[0]), int(equation[2]), int(equation[3])
    if equation[1] == "/":
        return right != 0 and left == right * result
    return {"+": left + right, "-": left - right}.get(equation[1], left * right) == result


def make_soundness(spec: str | None) -> SoundnessJudge | None:
    """Return the soundness judge of a specification, `equations` or `openai:model=NAME,url=ADDRESS`; None without one.

    Raises:
        SpecError: anything else.
    """
    if not spec:
        return None
    return equation_soundness if spec == "equations" else functools.partial(model_soundness, make_chat(spec))
