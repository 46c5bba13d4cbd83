"""Under which address other nodes reach this one, over which interface, and what happens when that changes."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dalsegno.protos.addresses import host_and_port, is_loopback, is_only_here
from dalsegno.protos.shortage import CannotStartError, shortage

from ..decisions.interfaces import rank_interfaces, ranks_elsewhere

__all__ = [
    "AddressWatch",
    "NoAddressError",
    "elsewhere",
    "first_address",
    "interfaces",
    "is_for_now",
    "later_address",
    "node_address",
    "node_variables",
    "watch_address",
    "why_not_begun",
]

# Of linux/sockios.h: all IPv4 addresses, in records of name and socket address.
_SIOCGIFCONF = 0x8912
_RECORD_BYTES, _NAME_BYTES, _ADDRESS_AT = 40, 16, 20
_MOST_ADDRESSES = 1024
# Seconds between two looks at this node's addresses, and how many must find the old one gone and the new one there: a
# lease that is renewed may take an address away for a moment.
LOOK_SECONDS, LOOKS = 1.0, 2
# Seconds between two looks for a master's name or a route to it: the first ones, and later ones.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0
# Of RFC 5737 and RFC 3849: nobody has them, so only a default route leads there.
_NOWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
# What Linux says of each interface: a bridge has its ports in `brif`; a card has a `device`, and what is made of cards
# (bonds, VLANs) names them with `lower_` before.
_NET = Path("/sys/class/net")
_NCCL_SETTING = re.compile(r"^\s*(NCCL_[A-Z_]+)\s*=", re.MULTILINE)


class NoAddressError(OSError):
    """One line: what the user gave as this node's address has none."""


def why_not_begun(error: OSError, masters: str, flags: str) -> str:
    """One line for an agent that has no address, or cannot be started.

    Args:
        masters: whom it could not reach, if neither of the two errors says something else.
        flags: what to check then.
    """
    if isinstance(error, (CannotStartError, NoAddressError)):
        return str(error)
    return f"{masters} cannot be reached: {error.strerror or error}; check {flags}"


def node_address(masters: Sequence[str], local_addr: str | None, several: bool = True) -> str:
    """The address under which other nodes reach this one: that from which it reaches the master.

    Where the master's name means loopback, and this machine's own name may do so, it is that of the default route.

    Args:
        masters: HOST:PORT of each; the first that has an address and can be reached by a route counts.
        local_addr: what the user gave, if anything.
        several: there may be other nodes.

    Raises:
        NoAddressError: `local_addr` cannot be resolved.
        OSError: no master's name can, or no route leads there.
    """
    return _address(masters, local_addr, several)


def later_address(masters: Sequence[str], local_addr: str | None, several: bool, old: str) -> str:
    """`node_address` where `old` is gone. Loopback: there is none yet that others reach.

    Where the master's name means loopback, only a default route of the same kind replaces `old`. Which interface is the
    first one says nothing while a lease is lost, and one that is there all the time is never gone again.
    """
    return _address(masters, local_addr, several, "" if is_loopback(old) else old)


def is_for_now(masters: Sequence[str], local_addr: str | None, several: bool, address: str) -> bool:
    """Whether `address`, from `node_address`, is loopback only because this machine has no other one yet."""
    return several and not local_addr and is_loopback(address) and _own_name(masters) is not None


def _address(masters: Sequence[str], local_addr: str | None, several: bool, old: str = "") -> str:
    if local_addr:
        try:
            return str(socket.getaddrinfo(local_addr, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise NoAddressError(f"--local-addr={local_addr} has no address: {error.strerror or error}") from error
    problem = OSError("no master is known")
    for master in masters:
        try:
            return _towards(master, several, old)
        except OSError as error:
            problem = error
    raise problem


def _towards(master: str, several: bool, old: str) -> str:
    host, port = host_and_port(master)
    family, address = _meant(host, port)
    if is_loopback(str(address[0])):
        return (several and not is_only_here(host) and _outside(old)) or str(address[0])
    # Connecting a datagram socket sends nothing. It only chooses the route, and with it our own address.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _meant(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """What a name means here: the first address that is not loopback, if it has one."""
    found = [(one[0], one[4]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)]
    return next((one for one in found if not is_loopback(str(one[1][0]))), found[0])


def _outside(old: str) -> str:
    """From where this machine reaches others: over its default route, else its first interface; empty: it has none.

    With an `old` one, only over a default route, and of that one's kind.
    """
    kinds = _NOWHERE if not old else [one for one in _NOWHERE if (one[0] == socket.AF_INET6) == (":" in old)]
    for family, nowhere in kinds:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((nowhere, 9))
            if not is_loopback(found := str(probe.getsockname()[0])):
                return found
    if old:
        return ""
    there = ((name, own) for name, own in interfaces() if not is_loopback(own) and not _is_of_its_link(own))
    return next((own for name, own in there if not _is_among_ourselves(name)), "")


def _is_among_ourselves(name: str) -> bool:
    """Whether an interface is a bridge for containers or virtual machines alone: it has the same address elsewhere."""
    try:
        ports = [one.name for one in (_NET / name.partition(":")[0] / "brif").iterdir()]
    except OSError:
        return False  # no bridge
    return not any((_NET / port / "device").exists() or any((_NET / port).glob("lower_*")) for port in ports)


def _is_of_its_link(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_link_local


def _own_name(masters: Sequence[str]) -> str | None:
    """What a person is to know where the first master with an address has a name that means loopback here alone."""
    for master in masters:
        with contextlib.suppress(OSError):
            host, port = host_and_port(master)
            means = str(_meant(host, port)[1][0])
            return f"{host} means {means} on this machine" if is_loopback(means) and not is_only_here(host) else None
    return None


def first_address(
    masters: Sequence[str],
    local_addr: str | None,
    several: bool,
    seconds: float,
    say: Callable[[str, bool], None],
    others: bool = False,
) -> str:
    """`node_address`, waited for: after a boot a master's name or the route to it may come later than the agent.

    Args:
        masters: HOST:PORT of each.
        local_addr: what the user gave, if anything; if that has no address, nobody waits.
        several: there may be other nodes.
        seconds: how long to wait.
        say: told once that this node waits, and why; and which address it has where its own name means loopback.
        others: the run needs other nodes, so this one also waits for an address beside loopback.

    Raises:
        OSError: as `node_address` at its last look.
    """
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            found = node_address(masters, local_addr, several)
            left = until - time.monotonic()
            own = _own_name(masters) if several and not local_addr else None
            if own is None or not (others and is_loopback(found)) or left <= 0:
                if own is not None and (line := _of_own_name(own, found, others)):
                    say(line, False)
                return found
            line = f"{own}, which has no other address yet"
        except OSError as error:
            left = until - time.monotonic()
            if local_addr or not masters or left <= 0 or shortage(error):
                raise
            line = f"{','.join(masters)} cannot be reached yet ({error.strerror or error})"
        if pause == _FIRST_PAUSE:
            say(f"{line}: trying for {seconds:g} s (--connect-timeout)", False)
        time.sleep(min(pause, left))  # why: nobody tells when a name or a route appears
        pause = min(2 * pause, _LONGEST_PAUSE)


def _of_own_name(own: str, address: str, others: bool) -> str:
    """What is said as a node begins whose master's name means loopback; empty: nothing, as no other may ever come."""
    if not is_loopback(address):
        return f"{own}, where no other node reaches it: they are told {address} (--local-addr names another)"
    if not others:
        return ""
    return (
        f"{own}, which has no other address: no other machine's node reaches this one until it has (--local-addr names"
        " one)"
    )


def interfaces() -> list[tuple[str, str]]:
    """Name and IP address of each interface of this node; one may have several, some with a label in place of the name.

    Sources: netdevice(7) for IPv4, Linux's `/proc/net/if_inet6`.
    """
    found = _records()
    with contextlib.suppress(OSError):  # no IPv6 here
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def _records() -> list[tuple[str, str]]:
    room = array.array("B", bytes(_MOST_ADDRESSES * _RECORD_BYTES))
    asked = struct.pack("iP", len(room), room.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answered = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, asked)
    length, data = struct.unpack("iP", answered)[0], room.tobytes()
    found = []
    for start in range(0, length, _RECORD_BYTES):
        name = data[start : start + _NAME_BYTES].split(b"\0")[0].decode(errors="replace")
        found.append((name, socket.inet_ntoa(data[start + _ADDRESS_AT : start + _ADDRESS_AT + 4])))
    return found


def node_variables(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """See `rank_interfaces`; what NCCL's own files set stands, too."""
    return rank_interfaces(address, interfaces(), {*environment} | _set_for_nccl(environment))


def elsewhere(address: str, environment: Mapping[str, str]) -> str:
    """See `ranks_elsewhere`."""
    return ranks_elsewhere(address, interfaces(), environment.keys())


def _set_for_nccl(environment: Mapping[str, str]) -> set[str]:
    """What NCCL reads from its files where no variable says otherwise."""
    own = environment.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    found: set[str] = set()
    for file in (own, "/etc/nccl.conf"):
        with contextlib.suppress(OSError):
            found |= set(_NCCL_SETTING.findall(Path(file).read_text(encoding="utf-8", errors="replace")))
    return found


class AddressWatch:
    """Tells when this node's address is gone and it has another one. Loopback stays, unless it is for now.

    Args:
        address: what other nodes were told.
        find: the address that it has now in place of another one; OSError or loopback: it has none.
        moved: told the old and the new one, on a thread.
        every: seconds between two looks.
        for_now: `address` is loopback, and any other one is better, see `is_for_now`.
        wider: gives `find` and `for_now` as they are where there may be other nodes; None: these are.
    """

    def __init__(
        self,
        address: str,
        find: Callable[[str], str],
        moved: Callable[[str, str], None],
        every: float = LOOK_SECONDS,
        for_now: bool = False,
        wider: Callable[[], tuple[Callable[[str], str], bool]] | None = None,
    ) -> None:
        self._address, self._find, self._moved, self._every = address, find, moved, every
        self._wider = wider
        self._over = threading.Event()
        # One that no interface has, such as that of a translated network, cannot be missed either.
        if for_now or (not is_loopback(address) and self._is_here()):
            self._start()

    def expect_others(self) -> None:
        """There may be other nodes, as the job says: loopback, which did for this one alone, is for now."""
        wider, self._wider = self._wider, None
        if wider is not None:
            self._find, for_now = wider()
            if for_now:
                self._start()

    def _start(self) -> None:
        threading.Thread(target=self._watch, name="own-address", daemon=True).start()

    def close(self) -> None:
        """Nobody is told any more."""
        self._over.set()

    def _stays(self) -> bool:
        return not is_loopback(self._address) and self._is_here()

    def _is_here(self) -> bool:
        return any(own == self._address for _, own in interfaces())

    def _watch(self) -> None:
        seen, looks = "", 0
        while not self._over.wait(self._every):
            found = ""
            with contextlib.suppress(OSError):
                found = "" if self._stays() else self._find(self._address)
            looks = looks + 1 if found and found == seen else int(bool(found))
            seen = found
            if looks >= LOOKS and not is_loopback(found):
                old, self._address, looks = self._address, found, 0
                self._moved(old, found)


def watch_address(
    masters: Sequence[str], local_addr: str | None, several: bool, address: str, moved: Callable[[str, str], None]
) -> AddressWatch:
    """Watches what `first_address` has found. For the first three see `node_address`, for `moved` `AddressWatch`."""

    def watched(several: bool) -> tuple[Callable[[str], str], bool]:
        way = masters, local_addr, several
        return partial(later_address, *way), is_for_now(*way, address)

    find, for_now = watched(several)
    return AddressWatch(address, find, moved, for_now=for_now, wider=None if several else partial(watched, True))
