"""What a script saved that is taken for no checkpoint, although it may be one: people are told, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.elastic.checkpoint.errors import printable

from .foreign import FoundUnits, shown
from .naming import is_log
from .present import size_of
from .strays import strays

__all__ = ["LARGE_BYTES", "Untaken"]

# The least bytes of a file that is not known for a checkpoint and may be one.
LARGE_BYTES = 1 << 20


class Untaken:
    """Looks until something is found that is a checkpoint.

    Args:
        root: the script's directory.
        pattern: `--checkpoint-glob`; empty: none.
        say: prints one line for people.
    """

    def __init__(self, root: Path, pattern: str, say: Callable[[str], None]) -> None:
        self._root, self._pattern, self._say = root, pattern, say
        # Sizes of large files that are nobody's; None: it is over.
        self._sizes: dict[str, int] | None = {}
        # The files of the resume point, and whether people know that the script saves among them.
        self._listed: tuple[str, ...] | None = None
        self._strays_told = False

    def end(self) -> None:
        """Something is known for a checkpoint, or somebody else has looked."""
        self._sizes = None

    def look(self, found: FoundUnits, resumed: Path | None) -> None:
        """Says once, at the first save, that nothing which the script saved is taken for a checkpoint.

        Args:
            found: all that is in the script's directory.
            resumed: the directory of the resume point; None: there is none that a script had saved.

        Raises:
            OSError: the file system says no.
        """
        if found.units or self._sizes is None:
            self.end()
            return
        self._tell_of_strays(resumed)
        sizes = {name: size for name in found.other if (size := size_of(self._root / name)) >= LARGE_BYTES}
        saved = [name for name, size in sizes.items() if not is_log(name) and self._sizes.get(name) == size]
        self._sizes = sizes
        if saved:
            self.end()
            matching = f", nor does it match --checkpoint-glob={printable(self._pattern)}" if self._pattern else ""
            self._say(
                f"the script saved {shown(saved)}, which is not known for a checkpoint{matching}: nothing is kept "
                "through a change of the world; name its checkpoints, relative to ${save_dir}, with "
                "--checkpoint-glob"
            )

    def _tell_of_strays(self, resumed: Path | None) -> None:
        """Says once that the script saves where it resumed from, where nothing is taken."""
        if resumed is None or self._strays_told or not os.path.lexists(resumed):
            return
        if self._listed is None:
            self._listed = tuple(entry.path for entry in Manifest.read(resumed).files)
        saved = [name for name in strays(resumed, self._listed) if size_of(resumed / name) >= LARGE_BYTES]
        if saved:
            self._strays_told = True
            self._say(
                f"the script saved {shown(saved)} into {resumed.name}, from which it resumed: nothing is taken "
                "there; it must save below ${save_dir}"
            )
