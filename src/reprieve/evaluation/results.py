"""From records to `results.json`: every number with its interval, its n and its conditions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from reprieve.evaluation.arms import DRAFT_ONLY, LOSSLESS, TARGET_ONLY, Arm
from reprieve.evaluation.records import ProblemRecord, replace_file
from reprieve.evaluation.runner import Run
from reprieve.metrics import bootstrap_interval, paired_difference, wilson_interval

SCHEMA = 1
_NUM_SHARES = 11


def summarise(run: Run) -> dict[str, Any]:
    """The results document (docs/results.md describes every field).

    Arms are compared on the problems that all of them finished, so that an interrupted run stays fair.
    """
    by_arm = {arm.label: {r.problem_id: r for r in run.records if r.arm == arm.label} for arm in run.arms}
    common = sorted(set.intersection(*(set(records) for records in by_arm.values()))) if by_arm else []
    rows = {label: [records[problem_id] for problem_id in common] for label, records in by_arm.items()}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "command": run.config.command,
        **run.environment,
        "complete": run.complete,
        "seed": run.config.seed,
        "target": run.config.target,
        "draft": run.config.draft,
        "drafter": run.config.drafter,
        "dtype": run.config.dtype,
        "device": run.config.device,
        "task": run.config.task,
        "split": run.config.split,
        "num_problems": len(common),
        "num_draft_tokens": run.config.num_draft_tokens[0],
        "sampling": run.config.sampling,
        "arms": [_summarise_arm(arm, rows) for arm in run.arms] if common else [],
    }
    if common and DRAFT_ONLY in rows:
        document["random_allocation"] = _random_allocation(rows)
    return document


def write_results(document: dict[str, Any], folder: Path) -> Path:
    """Write `results.json`; returns its path."""
    path = folder / "results.json"
    replace_file(path, json.dumps(document, indent=2) + "\n")
    return path


def _summarise_arm(arm: Arm, rows: dict[str, list[ProblemRecord]]) -> dict[str, Any]:
    records = rows[arm.label]
    target, lossless = rows[TARGET_ONLY], rows[_lossless_at(arm, rows)]
    correct = [record.correct for record in records]
    num_correct = sum(correct)
    tokens = sum(record.num_tokens for record in records)
    seconds = sum(record.seconds for record in records)
    rounds = sum(record.num_rounds for record in records)
    drafted = sum(record.num_drafted for record in records)
    return {
        "rule": arm.rule_name,
        "spec": arm.label,
        "params": {} if arm.rule is None else arm.rule.params,
        "num_draft_tokens": None if arm.rule is None else arm.num_draft_tokens,
        "num_problems": len(records),
        "num_failed": sum(record.error is not None for record in records),
        "accuracy": num_correct / len(records),
        "accuracy_ci95": list(wilson_interval(num_correct, len(records))),
        "accuracy_vs_target": list(paired_difference(correct, [record.correct for record in target])),
        "accuracy_vs_lossless": list(paired_difference(correct, [record.correct for record in lossless])),
        "tokens_per_round": tokens / rounds if rounds else None,
        "acceptance_rate": sum(r.num_accepted for r in records) / drafted if drafted else None,
        "num_rescued": sum(record.num_rescued for record in records),
        "tokens_per_second": tokens / seconds if seconds else None,
        "speedup_vs_target": _speedup(records, target),
        "speedup_vs_target_ci95": _speedup_interval(records, target),
        "speedup_vs_lossless": _speedup(records, lossless),
        "speedup_vs_lossless_ci95": _speedup_interval(records, lossless),
        "tokens_per_answer": tokens / len(records),
        "num_truncated": sum(record.finish_reason == "length" for record in records),
        "seconds_per_solved": seconds / num_correct if num_correct else None,
        "seconds_by_part": {
            part: sum(getattr(record, part) for record in records)
            for part in ("prefill_s", "draft_s", "verify_s", "advise_s", "rule_s", "commit_s")
        },
    }


def _lossless_at(arm: Arm, rows: dict[str, list[ProblemRecord]]) -> str:
    same_k = f"{LOSSLESS}@K={arm.num_draft_tokens}"
    return same_k if same_k in rows else LOSSLESS


def _totals(records: list[ProblemRecord]) -> np.ndarray:
    """[n, 2]: tokens and seconds of each problem."""
    return np.array([(record.num_tokens, record.seconds) for record in records], dtype=float)


def _ratio(arm: np.ndarray, baseline: np.ndarray) -> float:
    (tokens, seconds), (base_tokens, base_seconds) = arm.sum(0), baseline.sum(0)
    if not seconds or not base_tokens or not base_seconds:
        return float("nan")
    return float((tokens / seconds) / (base_tokens / base_seconds))


def _speedup(records: list[ProblemRecord], baseline: list[ProblemRecord]) -> float | None:
    """Ratio of tokens per second over the same problems; None where one of them made no token."""
    ratio = _ratio(_totals(records), _totals(baseline))
    return None if math.isnan(ratio) else ratio


def _speedup_interval(records: list[ProblemRecord], baseline: list[ProblemRecord]) -> list[float] | None:
    if _speedup(records, baseline) is None:
        return None
    arm, base = _totals(records), _totals(baseline)
    return list(bootstrap_interval(lambda index: _ratio(arm[index], base[index]), len(arm), num_resamples=1000))


def _random_allocation(rows: dict[str, list[ProblemRecord]]) -> list[dict[str, float]]:
    """What sending a share of the problems to the draft alone would give: the line every rule has to beat."""
    target, draft = _totals(rows[TARGET_ONLY]).sum(0), _totals(rows[DRAFT_ONLY]).sum(0)
    accuracies = [float(np.mean([r.correct for r in rows[label]])) for label in (TARGET_ONLY, DRAFT_ONLY)]
    line = []
    for share in np.linspace(0, 1, _NUM_SHARES):
        tokens, seconds = (1 - share) * target + share * draft
        if not tokens or not target[0]:
            continue
        line.append(
            {
                "share_to_draft": float(share),
                "accuracy": (1 - share) * accuracies[0] + share * accuracies[1],
                "speedup_vs_target": float((tokens / seconds) / (target[0] / target[1])),
            }
        )
    return line
