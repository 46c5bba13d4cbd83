"""Names of multiprocessing's semaphores, by which an agent finds those of ranks that were killed.

With the start methods spawn and forkserver, as DataLoaders may use them, each lock and each queue is a file in shared
memory under a random name. A process beside the rank deletes it at the end; where the rank is killed, so is that one.
"""

from __future__ import annotations

import os
from multiprocessing import process
from pathlib import PurePath

from dalsegno.protos.contract import Variable, semaphores_of

__all__ = ["name_semaphores"]

_KEY = "semprefix"


def name_semaphores() -> None:
    """Has those that this process and its children make from now on begin with a name of its own, under an agent."""
    socket = os.environ.get(Variable.SOCKET)
    # Not public; where Python has it no more, names are as before, and what is left stays.
    config = getattr(process.current_process(), "_config", None)
    if socket and isinstance(config, dict) and _KEY in config:
        config[_KEY] = "/" + semaphores_of(PurePath(socket).parent.name, os.getpid()).removesuffix("-")
