"""torchrun's meeting point: HOST:PORT of a node that hosts the rendezvous, which is the job's master here."""

from __future__ import annotations

import argparse
import contextlib
import socket
import time
from collections.abc import Mapping

from dalsegno.protos.addresses import EVERYWHERE, address_of, host_and_port, is_loopback, is_only_here
from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError

from .values import address, host

__all__ = ["answers", "find_master", "local_address", "meeting_point", "split", "wait_for_name", "where_to_listen"]

# torchrun's own defaults, of --rdzv-backend=c10d and of --master-addr.
_C10D_PORT, _STATIC_PORT = 29400, 29500
# Seconds in which a listener must answer; a person is told of a wait for it behind that.
_LOOK_SECONDS = 0.5


def find_master(options: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Sets what this command line means: `master`, a service; `meet`, a node that hosts one; neither: one of its own.

    `master_is_variables`: the service is the one that `DLROVER_MASTER_ADDR` names.

    Args:
        options: parsed; a master of its own that an endpoint with port 0 asked for is `standalone`, too.
        environ: variables; an argument wins over `DLROVER_MASTER_ADDR`.

    Raises:
        UsageError: an address is none, or two of them contradict each other.
    """
    if options.standalone and options.master:
        raise UsageError("--standalone has a master of its own: drop it, or --master")
    options.meet, options.master_is_variables = "", False
    options.own_endpoint = _is_own(options.rdzv_endpoint)
    if options.own_endpoint and options.min_nodes > 1 and not options.master and not options.standalone:
        raise UsageError(
            f"argument --rdzv-endpoint: no other node finds {options.rdzv_endpoint!r}, and --nnodes waits for"
            f" {options.min_nodes}: write HOST:PORT of one of them, or --nnodes=1"
        )
    options.standalone |= options.own_endpoint and not options.master
    if options.master or options.standalone:
        return
    service = environ.get(Variable.MASTER, "")
    # PET_MASTER_ADDR is for any launcher, DLROVER_MASTER_ADDR for this one.
    other = not service or "meet_addr" in options.flags
    options.meet = meeting_point(options, options.meet_addr if other else "")
    if options.meet:
        return
    if options.rdzv_endpoint:
        options.master = _service(options.rdzv_endpoint, "argument --rdzv-endpoint")
    elif service:
        options.master = _service(service, f"environment variable {Variable.MASTER}")
        options.master_is_variables = True


def _is_own(endpoint: str) -> bool:
    """Whether it is this machine's with port 0, any free one: torchrun's way to several jobs on one machine."""
    host, port = split(endpoint)
    return port.isdecimal() and int(port) == 0 and host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _service(text: str, what: str) -> str:
    try:
        return address(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{what}: {error}") from error


def meeting_point(options: argparse.Namespace, master_addr: str | None) -> str:
    """HOST:PORT where the nodes of this command line meet, as torchrun's users give it; empty: they do not.

    `--rdzv-endpoint` with `--rdzv-backend=c10d` (or static), or `master_addr` and `--master-port` for several nodes.

    Raises:
        UsageError: it is no address.
    """
    flag, text, port = "--rdzv-endpoint", options.rdzv_endpoint, _C10D_PORT
    if text and options.rdzv_backend not in ("c10d", "static"):
        return ""
    if not text and options.max_nodes > 1 and master_addr:
        flag, port = "--master-addr", _port(options.meet_port or str(_STATIC_PORT), "--master-port")
        text = master_addr
    if not text:
        return ""
    host, given = split(text)
    if not host or " " in host or not _is_host(host):
        raise UsageError(f"argument {flag}: {text!r} is not HOST:PORT")
    return address_of(host, _port(given or str(port), flag))


def _is_host(text: str) -> bool:
    with contextlib.suppress(argparse.ArgumentTypeError):
        return bool(host(text))
    return False


def _port(text: str, flag: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"argument {flag}: {text!r} is no port")
    return int(text)


def split(address: str) -> tuple[str, str]:
    """Host, without the brackets of IPv6, and port, which may be missing."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    host, colon, port = address.rpartition(":")
    return (host, port) if colon and ":" not in host else (address, "")


def local_address(host: str) -> str:
    """The address of this machine that a host name means; empty: it is another machine's, or not known.

    A loopback address only where it means no other one of this machine's.
    """
    loopback = ""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            # Only an address of one's own can be bound.
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.bind((address[0], 0, *address[2:]))
                if not is_loopback(found := str(address[0])):
                    return found
                loopback = loopback or found
    return loopback


def where_to_listen(host: str, own: str, several: bool) -> str:
    """Where the master is to listen that a node hosts at its own address, so that others reach it.

    As torchrun's store: at all addresses, where this machine's name means loopback on it, and another one elsewhere.

    Args:
        host: as the user gave it.
        own: what that means here, see `local_address`.
        several: there may be other nodes.
    """
    return EVERYWHERE if several and is_loopback(own) and not is_only_here(host) else own


def wait_for_name(address: str, seconds: float) -> None:
    """Returns once the host of HOST:PORT has an address: a name may come with the node that it belongs to.

    Raises:
        UsageError: it has none after so many seconds.
    """
    host, _ = host_and_port(address)
    until = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise UsageError(
                    f"{host} has no address ({error.strerror or error}), for {seconds:g} s (--connect-timeout): check "
                    "--rdzv-endpoint or --master-addr"
                ) from error
        time.sleep(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))  # why: nobody tells when a name appears


def answers(address: str, seconds: float = _LOOK_SECONDS) -> bool:
    """Whether somebody listens at HOST:PORT; looks for so many seconds at most."""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection(host_and_port(address), timeout=seconds),
    ):
        return True
    return False
