"""Keeps gRPC's core from printing to standard error; nothing here imports gRPC."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["quiet_grpc"]

_VARIABLE = "GRPC_VERBOSITY"


@contextlib.contextmanager
def quiet_grpc() -> Iterator[None]:
    """For the first import of gRPC, which reads the variable; then it is taken back, so that workers don't see it.

    The core prints every failed handshake past all logs of ours; what it has to say about a call comes back with the
    call. A variable that the user has set stays.
    """
    if _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = "NONE"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
