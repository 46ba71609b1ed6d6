"""`reprieve train eagle`: a drafting head from the target's own answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import import_extra
from reprieve.settings import PairSettings, ProblemSettings, SamplingParams
from reprieve.training.settings import EagleTraining


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

        pair, task = screen.load_for(self.pair, self.problems, decodes=False)
        self.settings.layers_of(pair.target.config.get_text_config().num_hidden_layers)
        claim_head(self.out)
        claim_head(self.out / "head", "eagle3")
        self.keep_config(self.out)
        problems = screen.problems_for(pair, task, self.problems)
        params = SamplingParams(max_new_tokens=task.max_new_tokens, temperature=1.0, seed=self.settings.seed)
        path = own_text_path(self.out, pair, self.problems, params, mixed=True)
        with screen.progress_bar("answers") as bar:
            texts = write_own_texts(path, pair, problems, params=params, mixed=True, progress=screen.reporter(bar))
        with screen.progress_bar("updates") as bar:
            progress = screen.reporter(bar, "updates")
            reached = train_eagle3(pair, texts, self.out, settings=self.settings, progress=progress)
        agreed = ", ".join(f"{share:.1%}" for share in reached["accuracy"])
        screen.say(
            f"{reached['num_texts']} answers in {reached['seconds']} s; on {reached['num_held_out']} held-out answers "
            f"head and target have the same first choice, step by step while they agree: {agreed}\n"
            f"head: {self.out / 'head'}   use it: reprieve bench --drafter eagle3:path={self.out / 'head'}"
        )
        return 0
