"""Study of a pair in one command: `python benchmarks/study.py` tunes K, measures every rule, certifies and reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from reprieve.backends.settings import EngineSettings
from reprieve.bench.results import Results, best_ks
from reprieve.bench.settings import CertifySettings, Promise, RunSettings
from reprieve.cli.bench import Bench, Report
from reprieve.cli.certify import Certify
from reprieve.cli.command import Command, Pipeline
from reprieve.cli.main import run_command
from reprieve.heads.loading import attach_heads
from reprieve.rules import parse_rule
from reprieve.settings import AUTO, BUNDLED_TASK, NumDraftTokens, PairSettings, PromptSettings

CONTROLS = ("direct:top_k:k=2", "direct:margin:delta=2")
CERTIFIED_JUDGES = {"miniature": (0.05, 0.1), "arithmetic": (0.02, 0.04)}  # thresholds of bundled judges to certify
CERTIFIED = {"margin": (2.0,)}
# The settings to measure, by rule; K is tuned on the first.
STUDIED = {
    "arbiter": ("arbiter:lambda=0.5", "arbiter:lambda=0.6"),
    "asd": ("asd",),
    "cascade": ("cascade",),
    "floor": ("floor:min_prob=0.1",),
    "fly": ("fly",),
    "fuzzy": ("fuzzy:threshold=1,divergence=kl,form=released", "fuzzy:threshold=0.4", "fuzzy:threshold=0.1"),
    "judge": tuple(f"judge:threshold={value}" for value in (0.03, 0.01, 0.06, 0.12)),
    "lenience": ("lenience:lenience=0.3",),
    "margin": ("margin:delta=2", "margin:delta=1", "margin:delta=4"),
    "math_symbols": ("math_symbols",),
    "pivot": ("pivot:threshold=0.3",),
    "random": ("random:rate=0.8",),
    "ratio": ("ratio:ratio=0.3",),
    "state_arbiter": ("state_arbiter:threshold=0.51", "state_arbiter:threshold=0.5"),
    "top_k": ("top_k:k=2", "top_k:k=4"),
    "typical": ("typical",),
}
# A bundled task's first thousand calibration problems chose the thresholds and the bound
# (docs/guides/evidence.md), so certificates use the problems after them.
BUNDLED_OFFSET = 1000


@dataclass(frozen=True)
class StudyCommand(Command):
    """Tune K for every rule, measure all rules, certify the margin and a bundled judge, and write a report; resumes.

    Args:
        arm: An additional rule, such as judge:path=heads/j. Repeatable.
        task: Task. Default: that of the bundled pair.
        limit: Number of problems to measure on.
        tune_limit: Number of problems to choose K on.
        num_draft_tokens: Values of K to choose from.
        certify_limit: Number of calibration problems, and of held-out problems.
        max_drop: Loss that certificates promise to stay below: 0.01 is one point.
        num_workers: Parallel processes. Default: the number of cores, at most 4.
        seed: Same seed, same answers.
        out: Folder for results; run again with it to resume.
    """

    verb = "benchmarks/study.py"

    arm: tuple[str, ...] = ()
    task: str = BUNDLED_TASK
    limit: int = 60
    tune_limit: int = 12
    num_draft_tokens: tuple[NumDraftTokens, ...] = (4, 8, 16, AUTO)
    certify_limit: int = 1000
    max_drop: float = 0.03
    num_workers: int | None = None
    seed: int = 0
    engine: EngineSettings = field(default_factory=EngineSettings)
    prompt: PromptSettings = field(default_factory=PromptSettings)
    pair: PairSettings = field(default_factory=lambda: PairSettings(dtype="float32"))
    out: Path = Path("runs/study")

    def run(self) -> int:
        self.keep_config(self.out)
        stages = Pipeline(self.out, "study")
        stages.run("tune", self._bench(self._rules(), "validation", self.tune_limit, self.out / "tune"))
        stages.run("frontier", self._bench(self._tuned_arms(), "test", self.limit, self.out / "frontier"))
        for rule, thresholds in self._certified().items():
            # Status 1 means that no threshold could be certified: a result, not a failure.
            stages.run(f"certify {rule.partition(':')[0]}", self._certify(rule, thresholds), results=(0, 1))
        certificates = self.out / "certificates"
        folders = (self.out / "frontier", *([certificates] if any(certificates.glob("*.json")) else []))
        title = f"{self.pair.target} on {self.task}"
        stages.run("report", Report(folders=folders, title=title, out=self.out / "report.html"))
        return 0

    def _rules(self) -> list[str]:
        """Return each rule at the setting that its K is tuned on."""
        return [*self._usual_rules(), *self.arm]

    def _usual_rules(self) -> dict[str, tuple[str, ...]]:
        bundle = self.pair.bundle
        return usual_rules(() if bundle is None else bundle.heads, served=not self.engine.local)

    def _tuned_arms(self) -> list[str]:
        """Return every setting of every rule at the rule's fastest K, and lossless twice at its own."""
        results = Results.read(self.out / "tune")
        assert results is not None  # written by the step before
        tuned = {best.spec: best.num_draft_tokens for best in best_ks(results.arms, results.throughput)}
        arms = [f"{name}@K={tuned['lossless']}" for name in ("lossless", "lossless_rerun")]
        arms += [] if not self.engine.local else CONTROLS  # servers do not sample from a truncation
        usual = self._usual_rules()
        for rule in self._rules():
            k = tuned[attach_heads(parse_rule(rule), self.pair.target).spec]  # may differ from the flag
            arms += [f"{setting}@K={k}" for setting in usual.get(rule, (rule,))]
        return arms

    def _certified(self) -> dict[str, tuple[float, ...]]:
        """Return the thresholds of each rule to certify."""
        judge = {} if self.pair.bundle is None else {"judge": CERTIFIED_JUDGES[self.pair.bundle.key]}
        return {**judge, **CERTIFIED}

    def _run_settings(self, split: str, limit: int, offset: int = 0) -> RunSettings:
        return RunSettings(task=self.task, split=split, limit=limit, offset=offset, prompt=self.prompt, seed=self.seed)

    def _bench(self, arms: list[str], split: str, limit: int, out: Path) -> Bench:
        ks = self.engine.draft_tokens(*self.num_draft_tokens)
        settings = self._run_settings(split, limit)
        return Bench(
            arm=tuple(arms), num_draft_tokens=tuple(ks), settings=settings, engine=self.engine, pair=self.pair,
            out=out,
        )  # fmt: skip

    def _certify(self, rule: str, thresholds: tuple[float, ...]) -> Certify:
        [k] = self.engine.draft_tokens(AUTO)
        settings = CertifySettings(
            rule=rule,
            promise=Promise(self.max_drop),
            thresholds=thresholds,
            num_draft_tokens=k,
            held_out_limit=self.certify_limit,
            run=self._run_settings("validation", self.certify_limit, BUNDLED_OFFSET if self.pair.bundle else 0),
        )
        return Certify(
            settings=settings, num_workers=self._workers(), engine=self.engine, pair=self.pair,
            out=self.out / "certificates",
        )  # fmt: skip

    def _workers(self) -> int:
        if not self.engine.local:
            return 1
        return min(os.cpu_count() or 1, 4) if self.num_workers is None else self.num_workers


def usual_rules(heads: Collection[str], *, served: bool = False) -> dict[str, tuple[str, ...]]:
    """Return each rule's settings in a study, by the one that its K is tuned on.

    Args:
        heads: kinds of heads that need no path, such as those of a bundled pair.
        served: leave out the rules that a server cannot run.
    """
    from reprieve.rules import RULES
    from reprieve.rules.learned import HeadRule
    from reprieve.types import Need

    kinds = [kind for kind in map(RULES.get, STUDIED) if not issubclass(kind, HeadRule) or kind.head_kind in heads]
    if served:
        unserved = {Need.ADVICE, Need.DRAFT_HIDDEN}
        kinds = [kind for kind in kinds if not unserved & set(kind.own_traits.needs)]
    return {STUDIED[kind.name][0]: STUDIED[kind.name] for kind in kinds}


if __name__ == "__main__":
    sys.exit(run_command(StudyCommand, sys.argv[1:]))
