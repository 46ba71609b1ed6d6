"""`reprieve train judge|pivot|state-arbiter`: a head from labels."""

from __future__ import annotations

import dataclasses
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import import_extra, require_whole
from reprieve.settings import PairSettings
from reprieve.training.settings import JudgeTraining, PivotTraining, StateArbiterTraining

if TYPE_CHECKING:
    from reprieve.engine import Pair
    from reprieve.heads.classifiers import Head
    from reprieve.mining.store import ProblemLabels

_WORK = "training"  # folder with the state of an interrupted training


@dataclass(frozen=True)
class TrainHead(Command):
    """Fit a head to labels.

    Args:
        labels: Label store, from `reprieve mine`.
        folds: Train one head per fold of the problems, without that fold (out-of-fold evaluation).
        out: Folder for the head.
    """

    settings: JudgeTraining | PivotTraining = field(metadata={"flag": False})
    labels: Path = Path("runs/labels")
    folds: int | None = None
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("heads/judge")
    offers_length: bool = field(default=True, metadata={"flag": False})  # False where a certificate follows

    @abstractmethod
    def trainer(self) -> Callable[..., Head]:
        """Return the function that fits its kind of head, such as `train_judge`."""

    def run(self) -> int:
        import_extra("sklearn", "labels")
        from reprieve.heads.files import claim_head
        from reprieve.heads.folds import MAX_FOLDS, MIN_FOLDS, fold_folder, fold_of, write_folds
        from reprieve.mining.store import LabelStore

        store = LabelStore(self.labels)
        pair = screen.load(self.pair, decodes=False)
        store.require_pair(pair.identity)
        claim_head(self.out)
        problems = store.problems()
        if self.folds is not None:
            require_whole("folds", self.folds, MIN_FOLDS, MAX_FOLDS)
            for fold in range(self.folds):
                kept = [problem for problem in problems if fold_of(problem.problem_id, self.folds) != fold]
                self._fit_one(pair, kept, store.manifest, fold_folder(self.out, fold))
            write_folds(self.out, self.folds)
            screen.say(f"out-of-fold heads: {self.out}   each problem is answered with the head that never saw it")
        else:
            head = self._fit_one(pair, problems, store.manifest, self.out)
            screen.say(f"head: {self.out}   use it: reprieve bench --arm {head.kind}:path={self.out}")
            if self.offers_length and head.drafter == "draft":
                screen.offer_length(f"{head.kind}:path={self.out}", self.out)
        self.keep_config(self.out)
        return 0

    def _fit_one(self, pair: Pair, problems: list[ProblemLabels], manifest: Mapping[str, Any], out: Path) -> Head:
        """Recompute the features of some labels, fit a head, save it and say how good it is."""
        from reprieve.heads.files import claim_head
        from reprieve.training.features import collect

        claim_head(out)
        recipe = self.settings.recipe
        with screen.progress_bar("features") as bar:
            tokens = collect(
                pair,
                problems,
                layers=recipe.layers,
                draft_layers=recipe.draft_layers if recipe.reads_draft else (),
                encodings=recipe.encodings,
                progress=screen.reporter(bar, "problems"),
            )
        with screen.progress_bar("fitting") as bar:
            head = self.trainer()(
                tokens,
                pair.identity,
                manifest["task"],
                settings=self.settings,
                folder=out / _WORK,
                progress=screen.reporter(bar, "steps"),
            )
        digests = sorted({problem.digest for problem in problems} - {""})
        drafter = f"eagle3:{manifest['drafter_weights']}" if "drafter" in manifest else "draft"
        head = dataclasses.replace(head, prompt=manifest["prompt"], problems=tuple(digests), drafter=drafter)
        head.save_pretrained(out)
        shutil.rmtree(out / _WORK, ignore_errors=True)
        screen.say("\n".join([*self.report(head), f"features: {recipe.name}"]))
        return head

    def report(self, head: Head) -> list[str]:
        """Lines on how good a head is."""
        from reprieve.heads.classifiers import auc_text

        training = head.training
        return [
            f"{training['num_tokens']} labels of {training['num_problems']} problems, "
            f"{training['num_important']} important; held-out ROC AUC {auc_text(training['auc_held_out'])}",
            f"threshold {head.threshold:g} refuses {100 * training['recall_at_threshold']:.0f}% of the important and "
            f"accepts {100 * training['acceptance_at_threshold']:.0f}% of the others",
        ]


@dataclass(frozen=True)
class TrainJudge(TrainHead):
    """Fit AutoJudge's linear head."""

    verb = "train judge"
    example = "reprieve train judge --labels runs/labels --out heads/judge"

    settings: JudgeTraining = field(default_factory=JudgeTraining)

    def trainer(self) -> Callable[..., Head]:
        from reprieve.training.linear import train_judge

        return train_judge


@dataclass(frozen=True)
class TrainPivot(TrainHead):
    """Fit PAD's two-branch MLP."""

    verb = "train pivot"
    example = "reprieve train pivot --labels runs/pivots --out heads/pivot"

    settings: PivotTraining = field(default_factory=PivotTraining)
    labels: Path = Path("runs/pivots")
    out: Path = Path("heads/pivot")

    def trainer(self) -> Callable[..., Head]:
        from reprieve.training.pivot import train_pivot

        return train_pivot


@dataclass(frozen=True)
class TrainStateArbiter(TrainHead):
    """Fit two linear heads to labels of which side of a mismatch ends better."""

    verb = "train state-arbiter"
    example = "reprieve train state-arbiter --labels runs/traces --out heads/state-arbiter"

    settings: StateArbiterTraining = field(default_factory=StateArbiterTraining)
    labels: Path = Path("runs/traces")
    out: Path = Path("heads/state-arbiter")

    def trainer(self) -> Callable[..., Head]:
        from reprieve.training.linear import train_state_arbiter

        return train_state_arbiter

    def report(self, head: Head) -> list[str]:
        """Lines on how good a head is."""
        from reprieve.heads.classifiers import auc_text

        training = head.training
        return [f"{training['num_tokens']} labels of {training['num_problems']} problems"] + [
            f"the draft's side {name} in {training[name]['num']}; "
            f"held-out ROC AUC {auc_text(training[name]['auc_held_out'])}"
            for name in ("worse", "better")
        ]
