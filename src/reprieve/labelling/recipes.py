"""From settings to a miner: what `reprieve mine` says, and what a cluster's workers are sent."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reprieve.engine import Pair, load_pair
from reprieve.errors import SpecError, require_choice
from reprieve.labelling.api_target import ApiTarget
from reprieve.labelling.arbitration import LABELS_VERSION, ArbitrationMiner, PairScorer
from reprieve.labelling.autojudge import AutoJudgeMiner
from reprieve.labelling.chat import Chat, OpenAIChat, openai_client
from reprieve.labelling.draft import DraftReader
from reprieve.labelling.equivalence import NotWorse, SameAnswer
from reprieve.labelling.pivot import CandidateSource, PivotMiner
from reprieve.labelling.responses import ResponseFormat
from reprieve.labelling.runner import Miner
from reprieve.labelling.soundness import EquationSoundness, ModelSoundness, SoundnessJudge
from reprieve.labelling.store import API_WEIGHTS
from reprieve.labelling.target import LocalTarget, Target
from reprieve.models.batch_decoder import BatchDecoder
from reprieve.models.cached_model import eos_token_ids
from reprieve.models.sampling import GumbelNoise, Sampler
from reprieve.settings import SamplingParams
from reprieve.specs import parse_spec
from reprieve.tasks import Task, TaskProblem, load_task

MINERS = ("autojudge", "pivot", "arbitration")


@dataclass(frozen=True)
class MiningConfig:
    """Everything that decides what labels say, and how fast they come.

    Args:
        miner: autojudge, pivot or arbitration.
        limit: problems `offset` to `offset + limit` of the split.
        temperature: 0 is greedy; above, AutoJudge samples through Gumbel noise.
        draft_temperature: the draft's own; None for `temperature`.
        max_new_tokens: largest whole response; None for the task's.
        num_in_flight: problems under way at once.
        options: the miner's own settings; None stands for the default.
        api_url: address of an OpenAI-compatible completions API that has the target; then only the draft is loaded.
        api_prompts: what it is sent: `text`, or `tokens`.
    """

    miner: str
    target: str
    draft: str | None = None
    dtype: str = "auto"
    device: str | None = None
    task: str = "arithmetic"
    split: str = "train"
    limit: int = 100
    offset: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_new_tokens: int | None = None
    draft_temperature: float | None = None
    num_in_flight: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    api_url: str | None = None
    api_prompts: str = "text"

    def __post_init__(self) -> None:
        require_choice("miner", self.miner, MINERS)
        if self.limit < 1 or self.offset < 0:
            raise SpecError(f"limit must be 1 or more and offset 0 or more, got {self.limit} and {self.offset}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise SpecError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")
        if self.num_in_flight < 1:
            raise SpecError(f"num_in_flight must be 1 or more, got {self.num_in_flight}")
        if self.api_url is not None and (self.miner != "autojudge" or self.temperature > 0 or self.draft is None):
            raise SpecError("a target behind an API needs miner autojudge, temperature 0, and a draft by name")

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            draft_temperature=self.draft_temperature,
        )


@dataclass(frozen=True)
class Workbench:
    """A miner with what it stands on."""

    miner: Miner
    problems: list[TaskProblem]
    manifest: dict[str, Any]  # of the store its labels go to


def build(config: MiningConfig) -> Workbench:
    """Load the pair and the task and make the miner.

    Raises:
        SpecError: a setting out of range.
        ReprieveError: a model or task that cannot be loaded.
    """
    task = load_task(config.task)
    if not task.graded and not config.options.get("judge"):
        raise SpecError(f"task {task.name} has no answers to compare; mine autojudge or arbitration with --judge")
    problems = task.problems(config.split, config.limit, offset=config.offset)
    if not problems:
        raise SpecError(f"offset must be below the number of problems of split {config.split!r}, got {config.offset}")
    pair = _load(config)
    responses = ResponseFormat(
        tokenizer=pair.tokenizer,
        task=task,
        eos_ids=eos_token_ids(pair.target, pair.tokenizer),
        max_new_tokens=task.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens,
    )
    return Workbench(
        miner=_BUILDERS[config.miner](config, pair, task, responses),
        problems=problems,
        manifest=_manifest(config, pair, responses),
    )


def _load(config: MiningConfig) -> Pair:
    """The pair; where the target is behind an API, the draft stands on both sides and only its tokenizer counts."""
    if config.api_url is None:
        pair = load_pair(config.target, config.draft, dtype=config.dtype, device=config.device)
        pair.cached_draft()  # refuses a pair without a draft
        return pair
    alone = load_pair(str(config.draft), str(config.draft), dtype=config.dtype, device=config.device)
    return dataclasses.replace(alone, target_name=config.target)


def _autojudge(config: MiningConfig, pair: Pair, task: Task, responses: ResponseFormat) -> AutoJudgeMiner:
    params = config.sampling
    options = dict(config.options)
    judge = options.pop("judge", None)

    def make_draft(noise: GumbelNoise | None) -> DraftReader:
        return DraftReader(pair.cached_draft(), Sampler(params, pair.draft.device), noise)  # type: ignore[union-attr]

    return AutoJudgeMiner(
        target=_target(config, pair, responses),
        make_draft=make_draft,
        responses=responses,
        equivalence=NotWorse(make_chat(judge)) if judge else SameAnswer(task),
        noise=None if params.greedy else (lambda problem: GumbelNoise(problem_seed(config.seed, problem))),
        **options,
    )


def _pivot(config: MiningConfig, pair: Pair, task: Task, responses: ResponseFormat) -> PivotMiner:
    if config.sampling.greedy:
        raise SpecError("temperature must be above 0 for pivot mining, which labels by rollouts, got 0")
    options = dict(config.options)
    soundness = make_soundness(options.pop("soundness", None))
    num_rollouts = options["num_rollouts"]
    if num_rollouts < 1:
        raise SpecError(f"num_rollouts must be 1 or more, got {num_rollouts}")

    def make_source(seed: int) -> CandidateSource:
        params = dataclasses.replace(config.sampling, seed=seed)
        return CandidateSource(pair.cached_target(), pair.cached_draft(), params)

    return PivotMiner(
        target=_local_target(config, pair, responses, rows=num_rollouts),  # half of what it asks for: rows stay full
        make_source=make_source,
        responses=responses,
        make_seed=lambda problem: problem_seed(config.seed, problem),
        soundness=soundness,
        **options,
    )


def _arbitration(config: MiningConfig, pair: Pair, task: Task, responses: ResponseFormat) -> ArbitrationMiner:
    options = dict(config.options)
    judge = options.pop("judge")
    return ArbitrationMiner(
        target=_local_target(config, pair, responses, rows=2),  # the branches of a problem that are under way at once
        responses=responses,
        params=config.sampling,
        make_decoder=lambda num_draft_tokens: pair.decoder(
            "lossless:verification=exact", num_draft_tokens=num_draft_tokens
        ),
        make_seed=lambda problem: problem_seed(config.seed, problem),
        scorer=PairScorer(make_chat(judge)) if judge else None,
        **options,
    )


_BUILDERS: dict[str, Callable[[MiningConfig, Pair, Task, ResponseFormat], Miner]] = {
    "autojudge": _autojudge,
    "pivot": _pivot,
    "arbitration": _arbitration,
}


def make_soundness(spec: str | None) -> SoundnessJudge | None:
    """The soundness judge a text names: `equations`, `openai:model=NAME,url=ADDRESS`, or none.

    Raises:
        SpecError: something else.
    """
    if not spec:
        return None
    if spec == "equations":
        return EquationSoundness()
    return ModelSoundness(make_chat(spec))


def make_chat(spec: str) -> Chat:
    """The judge model a text names: `openai:model=NAME,url=ADDRESS,temperature=1`.

    Raises:
        SpecError: something else.
        ReprieveError: no client, or no key.
    """
    name, given = parse_spec(spec, what="judge")
    if name != "openai" or not {"model"} <= given.keys() <= {"model", "url", "temperature"}:
        raise SpecError(f"a judge is written openai:model=NAME,url=ADDRESS,temperature=1, got {spec!r}")
    try:
        temperature = float(given.get("temperature", 1.0))
    except ValueError:
        raise SpecError(f"temperature of a judge must be a number, got {given['temperature']!r}") from None
    return OpenAIChat(given["model"], url=given.get("url"), temperature=temperature)


def _target(config: MiningConfig, pair: Pair, responses: ResponseFormat) -> Target:
    if config.api_url is None:
        return _local_target(config, pair, responses)
    return ApiTarget(
        openai_client(config.api_url),
        config.target,
        pair.tokenizer,
        eos_id=pair.tokenizer.eos_token_id,
        stops=responses.stops if responses.task.stop else None,
        prompts=config.api_prompts,
    )


def _local_target(config: MiningConfig, pair: Pair, responses: ResponseFormat, *, rows: int = 1) -> LocalTarget:
    decoder = BatchDecoder(
        pair.target,
        num_rows=config.num_in_flight * rows,
        params=config.sampling,
        eos_ids=responses.eos_ids,
        stops=responses.stops if responses.task.stop else None,
    )
    return LocalTarget(decoder)


def _manifest(config: MiningConfig, pair: Pair, responses: ResponseFormat) -> dict[str, Any]:
    """What labels must have in common to lie in one store; how fast they were made is left out."""
    identity = dataclasses.asdict(pair.identity)
    if config.api_url is not None:
        identity["target_weights"] = f"{API_WEIGHTS}{config.target}"
        identity["api_prompts"] = config.api_prompts
    return {
        "miner": config.miner,
        "labels_version": LABELS_VERSION if config.miner == "arbitration" else None,
        **{name: value for name, value in config.options.items() if value is not None},
        **identity,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "task": config.task,
        "split": config.split,
        "temperature": config.temperature,
        "draft_temperature": config.draft_temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": config.seed,
        "max_new_tokens": responses.max_new_tokens,
    }


def problem_seed(seed: int, problem: TaskProblem) -> int:
    """A random state of a problem's own, the same in every run and on every worker."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{problem.problem_id}".encode(), digest_size=7).digest(), "little")
