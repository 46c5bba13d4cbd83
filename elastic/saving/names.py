"""The name of each checkpoint, and what rank 0 says of it with that."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ..checkpoint import Best, CheckpointName
from ..rank.collective import Collective
from ..rank.identity import Identity
from .content import Content, Own
from .save_errors import Failed, describe

log = logging.getLogger(__name__)

# The best checkpoint, and the candidate, see `bests`.
Bests = tuple[Best | None, Best | None]


class Names:
    """The names of one session's checkpoints: no two of them, on the disk or in memory, have the same."""

    def __init__(self, identity: Identity, collective: Collective) -> None:
        self._identity, self._collective = identity, collective
        self._last: CheckpointName | None = None

    def choose(
        self, own: Own, best_as_of: Callable[[str, float | None], Bests], *, create_directory: bool
    ) -> tuple[str, Content]:
        """Rank 0's name, metric and best: a metric is often computed on one rank, or differs in its last bits.

        Collective.

        Args:
            own: The save.
            best_as_of: The best checkpoint, as of one with that name and metric, and the candidate.
            create_directory: The directory exists afterwards, where all nodes see the same.

        Raises:
            Failed: It could not be made. On all ranks.
        """
        content, store = own.content, own.tier.store
        step, metric = content.step, content.metric
        if metric is not None and not math.isfinite(metric):
            log.warning(
                "the metric of step %d is %s: it is left out, and this is not the best checkpoint", step, metric
            )
            metric = None
        answer: dict[str, Any] = {"metric": metric}
        if self._identity.rank == 0:
            try:
                name = store.next_name(step, self._identity.epoch)
                last = self._last
                if last is not None and last.step == step:
                    name = replace(name, attempt=max(name.attempt, last.attempt + 1))
                self._last = name
                store.run_dir.mkdir(parents=True, exist_ok=True)
                if create_directory:
                    own.tier.create(str(name))
                answer["name"] = str(name)
                answer["bests"] = [None if one is None else asdict(one) for one in best_as_of(str(name), metric)]
            except OSError as error:
                answer["error"] = describe(error)
        answer = self._collective.broadcast(answer)
        if "error" in answer:
            raise Failed(answer["error"], fatal=False)
        best, candidate = (None if one is None else Best(**one) for one in answer["bests"])
        return str(answer["name"]), replace(content, metric=answer["metric"], best=best, candidate=candidate)
