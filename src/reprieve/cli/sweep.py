"""`reprieve sweep`: one rule over thresholds and K."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.cli.command import Command
from reprieve.cli.comparing import measure, report
from reprieve.evaluation.settings import RunSettings
from reprieve.servers.settings import EngineSettings
from reprieve.settings import AUTO, NumDraftTokens, PairSettings


@dataclass(frozen=True)
class Sweep(Command):
    """Draw a rule's frontier: its parameter at every value, at every K.

    Args:
        rule: The rule, such as fuzzy:divergence=js.
        thresholds: Values of the rule's own parameter, such as 0.1,0.2,0.4.
        dial: Which parameter to vary. Default: the rule's dial.
        num_draft_tokens: K, drafted tokens a round; several as 8,16,auto; auto for as many as pay, or auto:path=HEAD.
        num_workers: Processes side by side: quicker, but their speeds are of a busy machine.
        out: Folder for results; run again with it to resume.
    """

    verb = "sweep"

    rule: str
    thresholds: tuple[float, ...]
    dial: str | None = None
    num_draft_tokens: tuple[NumDraftTokens, ...] = (AUTO,)
    settings: RunSettings = field(default_factory=RunSettings)
    num_workers: int = 1
    answering: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/sweep")

    def run(self) -> int:
        from reprieve.evaluation.arms import make_arms, sweep_rules

        rules = sweep_rules(self.rule, self.thresholds, dial=self.dial, target=self.pair.target)
        arms = make_arms(rules, self.answering.draft_tokens(*self.num_draft_tokens), target=self.pair.target)
        run, document = measure(
            self, arms, self.settings, self.answering, self.pair, self.out, num_workers=self.num_workers
        )
        return report(run, document, self.answering, self.out, num_workers=self.num_workers)
