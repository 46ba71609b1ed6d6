"""Engine of a run: its interface and facts, the run's configuration, and how one problem is answered and graded."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from reprieve.bench.arms import Arm
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.bench.settings import RunSettings
from reprieve.engine import SamplingParams
from reprieve.errors import EngineError, PairError, SpecError
from reprieve.heads.certificates import Conditions
from reprieve.heads.loading import require_heads_fit
from reprieve.identity import EngineIdentity, PairIdentity
from reprieve.settings import AUTO, NumDraftTokens
from reprieve.tasks import Task, TaskProblem, run_comparison
from reprieve.tasks.prompting import PromptFormat, prompt_ids_of
from reprieve.types import DecodingStats

_WARM_UP_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class EngineFacts(EngineIdentity):
    """An engine, its pair, and the device that it runs on, if known."""

    pair: PairIdentity
    device: str


@dataclass(frozen=True)
class Job:
    """One answer to be made: the arm's label, the problem's number in the run, and the trial."""

    arm: str
    number: int
    trial: int


class Engine(ABC):
    """Engine that answers a run's problems. Callers do not depend on its kind."""

    tokenizer: Any
    num_parallel: int  # answers in progress at once; above 1, the time of a single answer means little
    num_positions: int | None  # context length in tokens; None if unknown

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """Kind, version and device of this engine."""

    @abstractmethod
    def fingerprints(self, drafter: str) -> dict[str, str]:
        """Fingerprints of a drafter's own weights, by name."""

    def draft_tokens(self, arm: Arm, drafter: str) -> NumDraftTokens:
        """Draft length of an arm, as certificates record it: K, `auto`, or `auto:` and a head."""
        return arm.num_draft_tokens

    @abstractmethod
    def refusal(self, arm: Arm, drafter: str) -> str:
        """Return the reason why the engine cannot run this arm; empty if it can."""

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        """Prepare for these arms, in addition to those of earlier calls."""
        return

    @abstractmethod
    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        """Yield records as they complete, in any order; Ctrl-C drops the answers in progress.

        Raises:
            PairError: a head made for another pair.
            ReprieveError: a process or server died.
        """

    def close(self) -> None:
        """End what it started."""
        return


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunSettings, EngineIdentity):
    """Everything that decides what a run measures; kept in its folder and compared when it is resumed."""

    command: str
    target: str
    draft: str | None
    device: str
    weights: str
    num_draft_tokens: list[NumDraftTokens]
    arms: list[str]
    heads: dict[str, str] = field(default_factory=dict)  # fingerprints, by name

    @classmethod
    def of(cls, engine: Engine, arms: Sequence[Arm], settings: RunSettings, *, command: str = "") -> RunConfig:
        """The configuration of a run of these arms on this engine.

        Raises:
            SpecError: an arm that the engine cannot decode.
        """
        for arm in arms:
            if reason := engine.refusal(arm, settings.drafter):
                raise SpecError(f"arm {arm.label} cannot be measured here: {reason}")
        engine.expect(arms, settings.drafter)
        facts, pair = engine.facts, engine.facts.pair
        return cls(
            command=command,
            target=pair.target,
            draft=pair.draft,
            device=facts.device,
            weights=f"{pair.target_weights}+{pair.draft_weights}",
            num_draft_tokens=list(dict.fromkeys(arm.num_draft_tokens for arm in arms if arm.rule is not None)),
            arms=[arm.label for arm in arms],
            heads=_fingerprints(engine, arms, settings.drafter),
            **facts.engine_identity,
            **vars(settings),
        )

    def conditions(self, engine: Engine, arm: Arm) -> Conditions:
        """Return the conditions under which a certificate of this arm is valid."""
        drafter = arm.drafter or self.drafter
        return Conditions(
            pair=engine.facts.pair,
            task=self.task,
            prompt=self.prompt,
            sampling=self.sampling,
            num_draft_tokens=engine.draft_tokens(arm, self.drafter),
            drafter=drafter,
            drafter_weights="+".join(engine.fingerprints(drafter).values()) or None,
            **self.engine_identity,
        )

    def require_arm_fits(self, engine: Engine, arm: Arm) -> None:
        """Check the heads of an arm's rule against the pair and the task.

        Raises:
            PairError: a head of another pair.
        """
        if arm.rule is not None and arm.rule.heads:
            conditions = self.conditions(engine, arm)
            drafter = conditions.drafter.partition(":")[0]
            here = arm.unchecked(conditions)
            require_heads_fit(arm.rule, conditions.pair, self.task, drafter=drafter, here=here)


def _fingerprints(engine: Engine, arms: Sequence[Arm], drafter: str) -> dict[str, str]:
    """Of every trained part that is not the pair's own, by name."""
    by_head: dict[str, str] = {}
    for arm in arms:
        if arm.rule is not None:
            by_head |= {name: head.fingerprint for name, head in arm.rule.heads}
            by_head |= engine.fingerprints(arm.drafter or drafter)
            if isinstance(decides := engine.draft_tokens(arm, drafter), str) and decides != AUTO:
                by_head[f"length of {arm.label}"] = decides
    return by_head


class Answerer:
    """Answers a run's problems with an engine and grades the answers.

    Args:
        decode: decodes one turn, given the arm, the prompt and the sampling parameters.
    """

    Decode: TypeAlias = Callable[[Arm, list[int], SamplingParams], Awaitable[Reply]]

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        tokenizer: Any,
        arms: Sequence[Arm],
        problems: Sequence[TaskProblem],
        decode: Decode,
    ) -> None:
        self.config = config
        self.task = task
        self._arms = {arm.label: arm for arm in arms}
        self._problems = problems
        self._decode = decode
        self._tokenizer = tokenizer
        self._format = PromptFormat(tokenizer, config.prompt)
        self.params = SamplingParams(
            max_new_tokens=task.max_new_tokens, seed=config.seed, stop=tuple(task.stop), **vars(config.sampling)
        )

    async def warm_up(self, arm: Arm) -> None:
        """Decode a few tokens of the first problem, without recording them.

        Raises:
            PairError: a head made for another pair.
        """
        params = dataclasses.replace(self.params, max_new_tokens=_WARM_UP_TOKENS)
        await self._answer(arm, self._problems[0], params, 0)

    async def answer(self, job: Job) -> ProblemRecord:
        """Answer one problem with one arm; the random draws depend on the problem and the trial."""
        params = self.params.for_problem(job.number, job.trial)
        return await self._answer(self._arms[job.arm], self._problems[job.number], params, job.trial)

    async def _answer(self, arm: Arm, problem: TaskProblem, params: SamplingParams, trial: int) -> ProblemRecord:
        """Answer and grade one problem with one arm. A failure is recorded as an error, never as an answer."""
        try:
            turns = await self._converse(arm, problem, arm.params(params))
            answer = self.task.extract_answer(turns[-1].text)
            correct = await run_comparison(self.task, self.task.equivalent, answer, problem.reference)
        except (EngineError, PairError):  # no problem can be answered: end the run
            raise
        except Exception as error:  # any error: the other problems can still be measured
            return ProblemRecord(
                arm=arm.label,
                problem_id=problem.problem_id,
                trial=trial,
                correct=False,
                answer=None,
                text="",
                finish_reason="error",
                error=f"{type(error).__name__}: {error}",
                **DecodingStats.total(()).stats,
            )
        last = turns[-1]
        return ProblemRecord(
            arm=arm.label,
            problem_id=problem.problem_id,
            trial=trial,
            correct=correct,
            answer=answer,
            text=last.text,
            finish_reason=last.finish_reason,
            spans=last.spans,
            turns=[turn.text for turn in turns] if len(turns) > 1 else [],
            **DecodingStats.total(turns).stats,
        )

    async def _converse(self, arm: Arm, problem: TaskProblem, params: SamplingParams) -> list[Reply]:
        """Return the replies of all turns; most problems have one turn."""
        replies = [await self._decode(arm, prompt_ids_of(problem, self._tokenizer), params)]
        if not problem.follow_ups:
            return replies
        messages = [{"role": "user", "content": problem.prompt}]
        for message in problem.follow_ups:
            messages += self._format.next_turn(replies[-1].text, message)
            replies.append(await self._decode(arm, self._format.encode(messages), params))
        return replies
