"""CoSpec's reinforcement learning: an arbiter improved on its own rollouts (section 3.4 and appendix C.2)."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from recipes.arbiter.rewards import Rewards, Rollout, clipped_objective, policy_divergence, policy_entropy
from recipes.arbiter.rollouts import RolloutJob, RolloutPool
from recipes.arbiter.settings import Reinforcement, RolloutSettings
from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.cli.main import run_command
from reprieve.cli.train import report_arbiter
from reprieve.engine import Pair
from reprieve.errors import SpecError, import_extra
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.files import claim_head
from reprieve.heads.loading import warn_of_transfer
from reprieve.heads.settings import ArbiterShape
from reprieve.identity import digest
from reprieve.models.arbiter import ArbiterModel
from reprieve.tasks import Task, load_task
from reprieve.tasks.prompting import with_prompts
from reprieve.training.arbiter_warm_up import RoundReader, keep_best
from reprieve.training.loop import Learner, train
from reprieve.types import Progress, no_progress

_REJECT_ALL = -3.0  # logit: pi(accept) is 5%, enough for exploration


def untrained(pair: Pair, shape: ArbiterShape, task: str, num_draft_tokens: int) -> Arbiter:
    """Return an untrained arbiter that rejects nearly everything: training without a warm-up (Table 6)."""
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


@dataclass(frozen=True)
class _Sample:
    """One rollout with the training inputs of its decisions: [n] each, over its rounds in order."""

    rollout: Rollout
    nodes: list[tuple[int, int]]  # round, and position in its block from 0
    accepted: Tensor
    old_probs: Tensor
    advantages: Tensor
    reference: Tensor  # logits of the initial arbiter


def reinforce(
    pair: Pair,
    task: Task,
    start: Arbiter,
    rollouts: RolloutSettings,
    folder: Path,
    *,
    settings: Reinforcement | None = None,
    num_workers: int = 1,
    progress: Progress = no_progress,
) -> Arbiter:
    """Improve an arbiter on its own rollouts; resumes from its checkpoint.

    Args:
        start: the initial arbiter, which is also the reference of the divergence.
        rollouts: settings of decoding.
        folder: gets `checkpoint.safetensors`, `metrics.jsonl` and, in `arbiter/`, the best by validation.
        num_workers: processes that decode; each has the pair in its own memory.

    Returns:
        The best arbiter by validation.

    Raises:
        PairError: `start` was made for another pair.
        ReprieveError: a checkpoint of another recipe, or a worker that died.
    """
    start.require_pair(pair.identity, "to begin with")
    settings = with_splits(settings or Reinforcement(), task)
    if rollouts.num_draft_tokens is None:
        rollouts = dataclasses.replace(rollouts, num_draft_tokens=start.num_draft_tokens)
    with RolloutPool(rollouts, start.shape, pair, task, num_workers=num_workers) as pool:
        learner = _Learner(pair, task, start, rollouts, folder, settings, pool)
        train(learner, folder, progress=progress, checkpoint_seconds=0.0)  # updates take minutes
    return Arbiter.from_pretrained(folder / "arbiter")


class _Learner(Learner):
    def __init__(
        self,
        pair: Pair,
        task: Task,
        start: Arbiter,
        rollouts: RolloutSettings,
        folder: Path,
        settings: Reinforcement,
        pool: RolloutPool,
    ) -> None:
        assert pair.draft is not None and settings.split is not None and settings.validation_split is not None
        held = (settings.validation_split, settings.validation_offset)
        self.num_problems = len(task.problems(settings.split, settings.num_problems, offset=settings.offset))
        self.num_validation = len(task.problems(held[0], settings.num_validation, offset=held[1]))
        for num, (split, offset) in (
            (self.num_problems, (settings.split, settings.offset)),
            (self.num_validation, held),
        ):
            if not num:
                raise SpecError(f"task {task.name} has no problems in split {split!r} from {offset} on")
        self.pair = pair
        self.start = start
        self.rollouts = rollouts
        self.folder = folder
        self.settings = settings
        self.pool = pool
        self.model = ArbiterModel(pair.draft, start.shape)
        self.model.load_own(start.tensors)
        self.reference = ArbiterModel(pair.draft, start.shape)
        self.reference.load_own(start.tensors)
        self.optimizer = torch.optim.AdamW(
            self.model.own_tensors.values(),
            lr=settings.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=settings.weight_decay,
        )
        self._reader = RoundReader(pair) if start.shape.num_readings else None
        self.rewards = Rewards(**vars(settings.rewards))
        self._orders: dict[int, list[int]] = {}  # of the prompts, by pass over all of them

    @property
    def recipe(self) -> str:
        return repr((self.settings, self.rollouts, self.start.fingerprint, self.pair.identity))

    @property
    def num_updates(self) -> int:
        return self.settings.num_updates

    def validates_after(self, update: int) -> bool:
        return update % self.settings.validate_every == 0 or update == self.settings.num_updates

    def one_update(self, update: int) -> dict[str, float]:
        """Decode rollouts, assign credit, and optimise for a few epochs."""
        settings = self.settings
        groups = self._roll_out(update)
        samples = [sample for group in groups for sample in self._credited(group)]
        rng = random.Random(settings.seed * 1_000_003 + update)
        sums: dict[str, float] = {}
        num = 0
        size = max(1, -(-len(samples) // settings.steps_per_epoch))
        for _ in range(settings.num_epochs if samples else 0):
            rng.shuffle(samples)
            for at in range(0, len(samples), size):
                for name, value in self._step(samples[at : at + size]).items():
                    sums[name] = sums.get(name, 0.0) + value
                num += 1
        return {**_describe(groups), **{name: value / num for name, value in sums.items()}}

    def _roll_out(self, update: int) -> list[list[Rollout]]:
        settings = self.settings
        first = update * settings.prompts_per_update
        prompts = {turn: self._prompt(turn) for turn in range(first, first + settings.prompts_per_update)}
        jobs = [
            RolloutJob(
                str(settings.split), settings.offset + prompt, seed=(settings.seed + 1 + member) * 1_000_003 + turn
            )
            for turn, prompt in prompts.items()
            for member in range(settings.group_size)
        ]
        rollouts: list[Rollout] = [self._with_readings(one) for one in self.pool.make(jobs, self.model.own_tensors)]
        return [rollouts[at : at + settings.group_size] for at in range(0, len(rollouts), settings.group_size)]

    def _with_readings(self, rollout: Rollout) -> Rollout:
        if self._reader is None:
            return rollout
        read = self._reader.read(rollout.context_ids, [taken.arbitration for taken in rollout.rounds])
        pairs = zip(rollout.rounds, read, strict=True)
        rounds = (dataclasses.replace(taken, arbitration=arbitration) for taken, arbitration in pairs)
        return dataclasses.replace(rollout, rounds=tuple(rounds))

    def _prompt(self, turn: int) -> int:
        """Return the problem number of a turn; all problems are reshuffled for each pass."""
        num_passes, index = divmod(turn, self.num_problems)
        if num_passes not in self._orders:
            order = list(range(self.num_problems))
            random.Random(self.settings.seed * 1_000_003 + num_passes).shuffle(order)
            self._orders = {num_passes: order}
        return self._orders[num_passes][index]

    def _credited(self, group: Sequence[Rollout]) -> list[_Sample]:
        """Return the rollouts of a group that have nonzero advantages."""
        rewards = self.rewards
        samples = []
        for rollout, advantage in zip(group, rewards.group_advantages(group), strict=True):
            credits = rewards.decision_advantages(rollout, advantage)
            flat = [credit for credits_of_round in credits for credit in credits_of_round]
            if not any(flat):
                continue
            decisions = [
                (number, decision) for number, taken in enumerate(rollout.rounds) for decision in taken.decisions
            ]
            nodes = [(number, decision.position - 1) for number, decision in decisions]
            with torch.no_grad():
                reference = _logits(self.reference, rollout, nodes)
            samples.append(
                _Sample(
                    rollout,
                    nodes,
                    accepted=torch.tensor([decision.accepted for _, decision in decisions], device=reference.device),
                    old_probs=torch.tensor([decision.old_prob for _, decision in decisions], device=reference.device),
                    advantages=torch.tensor(flat, device=reference.device),
                    reference=reference,
                )
            )
        return samples

    def _step(self, samples: Sequence[_Sample]) -> dict[str, float]:
        """Take one optimiser step on Eq. 28, with means over decisions in place of its sums."""
        settings = self.settings
        num = sum(len(sample.nodes) for sample in samples)
        sums = {"objective": 0.0, "entropy": 0.0, "divergence": 0.0}
        self.optimizer.zero_grad()
        for sample in samples:
            logits = _logits(self.model, sample.rollout, sample.nodes)
            objective = clipped_objective(
                logits, sample.accepted, sample.old_probs, sample.advantages, clip=settings.clip
            )
            parts = {
                "objective": objective.sum(),
                "entropy": policy_entropy(logits).sum(),
                "divergence": policy_divergence(logits, sample.reference).sum(),
            }
            loss = (
                -parts["objective"] - settings.entropy * parts["entropy"] + settings.divergence * parts["divergence"]
            ) / num
            loss.backward()
            for name, value in parts.items():
                sums[name] += float(value.detach()) / num
        nn.utils.clip_grad_norm_(self.model.own_tensors.values(), settings.max_grad_norm)
        self.optimizer.step()
        return sums

    def validate(self, update: int, seconds: float) -> dict[str, float]:
        """Decode validation problems at lambda, and save the arbiter if it is the best so far."""
        settings = self.settings
        jobs = [
            RolloutJob(
                str(settings.validation_split),
                settings.validation_offset + number,
                seed=number,
                threshold=settings.lambda_,
            )
            for number in range(self.num_validation)
        ]
        answers = self.pool.make(jobs, self.model.own_tensors)
        accuracy = sum(answer.correct for answer in answers) / len(answers)
        tokens_per_round = sum(a.num_tokens for a in answers) / max(1, sum(a.num_rounds for a in answers))
        score = accuracy + settings.speed_weight * tokens_per_round / ((self.rollouts.num_draft_tokens or 0) + 1)
        measured = {"accuracy": accuracy, "tokens_per_round": tokens_per_round, "score": score}
        arbiter = Arbiter(
            tensors=self.model.snapshot(),
            shape=self.start.shape,
            pair=self.pair.identity,
            task=self.rollouts.task,
            threshold=settings.lambda_,
            num_draft_tokens=self.rollouts.num_draft_tokens or 0,
            training={
                "stage": "rl",
                "recipe": digest(self.recipe.encode()),
                "settings": asdict(settings),
                "temperature": self.rollouts.temperature,
                "draft_temperature": self.rollouts.draft_temperature,
                "start": dict(self.start.training),
                "update": update,
                "seconds": round(seconds),
                "validation": measured,
            },
        )
        keep_best(self.folder / "arbiter", arbiter, measure="score")
        return measured


def with_splits(settings: Reinforcement, task: Task) -> Reinforcement:
    """Fill in the splits of prompts and validation problems that are not set; the defaults never overlap."""
    split = settings.split or ("train" if "train" in task.splits else task.splits[0])
    validation = settings.validation_split or ("validation" if "validation" in task.splits else split)
    offset = settings.offset
    if validation == split and settings.validation_split is None:
        offset += settings.num_validation
    return dataclasses.replace(settings, split=split, validation_split=validation, offset=offset)


def _logits(model: ArbiterModel, rollout: Rollout, nodes: Sequence[tuple[int, int]]) -> Tensor:
    """Return the logits of accepting, at a rollout's effective decisions: [n]."""
    judged = model.judge(rollout.context_ids, [taken.arbitration for taken in rollout.rounds])
    return torch.stack([judged[number][node] for number, node in nodes])


def _describe(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return statistics of a batch of rollouts."""
    rollouts = [rollout for group in groups for rollout in group]
    decisions = [decision for rollout in rollouts for taken in rollout.rounds for decision in taken.decisions]
    spans = [taken.length_credit for rollout in rollouts for taken in rollout.rounds]
    return {
        "correct": sum(rollout.correct for rollout in rollouts) / len(rollouts),
        "mixed_groups": sum(0 < sum(r.correct for r in group) < len(group) for group in groups) / len(groups),
        "accepted": sum(decision.accepted for decision in decisions) / max(1, len(decisions)),
        "accepted_span": sum(spans) / max(1, len(spans)),  # rho, over rounds with a mismatch
    }


@dataclass(frozen=True)
class Reinforce(Command):
    """Improve an arbiter on its own rollouts (CoSpec, section 3.4); run it again to resume.

    Args:
        preset: paper, or small: a pair of a few million parameters on two cores, in under an hour.
        start: The arbiter to begin with, from `reprieve train arbiter`; none trains without a warm-up.
        num_workers: Processes that decode rollouts.
        out: Folder for checkpoint, log and arbiter.
    """

    verb = "recipes/arbiter/reinforce.py"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "small": {
            "learning_rate": 3e-4,
            "prompts_per_update": 16,
            "num_updates": 40,
            "num_epochs": 2,
            "steps_per_epoch": 4,
        },
    }

    start: str
    preset: str = "paper"
    num_workers: int = 1
    settings: Reinforcement = field(default_factory=Reinforcement)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    out: Path = Path("runs/arbiter-rl")

    def run(self) -> int:
        import_extra("peft", "arbiter")
        if Path(self.start).resolve() == (self.out / "arbiter").resolve():
            raise SpecError(f"--start must not be the folder that --out writes, {str(self.out / 'arbiter')!r}")

        rollouts = self.rollouts
        first = None if self.start == "none" else Arbiter.from_pretrained(self.start)
        plain = load_task(rollouts.task)
        pair = screen.load(rollouts.pair)
        task = with_prompts(plain, pair.tokenizer, rollouts.prompt)
        if not task.graded:
            raise SpecError(f"task {rollouts.task} has no reference answers: rollouts cannot be rewarded on it")
        pair.cached_draft()  # refuses a pair without a draft
        if first is None:
            shape = ArbiterShape(seed=self.settings.seed)
            first = untrained(pair, shape, rollouts.task, rollouts.num_draft_tokens or 16)
        warn_of_transfer(f"arbiter {self.start!r}", first.task, rollouts.task)
        claim_head(self.out / "arbiter", "arbiter")
        self.keep_config(self.out)
        with screen.progress("updates") as progress:
            arbiter = reinforce(
                pair,
                task,
                first,
                rollouts,
                self.out,
                settings=self.settings,
                num_workers=self.num_workers,
                progress=progress,
            )
        report_arbiter(arbiter, self.out / "arbiter")
        return 0


if __name__ == "__main__":
    sys.exit(run_command(Reinforce, sys.argv[1:]))
