"""The one loop: draft, verify, accept, commit.

Target-only decoding is the same loop with a drafter that proposes nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from reprieve.drafters import Drafter, NoDrafter
from reprieve.engine.answer import Answer, OnToken, with_logprobs
from reprieve.engine.text_stream import TextStream
from reprieve.errors import SpecError, UnsupportedModelError
from reprieve.heads.loading import attach_heads
from reprieve.models.cached_model import CachedModel, eos_token_ids
from reprieve.models.sampling import Sampler, SamplingParams
from reprieve.rules import LosslessRule, RiskBudget, Rule, accept
from reprieve.rules.accept import NextToken
from reprieve.rules.base import bounded_risk
from reprieve.rules.lossless import greedy_accepts, sampling_accepts
from reprieve.types import (
    Block,
    Evidence,
    Generation,
    Outcome,
    Provenance,
    RoundTrace,
    Token,
    Verification,
    gather_token,
)

MAX_DRAFT_TOKENS = 512


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    eos_token_id: int | None

    def __len__(self) -> int: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


class Advisor(Protocol):
    """An extra forward a round, for rules that ask a model of their own (CoSpec's arbiter)."""

    def start(self, prompt_ids: Sequence[int], *, max_length: int, num_draft_tokens: int) -> None:
        """Get ready for a prompt, whose text may grow to `max_length` tokens in rounds of K."""
        ...

    def advise(self, block: Block, target_ids: Tensor, settled: Tensor) -> Tensor:
        """A number per drafted token, [N]; becomes `Evidence.advice`.

        Args:
            target_ids: the target's own token in each one's place, [N].
            settled: tokens that pass whatever is advised, matches among them, [N], bool.
        """
        ...

    def commit(self, token_ids: list[int]) -> None:
        """Take the tokens the round committed."""
        ...


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
        self.rule = attach_heads(rule or LosslessRule()).bind(tokenizer).to(target.device)
        self.num_draft_tokens = num_draft_tokens
        self.advisor = advisor
        self._require_inputs()

    def _require_inputs(self) -> None:
        name, needs = self.rule.name, self.rule.needs
        if missing := set(self.rule.target_layers) - set(self.target.hidden_layers):
            raise UnsupportedModelError(
                f"rule {name} needs the target's hidden states of layer {min(missing)}: give it hidden_layers="
                f"{self.rule.target_layers}"
            )
        if missing := set(self.drafter.target_layers) - set(self.target.hidden_layers):
            raise UnsupportedModelError(
                f"the {self.drafter.name} drafter needs the target's hidden states of layer {min(missing)}: give it "
                f"hidden_layers={self.drafter.target_layers}"
            )
        if "advice" in needs and self.advisor is None:
            raise SpecError(f"rule {name} needs an advisor")
        if (self.rule.base == "block" or "advice" in needs) and self.drafter.drafts_trees:
            raise SpecError(f"rule {self.rule.spec} needs chains, and the {self.drafter.name} drafter draws trees")
        for field, words in (("draft_probs", "draft probabilities"), ("draft_hidden", "draft hidden states")):
            if field in needs and field not in self.drafter.provides:
                raise SpecError(f"rule {name} needs {words}, which the {self.drafter.name} drafter does not have")

    @torch.inference_mode()
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        dial: float | None = None,
        on_token: OnToken | None = None,
        trace: bool = False,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text, or token ids.
            dial: this request's own value of the rule's dial, in the paper's unit; None for the rule's.
            on_token: called with each committed token and the text it makes certain.
            trace: keep a `RoundTrace` of every round.

        Raises:
            ContextOverflowError: prompt and `max_new_tokens` exceed a model's positions.
            SpecError: an empty prompt, or a dial out of range.
        """
        started = time.perf_counter()
        answer = self._start(prompt, params or SamplingParams(), dial, on_token, trace)
        while answer.finish_reason is None:
            self._round(answer)
        seconds = time.perf_counter() - started
        text = answer.stream.text
        if not answer.streams:
            text = self.tokenizer.decode([token.token_id for token in answer.tokens], skip_special_tokens=True)
        return Generation(
            prompt_ids=answer.prompt_ids,
            tokens=answer.tokens,
            text=text,
            finish_reason=answer.finish_reason,
            num_rounds=len(answer.round_lengths),
            num_drafted=answer.num_drafted,
            num_pruned=answer.num_pruned,
            seconds=seconds,
            times=answer.times,
            round_lengths=answer.round_lengths,
            trace=answer.trace,
        )

    def _start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        dial: float | None,
        on_token: OnToken | None,
        trace: bool,
    ) -> Answer:
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt_ids:
            raise SpecError("prompt must hold at least one token, got none")
        num_positions = len(prompt_ids) + params.max_new_tokens
        self.target.require_room(num_positions, what=f"{len(prompt_ids)} prompt + {params.max_new_tokens} new tokens")
        rule = self.rule if dial is None else self.rule.with_dial(dial)
        started = self._clock()
        sampler = Sampler(params, self.target.device)
        prefill = self.target.start(prompt_ids[:-1])
        self.drafter.start(prompt_ids, sampler, prefill)
        if self.advisor is not None:
            self.advisor.start(prompt_ids, max_length=num_positions, num_draft_tokens=self.num_draft_tokens)
        eos = eos_token_ids(self.target.model, self.tokenizer) if params.eos_token_ids is None else params.eos_token_ids
        answer = Answer(
            prompt_ids=prompt_ids,
            params=params,
            sampler=sampler,
            stream=TextStream(self.tokenizer, params.stop),
            rule=rule,
            budget=RiskBudget.of(rule),
            eos_ids=frozenset() if params.ignore_eos else frozenset(eos),
            on_token=on_token,
            trace=[] if trace else None,
        )
        answer.times.prefill_s = self._clock() - started
        return answer

    def _round(self, answer: Answer) -> None:
        """Draft, verify, accept, commit."""
        clock = [self._clock()]
        # The target's own token ends every round, so the last one of the budget needs no draft.
        block = self.drafter.propose(min(self.num_draft_tokens, answer.num_left - 1))
        clock.append(self._clock())
        base = self.target.length
        logits, hidden = self.target.forward([answer.last_id, *block.token_ids.tolist()], block)
        verification = Verification(logits, hidden)
        clock.append(self._clock())
        evidence, next_token = self._evidence(answer, block, verification)
        clock.append(self._clock())
        if self.advisor is not None and block.num_tokens:
            advice = self.advisor.advise(block, evidence.own_ids, answer.rule.settled(evidence))
            evidence = dataclasses.replace(evidence, advice=advice)
        clock.append(self._clock())
        outcome = accept(answer.rule, block, evidence, next_token=next_token, budget=answer.budget)
        clock.append(self._clock())
        self._commit(answer, block, verification, outcome, base)
        if answer.trace is not None:
            has_bonus = block.is_chain and (answer.sampler.greedy or answer.rule.base == "exact")
            bonus_id = next_token(block.num_tokens, None) if has_bonus else None
            committed = answer.tokens[-answer.round_lengths[-1] :]
            answer.trace.append(_trace(answer, block, outcome, evidence, committed, bonus_id))
        clock.append(self._clock())
        parts = ("draft_s", "verify_s", "rule_s", "advise_s", "rule_s", "commit_s")
        for part, start, end in zip(parts, clock, clock[1:], strict=False):
            setattr(answer.times, part, getattr(answer.times, part) + end - start)

    def _clock(self) -> float:
        """Seconds, after the device has finished what it was given."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _evidence(self, answer: Answer, block: Block, verification: Verification) -> tuple[Evidence, NextToken]:
        """What the rule may see, and where fallback and bonus tokens come from."""
        sampler, needs = answer.sampler, answer.rule.needs
        scores = sampler.target_scores(verification.logits)
        judged = Verification(scores).parent_rows(block)
        draft_scores = None
        if block.draft_logits is not None and (not sampler.greedy or "draft_probs" in needs):
            draft_scores = sampler.draft_scores(block.draft_logits)
        uniforms = proposal_probs = target_ids = None
        next_token: NextToken
        if sampler.greedy:
            lossless = greedy_accepts(judged, block.token_ids)
            next_token = lambda row, residual: int(scores[row].argmax())  # noqa: E731
        elif answer.rule.base == "exact":
            drawn = sampler.draws(scores.softmax(-1))
            target_ids = Verification(drawn).parent_rows(block)
            lossless = target_ids == block.token_ids
            next_token = lambda row, residual: int(drawn[row])  # noqa: E731
        else:
            uniforms = sampler.uniforms(block.num_tokens)
            proposal = None if block.deterministic or draft_scores is None else draft_scores.softmax(-1)
            proposal_probs = None if proposal is None else gather_token(proposal, block.token_ids)
            lossless = sampling_accepts(judged.softmax(-1), proposal, block.token_ids, uniforms)
            next_token = lambda row, residual: sampler.draw(  # noqa: E731
                scores[row].softmax(-1) if residual is None else residual
            )
        reads_embeddings = "embeddings" in needs
        evidence = Evidence(
            token_ids=block.token_ids,
            target_logits=verification.parent_rows(block),
            greedy=sampler.greedy,
            lossless_accepts=lossless,
            target_scores=None if sampler.greedy else judged,
            target_ids=target_ids,
            draft_scores=draft_scores,
            proposal_probs=proposal_probs,
            uniforms=uniforms,
            noise=sampler.uniforms(block.num_tokens) if "noise" in needs else None,
            node_logits=verification.node_logits,
            node_hidden=verification.node_hidden,
            parent_hidden=verification.parent_hidden(block),
            draft_hidden=block.draft_hidden,
            token_embeddings=self.target.embed(block.token_ids) if reads_embeddings else None,
            top_embeddings=self.target.embed(judged.argmax(-1)) if reads_embeddings else None,
            parents=block.parents,
            context_ids=answer.context_ids(block.token_ids.device) if "context_ids" in needs else None,
        )
        return evidence, next_token

    def _commit(
        self,
        answer: Answer,
        block: Block,
        verification: Verification,
        outcome: Outcome,
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
        if answer.params.num_logprobs is not None:
            rows = verification.logits[[0, *(node + 1 for node in outcome.path)]]  # that judged each committed token
            committed = with_logprobs(committed, rows, answer.params.num_logprobs)
        if self.advisor is not None:
            self.advisor.commit([token.token_id for token in committed])
        answer.num_drafted += block.num_tokens
        answer.num_pruned += block.num_pruned
        first = len(answer.tokens)
        for token in committed:
            if not answer.take(token):
                break
        answer.round_lengths.append(len(answer.tokens) - first)


def _trace(
    answer: Answer, block: Block, outcome: Outcome, evidence: Evidence, committed: list[Token], bonus_id: int | None
) -> RoundTrace:
    has_risk = block.num_tokens and not isinstance(answer.rule, LosslessRule)
    return RoundTrace(
        drafted_ids=block.token_ids.tolist(),
        parents=list(block.parents),
        target_ids=evidence.own_ids.tolist(),
        target_log_probs=gather_token(evidence.target_logits.log_softmax(-1), block.token_ids).tolist(),
        risks=bounded_risk(answer.rule, evidence).tolist() if has_risk else None,
        advice=None if evidence.advice is None else evidence.advice.tolist(),
        bonus_id=bonus_id,
        lossless_accepts=evidence.lossless_accepts.tolist(),
        path=outcome.path,
        committed=committed,
    )
