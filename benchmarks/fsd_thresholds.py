"""FSD's threshold protocol (section 5.1 and appendix D): choose on a small run, measure on a larger one.

Writes `results.json`, and `choices.json` with what was chosen.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from arms import sweep_rules
from reprieve.backends.settings import EngineSettings
from reprieve.bench.arms import LOSSLESS, Arm, make_arms
from reprieve.bench.engine import Engine, RunConfig
from reprieve.bench.results import Results, best_ks
from reprieve.bench.run import Run
from reprieve.bench.settings import RunSettings
from reprieve.bench.summary import summarise
from reprieve.cli import screen
from reprieve.cli.command import INTERRUPTED, Command
from reprieve.cli.main import run_command
from reprieve.cli.tables import show_results
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.errors import SpecError, require_range, require_whole
from reprieve.files import replace_file
from reprieve.settings import NumDraftTokens, PairSettings, SamplingSettings
from reprieve.tasks import Task
from reprieve.types import Progress, no_progress


@dataclass(frozen=True)
class FsdSettings:
    """Settings of FSD's threshold protocol (section 5.1 and appendix D).

    Args:
        rule: The rule without its threshold.
        thresholds: Rising values of the rule's dial. Default: the authors' grid.
        num_draft_tokens: Values of K to try for lossless. Default: the authors' grid.
        nearly_all: Thresholds that accept at least this share of the drafted tokens, (0, 1], get the next larger K.
        lost_share: Stop once this share of the accuracy gap between target and draft is lost, (0, 1].
        main_split: Split to measure on.
        main_limit: Number of problems to measure on.
        main_trials: Answers per problem and arm in the measurement.
    """

    rule: str = "fuzzy"
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    num_draft_tokens: tuple[NumDraftTokens, ...] = (5, 10, 15, 20)
    nearly_all: float = 0.9
    lost_share: float = 0.2
    main_split: str = "test"
    main_limit: int = 200
    main_trials: int = 3
    run: RunSettings = field(
        default_factory=lambda: RunSettings(
            split="validation", limit=40, sampling=SamplingSettings(temperature=1.0, draft_temperature=0.0)
        )
    )

    def __post_init__(self) -> None:
        for name in ("lost_share", "nearly_all"):
            require_range(name, getattr(self, name), 0.0, 1.0, low_open=True)
        if list(self.thresholds) != sorted(set(self.thresholds)):
            raise SpecError(f"thresholds must rise, got {list(self.thresholds)}")
        for name in ("main_limit", "main_trials"):
            require_whole(name, getattr(self, name), 1)


@dataclass(frozen=True)
class Choices:
    """What the protocol chose, and from what."""

    num_draft_tokens: NumDraftTokens
    tokens_per_second_by_k: dict[NumDraftTokens, float]
    acceptance_rates: dict[str, float]
    first_threshold: float
    nearly_all: float
    lost_share: float


@dataclass(frozen=True)
class FsdProtocol:
    """FSD's threshold protocol (section 5.1 and appendix D).

    K' is the K at which lossless decoding is fastest. T_SD, the strictest threshold to measure, is the one whose
    acceptance rate is closest to that of lossless decoding. Thresholds rise from there until a share of the accuracy
    gap between target and draft is lost. Those that accept nearly all drafted tokens at K' are measured at the next
    larger K; the paper gives no number.
    """

    settings: FsdSettings
    command: str = ""

    @property
    def main(self) -> RunSettings:
        """Settings of the measurement that follows the small runs."""
        settings = self.settings
        return dataclasses.replace(
            settings.run,
            split=settings.main_split,
            limit=settings.main_limit,
            offset=0,
            num_trials=settings.main_trials,
        )

    def run(
        self,
        engine: Engine,
        task: Task,
        folder: Path,
        *,
        announce: Callable[[str], None] = lambda line: None,
        progress: Progress = no_progress,
    ) -> tuple[Results, Choices] | None:
        """Return the measurement's results, and what was chosen; None if it was interrupted."""
        settings = self.settings
        target_name = engine.facts.pair.target
        rules = sweep_rules(settings.rule, settings.thresholds, target=target_name)
        lossless = make_arms([LOSSLESS], settings.num_draft_tokens, target=target_name)[2:]
        # Summaries compare arms with the target, so every run includes it.
        target = make_arms([], settings.num_draft_tokens)[:1]
        chosen = self._pilot(engine, task, folder / "k", [*target, *lossless], progress)
        if chosen is None:
            return None
        best_k = best_ks(chosen.arms)[0]
        announce(f"K' = {best_k.num_draft_tokens}: lossless is fastest there")
        k = best_k.num_draft_tokens
        candidates = make_arms(rules, [k], target=target_name)
        accepted = self._pilot(
            engine, task, folder / "acceptance", [arm for arm in candidates if arm.label != DRAFT_ONLY], progress
        )
        if accepted is None:
            return None
        rates = {arm.spec: arm.acceptance_rate or 0.0 for arm in accepted.arms}
        relaxed = [arm for arm in candidates if arm.label not in (TARGET_ONLY, DRAFT_ONLY, LOSSLESS)]
        raised = [self._raised(arm, rates[arm.label]) for arm in relaxed]
        first = min(range(len(relaxed)), key=lambda i: abs(rates[relaxed[i].label] - rates[LOSSLESS]))
        announce(
            f"T_SD: {relaxed[first].label} accepts {rates[relaxed[first].label]:.1%}, lossless {rates[LOSSLESS]:.1%}"
        )
        results = self._climb(engine, task, folder / "main", candidates[:3], raised[first:], announce, progress)
        if results is None:
            return None
        return results, Choices(
            num_draft_tokens=k,
            tokens_per_second_by_k=best_k.by_k,
            acceptance_rates=rates,
            first_threshold=settings.thresholds[first],
            nearly_all=settings.nearly_all,
            lost_share=settings.lost_share,
        )

    def _raised(self, arm: Arm, acceptance_rate: float) -> Arm:
        """Return the arm at the next larger K if it accepts nearly all drafted tokens, else as it is."""
        k, ks = arm.num_draft_tokens, self.settings.num_draft_tokens
        longer = [other for other in ks if isinstance(other, int) and isinstance(k, int) and other > k]
        if acceptance_rate < self.settings.nearly_all or not longer:
            return arm
        return dataclasses.replace(arm, num_draft_tokens=min(longer), names_k=True)

    def _pilot(self, engine: Engine, task: Task, folder: Path, arms: list[Arm], progress: Progress) -> Results | None:
        config = RunConfig.of(engine, arms, self.settings.run, command=self.command)
        run = Run(config, arms, engine, task, folder)
        run.measure(progress=progress)
        return summarise(run) if run.complete else None

    def _climb(
        self,
        engine: Engine,
        task: Task,
        folder: Path,
        baselines: list[Arm],
        relaxed: list[Arm],
        announce: Callable[[str], None],
        progress: Progress,
    ) -> Results | None:
        arms = [*baselines, *relaxed]
        run = Run(RunConfig.of(engine, arms, self.main, command=self.command), arms, engine, task, folder)
        measured = list(baselines)
        if not run.measure(measured, progress):
            return None
        for arm in relaxed:
            measured.append(arm)
            if not run.measure([arm], progress):
                return None
            results = summarise(run, measured)
            accuracy = {arm.spec: arm.accuracy or 0.0 for arm in results.arms}
            floor = accuracy[TARGET_ONLY] - self.settings.lost_share * (accuracy[TARGET_ONLY] - accuracy[DRAFT_ONLY])
            announce(f"{arm.label}: solved {accuracy[arm.label]:.1%}; the protocol ends at {floor:.1%}")
            if accuracy[arm.label] <= floor:
                break
        return results


@dataclass(frozen=True)
class Thresholds(Command):
    """Choose thresholds by FSD's protocol.

    Find the fastest K of lossless decoding and the threshold with its acceptance rate, then raise the threshold until
    the loss is too large. The draft is greedy and the target samples; servers draft at the target's temperature, so
    this needs the local engine.

    Args:
        out: Folder for results; run again with it to resume.
    """

    verb = "benchmarks/fsd_thresholds.py"

    settings: FsdSettings = field(default_factory=FsdSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/thresholds")

    def run(self) -> int:
        protocol = FsdProtocol(self.settings, command=screen.command_line())
        with screen.engine_and_task(EngineSettings(), self.pair, self.settings.run) as (engine, task):
            self.keep_config(self.out)
            with screen.progress("answers") as progress:
                outcome = protocol.run(engine, task, self.out, announce=screen.say, progress=progress)
        if outcome is None:
            screen.warn("interrupted: run again to resume")
            return INTERRUPTED
        results, choices = outcome
        results.write(self.out)
        replace_file(self.out / "choices.json", json.dumps(dataclasses.asdict(choices), indent=2) + "\n")
        show_results(results)
        return 0


if __name__ == "__main__":
    sys.exit(run_command(Thresholds, sys.argv[1:]))
