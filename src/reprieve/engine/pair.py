"""Pairs: loading them, making their decoders, and setting up threads and worker processes."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from reprieve.bundles import BUNDLES
from reprieve.drafters import DRAFTERS, DrafterSettings
from reprieve.drafters.length import AcceptanceLength, DraftLength, FixedLength, LearnedLength
from reprieve.engine.decoder import SpeculativeDecoder
from reprieve.errors import PairError, SpecError, require_choice
from reprieve.heads.certificates import Conditions
from reprieve.heads.length import LengthHead, bundled_length_head, load_length_head
from reprieve.heads.loading import attach_heads, require_heads_fit
from reprieve.models.arbiter import ArbiterAdvisor, make_advisor
from reprieve.models.cached_model import forward_seconds
from reprieve.models.int8 import INT8, num_weights, require_int8
from reprieve.models.loading import DTYPES, ModelPair, load_model, require_device, require_same_tokenizer
from reprieve.rules import LosslessRule, Rule, parse_rule
from reprieve.settings import AUTO, BUNDLED_PAIR, NumDraftTokens, PairSettings, length_head_path, require_draft_tokens

TARGET_ONLY = "target_only"
DRAFT_ONLY = "draft_only"
# A trial chooses the number of CPU threads: for small models, synchronising more threads costs more than it gains.
_LARGE_MODEL = 500_000_000  # parameters; larger models use all cores without a trial
_THREAD_GAIN = 1.25  # required speedup, because a second thread occupies another core
_TRIALS = 7
_TRIAL_TOKENS = 8  # tokens of a trial forward


@dataclass(frozen=True, repr=False)
class Pair(ModelPair):
    """Target, draft and their shared tokenizer."""

    def __repr__(self) -> str:
        names = f"target={self.target_name!r}, draft={self.draft_name!r}"
        return f"Pair({names}, dtype={self.dtype!r}, device={str(self.device)!r})"

    def decoder(
        self,
        rule: str | Rule = "lossless",
        *,
        num_draft_tokens: NumDraftTokens | LengthHead | DraftLength = AUTO,
        drafter: str | DrafterSettings = "draft",
        task: str | None = None,
        conditions: Conditions | None = None,
        advisor: ArbiterAdvisor | None = None,
    ) -> SpeculativeDecoder:
        """Return a decoder with its own caches; the models are shared.

        Args:
            rule: a specification such as `margin:delta=3`, or a rule; `target_only` and `draft_only` for one model
                alone. On the bundled pair, rules without a path use the bundled head.
            num_draft_tokens: K, the deepest block of a round, 1 to 512. `auto` adapts it, by the bundled head or from
                recent acceptance. `auto:path=FOLDER`, a head or a `DraftLength` select another policy.
            drafter: `draft`, `ngram` or `eagle3:path=FOLDER`, for example.
            task: task it will be used on, for a warning if a head was trained on another; None skips the check.
            conditions: conditions of use, for a warning if the rule's threshold was certified under others.
            advisor: for a rule that needs one; None builds it from the rule's head.

        Raises:
            SpecError: a rule or drafter that cannot be read, or that do not fit each other.
            PairError: a head of another pair, or a pair that lacks the required draft.
            ReprieveError: a head that cannot be loaded.
        """
        if not isinstance(rule, str | Rule):
            raise SpecError(f"rule must be a specification such as margin:delta=3, or a Rule, got {rule!r}")
        settings = DRAFTERS.make(drafter) if isinstance(drafter, str) else drafter
        if not isinstance(settings, DrafterSettings):
            raise SpecError(f"drafter must be a specification such as ngram, or DrafterSettings, got {drafter!r}")
        if rule in (TARGET_ONLY, DRAFT_ONLY):
            model = self.cached_target() if rule == TARGET_ONLY else self.cached_draft()
            return SpeculativeDecoder(model, None, self.tokenizer)
        ready = attach_heads(parse_rule(rule) if isinstance(rule, str) else rule, self.target_name)
        if ready.heads:
            drafted_by = ":".join((settings.name, *settings.fingerprints(self).values()))
            require_heads_fit(ready, self.identity, task, drafter=drafted_by, here=conditions)
        length = self._length(num_draft_tokens, ready, settings)
        proposer = settings.build(self, ready, length)
        layers = dict.fromkeys((*ready.traits.target_layers, *proposer.target_layers))
        return SpeculativeDecoder(
            self.cached_target(tuple(layers)),
            proposer,
            self.tokenizer,
            rule=ready,
            num_draft_tokens=length,
            advisor=advisor or make_advisor(ready, self.draft),
            num_token_ids=self.num_token_ids,
        )

    def _length(
        self, num_draft_tokens: NumDraftTokens | LengthHead | DraftLength, rule: Rule, drafter: DrafterSettings
    ) -> DraftLength:
        """Return the draft length of a rule and a drafter; raises the errors of `select_length_head`."""
        if isinstance(num_draft_tokens, DraftLength):
            return num_draft_tokens
        head = self.select_length_head(num_draft_tokens, rule, drafter)
        if head is not None:
            return LearnedLength(head.to(self.device if self.draft is None else self.draft.device))
        if isinstance(num_draft_tokens, str):
            measure = (lambda: drafter.costs(self, self.measured_costs)) if isinstance(rule, LosslessRule) else None
            return AcceptanceLength(drafter.costs(self), drafter.drafts_trees, measure=measure)
        assert not isinstance(num_draft_tokens, LengthHead), "select_length_head returns it"
        return FixedLength(num_draft_tokens)

    def select_length_head(
        self, num_draft_tokens: NumDraftTokens | LengthHead, rule: Rule, drafter: DrafterSettings
    ) -> LengthHead | None:
        """Return the head that decides the block length; None if there is none.

        Raises:
            SpecError: K out of range, a head of another rule, or a drafter whose states the head does not read.
            PairError: a head of another pair.
            ReprieveError: a head that cannot be loaded.
        """
        if isinstance(num_draft_tokens, LengthHead):
            name, head = "num_draft_tokens", num_draft_tokens
        else:
            require_draft_tokens(num_draft_tokens)
            if not (name := length_head_path(num_draft_tokens)):
                usable = num_draft_tokens == AUTO and drafter.name == "draft"
                bundled = bundled_length_head(rule, self.target_name) if usable else None
                fits = bundled is not None and not bundled.pair.differences(self.identity, reads_draft=True)
                return bundled if fits else None
            head = load_length_head(name)
        if drafter.name != "draft":
            raise SpecError(f"a length head reads a draft model's states; the drafter is {drafter.name}")
        head.require_pair(self.identity, name)
        head.require_rule(rule, name)
        return head


def load_pair(
    target: str | Path = BUNDLED_PAIR,
    draft: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
) -> Pair:
    """Load a pair from the hub or from folders; the bundled pair by default.

    Args:
        target: hub id or folder; `reprieve/miniature` is the bundled target.
        draft: hub id or folder; None takes the bundled draft with the bundled target, and otherwise no draft.
        dtype: auto, float32, bfloat16, float16, or int8 (linear layers, on CPUs).
        device: cpu, cuda, cuda:1 or mps; the first GPU, or the CPU, when None.
        device_map: auto, balanced, ...: spread the target over several devices (accelerate); None for one device.

    Raises:
        SpecError: unknown dtype.
        ReprieveError: a model that cannot be found or loaded.
        PairError: the two do not share a tokenizer.
    """
    for name, value in (("target", target), ("draft", draft)):
        if not isinstance(value, str | Path | None) or (value is None and name == "target"):
            raise SpecError(f"{name} must be a hub id or a folder, got {value!r}")
    require_choice("dtype", dtype, DTYPES)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    if dtype == INT8:
        require_int8(device)
        if device_map is not None:
            raise SpecError(f"dtype int8 requires one device, got device_map {device_map!r}")
    if str(target) in BUNDLES and draft is None:
        draft = target
    target_model, tokenizer = load_model(target, "target", dtype, device, device_map)
    draft_model = None
    if draft is not None:
        draft_model, draft_tokenizer = load_model(draft, "draft", dtype, device)
        require_same_tokenizer(tokenizer, draft_tokenizer, str(target), str(draft))
        num_rows = draft_model.config.get_text_config().vocab_size
        if num_rows < len(tokenizer):
            raise PairError(
                f"draft {str(draft)!r} has {num_rows} token embeddings, its tokenizer {len(tokenizer)} tokens"
            )
    return Pair(target_model, draft_model, tokenizer, str(target), None if draft is None else str(draft))


def load_configured(
    settings: PairSettings, announce: Callable[[str], None] = lambda line: None, *, decodes: bool = True
) -> Pair:
    """Load the pair named by settings and set the threads; raises the errors of `load_pair`.

    Args:
        announce: called with a line if a trial chose the threads.
        decodes: True if forwards read a few tokens; large batches use all cores unless the settings name a number.
    """
    pair = load_pair(**settings.models)
    if pair.device.type == "cpu" and (decodes or settings.num_threads):
        chosen = settings.num_threads or _choose_threads(pair, torch.get_num_threads())
        if settings.num_threads is None and chosen != torch.get_num_threads():
            announce(f"using 1 thread: {torch.get_num_threads()} are no faster here (--num-threads overrides)")
        torch.set_num_threads(chosen)
    return pair


def _choose_threads(pair: Pair, all_threads: int) -> int:
    """Return 1, or `all_threads` if a forward of the target is clearly faster with them."""
    if all_threads == 1 or num_weights(pair.target) > _LARGE_MODEL:
        return all_threads
    times: dict[int, list[float]] = {1: [], all_threads: []}
    model = pair.cached_target()
    try:
        for _ in range(_TRIALS):
            for num_threads, measured in times.items():
                torch.set_num_threads(num_threads)
                measured.append(forward_seconds(model, _TRIAL_TOKENS))
    finally:
        torch.set_num_threads(all_threads)
    return all_threads if statistics.median(times[1]) > _THREAD_GAIN * statistics.median(times[all_threads]) else 1


def start_worker() -> None:
    """Prepare a worker process: one thread, no progress bars, Ctrl-C left to the parent, exit with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    logging.disable_progress_bar()
    torch.set_num_threads(1)


def _leave_with_parent(parent: int) -> None:
    """Exit if the parent is killed: it cannot notify its workers, which would otherwise wait forever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
