"""What a run knows of the numbers of workers that were tried: which have worked, and which failed. See `shapes`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("FailedShape", "Shapes")


@dataclass(frozen=True)
class FailedShape:
    """So many workers on so many nodes failed at their start, and others had not."""

    size: int
    nodes: int
    # Incarnations of those in the worlds that failed which had not trained before.
    suspects: tuple[str, ...] = ()
    # How often it was tried in vain.
    failures: int = 1
    # It failed once, and nobody would have heard of its steps: it may have trained. So it is tried once more.
    doubtful: bool = False
    # What failed, in a line.
    message: str = ""


@dataclass(frozen=True)
class Shapes:
    """The numbers of workers with which worlds of this run have worked, and those with which they failed."""

    worked: tuple[int, ...] = ()
    failed: tuple[FailedShape, ...] = ()

    def failure_of(self, size: int) -> FailedShape | None:
        """What is known of the failure of this many workers."""
        return next((shape for shape in self.failed if shape.size == size), None)
