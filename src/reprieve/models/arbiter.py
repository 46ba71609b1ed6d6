"""CoSpec's arbitrator: the draft's backbone with its own adapters, a hybrid attention mask and a binary head.

The input of a round is context, SEP, drafted tokens, SEP, the target's tokens, SEP (CoSpec, Eq. 9). The context
attends causally and only to itself. The rest, the *region*, attends to the whole context and all of itself. Nothing
flows back into the context, so its keys and values can be kept across rounds. Several rounds of one answer can be
judged in one forward: each region attends to the context of its round.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from reprieve.errors import SpecError, import_extra
from reprieve.heads.classifiers import READINGS, Arbiter
from reprieve.heads.features import TokenStates, assemble
from reprieve.heads.settings import ArbiterShape
from reprieve.models.attention import additive, layer_windows, masks_by_layer, without_cudnn
from reprieve.models.cache import RollbackCache
from reprieve.models.cached_model import execution_device, refuse_recurrent, require_positions
from reprieve.rules import Rule
from reprieve.transfers import device_tensor, to_device, to_host
from reprieve.types import Block, Evidence, Need

_CONTEXT = -1  # region number of context tokens
_ADAPTER = "arbiter"
_MOST_POSITIONS = 4096  # positions of regions in one forward, whose mask grows quadratically


@dataclass(frozen=True)
class ArbitrationRound:
    """Input of the arbiter for one round.

    Args:
        context_length: prompt and committed tokens before the round.
        draft_ids: the drafted tokens, K of them.
        target_ids: the target's own token at each position, without the bonus token.
        readings: values from verification for each drafted token, [K, F], for an arbiter that reads them.
    """

    context_length: int
    draft_ids: Sequence[int]
    target_ids: Sequence[int]
    readings: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.draft_ids) != len(self.target_ids) or not self.draft_ids:
            raise SpecError(
                f"a round must pair each drafted token with one of the target's, got {len(self.draft_ids)} and "
                f"{len(self.target_ids)}"
            )

    @property
    def region_size(self) -> int:
        """2K + 3: positions that the round adds to the context's."""
        return 2 * len(self.draft_ids) + 3


class Layout(NamedTuple):
    """Positions and visibility of the tokens of a forward: [n] tensors, int64.

    Args:
        positions: in the text.
        regions: round of each token; -1 for context.
        limits: number of context tokens that each token attends to.
    """

    positions: Tensor
    regions: Tensor
    limits: Tensor

    @classmethod
    def context(cls, first: int, end: int) -> Layout:
        """Return the layout of context tokens `first` to `end`."""
        positions = torch.arange(first, end)
        return cls(positions, torch.full_like(positions, _CONTEXT), positions + 1)

    @classmethod
    def region(cls, number: int, arbitration: ArbitrationRound) -> Layout:
        """Return the layout of a round's tokens, which follow its context."""
        first = arbitration.context_length
        positions = torch.arange(first, first + arbitration.region_size)
        return cls(positions, torch.full_like(positions, number), torch.full_like(positions, first))

    @classmethod
    def join(cls, parts: Sequence[Layout]) -> Layout:
        """Concatenate layouts."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))


def hybrid_mask(
    rows: Layout,  # n tokens
    columns: Layout,  # m tokens
    *,
    hybrid: bool = True,
    window: int | None = None,
) -> Tensor:  # [n, m], bool: the row's token attends to the column's
    """Return CoSpec's attention mask (section 3.3 and Figure 2).

    Args:
        hybrid: False makes a region's tokens attend causally (the ablation of Table 8).
        window: sliding-window size, on either side; None for full attention.
    """
    distance = rows.positions[:, None] - columns.positions[None, :]
    in_context = (columns.regions[None, :] == _CONTEXT) & (columns.positions[None, :] < rows.limits[:, None])
    same_region = (columns.regions[None, :] == rows.regions[:, None]) & (columns.regions[None, :] != _CONTEXT)
    visible = in_context | (same_region if hybrid else same_region & (distance >= 0))
    return visible if window is None else visible & (distance.abs() < window)


class ArbiterModel(nn.Module):
    """Arbiter network that shares a draft's weights and adds adapters, a separator, a head and a readings projection.

    Args:
        draft: the backbone; its modules stay unchanged.
        shape: of the adapters, and the mask.

    Raises:
        ReprieveError: peft is not installed.
        UnsupportedModelError: a draft with recurrent state.
    """

    def __init__(self, draft: PreTrainedModel, shape: ArbiterShape) -> None:
        super().__init__()
        refuse_recurrent(draft)
        peft = import_extra("peft", "arbiter")
        self.shape = shape
        self.device = execution_device(draft)
        self.dtype = draft.dtype
        self._windows = layer_windows(draft)
        # A frozen copy of the draft's modules that shares its storage.
        base = draft.base_model
        kept = {id(tensor): nn.Parameter(tensor.detach(), requires_grad=False) for tensor in base.parameters()}
        backbone = copy.deepcopy(base, kept | {id(tensor): tensor for tensor in base.buffers()})
        settings = peft.LoraConfig(
            r=shape.rank, lora_alpha=shape.scale, lora_dropout=shape.dropout, target_modules="all-linear"
        )
        with torch.random.fork_rng():
            torch.manual_seed(shape.seed)
            self.backbone: Any = peft.inject_adapter_in_model(settings, backbone, adapter_name=_ADAPTER)
            size = draft.config.get_text_config().hidden_size
            scale = self.backbone.get_input_embeddings().weight.detach().float().std().item()
            self.separator = nn.Parameter(torch.randn(size, device=self.device) * scale)
            self.head = nn.Linear(size, 1, device=self.device)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
            self.readings: nn.Linear | None = None
            if shape.num_readings:  # zero-initialised, so without effect at first
                self.readings = nn.Linear(shape.num_readings, size, device=self.device)
                nn.init.zeros_(self.readings.weight)
                nn.init.zeros_(self.readings.bias)
        for parameter in self.own_tensors.values():
            parameter.data = parameter.data.float()
        self.eval()

    @classmethod
    def of(cls, arbiter: Arbiter, draft: PreTrainedModel) -> Self:
        """Return a trained arbiter's network over the draft's weights.

        Raises:
            SpecError: it was trained on a draft of another shape.
        """
        model = cls(draft, arbiter.shape)
        model.load_own(arbiter.tensors)
        return model

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """Return the trained tensors by name: everything except the draft's weights."""
        return {
            name.removeprefix("backbone."): parameter
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the trained tensors, independent of further training."""
        return {name: tensor.detach().clone() for name, tensor in self.own_tensors.items()}

    @torch.no_grad()
    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Load trained tensors.

        Raises:
            SpecError: names or shapes that do not fit this backbone.
        """
        own = self.own_tensors
        if odd := own.keys() ^ tensors.keys():
            raise SpecError(f"the arbiter's tensors do not fit this draft: check {min(odd)}")
        for name, parameter in own.items():
            if parameter.shape != tensors[name].shape:
                raise SpecError(
                    f"the arbiter's {name} must have shape {list(parameter.shape)} for this draft, got "
                    f"{list(tensors[name].shape)}"
                )
            parameter.copy_(tensors[name])

    def judge(self, context_ids: Sequence[int], rounds: Sequence[ArbitrationRound]) -> list[Tensor]:
        """Return the logits of accepting each drafted token, [K] per round, in as few forwards as fit.

        Args:
            context_ids: prompt and committed tokens, up to the last round's context.
        """
        logits: list[Tensor] = []
        part: list[ArbitrationRound] = []
        for arbitration in rounds:
            if part and sum(other.region_size for other in (*part, arbitration)) > _MOST_POSITIONS:
                logits += self.judge_together(context_ids, part)
                part = []
            part.append(arbitration)
        return logits + (self.judge_together(context_ids, part) if part else [])

    def judge_together(
        self, context_ids: Sequence[int], rounds: Sequence[ArbitrationRound], cache: RollbackCache | None = None
    ) -> list[Tensor]:
        """Return the logits of rounds that fit into one forward; a cache may already hold a part of their context."""
        first = 0 if cache is None else cache.get_seq_length()
        end = max(arbitration.context_length for arbitration in rounds)
        regions = [Layout.region(number, arbitration) for number, arbitration in enumerate(rounds)]
        rows = Layout.join([Layout.context(first, end), *regions])
        columns = Layout.join([Layout.context(0, first), rows])
        embeddings = torch.cat([self._embed(context_ids[first:end]), *map(self._embed_region, rounds)])
        hidden = self._run(embeddings, rows, columns, cache)
        logits, start = [], end - first + 1  # behind the first separator
        for arbitration in rounds:
            drafted = hidden[start : start + len(arbitration.draft_ids)].float()
            logits.append(self.head(drafted).squeeze(-1))  # Eq. 11
            start += arbitration.region_size
        return logits

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        ids = device_tensor(list(token_ids), torch.long, self.device)
        embedded: Tensor = self.backbone.get_input_embeddings()(ids)
        return embedded

    def _embed_region(self, arbitration: ArbitrationRound) -> Tensor:
        separator = self.separator[None].to(self.dtype)
        drafted = self._embed(arbitration.draft_ids)
        if self.readings is not None:
            if arbitration.readings is None:
                raise SpecError("this arbiter reads what verification knows of each drafted token, and got nothing")
            known = arbitration.readings.to(self.device).float()
            drafted = drafted + self.readings(F.layer_norm(known, known.shape[-1:])).to(self.dtype)
        return torch.cat((separator, drafted, separator, self._embed(arbitration.target_ids), separator))

    def _run(self, embeddings: Tensor, rows: Layout, columns: Layout, cache: RollbackCache | None) -> Tensor:
        """Return hidden states [n, D] of embeddings [n, D] with layout `rows`, which attend to `columns`."""

        def mask(window: int | None) -> Tensor:
            visible = hybrid_mask(rows, columns, hybrid=self.shape.hybrid, window=window)
            return to_device(additive(visible, self.dtype)[None, None], self.device)

        with without_cudnn(self.device):
            output = self.backbone(
                inputs_embeds=embeddings[None],
                attention_mask=masks_by_layer(mask, self._windows),
                position_ids=to_device(rows.positions[None], self.device),
                past_key_values=cache,
                use_cache=cache is not None,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


class ArbiterAdvisor:
    """Arbiter in the decoding loop: one forward on every round that has a mismatch (CoSpec, appendix F).

    A round without a mismatch, or whose mismatches another rule accepts (`arbiter|ratio`), needs no advice. The next
    round that does reads the tokens committed since and its own region, 2K + 3 positions, in one forward. The context's
    keys and values stay in the cache; the region's are dropped.
    """

    def __init__(self, model: ArbiterModel) -> None:
        self.model = model
        self.num_read = 0  # positions read by forwards
        self._cache = RollbackCache()
        self._context_ids: list[int] = []

    def start(self, prompt_ids: Sequence[int], *, max_length: int, num_draft_tokens: int) -> None:
        """Begin an answer whose text may grow to `max_length` tokens in rounds of K; the first round reads the prompt.

        Raises:
            ContextOverflowError: the region of a last round could exceed the draft's positions.
        """
        # A context of max_length - left tokens is followed by 2 min(K, left - 1) + 3 more.
        num_positions = max_length + num_draft_tokens + 2
        require_positions(self.model.backbone, num_positions, what="context and a round's tokens, read by the arbiter,")
        self._context_ids = list(prompt_ids)
        self._cache.truncate(0)

    def advise(self, block: Block, evidence: Evidence, settled: Tensor) -> Tensor:
        """Return pi(accept) of each drafted token, [N], which becomes `Evidence.advice`.

        It is 1 for the target's own tokens (Eq. 13 and 14), and for all tokens if all are settled.

        Args:
            evidence: the other inputs of the rule; `own_ids` are the target's own tokens.
            settled: tokens that pass regardless of advice, matches included, [N], bool.

        Raises:
            SpecError: a tree.
        """
        if not block.is_chain:
            raise SpecError("the arbiter needs chains, got a tree")
        drafted, own, passed = to_host(block.token_ids, evidence.own_ids, settled)
        if all(passed):
            return torch.ones(block.num_tokens, device=block.token_ids.device)
        readings = assemble(READINGS, TokenStates.of(evidence, READINGS)) if self.model.shape.num_readings else None
        logits = self.judge([int(token_id) for token_id in drafted], [int(token_id) for token_id in own], readings)
        matched = block.token_ids == evidence.own_ids
        return logits.sigmoid().to(matched.device).masked_fill(matched, 1.0)

    @torch.inference_mode()
    def judge(self, draft_ids: Sequence[int], target_ids: Sequence[int], readings: Tensor | None = None) -> Tensor:
        """Return the logits of accepting each drafted token of this round, [K]; arguments as in `ArbitrationRound`."""
        arbitration = ArbitrationRound(len(self._context_ids), draft_ids, target_ids, readings)
        self.num_read += len(self._context_ids) - self._cache.get_seq_length() + arbitration.region_size
        [logits] = self.model.judge_together(self._context_ids, [arbitration], self._cache)
        self._cache.truncate(len(self._context_ids))
        return logits

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that a round committed."""
        self._context_ids += token_ids

    def forget(self) -> None:
        """Drop the cache: the next round reads the whole context again."""
        self._cache.truncate(0)


def make_advisor(rule: Rule, draft: PreTrainedModel | None) -> ArbiterAdvisor | None:
    """Return the advisor that a rule needs, over the draft's weights; None for rules that need none.

    Raises:
        SpecError: a rule with two arbiters, no draft, or an arbiter that was trained on a draft of another shape.
    """
    if Need.ADVICE not in rule.traits.needs:
        return None
    arbiters = [head for _, head in rule.heads if isinstance(head, Arbiter)]
    if len(arbiters) != 1:
        raise SpecError(f"rule {rule.spec} must name one arbiter, got {len(arbiters)}")
    if draft is None:
        raise SpecError(f"rule {rule.spec} needs the draft its arbiter was trained on; name it with --draft")
    return ArbiterAdvisor(ArbiterModel.of(arbiters[0], draft))
