"""`reprieve train`: heads from labels and traces, and constants, lengths and drafting heads from a task's problems."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import import_extra
from reprieve.settings import PairSettings, ProblemSettings, SamplingParams, SamplingSettings
from reprieve.training.settings import (
    ArbiterTraining,
    EagleTraining,
    JudgeTraining,
    LengthTraining,
    LtsTraining,
    PivotTraining,
    StateArbiterTraining,
)

if TYPE_CHECKING:
    from reprieve.engine import Pair
    from reprieve.heads.classifiers import Arbiter, Head
    from reprieve.mining.store import ProblemLabels
    from reprieve.tasks import TaskProblem

_WORK = "training"  # folder with the state of an interrupted training


def _digests(problems: Sequence[ProblemLabels | TaskProblem]) -> tuple[str, ...]:
    """Return the digests of problems, which a head keeps: results on these say little about other problems."""
    return tuple(sorted({problem.digest for problem in problems} - {""}))


@dataclass(frozen=True)
class TrainHead(Command):
    """Fit a head to labels.

    Args:
        labels: Label store, from `reprieve mine`.
        out: Folder for the head.
    """

    settings: JudgeTraining | PivotTraining | StateArbiterTraining = field(metadata={"flag": False})
    labels: Path = Path("runs/labels")
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("heads/judge")
    offers_length: bool = field(default=True, metadata={"flag": False})  # False where a certificate follows

    def run(self) -> int:
        import_extra("sklearn", "labels")
        from reprieve.mining.store import LabelStore

        store = LabelStore(self.labels)
        pair = screen.load(self.pair, decodes=False)
        store.require_pair(pair.identity)
        problems = store.problems()
        head = self._fit(pair, problems, store.manifest, self.out)
        screen.say(f"head: {self.out}   use it: reprieve bench --arm {head.kind}:path={self.out}")
        if self.offers_length and head.drafter == "draft":
            _offer_length(f"{head.kind}:path={self.out}", self.out)
        self.keep_config(self.out)
        return 0

    def _fit(self, pair: Pair, problems: list[ProblemLabels], manifest: Mapping[str, Any], out: Path) -> Head:
        """Recompute the features of some labels, fit a head, save it and say how good it is."""
        from reprieve.heads.files import claim_head
        from reprieve.training.classifiers import train_judge, train_pivot, train_state_arbiter
        from reprieve.training.features import collect

        trainers: dict[type, Callable[..., Head]] = {
            JudgeTraining: train_judge,
            PivotTraining: train_pivot,
            StateArbiterTraining: train_state_arbiter,
        }
        claim_head(out)
        recipe = self.settings.recipe
        with screen.progress("features", "problems") as progress:
            tokens = collect(
                pair,
                problems,
                layers=recipe.layers,
                draft_layers=recipe.draft_layers if recipe.reads_draft else (),
                encodings=recipe.encodings,
                progress=progress,
            )
        with screen.progress("fitting", "steps") as progress:
            head = trainers[type(self.settings)](
                tokens, pair.identity, manifest["task"], settings=self.settings, progress=progress
            )
        drafter = f"eagle3:{manifest['drafter_weights']}" if "drafter" in manifest else "draft"
        head = replace(head, prompt=manifest["prompt"], problems=_digests(problems), drafter=drafter)
        head.save_pretrained(out)
        screen.say("\n".join(f"{name}: {value}" for name, value in head.facts().items()))
        return head


@dataclass(frozen=True)
class TrainJudge(TrainHead):
    """Fit AutoJudge's linear head."""

    verb = "train judge"
    example = "reprieve train judge --labels runs/labels --out heads/judge"

    settings: JudgeTraining = field(default_factory=JudgeTraining)


@dataclass(frozen=True)
class TrainPivot(TrainHead):
    """Fit PAD's two-branch MLP."""

    verb = "train pivot"
    example = "reprieve train pivot --labels runs/pivots --out heads/pivot"

    settings: PivotTraining = field(default_factory=PivotTraining)
    labels: Path = Path("runs/pivots")
    out: Path = Path("heads/pivot")


@dataclass(frozen=True)
class TrainStateArbiter(TrainHead):
    """Fit two linear heads to labels of which side of a mismatch ends better."""

    verb = "train state-arbiter"
    example = "reprieve train state-arbiter --labels runs/traces --out heads/state-arbiter"

    settings: StateArbiterTraining = field(default_factory=StateArbiterTraining)
    labels: Path = Path("runs/traces")
    out: Path = Path("heads/state-arbiter")


@dataclass(frozen=True)
class TrainArbiter(Command):
    """Warm CoSpec's arbiter up on labelled traces (appendix C.1); run it again to resume.

    Args:
        preset: paper; or small, for a pair with a few million parameters, in under an hour on two cores.
        labels: Traces, from `reprieve mine arbitration`; several stores are joined. Repeatable.
        out: Folder for checkpoint, log and arbiter.
    """

    verb = "train arbiter"
    example = "reprieve train arbiter --preset small --labels runs/traces --out runs/arbiter-sft"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "small": {"learning_rate": 1e-3, "decisions_per_update": 128, "num_epochs": 4},
    }

    preset: str = "paper"
    labels: tuple[Path, ...] = (Path("runs/traces"),)
    settings: ArbiterTraining = field(default_factory=ArbiterTraining)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/arbiter-sft")

    def run(self) -> int:
        import_extra("peft", "arbiter")
        from reprieve.heads.files import claim_head
        from reprieve.training.arbiter_warm_up import read_traces, warm_up

        traces = read_traces(self.labels)
        pair = screen.load(self.pair)
        for store in traces.stores:
            store.require_pair(pair.identity)
        pair.cached_draft()  # refuses a pair without a draft
        claim_head(self.out / "arbiter", "arbiter")
        self.keep_config(self.out)
        with screen.progress("updates") as progress:
            arbiter = warm_up(pair, traces, self.out, settings=self.settings, progress=progress)
        report_arbiter(arbiter, self.out / "arbiter")
        return 0


def report_arbiter(arbiter: Arbiter, folder: Path) -> None:
    """Print the scores that the arbiter reached, and the command that uses it."""
    reached = arbiter.training["validation"]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in reached.items())
    screen.say(
        f"best at update {arbiter.training['update']}: {scores}\n"
        f"arbiter: {folder}   use it: reprieve bench --arm arbiter:path={folder} "
        f"--num-draft-tokens {arbiter.num_draft_tokens}"
    )
    _offer_length(f"arbiter:path={folder}", folder)


def _offer_length(rule: str, folder: Path) -> None:
    """Print the command that trains a draft length head for a rule whose head was trained into this folder."""
    command = f"reprieve train length --rule {rule} --out {folder}-length"
    screen.say(f"to train its draft length, with the same pair and task: {command}")


@dataclass(frozen=True)
class TrainLength(Command):
    """Train a head that ends a drafted block when further drafting does not pay off; run it again to resume.

    Args:
        rule: Rule whose acceptance the head predicts, such as lossless or judge:path=heads/j.
        out: Folder for the head.
    """

    verb = "train length"
    example = "reprieve train length --rule margin:delta=2 --limit 200 --out heads/length"

    rule: str = "lossless"
    problems: ProblemSettings = field(default_factory=lambda: ProblemSettings(split="train"))
    settings: LengthTraining = field(default_factory=LengthTraining)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("heads/length")

    def run(self) -> int:
        import_extra("sklearn", "labels")
        from reprieve.heads.files import claim_head
        from reprieve.heads.loading import attach_heads, require_heads_fit
        from reprieve.rules import parse_rule
        from reprieve.training.length import require_thresholds, train_length

        rule = attach_heads(parse_rule(self.rule), self.pair.target)
        require_thresholds(rule, self.settings)
        pair, task, problems = screen.load_problems(self.pair, self.problems)
        require_heads_fit(rule, pair.identity, self.problems.task)
        pair.cached_draft()
        claim_head(self.out, "length")
        self.keep_config(self.out)
        with screen.progress("answers") as progress:
            head = train_length(
                pair,
                rule,
                self.problems.task,
                problems,
                max_new_tokens=task.max_new_tokens,
                settings=self.settings,
                folder=self.out / _WORK,
                progress=progress,
            )
        head = replace(head, prompt=self.problems.prompt.format, problems=_digests(problems))
        head.save_pretrained(self.out)
        shutil.rmtree(self.out / _WORK, ignore_errors=True)
        training = head.training
        this, after = training["auc_held_out"]
        share, gain = training["accepted_share"], training["expected_over_best_constant"]
        screen.say(
            f"{training['num_tokens']} drafted tokens of {training['num_problems']} answers; "
            f"{training['num_held_out']} held out: ROC AUC {this:.3f} for a token, {after:.3f} for the next\n"
            f"price {head.price:g}: a token is drafted if its acceptance chance is at least this; {share:.0%} of them "
            f"accepted, estimated {gain:.2f} times as fast as K = {training['best_constant']}, the best constant\n"
            f"head: {self.out}   use it: reprieve bench --arm '{self.rule}@K=auto:path={self.out}'"
        )
        return 0


@dataclass(frozen=True)
class TrainLts(Command):
    """Measure the bound's constants on the target's own answers (ARC-Decode, Algorithm 1).

    Args:
        out: Folder for the constants.
    """

    verb = "train lts"
    example = "reprieve train lts --limit 200 --out heads/lts"

    problems: ProblemSettings = field(default_factory=lambda: ProblemSettings(split="validation"))
    settings: LtsTraining = field(default_factory=LtsTraining)
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("heads/lts")

    def run(self) -> int:
        from reprieve.heads.files import claim_head
        from reprieve.training.lts import bounds_of, collect_swaps, fit
        from reprieve.training.own_text import own_text_path, write_own_texts

        recipe = self.settings
        pair, task, problems = screen.load_problems(self.pair, self.problems)
        claim_head(self.out, "lts")
        self.keep_config(self.out)
        params = SamplingParams(**vars(self.sampling), max_new_tokens=task.max_new_tokens, seed=recipe.seed)
        path = own_text_path(self.out, pair, self.problems, params, mixed=False)
        with screen.progress("answers") as progress:
            texts = write_own_texts(path, pair, problems, params=params, progress=progress)
        with screen.progress("next steps") as progress:
            scale, swaps = collect_swaps(
                pair, [(text.prompt_ids, text.answer_ids) for text in texts], recipe, params, progress=progress
            )
        sampling = {name: value for name, value in asdict(self.sampling).items() if name != "draft_temperature"}
        fitted = fit(
            pair,
            self.problems.task,
            scale,
            swaps,
            recipe,
            split=self.problems.split,
            limit=self.problems.limit,
            offset=self.problems.offset,
            sampling=sampling,
        )
        fitted = replace(fitted, prompt=self.problems.prompt.format, problems=_digests(problems))
        fitted.save_pretrained(self.out)
        bound, tolerance = bounds_of(fitted, swaps)
        covered, tolerated = (swaps.divergence <= bound).mean(), (swaps.divergence <= tolerance).mean()
        constants = zip(fitted.embedding_factors, fitted.logit_factors, fitted.tolerances, strict=True)
        notes = [
            *(
                (f"bucket {bucket}: " if len(fitted.edges) else "")
                + f"c' {factor:.4g}, alpha kappa {logit_factor:.4g}, tau_delta {tolerance:.4g} nats"
                for bucket, (factor, logit_factor, tolerance) in enumerate(constants)
            ),
            f"{swaps.num} positions of {len(texts)} answers; the bound covers {covered:.1%} of them, the tolerance "
            f"{tolerated:.1%}",
        ]
        if float(fitted.tolerances.max()) > math.log(2):
            notes.append("the tolerance is above ln 2, the largest divergence: only theta excludes tokens")
        notes.append(f"calibration: {self.out}   use it: reprieve bench --arm lts:path={self.out}")
        screen.say("\n".join(notes))
        return 0


@dataclass(frozen=True)
class TrainEagle(Command):
    """Train an EAGLE-3 head; run it again to resume.

    Args:
        out: Folder for answers, checkpoint and head.
    """

    verb = "train eagle"
    example = "reprieve train eagle --limit 4000 --out runs/eagle3"

    problems: ProblemSettings = field(default_factory=lambda: ProblemSettings(split="train", limit=4000))
    settings: EagleTraining = field(default_factory=EagleTraining)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/eagle3")

    def run(self) -> int:
        import_extra("speculators", "eagle")
        from reprieve.heads.files import claim_head
        from reprieve.training.eagle3 import train_eagle3
        from reprieve.training.own_text import own_text_path, write_own_texts

        pair, task, problems = screen.load_problems(self.pair, self.problems, decodes=False)
        self.settings.layers_of(pair.target.config.get_text_config().num_hidden_layers)
        claim_head(self.out)
        claim_head(self.out / "head", "eagle3")
        self.keep_config(self.out)
        params = SamplingParams(max_new_tokens=task.max_new_tokens, temperature=1.0, seed=self.settings.seed)
        path = own_text_path(self.out, pair, self.problems, params, mixed=True)
        with screen.progress("answers") as progress:
            texts = write_own_texts(path, pair, problems, params=params, mixed=True, progress=progress)
        with screen.progress("updates") as progress:
            reached = train_eagle3(pair, texts, self.out, settings=self.settings, progress=progress)
        agreed = ", ".join(f"{share:.1%}" for share in reached["accuracy"])
        screen.say(
            f"{reached['num_texts']} answers in {reached['seconds']} s; on {reached['num_held_out']} held-out answers "
            f"head and target have the same first choice, step by step while they agree: {agreed}\n"
            f"head: {self.out / 'head'}   use it: reprieve bench --drafter eagle3:path={self.out / 'head'}"
        )
        return 0
