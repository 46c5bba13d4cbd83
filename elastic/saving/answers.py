"""What the ranks tell each other of a save: each its own error, or what it has done, and all act on the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..rank.collective import Collective
from .save_errors import Cause, Failed, describe, is_fatal, is_mistake, problem

log = logging.getLogger(__name__)

TOLD_OTHERWISE = "the ranks were told to save different things"


class Answers:
    """What the ranks of one group answer one another about a save."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def agree(self, error: BaseException | None, path: Path) -> None:
        """Compares notes on this rank's ``error`` in writing below ``path``. Collective."""
        self.exchange(self.answer(error, path))

    def answer(self, error: BaseException | None, path: Path) -> dict[str, Any]:
        """What this rank says of its ``error``, if it had one; a script's mistake is in its own log as well."""
        found = problem(error, path)
        if found is not None and found.cause is not Cause.SURROUNDINGS:
            log.error("writing %s failed", path.name, exc_info=error)
        return {} if found is None else dict(found.answer)

    def agree_on_end(self, digest: str, error: BaseException | None) -> str:
        """What all ranks take a save for whose ranks have sealed it by themselves: if one knows that it is, it is.

        Collective.

        Args:
            digest: Its, as this rank knows; "": it does not know that it is sealed.
            error: Why not.

        Raises:
            Failed: No rank knows that. On all ranks.
        """
        said: dict[str, Any] = {"digest": digest}
        if isinstance(error, Failed):
            said["failed"] = str(error), error.fatal, error.final
        elif error is not None:
            said.update(text=describe(error), cause=Cause.SURROUNDINGS.value)
        answers = self._collective.gather(said)
        for answer in answers:
            if answer["digest"]:
                return str(answer["digest"])
        for text, fatal, final in (answer["failed"] for answer in answers if "failed" in answer):
            raise Failed(text, fatal, final=final)
        raise_first(answers)
        raise Failed("no rank knows how it ended", fatal=False)

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
