"""`reprieve tune k`: the K that suits each arm. `reprieve tune thresholds`: FSD's protocol."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.cli.comparing import measure
from reprieve.evaluation.settings import FsdSettings, RunSettings, SpeedSettings
from reprieve.servers.settings import EngineSettings
from reprieve.settings import AUTO, NumDraftTokens, PairSettings


@dataclass(frozen=True)
class TuneK(Command):
    """Find K for lossless and each arm separately, by tokens a second (AutoJudge, appendix G).

    On servers that is under load: at the first --concurrency, 1 unless given.

    Args:
        arm: A rule, such as top_k:k=4. Repeatable.
        num_draft_tokens: Values of K to try.
        out: Folder for results; run again with it to resume.
    """

    verb = "tune k"

    arm: tuple[str, ...] = ()
    num_draft_tokens: tuple[NumDraftTokens, ...] = (4, 8, 12, 16, 24, 32, AUTO)
    settings: RunSettings = field(default_factory=lambda: RunSettings(split="validation", limit=40))
    speed: SpeedSettings = field(default_factory=SpeedSettings)
    answering: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/tune")

    def run(self) -> int:
        from reprieve.evaluation.arms import make_arms
        from reprieve.evaluation.results import write_results
        from reprieve.evaluation.tuning import best_ks
        from reprieve.files import replace_file

        arms = make_arms(self.arm, self.answering.draft_tokens(*self.num_draft_tokens), target=self.pair.target)
        speed = self.speed
        if not self.answering.local:
            speed = dataclasses.replace(speed, concurrency=(speed.concurrency or (1,))[:1])
        run, document = measure(self, arms, self.settings, self.answering, self.pair, self.out, speed=speed)
        if not run.complete:
            screen.warn("interrupted: run again to resume")
            return 130
        write_results(document, self.out)
        chosen = best_ks(document)
        replace_file(self.out / "tuned.json", json.dumps({"arms": [asdict(best) for best in chosen]}, indent=2) + "\n")
        for best in chosen:
            speeds = ", ".join(f"{k}: {speed:.0f}" for k, speed in best.by_k.items())
            screen.say(f"--arm {best.arm}   (tokens a second by K: {speeds})")
        return 0


@dataclass(frozen=True)
class TuneThresholds(Command):
    """Choose thresholds as FSD's authors did.

    K' for lossless, the threshold that accepts as much as lossless does, then upward until the loss is too large; the
    draft is greedy, the target samples: the local engine only, since servers draft at the target's temperature.

    Args:
        out: Folder for results; run again with it to resume.
    """

    verb = "tune thresholds"

    settings: FsdSettings = field(default_factory=FsdSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/thresholds")

    def run(self) -> int:
        from reprieve.evaluation.results import write_results
        from reprieve.evaluation.tuning import FsdProtocol

        protocol = FsdProtocol(self.settings, command=screen.command_line())
        asked = self.settings.run
        with screen.engine_and_task(EngineSettings(), self.pair, asked.task, asked.prompt) as (engine, task):
            self.keep_config(self.out)
            with screen.progress_bar("answers") as bar:
                document = protocol.run(engine, task, self.out, announce=screen.say, progress=screen.reporter(bar))
        if document is None:
            screen.warn("interrupted: run again to resume")
            return 130
        write_results(document, self.out)
        screen.show_results(document)
        return 0
