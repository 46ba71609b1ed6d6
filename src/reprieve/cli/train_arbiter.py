"""`reprieve train arbiter`, `train arbiter-rl`: CoSpec's arbiter, warmed up on traces, improved on its rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import SpecError, import_extra
from reprieve.heads.settings import ArbiterShape
from reprieve.settings import PairSettings
from reprieve.training.settings import Reinforcement, RolloutSettings, WarmUp

if TYPE_CHECKING:
    from reprieve.heads.arbiter import Arbiter


@dataclass(frozen=True)
class TrainArbiter(Command):
    """Warm CoSpec's arbiter up on labelled traces (appendix C.1); run it again to resume.

    Args:
        preset: paper, or small: a pair of a few million parameters on two cores, in under an hour.
        labels: Traces, from `reprieve mine arbitration`; several stores are joined. Repeatable.
        out: Folder for checkpoint, log and arbiter.
    """

    verb = "train arbiter"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "small": {"learning_rate": 1e-3, "decisions_per_update": 128, "num_epochs": 4},
    }

    preset: str = "paper"
    labels: tuple[Path, ...] = (Path("runs/traces"),)
    settings: WarmUp = field(default_factory=WarmUp)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/arbiter-sft")

    def run(self) -> int:
        import_extra("peft", "arbiter")
        from reprieve.heads.files import claim_head
        from reprieve.training.arbiter_warm_up import read_traces, warm_up

        traces = read_traces(self.labels)
        pair = screen.load(self.pair)
        traces.require_pair(pair.identity)
        pair.cached_draft()  # refuses a pair without a draft
        claim_head(self.out / "arbiter", "arbiter")
        self.keep_config(self.out)
        with screen.progress_bar("updates") as bar:
            made = warm_up(
                pair,
                traces.problems,
                traces.task,
                self.out,
                num_draft_tokens=traces.num_draft_tokens,
                settings=self.settings,
                progress=screen.reporter(bar, "updates"),
            )
        _tell(made, self.out / "arbiter")
        return 0


@dataclass(frozen=True)
class TrainArbiterRl(Command):
    """Improve an arbiter on its own rollouts (CoSpec, section 3.4); run it again to resume.

    Args:
        preset: paper, or small: a pair of a few million parameters on two cores, in under an hour.
        start: The arbiter to begin with, from `reprieve train arbiter`; none begins without a warm-up.
        num_workers: Processes that decode rollouts.
        out: Folder for checkpoint, log and arbiter.
    """

    verb = "train arbiter-rl"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "small": {
            "learning_rate": 3e-4,
            "prompts_per_update": 16,
            "num_updates": 40,
            "num_epochs": 2,
            "steps_per_epoch": 4,
        },
    }

    start: str
    preset: str = "paper"
    num_workers: int = 1
    settings: Reinforcement = field(default_factory=Reinforcement)
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    out: Path = Path("runs/arbiter-rl")

    def run(self) -> int:
        import_extra("peft", "arbiter")
        if Path(self.start).resolve() == (self.out / "arbiter").resolve():
            raise SpecError(f"--start must not be what --out is to hold, {str(self.out / 'arbiter')!r}")
        from reprieve.heads.arbiter import Arbiter
        from reprieve.heads.binding import warn_of_transfer
        from reprieve.heads.files import claim_head
        from reprieve.training.arbiter_rl import reinforce
        from reprieve.training.arbiter_warm_up import untrained

        rollouts = self.rollouts
        first = None if self.start == "none" else Arbiter.from_pretrained(self.start)
        pair, task = screen.load_pair_and_task(rollouts.pair, rollouts.task, rollouts.prompt)
        if not task.graded:
            raise SpecError(f"task {rollouts.task} has no right answers: rollouts cannot be rewarded on it")
        pair.cached_draft()  # refuses a pair without a draft
        if first is None:
            shape = ArbiterShape(seed=self.settings.seed)
            first = untrained(pair, shape, rollouts.task, rollouts.num_draft_tokens or 16)
        warn_of_transfer(f"arbiter {self.start!r}", first.task, rollouts.task)
        claim_head(self.out / "arbiter", "arbiter")
        self.keep_config(self.out)
        with screen.progress_bar("updates") as bar:
            made = reinforce(
                pair,
                task,
                first,
                rollouts,
                self.out,
                settings=self.settings,
                num_workers=self.num_workers,
                progress=screen.reporter(bar, "updates"),
            )
        _tell(made, self.out / "arbiter")
        return 0


def _tell(made: Arbiter, folder: Path) -> None:
    """What the arbiter reached, and how to use it."""
    reached = made.training["validation"]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in reached.items())
    screen.say(
        f"best at update {made.training['update']}: {scores}\n"
        f"arbiter: {folder}   use it: reprieve bench --arm arbiter:path={folder} "
        f"--num-draft-tokens {made.num_draft_tokens}"
    )
