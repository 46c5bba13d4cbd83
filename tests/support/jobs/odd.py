"""Jobs of `workers/odd_loop.py`, and what disturbs them at random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .cluster import HOOKED, ROOT, Training

SCRIPT = ROOT / "tests" / "support" / "workers" / "odd_loop.py"


@dataclass(frozen=True)
class OddTraining(Training):
    """A loop with something unusual.

    Attributes:
        whole: With fewer ranks a step takes a second, so the training is not over before others have come.
    """

    script: Path = SCRIPT
    steps: int = 60
    save_every: int = 1000
    odd: str = ""
    width: int = 64
    whole: int = 0

    def words(self, *, hooked: bool) -> list[str]:
        return [str(HOOKED), str(self.script)] if hooked else [str(self.script)]

    def pace(self, step_time: float) -> list[str]:
        return [*super().pace(step_time), f"--whole={self.whole}"]

    def flags(self, step_log: Path) -> list[str]:
        return [*super().flags(step_log), f"--odd={self.odd}", f"--width={self.width}"]
