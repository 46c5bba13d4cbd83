"""What the ranks tell each other of a save: each its own error, or what it has done, and all act on the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rank.collective import Collective
from .save_errors import Cause, Failed, is_fatal, is_mistake, told

if TYPE_CHECKING:
    from .sealing import Sealing

TOLD_OTHERWISE = "the ranks were told to save different things"


class Answers:
    """What the ranks of one group answer one another about a save."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def agree(self, error: BaseException | None, path: Path) -> None:
        """Compares notes on this rank's ``error`` in writing below ``path``. Collective."""
        self.exchange(self.answer(error, path))

    def answer(self, error: BaseException | None, path: Path) -> dict[str, Any]:
        """What this rank says of its ``error``, if it had one; a script's mistake is in its own log as well.

        The error then forgets what it came through: that may hold a file open, and in memory what is deleted so stays
        there.
        """
        said = told(error, path)
        if error is not None:
            error.__traceback__ = None
        return said

    def agree_on_end(self, sealing: Sealing, error: BaseException | None, path: Path, *, seconds: float) -> str:
        """What all ranks take a save for that their threads seal: if one knows that it is sealed, it is. Collective.

        Args:
            sealing: This rank's.
            error: Why this rank could not write its files below ``path``.
            seconds: So long the threads have where nobody has trouble.

        Returns:
            The manifest's digest; "": all have written, and it is not sealed, because a store is gone or silent. No
            thread will seal it any more.

        Raises:
            Failed: It is not, and cannot be. On all ranks.
        """
        if error is not None:
            sealing.stop()
        told = self._collective.gather({**self.answer(error, path), "lost": sealing.failed})
        if not any(one["lost"] or "text" in one for one in told):
            sealing.over.wait(seconds)
        sealing.stop()
        said: dict[str, Any] = {"digest": sealing.digest}
        if isinstance(sealing.error, Failed):
            failure = sealing.error
            said["failed"] = str(failure), failure.fatal, failure.final
        ends = self._collective.gather(said)
        for one in ends:
            if one["digest"]:
                return str(one["digest"])
        raise_first(told)
        for text, fatal, final in (one["failed"] for one in ends if "failed" in one):
            raise Failed(text, fatal, final=final)
        return ""

    def exchange(self, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank has said. Collective.

        Raises:
            Failed: Some rank has a problem. On all ranks.
        """
        answers = self._collective.gather(dict(said))
        raise_first(answers)
        return answers


def raise_first(answers: Sequence[Mapping[str, Any]]) -> None:
    """Raises `Failed` where one of the ranks' answers is a problem, which may name its ``rank`` by itself."""
    problems = [(answer.get("rank", rank), answer) for rank, answer in enumerate(answers) if "text" in answer]
    if problems:
        # Of several, one that the others may come from.
        rank, first = min(problems, key=lambda one: one[1].get("cause") == Cause.LIKELY_MISTAKE.value)
        raise Failed(f"{first['text']} (rank {rank})", is_fatal(answers), final=is_mistake(answers))
