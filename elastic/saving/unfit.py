"""Whether an error says something of the state that is loaded or saved, or only that a machine or another rank failed.

Frameworks reject a state with errors of general classes: torch's "Missing key" is a RuntimeError, and so are a lack of
memory and a connection that a peer has closed. Only the first will be the same at the next start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ..rank.agreement import Trouble
from ..rank.collective import OtherThread, PeerLost
from .save_errors import NO_MEMORY

# Not every version of torch has the last one, and none has a class for what the host lacks.
_SURROUNDINGS: tuple[type[BaseException], ...] = (
    *(OSError, MemoryError, Trouble, PeerLost, OtherThread),
    *(torch.OutOfMemoryError, dist.DistError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)),
)
_WORDS = re.compile(rf"{NO_MEMORY}|(CUDA|HIP) error", re.IGNORECASE)


class Unfit(ValueError):
    """A framework rejects what it is to load: it is the state of another model or optimizer."""


def is_of_the_state(error: BaseException) -> bool:
    """Whether an error may be about the state, and so the same at each start. A closed connection has no class.

    Ask only about calls that meet no other rank, or ask for a lost peer as well.
    """
    if isinstance(error, _SURROUNDINGS):
        return False
    return not (isinstance(error, RuntimeError) and _WORDS.search(str(error)))


@contextmanager
def rejecting() -> Iterator[None]:
    """Around a framework's calls that load.

    Raises:
        Unfit: What it loads is another training's.
    """
    try:
        yield
    # Those with which frameworks reject a state.
    except (AttributeError, KeyError, RuntimeError) as error:
        if not is_of_the_state(error):
            raise
        raise Unfit(" ".join(str(error).split())) from error
