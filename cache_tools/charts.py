"""Pictures as inline SVG: a treemap, bars, an area over time, a timeline.

Positions across are in percent and those down in pixels, so that a picture is as wide as the page, on a phone too,
and its words stay as large as words. Each mark carries what it means for a pointer, a finger and a keyboard.
"""

import dataclasses
import math
from collections.abc import Sequence

from cache_tools.page import text

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")


@dataclasses.dataclass(frozen=True)
class Part:
    """One mark: its size, colour class, label and the words of its tip."""

    value: float
    colour: str
    label: str
    tip: str


@dataclasses.dataclass(frozen=True)
class Bar:
    """One row of a bar chart, made of parts one after the other."""

    name: str
    value: str
    """The sum of the parts, in words."""
    parts: tuple[Part, ...]


def colour_of(position: int) -> str:
    """The class of the series at a position; all beyond the eighth share one."""
    return COLOURS[position] if position < len(COLOURS) else "rest"


def treemap(groups: Sequence[tuple[str, Sequence[Part]]], name: str, height: int = 320) -> str:
    """Rectangles as large as their values, those of a group side by side."""
    cells: list[str] = []
    shown = [(title, [p for p in parts if p.value > 0]) for title, parts in groups]
    totals = [sum(p.value for p in parts) for _, parts in shown]
    for (_, parts), area in zip(shown, _squarify(totals, (0.0, 0.0, 100.0, 100.0)), strict=True):
        for part, box in zip(parts, _squarify([p.value for p in parts], area), strict=True):
            x, y, w, h = box
            # A picture of its own for each cell, because it cuts a label off where the cell ends.
            label = _label(part, 8, 18, w) if w > 4 and h > 6 else ""
            cells.append(
                f'<svg x="{x:.3f}%" y="{y:.3f}%" width="{w:.3f}%" height="{h:.3f}%">'
                f'<rect class="cell {part.colour}" width="100%" height="100%" rx="3"{_mark(part.tip)}/>{label}</svg>'
            )
    return _svg(name, height, "".join(cells))


def bars(rows: Sequence[Bar], name: str) -> str:
    """Horizontal bars, each on a row with its name and its sum in words."""
    most = max((sum(p.value for p in row.parts) for row in rows), default=0.0) or 1.0
    lines = []
    for row in rows:
        at, marks = 0.0, []
        for part in row.parts:
            width = 100 * part.value / most
            marks.append(f'<rect class="cell {part.colour}" x="{at:.3f}%" width="{max(width, 0.3):.3f}%" height="20" '
                         f'rx="3"{_mark(part.tip)}/>')  # fmt: skip
            at += width
        chart = f'<svg role="group" aria-label="{text(row.name)}">{"".join(marks)}</svg>'
        lines.append(
            f'<div class="row"><div class="name">{text(row.name)}</div><div class="bar">{chart}</div>'
            f'<div class="value">{text(row.value)}</div></div>'
        )
    return f'<div class="bars" role="group" aria-label="{text(name)}">{"".join(lines)}</div>'


def area(
    edges: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]], tips: Sequence[str], name: str
) -> str:
    """Stacked areas over equal steps of time. `series` has colour class, name and a value for each step; `tips` words
    for each step; `edges` the words at the beginning, the middle and the end of the axis."""
    height, count = 220, len(tips)
    top = max((sum(values[i] for _, _, values in series) for i in range(count)), default=0.0)
    scale = _nice(top)
    floor = [0.0] * count
    shapes = []
    for colour, _, values in series:
        upper = [f + v for f, v in zip(floor, values, strict=True)]
        there = [f"{1000 * i / max(count - 1, 1):.1f},{1000 - 1000 * v / scale:.1f}" for i, v in enumerate(upper)]
        back = [f"{1000 * i / max(count - 1, 1):.1f},{1000 - 1000 * v / scale:.1f}" for i, v in enumerate(floor)]
        shapes.append(f'<polygon class="{colour}" points="{" ".join(there + back[::-1])}"/>')
        floor = upper
    grid = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{height * share:.0f}" y2="{height * share:.0f}"/>'
        f'<text class="tick" x="2" y="{height * share - 4 if share else 12:.0f}">{_short(scale * (1 - share))}</text>'
        for share in (0.0, 0.5)
    )
    step = 100 / count
    steps = "".join(
        f'<rect class="step" x="{step * i:.3f}%" width="{step:.3f}%" height="{height}"{_mark(tip)}/>'
        for i, tip in enumerate(tips)
    )
    anchors = ("start", "middle", "end")
    axis = "".join(
        f'<text class="tick" x="{50 * i}%" y="{height + 18}" text-anchor="{anchor}">{text(edge)}</text>'
        for i, (edge, anchor) in enumerate(zip(edges, anchors, strict=True))
    )
    box = 'viewBox="0 0 1000 1000" preserveAspectRatio="none"'
    inner = f'<svg width="100%" height="{height}" {box}>{"".join(shapes)}</svg>'
    base = f'<line class="base" x1="0" x2="100%" y1="{height}" y2="{height}"/>'
    return _svg(name, height + 26, inner + grid + base + steps + axis)


@dataclasses.dataclass(frozen=True)
class Lane:
    """One line of a timeline; each mark has a beginning, a length, and a part that says what it is."""

    name: str
    marks: tuple[tuple[float, float, Part], ...]


def timeline(lanes: Sequence[Lane], end: float, axis: Sequence[str], name: str) -> str:
    """Lanes of marks along one axis from 0 to `end`; what overlaps in a lane is drawn on rows below each other."""
    pieces = []
    for lane in lanes:
        rows: list[float] = []  # the end of the last mark of each row
        marks = []
        for start, length, part in lane.marks:
            row = next((i for i, until in enumerate(rows) if until <= start + 1e-9), len(rows))
            rows[row : row + 1] = [start + length]
            x, width = 100 * start / end, max(100 * length / end, 0.4)
            label = _label(part, 5, 14, width) if width > 6 else ""
            marks.append(
                f'<svg x="{x:.3f}%" y="{row * 22}" width="{width:.3f}%" height="20">'
                f'<rect class="cell {part.colour}" width="100%" height="20" rx="3"{_mark(part.tip)}/>{label}</svg>'
            )
        pieces.append(f'<p class="lane">{text(lane.name)}</p>{_svg(lane.name, max(len(rows), 1) * 22, "".join(marks))}')
    ticks = "".join(
        f'<text class="tick" x="{100 * i / (len(axis) - 1):.1f}%" y="16" '
        f'text-anchor="{"start" if i == 0 else "end" if i == len(axis) - 1 else "middle"}">{text(word)}</text>'
        for i, word in enumerate(axis)
    )
    base = '<line class="base" x1="0" x2="100%" y1="1" y2="1"/>'
    return f'<div role="group" aria-label="{text(name)}">{"".join(pieces)}{_svg("axis", 22, base + ticks)}</div>'


def data_bar(value: float, most: float, bad: bool = False) -> str:
    """A small bar beside a number in a table."""
    width = 100 * value / most if most else 0.0
    return (
        '<svg class="data" aria-hidden="true"><rect class="track" width="100%" height="10" rx="2"/>'
        f'<rect class="{"badfill" if bad else "c1"}" width="{width:.1f}%" height="10" rx="2"/></svg>'
    )


def _svg(name: str, height: int, content: str) -> str:
    return f'<svg class="chart" role="group" aria-label="{text(name)}" height="{height}">{content}</svg>'


def _label(part: Part, x: int, y: int, width: float) -> str:
    """The words of a mark that is `width` percent wide; on a phone the narrow ones have room for two letters."""
    narrow = " narrow" if width < 16 else ""
    return f'<text class="label on-{part.colour}{narrow}" x="{x}" y="{y}">{text(part.label)}</text>'


def _mark(tip: str) -> str:
    return f' tabindex="0" role="img" aria-label="{text(tip)}" data-tip="{text(tip)}"'


def _squarify(values: Sequence[float], box: tuple[float, ...]) -> list[tuple[float, float, float, float]]:
    """Boxes of the given areas inside `box`, none much longer than wide. Values in any order; boxes in theirs."""
    result: list[tuple[float, float, float, float]] = [(box[0], box[1], 0.0, 0.0)] * len(values)
    order = sorted(range(len(values)), key=lambda i: -values[i])
    x, y, w, h = box
    total = sum(values)
    while order and total > 0 and w > 0 and h > 0:
        # The page is about three times as wide as the picture is high: a percent across is longer than one down.
        across = w * 3 >= h
        row: list[int] = []
        worst = math.inf
        for i in order:
            candidate = _worst([*(values[j] for j in row), values[i]], total, w * 3, h)
            if candidate > worst:
                break
            row, worst = [*row, i], candidate
        share = sum(values[j] for j in row) / total
        thick = (w if across else h) * share
        at = y if across else x
        for j in row:
            length = (h if across else w) * values[j] / (share * total)
            result[j] = (x, at, thick, length) if across else (at, y, length, thick)
            at += length
        x, y, w, h = (x + thick, y, w - thick, h) if across else (x, y + thick, w, h - thick)
        total -= sum(values[j] for j in row)
        order = order[len(row) :]
    return result


def _worst(row: Sequence[float], total: float, w: float, h: float) -> float:
    """The worst ratio of sides if `row` is laid along the shorter side."""
    side = min(w, h)
    scale = w * h / total
    thick = sum(row) * scale / side
    return max(max(thick / (v * scale / thick), (v * scale / thick) / thick) for v in row)


def _nice(top: float) -> float:
    """The least of 1, 2, 5, 10, 20, ... that is not less."""
    if top <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(top))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= top)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
