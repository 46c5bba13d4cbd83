"""What every kind of master does around its server: how it ends, where its certificates are, its first line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket

from dalsegno.protos.addresses import is_loopback, is_only_here
from dalsegno.protos.contract import EXIT_FAILED, EXIT_FINISHED, MASTER_SUPERSEDED
from dalsegno.protos.options import UsageError

from .record.store import StoreError, Superseded
from .server.auth import TlsFiles
from .server.lifetime import Lifetime
from .server.server import ControlServer
from .server.standard_error import StderrHandler, say_last

__all__ = ("STOP", "print_line", "run", "say_end", "say_if_loopback", "stopping", "tls_files")

log = logging.getLogger(__name__)

STOP = (signal.SIGTERM, signal.SIGINT)


def stopping() -> tuple[signal.Signals, ...]:
    """The signals that end a master of its own well: its terminal's end, too, unless it was started to outlive that."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return STOP if outlives else (*STOP, signal.SIGHUP)


async def run(server: ControlServer, lifetime: Lifetime | None) -> int:
    """Serves until it is told to stop; returns the exit code."""
    watch = None if lifetime is None else asyncio.create_task(lifetime.run())
    try:
        await server.run()
    except Superseded as error:
        # Not this process's error: it was stopped or cut off while the job got another master.
        if lifetime is not None:
            log.warning("%s", error)
            return EXIT_FINISHED
        say_end(error)
        return MASTER_SUPERSEDED
    except StoreError as error:
        say_end(error)
        return EXIT_FAILED
    except Exception:
        log.exception("the master failed")
        raise
    finally:
        if watch is not None:
            watch.cancel()
    return EXIT_FINISHED


def say_end(error: StoreError) -> None:
    """Says why this master ends: one line on stderr, and one in its log where that is elsewhere."""
    if not any(isinstance(handler, StderrHandler) for handler in logging.getLogger("dalsegno").handlers):
        log.error("%s", error)
    say_last(f"dlrover-master: {error}")


def say_if_loopback(host: str) -> None:
    """Warns where `--host` is a name that means only loopback on this machine, as Debian has it for its own one.

    A name like localhost is meant so; one without an address has an error of its own.
    """
    with contextlib.suppress(OSError, UnicodeError):  # the second one of a name like a..b
        found = [str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        if all(map(is_loopback, found)) and not is_only_here(host):
            log.warning(
                "--host %s means %s on this machine, so only its own nodes reach the master: for others give"
                " --host 0.0.0.0, or an address of this machine",
                host,
                found[0],
            )


def print_line(said: dict[str, object]) -> None:
    """The line that says where it serves."""
    try:
        print(json.dumps(said), flush=True)
    except OSError as error:
        # What is left of the line must not fail once more at the end of this process.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The process that started an embedded master may be gone already.
        if not isinstance(error, BrokenPipeError):
            log.warning("standard output cannot be written, the master serves all the same: %s", error)


def tls_files(options: argparse.Namespace) -> TlsFiles | None:
    """The files that were given; None: none were. Raises UsageError."""
    if options.tls_cert is None and options.tls_key is None and options.tls_ca is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise UsageError("--tls-cert and --tls-key belong together (--tls-ca is for client certificates)")
    return TlsFiles(options.tls_cert, options.tls_key, options.tls_ca)
