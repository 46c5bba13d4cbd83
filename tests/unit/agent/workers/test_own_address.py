"""Under which address other nodes reach this one: what this machine's own network says, and what changes there."""

from __future__ import annotations

import errno
import queue
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.workers import own_address
from dalsegno.agent.workers.own_address import (
    AddressWatch,
    NoAddressError,
    first_address,
    interfaces,
    is_for_now,
    later_address,
    node_address,
    node_variables,
    watch_address,
    why_not_begun,
)
from dalsegno.protos.addresses import is_loopback
from dalsegno.protos.shortage import CannotStartError

OLD, NEW = "10.0.0.4", "10.0.0.9"


def test_loopback_has_its_interface() -> None:
    """Both kinds of address are read, each with the name that the kernel has for it."""
    found = interfaces()
    names = {name for _, name in socket.if_nameindex()}
    assert ("lo", "127.0.0.1") in found
    assert {name.partition(":")[0] for name, _ in found} <= names
    if Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text(encoding="ascii"):
        assert ("lo", "::1") in found


def test_a_master_on_loopback_is_on_this_machine() -> None:
    """So are all nodes; and the first master whose name means anything counts."""
    assert node_address(["127.0.0.1:1"], None) == "127.0.0.1"
    assert node_address(["no-such-host.invalid:1", "127.0.0.1:1"], None) == "127.0.0.1"


class Names:
    """What names mean on a machine, and which interfaces it has; no route leads anywhere by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *here: tuple[str, str], **names: list[str]) -> None:
        self._names, self._know = names, socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        self.here = [*here]
        monkeypatch.setattr(own_address, "interfaces", lambda: [("lo", "127.0.0.1"), ("lo", "::1"), *self.here])
        monkeypatch.setattr(own_address, "_NOWHERE", ())

    def _look_up(self, host: str, port: Any, **options: Any) -> list[Any]:
        found = [self._know(one, port, **options) for one in self._names.get(host, [host])]
        return [one for some in found for one in some]


DEBIAN = {"head": ["127.0.1.1"]}


def test_the_masters_name_means_loopback_on_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian writes it. Other nodes would be told an address that each of them has itself, and wait for ever."""
    Names(monkeypatch, ("eth0", "169.254.7.1"), ("eth0", "fe80::1"), ("eth0", OLD), ("docker0", "172.17.0.1"), **DEBIAN)
    assert node_address(["head:29400"], None) == OLD
    assert node_address(["head:29400"], "127.0.0.1") == "127.0.0.1"
    assert node_address(["head:29400"], None, several=False) == "127.0.1.1"
    for here in "127.0.0.1:1", "127.0.1.1:1", "localhost:1", "[::1]:1":
        assert is_loopback(node_address([here], None))


def test_a_machine_without_a_network_stays_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """There can be no others, and nothing is said."""
    Names(monkeypatch, ("eth0", "169.254.7.1"), **DEBIAN)
    assert node_address(["head:29400"], None) == "127.0.1.1"
    assert said_of(["head:29400"], True) == []


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of a machine: cards, a bond of two, and bridges, of which one has a card's frames."""
    for name in ("eth0/device", "eth1/device", "bond0/lower_eth1", "veth7", "tap0", "lo"):
        (tmp_path / name).mkdir(parents=True)
    for port in ("docker0/brif/veth7", "virbr0/brif/tap0", "br0/brif/eth0", "br1/brif/bond0", "br1/brif/veth7"):
        (tmp_path / port).mkdir(parents=True)
    (tmp_path / "empty0" / "brif").mkdir(parents=True)
    monkeypatch.setattr(own_address, "_NET", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "leads"),
    [
        *(("docker0", False), ("virbr0", False), ("empty0", False), ("docker0:x", False)),
        *(("br0", True), ("br1", True), ("br0:ranks", True), ("eth0", True), ("veth7", True), ("eth9", True)),
    ],
)
def test_a_bridge_of_this_machines_containers_leads_to_no_other_node(
    monkeypatch: pytest.MonkeyPatch, cards: Path, name: str, leads: bool
) -> None:
    """172.17.0.1 is Docker's on each machine. A bridge with a card behind it is the machine's way out."""
    assert cards.is_dir()
    Names(monkeypatch, (name, "172.17.0.1"), **DEBIAN)
    assert node_address(["head:29400"], None) == ("172.17.0.1" if leads else "127.0.1.1")


def test_a_lost_address_is_not_replaced_by_whatever_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a lease is lost there may be other interfaces, which stay: the node would never come back from them."""
    names = Names(monkeypatch, ("docker0", "172.17.0.1"), ("eth1", "10.99.0.1"), **DEBIAN)
    assert is_loopback(later_address(["head:29400"], None, True, OLD))
    # From loopback any of them is better.
    assert later_address(["head:29400"], None, True, "127.0.1.1") == "172.17.0.1"
    names.here = []
    assert is_loopback(later_address(["head:29400"], None, True, "127.0.1.1"))


def test_a_lost_address_is_replaced_by_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router's IPv6 outlives the lease of IPv4: other nodes may have none."""
    asked: list[Any] = []
    Names(monkeypatch, **DEBIAN)
    nowhere = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
    monkeypatch.setattr(own_address, "_NOWHERE", nowhere)
    make = socket.socket

    def note(family: Any, *rest: Any) -> socket.socket:
        asked.append(family)
        return make(family, *rest)

    for old, families in (
        (OLD, [socket.AF_INET]),
        ("fd00::4", [socket.AF_INET6]),
        ("127.0.1.1", [socket.AF_INET, socket.AF_INET6]),
    ):
        asked.clear()
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", note)
            later_address(["head:29400"], None, True, old)
        assert asked == families


def test_loopback_for_lack_of_another_is_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a person means loopback, or no other node may come, it stays."""
    Names(monkeypatch, **DEBIAN)
    assert is_for_now(["no-such-host.invalid:1", "head:29400"], None, True, "127.0.1.1")
    assert not is_for_now(["head:29400"], None, True, OLD)
    assert not is_for_now(["head:29400"], None, False, "127.0.1.1")
    assert not is_for_now(["head:29400"], "head", True, "127.0.1.1")
    for here in "127.0.0.1:1", "localhost:1":
        assert not is_for_now([here], None, True, "127.0.0.1")


def test_who_needs_other_nodes_waits_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a boot the hosts file answers before there is a lease: the others were told 127.0.1.1, for ever."""
    names = Names(monkeypatch, **DEBIAN)
    late = LateNetwork(monkeypatch, itself=False)
    assert late.first(None, 60, "head:1", others=True, slept=lambda: names.here.append(("eth0", OLD))) == OLD
    waits, told = (text for text, _ in late.said)
    why = "head means 127.0.1.1 on this machine, which has no other address yet"
    assert waits == f"{why}: trying for 60 s (--connect-timeout)"
    assert f"they are told {OLD}" in told


def test_nodes_of_one_machine_without_a_network_begin_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not many, but they are there; and a line says what was not found."""
    Names(monkeypatch, **DEBIAN)
    late = LateNetwork(monkeypatch, itself=False)
    assert late.first(None, 60, "head:1", others=True) == "127.0.1.1"
    assert late.now == pytest.approx(160)
    assert [text for text, _ in late.said][1:] == [
        "head means 127.0.1.1 on this machine, which has no other address: no other machine's node reaches this one"
        " until it has (--local-addr names one)"
    ]


def test_a_name_with_another_address_besides_means_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order: the way leads there, which on this machine is loopback."""
    Names(monkeypatch, ("eth0", OLD), head=["127.0.1.1", "127.0.0.1", "0.0.0.0"])
    assert own_address._meant("head", 1)[1][0] == "0.0.0.0"


def test_the_default_route_counts_before_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads to others; which interface is the first one is chance."""
    routes = Path("/proc/net/route").read_text(encoding="ascii").splitlines()
    if not any(route.split()[1] == "00000000" for route in routes[1:]):
        pytest.skip("this machine has no default route")
    own, nowhere = {own for _, own in interfaces()}, own_address._NOWHERE
    Names(monkeypatch, ("eth9", "10.99.0.1"), **DEBIAN)
    monkeypatch.setattr(own_address, "_NOWHERE", nowhere)
    assert node_address(["head:29400"], None) in own


def said_of(masters: list[str], several: bool) -> list[tuple[str, bool]]:
    said: list[tuple[str, bool]] = []
    first_address(masters, None, several, 1, lambda text, warning: said.append((text, warning)))
    return said


def test_which_address_it_is_then_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the wrong one of several, and the line names the flag. A name like others has no line."""
    Names(monkeypatch, ("eth0", OLD), **DEBIAN)
    line = (
        f"head means 127.0.1.1 on this machine, where no other node reaches it: they are told {OLD}"
        " (--local-addr names another)"
    )
    for masters, several, lines in (
        (["no-such-host.invalid:1", "head:29400"], True, [(line, False)]),
        (["head:29400"], False, []),
        (["127.0.1.1:29400"], True, []),
        (["localhost:1"], True, []),
    ):
        assert said_of(masters, several) == lines
    assert first_address(["head:29400"], "127.0.0.9", True, 1, lambda *line: pytest.fail(str(line))) == "127.0.0.9"


def test_no_master_has_an_address() -> None:
    """The last one's reason."""
    with pytest.raises(OSError, match=r"(?i)name|resol"):
        node_address(["no-such-host.invalid:1"], None)


def test_what_the_user_gave_counts() -> None:
    """A name, too, and whatever the route says."""
    assert node_address(["no-such-host.invalid:1"], "localhost") in ("127.0.0.1", "::1")


def test_what_the_user_gave_is_named_where_it_means_nothing() -> None:
    """Not the master, which may be well."""
    with pytest.raises(NoAddressError, match=r"^--local-addr=no-such-host\.invalid has no address: "):
        node_address(["127.0.0.1:1"], "no-such-host.invalid")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EHOSTUNREACH, "No route"), "a:1,b:1 cannot be reached: No route; check --master"),
        (OSError("odd"), "a:1,b:1 cannot be reached: odd; check --master"),
        (NoAddressError("--local-addr=x has no address"), "--local-addr=x has no address"),
        (CannotStartError("the agent cannot be started: full"), "the agent cannot be started: full"),
    ],
)
def test_why_an_agent_does_not_begin(error: OSError, line: str) -> None:
    """A master is named only where it is one."""
    assert why_not_begun(error, "a:1,b:1", "--master") == line


class LateNetwork:
    """A machine that boots: for some looks nothing is there yet. Time passes while somebody sleeps, and only then."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *problems: OSError, ever: bool = True, itself: bool = True
    ) -> None:
        self.problems, self.looks, self.ever = problems, 0, ever
        self.now, self.said = 100.0, list[tuple[str, bool]]()
        self._slept: Callable[[], None] = lambda: None
        if itself:
            monkeypatch.setattr(own_address, "node_address", self._address)
        clock = SimpleNamespace(sleep=self._sleep, monotonic=lambda: self.now)
        monkeypatch.setattr(own_address, "time", clock, raising=False)

    def first(
        self,
        local_addr: str | None,
        seconds: float,
        *masters: str,
        others: bool = False,
        slept: Callable[[], None] = lambda: None,
    ) -> str:
        self._slept = slept
        return first_address(
            masters, local_addr, True, seconds, lambda text, warning: self.said.append((text, warning)), others
        )

    def _address(self, masters: Sequence[str], local_addr: str | None, several: bool) -> str:
        self.looks += 1
        if self.ever and self.looks > len(self.problems):
            return OLD
        problem = self.problems[min(self.looks, len(self.problems)) - 1]
        raise type(problem)(*problem.args)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self._slept()


NO_NAME = socket.gaierror(-2, "Name or service not known")
NO_ROUTE = OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.mark.parametrize("problems", [(NO_NAME,), (NO_NAME, NO_NAME, NO_ROUTE), (NO_ROUTE,)])
def test_a_name_or_a_route_that_comes_after_the_boot_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, problems: tuple[OSError, ...]
) -> None:
    """A supervisor starts the agent as soon as it can; one line says what is waited for, why, and how long."""
    late = LateNetwork(monkeypatch, *problems)
    assert late.first(None, 60, "a:1", "b:2") == OLD
    reason = problems[0].strerror
    assert late.said == [(f"a:1,b:2 cannot be reached yet ({reason}): trying for 60 s (--connect-timeout)", False)]


def test_a_name_that_never_comes_is_not_waited_for_longer_than_a_person_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the error is the name's own; and an hour of looks does not burden who answers them."""
    late = LateNetwork(monkeypatch, NO_NAME, ever=False)
    with pytest.raises(socket.gaierror, match="not known"):
        late.first(None, 3600, "a:1")
    assert late.now == pytest.approx(100 + 3600)
    assert late.looks < 3600 / 4
    assert len(late.said) == 1


@pytest.mark.parametrize(
    ("local_addr", "masters", "problem"),
    [
        ("mine.invalid", ("a:1",), NO_NAME),  # what the user gave is wrong
        (None, (), OSError("no master is known")),  # there is no name that could come
        (None, ("a:1",), OSError(errno.EMFILE, "Too many open files")),  # waiting mends nothing
    ],
)
def test_what_waiting_does_not_mend_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, local_addr: str | None, masters: tuple[str, ...], problem: OSError
) -> None:
    late = LateNetwork(monkeypatch, problem)
    with pytest.raises(OSError, match=str(problem.strerror or problem)):
        late.first(local_addr, 60, *masters)
    assert (late.now, late.said) == (100.0, [])


@pytest.mark.parametrize("where", ["file", "variable"])
def test_what_nccl_was_told_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Also in a file of its own, which a variable would override."""
    monkeypatch.setattr(own_address, "interfaces", lambda: [("eth0", OLD)])
    (tmp_path / "nccl.conf").write_text("# NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME = ib0\n", encoding="ascii")
    file = tmp_path / ("nccl.conf" if where == "file" else "none")
    environment = {"NCCL_CONF_FILE": str(file), **({"NCCL_SOCKET_IFNAME": "ib0"} if where == "variable" else {})}
    assert node_variables(OLD, environment) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_without_nccls_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are told."""
    monkeypatch.setattr(own_address, "interfaces", lambda: [("eth0", OLD)])
    found = node_variables(OLD, {"NCCL_CONF_FILE": str(tmp_path / "none")})
    assert found == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


class Network:
    """What a watch sees, and what it has told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here, self.route, self.looks, self.asked = [("eth0", OLD)], OLD, 0, ""
        self.told: queue.Queue[tuple[str, str]] = queue.Queue()
        monkeypatch.setattr(own_address, "interfaces", self._interfaces)

    def _interfaces(self) -> list[tuple[str, str]]:
        self.looks += 1
        return self.here

    def find(self, old: str) -> str:
        self.asked = old
        if not self.route:
            raise OSError("no route")
        return self.route

    def look(self, times: int) -> None:
        """Until it was looked so often more."""
        wanted = self.looks + times
        while self.looks < wanted:
            with pytest.raises(queue.Empty):
                self.told.get(timeout=0.01)


def test_a_change_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is no other address nothing is told; then the old and the new one, and later the next change."""
    network = Network(monkeypatch)
    watch = AddressWatch(OLD, network.find, lambda old, new: network.told.put((old, new)), every=0.01)
    network.look(5)
    network.here, network.route = [], ""
    network.look(5)
    network.here, network.route = [("eth0", NEW)], NEW
    assert network.told.get(timeout=30) == (OLD, NEW)
    assert network.asked == OLD
    network.look(5)
    network.here, network.route = [("eth0", OLD)], OLD
    assert network.told.get(timeout=30) == (NEW, OLD)
    watch.close()


def test_another_address_beside_it_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the route prefers now: the connections stand."""
    network = Network(monkeypatch)
    watch = AddressWatch(OLD, network.find, lambda old, new: network.told.put((old, new)), every=0.01)
    network.here, network.route = [("eth1", NEW), ("eth0", OLD)], NEW
    network.look(10)
    watch.close()


def test_loopback_for_now_is_left_for_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that booted before it had a lease; later that address is watched as any other."""
    network = Network(monkeypatch)
    network.here, network.route = [("lo", "127.0.1.1")], "127.0.1.1"
    watch = AddressWatch(
        "127.0.1.1", network.find, lambda old, new: network.told.put((old, new)), every=0.01, for_now=True
    )
    with pytest.raises(queue.Empty):
        network.told.get(timeout=0.2)
    network.here, network.route = [("eth0", OLD)], OLD
    assert network.told.get(timeout=30) == ("127.0.1.1", OLD)
    network.look(5)
    network.here, network.route = [("eth0", NEW)], NEW
    assert network.told.get(timeout=30) == (OLD, NEW)
    watch.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
def test_what_cannot_go_is_not_watched(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Loopback, and what no interface has."""
    network = Network(monkeypatch)
    AddressWatch(address, network.find, lambda old, new: network.told.put((old, new)), every=0.001)
    looks = network.looks
    with pytest.raises(queue.Empty):
        network.told.get(timeout=0.1)
    assert network.looks == looks


def test_an_agents_watch_follows_its_way_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """From loopback, which it was told for lack of another address; and not where a person means that."""
    names = Names(monkeypatch, **DEBIAN)
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    meant = watch_address(["127.0.1.1:1"], None, True, "127.0.1.1", lambda *both: told.put(("meant", str(both))))
    watch = watch_address(["head:1"], None, True, "127.0.1.1", lambda old, new: told.put((old, new)))
    names.here = [("eth0", OLD)]
    assert told.get(timeout=60) == ("127.0.1.1", OLD)
    watch.close()
    meant.close()
    assert told.empty()


def test_a_node_that_was_to_be_alone_moves_where_the_job_has_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own line lacks --nnodes, and the master beside it says that there may be four."""
    names = Names(monkeypatch, **DEBIAN)
    names.here = [("eth0", OLD)]
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    watch = watch_address(["head:1"], None, False, "127.0.1.1", lambda old, new: told.put((old, new)))
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    for _ in range(2):
        watch.expect_others()
    assert told.get(timeout=60) == ("127.0.1.1", OLD)
    watch.close()
