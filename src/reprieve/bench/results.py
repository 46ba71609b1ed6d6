"""Records of `results.json`: numbers with interval and n, conditions, versions, machine; each rule's fastest K."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import reprieve
from reprieve.bench.engine import RunConfig
from reprieve.errors import ReprieveError
from reprieve.files import read_json, record_from, replace_file
from reprieve.settings import NumDraftTokens, common_length

SCHEMA = 2
_FILE = "results.json"

Interval = list[float]  # [low, high], 95%
Difference = list[float]  # [difference, low, high], 95%, over the same problems
Bounds = list[float]  # [lower, upper], such as two quantiles


@dataclass(frozen=True, kw_only=True)
class ArmResults:
    """Results of one arm. docs/reference/results.md describes the fields.

    Quality is None for tasks without reference answers, and speed where answers share a server's batches.
    """

    rule: str
    name: str
    spec: str  # the arm's label
    short: str
    params: dict[str, Any]
    spec_without_dial: str | None
    dial: str | None
    drafter: str | None
    num_draft_tokens: NumDraftTokens | None

    num_problems: int
    num_failed: int
    num_rescued: int
    num_truncated: int
    num_unread: int

    accuracy: float | None
    accuracy_ci95: Interval | None
    accuracy_vs_target: Difference | None = None
    accuracy_vs_lossless: Difference | None
    accuracy_vs_allocation: Difference | None = None
    net_drop: Difference | None
    regression_rate: float | None
    regression_rate_ci95: Interval | None
    improvement_rate: float | None

    tokens_per_round: float | None
    acceptance_rate: float | None
    draft_share: float | None
    sequence_bound: float | None
    pruned_share: float
    tokens_per_answer: float
    tokens_vs_lossless: Difference
    truncated_vs_lossless: Difference
    rounds_per_answer: float | None
    rounds_vs_lossless: Difference | None

    tokens_per_second: float | None
    speedup_vs_target: float | None = None
    speedup_vs_target_ci95: Interval | None = None
    speedup_vs_lossless: float | None
    speedup_vs_lossless_ci95: Interval | None
    answers_per_second: float | None
    answers_vs_lossless: float | None
    answers_vs_lossless_ci95: Interval | None
    seconds_per_solved: float | None
    seconds_by_part: dict[str, float]


@dataclass(frozen=True)
class Allocation:
    """Sending a share of the problems to the draft alone: the baseline that every rule must beat."""

    share_to_draft: float
    accuracy: float
    speedup_vs_target: float


@dataclass(frozen=True, kw_only=True)
class ThroughputResults:
    """One arm's speed at one concurrency: medians over turns. Times are [p50, p95], in seconds."""

    arm: str
    concurrency: int
    num_turns: int
    num_requests: int
    num_rescued: int
    tokens_per_second: float
    tokens_per_second_range: Bounds
    tokens_per_step: float
    vs_lossless: float | None = None
    vs_lossless_ci95: Interval | None = None
    first_s: Bounds
    per_token_s: Bounds
    pieces_s: Bounds


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a run, and the conditions under which they were measured.

    Args:
        num_workers: answers in progress at once; above 1, the times of single answers mean little.
        complete: whether all answers were made; False after an interruption.
        graded: whether the task has reference answers.
        num_problems: the problems that every arm answered.
    """

    config: RunConfig
    environment: Environment
    num_workers: int
    complete: bool
    graded: bool
    num_problems: int
    arms: list[ArmResults]
    random_allocation: list[Allocation] = field(default_factory=list)
    throughput: list[ThroughputResults] = field(default_factory=list)

    @property
    def draft_length(self) -> NumDraftTokens:
        """K; "by arm" if arms differ."""
        return common_length(self.config.num_draft_tokens)

    @property
    def num_answers(self) -> int:
        """Answers of each arm."""
        return self.num_problems * self.config.num_trials

    def write(self, folder: Path) -> Path:
        """Write `results.json`; returns its path."""
        path = folder / _FILE
        replace_file(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path) -> Results | None:
        """Return the results in a folder, None if it holds none.

        Raises:
            ReprieveError: a `results.json` that cannot be read, or without arms.
        """
        path = folder / _FILE
        if not path.is_file():
            return None
        values = read_json(path, "the file")
        if not isinstance(values, dict) or values.get("schema") != SCHEMA:
            raise ReprieveError(
                f"{str(path)!r} must be an object of schema {SCHEMA}; if it is older, run its command again"
            )
        try:
            results = record_from(cls, values, signed=True)
        except ValueError as error:
            raise ReprieveError(f"{str(path)!r}: {error}") from None
        if not results.arms:
            raise ReprieveError(f"{str(path)!r} has no arms")
        return results


class BestK(NamedTuple):
    """One arm at the K that decodes most tokens per second.

    The fastest of several measurements is a little flattered; measure again on other problems before quoting it.
    """

    spec: str
    num_draft_tokens: NumDraftTokens
    by_k: dict[NumDraftTokens, float]  # tokens per second


def best_ks(arms: Sequence[ArmResults], throughput: Sequence[ThroughputResults] = ()) -> list[BestK]:
    """Return the fastest K of every rule; under load where that was measured."""
    speeds: dict[str, dict[NumDraftTokens, float]] = {}
    loaded = {row.arm: row.tokens_per_second for row in throughput}
    for arm in arms:
        speed = loaded.get(arm.spec, arm.tokens_per_second)
        if arm.num_draft_tokens is not None and speed:
            spec = arm.name + (f"@drafter={arm.drafter}" if arm.drafter else "")
            speeds.setdefault(spec, {})[arm.num_draft_tokens] = speed
    return [BestK(spec, max(by_k, key=by_k.__getitem__), by_k) for spec, by_k in speeds.items()]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Processor, cores, threads and GPUs."""

    platform: str
    processor: str
    num_cpus: int | None
    num_threads: int
    gpus: list[str]

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(
            platform=platform.platform(terse=True),
            processor=_processor(),
            num_cpus=os.cpu_count(),
            num_threads=torch.get_num_threads(),
            gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        )


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Code, package versions and machine of a measurement."""

    commit: str | None  # of the source checkout, "-dirty" where files differ; None outside one
    versions: dict[str, str]
    machine: Machine

    @classmethod
    def here(cls) -> Environment:
        """This process's environment."""
        packages = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}
        versions = {"python": platform.python_version(), "reprieve": reprieve.__version__, **packages}
        return cls(commit=_source_commit(), versions=versions, machine=Machine.here())


def _source_commit() -> str | None:
    """The commit of the source checkout this package runs from, "-dirty" where files differ; None outside one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        output = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
