"""One self-contained HTML page about a run: both loss curves, the timeline of epochs, and what each change cost.

It contains only inline SVG, no script, font or picture from elsewhere, so the file can be mailed and opened anywhere.
Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from examples.history import Comparison, EpochSpan, KeptStep, relative_difference

WIDTH, LEFT, RIGHT = 960, 70, 20
# A difference of 0 has no place on a logarithmic axis, so it is drawn on the axis's floor.
FLOOR = 1e-10
# Height of the picture of the curves.
CURVES = 380


@dataclass(frozen=True)
class Change:
    """How an epoch came about, as the master recorded it: why, and which form of the checkpoint was loaded."""

    cause: str = ""
    form: str = ""


@dataclass(frozen=True)
class Scene:
    """All that the page shows. Times are seconds since 1970 of one machine's clock."""

    title: str
    command: str
    kept: Mapping[int, KeptStep]
    undisturbed: Mapping[int, KeptStep]
    spans: Sequence[EpochSpan]
    comparison: Comparison
    limit: float
    changes: Mapping[int, Change] = field(default_factory=dict)
    events: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Axis:
    """Maps values in [low, high] to [start, end] on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About `count` round values within the range, a step of 1, 2 or 5 times a power of ten apart."""
        raw = ((self.high - self.low) or 1.0) / max(count, 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def render(scene: Scene) -> str:
    """The page as text (HTML that is also well-formed XML)."""
    passed = not scene.comparison.problems and scene.comparison.largest_difference <= scene.limit
    verdict = "The two runs cannot be told apart." if passed else "The runs differ."
    worst = f"{scene.comparison.largest_difference:.1e}"
    numbers = [
        ("steps", str(len(scene.kept))),
        ("worlds", " → ".join(str(span.world_size) for span in scene.spans)),
        ("largest difference of the losses (relative)", worst),
        ("where", f"step {scene.comparison.at_step}" if scene.comparison.at_step else "nowhere"),
        ("time without steps", f"{sum(span.paused for span in scene.spans):.1f} s"),
        ("steps redone", str(sum(span.lost_steps for span in scene.spans))),
    ]
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in scene.comparison.problems)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
            f"<title>{escape(scene.title)}</title><style>{STYLE}</style></head><body>",
            f'<h1>{escape(scene.title)}</h1><p class="{"good" if passed else "bad"}">{verdict}</p>',
            "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in numbers) + "</dl>",
            f'<ul class="bad">{problems}</ul>' if problems else "",
            "<h2>Loss of every step</h2>",
            curves(scene),
            "<h2>How far apart</h2>",
            differences(scene),
            "<h2>Epochs over time</h2>",
            timeline(scene),
            "<h2>What each change cost</h2>",
            table(scene),
            f"<p><code>{escape(scene.command)}</code></p></body></html>\n",
        ]
    )


def picture(scene: Scene) -> str:
    """Both loss curves as a file of their own, on a white ground."""
    drawn = curves(scene).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    begin = drawn.index(">") + 1
    # The colours of the light scheme, because not every program that shows pictures knows variables.
    colours = dict(re.findall(r"--(\w+): (#\w+)", STYLE[: STYLE.index("@media")]))
    rules = "\n".join(line for line in STYLE.splitlines() if line.startswith(("svg text", ".mark", ".undis", ".ours")))
    rules = re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], rules)
    ground = f'<rect width="{WIDTH}" height="{CURVES}" fill="{colours["back"]}"/>'
    style = f"<style>svg text {{ font: 12px sans-serif; }}\n{rules}</style>"
    return f"{drawn[:begin]}{style}{ground}{drawn[begin:]}\n"


def curves(scene: Scene) -> str:
    """Both loss curves in one picture: the undisturbed one wide and pale, ours thin on top of it."""
    height, top = CURVES, 84
    entries = [*scene.kept.values(), *scene.undisturbed.values()]
    losses = [entry.loss for entry in entries if math.isfinite(entry.loss)]
    x = Axis(1, max((entry.step for entry in entries), default=2), LEFT, WIDTH - RIGHT)
    y = Axis(min(losses, default=0), max(losses, default=1), height - 40, top)
    parts = [_grid(x, y, height, "step", "loss")]
    rows = [0.0] * 4
    for span in scene.spans:
        place = x(span.first_step)
        # Labels of epochs that began at neighbouring steps are placed below each other.
        row = next((number for number, end in enumerate(rows) if place >= end), len(rows) - 1)
        label = f"{span.world_size} rank{'s' if span.world_size != 1 else ''}"
        cause = scene.changes.get(span.epoch, Change()).cause
        label = escape(f"{cause}: {label}" if cause else label)
        rows[row] = place + 7 * len(label)
        base = 16 + 14 * row
        parts.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{base - 8}" y2="{height - 40}"/>')
        parts.append(f'<text class="note" x="{place + 3:.1f}" y="{base}">{label}</text>')
    for name, label, history in (
        ("undisturbed", "undisturbed run", scene.undisturbed),
        ("ours", "run with joins, a kill and a leave", scene.kept),
    ):
        points = _points((x(entry.step), y(entry.loss)) for entry in history.values())
        parts.append(f'<polyline class="{name}" points="{points}"><title>{label}</title></polyline>')
    parts.append(_legend((("undisturbed", "undisturbed run"), ("ours", "this run, kept history"))))
    return _svg(height, parts)


def differences(scene: Scene) -> str:
    """Relative difference of each step's loss, on a logarithmic axis, with the limit as a line."""
    height = 200
    steps = sorted(set(scene.kept) & set(scene.undisturbed))
    values = {step: relative_difference(scene.kept[step].loss, scene.undisturbed[step].loss) for step in steps}
    finite = [value for value in values.values() if math.isfinite(value)]
    x = Axis(1, max(steps, default=2), LEFT, WIDTH - RIGHT)
    top = math.ceil(math.log10(max([scene.limit, *finite]))) + 1
    y = Axis(math.log10(FLOOR), top, height - 40, 15)
    parts = [_grid(x, y, height, "step", "1e")]
    for step, value in values.items():
        shown = math.log10(max(value, FLOOR)) if math.isfinite(value) else top
        title = f"<title>step {step}: {value:.2e}</title>"
        parts.append(f'<circle class="dot" cx="{x(step):.1f}" cy="{y(shown):.1f}" r="1.8">{title}</circle>')
    limit = y(math.log10(scene.limit))
    parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{limit:.1f}" y2="{limit:.1f}"/>')
    parts.append(f'<text class="note" x="{LEFT + 4}" y="{limit - 4:.1f}">limit {scene.limit:g}</text>')
    return _svg(height, parts)


def timeline(scene: Scene) -> str:
    """One bar per epoch, as high as its world is large; gaps are pauses; labels below say what happened."""
    rows = len(scene.events)
    base, height = 150, 190 + 16 * rows
    moments = [span.began for span in scene.spans] + [span.ended for span in scene.spans]
    moments += [moment for moment, _ in scene.events]
    zero = min(moments, default=0.0)
    x = Axis(0, max((moment - zero for moment in moments), default=1.0), LEFT, WIDTH - RIGHT)
    largest = max((span.world_size for span in scene.spans), default=1)
    y = Axis(0, largest, base, 25)
    parts = []
    for tick in x.ticks(10):
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{base + 16}" text-anchor="middle">{tick:g} s</text>')
    for size in range(1, largest + 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(size):.1f}" y2="{y(size):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(size) + 4:.1f}" text-anchor="end">{size}</text>')
    for span in scene.spans:
        left, right, top = x(span.began - zero), x(span.ended - zero), y(span.world_size)
        title = f"epoch {span.epoch}: {span.world_size} ranks, steps {span.first_step} to {span.last_step}"
        box = f'x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 1):.1f}" height="{base - top:.1f}"'
        parts.append(f'<rect class="epoch" {box}><title>{title}</title></rect>')
        parts.append(f'<text class="inside" x="{left + 4:.1f}" y="{base - 6}">e{span.epoch}</text>')
        if span.paused > 0:
            start = x(span.began - zero - span.paused)
            parts.append(
                f'<rect class="pause" x="{start:.1f}" y="25" width="{left - start:.1f}" height="{base - 25}"/>'
            )
            parts.append(f'<text class="note" x="{start:.1f}" y="20">{span.paused:.1f} s</text>')
    for row, (moment, text) in enumerate(scene.events):
        place, line = x(moment - zero), base + 36 + 16 * row
        anchor = "end" if place > WIDTH * 0.6 else "start"
        shift = -5 if anchor == "end" else 5
        parts.append(f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="25" y2="{line}"/>')
        label = escape(f"{moment - zero:.1f} s: {text}")
        parts.append(f'<text class="note" text-anchor="{anchor}" x="{place + shift:.1f}" y="{line}">{label}</text>')
    return _svg(height, parts)


def table(scene: Scene) -> str:
    """One row per epoch that made a step."""
    head = ("epoch", "ranks", "why", "resumed at step", "loaded as", "steps", "paused", "steps lost before it")
    rows = []
    lost = 0
    for span in scene.spans:
        change = scene.changes.get(span.epoch, Change())
        cells = (
            str(span.epoch),
            str(span.world_size),
            change.cause or "-",
            str(span.first_step - 1),
            change.form or "-",
            f"{span.first_step} to {span.last_step}",
            f"{span.paused:.1f} s" if span.paused else "-",
            str(lost),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        lost = span.lost_steps
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{''.join(rows)}</table>"


def _points(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places if math.isfinite(y))


def _grid(x: Axis, y: Axis, height: int, x_name: str, y_name: str) -> str:
    parts = []
    for tick in x.ticks(10):
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - 22}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks(5):
        prefix = y_name if y_name.startswith("1e") else ""
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        text = f"{prefix}{tick:g}"
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{height - 6}" text-anchor="end">{x_name}</text>')
    if not y_name.startswith("1e"):
        parts.append(f'<text class="tick" x="8" y="{y.end - 10:.0f}">{y_name}</text>')
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    parts = []
    for row, (name, label) in enumerate(entries):
        y = 98 + 20 * row
        parts.append(f'<line class="{name}" x1="{WIDTH - 240}" x2="{WIDTH - 205}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="note" x="{WIDTH - 198}" y="{y + 4}">{label}</text>')
    return "".join(parts)


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #67707d; --line: #e3e6ea; --back: #fff; --pale: #f0b429;
  --ours: #1f5fbf; --bar: #7fa8e0; --bad: #c0392b; --good: #23804a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --dim: #98a2b0; --line: #303844; --back: #14181f;
  --pale: #b5851c; --ours: #8fbcff; --bar: #34588c; --bad: #ff8a7a; --good: #6fd39a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1000px;
  margin: 2em auto; padding: 0 1em; }
h1 { margin-bottom: 0; } h2 { margin: 1.6em 0 .3em; font-size: 1.1em; }
p.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
dl { display: flex; flex-wrap: wrap; gap: 1.6em; margin: 1em 0; } dl div { min-width: 5em; }
dt { color: var(--dim); font-size: .85em; } dd { margin: 0; font-size: 1.25em; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); }
svg text.tick { fill: var(--dim); } svg text.inside { font-size: 11px; } .grid { stroke: var(--line); }
.mark { stroke: var(--dim); stroke-dasharray: 2 4; opacity: .7; }
.undisturbed { fill: none; stroke: var(--pale); stroke-width: 7; opacity: .55; stroke-linejoin: round; }
.ours { fill: none; stroke: var(--ours); stroke-width: 1.6; stroke-linejoin: round; }
.dot { fill: var(--ours); } .limit { stroke: var(--bad); stroke-dasharray: 6 4; } .epoch { fill: var(--bar); }
.pause { fill: var(--bad); opacity: .22; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3em .7em .3em 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 500; }
code { color: var(--dim); word-break: break-all; }
"""
