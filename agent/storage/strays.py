"""Files that a script has put into the checkpoint that it resumed from.

A script that gets `${resume_dir}` reads the run's own checkpoint. Some write there, too: a log, pictures, their
next checkpoint. Such a checkpoint would be found damaged, although nothing of it is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.elastic.checkpoint.reading import walk

from .foreign import OURS

__all__ = ["ASIDE", "set_aside", "strays"]

# In an epoch's directory: what the script had written into the resume point. No layout has such a name.
ASIDE = f"{OURS}-aside"

logger = logging.getLogger(__name__)


def strays(directory: Path, listed: Iterable[str]) -> list[str]:
    """What lies in a sealed directory and does not belong to it: paths relative to it.

    Args:
        directory: the checkpoint's.
        listed: the files in its manifest.

    Raises:
        OSError: the file system says no.
    """
    known = {MANIFEST, *listed}
    found = []
    for where, folders, names in walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        paths = (os.path.relpath(os.path.join(where, name), directory) for name in (*names, *links))
        found += [path for path in paths if path not in known]
    return sorted(found)


def set_aside(directory: Path, listed: Iterable[str], epoch_directory: Path) -> list[str]:
    """Moves such files to where no script looks. Nobody may be writing there any more.

    Args:
        directory, listed: see `strays`.
        epoch_directory: of the epoch that begins.

    Returns:
        What was moved.

    Raises:
        OSError: the file system says no.
    """
    moved = strays(directory, listed)
    for name in moved:
        target = epoch_directory / ASIDE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(directory / name, target)
        with contextlib.suppress(OSError):  # as far up as nothing else is there
            for folder in (directory / name).parents:
                if folder == directory:
                    break
                folder.rmdir()
    if moved:
        logger.info("set aside what the script had written into %s: %s", directory.name, ", ".join(moved))
    return moved
