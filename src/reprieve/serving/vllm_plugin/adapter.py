"""The one file that knows vLLM's internals (0.32, V1 model runner). A new version of vLLM is a change here.

No kernel is replaced. Where the rule accepts a drafted token its target logit is raised to the largest number before
vLLM's own rejection sampler sees it, and put back afterwards; where a replacing rule refuses one, the sampler is shown
a proposal it must reject. Recovered and bonus tokens, random numbers, statistics and logprobs stay vLLM's.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reprieve.errors import ReprieveError
from reprieve.serving.leniency import FIELDS, Policy, RequestError
from reprieve.serving.vllm_plugin import configuration, require_healthy, visibility
from reprieve.serving.vllm_plugin.batch import Batch, Decisions, Row, spread
from reprieve.serving.vllm_plugin.rounds import RoundRequest, WorkerRules

logger = logging.getLogger("vllm.reprieve")

# Hooked functions and the parameters they must have; other ones mean another vLLM than the tested one.
_SIGNATURES = {
    "rejection_sample": "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
    "bonus_token_ids sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel",
    "apply_sampling_constraints": "logits cu_num_draft_tokens sampling_metadata",
    "generate_uniform_probs": "num_tokens num_draft_tokens generators device",
}
_REGISTERED = False


def register() -> None:
    """Wrap the places where vLLM starts up. Every wrapper asks first whether the plugin is configured."""
    global _REGISTERED
    if _REGISTERED:
        return
    _REGISTERED = True
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _after(WorkerWrapperBase, "init_device", lambda wrapper: _install(wrapper.worker))
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.reprieve_status = _status
    _before(InputProcessor, "__init__", lambda processor, vllm_config, *rest, **more: _prepare(vllm_config))
    _before(InputProcessor, "_validate_params", _validate)
    _after(EngineCore, "_initialize_kv_caches", _require_workers)
    _after_async(AsyncLLM, "check_health", _check_health)


def _policy(vllm_config: Any) -> Policy | None:
    source = configuration.source_of(vllm_config.additional_config)
    return None if source is None else configuration.load_policy(source)


def _prepare(vllm_config: Any) -> None:
    """In the front end, before the engine starts: refuse what cannot work, and make room for our numbers."""
    policy = _policy(vllm_config)
    if policy is None:
        return
    _setup(vllm_config).require(policy)
    visibility.extend(policy.standard.spec)


def _setup(vllm_config: Any) -> configuration.Setup:
    from vllm.version import __version__

    spec = vllm_config.speculative_config
    method = None if spec is None else spec.method
    return configuration.Setup(
        version=__version__,
        method=method,
        rejection_sample_method="standard" if spec is None else spec.rejection_sample_method,
        draft_sample_method="greedy" if spec is None else spec.draft_sample_method,
        has_draft_logits=method in ("draft_model", "eagle", "eagle3", "mtp"),
        heterogeneous_vocab=bool(spec is not None and spec.use_heterogeneous_vocab),
        v2_model_runner=vllm_config.use_v2_model_runner,
        async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
        hidden_size=vllm_config.model_config.get_hidden_size(),
    )


def _validate(processor: Any, params: Any, *rest: Any) -> None:
    """A request's fields, in the front end: an error the client sees as 400."""
    asked = getattr(params, "extra_args", None)
    if not asked or not any(name in asked for name in FIELDS):
        return
    policy = _policy(processor.vllm_config)
    if policy is None:
        return
    from vllm.exceptions import VLLMValidationError

    try:
        policy.resolve(asked)
    except RequestError as error:
        raise VLLMValidationError(str(error), parameter=error.parameter, value=asked.get(error.parameter)) from None


def _require_workers(engine: Any, vllm_config: Any) -> None:
    """In the engine's process, after the workers came up: a worker without the plugin must not serve."""
    policy = _policy(vllm_config)
    if policy is None:
        return
    visibility.extend(policy.standard.spec)
    try:
        found = engine.collective_rpc("reprieve_status")
    except Exception as error:
        raise ReprieveError(f"Reprieve's plugin is configured and did not load in a worker: {error}") from None
    require_healthy(found)
    logger.info("Reprieve is active in %d worker(s): %s", len(found), policy.describe())


async def _check_health(engine: Any) -> None:
    if _policy(engine.vllm_config) is None:
        return
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        require_healthy(await engine.collective_rpc("reprieve_status", timeout=10))
    except Exception as error:
        logger.error("unhealthy: %s", error)
        raise EngineDeadError from error


def _status(worker: Any) -> dict[str, Any]:
    hooks = getattr(worker.model_runner, "reprieve", None)
    if hooks is None:
        return {"active": False, "rank": worker.rank, "failures": 0}
    return hooks.rules.status


def _install(worker: Any) -> None:
    """In a worker, once its runner, sampler and drafter exist."""
    policy = _policy(worker.vllm_config)
    if policy is None:
        return
    _setup(worker.vllm_config).require(policy)
    _require_signatures()
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = worker.model_runner
    if not isinstance(runner, GPUModelRunner):
        raise ReprieveError(f"Reprieve's plugin needs the V1 model runner, got {type(runner).__name__}")
    runner.reprieve = RunnerHooks(worker_rules(policy, worker), runner)
    runner.reprieve.install()


def worker_rules(policy: Policy, worker: Any) -> WorkerRules:
    """The policy, made ready for a worker: bound to its tokenizer, its heads on its device.

    Raises:
        PairError: a head made for another tokenizer.
    """
    rule = policy.rule
    if rule.reads_text or rule.heads:
        from transformers import AutoTokenizer

        model = worker.vllm_config.model_config
        tokenizer: Any = AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=model.trust_remote_code)
        configuration.require_tokenizer(rule, tokenizer)
        rule = rule.bind(tokenizer)
    return WorkerRules(policy.with_rule(rule.to(worker.model_runner.device)), rank=worker.rank)


def _require_signatures() -> None:
    from vllm.v1.sample import rejection_sampler

    for name, wanted in _SIGNATURES.items():
        function = getattr(rejection_sampler, name, None)
        found = " ".join(inspect.signature(inspect.unwrap(function)).parameters) if function else "nothing"
        if found != wanted:
            raise ReprieveError(f"vLLM's {name} takes ({found}), the plugin was written for ({wanted})")


@dataclass
class _Round:
    """What belongs to the round that is being sampled."""

    hooks: RunnerHooks
    state: Any  # vLLM's ExecuteModelState
    possible: Tensor | None = None  # [N], captured before top-k and top-p
    uniforms: Tensor | None = None  # [N], drawn ahead for the rule, then used by vLLM


_ROUND: _Round | None = None  # of this process; set only while a batch is being sampled


class RunnerHooks:
    """The hooks on one model runner."""

    def __init__(self, rules: WorkerRules, runner: Any) -> None:
        self.rules = rules
        self.runner = runner
        self._reads_draft = "draft_probs" in rules.policy.rule.needs
        self._recorded: list[Tensor] = []

    def install(self) -> None:
        """Wrap this runner's methods, its drafter's, and the sampler's functions."""
        runner = self.runner
        if getattr(runner, "rejection_sampler", None) is None:
            return  # not the last stage of a pipeline: nothing is sampled here
        patch_sampler()
        sample_tokens, propose = runner.sample_tokens, runner.propose_draft_token_ids
        copy_drafts = runner._copy_draft_token_ids_to_cpu

        def sample(grammar_output: Any) -> Any:
            with self._round():
                output = sample_tokens(grammar_output)
            self._attach(output)
            return output

        def propose_drafts(*args: Any, **kwargs: Any) -> Any:
            self._recorded = []
            drafts = propose(*args, **kwargs)
            self.rules.note_drafts(runner.input_batch.req_ids, self._drafted_probs())
            return drafts

        def copy(scheduler_output: Any, zeros_only: bool = False) -> Any:
            if zeros_only:  # a request nears its end: vLLM hands out tokens that nobody drafted
                self.rules.note_drafts(runner.input_batch.req_ids, None, real=False)
            return copy_drafts(scheduler_output, zeros_only)

        runner.sample_tokens, runner.propose_draft_token_ids = sample, propose_drafts
        runner._copy_draft_token_ids_to_cpu = copy
        if self._reads_draft:
            self._record_drafts(runner.drafter)

    def _record_drafts(self, drafter: Any) -> None:
        """Keep the distribution of each drafted token, which vLLM itself drops in greedy batches."""
        sample_draft = drafter._sample_draft_tokens

        def sample(hidden_states: Tensor, sampling_metadata: Any) -> Any:
            if drafter._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy:
                token_ids, probs = sample_draft(hidden_states, sampling_metadata)
                self._recorded.append(probs)
                return token_ids, probs
            logits = drafter.model.compute_logits(hidden_states)
            self._recorded.append(logits.softmax(-1, dtype=torch.float32))
            return logits.argmax(-1), None

        drafter._sample_draft_tokens = sample

    def _drafted_probs(self) -> Tensor | None:
        return torch.stack(self._recorded, dim=1) if self._recorded else None  # [B, K, V]

    @contextmanager
    def _round(self) -> Iterator[None]:
        global _ROUND
        state = self.runner.execute_model_state
        if state is not None and state.spec_decode_metadata is not None:
            _ROUND = _Round(self, state)
        try:
            yield
        finally:
            _ROUND = None
            self.rules.forget_all_but(self.runner.requests)

    def _attach(self, output: Any) -> None:
        """Send the counts along with the output, to the scheduler."""
        counts = self.rules.take_counts()
        if counts:
            inner = getattr(output, "_model_runner_output", output)
            setattr(inner, visibility.ATTRIBUTE, {key: (made.rule, made.num_rescued) for key, made in counts.items()})

    def requests(self, num_draft_tokens: list[int]) -> list[RoundRequest]:
        """The batch in vLLM's order, which changes from round to round."""
        batch = self.runner.input_batch
        return [
            RoundRequest(
                request_id=request_id,
                num_drafted=num_drafted,
                greedy=request_id in batch.greedy_reqs,
                asked=functools.partial(self._asked, request_id),
                context_ids=functools.partial(self._context_ids, place),
            )
            for place, (request_id, num_drafted) in enumerate(zip(batch.req_ids, num_draft_tokens, strict=True))
        ]

    def _asked(self, request_id: str) -> Any:
        return self.runner.requests[request_id].sampling_params.extra_args

    def _context_ids(self, place: int) -> Tensor:
        batch = self.runner.input_batch
        return torch.from_numpy(batch.token_ids_cpu[place, : batch.num_tokens_no_spec[place]])

    def batch(
        self,
        current: _Round,
        requests: list[RoundRequest],
        target_logits: Tensor,
        draft_probs: Tensor | None,
        meta: Any,
    ) -> Batch:
        """The round's tensors, as far as the rule reads them."""
        needs, rule = self.rules.policy.rule.needs, self.rules.policy.rule
        state = current.state
        token_ids = state.spec_decode_metadata.draft_token_ids.long()
        judging = state.spec_decode_metadata.target_logits_indices
        hidden = state.sample_hidden_states
        reads_states = {"node_hidden", "parent_hidden"} & needs
        assert current.possible is not None
        proposal = None
        if draft_probs is not None:
            proposal = draft_probs.gather(-1, token_ids.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return Batch(
            token_ids=token_ids,
            scores=target_logits,
            logits=state.logits[judging].float() if reads_states or rule.beyond_truncation else target_logits,
            possible=current.possible,
            proposal_probs=proposal,
            draft_scores=self._draft_scores(requests, target_logits, meta) if self._reads_draft else None,
            uniforms=current.uniforms,
            noise=self.rules.noise(len(token_ids), token_ids.device),
            node_logits=state.logits[judging + 1].float() if "node_logits" in needs else None,
            node_hidden={-1: hidden[judging + 1]} if "node_hidden" in needs else None,
            parent_hidden={-1: hidden[judging]} if "parent_hidden" in needs else None,
        )

    def _draft_scores(self, requests: list[RoundRequest], target_logits: Tensor, meta: Any) -> Tensor:
        """The draft's distributions under the request's own temperature, top-k and top-p, as the target's are."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        scores = self.rules.flat_draft_probs(requests, target_logits).log()
        if meta.all_greedy:
            return scores
        counts = torch.tensor([request.num_drafted for request in requests], device=scores.device)

        def spread(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.repeat_interleave(counts, output_size=len(scores))

        if not self.runner.drafter._enable_probabilistic_draft_probs:
            temperature = spread(meta.temperature)
            assert temperature is not None
            scores = scores / torch.where(temperature == 0, 1.0, temperature).unsqueeze(-1)
        return apply_top_k_top_p(scores, spread(meta.top_k), spread(meta.top_p))


def patch_sampler() -> None:
    """Put the dispatchers before vLLM's sampling functions, once a process; without a round they only pass on."""
    from vllm.v1.sample import rejection_sampler as module

    if hasattr(module.rejection_sample, "__wrapped__"):
        return
    for name, wrapper in (
        ("rejection_sample", _rejection_sample),
        ("apply_sampling_constraints", _apply_sampling_constraints),
        ("generate_uniform_probs", _generate_uniform_probs),
    ):
        original = getattr(module, name)
        setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))


def _apply_sampling_constraints(original: Callable[..., Tensor], logits: Tensor, *rest: Any) -> Tensor:
    """Note which drafted tokens nothing forbids, before top-k and top-p cut the rest off."""
    if _ROUND is not None:
        token_ids = _ROUND.state.spec_decode_metadata.draft_token_ids.long().clamp_min(0)
        _ROUND.possible = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) > -math.inf
    return original(logits, *rest)


def _generate_uniform_probs(original: Callable[..., Tensor], *args: Any) -> Tensor:
    """The draws the rule has seen already, or new ones."""
    if _ROUND is not None and _ROUND.uniforms is not None:
        return _ROUND.uniforms
    return original(*args)


def _rejection_sample(
    original: Callable[..., Tensor],
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: Any,
    *rest: Any,
    **more: Any,
) -> Tensor:
    def sample(token_ids: Tensor, probs: Tensor | None, logits: Tensor) -> Tensor:
        return original(
            token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            probs,
            logits,
            bonus_token_ids,
            sampling_metadata,
            *rest,
            **more,
        )

    current = _ROUND
    if current is None:
        return sample(draft_token_ids, draft_probs, target_logits)
    rules, hooks = current.hooks.rules, current.hooks
    requests = hooks.requests(num_draft_tokens)
    rows = rules.rows(requests)
    if not sampling_metadata.all_greedy and not all(row.strict for row in rows):
        current.uniforms = _unwrapped("generate_uniform_probs")(
            len(draft_token_ids), num_draft_tokens, sampling_metadata.generators, target_logits.device
        )
    made = rules.decide(rows, lambda: hooks.batch(current, requests, target_logits, draft_probs, sampling_metadata))
    if made is None:
        return sample(draft_token_ids, draft_probs, target_logits)
    token_ids, probs = draft_token_ids, draft_probs
    if rules.policy.rule.replaces:
        token_ids, probs = _refuse(made, rows, draft_token_ids, draft_probs, target_logits, sampling_metadata)
    with _raised(made, draft_token_ids, target_logits) as logits:
        output = sample(token_ids, probs, logits)
    rules.count(requests, rows, made, output)
    return output


def _unwrapped(name: str) -> Callable[..., Tensor]:
    from vllm.v1.sample import rejection_sampler

    function: Callable[..., Tensor] = inspect.unwrap(getattr(rejection_sampler, name))
    return function


@contextmanager
def _raised(made: Decisions, draft_token_ids: Tensor, target_logits: Tensor) -> Iterator[Tensor]:
    """Logits in which accepted tokens win for certain; put back afterwards, since logprobs are read from them."""
    logits = target_logits if made.scores is None else made.scores
    columns = draft_token_ids.long().clamp_min(0).unsqueeze(-1)
    before = logits.gather(-1, columns)
    highest = torch.finfo(logits.dtype).max
    logits.scatter_(-1, columns, torch.where(made.accept.unsqueeze(-1), highest, before))
    try:
        yield logits
    finally:
        logits.scatter_(-1, columns, before)


def _refuse(
    made: Decisions,
    rows: list[Row],
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    meta: Any,
) -> tuple[Tensor, Tensor | None]:
    """Proposals that vLLM must reject where the rule refused.

    When sampling, the draft's probabilities there become 0: the token is rejected and the target's own distribution
    sampled. When greedy, the token becomes one that is not the target's choice, which is then emitted.
    """
    vocab_size = target_logits.shape[-1]
    token_ids = draft_token_ids
    if not meta.all_random:
        other = ((target_logits.argmax(-1) + 1) % vocab_size).to(draft_token_ids.dtype)
        refused = made.refuse
        if not meta.all_greedy:
            greedy = [row.greedy for row in rows for _ in range(row.num_drafted)]
            refused = refused & spread(greedy, torch.bool, refused.device)
        token_ids = torch.where(refused, other, draft_token_ids)
    if meta.all_greedy:
        return token_ids, draft_probs
    if draft_probs is None:
        certain = draft_token_ids.long().clamp_min(0)
        draft_probs = torch.nn.functional.one_hot(certain, vocab_size).to(target_logits.dtype)
    return token_ids, draft_probs.masked_fill(made.refuse.unsqueeze(-1), 0.0).contiguous()


def _after(kind: type, name: str, then: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        then(self, *args, **kwargs)
        return made

    setattr(kind, name, wrapped)


def _before(kind: type, name: str, first: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, name, wrapped)


def _after_async(kind: type, name: str, then: Callable[..., Any]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    async def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = await original(self, *args, **kwargs)
        await then(self)
        return made

    setattr(kind, name, wrapped)
