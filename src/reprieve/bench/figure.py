"""The frontier as a picture: accuracy against speedup and against tokens per round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reprieve.bench.arms import LOSSLESS
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY
from reprieve.errors import import_extra

_MARKERS = "osD^vP*Xh<>p"


def draw_frontier(document: dict[str, Any], folder: Path) -> list[Path]:
    """`frontier.png` and `frontier.svg` from a results document; returns their paths."""
    figure = import_extra("matplotlib.figure", "evidence").Figure(figsize=(11.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    arms = document["arms"]
    lines = _lines(arms)
    styles = {name: (_MARKERS[i % len(_MARKERS)], f"C{i % 10}") for i, name in enumerate(lines)}
    _panel(left, lines, styles, "speedup_vs_target", "speedup over the target alone (tokens per second)")
    _panel(right, lines, styles, "tokens_per_round", "tokens per target forward")
    if target := next((arm for arm in arms if arm["rule"] == TARGET_ONLY), None):
        _reference(left, target, "speedup_vs_target")
        _reference(right, target, "tokens_per_round")
    line = document.get("random_allocation", [])
    left.plot(
        [point["speedup_vs_target"] for point in line],
        [100 * point["accuracy"] for point in line],
        color="0.6",
        linestyle="--",
        zorder=0,
        label="random allocation to the draft",
    )
    left.set_ylabel("problems solved, %")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(
        f"{document['task']} ({document['split']}), n = {document['num_problems']}, "
        f"K = {document['num_draft_tokens']}; bars are 95% intervals",
        fontsize=10,
    )
    paths = [folder / "frontier.png", folder / "frontier.svg"]
    for path in paths:
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)
        temporary.replace(path)
    return paths


def _lines(arms: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Arms that only a dial tells apart, by name: the rule, and of its settings those that others of it differ in."""
    forms: dict[str, dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]]] = {}
    for arm in arms:
        if arm["rule"] not in (TARGET_ONLY, DRAFT_ONLY):
            combined = any(isinstance(value, dict) for value in arm["params"].values())
            params = {} if combined else {name: of for name, of in arm["params"].items() if name != arm["dial"]}
            settings = {**params, "K": arm["num_draft_tokens"], "drafter": arm["drafter"]}
            form = tuple((name, str(value)) for name, value in settings.items() if value not in (None, ""))
            rule = arm["spec_without_dial"] if combined else arm["rule"]
            forms.setdefault(rule, {}).setdefault(form, []).append(arm)
    named = {}
    for rule, of_rule in forms.items():
        common = set.intersection(*map(set, of_rule))
        for form, its in of_rule.items():
            named[", ".join((rule, *(f"{name}={value}" for name, value in form if (name, value) not in common)))] = its
    return named


def _panel(
    axes: Any, lines: dict[str, list[dict[str, Any]]], styles: dict[str, tuple[str, str]], x: str, label: str
) -> None:
    for name, (marker, color) in styles.items():
        points = sorted((arm for arm in lines[name] if arm[x]), key=lambda arm: arm[x])
        if not points:
            continue
        accuracy = [100 * arm["accuracy"] for arm in points]
        low = [100 * (arm["accuracy"] - arm["accuracy_ci95"][0]) for arm in points]
        high = [100 * (arm["accuracy_ci95"][1] - arm["accuracy"]) for arm in points]
        axes.errorbar(
            [arm[x] for arm in points],
            accuracy,
            yerr=[low, high],
            marker=marker,
            markersize=9 if points[0]["rule"] == LOSSLESS else 6,
            color="black" if points[0]["rule"] == LOSSLESS else color,
            linewidth=1,
            elinewidth=0.6,
            label=name,
        )
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)


def _reference(axes: Any, target: dict[str, Any], x: str) -> None:
    axes.axhline(100 * target["accuracy"], color="0.3", linewidth=0.8, linestyle=":")
    axes.plot([target[x]], [100 * target["accuracy"]], marker="s", color="0.3", linestyle="none", label="target only")
