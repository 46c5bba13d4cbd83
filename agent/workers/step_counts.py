"""Reads the last step of a worker, which counts its steps in a file beside the agent's socket (`protos.contract`)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from dalsegno.protos.contract import STEP_COUNT, step_count_name

from ..decisions.worker_checks import MOST

__all__ = ["take_step_count"]

logger = logging.getLogger(__name__)


def take_step_count(directory: Path, epoch: int, rank: int) -> int | None:
    """The last step of a rank whose process is gone; None if it has counted none. Deletes the file."""
    path = directory / step_count_name(epoch, rank)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            content = file.read(STEP_COUNT.size + 1)
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("the steps of rank %d cannot be read in %s: %s", rank, path, error)
        return None
    step = STEP_COUNT.unpack(content)[0] if len(content) == STEP_COUNT.size else MOST + 1
    if step > MOST:
        logger.warning("rank %d has counted no steps in %s, but %d bytes", rank, path, len(content))
        return None
    return int(step)
