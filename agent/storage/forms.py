"""The directories of one checkpoint: as it was saved, and its later forms."""

from __future__ import annotations

import os
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointName, is_checkpoint_name
from dalsegno.protos import control_pb2

__all__ = ["is_form", "with_forms"]


def with_forms(run_dir: Path, ref: control_pb2.CheckpointRef) -> list[str]:
    """Its name and those of its later forms. Raises OSError: the run's directory cannot be read."""
    wanted = CheckpointName.parse(ref.name)
    names = [name for name in os.listdir(run_dir) if is_checkpoint_name(name)]
    if wanted.lease is not None:
        return [ref.name]
    # Later forms first: while the source exists, the remains of a form can be told from a stray directory.
    forms = [name for name in names if CheckpointName.parse(name).source == wanted and name != ref.name]
    return [*forms, ref.name]


def is_form(name: str, source: str) -> bool:
    """Whether this is the directory of a later form of that checkpoint."""
    return bool(source) and name != source and str(CheckpointName.parse(name).source) == source
