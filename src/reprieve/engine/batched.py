"""Decoding loop for many answers at once: each forward drafts or verifies tokens of all of them.

The rounds are those of `SpeculativeDecoder`; the rules decide for the whole batch, as they do in vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reprieve.engine.batches import TextBatch, TextRow
from reprieve.engine.pair import Pair
from reprieve.engine.row_drafters import (
    ACCEPT,
    FREE_ROW,
    NOISE,
    TARGET,
    DraftModelRows,
    EagleRows,
    RowBlock,
    RowDrafter,
    RowInput,
)
from reprieve.engine.text import Answer, token_ids_of
from reprieve.errors import SpecError, require_whole
from reprieve.models.cached_model import eos_token_ids, require_positions, same_vocabulary
from reprieve.models.eagle3 import EagleHead
from reprieve.models.row_model import RowModel, Unread, refuse_varying_positions
from reprieve.models.sampling import Sampler, draw_at, keyed_uniforms
from reprieve.rules import LosslessRule, RiskBudget, Rule
from reprieve.rules.batch import Batch, BatchRequest, decide
from reprieve.rules.lossless import residual_probs
from reprieve.settings import SamplingParams
from reprieve.transfers import device_tensor, to_device, to_host
from reprieve.types import Context, Generation, HiddenStates, Need, Provenance, Token, gather_token

_SHARE_FREE = 8  # prompts wait until one row in this many is free, and are then read together


def refusal(rule: Rule, *, eagle: bool = False) -> str:
    """Return the reason why a rule cannot decide for a batch; empty if it can.

    Args:
        eagle: an EAGLE-3 head drafts.
    """
    if rule.traits.check != "token":
        return f"engine batched verifies token by token; {rule.spec} needs {rule.traits.check} verification"
    if eagle and Need.DRAFT_HIDDEN in rule.traits.needs:
        return f"rule {rule.spec} needs draft hidden states, which the eagle3 drafter does not have"
    return ""


@dataclass(frozen=True)
class VerifiedRound:
    """One round of an answer.

    Args:
        draft_ids: drafted tokens that count, K or fewer.
        target_ids: the target's most likely token at the position of each.
        tokens: accepted tokens and the target's own; they can continue past the end of the answer.
    """

    draft_ids: list[int]
    target_ids: list[int]
    tokens: list[Token]


@dataclass(eq=False)
class Request:
    """One answer to generate.

    Args:
        prompt_ids: 1 or more tokens.
        rule: with its heads, bound to the tokenizer, on the pair's device.
        on_done: called with the finished answer.
        on_round: called with each round before it is committed; returns False to drop the answer, without `on_done`.
        seed: of its draws, which do not depend on the other answers in the batch.
    """

    prompt_ids: list[int]
    rule: Rule
    max_new_tokens: int
    on_done: Callable[[Generation], None]
    on_round: Callable[[VerifiedRound], bool] | None = None
    seed: int = 0


@dataclass(eq=False)
class _AnswerText(TextRow[Request]):
    answer: Answer
    budget: RiskBudget
    num_new: int = 1  # last tokens that the drafter has not read
    started: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class _Round:
    """A verified block. B answers are in progress, in the rows `rows` of R."""

    rows: list[int]  # [B]
    texts: list[_AnswerText]  # [B]
    sizes: list[int]  # [B], drafted tokens that count; fewer than K at the end of an answer
    block: RowBlock
    lengths: Tensor  # [R], tokens of the texts before the drafted ones
    logits: Tensor  # [R * (K + 1), V], the target's after each token
    scores: Tensor  # [R * (K + 1), V], what its tokens are drawn from
    hidden: HiddenStates  # [R * (K + 1), D] a layer, the target's


class BatchedSpeculativeDecoder(TextBatch[Request, _AnswerText]):
    """Answers up to `num_rows` prompts at once.

    Args:
        pair: the models; the target alone answers if `num_draft_tokens` is 0.
        num_rows: answers in one forward, 1 or more.
        num_draft_tokens: K, 0 to 512.
        params: of every answer; its seed is not used.
        rules: all rules that requests name.
        eagle: EAGLE-3 head that drafts chains; None drafts with the pair's draft model.
        draft_alone: the draft generates the answers alone.

    Raises:
        SpecError: a number out of range, a rule that cannot decide for a batch, or a pair without the needed draft.
        UnsupportedModelError: a model with recurrent state, with ALiBi biases that need a padding mask, or with
            positions that depend on the whole batch.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        num_rows: int,
        num_draft_tokens: int,
        params: SamplingParams,
        rules: Sequence[Rule] = (),
        eagle: EagleHead | None = None,
        draft_alone: bool = False,
    ) -> None:
        super().__init__(num_rows)
        require_whole("num_draft_tokens", num_draft_tokens, 0, 512)
        for rule in rules:
            if reason := refusal(rule, eagle=eagle is not None):
                raise SpecError(reason)
        if pair.draft is None and ((num_draft_tokens and eagle is None) or draft_alone):
            raise SpecError("the pair has no draft: num_draft_tokens must be 0")
        self.tokenizer = pair.tokenizer
        self.num_draft_tokens = num_draft_tokens
        self.sampler = Sampler(params, pair.device)
        model = pair.draft if draft_alone and pair.draft is not None else pair.target
        self._vocab_size = pair.vocab_size
        sizes = {"num_rows": num_rows, "num_draft_tokens": num_draft_tokens}
        self._drafter = RowDrafter()
        if num_draft_tokens and eagle is not None:
            self._drafter = EagleRows(pair, rules, eagle, **sizes)
        elif num_draft_tokens:
            self._drafter = DraftModelRows(pair, rules, self.sampler, **sizes)
        read = {layer for rule in rules for layer in rule.traits.target_layers} | {*self._drafter.target_layers}
        self._target = RowModel(model, num_rows, hidden_layers=sorted(read))
        self._models = [self._target, *self._drafter.models]
        for one in self._models:
            refuse_varying_positions(one.model)
        self._known = {rule.spec_without_dial for rule in rules} | {LosslessRule().spec_without_dial}
        self._embed = pair.target.get_input_embeddings()
        self._num_token_ids = pair.num_token_ids
        self._sampled = not self.sampler.greedy and self._drafter.samples
        self._eos_ids = eos_token_ids(model, pair.tokenizer)

    @property
    def device(self) -> torch.device:
        return self._target.device

    def submit(self, request: Request) -> None:
        """Queue an answer.

        Raises:
            ContextOverflowError: prompt and new tokens exceed a model's positions.
            SpecError: an empty prompt, ids that the models do not have, or a rule that is not among the decoder's.
        """
        if request.rule.spec_without_dial not in self._known:
            raise SpecError(f"rule must be one of {', '.join(sorted(self._known))}, got {request.rule.spec}")
        token_ids_of(self.tokenizer, request.prompt_ids, self._num_token_ids)
        require_whole("max_new_tokens", request.max_new_tokens, 1)
        num = len(request.prompt_ids) + request.max_new_tokens
        for one in self._models:
            require_positions(one.model, num, what=f"prompt and {request.max_new_tokens} new tokens")
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Decode one round of every answer in progress; waiting ones take free rows first."""
        self._admit()
        rows, texts, read_rows = self._in_progress(self.device)
        if not rows:
            return
        sizes = [min(self.num_draft_tokens, text.answer.num_left - 1) for text in texts]
        sizes = [size * self._drafter.can_draft(text.token_ids) for size, text in zip(sizes, texts, strict=True)]
        row_texts = [
            FREE_ROW if text is None else RowInput(text.token_ids, text.num_new, text.request.seed)
            for text in read_rows
        ]
        lengths = device_tensor([len(text.token_ids) for text in row_texts], torch.long, self.device)
        longest = max(len(text.token_ids) for text in row_texts) + self.num_draft_tokens
        last = [text.token_ids[-2:] for text in row_texts]
        recent = to_device(torch.tensor([[ids[0], ids[-1]] for ids in last]), self.device)
        block = self._drafter.propose(row_texts, recent, lengths, longest)
        positions = lengths[:, None] - 1 + torch.arange(self.num_draft_tokens + 1, device=self.device)
        read, hidden = self._target.forward(block.token_ids, positions, longest=longest)
        logits = same_vocabulary(read.flatten(0, 1).to(torch.float32, copy=True), self._vocab_size)
        if self._drafter.target_layers:
            self._drafter.observe_block(hidden)
        flat = {layer: states.flatten(0, 1) for layer, states in hidden.items()}
        current = _Round(rows, texts, sizes, block, lengths, logits, self.sampler.target_scores(logits), flat)
        self._commit(current, *self._decide(current))

    def _copy_row(self, source: int, to: int) -> None:
        self._target.cache.copy_row(source, to)
        self._drafter.copy_row(source, to)

    def _admit(self) -> None:
        """Give waiting answers the free rows, and read their prompts except the last token."""
        free = [row for row, text in enumerate(self._rows) if text is None]
        if len(free) < len(self._rows) and len(free) * _SHARE_FREE < len(self._rows):
            return
        admitted = [(row, self._waiting.popleft()) for row in free[: len(self._waiting)]]
        if not admitted:
            return
        unread = [Unread(row, 0, request.prompt_ids[:-1]) for row, request in admitted if len(request.prompt_ids) > 1]
        self._target.prefill(unread, self._drafter.observe_prompts if self._drafter.target_layers else None)
        self._drafter.read_prompts(unread)
        longest = max(len(request.prompt_ids) + request.max_new_tokens for _, request in admitted)
        self._target.cache.reserve(longest + self.num_draft_tokens)
        self._drafter.reserve(longest + self.num_draft_tokens)
        for row, request in admitted:
            params = replace(self.sampler.params, max_new_tokens=request.max_new_tokens)
            answer = Answer(self.tokenizer, request.prompt_ids, params, self._eos_ids)
            self._rows[row] = _AnswerText(request, list(request.prompt_ids), answer, RiskBudget.of(request.rule))

    def _decide(self, current: _Round) -> tuple[Tensor, Tensor, Tensor]:
        """Decide on the drafted tokens.

        Returns:
            Which are accepted and which the lossless check alone accepts, both [B, K], bool; and the scores that they
            were verified against, [R * (K + 1), V].
        """
        accepts = torch.zeros(len(current.rows), self.num_draft_tokens, dtype=torch.bool, device=self.device)
        matches = torch.zeros_like(accepts)
        scores = current.scores
        by_rule: dict[str, list[int]] = {}
        for index, text in enumerate(current.texts):
            if current.sizes[index] > 0:
                by_rule.setdefault(text.request.rule.spec_without_dial, []).append(index)
        for name, members in by_rule.items():
            drafted = [(index, column) for index in members for column in range(current.sizes[index])]
            columns = device_tensor([column for _, column in drafted], torch.long, self.device)
            rows = device_tensor([current.rows[index] for index, _ in drafted], torch.long, self.device)
            logit_rows = rows * (self.num_draft_tokens + 1) + columns
            batch = self._batch(current, members, rows, columns, logit_rows)
            requests = []
            for index in members:
                text, greedy = current.texts[index], self.sampler.greedy
                requests.append(BatchRequest(name, text.request.rule, current.sizes[index], greedy, True, text.budget))
            decisions = decide(requests, batch)
            lossless = decisions.lossless
            if requests[0].strict:
                lossless = batch.lossless_accepts(batch.scores, greedy=self.sampler.greedy)
            passed = lossless
            if decisions.scores is not None:
                passed = batch.lossless_accepts(decisions.scores, greedy=self.sampler.greedy)
                scores = scores.index_copy(0, logit_rows, decisions.scores)
            at = device_tensor([index for index, _ in drafted], torch.long, self.device), columns
            accepts.index_put_(at, decisions.accept | (passed & ~decisions.refuse))
            matches.index_put_(at, lossless)
        return accepts, matches, scores

    def _batch(self, current: _Round, members: list[int], rows: Tensor, columns: Tensor, logit_rows: Tensor) -> Batch:
        """Return the inputs of one rule.

        Args:
            members: indices of its answers among the B.
            rows, columns: of its N drafted tokens in the block, [N].
            logit_rows: of the target's logits that judge them, [N].
        """
        texts = [current.texts[index] for index in members]
        needs = texts[0].request.rule.traits.needs
        block = current.block
        token_ids = block.token_ids[rows, 1 + columns]
        logits = current.logits[logit_rows]
        scores = logits if current.scores is current.logits else current.scores[logit_rows]
        draft_logits = draft_scores = proposal_probs = None
        if block.logits is not None and (self._sampled or Need.DRAFT_PROBS in needs):
            draft_logits = block.logits[rows, columns]
            draft_scores = self.sampler.draft_scores(draft_logits)
            if self._sampled:
                proposal_probs = gather_token(draft_scores.softmax(-1), token_ids)
        reads_embeddings, layers = Need.EMBEDDINGS in needs, texts[0].request.rule.traits.target_layers
        before = [len(text.answer.tokens) for text in texts]
        sizes = [current.sizes[index] for index in members]
        in_answer = [first + column for first, size in zip(before, sizes, strict=True) for column in range(size)]

        def draws(purpose: int) -> Tensor:
            seeds = [text.request.seed for text, size in zip(texts, sizes, strict=True) for _ in range(size)]
            return keyed_uniforms(
                device_tensor(seeds, torch.long, self.device), current.lengths[rows] + columns, purpose
            )

        return Batch(
            token_ids=token_ids,
            block_sizes=sizes,
            scores=scores,
            logits=logits,
            possible=torch.ones_like(token_ids, dtype=torch.bool),
            proposal_probs=proposal_probs,
            draft_scores=draft_scores,
            draft_logits=draft_logits,
            uniforms=None if self.sampler.greedy else draws(ACCEPT),
            noise=draws(NOISE) if Need.NOISE in needs else None,
            node_hidden={layer: current.hidden[layer][logit_rows + 1] for layer in layers},
            parent_hidden={layer: current.hidden[layer][logit_rows] for layer in layers},
            draft_hidden={layer: states[rows, columns] for layer, states in (block.hidden or {}).items()},
            token_embeddings=self._embed(token_ids) if reads_embeddings else None,
            top_embeddings=self._embed(scores.argmax(-1)) if reads_embeddings else None,
            answer_positions=device_tensor(in_answer, torch.long, self.device)
            if Need.ANSWER_POSITIONS in needs
            else None,
            context=self._context(texts) if Need.CONTEXT in needs else None,
            num_draft_tokens=self.num_draft_tokens,
        )

    def _context(self, texts: list[_AnswerText]) -> Context:
        lengths = [len(text.token_ids) for text in texts]
        padded = [text.token_ids + [0] * (max(lengths) - len(text.token_ids)) for text in texts]
        return Context(to_device(torch.tensor(padded), self.device), device_tensor(lengths, torch.long, self.device))

    def _following(self, current: _Round, num_accepted: Tensor, rows: Tensor, scores: Tensor) -> Tensor:
        """Return the target's token after the accepted ones, [B].

        Args:
            num_accepted: [B].
            rows: [B], of the caches.
            scores: see `_decide`.
        """
        last = scores[rows * (self.num_draft_tokens + 1) + num_accepted]
        if self.sampler.greedy:
            return last.argmax(-1)
        probs = last.softmax(-1)
        if self.num_draft_tokens:
            column = num_accepted.clamp_max(self.num_draft_tokens - 1)
            proposal = None
            if current.block.logits is not None and self._sampled:
                proposal = self.sampler.draft_scores(current.block.logits[rows, column]).softmax(-1)
            left = residual_probs(probs, proposal, current.block.token_ids[rows, 1 + column])
            keeps = [not text.request.rule.traits.replaces for text in current.texts]
            refused = num_accepted < device_tensor(current.sizes, torch.long, self.device)
            refused &= device_tensor(keeps, torch.bool, self.device)
            probs = torch.where(refused[:, None], left, probs)
        seeds = device_tensor([text.request.seed for text in current.texts], torch.long, self.device)
        return draw_at(probs, keyed_uniforms(seeds, current.lengths[rows] + num_accepted, TARGET))

    def _commit(self, current: _Round, accepts: Tensor, matches: Tensor, scores: Tensor) -> None:
        """Add the accepted tokens and the target's own to the answers; the host waits once, here."""
        rows = device_tensor(current.rows, torch.long, self.device)
        num_accepted = accepts.long().cumprod(-1).sum(-1)
        following = self._following(current, num_accepted, rows, scores)
        drafted = current.block.token_ids[rows, 1:]
        top_ids = drafted[:0]
        if any(text.request.on_round is not None for text in current.texts):
            top_ids = current.logits.argmax(-1).view(-1, self.num_draft_tokens + 1)[rows, :-1]
        counts, nexts, token_ids, matched, likeliest = to_host(num_accepted, following, drafted, matches, top_ids)
        finished: list[_AnswerText] = []
        for index, (row, text) in enumerate(zip(current.rows, current.texts, strict=True)):
            cells = slice(index * self.num_draft_tokens, index * self.num_draft_tokens + int(counts[index]))
            committed = [
                Token(int(token_id), Provenance.MATCHED if match else Provenance.RESCUED)
                for token_id, match in zip(token_ids[cells], matched[cells], strict=True)
            ]
            committed.append(Token(int(nexts[index]), Provenance.TARGET))
            if (on_round := text.request.on_round) is not None:
                first = index * self.num_draft_tokens
                block = slice(first, first + current.sizes[index])
                draft_ids, target_ids = ([int(token_id) for token_id in ids[block]] for ids in (token_ids, likeliest))
                if not on_round(VerifiedRound(draft_ids, target_ids, committed)):
                    self._rows[row] = None
                    continue
            text.token_ids += [token.token_id for token in committed]
            text.num_new = len(committed)
            if not text.answer.take_round(committed, current.sizes[index]):
                self._rows[row] = None
                finished.append(text)
        for text in finished:
            seconds = time.perf_counter() - text.started
            text.request.on_done(text.answer.generation(seconds))
