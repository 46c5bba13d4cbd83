"""What the demo shows while it runs: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.history import StepLine
from examples.job_status import JobStatus

BARS = "▁▂▃▄▅▆▇█"
RECENT = 12


@dataclass(frozen=True)
class View:
    """The run at one moment."""

    steps: int
    step: int
    loss: float
    epoch: int
    world_size: int
    losses: tuple[float, ...]
    alive: tuple[str, ...]
    status: JobStatus | None

    @classmethod
    def of(cls, steps: int, lines: Sequence[StepLine], status: JobStatus | None, alive: Sequence[str]) -> View:
        """The view after the step lines so far."""
        newest = lines[-1] if lines else None
        losses = {line.step: line.loss for line in lines}
        return cls(
            steps=steps,
            step=newest.step if newest else 0,
            loss=newest.loss if newest else float("nan"),
            epoch=newest.epoch if newest else 0,
            world_size=newest.world_size if newest else 0,
            losses=tuple(losses[step] for step in sorted(losses)),
            alive=tuple(alive),
            status=status,
        )


class Screen(Protocol):
    """Where the demo shows itself."""

    def show(self, view: View) -> None:
        """Shows the present state; may be dropped."""

    def say(self, text: str, who: str = "demo") -> None:
        """Shows that something happened; never dropped."""


class PlainScreen:
    """Lines for a log: what happened, and a step from time to time."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = -10.0

    def show(self, view: View) -> None:
        """One line every five seconds."""
        now = time.monotonic() - self._began
        if view.step and now - self._shown >= 5:
            self._shown = now
            ranks = f"{view.world_size} rank{'s' if view.world_size != 1 else ''}"
            self.say(f"step {view.step}/{view.steps}, loss {view.loss:.4f}, epoch {view.epoch}, {ranks}", who="run")

    def say(self, text: str, who: str = "demo") -> None:
        """Prints one line."""
        print(f"{time.monotonic() - self._began:6.1f}s {who:>11}: {text}", flush=True)


class LiveScreen:
    """A panel that is redrawn in place; lines scroll away above it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._began = time.monotonic()
        self._lines: deque[Text] = deque(maxlen=RECENT)

    def show(self, view: View) -> None:
        """Redraws the panel."""
        self._live.update(self._draw(view))

    def say(self, text: str, who: str = "demo") -> None:
        """Adds a line to the panel's list."""
        line = Text(f"{time.monotonic() - self._began:6.1f}s ", style="dim", no_wrap=True, overflow="ellipsis")
        line.append(f"{who:>11} ", style="bold yellow" if who == "demo" else "cyan")
        line.append(text)
        self._lines.append(line)

    def _draw(self, view: View) -> Panel:
        head = Text(f"step {view.step} of {view.steps}   ", style="bold")
        head.append(f"loss {view.loss:.4f}   ", style="green")
        head.append(f"epoch {view.epoch}   {view.world_size} ranks", style="magenta")
        if view.status is not None:
            head.append(f"   {view.status.phase}", style="dim")
            if view.status.reason:
                head.append(f": {view.status.reason}", style="dim")
        nodes = Table.grid(padding=(0, 2))
        roles = view.status.roles if view.status else {}
        ranks = view.status.group_ranks if view.status else {}
        for name in view.alive:
            rank = f"group rank {ranks[name]}" if name in ranks else ""
            nodes.add_row(Text(name, style="bold"), roles.get(name, ""), Text(rank, style="dim"))
        curve = Text(sparkline(view.losses, 72), style="green")
        # The bar itself does not end its line.
        bar = Table.grid()
        bar.add_row(ProgressBar(total=view.steps, completed=view.step, width=72))
        return Panel(Group(head, bar, curve, nodes, *self._lines), title="Dal Segno", border_style="blue")


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars of eight heights, averaged into at most `width` columns; empty without values."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    columns = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(columns), max(columns)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if value == value else "?" for value in columns)


@contextmanager
def open_screen(*, plain: bool) -> Iterator[Screen]:
    """A live screen in a terminal; plain lines elsewhere, or if `plain` asks for them."""
    if plain or not sys.stdout.isatty():
        yield PlainScreen()
        return
    with Live(console=Console(), refresh_per_second=8, transient=False) as live:
        yield LiveScreen(live)
