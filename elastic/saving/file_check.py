"""Whether the files of a checkpoint are what the script says that it saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from ..rank import rng
from ..rank.identity import Identity
from .background_save import PARTS
from .content import Content
from .declared import DDP, contradiction, say_what_each_rank_has
from .save_errors import Failed


class FileCheck:
    """Of one session's saves."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._looked = False

    def check(self, paths: Sequence[str], content: Content) -> None:
        """Checks all files of a checkpoint. All ranks get the same answer.

        Raises:
            Failed: They are not what ``content`` says, or a path is there twice.
        """
        for path, count in sorted(Counter(paths).items()):
            if count > 1:
                raise Failed(f"several ranks save {path}, and only one may", fatal=True)
        reason = contradiction(paths, content.strategy, content.any_world_size)
        if reason is not None:
            raise Failed(reason, fatal=True)
        if self._looked or content.strategy != DDP or not content.any_world_size:
            return
        self._looked = True
        if self._identity.rank == 0:
            own = [path for path in paths if PurePosixPath(path).parts[0] not in (rng.DIRECTORY, PARTS)]
            say_what_each_rank_has(own, self._identity.world_size)
