"""CoSpec's warm-up: train an arbiter on soft labels at the mismatches of plain speculative rounds (appendix C.1).

An arbiter with readings (ours) also reads values from verification for each drafted token.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from reprieve.engine import Pair
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.classifiers import READINGS, Arbiter
from reprieve.heads.features import TokenStates, assemble, distribution_scalars
from reprieve.identity import digest
from reprieve.mining.store import LabelStore, ProblemLabels
from reprieve.mining.traces import LABELS_VERSION, soft_label
from reprieve.models.arbiter import ArbiterModel, ArbitrationRound
from reprieve.models.cached_model import ResponseTree
from reprieve.training.loop import Learner, train
from reprieve.training.settings import ArbiterTraining
from reprieve.types import Progress, no_progress

_VALUES = ("labels", "draft_utilities", "target_utilities")


@dataclass
class LabelledAnswer:
    """Rounds of one answer with soft labels at their mismatches."""

    problem_id: str
    context_ids: tuple[int, ...]
    rounds: Sequence[ArbitrationRound]
    nodes: list[tuple[int, int]]  # of the labelled mismatches: round, and drafted token in it
    values: list[tuple[float, ...]]  # of each: soft label, and utilities of the draft's and of the target's side

    @classmethod
    def of(cls, problem: ProblemLabels) -> LabelledAnswer | None:
        """Return the labelled rounds of a problem, or None if it has no labels."""
        start = len(problem.prompt_ids)
        answer = cls(problem.problem_id, problem.prompt_ids + problem.response_ids, rounds=[], nodes=[], values=[])
        rounds: list[ArbitrationRound] = []
        for traced in problem.rounds:
            nodes = [node for node, label in enumerate(traced.labels) if label is not None]
            for node in nodes:
                answer.nodes.append((len(rounds), node))
                answer.values.append(tuple(getattr(traced, name)[node] for name in _VALUES))
            if nodes:
                rounds.append(ArbitrationRound(start + traced.start, traced.draft_ids, traced.target_ids))
        answer.rounds = rounds
        return answer if rounds else None


@dataclass(frozen=True)
class Traces:
    """Labelled answers of one task and K, and the stores that they come from."""

    answers: list[LabelledAnswer]
    task: str
    num_draft_tokens: int
    stores: Sequence[LabelStore] = ()


def read_traces(folders: Sequence[Path]) -> Traces:
    """Read the traces of `reprieve mine arbitration`.

    Raises:
        SpecError: labels of another miner or version, or of more than one task or K.
        ReprieveError: fewer than two problems with labelled rounds, or a store that cannot be read.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise SpecError(f"--labels must name different stores, got {', '.join(map(str, folders))}")
    stores = [LabelStore(folder) for folder in folders]
    for store in stores:
        name, version = str(store.folder), store.manifest.get("labels_version")
        if store.manifest.get("miner") != "arbitration":
            raise SpecError(f"--labels must hold traces of `reprieve mine arbitration`, {name!r} does not")
        if version != LABELS_VERSION:
            raise SpecError(
                f"--labels must hold labels of version {LABELS_VERSION}, {name!r} has {version}: mine again"
            )
    problems = [problem for store in stores for problem in store.problems()]
    answers = require_traces(problems)
    made_at = {(store.manifest["task"], store.manifest["num_draft_tokens"]) for store in stores}
    if len(made_at) != 1:
        raise SpecError(f"--labels must name traces of one task and K, got {sorted(made_at)}")
    task, num_draft_tokens = made_at.pop()
    return Traces(answers, task, num_draft_tokens, stores)


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
    pair: Pair, traces: Traces, folder: Path, *, settings: ArbiterTraining, progress: Progress = no_progress
) -> Arbiter:
    """Train an arbiter on traces; resumes from its checkpoint.

    Args:
        folder: output folder for `checkpoint.safetensors`, `metrics.jsonl`, and the best epoch's arbiter in `arbiter/`.

    Returns:
        The arbiter with the smallest loss on held-out problems.

    Raises:
        ReprieveError: a checkpoint of another recipe.
    """
    learner = _Learner(pair, traces, folder, settings)
    train(learner, folder, progress=progress)
    return Arbiter.from_pretrained(folder / "arbiter")


class _Learner(Learner):
    def __init__(self, pair: Pair, traces: Traces, folder: Path, settings: ArbiterTraining) -> None:
        assert pair.draft is not None
        self.pair, self.traces, self.folder, self.settings = pair, traces, folder, settings
        answers = [dataclasses.replace(answer) for answer in traces.answers]  # readings are kept in them
        ids = sorted({answer.problem_id for answer in answers})  # a problem can occur in several stores
        random.Random(settings.seed).shuffle(ids)
        num_held = min(len(ids) - 1, max(1, round(len(ids) * settings.held_out)))  # keep some for training
        held = set(ids[:num_held])
        self.held = [answer for answer in answers if answer.problem_id in held]
        self.answers = [answer for answer in answers if answer.problem_id not in held]
        self.batches: list[list[LabelledAnswer]] = []  # of all epochs; a resumed run continues with the next
        self.ends: set[int] = set()  # updates that complete an epoch
        rng = random.Random(settings.seed + 1)
        for _ in range(settings.num_epochs):
            order = list(self.answers)
            rng.shuffle(order)
            self.batches += self._batches(order)
            self.ends.add(len(self.batches))
        self.shape = settings.shape
        self._reader: RoundReader | None = None
        if settings.readings:
            sizes = [int(model.config.get_text_config().hidden_size) for model in (pair.target, pair.draft)]
            self.shape = dataclasses.replace(settings.shape, num_readings=sum(sizes) + READINGS.num_scalars)
            self._reader = RoundReader(pair)
        self.model = ArbiterModel(pair.draft, self.shape)
        self.optimizer = torch.optim.AdamW(
            self.model.own_tensors.values(),
            lr=settings.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=settings.weight_decay,
        )

    def _batches(self, order: Sequence[LabelledAnswer]) -> Iterable[list[LabelledAnswer]]:
        batch: list[LabelledAnswer] = []
        for answer in order:
            batch.append(answer)
            if sum(len(item.nodes) for item in batch) >= self.settings.decisions_per_update:
                yield batch
                batch = []
        if batch:
            yield batch

    @cached_property
    def recipe(self) -> str:
        labels = digest(repr([self.answers, self.held]).encode())
        return repr((self.settings, self.pair.identity.draft_weights, labels))

    @property
    def num_updates(self) -> int:
        return len(self.batches)

    def validates_after(self, update: int) -> bool:
        return update in self.ends

    def one_update(self, update: int) -> dict[str, float]:
        batch = self.batches[update]
        self.model.train()
        torch.manual_seed(self.settings.seed * 1_000_003 + update)  # for dropout, so that a resumed run repeats it
        self.optimizer.zero_grad()
        num = sum(len(answer.nodes) for answer in batch)
        total = 0.0
        for answer in batch:
            logits, labels, *_ = self._at_mismatches(answer)
            loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / num  # Eq. 29
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.model.own_tensors.values(), 1.0)
        self.optimizer.step()
        return {"loss": total}

    def _at_mismatches(self, answer: LabelledAnswer) -> tuple[Tensor, ...]:
        """Return logits, labels and both utilities at an answer's labelled mismatches, [n] each."""
        if self._reader is not None and answer.rounds[0].readings is None:  # kept for further epochs
            answer.rounds = self._reader.read(answer.context_ids, answer.rounds)
        judged = self.model.judge(answer.context_ids, answer.rounds)
        logits = torch.stack([judged[number][node] for number, node in answer.nodes])
        labels, draft, target = zip(*answer.values, strict=True)
        if (tie := self.settings.tie) is not None:
            labels = tuple(soft_label(*utilities, tie=tie) for utilities in zip(draft, target, strict=True))
        columns = (labels, draft, target)
        return logits, *(torch.tensor(column, device=logits.device, dtype=torch.float32) for column in columns)

    @torch.no_grad()
    def validate(self, update: int, seconds: float) -> dict[str, float]:
        """Measure on held-out problems, and save the arbiter if it is the best so far."""
        self.model.eval()
        parts_of = [self._at_mismatches(answer) for answer in self.held]
        logits, labels, draft, target = (torch.cat(parts) for parts in zip(*parts_of, strict=True))
        gains = draft - target
        agreed = torch.where(logits.sigmoid() > self.settings.lambda_, gains >= 0, gains <= 0)
        loss = binary_cross_entropy_with_logits(logits, labels)
        reached = {"loss": float(loss), "agreement": float(agreed.float().mean())}
        arbiter = Arbiter(
            tensors=self.model.snapshot(),
            shape=self.shape,
            pair=self.pair.identity,
            task=self.traces.task,
            threshold=self.settings.lambda_,
            num_draft_tokens=self.traces.num_draft_tokens,
            training={
                "stage": "sft",
                "recipe": digest(self.recipe.encode()),
                "settings": asdict(self.settings),
                "num_answers": len(self.answers),
                "num_labels": sum(len(answer.nodes) for answer in self.answers),
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


class RoundReader:
    """Runs both models over recorded rounds to recompute the readings that a decoder would provide."""

    def __init__(self, pair: Pair) -> None:
        self._target = pair.cached_target(READINGS.layers)
        self._draft = pair.cached_draft(READINGS.draft_layers)
        self._dtype = pair.target.dtype

    def read(self, context_ids: Sequence[int], rounds: Sequence[ArbitrationRound]) -> list[ArbitrationRound]:
        """Return the rounds with their readings. Each text is read once if rounds are ordered by context length.

        Args:
            context_ids: prompt and committed tokens, up to the last round's context.
        """
        return [
            dataclasses.replace(
                arbitration, readings=self._one(context_ids[: arbitration.context_length], arbitration.draft_ids)
            )
            for arbitration in rounds
        ]

    def _one(self, context_ids: Sequence[int], draft_ids: Sequence[int]) -> Tensor:  # [K, F]
        states, scalars = [], []  # on the host: the models can be on different devices
        with torch.inference_mode():
            for model in (self._target, self._draft):
                logits, hidden = ResponseTree(draft_ids).read(model, context_ids)
                token_ids = torch.tensor(list(draft_ids), device=logits.device)
                scalars += [value.cpu() for value in distribution_scalars(logits[:-1], token_ids)]
                states.append({"draft": {layer: rows[1:].cpu() for layer, rows in (hidden or {}).items()}})
            readings = assemble(READINGS, TokenStates(states[0], states[1], *scalars))
        # Cloned outside of inference mode, because autograd needs it. In the target's precision, because readings
        # are cached for all epochs, which takes gigabytes for a large target.
        return readings.clone().to(self._dtype)
