"""CoSpec's warm-up: an arbiter from soft labels at the mismatches of plain speculative rounds (appendix C.1)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from reprieve.engine import Pair
from reprieve.errors import ReprieveError, SpecError, require_range
from reprieve.heads.arbiter import Arbiter, ArbiterShape
from reprieve.heads.binding import digest
from reprieve.labelling.arbitration import soft_label
from reprieve.labelling.records import ProblemLabels, TracedRound
from reprieve.metrics import BranchChoices
from reprieve.models.arbiter import ArbiterModel, ArbitrationRound
from reprieve.pair.checkpoints import load_checkpoint, save_checkpoint
from reprieve.training.arbitration import warm_up_loss
from reprieve.training.best_arbiter import keep_best
from reprieve.training.run_log import RunLog

_CHECKPOINT_SECONDS = 120.0
_REJECT_ALL = -3.0  # a logit: pi(accept) is 5%, enough to explore from


@dataclass(frozen=True)
class WarmUp:
    """Settings of the supervised stage; the defaults are the paper's, where it says.

    Args:
        shape: of the arbiter's adapters.
        decisions_per_update: labelled mismatches in one update.
        num_epochs: over the labels.
        held_out: share of the problems left out, on which the best epoch is chosen.
        tie: relabels: what accepting is worth where both branches end equally well. At 0.5 a label is linear in the
            gap of utilities, so that lambda 0.5 asks which branch ends better. None keeps the traces' own labels.
        threshold: lambda, at which choices are counted, and which the arbiter recommends.
    """

    shape: ArbiterShape = field(default_factory=ArbiterShape)
    learning_rate: float = 1e-4
    weight_decay: float = 0.1
    decisions_per_update: int = 256
    num_epochs: int = 3
    held_out: float = 0.1
    tie: float | None = None
    threshold: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tie is not None:
            require_range("tie", self.tie, 0.0, 1.0)
        for name in ("decisions_per_update", "num_epochs"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be 1 or more, got {getattr(self, name)!r}")
        require_range("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        require_range("weight_decay", self.weight_decay, 0.0, 10.0)
        require_range("held_out", self.held_out, 0.0, 0.9, low_open=True)
        require_range("threshold", self.threshold, 0.0, 1.0)


@dataclass(frozen=True)
class LabelledAnswer:
    """One answer's rounds with soft labels at their mismatches."""

    problem_id: str
    context_ids: tuple[int, ...]
    rounds: tuple[ArbitrationRound, ...]
    traced: tuple[TracedRound, ...]

    @classmethod
    def of(cls, problem: ProblemLabels) -> LabelledAnswer | None:
        """None where nothing is labelled."""
        traced = tuple(r for r in problem.rounds if any(label is not None for label in r.labels))
        if not traced:
            return None
        start = len(problem.prompt_ids)
        rounds = tuple(ArbitrationRound(start + r.start, r.draft_ids, r.target_ids) for r in traced)
        return cls(problem.problem_id, problem.prompt_ids + problem.response_ids, rounds, traced)

    @cached_property
    def num_labels(self) -> int:
        return sum(label is not None for traced in self.traced for label in traced.labels)


def require_traces(problems: Sequence[ProblemLabels]) -> list[LabelledAnswer]:
    """The answers that have labelled rounds.

    Raises:
        ReprieveError: of fewer than two problems.
    """
    answers = [answer for problem in problems if (answer := LabelledAnswer.of(problem)) is not None]
    if (num := len({answer.problem_id for answer in answers})) < 2:
        raise ReprieveError(
            f"warm-up needs traces of 2 problems or more with labelled mismatches, got {num}; "
            "`reprieve mine arbitration` makes them"
        )
    return answers


def warm_up(
    pair: Pair,
    problems: Sequence[ProblemLabels],
    task: str,
    folder: Path,
    *,
    num_draft_tokens: int,
    settings: WarmUp | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Arbiter:
    """Train an arbiter on traces; resumes from its checkpoint.

    Args:
        task: the traces' task, by name.
        folder: gets `checkpoint.safetensors` and `metrics.jsonl`, and the best epoch's arbiter in `arbiter/`.
        num_draft_tokens: K of the traces.

    Returns:
        The arbiter of least loss on held-out problems.

    Raises:
        ReprieveError: too few traces, or a checkpoint of another recipe.
    """
    trainer = _Trainer(pair, require_traces(problems), task, folder, num_draft_tokens, settings or WarmUp())
    trainer.train(progress)
    return Arbiter.from_pretrained(folder / "arbiter")


class _Trainer:
    def __init__(
        self,
        pair: Pair,
        answers: list[LabelledAnswer],
        task: str,
        folder: Path,
        num_draft_tokens: int,
        settings: WarmUp,
    ) -> None:
        assert pair.draft is not None
        self.pair = pair
        self.task = task
        self.folder = folder
        self.num_draft_tokens = num_draft_tokens
        self.settings = settings
        ids = sorted({answer.problem_id for answer in answers})  # a problem may have been traced more than once
        random.Random(settings.seed).shuffle(ids)
        num_held = min(len(ids) - 1, max(1, round(len(ids) * settings.held_out)))  # some are left to train on
        held = set(ids[:num_held])
        self.held = [answer for answer in answers if answer.problem_id in held]
        self.answers = [answer for answer in answers if answer.problem_id not in held]
        self.model = ArbiterModel(pair.draft, settings.shape)
        self.optimizer = torch.optim.AdamW(
            self.model.own_tensors.values(),
            lr=settings.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=settings.weight_decay,
        )
        self.path = folder / "checkpoint.safetensors"
        self.update, self.seconds = 0, 0.0

    @cached_property
    def epochs(self) -> list[list[list[LabelledAnswer]]]:
        """The batches of every epoch, fixed by the seed, so that a resumed training goes on with the next."""
        rng = random.Random(self.settings.seed + 1)
        epochs = []
        for _ in range(self.settings.num_epochs):
            order = list(self.answers)
            rng.shuffle(order)
            epochs.append(list(self._batches(order)))
        return epochs

    def _batches(self, order: Sequence[LabelledAnswer]) -> Iterable[list[LabelledAnswer]]:
        batch: list[LabelledAnswer] = []
        for answer in order:
            batch.append(answer)
            if sum(item.num_labels for item in batch) >= self.settings.decisions_per_update:
                yield batch
                batch = []
        if batch:
            yield batch

    @cached_property
    def recipe(self) -> str:
        """What a checkpoint must have been made with."""
        labels = digest(repr([self.answers, self.held]).encode())
        return repr((self.settings, self.pair.identity.draft_weights, labels))

    def train(self, progress: Callable[[int, int], None]) -> None:
        restored = load_checkpoint(self.path, self.model, self.optimizer, recipe=self.recipe)
        if restored is not None:
            self.update, self.seconds = restored
        log = RunLog(self.folder, first_step=self.update + 1 if self.update else 0)
        ends = list(itertools.accumulate(len(batches) for batches in self.epochs))
        batches = [batch for epoch in self.epochs for batch in epoch]
        saved = time.perf_counter()
        try:
            while self.update < len(batches):
                started = time.perf_counter()
                log.log(self.update + 1, "train", {"loss": self._one_update(batches[self.update])})
                self.update += 1
                self.seconds += time.perf_counter() - started
                if self.update in ends:
                    self._validate(log)
                # Only here: a checkpoint of a step whose epoch was not validated yet would skip it for good.
                if self.update in ends or time.perf_counter() - saved > _CHECKPOINT_SECONDS:
                    self._checkpoint()
                    saved = time.perf_counter()
                progress(self.update, len(batches))
        finally:
            log.close()

    def _checkpoint(self) -> None:
        save_checkpoint(
            self.path, self.model, self.optimizer, recipe=self.recipe, update=self.update, seconds=self.seconds
        )

    def _one_update(self, batch: Sequence[LabelledAnswer]) -> float:
        self.model.train()
        torch.manual_seed(self.settings.seed * 1_000_003 + self.update)  # of the dropout: a resumed run repeats it
        self.optimizer.zero_grad()
        num = sum(answer.num_labels for answer in batch)
        total = 0.0
        for answer in batch:
            logits, labels, *_ = self._at_mismatches(answer)
            loss = warm_up_loss(logits, labels) / num
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.model.own_tensors.values(), 1.0)
        self.optimizer.step()
        return total

    def _at_mismatches(self, answer: LabelledAnswer) -> tuple[torch.Tensor, ...]:
        """Logits, labels and both utilities at an answer's labelled mismatches, [n] each."""
        judged = self.model.judge(answer.context_ids, answer.rounds)
        places = [
            (number, place)
            for number, traced in enumerate(answer.traced)
            for place, label in enumerate(traced.labels)
            if label is not None
        ]
        logits = torch.stack([judged[number][place] for number, place in places])
        labels, draft, target = (
            [getattr(answer.traced[number], name)[place] for number, place in places]
            for name in ("labels", "draft_utilities", "target_utilities")
        )
        if (tie := self.settings.tie) is not None:
            labels = [soft_label(ours, theirs, tie=tie) for ours, theirs in zip(draft, target, strict=True)]
        columns = (labels, draft, target)
        return logits, *(torch.tensor(column, device=logits.device, dtype=torch.float32) for column in columns)

    @torch.no_grad()
    def _validate(self, log: RunLog) -> None:
        """Measure on held-out problems, and keep the arbiter where it is the best yet."""
        self.model.eval()
        found = [self._at_mismatches(answer) for answer in self.held]
        logits, labels, draft, target = (torch.cat(parts) for parts in zip(*found, strict=True))
        accepted = logits.sigmoid() > self.settings.threshold
        choices = BranchChoices(accepted.tolist(), draft.tolist(), target.tolist())
        reached = {"loss": float(warm_up_loss(logits, labels)) / len(logits), **choices.shares()}
        log.log(self.update, "validation", reached)
        made = Arbiter(
            tensors=self.model.snapshot(),
            shape=self.settings.shape,
            pair=self.pair.identity,
            task=self.task,
            threshold=self.settings.threshold,
            num_draft_tokens=self.num_draft_tokens,
            training={
                "stage": "sft",
                "recipe": digest(self.recipe.encode()),
                "settings": asdict(self.settings),
                "num_answers": len(self.answers),
                "num_labels": sum(answer.num_labels for answer in self.answers),
                "num_held_out": len(self.held),
                "update": self.update,
                "seconds": round(self.seconds),
                "validation": reached,
            },
        )
        keep_best(self.folder / "arbiter", made, measure="loss", lower=True)


def untrained(pair: Pair, shape: ArbiterShape, task: str, num_draft_tokens: int) -> Arbiter:
    """An arbiter that has learned nothing and rejects nearly everything: training without a warm-up (Table 6)."""
    assert pair.draft is not None
    model = ArbiterModel(pair.draft, shape)
    with torch.no_grad():
        model.head.bias.fill_(_REJECT_ALL)
    return Arbiter(
        tensors=model.snapshot(),
        shape=shape,
        pair=pair.identity,
        task=task,
        threshold=0.6,
        num_draft_tokens=num_draft_tokens,
        training={"stage": "none"},
    )
