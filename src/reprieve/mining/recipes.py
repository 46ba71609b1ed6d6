"""Build a miner from mining settings, for `reprieve mine` and its worker processes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reprieve.backends.client import Client
from reprieve.backends.deploying import TARGET, Deployer, Slot, fields_of
from reprieve.backends.making import make_deployer
from reprieve.backends.running import Running
from reprieve.bench.runner import no_problems
from reprieve.drafters import DRAFTERS
from reprieve.drafters.eagle3 import EagleSettings
from reprieve.engine import Pair
from reprieve.engine.threads import load_configured
from reprieve.errors import SpecError
from reprieve.heads.binding import PairIdentity
from reprieve.mining.api_target import ApiTarget
from reprieve.mining.autojudge import AutoJudgeMiner
from reprieve.mining.draft import BatchedDraft, Draft, DraftReader, EagleModel
from reprieve.mining.equivalence import NotWorse, SameAnswer
from reprieve.mining.pivot import CandidateSource, PivotMiner
from reprieve.mining.responses import ResponseFormat
from reprieve.mining.runner import Miner
from reprieve.mining.served_model import Read, ServedModel
from reprieve.mining.served_target import ServedTarget
from reprieve.mining.settings import AutoJudgeMining, MiningSettings, PivotMining, TraceMining
from reprieve.mining.soundness import EquationSoundness, ModelSoundness, SoundnessJudge
from reprieve.mining.store import API_WEIGHTS
from reprieve.mining.target import LocalTarget, Target
from reprieve.mining.traces import LABELS_VERSION, ArbitrationMiner, PairScorer
from reprieve.models.batch_decoder import BatchDecoder
from reprieve.models.cached_model import CachedModel, HiddenLayers, eos_token_ids
from reprieve.models.draws import DRAWS_VERSION, GumbelNoise
from reprieve.models.eagle3 import EagleHead
from reprieve.models.identity import stored_generation, stored_identity
from reprieve.models.sampling import Sampler
from reprieve.rules import LosslessRule
from reprieve.specs import parse_spec
from reprieve.tasks import Task, TaskProblem, load_task
from reprieve.tasks.answers import ANSWERS_VERSION
from reprieve.tasks.chat import Chat, OpenAIChat, openai_client
from reprieve.tasks.prompting import with_prompts


@dataclass(frozen=True)
class Workbench:
    """Miner with its problems and the manifest of its label store; `close` it when done."""

    miner: Miner
    problems: list[TaskProblem]
    manifest: dict[str, Any]  # of its label store
    close: Callable[[], None] = lambda: None  # stops the server that was started for it


def build(settings: MiningSettings, *, announce: Callable[[str], None] = lambda line: None) -> Workbench:
    """Load the pair and the task and make the miner; close it when done.

    Args:
        announce: called with a line when a server is started.

    Raises:
        SpecError: a setting out of range.
        ReprieveError: a model or task that cannot be loaded.
    """
    plain = load_task(settings.task)
    if not plain.graded and not settings.asks_a_judge:
        raise SpecError(f"task {plain.name} has no answers to compare; mine autojudge or arbitration with --judge")
    served = None if settings.answering.local else TargetServers.of(settings, announce)
    try:
        return _build(settings, plain, served)
    except BaseException:
        if served is not None:
            served.running.close()
        raise


def _build(settings: MiningSettings, plain: Task, served: TargetServers | None) -> Workbench:
    pair = _load(settings, served)
    task = with_prompts(plain, pair.tokenizer, settings.prompt)
    problems = task.problems(settings.split, settings.limit, offset=settings.offset)
    if not problems:
        raise SpecError(no_problems(task, settings.split, settings.offset))
    if pair.num_positions is not None:
        task.fit(problems, pair.num_positions)
    responses = ResponseFormat(
        tokenizer=pair.tokenizer,
        task=task,
        eos_ids=eos_token_ids(pair.target, pair.tokenizer),
        max_new_tokens=task.max_new_tokens,
    )
    return Workbench(
        miner=_miner(settings, pair, responses, served),
        problems=problems,
        manifest=_manifest(settings, pair, responses, served),
        close=(lambda: None) if served is None else served.running.close,
    )


@dataclass(frozen=True)
class TargetServers:
    """Target on servers."""

    running: Running
    deployer: Deployer
    identity: PairIdentity
    tokenizer: Any

    @classmethod
    def of(cls, settings: MiningSettings, announce: Callable[[str], None]) -> TargetServers:
        """Start servers with the target alone, or connect to running ones."""
        identity, tokenizer, dtype = stored_identity(settings.pair)
        deployer = make_deployer(settings.answering.servers, settings.pair, dtype)
        return cls(deployer.start(Slot(TARGET), announce), deployer, identity, tokenizer)

    def target(self, settings: MiningSettings, responses: ResponseFormat) -> ServedTarget:
        """Return the target for miners."""
        return ServedTarget(
            lambda: Client(self.running, self.deployer.settings),
            settings.params,
            eos_ids=sorted(responses.eos_ids),
            stop=responses.task.stop,
            stops=responses.stops if responses.task.stop else None,
            extra=fields_of(LosslessRule(), self.running.facts.rules),
        )


@dataclass(frozen=True)
class ServedPair(Pair):
    """Pair whose target is on servers: locally, the draft stands in for it, and `read` queries the servers."""

    read: Read | None = None
    num_candidates: int = 1

    def cached_target(self, hidden_layers: HiddenLayers = ()) -> CachedModel:
        """Return a `ServedModel` of the target, with its own state."""
        assert self.read is not None and not hidden_layers
        return ServedModel(self.read, self.target, vocab_size=self.vocab_size, num_candidates=self.num_candidates)


def _miner(settings: MiningSettings, pair: Pair, responses: ResponseFormat, served: TargetServers | None) -> Miner:
    if isinstance(settings, AutoJudgeMining):
        return _autojudge(settings, pair, responses, served)
    if isinstance(settings, PivotMining):
        return _pivot(settings, pair, responses, served)
    assert isinstance(settings, TraceMining)
    return _traces(settings, pair, responses, served)


def _load(settings: MiningSettings, served: TargetServers | None) -> Pair:
    """Load the pair; for a target on servers or behind an API, load only the draft, which fills both roles.

    For servers, the tokenizer with its chat template and the end-of-text tokens come from the target's files. For an
    API, they are the draft's.
    """
    names = settings.pair
    by_api = isinstance(settings, AutoJudgeMining) and settings.api_url is not None
    if by_api or served is not None:
        draft_name = names.whole_draft
        if draft_name is None:
            raise SpecError("mining needs a draft by name (--draft)")
        alone = load_configured(dataclasses.replace(names, target=draft_name, draft=None, device_map=None))
        draft = alone.target if alone.draft is None else alone.draft  # the bundled pair has its own draft
        tokenizer = alone.tokenizer
        if served is not None:
            tokenizer, draft.generation_config = served.tokenizer, stored_generation(names.target)
        return dataclasses.replace(
            alone, target=draft, draft=draft, tokenizer=tokenizer, target_name=names.target, draft_name=draft_name
        )
    pair = load_configured(names)
    if settings.by_draft:
        pair.cached_draft()  # raises an error without a draft
    return pair


def _autojudge(
    settings: AutoJudgeMining, pair: Pair, responses: ResponseFormat, served: TargetServers | None
) -> AutoJudgeMiner:
    params = settings.params
    return AutoJudgeMiner(
        target=_target(settings, pair, responses, served),
        make_draft=_make_draft(settings, pair, served),
        responses=responses,
        equivalence=NotWorse(make_chat(settings.judge)) if settings.judge else SameAnswer(responses.task),
        noise=None if params.greedy else (lambda problem: GumbelNoise(problem_seed(settings.seed, problem))),
        variant=settings.variant,
    )


def _make_draft(
    settings: AutoJudgeMining, pair: Pair, served: TargetServers | None
) -> Callable[[GumbelNoise | None], Draft]:
    sampler = Sampler(settings.params, pair.device)
    if not settings.by_draft:
        head = _eagle_head(settings, pair)

        def make_model() -> EagleModel:
            return EagleModel(pair.cached_target(head.layers_read), head, pair.vocab_size)

        return lambda noise: DraftReader(make_model(), sampler)
    if served is not None and pair.device.type != "cpu":
        assert pair.draft is not None
        together = BatchedDraft(pair.draft, pair.vocab_size)
        return lambda noise: together
    return lambda noise: DraftReader(pair.cached_draft(), sampler, noise)


def _eagle_head(settings: AutoJudgeMining, pair: Pair) -> EagleHead:
    drafter = DRAFTERS.make(settings.drafter)
    assert isinstance(drafter, EagleSettings)
    return pair.eagle_head(drafter.source(pair.target_name))


def _pivot(settings: PivotMining, pair: Pair, responses: ResponseFormat, served: TargetServers | None) -> PivotMiner:
    # A label requests 2N rollouts; N rows per problem keep the batch full.
    pair, target = _walked(settings, pair, responses, served, rows=settings.num_rollouts)

    def make_source(seed: int) -> CandidateSource:
        params = dataclasses.replace(settings.params, seed=seed)
        return CandidateSource(pair.cached_target(), pair.cached_draft(), params)

    return PivotMiner(
        target=target,
        make_source=make_source,
        responses=responses,
        make_seed=lambda problem: problem_seed(settings.seed, problem),
        soundness=make_soundness(settings.soundness),
        num_rollouts=settings.num_rollouts,
        alpha=settings.alpha,
    )


def _traces(
    settings: TraceMining, pair: Pair, responses: ResponseFormat, served: TargetServers | None
) -> ArbitrationMiner:
    # Two rows, for the concurrent branches of a problem.
    pair, target = _walked(settings, pair, responses, served, rows=2)
    return ArbitrationMiner(
        target=target,
        responses=responses,
        params=settings.params,
        make_decoder=lambda num_draft_tokens: pair.decoder(
            "lossless:verification=exact", num_draft_tokens=num_draft_tokens
        ),
        make_seed=lambda problem: problem_seed(settings.seed, problem),
        scorer=PairScorer(make_chat(settings.judge)) if settings.judge else None,
        num_draft_tokens=settings.num_draft_tokens,
        max_mismatches=settings.max_mismatches,
        num_rollouts=settings.num_rollouts,
        greedy_branches=settings.greedy_branches,
        tie=settings.tie,
    )


def _walked(
    settings: MiningSettings, pair: Pair, responses: ResponseFormat, served: TargetServers | None, *, rows: int
) -> tuple[Pair, Target]:
    """Return the pair that generates responses and the target that continues them, with `rows` per problem if local."""
    if served is None:
        return pair, _local_target(settings, pair, responses, rows=rows)
    target = served.target(settings, responses)
    models = {field.name: getattr(pair, field.name) for field in dataclasses.fields(Pair)}
    return ServedPair(**models, read=target.read, num_candidates=settings.num_candidates), target


def make_soundness(spec: str | None) -> SoundnessJudge | None:
    """Return the soundness judge of a specification, `equations` or `openai:model=NAME,url=ADDRESS`; None without one.

    Raises:
        SpecError: anything else.
    """
    if not spec:
        return None
    if spec == "equations":
        return EquationSoundness()
    return ModelSoundness(make_chat(spec))


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


def _target(settings: AutoJudgeMining, pair: Pair, responses: ResponseFormat, served: TargetServers | None) -> Target:
    if served is not None:
        return served.target(settings, responses)
    if settings.api_url is None:
        return _local_target(settings, pair, responses)
    return ApiTarget(
        openai_client(settings.api_url),
        settings.pair.target,
        pair.tokenizer,
        eos_id=pair.tokenizer.eos_token_id,
        stops=responses.stops if responses.task.stop else None,
        stop=responses.task.stop,
        prompts=settings.api_prompts,
    )


def _local_target(settings: MiningSettings, pair: Pair, responses: ResponseFormat, *, rows: int = 1) -> LocalTarget:
    decoder = BatchDecoder(
        pair.target,
        num_rows=settings.in_flight * rows,
        params=settings.params,
        eos_ids=responses.eos_ids,
        stops=responses.stops if responses.task.stop else None,
    )
    return LocalTarget(decoder)


def _manifest(
    settings: MiningSettings, pair: Pair, responses: ResponseFormat, served: TargetServers | None
) -> dict[str, Any]:
    """Return the settings that all labels of one store share; settings of speed are left out."""
    identity = dataclasses.asdict(pair.identity if served is None else served.identity)
    if served is not None:
        facts = served.running.facts
        identity["engine"] = f"vllm {facts.version}" if facts.version else "openai"
    if isinstance(settings, AutoJudgeMining) and settings.api_url is not None:
        identity["target_weights"] = f"{API_WEIGHTS}{settings.pair.target}"
        identity["api_prompts"] = settings.api_prompts
    if isinstance(settings, AutoJudgeMining) and not settings.by_draft:
        identity["drafter_weights"] = _eagle_head(settings, pair).fingerprint
    return {
        "miner": settings.miner,
        "labels_version": LABELS_VERSION if isinstance(settings, TraceMining) else None,
        **{name: value for name, value in settings.options.items() if value is not None},
        **identity,
        "dtype": pair.dtype if served is None else served.deployer.dtype,
        "task": settings.task,
        "split": settings.split,
        **dataclasses.asdict(settings.sampling),
        "seed": settings.seed,
        "prompt": settings.prompt.format,
        **({"draws": DRAWS_VERSION} if isinstance(settings, AutoJudgeMining) and not settings.sampling.greedy else {}),
        "answers": ANSWERS_VERSION,
        "max_new_tokens": responses.max_new_tokens,
    }


def problem_seed(seed: int, problem: TaskProblem) -> int:
    """Return a random seed for a problem, the same in every run and on every worker."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{problem.problem_id}".encode(), digest_size=7).digest(), "little")
