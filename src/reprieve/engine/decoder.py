"""Decoding loop: draft, verify, accept, commit.

Target-only decoding uses the same loop with a drafter that proposes nothing.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from reprieve.drafters import Drafter, NoDrafter
from reprieve.drafters.length import DraftLength, FixedLength
from reprieve.engine.text import Answer, OnToken, chat_prompt, token_ids_of, with_logprobs
from reprieve.errors import SpecError, UnsupportedModelError
from reprieve.heads.loading import attach_heads
from reprieve.models.arbiter import ArbiterAdvisor
from reprieve.models.cached_model import CachedModel, eos_token_ids, require_positions
from reprieve.models.sampling import Sampler
from reprieve.rules import LosslessRule, RiskBudget, Rule, accept
from reprieve.rules.base import bounded_risk
from reprieve.rules.lossless import BlockCheck, Checked, LosslessCheck, MatchCheck, SampledCheck
from reprieve.settings import SamplingParams
from reprieve.transfers import device_tensor
from reprieve.types import (
    PARTS,
    Block,
    Context,
    Evidence,
    Generation,
    Need,
    Outcome,
    Prefill,
    Provenance,
    RoundTrace,
    Token,
    Tokenizer,
    Verification,
    gather_token,
    select_rows,
)


class _Answer(Answer):
    """Answer in progress, with what its rounds need."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompt_ids: list[int],
        params: SamplingParams,
        on_token: OnToken | None,
        *,
        dial: float | None,
        trace: bool,
        timed: bool,
    ) -> None:
        target, tokenizer = decoder.target, decoder.tokenizer
        super().__init__(tokenizer, prompt_ids, params, eos_token_ids(target.model, tokenizer), on_token)
        self.sampler = Sampler(params, target.device)
        self.rule = decoder.rule if dial is None else decoder.rule.with_dial(dial)
        self.budget = RiskBudget.of(self.rule)
        self.draft_length = decoder.draft_length.start(self.rule.dial_value, params.temperature)
        self.device = target.device
        self.seconds_by_part = dict.fromkeys(PARTS, 0.0) if timed else {}  # off by default: timing synchronises a GPU
        self.trace: list[RoundTrace] | None = [] if trace else None
        self.unread = prompt_ids  # prompt or committed tokens that the target has not read

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the enclosed code, if the answer is timed. Parts can repeat but not nest."""
        if not self.seconds_by_part:
            yield
            return
        started = self._now()
        yield
        self.seconds_by_part[name] += self._now() - started

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def positions(self, block: Block) -> Tensor:
        """Return the positions of a block's tokens in the answer, from 0: [N], int64."""
        first = len(self.tokens) - 1
        return device_tensor([first + depth for depth in block.depths], torch.long, block.token_ids.device)

    def context(self, device: torch.device) -> Context:
        """Return the prompt and committed tokens as one text."""
        token_ids = device_tensor([*self.prompt_ids, *(token.token_id for token in self.tokens)], torch.long, device)
        return Context(token_ids.unsqueeze(0), device_tensor([len(token_ids)], torch.long, device))


class SpeculativeDecoder:
    """Decoder for a target, a drafter and a rule. Batch size 1; it owns its caches and may share the models.

    One answer at a time: give each thread a decoder of its own.

    Args:
        target: the model whose output is wanted.
        drafter: proposes blocks; None decodes with the target alone.
        tokenizer: for text, stop texts and the end-of-text token.
        rule: decides which drafted tokens pass; None is lossless.
        num_draft_tokens: K, the deepest block of a round, 1 to 512, or a policy for it.
        advisor: for a rule that needs advice.
        num_token_ids: exclusive upper bound of prompt ids; None for the target's vocabulary size.

    Raises:
        SpecError: K out of range, or a rule whose inputs this decoder cannot provide.
        UnsupportedModelError: a rule that needs hidden states with a target that does not return them.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        tokenizer: Tokenizer,
        *,
        rule: Rule | None = None,
        num_draft_tokens: int | DraftLength = 16,
        advisor: ArbiterAdvisor | None = None,
        num_token_ids: int | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter or NoDrafter(target.device)
        self.tokenizer = tokenizer
        self.rule = attach_heads(rule or LosslessRule()).bind(tokenizer).to(target.device)
        given = num_draft_tokens
        self.draft_length = given if isinstance(given, DraftLength) else FixedLength(given)
        self.advisor = advisor
        self._num_token_ids = num_token_ids or int(target.model.config.get_text_config().vocab_size)
        self._require_inputs()
        self._in_use = threading.Lock()

    def __repr__(self) -> str:
        name = self.target.model.config.name_or_path
        k = f"{'' if isinstance(self.draft_length, FixedLength) else 'up to '}{self.draft_length.most}"
        return f"SpeculativeDecoder({self.rule.spec!r}, target={name!r}, drafter={self.drafter.name!r}, K = {k})"

    def _require_inputs(self) -> None:
        name, traits = self.rule.name, self.rule.traits
        drafter = f"the {self.drafter.name} drafter"
        for who, layers in ((f"rule {name}", traits.target_layers), (drafter, self.drafter.target_layers)):
            if missing := set(layers) - set(self.target.hidden_layers):
                raise UnsupportedModelError(
                    f"{who} needs the target's hidden states of layer {min(missing)}: give it hidden_layers={layers}"
                )
        if Need.ADVICE in traits.needs and self.advisor is None:
            raise SpecError(f"rule {name} needs an advisor")
        if (traits.check == "block" or Need.ADVICE in traits.needs) and self.drafter.drafts_trees:
            raise SpecError(f"rule {self.rule.spec} needs chains, and the {self.drafter.name} drafter draws trees")
        for need, words in ((Need.DRAFT_PROBS, "draft probabilities"), (Need.DRAFT_HIDDEN, "draft hidden states")):
            if need in traits.needs and need not in self.drafter.provides:
                raise SpecError(f"rule {name} needs {words}, which the {self.drafter.name} drafter does not have")

    def share_prefix(self, token_ids: Sequence[int]) -> None:
        """Set a prefix that most prompts share, such as few-shot examples; it is read once for all answers.

        Drafters that need the target's hidden states of the prompt still read it whole.
        """
        self.target.share_prefix(token_ids)
        self.drafter.share_prefix(token_ids)

    @torch.inference_mode()
    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        dial: float | None = None,
        on_token: OnToken | None = None,
        trace: bool = False,
        timed: bool = False,
        **sampling: Any,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: text, or token ids.
            messages: a chat instead of a prompt: `[{"role": "user", "content": "..."}]`, rendered with the tokenizer's
                chat template.
            dial: value of the rule's dial for this request, in the paper's unit; None for the rule's own.
            on_token: called with each committed token and the text that became final with it.
            trace: keep a `RoundTrace` of every round.
            timed: record `seconds_by_part`; on a GPU, this synchronises before and after every part.
            sampling: fields of `SamplingParams`, such as max_new_tokens or temperature, which override `params`.

        Raises:
            ContextOverflowError: prompt and `max_new_tokens` exceed a model's positions.
            SpecError: an empty prompt, a chat that the tokenizer has no template for, a dial out of range, or a decoder
                that is generating an answer already.
            TypeError: `sampling` names no field of `SamplingParams`.
        """
        started = time.perf_counter()
        if not isinstance(params, SamplingParams | None):
            raise SpecError(f"params must be SamplingParams, got {params!r}")
        params = dataclasses.replace(params or SamplingParams(), **sampling)
        if (prompt is None) == (messages is None):
            raise SpecError("generate takes either a prompt or messages=")
        if prompt is None:
            assert messages is not None
            prompt = chat_prompt(self.tokenizer, messages)
        prompt_ids = token_ids_of(self.tokenizer, prompt, self._num_token_ids)
        answer = _Answer(self, prompt_ids, params, on_token, dial=dial, trace=trace, timed=timed)
        if not self._in_use.acquire(blocking=False):
            raise SpecError("this decoder is generating an answer already: give each thread a decoder of its own")
        try:
            self._start(answer)
            while answer.finish_reason is None:
                self._round(answer)
        finally:
            self._in_use.release()
        seconds = time.perf_counter() - started
        return answer.generation(seconds, seconds_by_part=answer.seconds_by_part, trace=answer.trace)

    def _start(self, answer: _Answer) -> None:
        """Reset the caches; read the prompt if the drafter needs the target's states of it."""
        prompt_ids, num_new = answer.prompt_ids, answer.params.max_new_tokens
        num_positions = len(prompt_ids) + num_new
        what = f"{len(prompt_ids)} prompt + {num_new} new tokens"
        require_positions(self.target.model, num_positions, what=what)
        with answer.part("prefill"):
            if self.drafter.target_layers:
                prefill, answer.unread = self.target.start(prompt_ids[:-1]), prompt_ids[-1:]
            else:  # the first verification reads the prompt too, which saves a forward
                prefill, answer.unread = Prefill(), self.target.restart(prompt_ids)
            self.drafter.start(prompt_ids, answer.sampler, prefill)
            if self.advisor is not None:
                self.advisor.start(prompt_ids, max_length=num_positions, num_draft_tokens=self.draft_length.most)

    def _round(self, answer: _Answer) -> None:
        """Draft, verify, accept, commit."""
        rule = answer.rule
        with answer.part("draft"):
            # Every round ends with a token of the target, so at most one fewer than the remaining budget is drafted.
            block = self.drafter.propose(min(answer.draft_length.begin(), answer.num_left - 1), answer.draft_length)
        if len(answer.unread) > 1 and not block.is_chain:  # with a tree, only one token can be unread
            with answer.part("prefill"):
                self.target.forward(answer.unread[:-1], num_rows=1)
            answer.unread = answer.unread[-1:]
        base = self.target.length + len(answer.unread) - 1  # position of the last committed token
        with answer.part("verify" if len(answer.unread) == 1 else "prefill"):
            unread = device_tensor(answer.unread, torch.long, self.target.device)
            read = self.target.forward(torch.cat([unread, block.token_ids]), block, num_rows=block.num_tokens + 1)
            verification = Verification(*read)
        with answer.part("rule"):
            check, evidence = self._evidence(answer, block, verification)
        if self.advisor is not None and block.num_tokens:
            with answer.part("advise"):
                advice = self.advisor.advise(block, evidence, rule.passes_without_advice(evidence))
                evidence = dataclasses.replace(evidence, advice=advice)
        with answer.part("rule"):
            relaxed = rule.relaxed_target_probs(evidence) if block.num_tokens else None
            checked = check.resolve(block, relaxed_probs=relaxed, residual=not rule.traits.replaces)
            outcome = accept(rule, block, evidence, checked, budget=answer.budget)
        with answer.part("commit"):
            self._commit(answer, block, verification, outcome, base)
        if answer.trace is not None:
            answer.trace.append(_trace(answer, block, outcome, evidence, checked))

    def _evidence(self, answer: _Answer, block: Block, verification: Verification) -> tuple[LosslessCheck, Evidence]:
        """Run the lossless check and collect the rule's inputs."""
        sampler, needs = answer.sampler, answer.rule.traits.needs
        scores = sampler.target_scores(verification.logits)
        judged = scores[block.parent_rows]
        draft_scores = uniforms = proposal_probs = None
        sampled = not (sampler.greedy or block.deterministic)
        if block.draft_logits is not None and (sampled or Need.DRAFT_PROBS in needs):
            draft_scores = sampler.draft_scores(block.draft_logits)
        check: LosslessCheck
        if sampler.greedy or answer.rule.traits.check == "exact":
            draw = None if sampler.greedy else sampler.draw
            check = MatchCheck(scores, block.token_ids, block.parent_rows, draw)
        else:
            uniforms = sampler.uniforms(block.num_tokens)
            draft_probs = None if block.deterministic or draft_scores is None else draft_scores.softmax(-1)
            proposal_probs = None if draft_probs is None else gather_token(draft_probs, block.token_ids)
            kind = BlockCheck if answer.rule.traits.check == "block" else SampledCheck
            check = kind(
                scores,
                block.token_ids,
                block.parent_rows,
                uniforms=uniforms,
                proposal_probs=proposal_probs,
                draft_probs=draft_probs,
                draw=sampler.draw,
            )
        reads_embeddings = Need.EMBEDDINGS in needs
        evidence = Evidence(
            token_ids=block.token_ids,
            target_logits=verification.logits[block.parent_rows],
            greedy=sampler.greedy,
            lossless_accepts=check.accepts,
            target_scores=None if sampler.greedy else judged,
            target_ids=check.own_ids,
            draft_scores=draft_scores,
            draft_logits=block.draft_logits if Need.DRAFT_PROBS in needs else None,
            proposal_probs=proposal_probs,
            uniforms=uniforms,
            noise=sampler.uniforms(block.num_tokens) if Need.NOISE in needs else None,
            node_hidden=select_rows(verification.hidden, slice(1, None)),
            parent_hidden=select_rows(verification.hidden, block.parent_rows),
            draft_hidden=block.draft_hidden,
            token_embeddings=self.target.embed(block.token_ids) if reads_embeddings else None,
            top_embeddings=self.target.embed(judged.argmax(-1)) if reads_embeddings else None,
            parents=block.parents,
            context=answer.context(block.token_ids.device) if Need.CONTEXT in needs else None,
            answer_positions=answer.positions(block) if Need.ANSWER_POSITIONS in needs else None,
            num_draft_tokens=self.draft_length.most if isinstance(self.draft_length, FixedLength) else None,
        )
        return check, evidence

    def _commit(self, answer: _Answer, block: Block, verification: Verification, outcome: Outcome, base: int) -> None:
        """Keep the accepted path in all caches, then add its tokens to the answer, which may end before the last."""
        self.target.keep_path(base, [0, *(node + 1 for node in outcome.path)])
        self.target.record_ids(base - len(answer.unread) + 1, [*answer.unread, *outcome.token_ids])
        answer.unread = [outcome.next_token_id]
        self.drafter.commit(block, outcome, verification)
        answer.draft_length.update(block.num_tokens, len(outcome.path))
        committed = [
            Token(token_id, provenance, None if outcome.risks is None else outcome.risks[index])
            for index, (token_id, provenance) in enumerate(zip(outcome.token_ids, outcome.provenance, strict=True))
        ]
        committed.append(Token(outcome.next_token_id, Provenance.TARGET))
        if answer.params.num_logprobs is not None:
            # The logits that verified each committed token.
            rows = verification.logits[[0, *(node + 1 for node in outcome.path)]]
            committed = with_logprobs(committed, rows, answer.params.num_logprobs)
        if self.advisor is not None:
            self.advisor.commit(outcome.committed_ids)
        answer.take_round(committed, block.num_tokens, block.num_pruned)


def _trace(answer: _Answer, block: Block, outcome: Outcome, evidence: Evidence, checked: Checked) -> RoundTrace:
    has_risk = block.num_tokens and not isinstance(answer.rule, LosslessRule)
    has_bonus = block.is_chain and (answer.sampler.greedy or answer.rule.traits.check == "exact")
    return RoundTrace(
        drafted_ids=block.token_ids.tolist(),
        parents=list(block.parents),
        target_ids=evidence.own_ids.tolist(),
        target_log_probs=gather_token(evidence.target_logits.log_softmax(-1), block.token_ids).tolist(),
        risks=bounded_risk(answer.rule, evidence).tolist() if has_risk else None,
        advice=None if evidence.advice is None else evidence.advice.tolist(),
        bonus_id=int(checked.next_ids[-1]) if has_bonus else None,
        lossless_accepts=evidence.lossless_accepts.tolist(),
        path=outcome.path,
        committed=answer.tokens[-answer.round_lengths[-1] :],
    )
