"""`python benchmarks/study.py`: tuned K, every rule, certificates and the report, in one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from reprieve.backends.settings import EngineSettings
from reprieve.cli.command import Command
from reprieve.cli.main import run_command
from reprieve.cli.stages import Stage, StageFailed, Stages, engine_flags, pair_flags, prompt_flags
from reprieve.files import read_json
from reprieve.settings import AUTO, BUNDLED_TASK, NumDraftTokens, PairSettings, PromptSettings

CONTROLS = ("direct:top_k:k=2", "direct:margin:delta=2")
CERTIFIED = {"margin": "2"}
# A bundled task's first thousand calibration problems chose the thresholds and the bound
# (docs/guides/evidence.md), so that certificates rest on the next.
BUNDLED_OFFSET = 1000


@dataclass(frozen=True)
class StudyCommand(Command):
    """Measure every rule at its own K, certify two rules, and write the report; resumes where it was stopped.

    Args:
        arm: A rule beside the usual ones, such as judge:path=heads/j. Repeatable.
        task: Task. Default: that of the bundled pair.
        limit: Problems of the frontier.
        tune_limit: Problems that choose K.
        num_draft_tokens: Values of K to choose from.
        certify_limit: Calibration problems, and as many held-out ones.
        max_drop: What certificates promise to stay below.
        num_workers: Processes side by side. Default: the cores, at most 4.
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
    answering: EngineSettings = field(default_factory=EngineSettings)
    prompt: PromptSettings = field(default_factory=PromptSettings)
    pair: PairSettings = field(default_factory=lambda: PairSettings(dtype="float32"))
    out: Path = Path("runs/study")

    def run(self) -> int:
        study = self._study()
        self.keep_config(self.out)
        ks = ",".join(map(str, self.answering.draft_tokens(*self.num_draft_tokens)))
        try:
            study.measure(["--num-draft-tokens", ks, "--limit", str(self.tune_limit)], ["--limit", str(self.limit)])
            study.report(f"{self.pair.target} on {self.task}")
        except StageFailed as failure:
            return study.stages.tell(failure)
        return 0

    def _study(self) -> Study:
        pair, bundle, served = self.pair, self.pair.bundle, not self.answering.local
        shared = ["--task", self.task, "--seed", str(self.seed), *pair_flags(pair), *prompt_flags(self.prompt)]
        shared += engine_flags(self.answering)
        limit, [k] = str(self.certify_limit), self.answering.draft_tokens(AUTO)
        return Study(
            rules={
                **usual_rules(() if bundle is None else bundle.heads, served=served),
                **{name: (name,) for name in self.arm},
            },
            certified={**({} if bundle is None else {"judge": bundle.certified}), **CERTIFIED},
            shared=shared,
            certify=[
                *("--max-drop", f"{self.max_drop:g}", "--num-draft-tokens", str(k), "--limit", limit),
                *("--held-out-limit", limit, "--offset", str(BUNDLED_OFFSET if bundle else 0)),
            ],
            num_workers=self._workers(),
            out=self.out,
            target=pair.target,
            controls=() if served else CONTROLS,  # servers do not sample from a truncation
        )

    def _workers(self) -> int:
        if not self.answering.local:
            return 1
        return min(os.cpu_count() or 1, 4) if self.num_workers is None else self.num_workers


def usual_rules(heads: Collection[str], *, served: bool = False) -> dict[str, tuple[str, ...]]:
    """What every rule says of its place in a study: the setting that chooses its K, and the settings to measure.

    Args:
        heads: kinds of heads that need not be named, as those of a bundled pair.
        served: whether a server is to have them, which cannot have all.
    """
    from reprieve.needs import Need
    from reprieve.rules import RULES
    from reprieve.rules.learned import HeadRule

    kinds = [kind for kind in RULES if kind.about.study and (not issubclass(kind, HeadRule) or kind.head_kind in heads)]
    if served:
        unserved = {Need.ADVICE, Need.DRAFT_HIDDEN}
        kinds = [kind for kind in kinds if not unserved & set(kind.own_traits.needs)]
    return {kind.about.study[0]: kind.about.study for kind in kinds}


@dataclass
class Study:
    """The stages of a study, run as the commands a user would type; each resumes by itself.

    Args:
        rules: for each rule at the setting that chooses its K, the settings to measure.
        controls: arms that no rule stands behind.
        certified: for each rule to certify, its thresholds.
        shared: arguments of every measuring command; `certify` those of `certify`.
    """

    rules: dict[str, tuple[str, ...]]
    certified: dict[str, str]
    shared: list[str]
    certify: list[str]
    num_workers: int
    out: Path
    target: str
    controls: tuple[str, ...] = CONTROLS

    def __post_init__(self) -> None:
        self.stages = Stages(self.out, "study")

    def measure(self, tune: list[str], bench: list[str]) -> None:
        """K for each rule, the frontier, and the certificates, the first of them beside the others on a second core.

        Raises:
            StageFailed: names the stage.
        """
        first, *others = self.certified
        beside = self._certify(first, 1) if self.num_workers > 1 else None
        if beside:
            self.stages.start(beside)
        arms = [part for rule in self.rules for part in ("--arm", rule)]
        self.stages.run(
            Stage(
                "tune", ["bench", *arms, "--split", "validation", *tune, *self.shared, "--out", str(self.out / "tune")]
            )
        )
        arms = [part for name in self._arms() for part in ("--arm", name)]
        self.stages.run(Stage("frontier", ["bench", *arms, *bench, *self.shared, "--out", str(self.out / "frontier")]))
        for stage in [beside or self._certify(first, 1), *(self._certify(rule, self.num_workers) for rule in others)]:
            self.stages.run(stage)

    def report(self, title: str) -> None:
        """One page of all of it.

        Raises:
            StageFailed: it could not be written.
        """
        folders = [self.out / "frontier"]
        folders += [self.out / "certificates"] if any((self.out / "certificates").glob("*.json")) else []
        named = ["--title", title, "--out", str(self.out / "report.html")]
        self.stages.run(Stage("report", ["report", *map(str, folders), *named]))

    def _certify(self, rule: str, num_workers: int) -> Stage:
        asked = ["--rule", rule, "--thresholds", self.certified[rule], *self.certify, "--workers", str(num_workers)]
        arguments = ["certify", *asked, *self.shared, "--out", str(self.out / "certificates")]
        # That no threshold of a rule could be certified is a result, not a failure.
        return Stage(f"certify {rule.partition(':')[0]}", arguments, passes=(0, 1))

    def _arms(self) -> list[str]:
        """Every setting of every rule at the K that its rule is fastest at; lossless at its own, twice."""
        from reprieve.heads.loading import attach_heads
        from reprieve.rules import parse_rule

        arms = read_json(self.out / "tune" / "results.json", "the values of K")["fastest"]
        tuned = {best["spec"]: best["num_draft_tokens"] for best in arms}
        arms = [f"lossless@K={tuned['lossless']}", f"lossless_rerun@K={tuned['lossless']}", *self.controls]
        for rule, settings in self.rules.items():
            k = tuned[attach_heads(parse_rule(rule), self.target).spec]  # which may differ from what was typed
            arms += [f"{setting}@K={k}" for setting in settings]
        return arms


if __name__ == "__main__":
    sys.exit(run_command(StudyCommand, sys.argv[1:]))
