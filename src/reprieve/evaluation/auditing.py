"""What relaxed acceptance did to the next step: the true divergence at accepted tokens, against what a rule promised.

ARC-Decode's appendix A.3.2 for its own bound, and the same counterfactual for any rule: how far would the target's
next-step distribution be, had its own most likely token stood there instead?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reprieve.calibration.lts import bounds_of
from reprieve.calibration.swaps import SwapMeter, Swaps
from reprieve.engine import Pair, SpeculativeDecoder
from reprieve.heads.lts import LtsCalibration
from reprieve.metrics import wilson_interval
from reprieve.models.sampling import Sampler
from reprieve.settings import SamplingParams
from reprieve.tasks.asking import prompt_of
from reprieve.tasks.base import Task, TaskProblem
from reprieve.types import Provenance

_ROUNDING = 1e-5  # nats: two float32 forwards of one text differ by about this much


@dataclass(frozen=True)
class Audit:
    """The accepted drafted tokens of some answers, and what each did: [n] arrays, a place for each token.

    `swaps` measures the token against the target's most likely one in its place; where the two are the same, nothing
    was swapped and the divergence is 0.
    """

    arm: str
    num_problems: int
    num_correct: int
    swaps: Swaps
    swapped: np.ndarray  # bool: whether the token is another than the target's most likely one
    rescued: np.ndarray  # bool: whether the lossless check had refused it

    def summary(self, calibration: LtsCalibration | None = None) -> dict[str, Any]:
        """Shifts and, with a calibration, the share its bound covers; as JSON can hold it."""
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
        params: of the answers; problem i is drawn with a seed of its own, as `reprieve bench` does.
        top_k: divergences are taken on the union of both distributions' k most likely tokens.
    """
    meter = SwapMeter(pair.cached_target(), Sampler(params, pair.device), top_k=top_k)
    parts, swapped, rescued = [], [], []
    num_correct = 0
    for number, problem in enumerate(problems):
        made = decoder.generate(prompt_of(problem), params.for_problem(number))
        num_correct += task.equivalent(task.extract_answer(made.text), problem.reference)
        places = [place for place, token in enumerate(made.tokens) if token.provenance is not Provenance.TARGET]
        ids = [made.tokens[place].token_id for place in places]
        result = meter.measure(made.prompt_ids, made.token_ids, places, ids)
        parts.append(result)
        swapped.append(result.distance > 0)
        rescued.append(np.array([made.tokens[place].provenance is Provenance.RESCUED for place in places], dtype=bool))
        progress(number + 1, len(problems))
    return Audit(label, len(problems), num_correct, Swaps.join(parts), np.concatenate(swapped), np.concatenate(rescued))
