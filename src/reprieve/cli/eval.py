"""`reprieve eval`: lm-evaluation-harness's tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import import_extra
from reprieve.evaluation.settings import HarnessSettings
from reprieve.settings import AUTO, NumDraftTokens, PairSettings


@dataclass(frozen=True)
class Eval(Command):
    """Run lm-evaluation-harness's tasks through target-only, lossless and rules; resumes.

    Arms run one after another here: compare quality and tokens a round; for speeds, `reprieve bench` has arms take
    turns.

    Args:
        arm: A rule, such as top_k:k=4. Repeatable.
        num_draft_tokens: K, drafted tokens a round; auto for as many as pay, or auto:path=HEAD.
        out: Folder for results; run again with it to resume.
    """

    verb = "eval"

    settings: HarnessSettings
    arm: tuple[str, ...] = ()
    num_draft_tokens: NumDraftTokens = AUTO
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/eval")

    def run(self) -> int:
        import_extra("lm_eval", "eval")
        from reprieve.evaluation.arms import make_arms
        from reprieve.evaluation.harness import HarnessRun, evaluate_arms

        run = HarnessRun(self.settings)
        arms = make_arms(self.arm, [self.num_draft_tokens], target=self.pair.target)
        documents = evaluate_arms(arms, screen.load(self.pair), self.out, run, command=screen.command_line())
        self.keep_config(self.out)
        for name, document in documents.items():
            if "metrics" in document:
                screen.say(f"{name}, scored by the target's likelihoods, the same for every rule:")
                metrics = next(iter(document["metrics"].values()))
                numbers = {key: value for key, value in metrics.items() if isinstance(value, float)}
                screen.say("  " + ", ".join(f"{key} {value:.4f}" for key, value in numbers.items()))
            else:
                screen.show_results(document)
        screen.say(f"results: {self.out}")
        return 0
