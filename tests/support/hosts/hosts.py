"""Hosts on this machine: each with a network, process numbers, a host name, mounts and shared memory of its own.

A host is a process, number 1 of its namespaces; when it is killed, all that ran on the host is gone, as in a power cut.
Hosts end with the process that made them, however that ends: they read from a pipe of it. All directories are shared
but what a host has for itself (`/dev/shm`, `/proc`, its boot and machine id, `/etc/hosts`, `/etc/resolv.conf`). Nobody
resolves host names unless a test says so.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .namespaces import Inside, children_of, network_of, words_in
from .switch import Way

__all__ = ["Host", "Hosts", "missing"]

ROOT = Path(__file__).resolve().parents[3]
NETWORK = "10.77.0"
_PATIENCE = 20.0
# Process 1 reaps what others leave, so it waits; it ends with its input.
_INIT = """
set -e
exec 3<&0
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
mount --bind "$1/hosts" /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind "$1/resolv.conf" /etc/resolv.conf; fi
if [ -e /etc/machine-id ]; then mount --bind "$1/machine-id" /etc/machine-id; fi
hostname "$2"
ip link set lo up
echo up
cat <&3 >/dev/null &
wait
"""
_UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"hosts need {', '.join(lacking)}: install Debian's iproute2, util-linux and hostname"
    if os.geteuid():
        return "hosts are namespaces, which only root can make"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts need /dev/net/tun, for their network interfaces"
    made = subprocess.run(
        [*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


def _line(stream: Any, what: str) -> str:
    """The next line of a pipe, as text."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        assert selector.select(_PATIENCE), f"{what} said nothing within {_PATIENCE:.0f} s"
        return str(stream.readline().decode()).strip()


class Host:
    """One host. It is up from the beginning.

    Args:
        name: its host name, and that of its files.
        directory: for what it has of its own; made.
        address: its address in the hosts' network.
        switch: where its cable ends.
        interface: the name of its interface there.
        resolves: lines of its `/etc/hosts`.

    Attributes:
        pid: its first process, seen from outside.
    """

    def __init__(
        self, name: str, directory: Path, address: str, switch: SwitchProcess, interface: str, resolves: Sequence[str]
    ) -> None:
        self.name, self.address, self.interface = name, address, interface
        self._directory, self._switch = directory, switch
        self.port = f"{name}.{interface}"
        directory.mkdir(parents=True)
        self.resolve(*resolves)
        (directory / "resolv.conf").write_text("", encoding="ascii")
        (directory / "machine-id").write_text(f"{uuid.uuid4().hex}\n", encoding="ascii")
        self._cable: dict[str, Any] = {}
        self.power_up()

    def power_up(self) -> None:
        """Boots it: with a new boot id, its old address, and its cable as good as new."""
        (self._directory / "boot_id").write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        self._outer = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _INIT, "sh", str(self._directory), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        said = _line(self._outer.stdout, f"host {self.name}")
        assert said == "up", f"host {self.name} does not start: {said!r}"
        (self.pid,) = children_of(self._outer.pid)
        self.connect_to_switch(self.interface, self.address)
        self._cable = {"plugged": True, "out": [0.0, 0.0], "into": [0.0, 0.0]}

    def connect_to_switch(self, interface: str, address: str) -> None:
        """Gives it an interface on the hosts' switch, which has the same hardware address after each boot."""
        self._switch.tell(do="add", port=f"{self.name}.{interface}", pid=self.pid, name=interface)
        hardware = "02:" + ":".join(f"{int(part):02x}" for part in ("0", *address.split(".")))
        self.run("ip", "link", "set", interface, "address", hardware)
        self.run("ip", "addr", "add", f"{address}/24", "dev", interface)
        self.run("ip", "link", "set", interface, "up")

    def resolve(self, *lines: str) -> None:
        """Its `/etc/hosts` has these lines from now on, and localhost."""
        text = "\n".join(["127.0.0.1 localhost", *lines, ""])
        (self._directory / "hosts").write_text(text, encoding="ascii")  # in place: it is mounted

    @property
    def is_up(self) -> bool:
        return self._outer.poll() is None

    # ---- what runs here ---------------------------------------------------------------------------------------------

    def run(self, *command: str) -> str:
        """Runs a command to its end; what it printed."""
        line = words_in(self.pid, command, Path("/"))
        done = subprocess.run(line, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        assert done.returncode == 0, f"{' '.join(command)} on {self.name}: {done.stderr}"
        return done.stdout

    def popen(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str], **options: Any) -> Inside:
        """Starts a process here, in a session of its own. `options`: of `subprocess.Popen`."""
        line = words_in(self.pid, command, cwd)
        return Inside(subprocess.Popen(line, env=environment, start_new_session=True, **options))

    def connect(self, target: tuple[str, int], seconds: float = 5.0) -> socket.socket:
        """A connection that a process of this host would have made. Raises OSError."""
        with network_of(self.pid):
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.settimeout(seconds)
            made.connect(target)
        except BaseException:
            made.close()
            raise
        return made

    # ---- what happens to it -----------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Pulls its cable."""
        self._change(plugged=False)

    def plug(self) -> None:
        """Puts its cable back, or ends whatever was wrong with it."""
        self._change(plugged=True, out=[0.0, 0.0], into=[0.0, 0.0])

    def disturb(self, *, out: Way | None = None, into: Way | None = None) -> None:
        """Frames from it (`out`) and to it (`into`) are lost or late from now on."""
        ways = {"out": out or Way(), "into": into or Way()}
        self._change(**{name: [way.loss, way.delay_seconds] for name, way in ways.items()})

    def _change(self, **what: Any) -> None:
        self._cable |= what
        self._switch.tell(do="set", port=self.port, **self._cable)

    def readdress(self, address: str) -> None:
        """It has another address from now on, and no longer the old one."""
        self.run("ip", "addr", "del", f"{self.address}/24", "dev", self.interface)
        self.run("ip", "addr", "add", f"{address}/24", "dev", self.interface)
        self.address = address

    def power_cut(self) -> None:
        """All that runs here is gone at once; so is its network, without a word to anybody."""
        # First the cable: nothing that ends may say so.
        self._switch.tell(do="remove", port=self.port)
        self._outer.kill()
        self._outer.wait(_PATIENCE)
        deadline = time.monotonic() + _PATIENCE
        while Path(f"/proc/{self.pid}").exists():
            assert time.monotonic() < deadline, f"host {self.name} does not end"
            time.sleep(0.01)  # why: it is not our child
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._outer.stdin, self._outer.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        """Ends it, if it is up."""
        if self.is_up:
            self.power_cut()


class SwitchProcess:
    """The process of `forwarder.py`, in a network of its own."""

    def __init__(self) -> None:
        command = ["unshare", "--net", sys.executable, "-m", "tests.support.hosts.forwarder"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def tell(self, **command: Any) -> None:
        """Has it do something, and waits until it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        said = _line(self._process.stdout, "the switch")
        assert said == '""', f"the switch: {said}"

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait(_PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Hosts:
    """Hosts on one switch. Use as a context manager.

    Args:
        directory: for what the hosts have of their own; made.
        names: their names; they get the addresses 10.77.0.11, 10.77.0.12, …
        interface: the name of each one's interface.
        resolves: what stands in the `/etc/hosts` of all; `{name}` is the host's own name.
    """

    def __init__(
        self, directory: Path, names: Sequence[str], *, interface: str = "eth0", resolves: Sequence[str] = ()
    ) -> None:
        self._switch = SwitchProcess()
        self.hosts: dict[str, Host] = {}
        try:
            for number, name in enumerate(names):
                lines = [line.format(name=name) for line in resolves]
                address = f"{NETWORK}.{11 + number}"
                self.hosts[name] = Host(name, directory / name, address, self._switch, interface, lines)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all of them."""
        for host in self.hosts.values():
            host.close()
        self._switch.close()
