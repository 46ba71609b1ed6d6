"""The figures of a run, drawn by matplotlib: files beside the results, and SVG text for the report."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from reprieve.bench.arms import LOSSLESS
from reprieve.bench.results import ArmResults, Results, ThroughputResults
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.errors import import_extra

# Okabe and Ito's colours, told apart by most colour-blind readers; markers repeat the distinction.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6a3d9a", "#8c564b")
_MARKERS = "osD^vP*Xh<>p"
_PANELS = {
    "speedup_vs_target": "speedup over the target alone (tokens per second)",
    "tokens_per_round": "tokens per target forward",
}


def draw_frontier(results: Results, folder: Path) -> list[Path]:
    """Draw `frontier.png` and `frontier.svg`; return their paths."""
    figure = frontier(results)
    paths = [folder / "frontier.png", folder / "frontier.svg"]
    for path in paths:
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)
        temporary.replace(path)
    return paths


def as_svg(figure: Any) -> str:
    """Return a figure as an SVG element whose text stays text; equal figures give equal bytes."""
    matplotlib = import_extra("matplotlib", "evidence")
    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "reprieve"}):
        figure.savefig(target, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = target.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)


def frontier(results: Results) -> Any:
    """Accuracy against speedup, where it was measured, and against tokens per round; the arms of a rule are joined."""
    arms = results.arms
    panels = {x: label for x, label in _PANELS.items() if any(getattr(arm, x) for arm in arms)}
    figure = _figure(2.5 + 4.5 * max(1, len(panels)), 4.8)
    drawn = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    lines = _lines(arms)
    target = next((arm for arm in arms if arm.rule == TARGET_ONLY), None)
    for axes, (x, label) in zip(drawn, panels.items(), strict=False):
        _panel(axes, lines, x, label)
        if target and (speed := getattr(target, x)):
            solved = 100 * (target.accuracy or 0.0)
            axes.axhline(solved, color="0.3", linewidth=0.8, linestyle=":")
            axes.plot([speed], [solved], marker="s", color="0.3", linestyle="none", label="target only")
        if x == "speedup_vs_target" and (mixed := results.random_allocation):
            speeds, accuracies = [point.speedup_vs_target for point in mixed], [100 * point.accuracy for point in mixed]
            axes.plot(speeds, accuracies, color="0.6", linestyle="--", zorder=0, label="random allocation to the draft")
    drawn[0].set_ylabel("problems solved, %")
    handles, labels = drawn[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    figure.suptitle(
        f"{results.config.task} ({results.config.split}), n = {results.num_problems}, "
        f"K = {results.draft_length}; bars are 95% intervals",
        fontsize=10,
    )
    return figure


def throughput(rows: Sequence[ThroughputResults], names: Mapping[str, str]) -> Any:
    """Tokens per second against the number of concurrent requests; bars run from the slowest turn to the fastest.

    Args:
        names: what to call each arm.
    """
    figure = _figure(7, 4.2)
    axes = figure.subplots()
    for index, arm in enumerate(dict.fromkeys(row.arm for row in rows)):
        its = sorted((row for row in rows if row.arm == arm), key=lambda row: row.concurrency)
        medians = [row.tokens_per_second for row in its]
        ends = [row.tokens_per_second_range for row in its]
        bars = [[m - low for m, (low, _) in zip(medians, ends, strict=True)],
                [high - m for m, (_, high) in zip(medians, ends, strict=True)]]  # fmt: skip
        axes.errorbar([row.concurrency for row in its], medians, yerr=bars, label=names[arm], **_style(index))
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens per second")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _figure(width: float, height: float) -> Any:
    return import_extra("matplotlib.figure", "evidence").Figure(figsize=(width, height), layout="constrained")


def _style(index: int) -> dict[str, Any]:
    marker, color = _MARKERS[index % len(_MARKERS)], _COLOURS[index % len(_COLOURS)]
    return {"marker": marker, "color": color, "markersize": 6, "linewidth": 1, "elinewidth": 0.6}


def _lines(arms: list[ArmResults]) -> dict[str, list[ArmResults]]:
    """Group arms that differ only in the dial, by name: the rule and the settings not shared by all of its groups."""
    forms: dict[str, dict[tuple[tuple[str, Any], ...], list[ArmResults]]] = {}
    for arm in arms:
        if arm.rule not in (TARGET_ONLY, DRAFT_ONLY):
            combined = any(isinstance(value, dict) for value in arm.params.values())
            params = {} if combined else {name: of for name, of in arm.params.items() if name != arm.dial}
            settings = {**params, "K": arm.num_draft_tokens, "drafter": arm.drafter}
            form = tuple((name, str(value)) for name, value in settings.items() if value not in (None, ""))
            rule = arm.spec_without_dial if combined else arm.rule
            forms.setdefault(str(rule), {}).setdefault(form, []).append(arm)
    named = {}
    for rule, of_rule in forms.items():
        common = set.intersection(*map(set, of_rule))
        for form, its in of_rule.items():
            named[", ".join((rule, *(f"{name}={value}" for name, value in form if (name, value) not in common)))] = its
    return named


def _panel(axes: Any, lines: dict[str, list[ArmResults]], x: str, label: str) -> None:
    for index, (name, its) in enumerate(lines.items()):
        points = sorted((arm for arm in its if getattr(arm, x)), key=attrgetter(x))
        if not points:
            continue
        solved = [(arm.accuracy or 0.0, arm.accuracy_ci95 or [0.0, 0.0]) for arm in points]
        bars = [[100 * (share - low) for share, (low, _) in solved],
                [100 * (high - share) for share, (_, high) in solved]]  # fmt: skip
        strict = {"color": "black", "markersize": 9} if points[0].rule == LOSSLESS else {}
        accuracy = [100 * share for share, _ in solved]
        axes.errorbar([getattr(arm, x) for arm in points], accuracy, yerr=bars, label=name, **(_style(index) | strict))
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)
