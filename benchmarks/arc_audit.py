"""Effect of relaxed acceptance on the next step: the true divergence at accepted tokens, compared with a rule's bound.

Follows ARC-Decode's appendix A.3.2 for its own bound and applies the same counterfactual to any rule: the divergence
from the next-step distribution that the target would have after its own most likely token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from arms import answer_params, flags_in_force, require_file, rule_arms, write_json
from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.cli.main import run_command
from reprieve.drafters import DRAFTERS
from reprieve.engine import Pair, SpeculativeDecoder
from reprieve.errors import require_whole
from reprieve.heads.lts import LtsCalibration
from reprieve.models.sampling import Sampler
from reprieve.rules.lts import LtsRule
from reprieve.settings import PairSettings, ProblemSettings, SamplingParams, SamplingSettings
from reprieve.stats import wilson_interval
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.prompting import prompt_ids_of
from reprieve.training.lts import SwapMeter, Swaps, bounds_of
from reprieve.types import Provenance

_ROUNDING = 1e-5  # nats: two float32 forwards of one text differ by about this much


@dataclass(frozen=True)
class Audit:
    """Accepted drafted tokens of a set of answers and the effect of each: [n] arrays, one entry per token.

    `swaps` compares the token with the target's most likely one; if the two are equal, nothing was swapped and the
    divergence is 0.
    """

    arm: str
    num_problems: int
    num_correct: int
    swaps: Swaps
    swapped: np.ndarray  # bool: the token differs from the target's most likely one
    rescued: np.ndarray  # bool: the lossless check rejects the token

    def summary(self, calibration: LtsCalibration | None = None) -> dict[str, Any]:
        """Return a JSON-ready summary: shifts and, with a calibration, the share within its bound."""
        groups = {
            "accepted": np.ones(self.swaps.num, dtype=bool),
            "swapped": self.swapped,
            "rescued": self.rescued,
            "rescued_and_swapped": self.rescued & self.swapped,
        }
        return {
            "arm": self.arm,
            "num_problems": self.num_problems,
            "num_correct": self.num_correct,
            **{name: self._group(inside, calibration) for name, inside in groups.items()},
        }

    def _group(self, inside: np.ndarray, calibration: LtsCalibration | None) -> dict[str, Any]:
        divergence = self.swaps.divergence[inside]
        num = len(divergence)
        result: dict[str, Any] = {"num": num}
        if not num:
            return result
        quantiles = {"median": 0.5, "q90": 0.9, "q95": 0.95, "q99": 0.99}
        result["mean"] = float(divergence.mean())
        result |= {name: float(np.quantile(divergence, level)) for name, level in quantiles.items()}
        if calibration is not None:
            bound, tolerance = bounds_of(calibration, self.swaps)
            for name, limit in (("bound", bound[inside]), ("tolerance", tolerance[inside])):
                num_within = int((divergence <= limit + _ROUNDING).sum())
                result[f"num_within_{name}"] = num_within
                result[f"within_{name}"] = num_within / num
                result[f"within_{name}_ci95"] = list(wilson_interval(num_within, num))
        return result


def audit(
    label: str,
    decoder: SpeculativeDecoder,
    pair: Pair,
    task: Task,
    problems: Sequence[TaskProblem],
    params: SamplingParams,
    *,
    top_k: int = 10,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Answer problems with a rule and recompute the target's next step at every accepted drafted token.

    Args:
        params: of the answers; each problem has its own seed, as in `reprieve bench`.
        top_k: divergences are computed on the union of both distributions' k most likely tokens.
    """
    meter = SwapMeter(pair.cached_target(), Sampler(params, pair.device), top_k=top_k)
    parts, swapped, rescued = [], [], []
    num_correct = 0
    for number, problem in enumerate(problems):
        generation = decoder.generate(prompt_ids_of(problem, decoder.tokenizer), params.for_problem(number))
        num_correct += task.equivalent(task.extract_answer(generation.text), problem.reference)
        positions = [
            position for position, token in enumerate(generation.tokens) if token.provenance is not Provenance.TARGET
        ]
        ids = [generation.tokens[position].token_id for position in positions]
        result = meter.measure(generation.prompt_ids, generation.token_ids, positions, ids)
        parts.append(result)
        swapped.append(result.distance > 0)
        rescued.append(
            np.array(
                [generation.tokens[position].provenance is Provenance.RESCUED for position in positions], dtype=bool
            )
        )
        progress(number + 1, len(problems))
    return Audit(label, len(problems), num_correct, Swaps.join(parts), np.concatenate(swapped), np.concatenate(rescued))


_ACTIVE = 10  # the paper gives no number


@dataclass(frozen=True)
class AuditCommand(Command):
    """Recompute the target's next step at every accepted token (ARC-Decode, Table 5).

    Args:
        rules: Rules, such as lts, lts:theta=0.5 or judge:path=heads/j.
        calibration: Calibration with the bound to check other rules against; an lts rule has its own.
        drafter: draft, ngram, or eagle3:path=FOLDER.
        num_draft_tokens: K: deepest drafted token.
        active: K of the top-K tokens that divergences are computed on. Default: the calibration's, else 10.
        seed: Same seed, same answers.
        out: File for the numbers, as JSON.
    """

    verb = "benchmarks/arc_audit.py"

    rules: tuple[str, ...] = field(metadata={"positional": True})
    calibration: str | None = None
    drafter: str = "eagle3"
    num_draft_tokens: int = 16
    problems: ProblemSettings = field(default_factory=ProblemSettings)
    active: int | None = None
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path | None = None

    def run(self) -> int:
        if self.active is not None:
            require_whole("--active", self.active, 2)
        require_file(self.out)
        DRAFTERS.make(self.drafter)
        arms = rule_arms(self.rules, self.num_draft_tokens, target=self.pair.target)
        calibration = None if self.calibration is None else LtsCalibration.from_pretrained(self.calibration)
        pair, task, problems = screen.load_problems(self.pair, self.problems)
        params = answer_params(self.sampling, task, self.seed)
        summaries = []
        for arm in arms:
            bounds = arm.rule.head if isinstance(arm.rule, LtsRule) else calibration
            if bounds is not None:
                bounds.require_pair(pair.identity, self.calibration or arm.label)
            decoder = arm.decoder(pair, drafter=self.drafter, task=self.problems.task)
            with screen.progress(arm.label, "answers") as progress:
                calibrated = {} if bounds is None else bounds.settings
                top_k = self.active or int(calibrated.get("active", _ACTIVE))
                audited = audit(arm.label, decoder, pair, task, problems, params, top_k=top_k, progress=progress)
            summaries.append({**audited.summary(bounds), "calibration": None if bounds is None else bounds.fingerprint})
        if self.out is not None:
            write_json(self.out, {**flags_in_force(self), "audits": summaries})
        screen.console().print(_shift_table(summaries, len(problems)))
        return 0


def _shift_table(summaries: list[dict[str, Any]], num_problems: int) -> Table:

    table = Table(
        title=f"next-step shift of accepted tokens, JS in nats, n = {num_problems} problems; brackets are 95% "
        "intervals that treat tokens as independent",
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


if __name__ == "__main__":
    sys.exit(run_command(AuditCommand, sys.argv[1:]))
