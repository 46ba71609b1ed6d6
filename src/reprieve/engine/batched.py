"""Decoding loop for many answers at once: one forward drafts or verifies a token of every answer.

The rounds are those of `SpeculativeDecoder`; the rules run on the whole batch, as in vLLM.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reprieve.drafters.length import FixedLength
from reprieve.engine.answer import Answer
from reprieve.engine.pair import Pair
from reprieve.engine.prompt import token_ids_of
from reprieve.engine.stopwatch import Stopwatch
from reprieve.engine.text_stream import TextStream, special_tokens
from reprieve.errors import SpecError, require_whole
from reprieve.models.cached_model import eos_token_ids, require_positions
from reprieve.models.row_model import RowModel
from reprieve.models.sampling import Sampler
from reprieve.needs import Need
from reprieve.rules import RiskBudget, Rule
from reprieve.rules.batch import Batch, Budget, Row, decide
from reprieve.rules.checks import GreedyCheck, SampledCheck
from reprieve.rules.lossless import residual_probs
from reprieve.settings import SamplingParams
from reprieve.transfers import spread, to_device, to_host
from reprieve.types import Context, Generation, HiddenStates, Provenance, Token

_PREFILL_TOKENS = 16_384  # tokens of the prompts that one forward reads


def refusal(rule: Rule) -> str:
    """Return the reason why a rule cannot decide for a batch; empty if it can."""
    traits = rule.traits
    if traits.check != "token":
        return f"a batch is verified token by token, and {rule.name} needs verification={traits.check}"
    if Need.ADVICE in traits.needs:
        return f"{rule.name} has a model of its own, which decodes one answer at a time"
    return ""


@dataclass(eq=False)
class Request:
    """One answer to make.

    Args:
        prompt_ids: 1 or more tokens.
        rule: with its heads; bound to the tokenizer.
        on_done: called with the finished answer.
    """

    prompt_ids: list[int]
    rule: Rule
    max_new_tokens: int
    on_done: Callable[[Generation], None]


@dataclass(eq=False)
class _Slot:
    """An answer in progress, in a row of the caches."""

    request: Request
    answer: Answer
    token_ids: list[int]  # prompt and answer; both models have read all but the last
    started: float
    budget: Budget = field(default_factory=Budget)

    def block_size(self, most: int) -> int:
        return min(most, self.answer.num_left - 1)


class BatchedDecoder:
    """Answers up to `num_rows` prompts at once; call `submit`, then `step` until `idle`.

    Args:
        pair: the models; the target alone decodes if `num_draft_tokens` is 0.
        num_rows: answers in one forward, 1 or more.
        num_draft_tokens: K, 0 to 512.
        params: of every answer. Random numbers come from one generator, so that sampled answers depend on what else is
            in the batch.
        rules: all rules that requests may name.
        draft_alone: the draft answers in the target's place.

    Raises:
        SpecError: a number out of range, or a rule that cannot decide for a batch.
        UnsupportedModelError: a model with recurrent state.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        num_rows: int,
        num_draft_tokens: int,
        params: SamplingParams,
        rules: Sequence[Rule] = (),
        draft_alone: bool = False,
    ) -> None:
        require_whole("num_rows", num_rows, 1)
        require_whole("num_draft_tokens", num_draft_tokens, 0, 512)
        for rule in rules:
            if reason := refusal(rule):
                raise SpecError(reason)
        target, draft = pair.target, pair.draft
        if draft_alone:
            assert draft is not None
            target = draft
        self.pair = pair
        self.num_draft_tokens = num_draft_tokens
        self.params = params
        self.sampler = Sampler(params, pair.device)
        self._needs = frozenset().union(*(rule.traits.needs for rule in rules))
        layers = sorted({layer for rule in rules for layer in rule.traits.target_layers})
        draft_layers = sorted({layer for rule in rules for layer in rule.traits.draft_layers})
        self._target = RowModel(target, num_rows, hidden_layers=layers)
        self._draft: RowModel | None = None
        if num_draft_tokens:
            if draft is None:
                raise SpecError("the pair has no draft: num_draft_tokens must be 0")
            self._draft = RowModel(draft, num_rows, hidden_layers=draft_layers)
        self._vocab_size = int(pair.target.config.get_text_config().vocab_size)
        self._slots: list[_Slot | None] = [None] * num_rows
        self._waiting: deque[Request] = deque()
        self._eos = eos_token_ids(target, pair.tokenizer) if params.eos_token_ids is None else params.eos_token_ids
        self._special = special_tokens(pair.tokenizer) if params.stop else {}

    @property
    def device(self) -> torch.device:
        return self._target.device

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(self._slots)

    def submit(self, request: Request) -> None:
        """Queue an answer.

        Raises:
            ContextOverflowError: prompt and new tokens exceed a model's positions.
            SpecError: an empty prompt.
        """
        token_ids_of(self.pair.tokenizer, request.prompt_ids, self._vocab_size)
        num = len(request.prompt_ids) + request.max_new_tokens
        for model in (self._target, self._draft):
            if model is not None:
                require_positions(model.model, num, what=f"prompt and {request.max_new_tokens} new tokens")
        self._waiting.append(request)

    def clear(self) -> None:
        """Cancel every answer, after a failed forward."""
        self._waiting.clear()
        self._slots = [None] * len(self._slots)

    @torch.inference_mode()
    def step(self) -> None:
        """Decode one round of every answer in progress; waiting answers take free rows first."""
        self._admit()
        rows = [row for row, slot in enumerate(self._slots) if slot]
        if not rows:
            return
        slots = [slot for slot in self._slots if slot]
        sizes = [slot.block_size(self.num_draft_tokens) for slot in slots]
        ids, draft_logits, draft_hidden = self._propose()
        logits, hidden = self._verify(ids)
        accepts, own, scores = self._decide(rows, slots, sizes, ids, logits, draft_logits, hidden, draft_hidden)
        num_accepted = accepts.long().cumprod(-1).sum(-1)  # [B]
        following = self._following(
            slots, num_accepted, spread(sizes, torch.long, self.device), scores, ids, rows, draft_logits
        )
        width = self.num_draft_tokens
        drafted = ids[to_device(torch.tensor(rows), self.device), 1:]
        counts, nexts, tokens, matched = to_host(num_accepted, following, drafted, own)
        for number, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            first, count = number * width, int(counts[number])
            committed = [
                Token(int(token_id), Provenance.MATCHED if matches else Provenance.RESCUED)
                for token_id, matches in zip(tokens[first : first + count], matched[first : first + count], strict=True)
            ]
            committed.append(Token(int(nexts[number]), Provenance.TARGET))
            self._commit(row, slot, committed, sizes[number])

    def _admit(self) -> None:
        """Give waiting answers the free rows, and read their prompts except the last token."""
        free = [row for row, slot in enumerate(self._slots) if slot is None]
        batch: list[tuple[int, Request]] = []
        longest = 0
        while free and self._waiting:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if batch and longest * (len(batch) + 1) > _PREFILL_TOKENS:
                self._prefill(batch)
                batch, longest = [], len(self._waiting[0].prompt_ids)
            batch.append((free.pop(0), self._waiting.popleft()))
        if batch:
            self._prefill(batch)

    def _prefill(self, batch: list[tuple[int, Request]]) -> None:
        size = max(len(request.prompt_ids) for _, request in batch) - 1
        if size:
            ids = torch.zeros(len(batch), size, dtype=torch.long)
            for number, (_, request) in enumerate(batch):
                read = request.prompt_ids[:-1]
                ids[number, : len(read)] = torch.tensor(read, dtype=torch.long)
            rows = to_device(torch.tensor([row for row, _ in batch]), self.device)
            positions = torch.arange(size, device=self.device).expand(len(batch), size)
            for model in (self._target, self._draft):  # what is read after a prompt's end is overwritten later
                if model is not None:
                    model.forward(to_device(ids, self.device), positions, longest=size, rows=rows)
        longest = max(len(request.prompt_ids) + request.max_new_tokens for _, request in batch)
        for model in (self._target, self._draft):
            if model is not None:
                model.reserve(longest + self.num_draft_tokens + 1)
        for row, request in batch:
            self._slots[row] = self._start(request)

    def _start(self, request: Request) -> _Slot:
        params = self.params.with_fields(max_new_tokens=request.max_new_tokens)
        answer = Answer(
            prompt_ids=request.prompt_ids,
            unread=request.prompt_ids[-1:],
            params=params,
            sampler=self.sampler,
            stream=TextStream(self.pair.tokenizer, params.stop),
            rule=request.rule,
            budget=RiskBudget.of(request.rule),
            length=FixedLength(max(1, self.num_draft_tokens)).start(request.rule.dial_value, params.temperature),
            eos_ids=frozenset() if params.ignore_eos else frozenset(self._eos),
            stop_ids=frozenset(self._special[text] for text in params.stop if text in self._special),
            watch=Stopwatch(self.device, running=False),
            on_token=None,
        )
        budget = Budget.of(request.rule)
        return _Slot(request, answer, list(request.prompt_ids), time.perf_counter(), budget)

    def _propose(self) -> tuple[Tensor, Tensor | None, HiddenStates]:
        """Draft K tokens for every row; free rows draft nonsense.

        Returns:
            Token ids [R, K + 1], beginning with the last committed one; the draft's logits [R, K, V] if they are
            needed, and its hidden states [R, K, D] by layer.
        """
        last = [(slot.token_ids[-2:], len(slot.token_ids)) if slot else ([0], 1) for slot in self._slots]
        recent = to_device(torch.tensor([[ids[0], ids[-1]] for ids, _ in last]), self.device)
        self._lengths = to_device(torch.tensor([length for _, length in last]), self.device)
        self._longest = max(length for _, length in last) + self.num_draft_tokens
        ids = [recent[:, 1:]]
        rows: list[Tensor] = []
        states: dict[int, list[Tensor]] = {}
        if self._draft is None:
            return ids[0], None, {}
        keeps = Need.DRAFT_PROBS in self._needs or not (self.sampler.greedy or self.sampler.draft_greedy)
        # The last token but one is read again where the draft has read it already; it may not have.
        feed, places = recent, (self._lengths[:, None] + torch.tensor([-2, -1], device=self.device)).clamp_min(0)
        for step in range(self.num_draft_tokens):
            logits, hidden = self._draft.forward(feed, places, longest=self._longest)
            final = self._same_vocabulary(logits[:, -1].to(torch.float32, copy=True))
            if step:
                self._keep(states, hidden)
            if keeps:
                rows.append(final)
            feed = self.sampler.draft_token(final)[:, None]
            ids.append(feed)
            places = (self._lengths + step)[:, None]
        if self._draft.hidden_layers:
            self._keep(states, self._draft.forward(feed, places, longest=self._longest)[1])
        stacked = {layer: torch.cat(parts, 1) for layer, parts in states.items()}
        return torch.cat(ids, 1), torch.stack(rows, 1) if keeps else None, stacked

    @staticmethod
    def _keep(states: dict[int, list[Tensor]], hidden: HiddenStates) -> None:
        for layer, part in hidden.items():
            states.setdefault(layer, []).append(part[:, -1:].clone())

    def _same_vocabulary(self, logits: Tensor) -> Tensor:
        missing = self._vocab_size - logits.shape[-1]
        return logits if not missing else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)

    def _verify(self, ids: Tensor) -> tuple[Tensor, HiddenStates]:
        positions = self._lengths[:, None] - 1 + torch.arange(ids.shape[1], device=self.device)
        return self._target.forward(ids, positions, longest=self._longest)

    def _decide(
        self,
        rows: list[int],
        slots: list[_Slot],
        sizes: list[int],
        ids: Tensor,  # [R, K + 1]
        logits: Tensor,  # [R, K + 1, V]
        draft_logits: Tensor | None,  # [R, K, V]
        hidden: HiddenStates,  # [R, K + 1, D] by layer
        draft_hidden: HiddenStates,  # [R, K, D] by layer
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return which drafted tokens pass, and which the lossless check alone passes, [B, K], and the scores.

        Scores are [R * (K + 1), V]: those that each token was verified against.
        """
        width = self.num_draft_tokens
        flat_logits = logits.flatten(0, 1).float()
        scores = self.sampler.target_scores(flat_logits)
        accepts = torch.zeros(len(rows), width, dtype=torch.bool, device=self.device)
        own = torch.zeros_like(accepts)
        groups: dict[str, list[int]] = {}
        for number, slot in enumerate(slots):
            if sizes[number] > 0:
                groups.setdefault(slot.request.rule.spec_without_dial, []).append(number)
        for name, members in groups.items():
            cells = [(rows[number], column) for number in members for column in range(sizes[number])]
            parents = spread([row * (width + 1) + column for row, column in cells], torch.long, self.device)
            drafts = spread([row * width + column for row, column in cells], torch.long, self.device)
            batch = self._batch(
                slots, members, sizes, ids, flat_logits, scores, draft_logits, hidden, draft_hidden, parents, drafts
            )
            requests = [
                Row(name, slots[n].request.rule, sizes[n], self.sampler.greedy, True, slots[n].budget) for n in members
            ]
            decisions = decide(requests, batch)
            lossless = self._check(batch, batch.scores)
            passed = lossless if decisions.scores is None else self._check(batch, decisions.scores)
            if decisions.scores is not None:
                scores = scores.index_copy(0, parents, decisions.scores)
            places = (
                spread([number for number in members for _ in range(sizes[number])], torch.long, self.device),
                spread([column for _, column in cells], torch.long, self.device),
            )
            accepts.index_put_(places, decisions.accept | (passed & ~decisions.refuse))
            own.index_put_(places, lossless)
        return accepts, own, scores

    def _check(self, batch: Batch, scores: Tensor) -> Tensor:
        if self.sampler.greedy:
            return GreedyCheck(scores, batch.token_ids, slice(None)).accepts
        assert batch.uniforms is not None
        check = SampledCheck(
            scores, batch.token_ids, slice(None), uniforms=batch.uniforms, proposal_probs=batch.proposal_probs
        )
        return check.accepts

    def _batch(
        self,
        slots: list[_Slot],
        members: list[int],
        sizes: list[int],
        ids: Tensor,
        logits: Tensor,
        scores: Tensor,
        draft_logits: Tensor | None,
        hidden: HiddenStates,
        draft_hidden: HiddenStates,
        parents: Tensor,  # [N], rows of `logits` that judge the tokens
        drafts: Tensor,  # [N], rows of the flattened block
    ) -> Batch:
        needs = frozenset().union(*(slots[number].request.rule.traits.needs for number in members))
        token_ids = ids[:, 1:].reshape(-1)[drafts]
        mine = logits[parents]
        draft_scores = proposal_probs = raw = None
        sampled = not (self.sampler.greedy or self.sampler.draft_greedy)
        if draft_logits is not None and (Need.DRAFT_PROBS in needs or sampled):
            raw = draft_logits.flatten(0, 1)[drafts]
            draft_scores = self.sampler.draft_scores(raw)
            if sampled:
                proposal_probs = draft_scores.softmax(-1).gather(-1, token_ids[:, None])[:, 0]
        judged = mine if scores is logits else scores[parents]
        embed = self.pair.target.get_input_embeddings()
        flat = {layer: states.flatten(0, 1) for layer, states in hidden.items()}
        positions = [len(slots[n].answer.tokens) + column for n in members for column in range(sizes[n])]
        return Batch(
            token_ids=token_ids,
            block_sizes=[sizes[number] for number in members],
            scores=judged,
            logits=mine,
            possible=torch.ones_like(token_ids, dtype=torch.bool),
            proposal_probs=proposal_probs,
            draft_scores=draft_scores,
            draft_logits=raw,
            uniforms=None if self.sampler.greedy else self.sampler.uniforms(len(token_ids)),
            noise=self.sampler.uniforms(len(token_ids)) if Need.NOISE in needs else None,
            node_logits=logits[parents + 1] if Need.NODE_HIDDEN in needs else None,
            node_hidden={layer: states[parents + 1] for layer, states in flat.items()},
            parent_hidden={layer: states[parents] for layer, states in flat.items()},
            draft_hidden={layer: states.flatten(0, 1)[drafts] for layer, states in draft_hidden.items()},
            token_embeddings=embed(token_ids) if Need.EMBEDDINGS in needs else None,
            top_embeddings=embed(judged.argmax(-1)) if Need.EMBEDDINGS in needs else None,
            answer_positions=spread(positions, torch.long, self.device) if Need.ANSWER_POSITIONS in needs else None,
            context=self._context([slots[number] for number in members]) if Need.CONTEXT in needs else None,
            num_draft_tokens=self.num_draft_tokens,
        )

    def _context(self, slots: list[_Slot]) -> Context:
        longest = max(len(slot.token_ids) for slot in slots)
        texts = [slot.token_ids + [0] * (longest - len(slot.token_ids)) for slot in slots]
        lengths = [len(slot.token_ids) for slot in slots]
        return Context(to_device(torch.tensor(texts), self.device), spread(lengths, torch.long, self.device))

    def _following(
        self,
        slots: list[_Slot],
        num_accepted: Tensor,  # [B]
        sizes: Tensor,  # [B]
        scores: Tensor,  # [R * (K + 1), V]
        ids: Tensor,
        rows: list[int],
        draft_logits: Tensor | None,
    ) -> Tensor:
        """Return the target's token after the accepted ones, [B]."""
        width = self.num_draft_tokens
        places = to_device(torch.tensor(rows), self.device)
        last = scores[places * (width + 1) + num_accepted]
        if self.sampler.greedy:
            return last.argmax(-1)
        probs = last.softmax(-1)
        if width:
            column = num_accepted.clamp_max(width - 1)
            refused = ids[places, 1 + column]
            proposal = None
            if draft_logits is not None and not self.sampler.draft_greedy:
                proposal = self.sampler.draft_scores(draft_logits[places, column]).softmax(-1)
            replaces = spread([slot.request.rule.traits.replaces for slot in slots], torch.bool, self.device)
            rejected = (num_accepted < sizes) & ~replaces
            probs = torch.where(rejected[:, None], residual_probs(probs, proposal, refused), probs)
        return self.sampler.draw(probs)

    def _commit(self, row: int, slot: _Slot, committed: list[Token], num_drafted: int) -> None:
        answer = slot.answer
        answer.num_drafted += max(0, num_drafted)
        first = len(answer.tokens)
        for token in committed:
            slot.token_ids.append(token.token_id)
            if not answer.take(token):
                break
        answer.round_lengths.append(len(answer.tokens) - first)
        if answer.finish_reason is None:
            return
        self._slots[row] = None
        text = answer.stream.text
        if not answer.streams:
            text = self.pair.tokenizer.decode([token.token_id for token in answer.tokens], skip_special_tokens=True)
        slot.request.on_done(
            Generation(
                prompt_ids=answer.prompt_ids,
                tokens=answer.tokens,
                text=text,
                finish_reason=answer.finish_reason,
                num_rounds=len(answer.round_lengths),
                num_drafted=answer.num_drafted,
                seconds=time.perf_counter() - slot.started,
                round_lengths=answer.round_lengths,
            )
        )
