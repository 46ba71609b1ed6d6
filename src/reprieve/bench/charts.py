"""Charts as SVG text, for pages that need no network, no script and no font of their own."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Okabe and Ito's colours first: told apart by most colour-blind readers; markers repeat the distinction.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6a3d9a", "#8c564b",
    "#117733", "#882255", "#44aa99", "#999933", "#aa4499", "#332288", "#555555", "#e69f00",
)  # fmt: skip
_WIDTH, _HEIGHT = 520, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 46


@dataclass(frozen=True)
class Point:
    """One arm in a scatter chart; x and y with their intervals, and what a reader sees when pointing at it."""

    group: str
    x: float
    y: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    note: str


def scatter(
    points: Sequence[Point],
    colours: dict[str, str],
    *,
    x_label: str,
    y_label: str,
    line: Sequence[tuple[float, float]] = (),
    line_label: str = "",
) -> str:
    """Points with error bars, those of one group joined; `line` is drawn dashed behind them."""
    xs = [value for p in points for value in (p.x, p.x_low, p.x_high)] + [x for x, _ in line]
    ys = [value for p in points for value in (p.y_low, p.y_high)] + [y for _, y in line]
    to_x, x_ticks = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    to_y, y_ticks = _scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x_ticks, y_ticks, to_x, to_y, x_label, y_label)]
    if line:
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="baseline" points="{path}"><title>{html.escape(line_label)}</title></polyline>')
    for group in dict.fromkeys(point.group for point in points):
        ours = sorted((point for point in points if point.group == group), key=lambda point: point.x)
        colour = colours[group]
        parts.append(f'<g class="series" data-group="{html.escape(group)}" stroke="{colour}" fill="{colour}">')
        if len(ours) > 1:
            path = " ".join(f"{to_x(p.x):.1f},{to_y(p.y):.1f}" for p in ours)
            parts.append(f'<polyline fill="none" stroke-width="1.5" points="{path}"/>')
        for p in ours:
            x, y = to_x(p.x), to_y(p.y)
            parts.append(
                f'<path class="bar" d="M{x:.1f} {to_y(p.y_low):.1f}V{to_y(p.y_high):.1f}'
                f'M{to_x(p.x_low):.1f} {y:.1f}H{to_x(p.x_high):.1f}"/>'
                f'<circle tabindex="0" class="point" cx="{x:.1f}" cy="{y:.1f}" r="5" data-note="{html.escape(p.note)}">'
                f"<title>{html.escape(p.note)}</title></circle>"
            )
        parts.append("</g>")
    return _svg(_WIDTH, _HEIGHT, f"{y_label} against {x_label}", parts)


def histogram(shares: Sequence[float], colour: str, *, title: str) -> str:
    """A small chart of shares by whole number, 1 on the left."""
    width, height, base = 220, 90, 72
    top = max(shares, default=1.0) or 1.0
    step = (width - 20) / max(1, len(shares))
    parts = [f'<line x1="10" x2="{width - 10}" y1="{base}" y2="{base}" class="axis"/>']
    for number, share in enumerate(shares, start=1):
        tall = 62 * share / top
        x = 10 + (number - 1) * step
        parts.append(
            f'<rect x="{x + 0.5:.1f}" y="{base - tall:.1f}" width="{max(1.0, step - 1):.1f}" height="{tall:.1f}" '
            f'fill="{colour}"><title>{number} tokens: {share:.1%} of rounds</title></rect>'
        )
    for number in sorted({1, (len(shares) + 1) // 2, len(shares)}):
        x = 10 + (number - 0.5) * step
        parts.append(f'<text x="{x:.1f}" y="{base + 13}" text-anchor="middle">{number}</text>')
    return _svg(width, height, title, parts)


def stacked(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, unit: str) -> str:
    """Horizontal bars of parts, one bar a row."""
    label, width, tall = 182, 520, 22
    longest = max((sum(parts) for _, parts in rows), default=1.0) or 1.0
    shapes = []
    for number, (name, parts) in enumerate(rows):
        y, x = number * tall + 4, float(label)
        shapes.append(f'<text x="{label - 6}" y="{y + 12}" text-anchor="end">{html.escape(_cut(name, 25))}</text>')
        for index, part in enumerate(parts):
            long = (width - label - 50) * part / longest
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, long):.1f}" height="{tall - 6}" '
                f'fill="{COLOURS[index]}"><title>{names[index]}: {_short(part)} {unit}</title></rect>'
            )
            x += long
        shapes.append(f'<text x="{x + 5:.1f}" y="{y + 12}">{_short(sum(parts))}</text>')
    return _svg(width, len(rows) * tall + 8, "where time goes", shapes)


def intervals(rows: Sequence[tuple[str, float, float, float, str]], *, label: str) -> str:
    """One difference a row with its interval, around a line at zero: name, value, low, high, what to tell."""
    left, width, tall = 182, 520, 22
    low, high = min([0.0, *(row[2] for row in rows)]), max([0.0, *(row[3] for row in rows)])
    to_x, ticks = _scale(low, high, left, width - 12)
    bottom = len(rows) * tall + 8
    shapes = [f'<line class="axis" x1="{to_x(0):.1f}" x2="{to_x(0):.1f}" y1="0" y2="{bottom}"/>']
    for number, (name, value, start, end, note) in enumerate(rows):
        y = number * tall + 14
        shapes.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{html.escape(_cut(name, 25))}</text>')
        shapes.append(
            f'<g stroke="{COLOURS[0]}" fill="{COLOURS[0]}">'
            f'<path class="bar" d="M{to_x(start):.1f} {y}H{to_x(end):.1f}"/>'
            f'<circle class="point" tabindex="0" cx="{to_x(value):.1f}" cy="{y}" r="4" data-note="{html.escape(note)}">'
            f"<title>{html.escape(note)}</title></circle></g>"
        )
    for tick in ticks:
        shapes.append(f'<text x="{to_x(tick):.1f}" y="{bottom + 14}" text-anchor="middle">{_number(tick)}</text>')
    shapes.append(
        f'<text x="{(left + width) / 2:.0f}" y="{bottom + 32}" text-anchor="middle">{html.escape(label)}</text>'
    )
    return _svg(width, bottom + 38, label, shapes)


def _axes(x_ticks: list[float], y_ticks: list[float], to_x: _Scale, to_y: _Scale, x_label: str, y_label: str) -> str:
    base = _HEIGHT - _BOTTOM
    parts = []
    for tick in y_ticks:
        y = to_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_ticks:
        x = to_x(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{base}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{_number(tick)}</text>')
    across, down = (_LEFT + _WIDTH) / 2, (_TOP + base) / 2
    parts.append(f'<text x="{across}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(x_label)}</text>')
    turned = f'transform="rotate(-90 13 {down})" x="13" y="{down}"'
    parts.append(f'<text {turned} text-anchor="middle">{html.escape(y_label)}</text>')
    return "".join(parts)


@dataclass(frozen=True)
class _Scale:
    """From numbers to places on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


def _scale(low: float, high: float, start: float, end: float) -> tuple[_Scale, list[float]]:
    """A scale that holds both ends with round ticks."""
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return _Scale(first * step, last * step, start, end), [number * step for number in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{round(value, 6):g}".replace("-", "\u2212")


def _short(value: float) -> str:
    """Three digits, without powers of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "\u2026"


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{inside}</svg>'
    )
