"""`reprieve demo`: compare rules on the bundled pair."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.backends.settings import EngineSettings
from reprieve.bench.settings import RunSettings
from reprieve.cli import screen
from reprieve.cli.bench import compare
from reprieve.cli.command import Command
from reprieve.cli.generate import Generate
from reprieve.display import LEGEND
from reprieve.settings import AUTO, NumDraftTokens, PairSettings

ARMS = ("judge:threshold=0.1", "margin:delta=2", "typical", "fuzzy:threshold=1,divergence=kl,form=released")
QUESTION = (
    "Noah works 6 hours a day for 4 days and earns 3 dollars per hour. He spends 48 dollars on food. How many dollars "
    "does Noah have now?"
)
_SHOWN_K = 16  # of the two answers that are shown; `auto` has to see some answers first
_SECONDS = 3  # of a problem, all arms, on two CPU cores: 40 problems took two minutes
_FEW = 200  # problems: fewer give wide intervals


@dataclass(frozen=True)
class Demo(Command):
    """Compare a trained head and three training-free rules with lossless and target-only on generated word problems.

    Args:
        num_draft_tokens: K, drafted tokens per round; auto (adaptive), or auto:path=HEAD.
        out: Folder for results; run again with it to resume.
    """

    verb = "demo"
    example = "reprieve demo --limit 10"

    num_draft_tokens: NumDraftTokens = AUTO
    settings: RunSettings = field(default_factory=lambda: RunSettings(limit=40))
    pair: PairSettings = field(default_factory=lambda: PairSettings(dtype="float32"))
    out: Path = Path("runs/demo")

    def run(self) -> int:
        minutes = max(1, round(self.settings.limit * _SECONDS / 60))
        screen.say(
            f"Answers one question losslessly and with a trained rule, then compares {len(ARMS)} rules with lossless "
            f"decoding on {self.settings.limit} problems.\nTakes about {minutes} minute{'s' * (minutes > 1)} on two "
            "CPU cores; the models are bundled, nothing is downloaded. Ctrl-C keeps what is done."
        )
        k = _SHOWN_K if self.num_draft_tokens == AUTO else self.num_draft_tokens
        for rule in ("lossless", ARMS[0]):
            screen.console().print(f"\n[bold]{rule}[/bold]  {QUESTION}", soft_wrap=True)
            Generate(QUESTION, rule=rule, num_draft_tokens=k, pair=self.pair).run()
            screen.say(f"{LEGEND}\n")
        from reprieve.bench.arms import make_arms

        arms = make_arms(ARMS, [self.num_draft_tokens], target=self.pair.target)
        status, _ = compare(self, arms, self.settings, EngineSettings(), self.pair, self.out)
        if self.settings.limit < _FEW:
            screen.say(
                f"{self.settings.limit} problems give wide intervals: reprieve demo --limit 500 --out runs/demo-500"
            )
        if (picture := self.out / "frontier.png").exists():
            screen.say(f"Picture: {picture}")
        screen.say("Next: reprieve serve   opens a page that shows the source of each token")
        return status
