"""Protocols that choose settings: K for each arm by itself (AutoJudge, appendix G), thresholds as FSD chose them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.evaluation.arms import LOSSLESS, Arm, make_arms, sweep_rules
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.engines.base import Engine
from reprieve.evaluation.results import summarise
from reprieve.evaluation.runner import Progress, Run, Runner, environment, run_arms
from reprieve.evaluation.settings import FsdSettings, RunSettings
from reprieve.settings import NumDraftTokens
from reprieve.tasks import Task


@dataclass(frozen=True)
class BestK:
    """One arm at the K that decodes most tokens a second.

    The fastest of several measurements is a little flattered; measure again on other problems before quoting it.
    """

    spec: str
    num_draft_tokens: NumDraftTokens
    tokens_per_second: float
    by_k: dict[NumDraftTokens, float]  # tokens a second

    @property
    def arm(self) -> str:
        """As `bench --arm` takes it."""
        return f"{self.spec}@K={self.num_draft_tokens}"


def best_ks(document: dict[str, Any]) -> list[BestK]:
    """The fastest K of every rule in a results document that has several."""
    speeds: dict[str, dict[NumDraftTokens, float]] = {}
    loaded = {row["arm"]: row["tokens_per_second"] for row in document.get("throughput", ())}
    for arm in document["arms"]:
        speed = loaded.get(arm["spec"], arm["tokens_per_second"])
        if arm["num_draft_tokens"] is not None and speed:
            spec = arm["spec"].partition("@K=")[0]
            speeds.setdefault(spec, {})[arm["num_draft_tokens"]] = speed
    fastest = []
    for spec, by_k in speeds.items():
        best = max(by_k, key=by_k.__getitem__)
        fastest.append(BestK(spec, best, by_k[best], by_k))
    return fastest


@dataclass(frozen=True)
class FsdProtocol:
    """How FSD's authors chose thresholds (section 5.1 and appendix D).

    Lossless is given the K that suits it best, K'. The threshold that accepts about as many drafted tokens as lossless
    does, T_SD, is the strictest worth measuring. From there thresholds rise until a share of the accuracy gap between
    target and draft is lost.
    """

    settings: FsdSettings
    command: str = ""

    @property
    def main(self) -> RunSettings:
        """The measurement, after the small run that chooses."""
        asked = self.settings
        return dataclasses.replace(
            asked.run, split=asked.main_split, limit=asked.main_limit, offset=0, num_trials=asked.main_trials
        )

    def run(
        self,
        engine: Engine,
        task: Task,
        folder: Path,
        *,
        announce: Callable[[str], None] = lambda line: None,
        progress: Progress = lambda done, total: None,
    ) -> dict[str, Any] | None:
        """The results document of the measurement, with `protocol` added; None where Ctrl-C ended it."""
        asked = self.settings
        target_name = engine.facts.identity.target
        rules = sweep_rules(asked.rule, asked.thresholds, target=target_name)
        lossless = make_arms([LOSSLESS], asked.num_draft_tokens, target=target_name)[2:]
        # A summary compares with the target, so that it is among the arms wherever one is made.
        target = make_arms([], asked.num_draft_tokens)[:1]
        chosen = self._pilot(engine, task, folder / "k", [*target, *lossless], progress)
        if chosen is None:
            return None
        best_k = best_ks(chosen)[0]
        announce(f"K' = {best_k.num_draft_tokens}: lossless is fastest there")
        k = best_k.num_draft_tokens
        candidates = make_arms(rules, [k], target=target_name)
        accepted = self._pilot(
            engine, task, folder / "acceptance", [arm for arm in candidates if arm.label != DRAFT_ONLY], progress
        )
        if accepted is None:
            return None
        rates = {arm["spec"]: arm["acceptance_rate"] or 0.0 for arm in accepted["arms"]}
        relaxed = [arm for arm in candidates if arm.label not in (TARGET_ONLY, DRAFT_ONLY, LOSSLESS)]
        first = min(range(len(relaxed)), key=lambda i: abs(rates[relaxed[i].label] - rates[LOSSLESS]))
        announce(
            f"T_SD: {relaxed[first].label} accepts {rates[relaxed[first].label]:.1%}, lossless {rates[LOSSLESS]:.1%}"
        )
        document = self._climb(engine, task, folder / "main", candidates[:3], relaxed[first:], announce, progress)
        if document is not None:
            document["protocol"] = {
                "name": "fsd",
                "num_draft_tokens": k,
                "tokens_per_second_by_k": best_k.by_k,
                "acceptance_rates": rates,
                "first_threshold": asked.thresholds[first],
                "lost_share": asked.lost_share,
            }
        return document

    def _pilot(
        self, engine: Engine, task: Task, folder: Path, arms: list[Arm], progress: Progress
    ) -> dict[str, Any] | None:
        run = run_arms(
            RunConfig.of(engine, arms, self.settings.run, command=self.command),
            arms,
            engine,
            task,
            folder,
            progress=progress,
        )
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
    ) -> dict[str, Any] | None:
        arms = [*baselines, *relaxed]
        runner = Runner(RunConfig.of(engine, arms, self.main, command=self.command), arms, engine, task, folder)
        about = environment()
        measured = list(baselines)
        if not runner.measure(measured, progress):
            return None
        for arm in relaxed:
            measured.append(arm)
            if not runner.measure([arm], progress):
                return None
            document = summarise(Run(runner.config, measured, runner.records, about, complete=True))
            accuracy = {row["spec"]: row["accuracy"] for row in document["arms"]}
            floor = accuracy[TARGET_ONLY] - self.settings.lost_share * (accuracy[TARGET_ONLY] - accuracy[DRAFT_ONLY])
            announce(f"{arm.label}: solved {accuracy[arm.label]:.1%}; the protocol ends at {floor:.1%}")
            if accuracy[arm.label] <= floor:
                break
        return document
