"""`reprieve audit`: what accepted tokens did to the next step; `arbitration` and `rejections`: whether it was right."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import SpecError, require_whole
from reprieve.settings import (
    BUNDLED_TASK,
    MAX_DRAFT_TOKENS,
    PairSettings,
    PromptSettings,
    SamplingParams,
    SamplingSettings,
)

if TYPE_CHECKING:
    from rich.table import Table

    from reprieve.tasks import Task


_ACTIVE = 10  # the paper's K
_BLOCK = 16  # drafted tokens a round where nothing says otherwise


@dataclass(frozen=True)
class Audit(Command):
    """Recompute the target's next step at every accepted token (ARC-Decode, Table 5).

    Args:
        rules: Rules, such as lts, lts:theta=0.5 or judge:path=heads/j.
        calibration: Bounds to hold other rules against; an lts rule has its own.
        drafter: draft, ngram, or eagle3:path=FOLDER.
        num_draft_tokens: K: deepest drafted token.
        task: Task of the problems. Default: that of the bundled pair.
        split: Split. Default: test if there is one.
        limit: Number of problems.
        offset: First problem of the split.
        active: Top-K of each distribution that divergences are taken on. Default: the calibration's own, else 10.
        seed: Same seed, same answers.
        out: File for the numbers, as JSON.
    """

    verb = "audit"

    rules: tuple[str, ...] = field(metadata={"positional": True})
    calibration: str | None = None
    drafter: str = "eagle3"
    num_draft_tokens: int = 16
    task: str = BUNDLED_TASK
    split: str | None = None
    limit: int = 200
    offset: int = 0
    active: int | None = None
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    prompt: PromptSettings = field(default_factory=PromptSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path | None = None

    def run(self) -> int:
        from reprieve.drafters import DRAFTERS
        from reprieve.evaluation.arms import rule_arms
        from reprieve.evaluation.auditing import audit
        from reprieve.heads.lts import LtsCalibration
        from reprieve.rules.lts import LtsRule

        screen.require_problems(self.limit, self.offset)
        if self.active is not None:
            require_whole("--active", self.active, 2)
        screen.require_file(self.out)
        DRAFTERS.make(self.drafter)
        arms = rule_arms(self.rules, self.num_draft_tokens, target=self.pair.target)
        given = None if self.calibration is None else LtsCalibration.from_pretrained(self.calibration)
        pair, task = screen.load_pair_and_task(self.pair, self.task, self.prompt)
        split = screen.split_of(task, self.split, "test")
        problems = task.problems(split, self.limit, offset=self.offset)
        params = _params(self.sampling, task, self.seed)
        summaries = []
        for arm in arms:
            bounds = arm.rule.head if isinstance(arm.rule, LtsRule) else given
            if bounds is not None:
                bounds.require_pair(pair.identity, self.calibration or arm.label)
            decoder = arm.decoder(pair, drafter=self.drafter, task=self.task)
            with screen.progress_bar(arm.label) as bar:
                progress = screen.reporter(bar)
                own = {} if bounds is None else bounds.settings
                top_k = self.active or int(own.get("active", _ACTIVE))
                made = audit(arm.label, decoder, pair, task, problems, params, top_k=top_k, progress=progress)
            summaries.append({**made.summary(bounds), "calibration": None if bounds is None else bounds.fingerprint})
        if self.out is not None:
            _write(self.out, {**_flags(self), "split": split, "audits": summaries})
        screen.console().print(_shift_table(summaries, len(problems)))
        return 0


@dataclass(frozen=True)
class AuditArbitration(Command):
    """Decode both branches of every mismatch that a rule reaches (CoSpec, Table 3).

    Args:
        rule: The rule that decides, such as arbiter:path=FOLDER,lambda=0.5 or state_arbiter.
        num_draft_tokens: K, the same in every round: after `auto`, branches would also differ in their blocks. Default:
            what the rule's arbiter was trained at, else 16.
        task: Task of the problems. Default: that of the bundled pair.
        split: Split. Default: test if there is one.
        limit: Number of problems.
        offset: First problem of the split.
        seed: Same seed, same answers. Branches go on greedily.
        out: File for the numbers, as JSON.
    """

    verb = "audit arbitration"

    rule: str = "arbiter"
    num_draft_tokens: int | None = None
    task: str = BUNDLED_TASK
    split: str | None = None
    limit: int = 100
    offset: int = 0
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    prompt: PromptSettings = field(default_factory=PromptSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path | None = None

    def run(self) -> int:
        from reprieve.evaluation.branches import diagnose, require_branches
        from reprieve.heads.arbiter import Arbiter
        from reprieve.heads.loading import attach_heads
        from reprieve.rules import parse_rule

        screen.require_problems(self.limit, self.offset)
        if self.num_draft_tokens is not None:
            require_whole("--num-draft-tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        screen.require_file(self.out)
        rule = attach_heads(parse_rule(self.rule), self.pair.target)
        require_branches(rule, sampled=self.sampling.temperature > 0)
        pair, task = screen.load_pair_and_task(self.pair, self.task, self.prompt)
        if not task.graded:
            raise SpecError(f"task {self.task} has no right answers: branches cannot be compared on it")
        split = screen.split_of(task, self.split, "test")
        trained_at = [head.num_draft_tokens for _, head in rule.heads if isinstance(head, Arbiter)]
        k = next(iter(trained_at), _BLOCK) if self.num_draft_tokens is None else self.num_draft_tokens
        decoder = pair.decoder(rule, num_draft_tokens=k, task=self.task)
        problems = task.problems(split, self.limit, offset=self.offset)
        params = _params(self.sampling, task, self.seed)
        with screen.progress_bar("problems") as bar:
            progress = screen.reporter(bar, "problems")
            summary = diagnose(decoder, pair, task, problems, params, progress=progress).summary()
        if self.out is not None:
            heads = {name: head.fingerprint for name, head in rule.heads}
            about = {"rule": rule.spec, "heads": heads, "num_draft_tokens": k, "split": split}
            _write(self.out, {**_flags(self), **about, "diagnosis": summary})
        screen.console().print(_branch_table(summary, rule.spec))
        return 0


@dataclass(frozen=True)
class AuditRejections(Command):
    """Put refused drafted tokens into lossless answers and see whether they change them (ARC-Decode, section 3.1).

    Args:
        drafter: draft, ngram, or eagle3:path=FOLDER.
        num_draft_tokens: K: deepest drafted token.
        embedding: Encoder that compares responses, such as sentence-transformers/all-mpnet-base-v2: agreed from cosine
            0.9 on.
        nli: Classifier that finds contradictions between responses, such as
            cross-encoder/nli-deberta-v3-base: agreed below probability 0.5.
        task: Task of the problems. Default: that of the bundled pair.
        split: Split. Default: test if there is one.
        limit: Number of problems.
        offset: First problem of the split.
        seed: Same seed, same answers. Responses go on greedily from a refused token.
        out: File for the numbers, as JSON.
    """

    verb = "audit rejections"

    drafter: str = "eagle3"
    num_draft_tokens: int = 16
    embedding: str | None = None
    nli: str | None = None
    task: str = BUNDLED_TASK
    split: str | None = None
    limit: int = 40
    offset: int = 0
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    prompt: PromptSettings = field(default_factory=PromptSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path | None = None

    def run(self) -> int:
        from reprieve.evaluation.rejections import Agreement, NoContradiction, SameAnswer, SimilarText, examine

        screen.require_problems(self.limit, self.offset)
        screen.require_file(self.out)
        pair, task = screen.load_pair_and_task(self.pair, self.task, self.prompt)
        measures: list[Agreement] = [SameAnswer(task)] if task.graded else []
        if self.embedding is not None:
            measures.append(SimilarText(self.embedding, pair.target.device))
        if self.nli is not None:
            measures.append(NoContradiction(self.nli, pair.target.device))
        if not measures:
            raise SpecError(f"task {self.task} has no right answers: name a model with --embedding or --nli")
        split = screen.split_of(task, self.split, "test")
        decoder = pair.decoder("lossless", num_draft_tokens=self.num_draft_tokens, drafter=self.drafter, task=self.task)
        problems = task.problems(split, self.limit, offset=self.offset)
        params = _params(self.sampling, task, self.seed)
        with screen.progress_bar("problems") as bar:
            progress = screen.reporter(bar, "problems")
            summary = examine(decoder, pair, task, problems, params, measures, progress=progress).summary()
        if self.out is not None:
            _write(self.out, {**_flags(self), "split": split, "rejections": summary})
        screen.console().print(_rejection_table(summary, [measure.name for measure in measures]))
        return 0


def _params(sampling: SamplingSettings, task: Task, seed: int) -> SamplingParams:
    return SamplingParams(**vars(sampling), max_new_tokens=task.max_new_tokens, stop=tuple(task.stop), seed=seed)


def _flags(command: Command) -> dict[str, Any]:
    """What the numbers were made with."""
    from reprieve.evaluation.runner import environment

    flags = {name: value for name, value in asdict(command).items() if name not in ("out", "pair")}
    return {"command": screen.command_line(), **environment(), **flags, **asdict(command)["pair"]}


def _write(path: Path, document: dict[str, Any]) -> None:
    from reprieve.files import replace_file

    replace_file(path, json.dumps(document, indent=2, default=str) + "\n")


def _shift_table(summaries: list[dict[str, Any]], num_problems: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"next-step shift of accepted tokens, JS in nats, n = {num_problems} problems; brackets are 95% "
        "intervals that take tokens for independent",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("arm", "tokens", "n", "mean", "median", "95%", "JS <= U, %", "JS <= tau, %"):
        table.add_column(name, justify="left" if name in ("arm", "tokens") else "right")
    for summary in summaries:
        for group in ("accepted", "swapped", "rescued"):
            values = summary[group]
            shifts = [f"{values[name]:.4f}" if name in values else "-" for name in ("mean", "median", "q95")]
            shares = [_covered(values, name) for name in ("within_bound", "within_tolerance")]
            table.add_row(summary["arm"] if group == "accepted" else "", group, str(values["num"]), *shifts, *shares)
    return table


def _covered(values: dict[str, Any], name: str) -> str:
    if name not in values:
        return "-"
    low, high = values[f"{name}_ci95"]
    return f"{100 * values[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _branch_table(summary: dict[str, Any], spec: str) -> Table:
    from rich import box
    from rich.table import Table

    from reprieve.evaluation.branches import CATEGORIES

    table = Table(
        title=f"{spec}: {summary['num_mismatches']} reached mismatches of {summary['num_problems']} problems; brackets "
        "are 95% bootstrap intervals over problems",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("category", "n", "share, %", "draft not worse, %", "draft chosen, %", "agreement, %"):
        table.add_column(name, justify="left" if name == "category" else "right")
    for category in CATEGORIES:
        values = summary[category]
        shares = (_interval(values[name]) for name in ("share", "draft_not_worse", "draft_chosen", "agreement"))
        table.add_row(category.replace("_", " "), str(values["num"]), *shares)
    return table


def _rejection_table(summary: dict[str, Any], measures: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    solved = f" ({summary['num_correct']} solved)" if "answer" in measures else ""
    table = Table(
        title=f"how many of {summary['num_refused']} refused tokens, at {summary['num_places']} places of "
        f"{summary['num_problems']} problems{solved}, would have changed nothing; brackets are 95% bootstrap intervals "
        "over problems",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("compared by", "tokens, %", "places with one, %", "places with all, %"):
        table.add_column(name, justify="left" if name == "compared by" else "right")
    for measure in measures:
        values = summary[measure]
        table.add_row(measure, *(_interval(values[name]) for name in ("tokens", "places_any", "places_all")))
    return table


def _interval(values: list[float] | None) -> str:
    if values is None:
        return "-"
    share, low, high = (100 * value for value in values)
    return f"{share:.1f} [{low:.1f}, {high:.1f}]"
