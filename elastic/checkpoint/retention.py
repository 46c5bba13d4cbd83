"""Which checkpoints of a run without a master may be deleted. Pure: the caller logs and deletes.

Under a master the master's record decides (``master/brain/checkpoints.py``), by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from .layout import SHARDED
from .manifest import Manifest


@dataclass(frozen=True)
class Retirement:
    """What may be deleted now: names of directories, with later forms before their source.

    Attributes:
        old: Older than the last ones that are kept.
        left: Steps that the run has made again since it went back to an earlier checkpoint.
    """

    old: tuple[str, ...]
    left: tuple[str, ...]


def lineage(found: Iterable[Manifest]) -> list[Manifest]:
    """The newest lineage of sharded checkpoints, oldest first, followed back from resume point to resume point."""
    attempts: dict[tuple[int, int], Manifest] = {}
    for manifest in sorted(found, key=lambda manifest: manifest.parsed_name.age):
        if manifest.form == SHARDED:
            attempts[manifest.epoch, manifest.step] = manifest
    sharded = list(attempts.values())
    by_digest = {manifest.digest: manifest for manifest in sharded}
    chain: list[Manifest] = []
    last = sharded[-1] if sharded else None
    while last is not None:
        of_epoch = [m for m in sharded if m.epoch == last.epoch and m.step <= last.step]
        chain.extend(reversed(of_epoch))
        resumed = of_epoch[-1].resumed_from
        source = None if resumed is None else by_digest.get(resumed.digest)
        last = source if source is not None and source.epoch < last.epoch else None
    return chain[::-1]


def retirable(
    found: Sequence[Manifest], keep: int, in_use: Iterable[str] = (), damaged: Collection[str] = ()
) -> Retirement:
    """What may be deleted once the newest checkpoint of ``found`` is sealed.

    Whatever ``keep`` says, three kinds stay: the newest, those in ``in_use``, and those that a checkpoint that stays
    names as best. If fewer than ``keep`` of the lineage are sound, nothing older is deleted.

    Args:
        found: All sealed checkpoints of the run.
        keep: How many of the newest lineage stay; 0: all.
        in_use: Names of a resume point, or of the source of a conversion or an upload.
        damaged: Names of those that do not count as kept.
    """
    chain = lineage(found)
    if not chain:
        return Retirement((), ())
    head, used = chain[-1], set(in_use)
    used |= {m.source.name for m in found if m.source is not None and m.name in used}
    there = {m.name for m in chain}
    again = head.name not in damaged
    left = {m.name for m in found if again and m.form == SHARDED and m.name not in there and m.step >= head.step} - used
    sound = [number for number, m in enumerate(chain) if m.name not in damaged]
    oldest = sound[-keep] if 0 < keep <= len(sound) else 0
    kept = [m for number, m in enumerate(chain) if number >= oldest or m.name in used]
    spared = {m.name for m in kept} | {b.name for m in kept for b in (m.best, m.candidate) if b is not None} | used
    others = {m.name for m in found if m.form == SHARDED} - left
    old = others - spared if 0 < keep <= len(sound) else set()
    return Retirement(_with_forms(found, old), _with_forms(found, left))


def _with_forms(found: Sequence[Manifest], names: set[str]) -> tuple[str, ...]:
    forms = [m.name for m in found if m.source is not None and m.source.name in names]
    return (*forms, *(m.name for m in found if m.name in names))
