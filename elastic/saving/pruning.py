"""Without a master a session deletes old checkpoints itself; under one, agents delete what it has retired."""

from __future__ import annotations

import logging

from ..checkpoint import CheckpointStore, inventory, retirable
from ..rank.identity import Identity
from .resuming import ResumePoint

log = logging.getLogger(__name__)


def prune(store: CheckpointStore, identity: Identity, resume: ResumePoint | None, keep: int) -> None:
    """Keeps the last ``keep`` checkpoints of this run (0: all), its best and its resume point. Logs failures."""
    try:
        # Sizes do not matter here: a damaged checkpoint may go as well, now that a newer one is sealed.
        mine = identity.job_id, identity.run_id
        found = [m for m in inventory(store.run_dir, check_sizes=False) if (m.job_id, m.run_id) == mine]
        used = () if resume is None else tuple(p.name for p in (resume.saved_at, resume.universal_at) if p is not None)
        gone = retirable(found, keep, used)
        if gone.left:
            log.warning("%s: of steps that the run has made again since it went back", ", ".join(gone.left))
        failures = store.prune([*gone.left, *gone.old], replaced=True)
    except OSError as error:
        log.warning("old checkpoints could not be removed: %s", error)
        return
    for name, failure in failures.items():
        log.warning("old checkpoint %s could not be removed: %s", name, failure)
