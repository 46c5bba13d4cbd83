"""What comes of a file system that fails for the moment, and passes: no bad input. Standard library only."""

from __future__ import annotations

import errno

__all__ = ("fails_now", "is_away")

# What only a file system says that fails: never an address.
_AWAY = frozenset(
    (
        *(errno.EIO, errno.ESTALE),
        # A FUSE mount without its process, NFS with `softerr`, SMB without its server, NFS with a broken one.
        *(errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO),
    )
)
_FAILS = _AWAY | {errno.ENOSPC, errno.EDQUOT}


def is_away(error: BaseException) -> bool:
    """Whether it comes of a file system that fails for now, as a mount does whose server is away."""
    return _is_of(error, _AWAY)


def fails_now(error: BaseException) -> bool:
    """Whether it comes of a file system that fails or has no room, as where a token or `run.yaml` lies."""
    return _is_of(error, _FAILS)


def _is_of(error: BaseException, numbers: frozenset[int]) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in numbers:
            return True
        cause = cause.__cause__
    return False
