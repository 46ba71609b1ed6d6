"""Train the draft length head (FSD, section 7.1) on blocks drafted to their full length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import log_loss
from torch import Tensor

from reprieve.drafters.length import RecentAcceptance, position_feature, token_log_prob
from reprieve.engine import Pair
from reprieve.errors import SpecError
from reprieve.heads.length import SCALARS, LengthHead
from reprieve.identity import digest
from reprieve.models.cached_model import eos_token_ids, forward_seconds
from reprieve.rules import Rule
from reprieve.settings import SamplingParams
from reprieve.tasks import TaskProblem
from reprieve.tasks.prompting import prompt_ids_of
from reprieve.training.classifiers import LinearFit, fit_linear
from reprieve.training.features import auc
from reprieve.training.loop import Learner, train
from reprieve.training.settings import LengthTraining
from reprieve.types import Progress, no_progress

_PRICES = tuple(round(0.02 * step, 2) for step in range(1, 48))


def train_length(
    pair: Pair,
    rule: Rule,
    task: str,
    problems: Sequence[TaskProblem],
    *,
    max_new_tokens: int,
    settings: LengthTraining,
    folder: Path,
    progress: Progress = no_progress,
) -> LengthHead:
    """Decode problems with full-length blocks, then fit the acceptance probabilities of each token and the next one.

    The price maximises tokens per second on held-out problems, given the times measured in this run.

    Args:
        rule: with heads attached; problems cycle through the settings' thresholds and temperatures.
        folder: for the checkpoint from which an interrupted run resumes.

    Raises:
        SpecError: thresholds for a rule without a dial, or tokens that are all accepted or all rejected.
        ReprieveError: a checkpoint of another recipe.
    """
    require_thresholds(rule, settings)
    learner = _Learner(pair, rule, task, problems, max_new_tokens, settings)
    train(learner, folder, progress=progress)
    return learner.head()


def require_thresholds(rule: Rule, settings: LengthTraining) -> None:
    """Refuse thresholds that a rule does not support, and a rule without a threshold if none are given.

    Raises:
        SpecError: names them.
    """
    if rule.dial is None and settings.thresholds:
        raise SpecError(f"thresholds: rule {rule.name} has no dial, got {list(settings.thresholds)}")
    if rule.dial is not None and rule.dial_value is None and not settings.thresholds:
        lacks = f"rule {rule.spec} sets no {rule.dial.name}"
        raise SpecError(f"thresholds: {lacks}; name the values that the head should serve")
    for threshold in settings.thresholds:
        try:
            rule.with_dial(threshold)
        except SpecError as error:
            raise SpecError(f"thresholds: {error}") from None


class Recorder:
    """Draft length policy that never stops early and records a head's inputs and the outcomes.

    Args:
        most: K.
        eos_ids: end-of-text tokens; tokens after one are not recorded.
    """

    reads_states = True

    def __init__(self, most: int, eos_ids: frozenset[int]) -> None:
        self.most = most
        self.eos_ids = eos_ids
        self.hidden: list[Tensor] = []  # [1, D] each
        self.rows: list[list[float]] = []  # log_prob, position, recent; dial and temperature are per answer
        self.rounds: list[tuple[int, int]] = []  # per round: rows, accepted tokens

    def start(self, dial: float | None, temperature: float) -> Recorder:
        self.hidden, self.rows, self.rounds = [], [], []
        self._recent = RecentAcceptance()
        return self

    def begin(self) -> int:
        self._first, self._ended = len(self.rows), False
        return self.most

    def should_continue(self, hidden: Tensor | None, logits: Tensor, token_id: Tensor) -> bool:
        assert hidden is not None
        if not self._ended:
            self.hidden.append(hidden.float().cpu())
            log_prob = float(token_log_prob(logits, token_id))
            self.rows.append([log_prob, position_feature(len(self.rows) - self._first), self._recent.share])
            self._ended = int(token_id) in self.eos_ids
        return True

    def update(self, num_drafted: int, num_accepted: int) -> None:
        num_rows = len(self.rows) - self._first
        self.rounds.append((num_rows, min(num_accepted, num_rows) if self._ended else num_accepted))
        self._recent.update(num_drafted, num_accepted)


@dataclass(frozen=True)
class _Costs:
    """Times in milliseconds."""

    token: float  # drafting one
    more: float  # verifying one more
    round: float  # rest of a round

    def rate(self, rounds: Sequence[tuple[int, int]]) -> float:
        """Return tokens per millisecond for these drafted and accepted tokens per round."""
        drafted = sum(num_drafted for num_drafted, _ in rounds)
        committed = sum(num_accepted + 1 for _, num_accepted in rounds)
        return committed / (drafted * (self.token + self.more) + len(rounds) * self.round)


class _Learner(Learner):
    """Learner that decodes one problem per update; `head` fits the records."""

    def __init__(
        self,
        pair: Pair,
        rule: Rule,
        task: str,
        problems: Sequence[TaskProblem],
        max_new_tokens: int,
        settings: LengthTraining,
    ) -> None:
        if len(problems) < 2:
            raise SpecError(f"limit must be at least 2, to hold a problem out, got {len(problems)}")
        self.pair, self.rule, self.task, self.problems = pair, rule, task, problems
        self.max_new_tokens, self.settings = max_new_tokens, settings
        self.recorder = Recorder(settings.num_draft_tokens, eos_token_ids(pair.target, pair.tokenizer))
        self.decoder = pair.decoder(rule, num_draft_tokens=self.recorder)
        # For separately timed forwards, one of each kind per problem, because the load can change.
        self.timed_target, self.timed_draft = pair.cached_target(), pair.cached_draft()
        self.width = int(self.timed_draft.model.config.get_text_config().hidden_size)
        self.parts: dict[str, list[Tensor]] = {"hidden": [], "rows": [], "rounds": [], "seconds": []}
        self.dials = settings.thresholds or (() if rule.dial_value is None else (float(rule.dial_value),))
        self.cases: list[tuple[float | None, float]] = [
            (dial, temperature) for dial in self.dials or (None,) for temperature in settings.temperatures
        ]

    @property
    def num_updates(self) -> int:
        return len(self.problems)

    @cached_property
    def recipe(self) -> str:
        problems = digest(" ".join(problem.digest for problem in self.problems).encode())
        return repr((self.settings, self.rule.spec, self.task, problems, self.pair.identity, self.max_new_tokens))

    def one_update(self, update: int) -> dict[str, float]:
        dial, temperature = self.cases[update % len(self.cases)]
        problem = self.problems[update]
        params = SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=temperature, seed=self.settings.seed + update
        )
        generation = self.decoder.generate(prompt_ids_of(problem, self.pair.tokenizer), params, dial=dial, timed=True)
        seen, spent = self.recorder, generation.seconds_by_part
        about = [0.0 if dial is None else dial, temperature]
        width = len(SCALARS) - 1
        self.parts["hidden"].append(torch.cat(seen.hidden) if seen.hidden else torch.zeros(0, self.width))
        self.parts["rows"].append(torch.tensor([[*row, *about] for row in seen.rows]).reshape(-1, width))
        self.parts["rounds"].append(torch.tensor([[update, *each] for each in seen.rounds]).reshape(-1, 3))
        beside = sum(spent[part] for part in ("rule", "advise", "commit")) / generation.num_rounds
        drafting = forward_seconds(self.timed_draft, 1)
        one, block = (forward_seconds(self.timed_target, size) for size in (1, self.recorder.most + 1))
        self.parts["seconds"].append(torch.tensor([[drafting, beside, one, block]]))
        return {"rounds": len(seen.rounds), "tokens_per_round": generation.tokens_per_round}

    def state(self) -> dict[str, Tensor]:
        return {name: torch.cat(parts) for name, parts in self.parts.items() if parts}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.parts = {name: [tensors[name]] for name in self.parts}

    def head(self) -> LengthHead:
        """Fit both regressions and choose the price.

        Raises:
            SpecError: tokens of one kind only.
        """
        settings, seen = self.settings, _Seen(self.state(), self.settings)
        fits = [self._fit(seen, *labels) for labels in (seen.this, seen.after)]
        this, after = (fit.scores(seen.features) for fit in fits)
        costs = self._costs()
        rates = {price: costs.rate(seen.stopped(this, after, price)) for price in _PRICES}
        price = max(rates, key=rates.__getitem__)
        constant = {k: costs.rate(seen.cut(k)) for k in range(1, settings.num_draft_tokens + 1)}
        best_k = max(constant, key=constant.__getitem__)
        drafted, accepted = (sum(counts) for counts in zip(*seen.stopped(this, after, price), strict=True))
        tensors = [fit.tensors() for fit in fits]
        return LengthHead(
            hidden_weight=torch.stack([weight[: self.width] for weight, _ in tensors]),
            scalar_weight=torch.stack([torch.cat([bias[None], weight[self.width :]]) for weight, bias in tensors]),
            rule=self.rule.name,
            lowest=min(self.dials, default=0.0),
            highest=max(self.dials, default=0.0),
            price=price,
            most=settings.num_draft_tokens,
            pair=self.pair.identity,
            task=self.task,
            training={
                "num_problems": len(self.problems),
                "num_held_out": seen.num_held,
                "num_tokens": len(seen.features),
                "thresholds": list(self.dials),
                "temperatures": list(settings.temperatures),
                "seed": settings.seed,
                "auc_held_out": [
                    auc(passed[judged & seen.held], scores[judged & seen.held])
                    for (judged, passed), scores in ((seen.this, this), (seen.after, after))
                ],
                "accepted_share": float(accepted / drafted),
                "best_constant": best_k,
                "expected_over_best_constant": rates[price] / constant[best_k],
                "draft_ms": costs.token,
                "verify_more_ms": costs.more,
                "round_ms": costs.round,
            },
        )

    def _fit(self, seen: _Seen, judged: np.ndarray, passed: np.ndarray) -> LinearFit:
        """Fit one regression per C; return the one with the lowest log loss on held-out tokens."""
        train, held = judged & ~seen.held, judged & seen.held
        for side, name in ((train, "training"), (held, "held-out")):
            if len(np.unique(passed[side])) < 2:
                raise SpecError(
                    f"the {name} problems must hold accepted and rejected tokens, got {passed[side].sum()} "
                    f"accepted of {side.sum()}; raise limit"
                )
        fits = [fit_linear(seen.features[train], passed[train], c) for c in self.settings.grid]
        return min(fits, key=lambda fit: log_loss(passed[held], fit.scores(seen.features[held])))

    def _costs(self) -> _Costs:
        """Return medians over the problems."""
        drafting, beside, one, block = (1000 * torch.cat(self.parts["seconds"]).double().quantile(0.5, dim=0)).tolist()
        return _Costs(drafting, max(0.0, block - one) / self.settings.num_draft_tokens, one + beside)


class _Seen:
    """Records with one row per drafted token; for it and for the next, whether it was judged, and passed."""

    def __init__(self, state: Mapping[str, Tensor], settings: LengthTraining) -> None:
        self.features = torch.cat([state["hidden"], state["rows"]], dim=1).double().numpy()
        rounds = state["rounds"].numpy()  # problem, rows, accepted
        problems, sizes, accepted = rounds.T
        position = np.concatenate([np.arange(size) for size in sizes])
        taken = np.repeat(accepted, sizes)
        self.this = position <= taken, position < taken
        self.after = position < taken, position + 1 < taken
        order = np.random.default_rng(settings.seed).permutation(problems.max() + 1)
        held = np.isin(problems, order[: max(1, round(settings.held_out * len(order)))])
        self.held = np.repeat(held, sizes)
        self.num_held = len(np.unique(problems[held]))
        firsts = np.cumsum(sizes) - sizes
        self._rounds: list[list[int]] = np.stack([firsts, sizes, accepted], axis=1)[held].tolist()

    def cut(self, k: int) -> list[tuple[int, int]]:
        """Return drafted and accepted tokens of the held-out rounds at a constant K."""
        return [(min(k, size + 1), min(k, num)) for _, size, num in self._rounds]

    def stopped(self, this: np.ndarray, after: np.ndarray, price: float) -> list[tuple[int, int]]:
        """Return the same counts if blocks end as in `LearnedLength`, given the probabilities of every row."""
        ended = []
        for first, size, num in self._rounds:
            chances = this[first : first + size].cumprod() * after[first : first + size]
            below = np.flatnonzero(chances < price)
            drafted = int(below[0]) + 1 if len(below) else size + 1
            ended.append((drafted, min(drafted, num)))
        return ended
