"""A service's address: what is connected to it comes to a pod that is ready, as with kube-proxy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from functools import partial

from ..hosts.hosts import Host
from ..hosts.namespaces import network_of

__all__ = ["ServicePort"]


class ServicePort:
    """One port of a service. It listens while a pod is ready; what is connected stays so, until one end ends it.

    Args:
        host: has the service's address.
        address: the service's address and port.
    """

    def __init__(self, host: Host, address: tuple[str, int]) -> None:
        self._host, self._address = host, address
        self._server: socket.socket | None = None
        self._targets: tuple[tuple[str, int], ...] = ()
        self._turn = 0
        self._open: set[socket.socket] = set()

    def lead_to(self, targets: Sequence[tuple[str, int]]) -> None:
        """New connections go to these in turn; with none they are refused."""
        self._targets = tuple(targets)
        if self._targets and self._server is None:
            with network_of(self._host.pid):
                self._server = socket.create_server(self._address)
            threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()
        elif not self._targets and self._server is not None:
            server, self._server = self._server, None
            # Who waits in accept() is woken by this, and not by close().
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()

    def close(self) -> None:
        """Ends it and all that is connected."""
        self.lead_to(())
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = server.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        targets = self._targets
        self._turn += 1
        try:
            far = self._host.connect(targets[self._turn % len(targets)])
        except (OSError, ZeroDivisionError):
            near.close()
            return
        far.settimeout(None)
        self._open |= {near, far}
        back = threading.Thread(target=partial(self._pump, far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        self._open -= {near, far}
        near.close()
        far.close()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
