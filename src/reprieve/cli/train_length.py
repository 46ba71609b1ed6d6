"""`reprieve train length`: a head that decides when drafting ends."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import import_extra
from reprieve.settings import PairSettings, ProblemSettings
from reprieve.training.settings import LengthTraining

_WORK = "training"  # folder with the state of an interrupted training


@dataclass(frozen=True)
class TrainLength(Command):
    """Train a head that ends a drafted block when further drafting does not pay off; run it again to resume.

    Args:
        rule: Rule whose acceptance the head predicts, such as lossless or judge:path=heads/j.
        out: Folder for the head.
    """

    verb = "train length"
    example = "reprieve train length --rule margin:delta=2 --limit 200 --out heads/length"

    rule: str = "lossless"
    problems: ProblemSettings = field(default_factory=lambda: ProblemSettings(split="train"))
    settings: LengthTraining = field(default_factory=LengthTraining)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("heads/length")

    def run(self) -> int:
        import_extra("sklearn", "labels")
        from reprieve.heads.files import claim_head
        from reprieve.heads.loading import attach_heads, require_heads_fit
        from reprieve.rules import parse_rule
        from reprieve.training.length import require_thresholds, train_length

        rule = attach_heads(parse_rule(self.rule), self.pair.target)
        require_thresholds(rule, self.settings)
        pair, task = screen.load_for(self.pair, self.problems)
        require_heads_fit(rule, pair.identity, self.problems.task)
        pair.cached_draft()
        claim_head(self.out, "length")
        self.keep_config(self.out)
        problems = screen.problems_for(pair, task, self.problems)
        with screen.progress_bar("answers") as bar:
            head = train_length(
                pair,
                rule,
                self.problems.task,
                problems,
                max_new_tokens=task.max_new_tokens,
                settings=self.settings,
                folder=self.out / _WORK,
                progress=screen.reporter(bar, "answers"),
            )
        digests = tuple(sorted({problem.digest for problem in problems}))
        replace(head, prompt=self.problems.prompt.format, problems=digests).save_pretrained(self.out)
        shutil.rmtree(self.out / _WORK, ignore_errors=True)
        training = head.training
        this, after = training["auc_held_out"]
        share, gain = training["accepted_share"], training["expected_over_best_constant"]
        screen.say(
            f"{training['num_tokens']} drafted tokens of {training['num_problems']} answers; "
            f"{training['num_held_out']} held out: ROC AUC {this:.3f} for a token, {after:.3f} for the next\n"
            f"price {head.price:g}: a token is drafted if its acceptance chance is at least this; {share:.0%} of them "
            f"accepted, estimated {gain:.2f} times as fast as K = {training['best_constant']}, the best constant\n"
            f"head: {self.out}   use it: reprieve bench --arm '{self.rule}@K=auto:path={self.out}'"
        )
        return 0
