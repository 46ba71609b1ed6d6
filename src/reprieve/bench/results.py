"""From records to `results.json`: every number with its interval, its n and its conditions."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reprieve.bench.arms import LOSSLESS, Arm
from reprieve.bench.config import RunConfig
from reprieve.bench.records import COUNTS, ProblemRecord, totals
from reprieve.bench.runner import Run
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.files import replace_file
from reprieve.settings import NumDraftTokens
from reprieve.stats import bootstrap_interval, paired_difference, paired_pvalue, share_interval

SCHEMA = 1
_NUM_SHARES = 11
_LARGEST = 1e9
# Fields without a value for tasks without right answers.
_QUALITY = (
    "accuracy", "accuracy_ci95", "accuracy_vs_target", "accuracy_vs_lossless", "accuracy_vs_lossless_p", "net_drop",
    "regression_rate", "regression_rate_ci95", "improvement_rate", "seconds_per_solved",
)  # fmt: skip
# Fields without a value when answers share a server's batches; see `throughput` for speed.
_SPEED = (
    "answers_per_second", "answers_vs_lossless", "answers_vs_lossless_ci95",
    "tokens_per_second", "speedup_vs_target", "speedup_vs_target_ci95", "speedup_vs_lossless",
    "speedup_vs_lossless_ci95", "seconds_per_solved",
)  # fmt: skip


def summarise(run: Run) -> dict[str, Any]:
    """The results document (docs/reference/results.md describes every field).

    Arms are compared on the problems that all of them finished, so that an interrupted run stays fair.
    """
    rows = common_rows([arm.label for arm in run.arms], run.records, run.config.num_trials)
    num_problems = len(next(iter(rows.values()), ()))
    document: dict[str, Any] = {
        "schema": SCHEMA,
        **dataclasses.asdict(run.config),
        **run.environment,
        "complete": run.complete,
        "num_draft_tokens": run.config.num_draft_tokens[0] if len(run.config.num_draft_tokens) == 1 else "by arm",
        "num_problems": num_problems,
        "graded": run.graded,
        "arms": [_summarise_arm(arm, rows, run) for arm in run.arms] if num_problems else [],
    }
    for arm in document["arms"]:
        if not run.graded:
            arm.update(dict.fromkeys(_QUALITY))
        if run.config.engine != "local":
            arm.update(dict.fromkeys(_SPEED))
    if num_problems and run.graded and run.config.engine == "local" and {DRAFT_ONLY, TARGET_ONLY} <= rows.keys():
        document["random_allocation"] = _random_allocation(rows)
        for arm in document["arms"]:
            arm["accuracy_vs_allocation"] = _against_allocation(arm["spec"], rows)
    return document


def write_results(document: dict[str, Any], folder: Path) -> Path:
    """Write `results.json`; returns its path."""
    path = folder / "results.json"
    replace_file(path, json.dumps(document, indent=2) + "\n")
    return path


@dataclass(frozen=True)
class BestK:
    """One arm at the K that decodes most tokens per second.

    The fastest of several measurements is a little flattered; measure again on other problems before quoting it.
    """

    spec: str
    num_draft_tokens: NumDraftTokens
    tokens_per_second: float
    by_k: dict[NumDraftTokens, float]  # tokens per second

    @property
    def arm(self) -> str:
        """As `bench --arm` takes it."""
        return f"{self.spec}@K={self.num_draft_tokens}"


def best_ks(document: dict[str, Any]) -> list[BestK]:
    """The fastest K of every rule in a results document that has several."""
    speeds: dict[str, dict[NumDraftTokens, float]] = {}
    loaded = {row["arm"]: row["tokens_per_second"] for row in document.get("throughput", ())}
    for arm in document["arms"]:
        speed = loaded.get(arm["spec"], arm["tokens_per_second"])
        if arm["num_draft_tokens"] is not None and speed:
            spec = arm["name"] + (f"@drafter={arm['drafter']}" if arm["drafter"] else "")
            speeds.setdefault(spec, {})[arm["num_draft_tokens"]] = speed
    fastest = []
    for spec, by_k in speeds.items():
        best = max(by_k, key=by_k.__getitem__)
        fastest.append(BestK(spec, best, by_k[best], by_k))
    return fastest


Rows = dict[str, list[list[ProblemRecord]]]  # by arm: one list of trials per problem, same problems for all arms


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


def column(problems: list[list[ProblemRecord]], value: Callable[[ProblemRecord], float | bool]) -> np.ndarray:
    """One number of every record, [n, trials]."""
    return np.array([[value(record) for record in trials] for trials in problems], dtype=float)


def _summarise_arm(arm: Arm, rows: Rows, run: Run) -> dict[str, Any]:
    problems, lossless = rows[arm.label], rows[lossless_for(arm, run.arms)]
    records = [record for trials in problems for record in trials]
    correct = column(problems, lambda record: record.correct)
    num_correct = int(correct.sum())
    total = totals(records)
    tokens, rounds, drafted, pruned, accepted, rescued = (total[name] for name in COUNTS)
    seconds = total["seconds"]
    return {
        "rule": arm.rule_name,
        "name": arm.name,
        "spec": arm.label,
        "short": arm.short_label,
        "params": {} if arm.rule is None else arm.rule.params,
        "spec_without_dial": None if arm.rule is None else arm.rule.spec_without_dial,
        "dial": None if arm.rule is None or arm.rule.dial is None else arm.rule.dial.name,
        "drafter": arm.drafter,
        "num_draft_tokens": None if arm.rule is None else arm.num_draft_tokens,
        "num_problems": len(problems),
        "num_failed": sum(record.error is not None for record in records),
        "accuracy": num_correct / len(records),
        "accuracy_ci95": list(share_interval(correct)),
        **_against_target(problems, rows.get(TARGET_ONLY)),
        **_against_lossless(problems, lossless),
        "tokens_per_round": tokens / rounds if rounds and arm.name != DRAFT_ONLY else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "draft_share": accepted / tokens if drafted and tokens else None,
        "sequence_bound": _sequence_bound(arm, accepted / len(records), run.config),
        "num_rescued": rescued,
        "pruned_share": pruned / (drafted + pruned) if pruned else 0.0,
        "tokens_per_second": tokens / seconds if seconds else None,
        "tokens_per_answer": tokens / len(records),
        **_rounds(problems, lossless, drafts_alone=arm.name == DRAFT_ONLY),
        "num_truncated": sum(_cut_off(record) for record in records),
        "num_unread": sum(record.unread for record in records),
        "answers_per_second": _finished_rate(_answer_totals(problems)),
        "seconds_per_solved": seconds / num_correct if num_correct else None,
        "seconds_by_part": total["seconds_by_part"],
    }


def _rounds(
    problems: list[list[ProblemRecord]], lossless: list[list[ProblemRecord]], *, drafts_alone: bool
) -> dict[str, Any]:
    """Target forwards per answer: what an answer costs where drafting is cheap, whatever the machine."""
    rounds, lossless_rounds = (column(arm, lambda record: record.num_rounds) for arm in (problems, lossless))
    if drafts_alone or not rounds.any():
        return {"rounds_per_answer": None, "rounds_vs_lossless": None}
    difference = _difference(problems, lossless, rounds, lossless_rounds)
    return {"rounds_per_answer": float(rounds.mean()), "rounds_vs_lossless": difference}


def _sequence_bound(arm: Arm, num_drafted: float, config: RunConfig) -> float | None:
    """Return the rule's bound on an answer's divergence, at the mean number of accepted drafted tokens.

    The bound assumes that drafted tokens are sampled from the distribution that the rule compares, so it is None for
    greedy decoding, greedy drafts and drafters other than a draft model.
    """
    temperatures = [config.sampling["temperature"], config.sampling.get("draft_temperature")]
    sampled = 0 not in temperatures and (arm.drafter or config.drafter) == "draft"
    return arm.rule.sequence_bound(num_drafted) if arm.rule is not None and sampled else None


def _against_target(problems: list[list[ProblemRecord]], target: list[list[ProblemRecord]] | None) -> dict[str, Any]:
    if target is None:
        return {"accuracy_vs_target": None, "speedup_vs_target": None, "speedup_vs_target_ci95": None}
    solved = [column(arm, lambda record: record.correct) for arm in (problems, target)]
    return {
        "accuracy_vs_target": _difference(problems, target, *solved),
        "speedup_vs_target": _speedup(problems, target),
        "speedup_vs_target_ci95": _speedup_interval(problems, target),
    }


def _against_lossless(problems: list[list[ProblemRecord]], lossless: list[list[ProblemRecord]]) -> dict[str, Any]:
    """Compare quality, length and speed with the lossless answers to the same problems."""
    correct, lossless_correct = (column(arm, lambda record: record.correct) for arm in (problems, lossless))
    tokens = [column(arm, lambda record: record.num_tokens) for arm in (problems, lossless)]
    cut = [column(arm, lambda record: record.finish_reason == "length") for arm in (problems, lossless)]
    regressed, improved = lossless_correct * (1 - correct), correct * (1 - lossless_correct)
    difference = _difference(problems, lossless, correct, lossless_correct)
    return {
        "accuracy_vs_lossless": difference,
        "accuracy_vs_lossless_p": paired_pvalue(correct - lossless_correct),
        "net_drop": [-difference[0], -difference[2], -difference[1]],
        "regression_rate": float(regressed.mean()),
        "regression_rate_ci95": list(share_interval(regressed)),
        "improvement_rate": float(improved.mean()),
        "tokens_vs_lossless": _difference(problems, lossless, *tokens),
        "tokens_vs_lossless_p": paired_pvalue(tokens[0] - tokens[1]),
        "truncated_vs_lossless": _difference(problems, lossless, *cut),
        "truncated_vs_lossless_p": paired_pvalue(cut[0] - cut[1]),
        "speedup_vs_lossless": _speedup(problems, lossless),
        "speedup_vs_lossless_ci95": _speedup_interval(problems, lossless),
        **_answers_against(problems, lossless),
    }


def _cut_off(record: ProblemRecord) -> bool:
    return record.finish_reason == "length"


def _answer_totals(problems: list[list[ProblemRecord]]) -> np.ndarray:
    """[n, 2]: finished answers and seconds of each problem, all trials together."""
    finished = column(problems, lambda record: not _cut_off(record) and record.error is None)
    return np.stack([finished.sum(1), column(problems, lambda record: record.seconds).sum(1)], 1)


def _finished_rate(totals: np.ndarray) -> float | None:
    """Return finished answers per second; None if no time was recorded."""
    finished, seconds = totals.sum(0)
    return float(finished / seconds) if seconds else None


def _answers_against(problems: list[list[ProblemRecord]], lossless: list[list[ProblemRecord]]) -> dict[str, Any]:
    """Return the ratio of finished answers per second to lossless; longer answers lower it, unlike token speedup."""
    totals, lossless_totals = _answer_totals(problems), _answer_totals(lossless)
    nothing = {"answers_vs_lossless": None, "answers_vs_lossless_ci95": None}
    if not totals[:, 1].all() or not lossless_totals[:, 1].all() or not lossless_totals[:, 0].any():
        return nothing

    def ratio(index: Any) -> float:
        one, other = _finished_rate(totals[index]), _finished_rate(lossless_totals[index])
        return float("nan") if one is None or not other else one / other

    interval = list(bootstrap_interval(ratio, len(totals), num_resamples=1000)) if len(totals) > 1 else None
    return {"answers_vs_lossless": ratio(np.arange(len(totals))), "answers_vs_lossless_ci95": interval}


def _difference(arm: Any, baseline: Any, left: np.ndarray, right: np.ndarray) -> list[float]:
    """Return [difference, low, high]; zeros for an arm against itself; infinities become +-1e9, for JSON."""
    if arm is baseline:
        return [0.0, 0.0, 0.0]
    return [max(-_LARGEST, min(_LARGEST, value)) for value in paired_difference(left, right)]


def lossless_for(arm: Arm, arms: Sequence[Arm]) -> str:
    """The lossless arm of the same drafter and K, or else of the same K, or else the first one."""
    strict = [other for other in arms if other.rule is not None and other.rule_name == LOSSLESS]
    same = [other for other in strict if other.drafter == arm.drafter]
    strict = same or strict
    same_k = [other.label for other in strict if other.num_draft_tokens == arm.num_draft_tokens]
    return (same_k or [other.label for other in strict])[0]


def _totals(problems: list[list[ProblemRecord]]) -> np.ndarray:
    """[n, 2]: tokens and seconds of each problem, all trials together."""
    return np.stack([column(problems, lambda r: r.num_tokens).sum(1), column(problems, lambda r: r.seconds).sum(1)], 1)


def _ratio(arm: np.ndarray, baseline: np.ndarray) -> float:
    (tokens, seconds), (base_tokens, base_seconds) = arm.sum(0), baseline.sum(0)
    if not seconds or not base_tokens or not base_seconds:
        return float("nan")
    return float((tokens / seconds) / (base_tokens / base_seconds))


def _speedup(problems: list[list[ProblemRecord]], baseline: list[list[ProblemRecord]]) -> float | None:
    """Return the ratio of tokens per second over the same problems; None if it is undefined."""
    ratio = _ratio(_totals(problems), _totals(baseline))
    return None if math.isnan(ratio) else ratio


def _speedup_interval(problems: list[list[ProblemRecord]], baseline: list[list[ProblemRecord]]) -> list[float] | None:
    if _speedup(problems, baseline) is None or len(problems) < 2:  # a bootstrap over one problem has no width
        return None
    arm, base = _totals(problems), _totals(baseline)
    return list(bootstrap_interval(lambda index: _ratio(arm[index], base[index]), len(arm), num_resamples=1000))


def _against_allocation(label: str, rows: Rows) -> list[float]:
    """Return [difference, low, high] in accuracy from random allocation between target and draft at the same speed."""
    arm, target, draft = (_totals(rows[name]).sum(0) for name in (label, TARGET_ONLY, DRAFT_ONLY))
    if arm[1]:
        # Each model's tokens minus the arm's in the same time: at equal speed, the mixture's surplus is zero.
        above, below = (model[0] - arm[0] / arm[1] * model[1] for model in (draft, target))
        share = min(max(below / (below - above), 0.0), 1.0) if below != above else 0.0
    else:
        share = 0.0
    correct, strong, weak = (column(rows[name], lambda r: r.correct) for name in (label, TARGET_ONLY, DRAFT_ONLY))
    return _difference(rows[label], None, correct, (1 - share) * strong + share * weak)


def _random_allocation(rows: Rows) -> list[dict[str, float]]:
    """Points for sending a share of the problems to the draft alone: the baseline that every rule must beat."""
    target, draft = _totals(rows[TARGET_ONLY]).sum(0), _totals(rows[DRAFT_ONLY]).sum(0)
    accuracies = [column(rows[label], lambda r: r.correct).mean() for label in (TARGET_ONLY, DRAFT_ONLY)]
    line = []
    for share in np.linspace(0, 1, _NUM_SHARES):
        tokens, seconds = (1 - share) * target + share * draft
        if not tokens or not target[0]:
            continue
        line.append(
            {
                "share_to_draft": float(share),
                "accuracy": float((1 - share) * accuracies[0] + share * accuracies[1]),
                "speedup_vs_target": float((tokens / seconds) / (target[0] / target[1])),
            }
        )
    return line
