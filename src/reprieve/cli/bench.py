"""`reprieve bench`: arms side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.backends.settings import EngineSettings
from reprieve.bench.settings import RunSettings, SpeedSettings, VerdictSettings
from reprieve.cli.command import Command
from reprieve.cli.comparing import measure, report, show_verdicts
from reprieve.errors import require_choice
from reprieve.settings import AUTO, NumDraftTokens, PairSettings


@dataclass(frozen=True)
class Bench(Command):
    """Compare rules on a task; target-only, draft-only and lossless are always among them.

    Args:
        arm: A rule, such as margin:delta=1,2,3 (an arm for each) or judge:path=heads/j@K=24; lossless_rerun;
            direct:top_k:k=4. Repeatable.
        num_draft_tokens: K, drafted tokens per round; several as 8,16,auto; auto (adaptive), or auto:path=HEAD.
        num_workers: Parallel processes. With more than one, timings are unreliable.
        out: Folder for results; run again with it to resume.
    """

    verb = "bench"
    example = "reprieve bench --arm judge --arm margin:delta=1,2 --limit 100"

    arm: tuple[str, ...] = ()
    num_draft_tokens: tuple[NumDraftTokens, ...] = (AUTO,)
    settings: RunSettings = field(default_factory=RunSettings)
    speed: SpeedSettings = field(default_factory=SpeedSettings)
    verdicts: VerdictSettings = field(default_factory=VerdictSettings)
    num_workers: int = 1
    answering: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/bench")

    def run(self) -> int:
        from reprieve.bench.arms import make_arms

        arms = make_arms(self.arm, self.answering.draft_tokens(*self.num_draft_tokens), target=self.pair.target)
        chat = None
        if self.verdicts.judge is not None:  # a judge that cannot be used fails before anything is measured
            from reprieve.mining.recipes import make_chat

            require_choice("baseline", self.verdicts.baseline, tuple(arm.label for arm in arms))
            chat = make_chat(self.verdicts.judge)
        run, document = measure(
            self,
            arms,
            self.settings,
            self.answering,
            self.pair,
            self.out,
            num_workers=self.num_workers,
            speed=self.speed,
        )
        status = report(run, document, self.answering, self.out, num_workers=self.num_workers)
        if chat is not None and run.complete:
            show_verdicts(run, chat, self.verdicts, self.out)
        return status
