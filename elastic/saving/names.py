"""The name of each checkpoint, and what rank 0 says of it with that."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ..checkpoint import Best, CheckpointName
from ..rank.agreement import differences
from ..rank.collective import Collective, PendingGather
from ..rank.identity import Identity
from .answers import TOLD_OTHERWISE, raise_first
from .content import Own
from .save_errors import Failed, trouble

log = logging.getLogger(__name__)

# The best checkpoint, and the candidate, see `bests`.
Bests = tuple[Best | None, Best | None]


class Names:
    """The names of one session's checkpoints: no two of them, on the disk or in memory, have the same."""

    def __init__(self, identity: Identity, collective: Collective) -> None:
        self._identity, self._collective = identity, collective
        self._last: CheckpointName | None = None

    def choose(self, own: Own, best_as_of: Callable[[str, float | None], Bests], *, create_directory: bool) -> None:
        """See `ask`; waits for the answer. Collective."""
        self.ask(own, best_as_of, create_directory=create_directory).answer()

    def ask(
        self,
        own: Own,
        best_as_of: Callable[[str, float | None], Bests],
        *,
        create_directory: bool,
        looks: bool = True,
    ) -> AskedName:
        """Asks for rank 0's name, metric and best: a metric is often computed on one rank, or differs in its last bits.

        Collective. All ranks say what they save, which must be the same.

        Args:
            own: The save.
            best_as_of: The best checkpoint, as of one with that name and metric, and the candidate.
            create_directory: The directory exists afterwards, where all nodes see the same.
            looks: Each rank looks for room first, and all hear of one that has none.
        """
        content, store = own.content, own.tier.store
        step, metric = content.step, content.metric
        if metric is not None and not math.isfinite(metric):
            log.warning(
                "the metric of step %d is %s: it is left out, and this is not the best checkpoint", step, metric
            )
            metric = None
        said: dict[str, Any] = {"metric": metric, "content": asdict(replace(content, metric=None))}
        try:
            if looks:
                own.tier.look()
            if self._identity.rank == 0:
                name = store.next_name(step, self._identity.epoch)
                last = self._last
                if last is not None and last.step == step:
                    name = replace(name, attempt=max(name.attempt, last.attempt + 1))
                self._last = name
                own.tier.prepare()
                if create_directory:
                    own.tier.create(str(name))
                said["name"] = str(name)
                # What is in memory alone may be gone at any time: the best of before must go on being kept.
                counted = metric if own.for_disk else None
                said["bests"] = [None if one is None else asdict(one) for one in best_as_of(str(name), counted)]
        # The other ranks must hear of every error before they are in a collective of their own.
        except Exception as error:
            said["error"] = trouble(error, store.run_dir)
        return AskedName(own, self._collective.start_gather(said))


class AskedName:
    """What rank 0 says of a save, on its way. Made by `Names.ask`."""

    def __init__(self, own: Own, asked: PendingGather) -> None:
        self._own, self._asked = own, asked

    def answer(self) -> None:
        """The save has its name, and rank 0's metric and best. Collective.

        Raises:
            Failed: There is none, some rank has no room, or they were told to save different things. On all ranks.
        """
        answers = self._asked.wait()
        first, own = answers[0], self._own
        if "name" in first:
            # Whatever comes below: what rank 0 has made is removed with it.
            own.name = str(first["name"])
        raise_first([answer.get("error", {}) for answer in answers])
        best, candidate = (None if one is None else Best(**one) for one in first["bests"])
        own.content = replace(own.content, metric=first["metric"], best=best, candidate=candidate)
        if wrong := differences([answer["content"] for answer in answers]):
            raise Failed(f"{TOLD_OTHERWISE}: {'; '.join(wrong)}", fatal=True)
