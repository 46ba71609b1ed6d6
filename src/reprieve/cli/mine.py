"""`reprieve mine autojudge|pivot|arbitration`: labelled mismatches into a store."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from reprieve.cli import screen
from reprieve.cli.command import INTERRUPTED, Command
from reprieve.errors import SpecError, require_whole
from reprieve.mining.settings import AutoJudgeMining, MiningSettings, PivotMining, TraceMining


@dataclass(frozen=True)
class Mine(Command):
    """Label mismatches.

    Args:
        num_workers: Number of processes; each loads the pair.
        out: Label store; run again with it to resume.
    """

    settings: MiningSettings
    num_workers: int = 1
    out: Path = Path("runs/labels")

    def run(self) -> int:
        require_whole("workers", self.num_workers, 1, 1024)
        if not self.settings.engine.local and self.num_workers != 1:
            raise SpecError(
                f"workers must be 1 on servers, got {self.num_workers}; --in-flight sets how many problems run at once"
            )
        screen.quiet_transformers()
        from reprieve.mining.building import build
        from reprieve.mining.runner import mine_in_processes, mine_problems
        from reprieve.mining.show import summarise_labels
        from reprieve.mining.store import LabelStore

        with screen.progress("mining", "problems") as progress:
            with contextlib.closing(build(self.settings, announce=screen.warn)) as job:
                store, problems = LabelStore(self.out, job.manifest), job.problems
                self.keep_config(self.out)
                if self.num_workers == 1:
                    in_flight = self.settings.in_flight
                    report = mine_problems(job.miner, problems, store, num_in_flight=in_flight, progress=progress)
            if self.num_workers > 1:
                del job  # with its models: each process loads its own
                workers = self.num_workers
                report = mine_in_processes(self.settings, problems, store, num_workers=workers, progress=progress)
        report.require_some()
        summary = summarise_labels(store.problems(), store.manifest.get("max_new_tokens"))
        screen.say(summary.sentence())
        if summary.num_cut_off:
            length = store.manifest["max_new_tokens"]
            loud = summary.num_cut_off > screen.MOST_CUT_OFF * summary.num_problems
            screen.warn(
                f"{'RESPONSES CUT OFF: ' if loud else ''}{summary.num_cut_off} of {summary.num_problems} responses "
                f"ended at {length} tokens, without their answer: raise --max-new-tokens"
            )
        screen.say(
            f"labels: {self.out}   mined now: {report.num_mined}, there before: {report.num_skipped}, "
            f"failed: {len(report.errors)}"
        )
        if report.interrupted:
            screen.warn("interrupted: finished problems are kept; run again to resume")
            return INTERRUPTED
        return 1 if report.errors else 0


@dataclass(frozen=True)
class MineAutoJudge(Mine):
    """Find the mismatches that change the answer (AutoJudge, Algorithm 1)."""

    verb = "mine autojudge"
    example = "reprieve mine autojudge --limit 200 --out runs/labels"

    settings: AutoJudgeMining = field(default_factory=AutoJudgeMining)


@dataclass(frozen=True)
class MinePivot(Mine):
    """Label the tokens that speculative sampling rejects by rollouts (PAD, Algorithm 1)."""

    verb = "mine pivot"
    example = "reprieve mine pivot --limit 200 --out runs/pivots"

    settings: PivotMining = field(default_factory=PivotMining)
    out: Path = Path("runs/pivots")


@dataclass(frozen=True)
class MineArbitration(Mine):
    """Trace plain speculative rounds and label which side of each mismatch ends better (CoSpec, appendix C.1)."""

    verb = "mine arbitration"
    example = "reprieve mine arbitration --limit 200 --out runs/traces"

    settings: TraceMining = field(default_factory=TraceMining)
    out: Path = Path("runs/traces")
