"""The one loop: draft, verify, accept, commit.

Target-only decoding is the same loop with a drafter that proposes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from reprieve.drafters.base import Drafter
from reprieve.engine.text_stream import TextStream
from reprieve.errors import SpecError, UnsupportedModelError
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import Sampler, SamplingParams
from reprieve.rules import LosslessRule, RiskBudget, Rule, accept
from reprieve.rules.lossless import greedy_accepts, sampling_accepts
from reprieve.types import (
    Block,
    Evidence,
    Generation,
    Outcome,
    Provenance,
    RoundTimes,
    RoundTrace,
    Token,
    Verification,
)

OnToken = Callable[[Token, str], None]  # a committed token and the text it made certain

MAX_DRAFT_TOKENS = 512


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    eos_token_id: int | None

    def __len__(self) -> int: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


class Advisor(Protocol):
    """An extra forward a round, for rules that ask a model of their own (CoSpec's arbiter)."""

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Get ready for a prompt."""
        ...

    def advise(self, block: Block, verification: Verification) -> Tensor:
        """A number per drafted token, [N]; becomes `Evidence.advice`."""
        ...

    def commit(self, token_ids: list[int]) -> None:
        """Take the tokens the round committed."""
        ...


class NoDrafter:
    """Proposes nothing: every round is one plain target step."""

    name = "none"

    def __init__(self, device: torch.device) -> None:
        self._empty = Block.empty(device)

    def start(self, prompt_ids: Sequence[int], sampler: Sampler) -> None: ...

    def propose(self, max_depth: int) -> Block:
        return self._empty

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None: ...


@dataclass
class _Answer:
    """The state of one answer while it is being decoded."""

    prompt_ids: list[int]
    params: SamplingParams
    sampler: Sampler
    stream: TextStream
    budget: RiskBudget
    threshold: float | None
    eos_ids: frozenset[int]
    on_token: OnToken | None
    tokens: list[Token] = field(default_factory=list)
    trace: list[RoundTrace] | None = None
    num_rounds: int = 0
    num_drafted: int = 0
    finish_reason: str | None = None
    times: RoundTimes = field(default_factory=RoundTimes)

    @property
    def last_id(self) -> int:
        return self.tokens[-1].token_id if self.tokens else self.prompt_ids[-1]

    @property
    def num_left(self) -> int:
        return self.params.max_new_tokens - len(self.tokens)

    def context_ids(self, device: torch.device) -> Tensor:
        return torch.tensor([*self.prompt_ids, *(token.token_id for token in self.tokens)], device=device)

    def take(self, token: Token) -> bool:
        """Commit one token; False once the answer has ended."""
        self.tokens.append(token)
        ended = token.token_id in self.eos_ids
        text = ""
        if self.on_token is not None or self.params.stop:
            text = self.stream.push(token.token_id)
        if ended:
            self.finish_reason = "eos"
        elif self.stream.stopped:
            self.finish_reason = "stop"
        elif self.num_left == 0:
            self.finish_reason = "length"
        if self.finish_reason and self.on_token is not None:
            text += self.stream.finish()
        if self.on_token is not None:
            self.on_token(token, text)
        return self.finish_reason is None


class SpeculativeDecoder:
    """Decodes with a target, a drafter and a rule. Batch size 1; the caches are its own, the models may be shared.

    Args:
        target: the model whose tokens are wanted.
        drafter: what proposes; None decodes with the target alone.
        tokenizer: for text, stop texts and the end-of-text token.
        rule: which drafted tokens pass; None is lossless.
        num_draft_tokens: K, the deepest block a round may draft, 1 to 512.
        advisor: for a rule that needs advice.

    Raises:
        SpecError: K out of range, or a rule whose inputs nothing here provides.
        UnsupportedModelError: a rule that needs hidden states with a target that was not asked to return them.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        rule: Rule | None = None,
        num_draft_tokens: int = 16,
        advisor: Advisor | None = None,
    ) -> None:
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise SpecError(f"num_draft_tokens must be in [1, {MAX_DRAFT_TOKENS}], got {num_draft_tokens!r}")
        self.target = target
        self.drafter = drafter or NoDrafter(target.device)
        self.tokenizer = tokenizer
        self.rule = (rule or LosslessRule()).bind(tokenizer)
        self.num_draft_tokens = num_draft_tokens
        self.advisor = advisor
        if "node_hidden" in self.rule.needs and not target.hidden_layers:
            raise UnsupportedModelError(
                f"rule {self.rule.name} needs hidden states: load the target with hidden_layers"
            )
        if "advice" in self.rule.needs and advisor is None:
            raise SpecError(f"rule {self.rule.name} needs an advisor")
        if "draft_probs" in self.rule.needs and self.drafter.name == "ngram":
            raise SpecError(f"rule {self.rule.name} needs draft probabilities, which the ngram drafter does not have")

    @torch.inference_mode()
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        threshold: float | None = None,
        on_token: OnToken | None = None,
        trace: bool = False,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text, or token ids.
            threshold: this request's own threshold, in the unit of the rule's risk; None for the rule's.
            on_token: called with each committed token and the text it makes certain.
            trace: keep a `RoundTrace` of every round.

        Raises:
            ContextOverflowError: prompt and `max_new_tokens` exceed a model's positions.
            SpecError: an empty prompt.
        """
        started = time.perf_counter()
        answer = self._start(prompt, params or SamplingParams(), threshold, on_token, trace)
        while answer.finish_reason is None:
            self._round(answer)
        seconds = time.perf_counter() - started
        text = answer.stream.text
        if not (answer.on_token or answer.params.stop):
            text = self.tokenizer.decode([token.token_id for token in answer.tokens], skip_special_tokens=True)
        return Generation(
            prompt_ids=answer.prompt_ids,
            tokens=answer.tokens,
            text=text,
            finish_reason=answer.finish_reason,
            num_rounds=answer.num_rounds,
            num_drafted=answer.num_drafted,
            seconds=seconds,
            times=answer.times,
            trace=answer.trace,
        )

    def _start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        threshold: float | None,
        on_token: OnToken | None,
        trace: bool,
    ) -> _Answer:
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt_ids:
            raise SpecError("prompt must hold at least one token, got none")
        num_positions = len(prompt_ids) + params.max_new_tokens
        self.target.require_room(num_positions, what=f"{len(prompt_ids)} prompt + {params.max_new_tokens} new tokens")
        started = time.perf_counter()
        sampler = Sampler(params, self.target.device)
        self.target.start(prompt_ids[:-1])
        self.drafter.start(prompt_ids, sampler)
        if self.advisor is not None:
            self.advisor.start(prompt_ids)
        eos = _eos_ids(self.target, self.tokenizer)
        answer = _Answer(
            prompt_ids=prompt_ids,
            params=params,
            sampler=sampler,
            stream=TextStream(self.tokenizer, params.stop),
            budget=RiskBudget.of(self.rule),
            threshold=threshold,
            eos_ids=frozenset() if params.ignore_eos else eos,
            on_token=on_token,
            trace=[] if trace else None,
        )
        answer.times.prefill_s = time.perf_counter() - started
        return answer

    def _round(self, answer: _Answer) -> None:
        """Draft, verify, accept, commit."""
        clock = [time.perf_counter()]
        # The target's own token ends every round, so the last one of the budget needs no draft.
        block = self.drafter.propose(min(self.num_draft_tokens, answer.num_left - 1))
        clock.append(time.perf_counter())
        base = self.target.length
        logits, hidden = self.target.forward([answer.last_id, *block.token_ids.tolist()], block)
        verification = Verification(logits, hidden)
        clock.append(time.perf_counter())
        evidence, next_scores = self._evidence(answer, block, verification)
        outcome = self._accept(answer, block, evidence, next_scores)
        clock.append(time.perf_counter())
        self._commit(answer, block, verification, outcome, evidence, base)
        clock.append(time.perf_counter())
        for name, start, end in zip(("draft_s", "verify_s", "rule_s", "commit_s"), clock, clock[1:], strict=False):
            setattr(answer.times, name, getattr(answer.times, name) + end - start)

    def _evidence(self, answer: _Answer, block: Block, verification: Verification) -> tuple[Evidence, Tensor]:
        """What the rule may see, and the scores [N + 1, V] that fallback and bonus tokens come from."""
        sampler = answer.sampler
        scores = sampler.target_scores(verification.logits)
        judged = verification.parent_rows(block)
        draft_scores = None
        if block.draft_logits is not None and (not sampler.greedy or "draft_probs" in self.rule.needs):
            draft_scores = sampler.draft_scores(block.draft_logits[:, : judged.shape[-1]])
        uniforms = None
        target_scores = None
        if sampler.greedy:
            lossless = greedy_accepts(judged, block.token_ids)
        else:
            target_scores = Verification(scores).parent_rows(block)
            uniforms = sampler.uniforms(block.num_tokens)
            proposal = None if block.deterministic or draft_scores is None else draft_scores.softmax(-1)
            lossless = sampling_accepts(target_scores.softmax(-1), proposal, block.token_ids, uniforms)
        needs = self.rule.needs
        evidence = Evidence(
            token_ids=block.token_ids,
            target_logits=judged,
            greedy=sampler.greedy,
            lossless_accepts=lossless,
            target_scores=target_scores,
            draft_scores=draft_scores,
            uniforms=uniforms,
            noise=sampler.uniforms(block.num_tokens) if "noise" in needs else None,
            node_logits=verification.node_logits,
            node_hidden=verification.node_hidden,
            draft_hidden=block.draft_hidden,
            advice=self.advisor.advise(block, verification) if self.advisor is not None else None,
            parents=block.parents,
            context_ids=answer.context_ids(block.token_ids.device) if "context_ids" in needs else None,
        )
        return evidence, scores

    def _accept(self, answer: _Answer, block: Block, evidence: Evidence, next_scores: Tensor) -> Outcome:
        sampler = answer.sampler
        probs = next_scores if sampler.greedy else next_scores.softmax(-1)
        sample = _argmax if sampler.greedy else sampler.draw
        return accept(
            self.rule, block, evidence, probs, sample=sample, budget=answer.budget, threshold=answer.threshold
        )

    def _commit(
        self,
        answer: _Answer,
        block: Block,
        verification: Verification,
        outcome: Outcome,
        evidence: Evidence,
        base: int,
    ) -> None:
        """Keep the accepted path everywhere, then hand its tokens to the answer, which may end among them."""
        self.target.keep_path(base, [0, *(node + 1 for node in outcome.path)])
        self.drafter.commit(block, outcome, verification)
        committed = [
            Token(int(block.token_ids[node]), provenance, None if outcome.risks is None else outcome.risks[place])
            for place, (node, provenance) in enumerate(zip(outcome.path, outcome.provenance, strict=True))
        ]
        committed.append(Token(outcome.next_token_id, Provenance.TARGET))
        if self.advisor is not None:
            self.advisor.commit([token.token_id for token in committed])
        answer.num_rounds += 1
        answer.num_drafted += block.num_tokens
        first = len(answer.tokens)
        for token in committed:
            if not answer.take(token):
                break
        if answer.trace is not None:
            answer.trace.append(self._trace(block, outcome, evidence, answer.tokens[first:]))

    def _trace(self, block: Block, outcome: Outcome, evidence: Evidence, committed: list[Token]) -> RoundTrace:
        has_risk = block.num_tokens and not isinstance(self.rule, LosslessRule)
        return RoundTrace(
            drafted_ids=block.token_ids.tolist(),
            parents=list(block.parents),
            target_ids=evidence.target_logits.argmax(-1).tolist(),
            risks=self.rule.risk(evidence).tolist() if has_risk else None,
            lossless_accepts=evidence.lossless_accepts.tolist(),
            path=outcome.path,
            committed=committed,
        )


def _argmax(scores: Tensor) -> int:
    return int(scores.argmax())


def _eos_ids(target: CachedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-text tokens: what the model's generation configuration says, and the tokenizer's."""
    configured = getattr(target.model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = []
    ids = set(configured if isinstance(configured, list) else [configured])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
