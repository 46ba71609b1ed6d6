"""Quality of a rule's choices of branch at the mismatches that its own decoding reaches (CoSpec, Table 3).

At every effective decision both branches are decoded to their ends with the same frozen policy: the only intervention
is the choice at that one mismatch. Branches are continued greedily even if the answers that lead to them are sampled,
so one continuation is enough.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from arms import answer_params, flags_in_force, require_file, share_with_interval, write_json
from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.cli.main import run_command
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError, require_whole
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.loading import attach_heads
from reprieve.mining.target import ResponseFormat
from reprieve.models.cached_model import eos_token_ids
from reprieve.rules import Rule, parse_rule
from reprieve.settings import MAX_DRAFT_TOKENS, PairSettings, ProblemSettings, SamplingSettings
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.prompting import prompt_ids_of
from reprieve.types import Generation, RoundTrace
from tables import share_text

CATEGORIES = ("all", "draft_better", "target_better", "both_right", "both_wrong")
_SHARES = {"draft_not_worse": "num_draft_not_worse", "draft_chosen": "num_draft_chosen", "agreement": "num_agreed"}


@dataclass(frozen=True)
class BranchChoices:
    """Choices between a draft's and a target's branch, and the utility of each branch: [n] each (CoSpec, Table 3)."""

    accepted: Sequence[bool]  # whether the draft's was chosen
    draft_utilities: Sequence[float]
    target_utilities: Sequence[float]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return counts, overall and by category: all, draft not worse, draft chosen, chosen branch not worse.

        Branches of equal utility count as both right if it is at least 0.5, else as both wrong.
        """
        accepted, draft = np.asarray(self.accepted, dtype=bool), np.asarray(self.draft_utilities)
        gains = draft - np.asarray(self.target_utilities)
        groups = {
            "all": np.ones_like(accepted),
            "draft_better": gains > 0,
            "target_better": gains < 0,
            "both_right": (gains == 0) & (draft >= 0.5),
            "both_wrong": (gains == 0) & (draft < 0.5),
        }
        flags = {
            "num": np.ones_like(accepted),
            "num_draft_not_worse": gains >= 0,
            "num_draft_chosen": accepted,
            "num_agreed": np.where(accepted, gains >= 0, gains <= 0),
        }
        return {
            name: {key: int((members & flag).sum()) for key, flag in flags.items()} for name, members in groups.items()
        }


@dataclass(frozen=True)
class Diagnosis:
    """The choices of a rule at reached mismatches, problem by problem."""

    num_correct: int
    choices: Sequence[BranchChoices]  # of each problem

    def summary(self) -> dict[str, Any]:
        """Return Table 3: each category's share of the mismatches and, within it, how often the draft's branch was not
        worse, how often it was chosen, and how often the chosen branch was not worse than the other, with 95% bootstrap
        intervals over problems."""
        counts = [choices.counts() for choices in self.choices]
        totals = np.array([count["all"]["num"] for count in counts])
        result: dict[str, Any] = {
            "num_problems": len(counts),
            "num_correct": self.num_correct,
            "num_mismatches": int(totals.sum()),
        }
        for category in CATEGORIES:
            nums = np.array([count[category]["num"] for count in counts])
            shares = {"share": share_with_interval(nums, totals)}
            for name, key in _SHARES.items():
                shares[name] = share_with_interval(np.array([count[category][key] for count in counts]), nums)
            result[category] = {"num": int(nums.sum()), **shares}
        return result


def require_branches(rule: Rule, *, sampled: bool) -> None:
    """Refuse a rule whose own decoding could not continue with either branch of a mismatch.

    Raises:
        SpecError: the rule rescues nothing, replaces the lossless check, limits rescues by a budget or, with sampled
            answers, does not compare the draft's token with a draw of the target's.
    """
    traits = rule.traits
    if rule.threshold == -math.inf:
        raise SpecError(f"--rule must let something pass that lossless decoding rejects, got {rule.spec!r}")
    if traits.replaces or rule.limits is not None:
        raise SpecError(f"--rule must decide each mismatch by its risk alone, {rule.spec!r} does not")
    if sampled and traits.check != "exact":
        raise SpecError(
            f"--rule {rule.spec!r} does not compare drafted tokens with the target's own draws: at --temperature "
            "above 0 only arbiter rules have both branches"
        )


def diagnose(
    decoder: SpeculativeDecoder,
    pair: Pair,
    task: Task,
    problems: Sequence[TaskProblem],
    params: SamplingParams,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Decode problems and continue both branches of every decision greedily to their ends.

    Args:
        decoder: decodes with a rule that `require_branches` accepts.
        params: of the answers; each problem has its own seed, as in `reprieve bench`.
    """
    responses = ResponseFormat(
        pair.tokenizer, task, eos_token_ids(pair.target, pair.tokenizer), max_new_tokens=params.max_new_tokens
    )
    choices, num_correct = [], 0
    for number, problem in enumerate(problems):
        branches = _Branches(decoder, responses, problem, params.for_problem(number))
        choices.append(branches.choices())
        num_correct += branches.correct
        progress(number + 1, len(problems))
    return Diagnosis(num_correct, choices)


class _Branches:
    """A problem's answer and its alternative branches."""

    def __init__(
        self, decoder: SpeculativeDecoder, responses: ResponseFormat, problem: TaskProblem, params: SamplingParams
    ) -> None:
        self.decoder = decoder
        self.responses = responses
        self.problem = problem
        self.params = params
        self.made = decoder.generate(prompt_ids_of(problem, decoder.tokenizer), params, trace=True)
        self.correct = self._is_correct(self.made.token_ids)

    def choices(self) -> BranchChoices:
        accepted: list[bool] = []
        arbiter_values: list[float] = []
        target_values: list[float] = []
        for start, traced, node in _decisions(self.made):
            took_draft = node < len(traced.path)
            accepted.append(took_draft)
            for values, draft in ((arbiter_values, True), (target_values, False)):
                known = self.params.greedy and draft == took_draft  # the answer itself
                right = self.correct if known else self._is_correct(self._branch(start, traced, node, draft=draft))
                values.append(float(right))
        return BranchChoices(accepted, arbiter_values, target_values)

    def _branch(self, start: int, traced: RoundTrace, node: int, *, draft: bool) -> list[int]:
        """Return the complete response that takes the draft's or the target's token at a position of a round."""
        token_ids = [*self.made.token_ids[:start], *traced.drafted_ids[:node]]
        token_ids.append((traced.drafted_ids if draft else traced.target_ids)[node])
        if draft and self.params.greedy:
            token_ids += self._scan_on(traced, node + 1)
        return self._continued(token_ids)

    def _scan_on(self, traced: RoundTrace, first: int) -> list[int]:
        """Return the tokens that the block commits from a position on, by its traced decisions."""
        assert traced.risks is not None and traced.bonus_id is not None
        limit = self.decoder.rule.threshold
        for node in range(first, len(traced.drafted_ids)):
            if not traced.lossless_accepts[node] and traced.risks[node] > limit:
                return [*traced.drafted_ids[first:node], traced.target_ids[node]]
        return [*traced.drafted_ids[first:], traced.bonus_id]

    def _continued(self, response_ids: list[int]) -> list[int]:
        """Decode a response to its end, or truncate it where it has already ended."""
        if (end := self.responses.length_of(response_ids)) is not None:
            return response_ids[:end]
        num_left = self.params.max_new_tokens - len(response_ids)
        generation = self.decoder.generate(
            [*self.made.prompt_ids, *response_ids],
            dataclasses.replace(self.params, max_new_tokens=num_left, temperature=0.0, draft_temperature=None),
        )
        return [*response_ids, *generation.token_ids]

    def _is_correct(self, response_ids: list[int]) -> bool:
        return self.responses.task.equivalent(self.responses.answer(response_ids), self.problem.reference)


def _decisions(generation: Generation) -> list[tuple[int, RoundTrace, int]]:
    """Return each effective decision: its round's offset in the response, the round, and its position in the block."""
    mismatches, start = [], 0
    assert generation.trace is not None
    for traced in generation.trace:
        reached = min(len(traced.committed), len(traced.path) + 1, len(traced.drafted_ids))
        for node in range(reached):
            if not traced.lossless_accepts[node]:
                mismatches.append((start, traced, node))
        start += len(traced.committed)
    return mismatches


_BLOCK = 16  # default number of drafted tokens per round


@dataclass(frozen=True)
class Branches(Command):
    """Decode both branches of every mismatch that a rule reaches (CoSpec, Table 3).

    Args:
        rule: The rule that decides, such as arbiter:path=FOLDER,lambda=0.5 or state_arbiter.
        num_draft_tokens: K, the same in every round: with `auto`, branches would also differ in their blocks. Default:
            the training value of the rule's arbiter, else 16.
        seed: Same seed, same answers. Branches are continued greedily.
        out: File for the numbers, as JSON.
    """

    verb = "benchmarks/cospec_branches.py"

    rule: str = "arbiter"
    num_draft_tokens: int | None = None
    problems: ProblemSettings = field(default_factory=lambda: ProblemSettings(limit=100))
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path | None = None

    def run(self) -> int:
        if self.num_draft_tokens is not None:
            require_whole("--num-draft-tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        require_file(self.out)
        rule = attach_heads(parse_rule(self.rule), self.pair.target)
        require_branches(rule, sampled=self.sampling.temperature > 0)
        pair, task, problems = screen.load_problems(self.pair, self.problems)
        if not task.graded:
            raise SpecError(f"task {self.problems.task} has no reference answers: branches cannot be compared on it")
        trained_at = [head.num_draft_tokens for _, head in rule.heads if isinstance(head, Arbiter)]
        k = next(iter(trained_at), _BLOCK) if self.num_draft_tokens is None else self.num_draft_tokens
        decoder = pair.decoder(rule, num_draft_tokens=k, task=self.problems.task)
        params = answer_params(self.sampling, task, self.seed)
        with screen.progress("problems") as progress:
            summary = diagnose(decoder, pair, task, problems, params, progress=progress).summary()
        if self.out is not None:
            heads = {name: head.fingerprint for name, head in rule.heads}
            about = {"rule": rule.spec, "heads": heads, "num_draft_tokens": k}
            write_json(self.out, {**flags_in_force(self), **about, "diagnosis": summary})
        screen.console().print(_branch_table(summary, rule.spec))
        return 0


def _branch_table(summary: dict[str, Any], spec: str) -> Table:

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
        shares = (share_text(values[name]) for name in ("share", "draft_not_worse", "draft_chosen", "agreement"))
        table.add_row(category.replace("_", " "), str(values["num"]), *shares)
    return table


if __name__ == "__main__":
    sys.exit(run_command(Branches, sys.argv[1:]))
