"""Knows the best of a script's checkpoints in one epoch: reads its metrics, and looks which are still there."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dalsegno.elastic.checkpoint import Best, CheckpointDamaged, CheckpointName, Manifest, is_checkpoint_name
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.elastic.checkpoint.metrics_reader import MetricsReader
from dalsegno.protos import control_pb2

from .best_save import BestRule, best_step, has_own_number

__all__ = ["BestWatch"]

# Of how many checkpoints of the epoch before a value may still come to light.
_EARLIER = 16
# Seconds that a new checkpoint waits for the best one until then to be known, where the file system fails.
_PATIENCE_SECONDS = 20.0

logger = logging.getLogger(__name__)


class BestWatch:
    """The best checkpoint of a run whose script has no session, as each of its manifests names it.

    Values of the run's earlier checkpoints are read at the beginning: a step that is made again may get another one.

    Args:
        rule: what is the best.
        run_dir: the run's directory.
        world: the epoch's world.
        sealed: the newest checkpoint of this epoch, where the first node was lost behind it; empty: there is none.
        say: tells people a line.
    """

    def __init__(
        self,
        rule: BestRule,
        run_dir: Path,
        world: control_pb2.World,
        sealed: str = "",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._rule, self._run_dir, self._say = rule, run_dir, say
        self._path = run_dir / f"e{world.epoch}" / rule.metrics_file
        self._reader = MetricsReader(rule.tracked.metric)
        self._standing: Best | None = None
        # Checkpoints with a step of the script's own, and values, by step.
        self._saves: dict[int, str] = {}
        self._values: dict[int, float] = {}
        # `sealed` or the resume point, until it is read with what came before; and when, monotonic, that is given up.
        self._owed, self._given_up_at = sealed, math.inf
        if sealed:
            self._catch_up()
        elif world.HasField("resume"):
            self._owed = world.resume.source.ref.name
            if world.resume.source.in_memory:
                self._given_up_at, self._say = 0.0, logger.warning  # it may never come to the disk
            self._catch_up()
        elif os.path.isabs(rule.metrics_file):
            self._read(self._path)
            self._values.clear()  # another run's

    def knows_earlier(self, last: bool) -> bool:
        """Whether the best checkpoint until now is known, or given up. If not, a new one must not be judged yet.

        It would count as the best, whatever its value. Given up 20 s after the first call: the run's saves matter more.

        Args:
            last: the workers are stopped, so that there may be no time for another look: it is given up at once.
        """
        if last:
            self._given_up_at = 0.0
        elif self._given_up_at == math.inf:
            self._given_up_at = time.monotonic() + _PATIENCE_SECONDS
        return self._catch_up()

    def _catch_up(self) -> bool:
        if self._owed:
            try:
                self._look_back(self._owed)
            except (CheckpointDamaged, OSError) as error:
                if time.monotonic() < self._given_up_at:
                    logger.info("the best checkpoint until %s is looked for again: %s", self._owed, error)
                    return False
                self._say(
                    f"nobody knows which checkpoint until {self._owed} is the best ({printable(str(error))}): a worse "
                    "one may count as the best, and the best one be deleted as an old one; copy it, if you need it"
                )
            self._owed = ""
        return True

    def judged(self, name: str, step: int, numbers: Mapping[str, int | None]) -> tuple[float | None, Best | None]:
        """For the manifest of a new checkpoint: its own value, and the best one as of it, which may be itself.

        Args:
            name, step: its own.
            numbers: of its series.

        Raises:
            OSError: the file system says no.
        """
        self._read(self._path)
        if has_own_number(step, numbers):
            self._saves[step] = name
        self._saves = {at: one for at, one in self._saves.items() if one == name or self._is_there(one)}
        standing = self._standing
        if standing is not None and standing.name != name and not self._is_there(standing.name):
            standing = None
        pairs = [(at, self._values[at]) for at in self._saves if at in self._values]
        tracked = self._rule.tracked
        before = None if standing is None else (CheckpointName.parse(standing.name).step, standing.value)
        best = best_step(pairs, tracked, before)
        # What is neither there nor to come is never asked for.
        self._values = {at: value for at, value in self._values.items() if at > step or at in self._saves}
        if best is None:
            self._standing = None
        else:
            held = standing.name if standing is not None and before is not None and before[0] == best[0] else ""
            self._standing = Best(held or self._saves[best[0]], tracked.metric, tracked.mode, best[1])
        return self._values.get(step) if step in self._saves else None, self._standing

    def _look_back(self, checkpoint: str) -> None:
        """What a checkpoint knows, and what came to light since of those of its epoch until then.

        Raises:
            CheckpointDamaged, OSError: it, or what there is, cannot be read.
        """
        manifest = Manifest.read(self._run_dir / checkpoint)
        tracked = self._rule.tracked
        if manifest.best is not None and (manifest.best.metric, manifest.best.mode) == (tracked.metric, tracked.mode):
            self._standing = manifest.best
        names = [CheckpointName.parse(name) for name in os.listdir(self._run_dir) if is_checkpoint_name(name)]
        of_epoch = [one for one in names if one.lease is None and one.epoch == manifest.epoch]
        earlier = sorted((one for one in of_epoch if one.step <= manifest.step), key=lambda one: one.age)
        for one in earlier[-_EARLIER:]:
            try:
                saved_as = (manifest if str(one) == checkpoint else Manifest.read(self._run_dir / str(one))).saved_as
            except (CheckpointDamaged, OSError) as error:  # one old file must not hold up what is saved from now on
                logger.debug("%s is not the best one: %s", one, error)
                continue
            if saved_as is not None and has_own_number(one.step, dict(saved_as.numbers)):
                self._saves[one.step] = str(one)
        path = self._run_dir / f"e{manifest.epoch}" / self._rule.metrics_file
        self._read(path)
        if path != self._path or os.path.isabs(self._rule.metrics_file):
            # Another epoch's: these steps are made again. In one file for all epochs nobody can tell.
            self._values = {step: value for step, value in self._values.items() if step <= manifest.step}

    def _read(self, path: Path) -> None:
        for record in self._reader.all_news(path):
            if record.step is not None:
                self._values[record.step] = record.value

    def _is_there(self, name: str) -> bool:
        try:
            os.stat(self._run_dir / name / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True
