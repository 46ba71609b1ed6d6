"""From the answers of a run to its results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reprieve.bench.arms import LOSSLESS, Arm
from reprieve.bench.engine import RunConfig
from reprieve.bench.records import ProblemRecord
from reprieve.bench.results import Allocation, ArmResults, Difference, Environment, Results
from reprieve.bench.run import Run
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.stats import bootstrap_interval, paired_difference, share_interval
from reprieve.types import DecodingStats

_NUM_SHARES = 11
_LARGEST = 1e9
# Fields without a value for tasks without reference answers.
_QUALITY = (
    "accuracy", "accuracy_ci95", "accuracy_vs_target", "accuracy_vs_lossless", "net_drop",
    "regression_rate", "regression_rate_ci95", "improvement_rate", "seconds_per_solved",
)  # fmt: skip
# Fields without a value when answers share a server's batches; see `throughput` for speed.
_SPEED = (
    "answers_per_second", "answers_vs_lossless", "answers_vs_lossless_ci95",
    "tokens_per_second", "speedup_vs_target", "speedup_vs_target_ci95", "speedup_vs_lossless",
    "speedup_vs_lossless_ci95", "seconds_per_solved",
)  # fmt: skip


def summarise(run: Run, arms: Sequence[Arm] | None = None) -> Results:
    """Return the results of these arms of a run (default: all).

    Arms are compared on the problems that all of them finished, so that an interrupted run stays fair.
    """
    chosen = run.arms if arms is None else list(arms)
    rows = common_rows([arm.label for arm in chosen], run.records, run.config.num_trials)
    num_problems = len(next(iter(rows.values()), ()))
    timed = run.config.engine == "local"
    unknown = (*(() if run.task.graded else _QUALITY), *(() if timed else _SPEED))
    found = [_summarise_arm(arm, rows, chosen, run.config) for arm in chosen] if num_problems else []
    found = [dataclasses.replace(arm, **dict.fromkeys(unknown)) for arm in found]  # type: ignore[arg-type]
    allocation: list[Allocation] = []
    if found and run.task.graded and timed and {DRAFT_ONLY, TARGET_ONLY} <= rows.keys():
        allocation = _random_allocation(rows)
        found = [dataclasses.replace(arm, accuracy_vs_allocation=_against_allocation(arm.spec, rows)) for arm in found]
    return Results(
        config=run.config,
        environment=Environment.here(),
        num_workers=run.engine.num_parallel,
        complete=run.complete,
        graded=run.task.graded,
        num_problems=num_problems,
        arms=found,
        random_allocation=allocation,
    )


Problems = list[list[ProblemRecord]]  # of one arm: a list of trials per problem
Rows = dict[str, Problems]  # by arm, the same problems for all
Value = Callable[[ProblemRecord], float | bool]


def common_rows(labels: Sequence[str], records: Sequence[ProblemRecord], num_trials: int = 1) -> Rows:
    """The problems that every arm has answered in every trial, in one order."""
    by_arm: dict[str, dict[str, dict[int, ProblemRecord]]] = {label: {} for label in labels}
    for record in records:
        if record.arm in by_arm:
            by_arm[record.arm].setdefault(record.problem_id, {})[record.trial] = record
    whole = [{name for name, trials in arm.items() if len(trials) == num_trials} for arm in by_arm.values()]
    common = sorted(set.intersection(*whole)) if whole else []
    return {
        label: [[arm[name][trial] for trial in range(num_trials)] for name in common] for label, arm in by_arm.items()
    }


def column(problems: Problems, value: Value) -> np.ndarray:
    """One number of every record, [n, trials]."""
    return np.array([[value(record) for record in trials] for trials in problems], dtype=float)


def _summarise_arm(arm: Arm, rows: Rows, arms: Sequence[Arm], config: RunConfig) -> ArmResults:
    problems, lossless = rows[arm.label], rows[lossless_for(arm, arms)]
    records = [record for trials in problems for record in trials]
    correct = column(problems, lambda record: record.correct)
    num_correct = int(correct.sum())
    total = DecodingStats.total(records)
    tokens, rounds, seconds = total.num_tokens, total.num_rounds, total.seconds
    drafted, accepted, num_finished = total.num_drafted, total.num_accepted, sum(record.finished for record in records)
    forwards = rounds and arm.alone != "draft"  # of the target
    return ArmResults(
        rule=arm.rule_name,
        name=arm.name,
        spec=arm.label,
        short=arm.short_label,
        params={} if arm.rule is None else arm.rule.params,
        spec_without_dial=None if arm.rule is None else arm.rule.spec_without_dial,
        dial=None if arm.rule is None or arm.rule.dial is None else arm.rule.dial.name,
        drafter=arm.drafter,
        num_draft_tokens=None if arm.rule is None else arm.num_draft_tokens,
        num_problems=len(problems),
        num_failed=sum(record.error is not None for record in records),
        accuracy=num_correct / len(records),
        accuracy_ci95=list(share_interval(correct)),
        **_against_target(problems, rows.get(TARGET_ONLY)),
        **_against_lossless(problems, lossless),
        tokens_per_round=tokens / rounds if forwards else None,
        acceptance_rate=accepted / drafted if drafted else None,
        draft_share=accepted / tokens if drafted and tokens else None,
        sequence_bound=_sequence_bound(arm, accepted / len(records), config),
        num_rescued=total.num_rescued,
        pruned_share=total.num_pruned / (drafted + total.num_pruned) if total.num_pruned else 0.0,
        tokens_per_second=tokens / seconds if seconds else None,
        tokens_per_answer=tokens / len(records),
        rounds_per_answer=rounds / len(records) if forwards else None,
        rounds_vs_lossless=_difference(problems, lossless, lambda r: r.num_rounds) if forwards else None,
        num_truncated=sum(record.cut_off for record in records),
        num_unread=sum(record.unread for record in records),
        answers_per_second=num_finished / seconds if seconds else None,
        seconds_per_solved=seconds / num_correct if num_correct else None,
        seconds_by_part=total.seconds_by_part,
    )


def _sequence_bound(arm: Arm, num_drafted: float, config: RunConfig) -> float | None:
    """Return the rule's bound on an answer's divergence, at the mean number of accepted drafted tokens.

    The bound assumes that drafted tokens are sampled from the distribution that the rule compares, so it is None for
    greedy decoding, greedy drafts and drafters other than a draft model.
    """
    temperatures = [config.sampling.temperature, config.sampling.draft_temperature]
    sampled = 0 not in temperatures and (arm.drafter or config.drafter) == "draft"
    return arm.rule.sequence_bound(num_drafted) if arm.rule is not None and sampled else None


def _against_target(problems: Problems, target: Problems | None) -> dict[str, Any]:
    if target is None:
        return {}
    return {
        "accuracy_vs_target": _difference(problems, target, lambda record: record.correct),
        **_speedup("speedup_vs_target", problems, target, _num_tokens),
    }


def _against_lossless(problems: Problems, lossless: Problems) -> dict[str, Any]:
    """Compare quality, length and speed with the lossless answers to the same problems."""
    correct, lossless_correct = (column(arm, lambda record: record.correct) for arm in (problems, lossless))
    regressed, improved = lossless_correct * (1 - correct), correct * (1 - lossless_correct)
    difference, low, high = _difference(problems, lossless, lambda record: record.correct)
    return {
        "accuracy_vs_lossless": [difference, low, high],
        "net_drop": [-difference, -high, -low],
        "regression_rate": float(regressed.mean()),
        "regression_rate_ci95": list(share_interval(regressed)),
        "improvement_rate": float(improved.mean()),
        "tokens_vs_lossless": _difference(problems, lossless, _num_tokens),
        "truncated_vs_lossless": _difference(problems, lossless, lambda record: record.cut_off),
        **_speedup("speedup_vs_lossless", problems, lossless, _num_tokens),
        # Longer answers lower this ratio, unlike that of tokens.
        **_speedup("answers_vs_lossless", problems, lossless, lambda record: record.finished),
    }


def _difference(problems: Problems, baseline: Problems, value: Value) -> Difference:
    """Return [difference, low, high]; zeros for an arm against itself."""
    if problems is baseline:
        return [0.0, 0.0, 0.0]
    return _bounded(paired_difference(column(problems, value), column(baseline, value)))


def _bounded(values: Sequence[float]) -> list[float]:
    """Replace infinities by +-1e9, for JSON."""
    return [max(-_LARGEST, min(_LARGEST, value)) for value in values]


def _num_tokens(record: ProblemRecord) -> int:
    return record.num_tokens


def _with_seconds(problems: Problems, value: Value) -> np.ndarray:
    """[n, 2]: an amount and the seconds of each problem, all trials together."""
    return np.stack([column(problems, value).sum(1), column(problems, lambda record: record.seconds).sum(1)], 1)


def _speedup(name: str, problems: Problems, baseline: Problems, value: Value) -> dict[str, Any]:
    """Return the ratio of two rates over the same problems under this name, and its bootstrap interval.

    The ratio is None if it is undefined, the interval also for a single problem, whose bootstrap has no width.

    Args:
        value: the amount whose rate per second is compared.
    """
    amounts, base_amounts = (_with_seconds(each, value) for each in (problems, baseline))

    def ratio(index: Any) -> float:
        (amount, seconds), (base_amount, base_seconds) = amounts[index].sum(0), base_amounts[index].sum(0)
        if not seconds or not base_amount or not base_seconds:
            return math.nan
        return float((amount / seconds) / (base_amount / base_seconds))

    whole = ratio(slice(None))
    if math.isnan(whole):
        return {name: None, f"{name}_ci95": None}
    interval = list(bootstrap_interval(ratio, len(amounts), num_resamples=1000)) if len(amounts) > 1 else None
    return {name: whole, f"{name}_ci95": interval}


def lossless_for(arm: Arm, arms: Sequence[Arm]) -> str:
    """The lossless arm of the same drafter and K, or else of the same K, or else the first one."""
    strict = [other for other in arms if other.rule is not None and other.rule_name == LOSSLESS]
    same = [other for other in strict if other.drafter == arm.drafter]
    strict = same or strict
    same_k = [other.label for other in strict if other.num_draft_tokens == arm.num_draft_tokens]
    return (same_k or [other.label for other in strict])[0]


def _against_allocation(label: str, rows: Rows) -> Difference:
    """Return [difference, low, high] in accuracy from random allocation between target and draft at the same speed."""
    arm, target, draft = (_with_seconds(rows[name], _num_tokens).sum(0) for name in (label, TARGET_ONLY, DRAFT_ONLY))
    if arm[1]:
        # Each model's tokens minus the arm's in the same time: at equal speed, the mixture's surplus is zero.
        above, below = (model[0] - arm[0] / arm[1] * model[1] for model in (draft, target))
        share = min(max(below / (below - above), 0.0), 1.0) if below != above else 0.0
    else:
        share = 0.0
    correct, strong, weak = (column(rows[name], lambda r: r.correct) for name in (label, TARGET_ONLY, DRAFT_ONLY))
    return _bounded(paired_difference(correct, (1 - share) * strong + share * weak))


def _random_allocation(rows: Rows) -> list[Allocation]:
    target, draft = (_with_seconds(rows[name], _num_tokens).sum(0) for name in (TARGET_ONLY, DRAFT_ONLY))
    accuracies = [column(rows[label], lambda r: r.correct).mean() for label in (TARGET_ONLY, DRAFT_ONLY)]
    line = []
    for share in np.linspace(0, 1, _NUM_SHARES):
        tokens, seconds = (1 - share) * target + share * draft
        if not tokens or not target[0]:
            continue
        line.append(
            Allocation(
                share_to_draft=float(share),
                accuracy=float((1 - share) * accuracies[0] + share * accuracies[1]),
                speedup_vs_target=float((tokens / seconds) / (target[0] / target[1])),
            )
        )
    return line
