"""The wires between etcd's members: each pair, and each direction of it, may be cut, held or lose what is sent.

A member's peers reach it at the address of a proxy. All members call from the same loopback address, so who has called
is read from the kernel's tables: the process that owns the other end of the connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path

# Seconds between two looks of a direction through which nothing passes.
_LOOK = 0.05
_CHUNK = 1 << 16


class Way(Enum):
    """What one direction does with what is sent."""

    OPEN = auto()
    # It is read and thrown away; the connection is reset when the way opens again, as its bytes have a gap.
    LOSSY = auto()
    # It waits, and comes late.
    HELD = auto()


class Wires:
    """A proxy in front of each of some processes that speak to one another.

    Args:
        targets: HOST:PORT of each one's own listener.
        pid_of: the process that a number names now.
    """

    def __init__(self, targets: Sequence[str], pid_of: Callable[[int], int]) -> None:
        self._targets, self._pid_of = list(targets), pid_of
        self._ways: dict[tuple[int, int], Way] = {}
        self._refused: set[frozenset[int]] = set()
        # Open connections with the pair that they join, and whether something of it was thrown away.
        self._open: dict[socket.socket, frozenset[int]] = {}
        self._torn: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        # How many bytes were thrown away, and connections refused or ended: proof that a scene has had an effect.
        self.lost = self.ended = 0
        self._servers = [socket.create_server(("127.0.0.1", 0)) for _ in targets]
        self.addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in self._servers]
        for number in range(len(targets)):
            threading.Thread(target=self._accept, args=(number,), daemon=True).start()

    def cut(self, one: int, other: int) -> None:
        """Ends the pair's connections, both ways; new ones are refused."""
        with self._lock:
            self._refused.add(frozenset((one, other)))
            self._end(frozenset((one, other)))

    def lose(self, source: int, target: int) -> None:
        """What the one sends to the other is lost; the way back is open."""
        with self._lock:
            self._ways[source, target] = Way.LOSSY

    def hold(self, source: int, target: int) -> None:
        """What the one sends to the other waits until `heal`."""
        with self._lock:
            self._ways[source, target] = Way.HELD

    def isolate(self, number: int, how: str = "cut") -> None:
        """Parts one from all others: `cut`, `lose` or `hold`, these two both ways."""
        for other in range(len(self._targets)):
            if other != number:
                getattr(self, how)(number, other)
                if how != "cut":
                    getattr(self, how)(other, number)

    def heal(self) -> None:
        """All ways are open again. Connections of which something was lost are reset."""
        with self._lock:
            self._ways.clear()
            self._refused.clear()
            for one in self._torn:
                _shut(one)
            self._torn.clear()

    def close(self) -> None:
        """Ends everything."""
        self._closed = True
        for server in self._servers:
            # Closing alone does not wake the thread that accepts.
            _shut(server)
            server.close()
        with self._lock:
            for one in self._open:
                _shut(one)

    def _end(self, pair: frozenset[int]) -> None:
        for one, joins in self._open.items():
            if joins == pair:
                self.ended += 1
                _shut(one)

    def _accept(self, number: int) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, address = self._servers[number].accept()
                # A thread of its own: another one's connection need not wait for this one's.
                threading.Thread(target=self._join, args=(near, address[1], number), daemon=True).start()

    def _join(self, near: socket.socket, port: int, number: int) -> None:
        """Passes one connection on."""
        caller = self._caller(port)
        host, _, its = self._targets[number].rpartition(":")
        try:
            if caller is None:
                raise OSError("its caller has hung up")
            pair = frozenset((caller, number))
            with self._lock:
                if self._closed or pair in self._refused:
                    self.ended += 1
                    raise OSError("cut")
            far = socket.create_connection((host, int(its)), timeout=5)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        with self._lock:
            self._open[near] = self._open[far] = pair
            if pair in self._refused:
                self._end(pair)
        threads = [
            threading.Thread(target=self._pump, args=(near, far, (caller, number)), daemon=True),
            threading.Thread(target=self._pump, args=(far, near, (number, caller)), daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self._lock:
            for one in (near, far):
                self._open.pop(one, None)
                self._torn.discard(one)
                one.close()

    def _pump(self, source: socket.socket, target: socket.socket, way: tuple[int, int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                while (state := self._ways.get(way, Way.OPEN)) is Way.HELD and not self._closed:
                    threading.Event().wait(_LOOK)
                if state is Way.LOSSY or source in self._torn:
                    with self._lock:
                        self._torn |= {source, target}
                        self.lost += len(data)
                    continue
                target.sendall(data)
        for one in (source, target):
            _shut(one)

    def _caller(self, port: int) -> int | None:
        """Whose process has this local port; None: the connection is gone."""
        for _ in range(20):
            inode = _inode(port)
            for number in range(len(self._targets)):
                if inode and inode in _inodes(self._pid_of(number)):
                    return number
            threading.Event().wait(0.01)
        return None


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _inode(port: int) -> str:
    """Of the connected socket on this machine with this local port; empty: there is none."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        # State 01: established.
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "01":
            return fields[9]
    return ""


def _inodes(pid: int) -> set[str]:
    """Of all sockets that a process has."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                    found.add(match[1])
    return found
