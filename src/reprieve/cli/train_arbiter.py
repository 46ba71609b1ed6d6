"""`reprieve train arbiter`: CoSpec's arbiter, warmed up on labelled traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import import_extra
from reprieve.settings import PairSettings
from reprieve.training.settings import WarmUp

if TYPE_CHECKING:
    from reprieve.heads.arbiter import Arbiter


@dataclass(frozen=True)
class TrainArbiter(Command):
    """Warm CoSpec's arbiter up on labelled traces (appendix C.1); run it again to resume.

    Args:
        preset: paper; or small, for a pair with a few million parameters, in under an hour on two cores.
        labels: Traces, from `reprieve mine arbitration`; several stores are joined. Repeatable.
        out: Folder for checkpoint, log and arbiter.
    """

    verb = "train arbiter"
    example = "reprieve train arbiter --preset small --labels runs/traces --out runs/arbiter-sft"
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
        for store in traces.stores:
            store.require_pair(pair.identity)
        pair.cached_draft()  # refuses a pair without a draft
        claim_head(self.out / "arbiter", "arbiter")
        self.keep_config(self.out)
        with screen.progress_bar("updates") as bar:
            arbiter = warm_up(
                pair,
                traces.problems,
                traces.task,
                self.out,
                num_draft_tokens=traces.num_draft_tokens,
                settings=self.settings,
                progress=screen.reporter(bar, "updates"),
            )
        report_arbiter(arbiter, self.out / "arbiter")
        return 0


def report_arbiter(arbiter: Arbiter, folder: Path) -> None:
    """Print the scores that the arbiter reached, and the command that uses it."""
    reached = arbiter.training["validation"]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in reached.items())
    screen.say(
        f"best at update {arbiter.training['update']}: {scores}\n"
        f"arbiter: {folder}   use it: reprieve bench --arm arbiter:path={folder} "
        f"--num-draft-tokens {arbiter.num_draft_tokens}"
    )
    screen.offer_length(f"arbiter:path={folder}", folder)
