"""What the ranks tell each other of a save: each its own error, or what it has done, and all act on the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..rank.agreement import differences
from ..rank.collective import Collective
from .content import Content
from .save_errors import Cause, Failed, is_fatal, is_mistake, problem

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

    def agree_on(self, content: Content, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """No rank has a problem, and all save the same, before any of it can be sealed. Collective.

        Returns:
            What each has said.
        """
        answers = self.exchange({**said, "content": asdict(content)})
        wrong = differences([answer["content"] for answer in answers])
        if wrong:
            raise Failed(f"{TOLD_OTHERWISE}: {'; '.join(wrong)}", fatal=True)
        return answers

    def exchange(self, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank has said. Collective.

        Raises:
            Failed: Some rank has a problem. On all ranks.
        """
        answers = self._collective.gather(dict(said))
        self.raise_first(answers)
        return answers

    def raise_first(self, answers: list[dict[str, Any]]) -> None:
        """Raises `Failed` where one of them is a problem."""
        problems = [(rank, answer) for rank, answer in enumerate(answers) if "text" in answer]
        if problems:
            # Of several, one that the others may come from.
            rank, first = min(problems, key=lambda one: one[1].get("cause") == Cause.LIKELY_MISTAKE.value)
            raise Failed(f"{first['text']} (rank {rank})", is_fatal(answers), final=is_mistake(answers))
