"""CoSpec's warm-up: train an arbiter on soft labels at the mismatches of plain speculative rounds (appendix C.1)."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from reprieve.engine import Pair
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.arbiter import Arbiter
from reprieve.heads.binding import PairIdentity, digest
from reprieve.mining.store import LabelStore, ProblemLabels, TracedRound
from reprieve.mining.traces import LABELS_VERSION, soft_label
from reprieve.models.arbiter import ArbiterModel, ArbitrationRound
from reprieve.stats import BranchChoices
from reprieve.training.loop import Learner, Progress, load_network, network_state, train
from reprieve.training.readings import RoundReader, num_readings
from reprieve.training.settings import WarmUp


@dataclass(frozen=True)
class LabelledAnswer:
    """Rounds of one answer with soft labels at their mismatches."""

    problem_id: str
    context_ids: tuple[int, ...]
    rounds: tuple[ArbitrationRound, ...]
    traced: tuple[TracedRound, ...]

    @classmethod
    def of(cls, problem: ProblemLabels) -> LabelledAnswer | None:
        """Return the labelled rounds of a problem, or None if it has no labels."""
        traced = tuple(r for r in problem.rounds if any(label is not None for label in r.labels))
        if not traced:
            return None
        start = len(problem.prompt_ids)
        rounds = tuple(ArbitrationRound(start + r.start, r.draft_ids, r.target_ids) for r in traced)
        return cls(problem.problem_id, problem.prompt_ids + problem.response_ids, rounds, traced)

    @cached_property
    def num_labels(self) -> int:
        return sum(label is not None for traced in self.traced for label in traced.labels)


@dataclass(frozen=True)
class Traces:
    """Traces from one or more stores, all with the same task and K."""

    problems: list[ProblemLabels]
    task: str
    num_draft_tokens: int
    stores: tuple[LabelStore, ...]

    def require_pair(self, pair: PairIdentity) -> None:
        """Refuse a pair other than the traces' own.

        Raises:
            PairError: names both.
        """
        for store in self.stores:
            store.require_pair(pair)


def read_traces(folders: Sequence[Path]) -> Traces:
    """Read the traces of `reprieve mine arbitration`.

    Raises:
        SpecError: labels of another miner or version, or of more than one task or K.
        ReprieveError: fewer than two problems with labelled rounds, or a store that cannot be read.
    """
    stores = tuple(LabelStore(folder) for folder in folders)
    for folder, store in zip(folders, stores, strict=True):
        if store.manifest.get("miner") != "arbitration":
            raise SpecError(f"--labels must hold traces of `reprieve mine arbitration`, {str(folder)!r} does not")
        if (version := store.manifest.get("labels_version")) != LABELS_VERSION:
            raise SpecError(
                f"--labels must hold labels of version {LABELS_VERSION}, {str(folder)!r} has {version}: mine again"
            )
    problems = [problem for store in stores for problem in store.problems()]
    require_traces(problems)
    made_at = {(store.manifest["task"], store.manifest["num_draft_tokens"]) for store in stores}
    if len(made_at) != 1:
        raise SpecError(f"--labels must name traces of one task and K, got {sorted(made_at)}")
    task, num_draft_tokens = made_at.pop()
    return Traces(problems, task, num_draft_tokens, stores)


def require_traces(problems: Sequence[ProblemLabels]) -> list[LabelledAnswer]:
    """Return the answers that have labelled rounds.

    Raises:
        ReprieveError: fewer than two problems.
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
    progress: Progress = lambda done, total: None,
) -> Arbiter:
    """Train an arbiter on traces; resumes from its checkpoint.

    Args:
        task: the traces' task, by name.
        folder: output folder for `checkpoint.safetensors`, `metrics.jsonl`, and the best epoch's arbiter in `arbiter/`.
        num_draft_tokens: K of the traces.

    Returns:
        The arbiter with the smallest loss on held-out problems.

    Raises:
        ReprieveError: too few traces, or a checkpoint of another recipe.
    """
    learner = _Learner(pair, require_traces(problems), task, folder, num_draft_tokens, settings or WarmUp())
    train(learner, folder, progress=progress)
    return Arbiter.from_pretrained(folder / "arbiter")


class _Learner(Learner):
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
        ids = sorted({answer.problem_id for answer in answers})  # a problem can occur in several stores
        random.Random(settings.seed).shuffle(ids)
        num_held = min(len(ids) - 1, max(1, round(len(ids) * settings.held_out)))  # keep some for training
        held = set(ids[:num_held])
        self.held = [answer for answer in answers if answer.problem_id in held]
        self.answers = [answer for answer in answers if answer.problem_id not in held]
        self.shape = settings.shape
        self._reader: RoundReader | None = None
        self._read: dict[int, list[ArbitrationRound]] = {}  # by id() of the answer
        if settings.readings:
            self.shape = dataclasses.replace(settings.shape, num_readings=num_readings(pair))
            self._reader = RoundReader(pair)
        self.model = ArbiterModel(pair.draft, self.shape)
        self.optimizer = torch.optim.AdamW(
            self.model.own_tensors.values(),
            lr=settings.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=settings.weight_decay,
        )

    @cached_property
    def epochs(self) -> list[list[list[LabelledAnswer]]]:
        """Batches of every epoch, determined by the seed, so that a resumed run continues with the next batch."""
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
        labels = digest(repr([self.answers, self.held]).encode())
        return repr((self.settings, self.pair.identity.draft_weights, labels))

    @cached_property
    def _ends(self) -> list[int]:
        """Cumulative number of updates at the end of each epoch."""
        return list(itertools.accumulate(len(batches) for batches in self.epochs))

    @property
    def num_updates(self) -> int:
        return self._ends[-1]

    def validates_after(self, update: int) -> bool:
        return update in self._ends

    def state(self) -> dict[str, Tensor]:
        return network_state(self.model, self.optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        load_network(self.model, self.optimizer, tensors)

    @cached_property
    def _batches_in_order(self) -> list[list[LabelledAnswer]]:
        return [batch for epoch in self.epochs for batch in epoch]

    def one_update(self, update: int) -> dict[str, float]:
        batch = self._batches_in_order[update]
        self.model.train()
        torch.manual_seed(self.settings.seed * 1_000_003 + update)  # for dropout, so that a resumed run repeats it
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
        return {"loss": total}

    def _at_mismatches(self, answer: LabelledAnswer) -> tuple[torch.Tensor, ...]:
        """Return logits, labels and both utilities at an answer's labelled mismatches, [n] each."""
        judged = self.model.judge(answer.context_ids, self._rounds(answer))
        mismatches = [
            (number, node)
            for number, traced in enumerate(answer.traced)
            for node, label in enumerate(traced.labels)
            if label is not None
        ]
        logits = torch.stack([judged[number][node] for number, node in mismatches])
        labels, draft, target = (
            [getattr(answer.traced[number], name)[node] for number, node in mismatches]
            for name in ("labels", "draft_utilities", "target_utilities")
        )
        if (tie := self.settings.tie) is not None:
            labels = [soft_label(*utilities, tie=tie) for utilities in zip(draft, target, strict=True)]
        columns = (labels, draft, target)
        return logits, *(torch.tensor(column, device=logits.device, dtype=torch.float32) for column in columns)

    def _rounds(self, answer: LabelledAnswer) -> Sequence[ArbitrationRound]:
        """Return an answer's rounds, with readings for an arbiter that reads them; cached for further epochs."""
        if self._reader is None:
            return answer.rounds
        if id(answer) not in self._read:
            self._read[id(answer)] = self._reader.read(answer.context_ids, answer.rounds)
        return self._read[id(answer)]

    @torch.no_grad()
    def validate(self, update: int, seconds: float) -> dict[str, float]:
        """Measure on held-out problems, and save the arbiter if it is the best so far."""
        self.model.eval()
        parts_of = [self._at_mismatches(answer) for answer in self.held]
        logits, labels, draft, target = (torch.cat(parts) for parts in zip(*parts_of, strict=True))
        accepted = logits.sigmoid() > self.settings.lambda_
        choices = BranchChoices(accepted.tolist(), draft.tolist(), target.tolist())
        reached = {"loss": float(warm_up_loss(logits, labels)) / len(logits), **choices.shares()}
        arbiter = Arbiter(
            tensors=self.model.snapshot(),
            shape=self.shape,
            pair=self.pair.identity,
            task=self.task,
            threshold=self.settings.lambda_,
            num_draft_tokens=self.num_draft_tokens,
            training={
                "stage": "sft",
                "recipe": digest(self.recipe.encode()),
                "settings": asdict(self.settings),
                "num_answers": len(self.answers),
                "num_labels": sum(answer.num_labels for answer in self.answers),
                "num_held_out": len(self.held),
                "update": update,
                "seconds": round(seconds),
                "validation": reached,
            },
        )
        keep_best(self.folder / "arbiter", arbiter, measure="loss", lower=True)
        return reached


def keep_best(folder: Path, arbiter: Arbiter, *, measure: str, lower: bool = False) -> None:
    """Save an arbiter, unless the one already saved by the same training run is at least as good.

    Args:
        measure: key of `training["validation"]` to compare; larger is better, or smaller with `lower`.

    Raises:
        ReprieveError: the saved head is not an arbiter.
    """
    if arbiter.training["update"] > 0 and (folder / "config.json").exists():
        before = Arbiter.from_pretrained(folder).training
        old, new = (training["validation"][measure] for training in (before, arbiter.training))
        if before["recipe"] == arbiter.training["recipe"] and (old <= new if lower else old >= new):
            return
    arbiter.save_pretrained(folder)


def warm_up_loss(
    logits: Tensor,  # [n], of accepting, at mismatches
    labels: Tensor,  # [n], soft, 0 to 1
) -> Tensor:  # [], the sum
    """Return the cross-entropy to soft labels at mismatches (Eq. 29)."""
    return binary_cross_entropy_with_logits(logits, labels, reduction="sum")
