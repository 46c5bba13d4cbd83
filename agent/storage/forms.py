"""The directories of one checkpoint: as it was saved, and its later forms."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointName, is_checkpoint_name
from dalsegno.protos import control_pb2
from dalsegno.protos.limits import MOST_EARLIER

__all__ = ["in_the_making", "with_forms"]


def with_forms(run_dir: Path, ref: control_pb2.CheckpointRef) -> list[str]:
    """Its name and those of its later forms. Raises OSError: the run's directory cannot be read."""
    wanted = CheckpointName.parse(ref.name)
    names = [name for name in os.listdir(run_dir) if is_checkpoint_name(name)]
    if wanted.lease is not None:
        return [ref.name]
    # Later forms first: while the source exists, the remains of a form can be told from a stray directory.
    forms = [name for name in names if CheckpointName.parse(name).source == wanted and name != ref.name]
    return [*forms, ref.name]


def in_the_making(names: Iterable[str], source: str) -> set[str]:
    """Of these the later forms of that checkpoint which a conversion may write, or take over: those of new leases."""
    forms = [name for name in names if source and name != source and str(CheckpointName.parse(name).source) == source]
    forms.sort(key=lambda name: CheckpointName.parse(name).lease or 0)
    return set(forms[-(MOST_EARLIER + 1) :])
