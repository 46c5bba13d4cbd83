"""Keeps gRPC's core from printing to standard error; nothing here imports gRPC."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["quiet_grpc"]

_VARIABLE = "GRPC_VERBOSITY"


@contextlib.contextmanager
def quiet_grpc() -> Iterator[None]:
    """Sets the variable that gRPC reads at its first import, and takes it back, so that workers don't inherit it.

    The core prints every failed handshake to standard error, past our logs; what it says about a call also comes with
    the call. A variable that the user has set stays.
    """
    if _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = "NONE"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
