"""Build a miner from mining settings, for `reprieve mine` and its worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from reprieve.backends.client import Client
from reprieve.backends.deployers import TARGET, Deployer, ServerPlan, fields_of, make_deployer
from reprieve.backends.servers import Running
from reprieve.drafters import DRAFTERS
from reprieve.drafters.eagle3 import EagleSettings
from reprieve.engine import Pair, SamplingParams
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request
from reprieve.engine.batches import Stepper
from reprieve.engine.continuations import ContinuationDecoder
from reprieve.engine.pair import load_configured
from reprieve.errors import SpecError
from reprieve.identity import PairIdentity
from reprieve.mining.autojudge import AutoJudgeMiner
from reprieve.mining.draft import BatchedDraft, BlockReader, Draft, DraftReader, EagleModel, local_reader
from reprieve.mining.pivot import (
    PIVOT_BLOCK,
    TURNS,
    BatchedSource,
    CandidateSource,
    PivotMiner,
    Source,
    Step,
    make_soundness,
)
from reprieve.mining.served_target import ServedTarget
from reprieve.mining.settings import AutoJudgeMining, MiningSettings, PivotMining, TraceMining
from reprieve.mining.store import API_WEIGHTS, ProblemLabels
from reprieve.mining.target import ApiTarget, LocalTarget, ResponseFormat, Target
from reprieve.mining.traces import LABELS_VERSION, ArbitrationMiner, BatchedTracer, BlockTracer, Tracer
from reprieve.models.cached_model import eos_token_ids
from reprieve.models.eagle3 import EagleHead
from reprieve.models.sampling import DRAWS_VERSION, GumbelNoise, Sampler
from reprieve.models.stored import stored_generation, stored_identity
from reprieve.rules import LosslessRule
from reprieve.tasks import TaskProblem, load_task
from reprieve.tasks.answers import ANSWERS_VERSION
from reprieve.tasks.chat import make_chat, openai_client
from reprieve.tasks.prompting import problems_of, with_prompts

_MAX_ROWS = 32  # rows of one batch: each step reads all of them, and most problems wait for rollouts


class Miner(Protocol):
    """Labels one problem; several calls can be in flight."""

    async def mine(self, problem: TaskProblem) -> ProblemLabels: ...


@dataclass(frozen=True)
class MiningJob:
    """Miner with its problems and the manifest of its label store; `close` it when done."""

    miner: Miner
    problems: list[TaskProblem]
    manifest: dict[str, Any]  # of its label store
    close: Callable[[], None]  # stops the server that was started for it


def build(settings: MiningSettings, *, announce: Callable[[str], None] = lambda line: None) -> MiningJob:
    """Load the pair and the task and make the miner; close it when done.

    Args:
        announce: called with a line when a server is started.

    Raises:
        SpecError: a setting out of range.
        ReprieveError: a model or task that cannot be loaded.
    """
    plain = load_task(settings.task)
    if not plain.graded and settings.judge is None:
        raise SpecError(f"task {plain.name} has no reference answers: mine autojudge or arbitration with --judge")
    with ExitStack() as started:
        served = None
        if not settings.engine.local:
            served = TargetServers.start(settings, announce)
            started.callback(served.running.close)
        pair = _load(settings, served)
        task = with_prompts(plain, pair.tokenizer, settings.prompt)
        problems = problems_of(task, settings, pair.num_positions)
        responses = ResponseFormat(
            tokenizer=pair.tokenizer,
            task=task,
            eos_ids=eos_token_ids(pair.target, pair.tokenizer),
            max_new_tokens=task.max_new_tokens,
        )
        miner = _make_miner(settings, pair, responses, served)
        manifest = _manifest(settings, pair, responses, served)
        return MiningJob(miner, problems, manifest, close=started.pop_all().close)


@dataclass(frozen=True)
class TargetServers:
    """Servers that run the target, with its identity and tokenizer."""

    running: Running
    deployer: Deployer
    identity: PairIdentity
    tokenizer: Any

    @classmethod
    def start(cls, settings: MiningSettings, announce: Callable[[str], None]) -> TargetServers:
        """Start servers with the target alone, or connect to running ones."""
        identity, tokenizer, dtype = stored_identity(settings.pair)
        deployer = make_deployer(settings.engine.servers, settings.pair, dtype)
        return cls(deployer.start(ServerPlan(TARGET), announce), deployer, identity, tokenizer)


def _load(settings: MiningSettings, served: TargetServers | None) -> Pair:
    """Load the pair; for a target on servers or behind an API, load only the draft, which fills both roles.

    For servers, the tokenizer with its chat template and the end-of-text tokens come from the target's files. For an
    API, they are the draft's.
    """
    names = settings.pair
    if served is None and _api_url(settings) is None:
        pair = load_configured(names)
        if settings.by_draft:
            pair.cached_draft()  # raises an error without a draft
        return pair
    draft_name = names.draft_source
    if draft_name is None:
        raise SpecError("mining needs a draft model: give --draft")
    alone = load_configured(dataclasses.replace(names, target=draft_name, draft=None, device_map=None))
    draft = alone.target if alone.draft is None else alone.draft  # the bundled pair has its own draft
    tokenizer = alone.tokenizer
    if served is not None:
        tokenizer, draft.generation_config = served.tokenizer, stored_generation(names.target)
    return Pair(draft, draft, tokenizer, names.target, draft_name)


def _api_url(settings: MiningSettings) -> str | None:
    return settings.api_url if isinstance(settings, AutoJudgeMining) else None


def _make_miner(settings: MiningSettings, pair: Pair, responses: ResponseFormat, served: TargetServers | None) -> Miner:
    target = _make_target(settings, pair, responses, served)
    judge = make_chat(settings.judge) if settings.judge else None
    if isinstance(settings, AutoJudgeMining):
        make_draft = _make_draft(settings, pair, together=served is not None and _on_accelerator(pair))
        return AutoJudgeMiner(settings, target, make_draft, responses, judge)
    together = served is None and _on_accelerator(pair)
    if isinstance(settings, PivotMining):
        make_source = _make_source(settings, pair, target, together=together)
        return PivotMiner(settings, target, make_source, responses, make_soundness(settings.soundness))
    assert isinstance(settings, TraceMining)
    if together and settings.sampling.greedy:
        stop = responses.task.stop
        trace: Tracer = BatchedTracer(
            _batched_decoder(settings, pair, num_draft_tokens=settings.num_draft_tokens, stop=stop)
        )
    else:
        trace = BlockTracer(_block_maker(pair, target), responses, settings.num_draft_tokens)
    return ArbitrationMiner(settings, target, trace, responses, judge)


def _on_accelerator(pair: Pair) -> bool:
    """Return True if the pair is not on a CPU: one forward over many texts then costs less than many small ones."""
    return pair.device.type != "cpu"


def _make_source(settings: PivotMining, pair: Pair, target: Target, *, together: bool) -> Callable[[int], Source]:
    """Return the function that makes a problem's source of candidates from its seed.

    Args:
        together: verify the drafted tokens of all problems in one batch.
    """
    if together:
        decoder = _batched_decoder(settings, pair, num_draft_tokens=PIVOT_BLOCK)
        stepper: Stepper[Request, Step] = Stepper(decoder, turns=TURNS)
        return lambda seed: BatchedSource(stepper, seed)

    make_blocks = _block_maker(pair, target)
    return lambda seed: CandidateSource(make_blocks(dataclasses.replace(settings.params, seed=seed)))


def _block_maker(pair: Pair, target: Target) -> Callable[[SamplingParams], BlockReader]:
    """Return the function that makes a problem's reader of drafted blocks."""

    def make(params: SamplingParams) -> BlockReader:
        read = target.read if isinstance(target, ServedTarget) else local_reader(pair.cached_target())
        return BlockReader(
            pair.cached_draft(),
            read,
            target.run_blocking,
            Sampler(params, pair.device),
            models=[model for model in (pair.target, pair.draft) if model is not None],
        )

    return make


def _batched_decoder(
    settings: MiningSettings, pair: Pair, *, num_draft_tokens: int, stop: Sequence[str] = ()
) -> BatchedSpeculativeDecoder:
    """Return a decoder that generates the responses of all problems in flight in one batch."""
    params = dataclasses.replace(settings.params, stop=tuple(stop))
    num_rows = min(settings.in_flight, _MAX_ROWS)
    return BatchedSpeculativeDecoder(pair, num_rows=num_rows, num_draft_tokens=num_draft_tokens, params=params)


def _make_target(
    settings: MiningSettings, pair: Pair, responses: ResponseFormat, served: TargetServers | None
) -> Target:
    if served is not None:
        return ServedTarget(
            lambda: Client(served.running, served.deployer.settings),
            settings.params,
            responses,
            pair,
            num_candidates=settings.num_candidates,
            extra=fields_of(LosslessRule(), served.running.facts.rules),
        )
    if isinstance(settings, AutoJudgeMining) and settings.api_url is not None:
        client = openai_client(settings.api_url)
        return ApiTarget(client, settings.pair.target, responses)
    decoder = ContinuationDecoder(
        pair.target,
        num_rows=settings.in_flight * settings.rows_per_problem,
        params=settings.params,
        eos_ids=responses.eos_ids,
        stops=responses.stops,
    )
    return LocalTarget(decoder)


def _make_draft(settings: AutoJudgeMining, pair: Pair, *, together: bool) -> Callable[[GumbelNoise | None], Draft]:
    """Return the function that makes a problem's draft reader.

    Args:
        together: read the texts of all problems in one batch.
    """
    sampler = Sampler(settings.params, pair.device)
    if not settings.by_draft:
        head = _eagle_head(settings, pair)
        return lambda noise: DraftReader(EagleModel(pair.target, head, vocab_size=pair.vocab_size), sampler)
    if together:
        assert pair.draft is not None
        batched = BatchedDraft(pair.draft, pair.vocab_size)
        return lambda noise: batched
    return lambda noise: DraftReader(pair.cached_draft(), sampler, noise)


def _eagle_head(settings: AutoJudgeMining, pair: Pair) -> EagleHead:
    drafter = DRAFTERS.make(settings.drafter)
    assert isinstance(drafter, EagleSettings)
    return pair.eagle_head(drafter.source(pair.target_name))


def _manifest(
    settings: MiningSettings, pair: Pair, responses: ResponseFormat, served: TargetServers | None
) -> dict[str, Any]:
    """Return the settings that all labels of one store share; settings that only affect speed are left out."""
    identity = dataclasses.asdict(pair.identity if served is None else served.identity)
    if served is not None:
        facts = served.running.facts
        identity["engine"] = f"vllm {facts.version}" if facts.version else "openai"
    if isinstance(settings, AutoJudgeMining):
        if settings.api_url is not None:
            identity["target_weights"] = f"{API_WEIGHTS}{settings.pair.target}"
        if not settings.by_draft:
            identity |= {"drafter": "eagle3", "drafter_weights": _eagle_head(settings, pair).fingerprint}
        if not settings.sampling.greedy:
            identity["draws"] = DRAWS_VERSION
    return {
        "miner": settings.miner,
        "labels_version": LABELS_VERSION if isinstance(settings, TraceMining) else None,
        **settings.options,
        **identity,
        "dtype": pair.dtype if served is None else served.deployer.dtype,
        "task": settings.task,
        "split": settings.split,
        **dataclasses.asdict(settings.sampling),
        "seed": settings.seed,
        "prompt": settings.prompt.format,
        "answers": ANSWERS_VERSION,
        "max_new_tokens": responses.max_new_tokens,
    }
