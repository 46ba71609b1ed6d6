"""Speed under load: arms take turns at a fixed number of requests in flight; finished measurements are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from reprieve.backends.client import Completion
from reprieve.backends.served import ServedEngine
from reprieve.bench.arms import LOSSLESS, Arm
from reprieve.bench.engine import RunConfig
from reprieve.bench.results import ThroughputResults
from reprieve.bench.settings import SpeedSettings
from reprieve.bench.summary import lossless_for
from reprieve.files import append_line, read_records
from reprieve.stats import bootstrap_interval
from reprieve.tasks import Task
from reprieve.types import Progress, no_progress

FILE = "throughput.jsonl"
_FEWEST = 16  # requests of a turn


@dataclass(frozen=True)
class Cell:
    """Measurement of one arm in one turn at one concurrency. Times are in seconds, pairs are p50 and p95.

    Args:
        seconds: from the first request to the last answer.
        first: time to first token, over requests.
        per_token: mean time per token after a request's first, over requests.
        pieces: time between chunks of a stream, over all chunks; a block arrives as one chunk.
    """

    arm: str
    concurrency: int
    turn: int
    num_requests: int
    num_tokens: int
    seconds: float
    tokens_per_step: float
    num_rescued: int
    first: tuple[float, float]
    per_token: tuple[float, float]
    pieces: tuple[float, float]


def measure_throughput(
    engine: ServedEngine,
    config: RunConfig,
    task: Task,
    arms: Sequence[Arm],
    settings: SpeedSettings,
    folder: Path,
    *,
    progress: Progress = no_progress,
) -> list[ThroughputResults]:
    """Return a row for each arm and concurrency, over all turns; resumes an interrupted measurement.

    Arms of one server take turns in a rotating order. Arms with another K or drafter need another server and are
    measured after them.

    Raises:
        EngineError: a server died.
    """
    problems = task.problems(config.split, config.limit, offset=config.offset)
    path = folder / FILE
    levels = list(dict.fromkeys(settings.concurrency))
    num_requests = {level: settings.num_requests or max(2 * level, _FEWEST) for level in levels}
    cells = read_records(path, Cell, "speed measurement", repair=True)
    known = [cell for cell in cells if cell.num_requests == num_requests.get(cell.concurrency)]
    done = {(cell.arm, cell.concurrency, cell.turn): cell for cell in known}
    schedule = [
        (level, turn, arm)
        for group in engine.grouped(arms, config.drafter)
        for level in levels
        for turn in range(settings.turns)
        for arm in [*group[turn % len(group) :], *group[: turn % len(group)]]
    ]
    for number, (level, turn, arm) in enumerate(schedule, start=1):
        if (arm.label, level, turn) not in done:
            requests = list(islice(cycle(problems), num_requests[level]))
            num_warm = level if turn == 0 else 1
            completions, seconds = engine.timed(config, task, arm, requests, concurrency=level, num_warm=num_warm)
            cell = _cell(arm.label, level, turn, completions, seconds)
            append_line(path, dataclasses.asdict(cell), f"the {len(done)} turns before it")
            done[arm.label, level, turn] = cell
        progress(number, len(schedule))
    return list(_rows([done[arm.label, level, turn] for level, turn, arm in schedule], arms))


def _cell(label: str, level: int, turn: int, completions: Sequence[Completion], seconds: float) -> Cell:
    steps = sum(one.num_steps for one in completions)
    tokens = sum(len(one.token_ids) for one in completions)
    gaps = [gap for one in completions for gap in np.diff(one.arrivals)]
    per_token = [
        (one.arrivals[-1] - one.arrivals[0]) / (len(one.token_ids) - 1) for one in completions if len(one.token_ids) > 1
    ]
    return Cell(
        arm=label,
        concurrency=level,
        turn=turn,
        num_requests=len(completions),
        num_tokens=tokens,
        seconds=seconds,
        tokens_per_step=tokens / max(1, steps),
        num_rescued=sum(int(one.speculation.get("num_rescued_tokens", 0)) for one in completions),
        first=_middle([one.arrivals[0] for one in completions if one.arrivals]),
        per_token=_middle(per_token),
        pieces=_middle(gaps),
    )


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p95; zeros if there are no values."""
    if not len(values):
        return 0.0, 0.0
    return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.95))


def _rows(cells: Sequence[Cell], arms: Sequence[Arm]) -> Iterator[ThroughputResults]:
    """Medians over turns; ratios over lossless in the same turn, with the interval of their median."""
    by_turn = {(cell.arm, cell.concurrency, cell.turn): cell for cell in cells}
    compared = any(arm.rule is not None and arm.rule_name == LOSSLESS for arm in arms)
    for arm in arms:
        base = lossless_for(arm, arms) if compared else None
        for level in sorted({cell.concurrency for cell in cells}):
            arm_cells = [cell for cell in cells if cell.arm == arm.label and cell.concurrency == level]
            if not arm_cells:
                continue
            speeds = np.array([cell.num_tokens / cell.seconds for cell in arm_cells])
            pairs = [by_turn.get((str(base), level, cell.turn)) for cell in arm_cells]
            ratio: dict[str, Any] = {}
            if arm.alone is None and all(pairs):
                strict_speeds = np.array([pair.num_tokens / pair.seconds for pair in pairs if pair])
                ratio = _ratio(speeds / strict_speeds)
            yield ThroughputResults(
                arm=arm.label,
                concurrency=level,
                num_turns=len(arm_cells),
                num_requests=arm_cells[0].num_requests,
                num_rescued=sum(cell.num_rescued for cell in arm_cells),
                tokens_per_second=float(np.median(speeds)),
                tokens_per_second_range=[float(speeds.min()), float(speeds.max())],
                tokens_per_step=float(np.median([cell.tokens_per_step for cell in arm_cells])),
                first_s=_medians([cell.first for cell in arm_cells]),
                per_token_s=_medians([cell.per_token for cell in arm_cells]),
                pieces_s=_medians([cell.pieces for cell in arm_cells]),
                **ratio,
            )


def _medians(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [float(value) for value in np.median(pairs, axis=0)]


def _ratio(ratios: np.ndarray) -> dict[str, Any]:
    low, high = bootstrap_interval(lambda index: float(np.median(ratios[index])), len(ratios), num_resamples=1000)
    return {"vs_lossless": float(np.median(ratios)), "vs_lossless_ci95": [low, high]}
