"""Small files of a script's that name a checkpoint: `latest` and its like."""

from __future__ import annotations

from pathlib import Path

from dalsegno.elastic.checkpoint.reading import read_regular

from .foreign import NOTE_BYTES, FoundUnits
from .layouts import FileState, state_of
from .slices import SaveSlice, names_it

__all__ = ["notes_of"]

# The most notes that may be a checkpoint's.
_MOST_NOTES = 64


def notes_of(root: Path, piece: SaveSlice, found: FoundUnits) -> tuple[FileState, ...]:
    """Those that name a part of this checkpoint; what cannot be read is none.

    Args:
        root: the script's directory.

    Raises:
        OSError: one is gone meanwhile.
    """
    names = []
    for name in found.notes[:_MOST_NOTES]:
        try:
            text = read_regular(root / name, NOTE_BYTES).decode()
        except (OSError, ValueError):
            continue
        if names_it(text, piece.units, str(root)):
            names.append(name)
    return state_of(root, names)
