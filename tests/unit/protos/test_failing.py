"""Which errors of a file system pass by themselves, so that a supervisor starts the master again."""

from __future__ import annotations

import errno

import pytest

from dalsegno.protos.failing import fails_now


@pytest.mark.parametrize(
    ("number", "passes"),
    [
        *((one, True) for one in (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENOTCONN, errno.ETIMEDOUT)),
        *((one, False) for one in (errno.ENOENT, errno.EACCES, errno.EADDRINUSE, errno.EISDIR)),
    ],
)
def test_a_mount_that_is_away_is_no_bad_input(number: int, passes: bool) -> None:
    """Also as the cause of what a person is told: a token on a FUSE mount whose process is gone ended it for good."""
    error = ValueError("the token cannot be read")
    error.__cause__ = OSError(number, "so")
    assert fails_now(error) is passes
