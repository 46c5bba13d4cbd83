"""The page of `benchmarks.pause`: its table and its picture, made from its measurements. Standard library only."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ("Change", "draw", "growth", "picture", "read_changes", "table")

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# Columns of the table, each with the parts that it sums up.
GROUPS: dict[str, tuple[str, ...]] = {
    "noticed": ("noticed",),
    "step finished": ("step finished",),
    "saved": ("written", "synced"),
    "sealed": ("sealed",),
    "committed": ("committed",),
    "stopped": ("stopped",),
    "converted": ("converted", "converted by the script"),
    "formed": ("formed",),
    "started": ("started", "met", "verified"),
    "model built": ("model built",),
    "engine built": ("built", "engine built", "ready"),
    "loaded": ("loaded",),
    "first step": ("first step",),
}
COLOURS = {
    **{
        "ddp": "#1f77b4",
        "ddp-memory": "#aec7e8",
        "ddp-stay": "#17becf",
        "hf": "#bcbd22",
        "hf-memory": "#dbdb8d",
        "hf-stay": "#7f7f7f",
        "fsdp2": "#2ca02c",
    },
    **{"zero1": "#d62728", "zero1-universal": "#ff9896", "zero1-beside": "#8c564b", "zero1-memory": "#c49c94"},
    **{"zero3": "#9467bd", "zero3-universal": "#c5b0d5", "zero3-beside": "#e377c2"},
}
# What a pause has of the steps on its two sides. Before a kill is noticed a step is under way.
STEP_PARTS = ("noticed", "step finished", "first step")
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_WIDTH, LEGEND_HEIGHT, MARGIN = 250, 200, 115, 16, 50


@dataclass(frozen=True)
class Change:
    """One change that was measured.

    Attributes:
        way: one of `benchmarks.pause.WAYS`.
        bytes, tensors: size of the state in bytes; number of the model's tensors.
        launcher: "ours" or "torchrun".
        scene: "join", "leave" or "kill".
        pause: seconds, and what they consist of.
        gap: longest time in which no rank ended a step, until the new world's first.
        past: seconds from the last step before the event to the first that nobody had made.
        step: seconds of a step before the event.
        lost: steps that were made twice.
        load: the machine's load, as the mean of the minute before.
        read: seconds in which the new world's ranks could read the state once (`benchmarks.reading_once`); 0: unknown.
    """

    way: str
    bytes: int
    tensors: int
    launcher: str
    scene: str
    pause: float
    gap: float
    past: float
    step: float
    lost: int
    load: float
    parts: Mapping[str, float]
    read: float = 0.0

    @property
    def besides_steps(self) -> float:
        """Seconds of the pause without what may be a step on each side of it."""
        return self.pause - sum(self.parts.get(part, 0.0) for part in STEP_PARTS)


def read_changes(path: Path) -> list[Change]:
    """Reads what `benchmarks.pause` has written.

    Raises:
        OSError: the file cannot be read.
    """
    names = {field.name for field in fields(Change)}
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Change(**{key: value for key, value in json.loads(line).items() if key in names}) for line in lines]


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts by the table's columns; a part without a column counts with the script's own marks (building an engine)."""
    known = {part: group for group, own in GROUPS.items() for part in own}
    found = dict.fromkeys(GROUPS, 0.0)
    for part, seconds in parts.items():
        found[known.get(part, "engine built")] += seconds
    return found


def table(changes: Iterable[Change]) -> str:
    """Markdown: a line for each cell with ours and torchrun's side by side, medians."""
    cells = _cells(changes)
    columns = [*GROUPS]
    head = ["way", "MB", "tensors", "change", "a step", "pause", *columns]
    head += ["torchrun", "times", "lost: ours, torchrun", "load", "n"]
    rows = [head, ["---"] * len(head)]
    for (way, size, tensors, scene), found in sorted(cells.items(), key=_order):
        ours = found.get("ours", [])
        theirs = found.get("torchrun") or _framework(cells, way, size, tensors, scene)
        if not ours:
            continue
        pause = _median(one.pause for one in ours)
        parts = [_median(grouped(one.parts)[name] for one in ours) for name in columns]
        beside = _median(one.pause for one in theirs) if theirs else None
        lost = f"{_lost(ours)}, {_lost(theirs)}" if theirs else _lost(ours)
        rows.append(
            [
                *(way, f"{size / 1e6:,.0f}", f"{tensors:,}", scene),
                *(f"{_median(one.step for one in ours):.2f}", f"**{pause:.2f}**"),
                *(f"{part:.2f}" if part >= 0.005 else "" for part in parts),
                *(("", "") if beside is None else (f"{beside:.2f}", f"{beside / pause:.1f}")),
                *(lost, f"{_median(one.load for one in [*ours, *theirs]):.0f}", str(len(ours))),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def growth(changes: Iterable[Change]) -> str:
    """Markdown: each cell of ours beside the smallest state of the same way, tensors and scene; medians, in seconds.

    The goal is twice what the smallest state takes, steps aside, besides reading the state once.
    """
    cells = {key: found["ours"] for key, found in _cells(changes).items() if found.get("ours")}
    head = ["way", "tensors", "change", "MB", "without steps", "MB", "without steps", "read once", "of the goal"]
    rows = [head, ["---"] * len(head)]
    for key, found in sorted(cells.items(), key=_order):
        way, size, tensors, scene = key
        smallest = min(other[1] for other in cells if (other[0], *other[2:]) == (way, tensors, scene))
        if size == smallest or not all(one.read for one in found):
            continue
        before = _median(one.besides_steps for one in cells[way, smallest, tensors, scene])
        now, read = _median(one.besides_steps for one in found), _median(one.read for one in found)
        row = [way, f"{tensors:,}", scene, f"{smallest / 1e6:,.0f}", f"{before:.2f}", f"{size / 1e6:,.0f}"]
        rows.append([*row, f"{now:.2f}", f"{read:.2f}", f"{now / (2 * before + read):.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


Key = tuple[str, int, int, str]
Cells = dict[Key, dict[str, list[Change]]]


def _cells(changes: Iterable[Change]) -> Cells:
    cells: Cells = {}
    for one in changes:
        cells.setdefault((one.way, one.bytes, one.tensors, one.scene), {}).setdefault(one.launcher, []).append(one)
    return cells


def _order(item: tuple[Key, object]) -> tuple[object, ...]:
    (way, size, tensors, scene), _ = item
    return list(COLOURS).index(way), size, tensors, scene


def _framework(cells: Cells, way: str, size: int, tensors: int, scene: str) -> list[Change]:
    """torchrun's changes of the same framework, which it runs in one way only."""
    return cells.get((way.partition("-")[0], size, tensors, scene), {}).get("torchrun", [])


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _lost(changes: Sequence[Change]) -> str:
    return f"{statistics.median(one.lost for one in changes):.0f}"


def picture(changes: Iterable[Change]) -> str:
    """SVG: a panel for each scene and number of tensors; pause over state, both logarithmic. torchrun is dashed."""
    cells = _cells(changes)
    scenes = sorted({key[3] for key in cells})
    tensors = sorted({key[2] for key in cells})
    sizes = sorted({key[1] for key in cells})
    seconds = [one.pause for found in cells.values() for own in found.values() for one in own]
    if not seconds:
        raise ValueError("nothing was measured")
    low, high = 10 ** math.floor(math.log10(min(seconds))), 10 ** math.ceil(math.log10(max(seconds)))
    high = max(high, 10 * low)
    ways = [way for way in COLOURS if any(key[0] == way for key in cells)]
    abreast = max(1, (len(tensors) * PANEL_WIDTH - 15) // LEGEND_WIDTH)
    width, legend = MARGIN + len(tensors) * PANEL_WIDTH, len(scenes) * PANEL_HEIGHT + 22
    height = legend + LEGEND_HEIGHT * ((len(ways) - 1) // abreast + 1) + 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" '
        'font-size="11" fill="#777">'
    ]

    def place(column: int, row: int, size: int, value: float) -> tuple[float, float]:
        across = math.log(size / sizes[0]) / (math.log(sizes[-1] / sizes[0]) or 1.0)
        up = math.log(max(value, low) / low) / math.log(high / low)
        x = MARGIN + column * PANEL_WIDTH + 15 + across * (PANEL_WIDTH - 60)
        return x, 25 + row * PANEL_HEIGHT + (1 - up) * (PANEL_HEIGHT - 60)

    for row, scene in enumerate(scenes):
        for column, count in enumerate(tensors):
            x, y = place(column, row, sizes[0], high)
            parts.append(f'<text x="{x}" y="{y - 8}" font-weight="bold">{scene}, {count:,} tensors</text>')
            parts += _grid(lambda size, value, c=column, r=row: place(c, r, size, value), sizes, low, high)
            for way in ways:
                for launcher, dash in (("ours", ""), ("torchrun", ' stroke-dasharray="4 3"')):
                    own = {size: cells.get((way, size, count, scene), {}).get(launcher, []) for size in sizes}
                    points = [
                        place(column, row, size, _median(one.pause for one in found))
                        for size, found in own.items()
                        if found
                    ]
                    parts += _line(points, COLOURS[way], dash)
    for number, way in enumerate(ways):
        x, y = MARGIN + 15 + number % abreast * LEGEND_WIDTH, legend + number // abreast * LEGEND_HEIGHT
        colour = COLOURS[way]
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 23}" y="{y}">{way}</text>')
    parts.append(
        f'<text x="{MARGIN + 15}" y="{height - 2}">dashed, hollow: torchrun, tuned; seconds over MB of state</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(place, sizes: Sequence[int], low: float, high: float) -> list[str]:  # type: ignore[no-untyped-def]
    parts, value = [], low
    while value <= high * 1.001:
        (x1, y), (x2, _) = place(sizes[0], value), place(sizes[-1], value)
        parts.append(f'<line x1="{x1}" y1="{y:.1f}" x2="{x2}" y2="{y:.1f}" stroke="#7774" />')
        parts.append(f'<text x="{x1 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        value *= 10
    for size in sizes:
        x, y = place(size, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{size / 1e6:,.0f}</text>')
    return parts


def _line(points: Sequence[tuple[float, float]], colour: str, dash: str) -> list[str]:
    if not points:
        return []
    # A single point has no line that would identify it.
    inside = "none" if dash else colour
    track = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{track}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    return parts + [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" stroke="{colour}" fill="{inside}"/>' for x, y in points]


def draw(changes: Sequence[Change], page: Path) -> None:
    """Puts the table between the page's two marks, and the picture beside it.

    Raises:
        ValueError: the page has no such marks, or nothing was measured.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"{page} has no {BEGIN} … {END}")
    page.with_suffix(".svg").write_text(picture(changes), encoding="utf-8")
    page.write_text(text[: begin + len(BEGIN)] + "\n" + table(changes) + "\n" + text[end:], encoding="utf-8")
