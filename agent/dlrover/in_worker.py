"""What a worker changes in DLRover's library: it outlives a saver that dies, and names what cannot work here."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dalsegno.protos.imported import when_imported

from .scripts import refused_class

__all__ = ["install"]

_SHARDING = "dlrover.python.elastic_agent.sharding.client"


def install() -> None:
    """Does it as soon as those modules are imported."""
    when_imported("dlrover.python.common.multi_process", _change_sockets)
    when_imported(_SHARDING, _change_clients)


def _change_sockets(module: ModuleType) -> None:
    """What was said to a saver that has died is said to the one that follows.

    Theirs fails then: a lock keeps its connection for ever, so that no later save of this process could take it, and an
    answer that does not come is an error of the training.
    """
    for name, change in (("LocalSocketComm", _repeated), ("SharedLock", _connected_anew)):
        found = getattr(module, name)
        found._request = functools.wraps(found._request)(change(found._request))


def _repeated(plain: Callable[..., Any]) -> Callable[..., Any]:
    def request(self: Any, message: Any) -> Any:
        try:
            return plain(self, message)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            _hang_up(self)
        # Theirs waits for half a minute until somebody listens.
        return plain(self, message)

    return request


def _connected_anew(plain: Callable[..., Any]) -> Callable[..., Any]:
    def request(self: Any, message: Any) -> Any:
        if self._client is not None:
            try:
                return plain(self, message)
            except (OSError, EOFError):
                _hang_up(self)
                self._had_server = True
            if message.method == "release":
                return None  # it was the dead one's
        if getattr(self, "_had_server", False):
            # At once or not at all: a save that finds no saver is left out, as where it is busy.
            self._client = _connected(self._socket_file)
        return plain(self, message)

    return request


def _connected(path: str) -> socket.socket:
    # Theirs logs a whole traceback where nobody listens yet.
    found = socket.socket(socket.AF_UNIX)
    try:
        found.connect(path)
    except OSError:
        found.close()
        raise
    return found


def _hang_up(comm: Any) -> None:
    if comm._client is not None:
        comm._client.close()
        comm._client = None


def _change_clients(module: ModuleType) -> None:
    """What needs DLRover's master says so where it is made, wherever the script has it from."""
    for name in ("ShardingClient", "IndexShardingClient"):
        if (found := getattr(module, name, None)) is not None:
            _refuse(found, name)


def _refuse(found: type[Any], name: str) -> None:
    def refuse(self: Any, *arguments: Any, **named: Any) -> None:
        raise RuntimeError(refused_class(name))

    found.__init__ = refuse
