"""Engine that sends the requests of all arms and problems to servers, which batch them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reprieve.backends.client import Client, Completion
from reprieve.backends.deployers import PAIR, TARGET, Deployer, ServerPlan, fields_of
from reprieve.backends.servers import Running
from reprieve.backends.settings import SERVED_DRAFT_TOKENS
from reprieve.bench.arms import Arm
from reprieve.bench.engine import Answerer, Engine, EngineFacts, Job, RunConfig
from reprieve.bench.records import ProblemRecord, Reply
from reprieve.concurrency import iterate, results_of
from reprieve.drafters import DRAFTERS
from reprieve.engine import SamplingParams
from reprieve.errors import EngineError, ReprieveError, SpecError
from reprieve.heads.files import find_head
from reprieve.identity import PairIdentity, digest
from reprieve.settings import wrapped_seed
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.prompting import prompt_ids_of

_FEW = 2  # tokens of an answer for which nothing may have been drafted


class ServedEngine(Engine):
    """Sends requests to servers, one of which is up at a time.

    Arms with another K or drafter, or with one model alone, get their own.

    Args:
        deployer: starts servers, or knows running ones.
        announce: called with a line when one is started.
    """

    def __init__(
        self, deployer: Deployer, tokenizer: Any, identity: PairIdentity, *, announce: Callable[[str], None]
    ) -> None:
        self.deployer = deployer
        self.tokenizer = tokenizer
        self.identity = identity
        self.num_parallel = deployer.settings.parallel
        self.num_positions: int | None = None  # the server says so itself
        self._announce = announce
        self._drafter_weights: dict[str, str] = {}  # fingerprints, because the files are large and every arm asks
        self._plans: dict[tuple[str, int, str], ServerPlan] = {}
        self._up: tuple[ServerPlan, Running] | None = None

    @property
    def facts(self) -> EngineFacts:
        """Facts that the server reports; starts a server if none is up."""
        if self._up is None:
            pairs = [plan for plan in self._plans.values() if plan.role == PAIR]
            self._serve(max(pairs, key=lambda plan: len(plan.rules), default=ServerPlan(TARGET)))
        assert self._up is not None
        facts = self._up[1].facts
        return EngineFacts(
            pair=self.identity,
            dtype=facts.dtype or self.deployer.dtype,
            device="server",
            engine="openai" if facts.version is None else "vllm",
            engine_version=facts.version,
            runner=facts.runner,
            engine_arguments=getattr(self.deployer.settings, "arguments", ""),
        )

    def fingerprints(self, drafter: str) -> dict[str, str]:
        settings: Any = DRAFTERS.make(drafter)
        if settings.name != "eagle3":
            return {}
        source = settings.source(self.identity.target)
        if source not in self._drafter_weights:
            files = sorted(find_head(source).glob("*.safetensors"))
            if not files:
                raise ReprieveError(f"drafter {drafter!r} has no safetensors files")
            self._drafter_weights[source] = digest(b"".join(file.read_bytes() for file in files))
        return {source: self._drafter_weights[source]}

    def refusal(self, arm: Arm, drafter: str) -> str:
        if arm.truncation is not None:
            return "a server does not sample from a rule's truncation; use --engine local"
        if arm.vllm and self.deployer.settings.name != "vllm":
            return f"{arm.label} is vLLM's own method, which needs a server started for it: use --engine vllm"
        if isinstance(arm.num_draft_tokens, str) and arm.rule is not None:
            return f"a server drafts a fixed number of tokens per round: give a number, as @K={SERVED_DRAFT_TOKENS}"
        return self.deployer.refusal(self._plan(arm, drafter), arm.rule)

    def expect(self, arms: Sequence[Arm], drafter: str) -> None:
        for arm in arms:
            plan = self._plan(arm, drafter)
            self._plans.setdefault(plan.key, plan).add(arm.rule)

    def answer(
        self, config: RunConfig, task: Task, arms: Sequence[Arm], problems: Sequence[TaskProblem], jobs: Sequence[Job]
    ) -> Iterator[ProblemRecord]:
        if config.sampling.draft_temperature is not None:
            raise SpecError("draft_temperature cannot be set on a server: it drafts at the request's own temperature")
        self.expect(arms, config.drafter)
        for arm in arms:
            config.require_arm_fits(self, arm)
        plans = {arm.label: self._plans[self._plan(arm, config.drafter).key] for arm in arms}
        up = None if self._up is None else self._up[0].key
        needed = {plan.key: plan for plan in (plans[job.arm] for job in jobs)}
        for plan in sorted(needed.values(), key=lambda plan: plan.key != up):  # the one whose server is up first
            plan_jobs = [job for job in jobs if plans[job.arm] is plan]
            running = self._serve(plan)
            with asyncio.Runner() as loop:
                client = Client(running, self.deployer.settings)
                decode = self._decoder(client, running)
                answerer = Answerer(config, task, self.tokenizer, arms, problems, decode)
                results = results_of(plan_jobs, answerer.answer, num_parallel=self.num_parallel)
                yield from iterate(loop, results, closing=client.close)

    def grouped(self, arms: Sequence[Arm], drafter: str) -> list[list[Arm]]:
        """The arms by the server that they need."""
        self.expect(arms, drafter)
        groups: dict[tuple[str, int, str], list[Arm]] = {}
        for arm in arms:
            groups.setdefault(self._plan(arm, drafter).key, []).append(arm)
        return list(groups.values())

    def timed(
        self,
        config: RunConfig,
        task: Task,
        arm: Arm,
        problems: Sequence[TaskProblem],
        *,
        concurrency: int,
        num_warm: int,
    ) -> tuple[list[Completion], float]:
        """Return one arm's streamed completions, and the seconds from the first request to the last token.

        Args:
            concurrency: maximum number of requests in flight.
            num_warm: warm-up requests, sent before and not counted.

        Raises:
            EngineError: the server died.
        """
        running = self._serve(self._plans[self._plan(arm, config.drafter).key])
        fields = self._fields(arm, running)
        params = arm.params(
            SamplingParams(max_new_tokens=task.max_new_tokens, stop=tuple(task.stop), **vars(config.sampling))
        )

        async def all_of(client: Client) -> tuple[list[Completion], float]:
            async def ask(numbered: tuple[int, TaskProblem]) -> Completion:
                number, problem = numbered
                seeded = dataclasses.replace(params, seed=wrapped_seed(params.seed + number))
                prompt_ids = prompt_ids_of(problem, self.tokenizer)
                [completion] = await client.complete(prompt_ids, seeded, extra=fields, stream=True)
                _require_numbers(arm, completion)
                return completion

            try:
                warm = enumerate(problems[:num_warm])
                _ = [finished async for finished in results_of(warm, ask, num_parallel=concurrency)]
                began = time.perf_counter()
                lists = [finished async for finished in results_of(enumerate(problems), ask, num_parallel=concurrency)]
                return [completion for finished in lists for completion in finished], time.perf_counter() - began
            finally:
                await client.close()

        settings = self.deployer.settings
        wide = dataclasses.replace(settings, parallel=max(settings.parallel, concurrency))
        return asyncio.run(all_of(Client(running, wide)))

    def close(self) -> None:
        """End the server, if it was started here."""
        if self._up is not None:
            self._up[1].close()
            self._up = None

    def _decoder(self, client: Client, running: Running) -> Answerer.Decode:
        """Return a function that decodes one turn of a conversation on a server."""

        async def decode(arm: Arm, prompt_ids: list[int], params: SamplingParams) -> Reply:
            [completion] = await client.complete(prompt_ids, params, extra=self._fields(arm, running))
            _require_numbers(arm, completion)
            numbers = completion.speculation
            return Reply(
                text=completion.text,
                finish_reason=completion.finish_reason,
                num_tokens=len(completion.token_ids),
                num_rounds=completion.num_steps,
                round_lengths=completion.step_lengths,
                num_drafted=int(numbers.get("num_draft_tokens", 0)),
                num_accepted=int(numbers.get("num_accepted_draft_tokens", 0)),
                num_rescued=int(numbers.get("num_rescued_tokens", 0)),
                seconds=completion.seconds,
            )

        return decode

    def _fields(self, arm: Arm, running: Running) -> dict[str, Any]:
        """Return the request fields that select this arm."""
        offered = running.facts.rules
        fields = fields_of(arm.rule, offered)
        if fields is None:
            raise SpecError(f"the server does not offer {arm.label}; it has {', '.join(offered.values())}")
        return fields

    def _plan(self, arm: Arm, drafter: str) -> ServerPlan:
        if arm.alone is not None:
            return ServerPlan(arm.alone)
        assert isinstance(arm.num_draft_tokens, int)  # see `refusal`
        return ServerPlan(PAIR, arm.num_draft_tokens, arm.drafter or drafter, method=arm.vllm)

    def _serve(self, plan: ServerPlan) -> Running:
        """Return a plan's server; if another server is up, close it and start this one."""
        if self._up is not None:
            up, running = self._up
            if up.key == plan.key and all(up.offers(rule) for rule in plan.rules):
                return running
            self.close()
        running = self.deployer.start(plan, self._announce)
        self._up = (dataclasses.replace(plan, rules=list(plan.rules)), running)
        return running


def _require_numbers(arm: Arm, completion: Completion) -> None:
    """Refuse a speculating server that does not report metrics per request."""
    if arm.rule is not None and not completion.speculation and len(completion.token_ids) > _FEW:
        raise EngineError(
            "the server reports no speculation metrics: start it with --per-request-spec-decode-metrics summary"
        )
