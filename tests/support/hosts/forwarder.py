"""The switch as a process: hosts' interfaces are TAP devices, and all their frames pass here. `python -m` this module.

It reads commands from standard input, JSON lines, and answers each with a line; it ends when its input does. The kernel
has no `netem` everywhere, and TAP devices take frames with complete checksums, one by one.

    {"do": "add", "port": "h1.eth0", "pid": 123, "name": "eth0"}   an interface in the network of that process
    {"do": "set", "port": "h1.eth0", "plugged": true, "out": [0.1, 0.0], "into": [0.0, 0.2]}   loss, delay in seconds
    {"do": "remove", "port": "h1.eth0"}
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from random import Random
from typing import Any

from tests.support.hosts.switch import Cable, Sent, Switch, Way

# Of linux/if_tun.h.
TUNSETIFF, TUNSETCARRIER = 0x400454CA, 0x400454E2
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65_536
# Frames of one port before the others have their turn.
_MOST_AT_ONCE = 64


class Forwarder:
    """Ports and what is on its way between them."""

    def __init__(self) -> None:
        self._switch = Switch(Random("cables"))
        self._taps: dict[str, int] = {}
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Sent]] = []
        self._selector = selectors.DefaultSelector()
        self._input = b""
        self._selector.register(0, selectors.EVENT_READ, "")

    def run(self) -> None:
        """Until the input ends."""
        os.set_blocking(0, False)
        while True:
            left = self._waiting[0][0] - time.monotonic() if self._waiting else None
            for key, _ in self._selector.select(None if left is None else max(0.0, left)):
                if key.data:
                    self._pass_on(key.data)
                elif not self._commands():
                    return
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                self._give(heapq.heappop(self._waiting)[2])

    def _pass_on(self, port: str) -> None:
        for _ in range(_MOST_AT_ONCE):
            if port not in self._taps:  # a command has just removed it
                return
            try:
                frame = os.read(self._taps[port], _FRAME_BYTES)
            except OSError:  # there is none, or the host is gone
                return
            now = time.monotonic()
            for sent in self._switch.take(port, frame, now):
                if sent.due <= now:
                    self._give(sent)
                else:
                    heapq.heappush(self._waiting, (sent.due, next(self._numbers), sent))

    def _give(self, sent: Sent) -> None:
        if sent.port in self._taps:
            with contextlib.suppress(OSError):  # its interface is down, or the host is gone
                os.write(self._taps[sent.port], sent.frame)

    def _commands(self) -> bool:
        data = os.read(0, _FRAME_BYTES)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            print(json.dumps(self._obey(json.loads(line))), flush=True)
        return bool(data)

    def _obey(self, command: dict[str, Any]) -> str:
        """ "" once it is done, else why it is not."""
        port = command["port"]
        try:
            match command["do"]:
                case "add":
                    self._add(port, command["pid"], command["name"])
                case "set":
                    cable = Cable(Way(*command["out"]), Way(*command["into"]), command["plugged"])
                    self._switch.set(port, cable)
                    fcntl.ioctl(self._taps[port], TUNSETCARRIER, struct.pack("i", cable.plugged))
                case "remove":
                    self._remove(port)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{command}: {error}"
        return ""

    def _add(self, port: str, pid: int, name: str) -> None:
        """Made here, where no other has its name, and handed over."""
        self._remove(port)
        made = f"tap{next(self._numbers)}"
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._taps[port] = tap
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", made.encode(), IFF_TAP | IFF_NO_PI))
        subprocess.run(["ip", "link", "set", made, "netns", str(pid), "name", name], check=True, timeout=20)
        self._switch.set(port, Cable())
        self._selector.register(tap, selectors.EVENT_READ, port)

    def _remove(self, port: str) -> None:
        self._switch.remove(port)
        tap = self._taps.pop(port, None)
        if tap is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(tap)
            os.close(tap)


if __name__ == "__main__":
    sys.exit(Forwarder().run())
