"""Shared code of the papers' benchmarks: resumable runs of arms over a bundled pair's test split, with progress lines;
tables for `tables.py`; labels of the pair; and error handling."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from reprieve.backends.local import LocalEngine
from reprieve.bench.arms import LOSSLESS, Arm, make_arm
from reprieve.bench.engine import RunConfig
from reprieve.bench.records import read_answers, read_run
from reprieve.bench.results import Environment
from reprieve.bench.run import Run
from reprieve.bench.settings import RunSettings
from reprieve.bench.summary import Rows, common_rows
from reprieve.bundles import BUNDLES, Bundle, bundle_of
from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.engine import Pair
from reprieve.errors import ReprieveError, SpecError
from reprieve.files import replace_file
from reprieve.heads.loading import attach_heads
from reprieve.mining.store import LabelStore
from reprieve.rules import Rule, parse_rule
from reprieve.settings import NumDraftTokens, SamplingParams, SamplingSettings
from reprieve.stats import bootstrap_interval
from reprieve.tasks import Task, load_task
from tables import parts_table


def run(main: Callable[[], None]) -> None:
    """Run a benchmark's `main`; print its errors as one line."""
    try:
        main()
    except ReprieveError as error:
        sys.exit(f"error: {error}")


def whole(lowest: int) -> Callable[[str], int]:
    """Return a parser of flag values: whole numbers of `lowest` or more."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a whole number, {lowest} or more, got {text!r}")
        return int(text)

    return read


def require_file(path: Path | None) -> None:
    """Refuse, before any work, a path to which no file can be written; None means no file.

    Raises:
        SpecError: a folder, or a path below a file.
        ReprieveError: its folder cannot be made.
    """
    if path is None:
        return
    if path.is_dir() or (path.parent.exists() and not path.parent.is_dir()):
        raise SpecError(f"--out must name a file, got {str(path)!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReprieveError(f"--out {str(path)!r} cannot be written: {error.strerror}") from None


def bundled(name: str) -> Bundle:
    """Return the bundled pair that a flag names."""
    if (bundle := bundle_of(name)) is None:
        raise argparse.ArgumentTypeError(f"must be a bundled pair's name, one of {', '.join(BUNDLES)}, got {name!r}")
    return bundle


def labels_of(pair: Pair, folder: Path) -> LabelStore:
    """Open a store of this pair's labels.

    Raises:
        ReprieveError: the folder holds no label store, or one of another pair.
    """
    store = LabelStore(folder)
    store.require_pair(pair.identity)
    return store


def paired_rows(folder: Path) -> tuple[dict[str, Any], Rows]:
    """Return a run's configuration, and the answers of all arms to the problems that all of them answered.

    Raises:
        SpecError: a run without lossless decoding.
    """
    config = read_run(folder)
    rows = common_rows(config["arms"], read_answers(folder), config.get("num_trials", 1))
    if not rows.get(LOSSLESS):
        raise SpecError(f"{str(folder)!r} holds no finished answers of {LOSSLESS}")
    return config, rows


def part(head: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> dict[str, Any]:
    """Return one table of a result that has several; `tables.py` renders it."""
    return {"head": list(head), "rows": [[str(cell) for cell in row] for row in rows], "note": note}


def write_parts(path: Path, parts: Mapping[str, Mapping[str, Any]], **more: Any) -> None:
    """Write and print a result of several tables, with its command and environment."""
    document = {"command": shlex.join(sys.argv), **asdict(Environment.here()), **more, "parts": parts}
    replace_file(path, json.dumps(document, indent=1) + "\n")
    print(parts_table({}, document))


def over(values: Sequence[float], digits: int = 3, scale: float = 1) -> str:
    """Format a value and its interval, given as [value, low, high]."""
    middle, low, high = (f"{scale * value:.{digits}f}" for value in values)
    return f"{middle} [{low}, {high}]"


def task_of(pair: Pair) -> Task:
    """Return the task that a bundled pair was trained for."""
    bundle = bundle_of(pair.target_name)
    assert bundle is not None, f"{pair.target_name} is no bundled pair"
    return load_task(bundle.task)


def answer_test_problems(
    pair: Pair,
    arms: Sequence[Arm],
    folder: Path,
    options: argparse.Namespace,
    *,
    drafter: str,
    temperature: float,
    draft_temperature: float | None = None,
    num_trials: int = 1,
) -> Run:
    """Answer `options.limit` test problems from `options.offset` on with every arm, in `options.workers` processes."""
    task = task_of(pair)
    settings = RunSettings(
        task=task.name,
        limit=options.limit,
        offset=options.offset,
        drafter=drafter,
        num_trials=num_trials,
        sampling=SamplingSettings(temperature, draft_temperature=draft_temperature),
    )
    engine = LocalEngine(pair, num_workers=options.workers)
    config = RunConfig.of(engine, arms, settings, command=" ".join(sys.argv))
    run = Run(config, arms, engine, task, folder)

    def report(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"{folder.name}: {done} of {total}", flush=True)

    run.measure(progress=report)
    return run


def answer_params(sampling: SamplingSettings, task: Task, seed: int) -> SamplingParams:
    return SamplingParams(**vars(sampling), max_new_tokens=task.max_new_tokens, stop=tuple(task.stop), seed=seed)


def flags_in_force(command: Command) -> dict[str, Any]:
    """Return the command, the environment and the flags, for a results file."""
    flags = asdict(command)
    del flags["out"]
    grouped = {**flags.pop("pair"), **flags.pop("problems", {})}
    return {"command": screen.command_line(), **asdict(Environment.here()), **flags, **grouped}


def write_json(path: Path, document: dict[str, Any]) -> None:
    replace_file(path, json.dumps(document, indent=2, default=str) + "\n")


def rule_arms(specs: Sequence[str], num_draft_tokens: NumDraftTokens, *, target: str | None = None) -> list[Arm]:
    """Return only the named arms; each must have a rule.

    Raises:
        SpecError: no arms, an arm without a rule, or an invalid specification.
    """
    arms = [make_arm(spec, num_draft_tokens, target=target) for spec in specs]
    for spec, arm in zip(specs, arms, strict=True):
        if arm.rule is None:
            raise SpecError(f"{spec!r} has no rule: nothing drafted is accepted there")
    if not arms:
        raise SpecError("rules must name at least one, got none")
    return arms


def sweep_rules(spec: str, thresholds: Sequence[float], *, target: str | None = None) -> list[Rule]:
    """Return the rule at each value of its dial.

    Raises:
        SpecError: no thresholds, a value out of range, or a rule without a dial.
    """
    rule = attach_heads(parse_rule(spec), target)
    if not thresholds:
        raise SpecError("thresholds must hold at least one value, got none")
    if rule.dial is None:
        raise SpecError(f"rule {rule.name} has nothing to sweep")
    return [rule.with_dial(value) for value in thresholds]


def share_with_interval(parts: np.ndarray, wholes: np.ndarray) -> list[float] | None:
    """Return a share over all problems and its 95% bootstrap interval: [share, low, high]; None if the total is 0.

    With fewer than two contributing problems the interval is 0 to 1. At a share of 0 or 1 it has no width, because a
    bootstrap cannot draw an outcome that no problem had.

    Args:
        parts: each problem's count in the share, [n].
        wholes: each problem's total count, [n].
    """
    if not wholes.sum():
        return None

    def share(indices: np.ndarray) -> float:
        whole = wholes[indices].sum()
        return float(parts[indices].sum() / whole) if whole else float("nan")

    known = np.count_nonzero(wholes) > 1
    return [float(parts.sum() / wholes.sum()), *(bootstrap_interval(share, len(parts)) if known else (0.0, 1.0))]
