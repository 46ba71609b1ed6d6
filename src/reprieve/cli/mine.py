"""`reprieve mine`: labelled mismatches into a store; and `reprieve labels`: what a store holds, labels made by hand."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.cli import screen
from reprieve.cli.command import INTERRUPTED, Command
from reprieve.errors import SpecError, require_whole
from reprieve.mining.settings import AutoJudgeMining, MiningSettings, PivotMining, TraceMining
from reprieve.settings import BUNDLED_TASK, PairSettings

if TYPE_CHECKING:
    from reprieve.mining.store import ProblemLabels


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


@dataclass(frozen=True)
class ShowLabels(Command):
    """Print labelled problems: important tokens in red, unimportant ones in green, and the result of each replacement.

    The other model's token is in brackets.

    Args:
        store: Label store, from `reprieve mine`.
        problem: Problem id. Repeatable.
        limit: Number of problems to print, from the first, without --problem.
    """

    verb = "labels show"
    example = "reprieve labels show runs/labels --limit 3"

    store: Path = field(metadata={"positional": True})
    problem: tuple[str, ...] = ()
    limit: int = 1

    def run(self) -> int:
        screen.quiet_transformers()
        from reprieve.mining.show import terminal_text

        problems, tokenizer = _open(self.store)
        chosen = _choose(problems, self.problem, self.limit)
        for labels in chosen:
            screen.console().print(terminal_text(labels, tokenizer), soft_wrap=True)
        return 0


@dataclass(frozen=True)
class LabelStats(Command):
    """Counts, shares by class of token, and the most frequent important tokens.

    Args:
        store: Label store, from `reprieve mine`.
        top: Number of most frequent important tokens to list.
    """

    verb = "labels stats"
    example = "reprieve labels stats runs/labels"

    store: Path = field(metadata={"positional": True})
    top: int = 15

    def __post_init__(self) -> None:
        require_whole("top", self.top, 1)

    def run(self) -> int:
        screen.quiet_transformers()
        from rich import box
        from rich.table import Table

        from reprieve.mining.show import frequent_important, shares_by_class, summarise_labels
        from reprieve.stats import wilson_interval

        problems, tokenizer = _open(self.store)
        summary = summarise_labels(problems)
        screen.say(summary.sentence())
        if summary.num_problems:
            screen.say(f"{summary.num_generated / summary.num_problems:.0f} tokens generated per problem")
        table = Table("class of the target's token", "labelled", "important", "share [95%]", box=box.SIMPLE_HEAD)
        for name, num_labelled, num_important in shares_by_class(problems, tokenizer):
            low, high = wilson_interval(num_important, num_labelled)
            share = f"{100 * num_important / num_labelled:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
            table.add_row(name, str(num_labelled), str(num_important), share)
        screen.console().print(table)
        swaps = Table("important: target", "draft", "times", box=box.SIMPLE_HEAD)
        for target_text, draft_text, count in frequent_important(problems, tokenizer, self.top):
            swaps.add_row(repr(target_text), repr(draft_text), str(count))
        screen.console().print(swaps)
        return 0


@dataclass(frozen=True)
class ImportLabels(Command):
    """Import labels made by hand (Judge Decoding's protocol) into a store that `reprieve train judge` reads.

    Args:
        annotations: JSONL: prompt, response, wrong = [[start, end], ...].
        task: Name of the task the responses are of. Default: that of the bundled pair.
        out: New label store.
    """

    verb = "labels import"
    example = "reprieve labels import annotations.jsonl --out runs/annotations"

    annotations: Path = field(metadata={"positional": True})
    task: str = BUNDLED_TASK
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/annotations")

    def run(self) -> int:
        pair = screen.load(self.pair)
        from reprieve.mining.show import summarise_labels
        from reprieve.mining.store import LabelStore, read_annotations

        problems = read_annotations(self.annotations, pair.tokenizer)
        store = LabelStore(self.out, {"miner": "annotations", **asdict(pair.identity), "task": self.task})
        for labels in problems:
            if labels.problem_id not in store.done():
                store.append(labels)
        screen.say(summarise_labels(store.problems()).sentence())
        screen.say(f"labels: {self.out}")
        return 0


def _open(folder: Path) -> tuple[list[ProblemLabels], Any]:
    from reprieve.mining.store import LabelStore
    from reprieve.models.loading import load_tokenizer

    store = LabelStore(folder)
    return store.problems(), load_tokenizer(store.manifest.get("draft") or store.manifest["target"])


def _choose(problems: list[ProblemLabels], wanted: tuple[str, ...], limit: int) -> list[ProblemLabels]:
    require_whole("limit", limit, 1)
    if not wanted:
        return problems[:limit]
    by_id = {problem.problem_id: problem for problem in problems}
    if missing := [name for name in wanted if name not in by_id]:
        raise SpecError(f"problem must be in the store, got {missing[0]!r}; it has {', '.join(list(by_id)[:5])} ...")
    return [by_id[name] for name in wanted]
