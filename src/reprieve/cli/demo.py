"""`reprieve demo`: the main job on the bundled pair."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.backends.settings import EngineSettings
from reprieve.bench.settings import RunSettings
from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.cli.comparing import measure, report
from reprieve.cli.generate import Generate
from reprieve.settings import AUTO, NumDraftTokens, PairSettings

ARMS = ("judge:threshold=0.1", "margin:delta=2", "typical", "fuzzy:threshold=1,divergence=kl,form=released")
QUESTION = "Anna has 23 apples. She buys 18 more apples. She gives away 9 apples. How many apples does Anna have now?"


@dataclass(frozen=True)
class Demo(Command):
    """Compare a trained head and three training-free rules with lossless and target-only on generated word problems.

    Args:
        num_draft_tokens: K, drafted tokens a round; auto for as many as pay, or auto:path=HEAD.
        out: Folder for results; run again with it to resume.
    """

    verb = "demo"

    num_draft_tokens: NumDraftTokens = AUTO
    settings: RunSettings = field(default_factory=lambda: RunSettings(limit=40))
    pair: PairSettings = field(default_factory=lambda: PairSettings(dtype="float32"))
    out: Path = Path("runs/demo")

    def run(self) -> int:
        screen.say(
            f"Answers one question losslessly and with a trained rule, then compares {len(ARMS)} rules with lossless "
            f"decoding on {self.settings.limit} problems.\nThe models are bundled: nothing is downloaded. Takes about "
            "two minutes on two CPU cores; Ctrl-C keeps what is done."
        )
        for rule in ("lossless", ARMS[0]):
            screen.console().print(f"\n[bold]{rule}[/bold]  {QUESTION}", soft_wrap=True)
            Generate(QUESTION, rule=rule, num_draft_tokens=self.num_draft_tokens, pair=self.pair).run()
            screen.say("plain: the target's token; green: drafted, matched; yellow: drafted, rescued\n")
        from reprieve.bench.arms import make_arms

        arms = make_arms(ARMS, [self.num_draft_tokens], target=self.pair.target)
        run, document = measure(self, arms, self.settings, EngineSettings(), self.pair, self.out)
        status = report(run, document, EngineSettings(), self.out)
        screen.say(
            f"{self.settings.limit} problems give wide intervals: --limit 500 narrows them.\n"
            "Next: reprieve serve   opens a page that shows where each token comes from"
        )
        return status
