"""`dlrover-master`: the command line of the master."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import select
import signal
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dalsegno.protos import processes
from dalsegno.protos.addresses import ADDRESS, EVERYWHERE, host_and_port
from dalsegno.protos.contract import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE, Variable
from dalsegno.protos.failing import fails_now
from dalsegno.protos.log_file import LogFile
from dalsegno.protos.options import Parser, UsageError, file_path, job_id, nnodes, seconds
from dalsegno.protos.shortage import prove_room, shortage
from dalsegno.protos.text import one_line

from .http.edge import Edge
from .leadership.candidate import Candidate, SameAddress
from .leadership.leader_key import LeaderKey
from .record.descriptors import raise_limit
from .record.etcd_calls import EtcdFiles
from .record.etcd_store import EtcdStore, open_client
from .record.store import SqliteStore, Store, StoreDamaged, StoreError, StoreUnavailable, open_store
from .server.auth import AuthError, check_exposure, is_loopback, read_token
from .server.garbage import collect_rarely
from .server.job_brain import JobBrain
from .server.lifetime import Lifetime
from .server.server import BindError, ControlServer, ServerOptions
from .server.standard_error import StderrHandler, say_last
from .server.watchdog import HANG_TIMEOUT_SECONDS, Watchdog
from .serving import STOP, print_line, run, say_end, say_if_loopback, stopping, tls_files
from .waiting import StartEnded, StoreWait

__all__ = ("main",)

log = logging.getLogger(__name__)

# The most characters of one message in the log.
LONGEST_MESSAGE = 4000
# Seconds between the tries of an embedded master at a file that cannot be read now. The agent that starts it waits for
# 60 s, and each try may wait for a lock.
FILE_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)
# Seconds that a member of etcd, and all of them, have for an answer about who leads: less than the key lasts.
KEY_CALL_SECONDS, KEY_PATIENCE_SECONDS = 1.0, 2.0
# Addresses to listen on that nobody can go to.
ANY_HOST = (EVERYWHERE, "::", "")
# How many damaged stores are kept for a person to look at.
MOST_PUT_ASIDE = 9

# Signals that may be sent to all processes of a node, for instance by Slurm.
EMBEDDED_STOP = (*STOP, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the master; returns its exit code.

    0: stopped or done; 1: failed, also where its store cannot be read or written now; 2: bad usage; 3: superseded.
    """
    try:
        options = _parser().parse_args(arguments)
        _check_relay(options)
        _set_up_logging(options.log_file, options.job_id or "commander")
        raise_limit()
        prove_room()
        collect_rarely()
        # The loop hears signals once it serves, or waits for etcd. Asyncio would only note a SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not options.embedded:
            # Whoever started it may have blocked them; who starts an embedded one has, until it can serve.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        return asyncio.run(_serve(options))
    except StartEnded:
        log.info("told to stop before the store was there")
        return EXIT_FINISHED
    except StoreUnavailable as error:
        # As with a full disk, which passes. After EXIT_USAGE supervisors start nobody again.
        say_last(f"dlrover-master: {error}")
        return EXIT_FAILED
    except (UsageError, AuthError, BindError, StoreError) as error:
        say_last(f"dlrover-master: {error}")
        return EXIT_FAILED if fails_now(error) else EXIT_USAGE
    except (OSError, RuntimeError, MemoryError) as error:
        if not (why := shortage(error)):
            raise
        say_last(f"dlrover-master: it cannot go on: {why}")
        return EXIT_FAILED


async def _serve(options: argparse.Namespace) -> int:
    token = read_token(options.token_file, os.environ.get(Variable.TOKEN, ""))
    server_options = ServerOptions(
        host=options.host,
        port=options.port,
        token=token,
        tls=tls_files(options),
        insecure=options.insecure,
        embedded=options.embedded,
    )
    check_exposure(options.host, token, options.insecure)
    say_if_loopback(options.host)
    if options.relay:
        return await _command(options, server_options)
    _check_several(options)
    store, remark, start = await _opened(options)
    is_gone = partial(processes.is_gone, here=processes.own_process())
    brain = JobBrain(options.job_id, options.nnodes, embedded=options.embedded, is_gone=is_gone, unix=time.time)
    server = ControlServer(options.job_id, brain, store, server_options)
    edge = None
    try:
        # Bind both ports before the start: a master without its port must not supersede one that serves well.
        edge = _edge(server, options, token)
        if options.embedded and _is_unwanted():
            log.info("the process that started this master is gone: ending, because nobody would find it")
            return EXIT_FINISHED
        if start is not None:
            # Now, and not when it has taken the job over from a master that serves well.
            brain.check(await start.record())
        await (server.listen() if _is_several(options) else server.start())
        if edge is not None:
            edge.start()
        watchdog = asyncio.create_task(Watchdog(options.hang_timeout, options.log_file).run())
        try:
            if start is not None:
                return await _stand(server, edge, options, store, start)
            lifetime = None
            if options.embedded:
                is_there = store.is_there if isinstance(store, SqliteStore) else lambda: True
                lifetime = Lifetime(server, options.idle_timeout, options.linger, is_there)
            _hear_signals(server, lifetime)
            _announce(server, edge, remark)
            return await run(server, lifetime)
        finally:
            watchdog.cancel()
    finally:
        if edge is not None:
            await edge.close()
        await server.close()


def _check_relay(options: argparse.Namespace) -> None:
    """Checks what goes together with --relay, and what without it. Raises UsageError."""
    if not options.relay:
        if options.job_id is None:
            raise UsageError("--job-id is missing: the job that this master serves (or --relay run.yaml)")
        return
    for name in ("job_id", "nnodes", "embedded", "advertise"):
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} and --relay do not go together: the run's file says what the job is")
    if options.http_port is None:
        raise UsageError("--relay needs --http-port: pods and foreign workers ask there")


async def _command(options: argparse.Namespace, server_options: ServerOptions) -> int:
    """Serves the runs of --relay."""
    admin = read_token(None, os.environ.get(Variable.ADMIN_TOKEN, ""), Variable.ADMIN_TOKEN)
    try:
        from .commander import Commander
    except ImportError as error:
        raise UsageError(f"--relay needs the extra `relay`: pip install 'dalsegno[relay]' ({error})") from error
    # The loop hears signals once it serves.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    commander = Commander(options.relay, options.store, server_options, wait=lambda store: store.load())
    watchdog = asyncio.create_task(Watchdog(options.hang_timeout, options.log_file).run())
    try:
        return await commander.serve(options.http_port, admin)
    finally:
        watchdog.cancel()


def _is_several(options: argparse.Namespace) -> bool:
    """Whether it is one of several masters: then a key beside the record says which of them leads."""
    return str(options.store).startswith("etcd://")


def _check_several(options: argparse.Namespace) -> None:
    """Checks what only one of several masters needs. Raises UsageError."""
    if not _is_several(options):
        if options.advertise:
            raise UsageError(
                f"--advertise has no effect with --store {options.store}: only masters over etcd"
                " send agents to one another"
            )
    elif options.embedded:
        raise UsageError("--embedded and --store etcd:// do not go together: an embedded master is one alone")
    elif not options.advertise and options.host in ANY_HOST:
        raise UsageError(
            f"--host {options.host} is no address to which another master could send agents: name one that they"
            " reach with --advertise HOST:PORT"
        )


async def _stand(
    server: ControlServer, edge: Edge | None, options: argparse.Namespace, store: Store, start: StoreWait
) -> int:
    """Leads, or stands by, until it is told to stop."""
    address = server.address
    if options.advertise is not None:
        host, port = options.advertise
        address = f"{host}:{port or host_and_port(server.address)[1]}"
    hosts = options.store.partition("://")[2]
    client = open_client(
        hosts, _etcd_files(options) or EtcdFiles(), call_seconds=KEY_CALL_SECONDS, patience_seconds=KEY_PATIENCE_SECONDS
    )
    key = LeaderKey(client, options.job_id)
    server.advertised = address
    candidate = Candidate(key, server, address, said=lambda generation: _announce(server, edge, ""))

    def stop() -> None:
        candidate.stop()
        # A turn is stored to its end. Taking the record over from a slow etcd may take minutes, and is given up.
        if not server.leads and isinstance(store, EtcdStore):
            store.give_up()

    loop = asyncio.get_running_loop()
    for signum in stopping():
        loop.add_signal_handler(signum, stop)
    start.check()
    _print({"address": server.address, "advertised": address, "leads": False}, edge)
    try:
        await candidate.run()
    except StoreError as error:
        say_end(error)
        return EXIT_USAGE if isinstance(error, SameAddress) else EXIT_FAILED
    except Exception:
        log.exception("the master failed")
        raise
    finally:
        key.close()
    return EXIT_FINISHED


async def _opened(options: argparse.Namespace) -> tuple[Store, str, StoreWait | None]:
    """The store as `_open` has it; one of several masters waits for it, and hears signals until `_stand` does.

    Raises StoreError, StartEnded.
    """
    if not _is_several(options):
        return *_open(options), None
    store = open_store(options.store, options.job_id, _etcd_files(options))
    assert isinstance(store, EtcdStore)
    try:
        start = StoreWait(store)
        await start.record()
    except BaseException:
        store.close()
        raise
    return store, "", start


def _open(options: argparse.Namespace) -> tuple[Store, str]:
    """The store, and what a person must hear about it; empty: nothing.

    An embedded master puts a damaged store aside, because nobody would be there to move the file. Registrations and
    manifests bring back what it knew. Raises StoreError.
    """
    try:
        return _open_readable(options), ""
    except StoreDamaged as error:
        if not options.embedded:
            raise
        reason = str(error).partition(";")[0]
    remark = f"{reason}: put aside as {_put_aside(options.store).name}; the job is found again from its checkpoints"
    log.warning("%s", remark)
    return _open_sound(options), remark


def _open_readable(options: argparse.Namespace) -> Store:
    """As `_open_sound`. An embedded master looks again for some seconds: its agent's start would end with it."""
    for pause in FILE_PAUSES_SECONDS if options.embedded else ():
        try:
            return _open_sound(options)
        except StoreUnavailable as error:
            log.warning("%s; trying again", error)
        time.sleep(pause)  # why: nobody tells when the disk can be read again
    return _open_sound(options)


def _open_sound(options: argparse.Namespace) -> Store:
    """The store, after all of it was read. Raises StoreError."""
    store = open_store(options.store, options.job_id, _etcd_files(options))
    try:
        store.load()
    except BaseException:
        store.close()
        raise
    return store


def _etcd_files(options: argparse.Namespace) -> EtcdFiles | None:
    """Those that were given; None: none were."""
    given = EtcdFiles(options.etcd_ca, options.etcd_cert, options.etcd_key)
    return given if given != EtcdFiles() else None


def _put_aside(url: str) -> Path:
    """Gives a damaged store's file another name, one of a few. Raises StoreError."""
    path = Path(url.partition("://")[2][1:])
    names = [path.with_name(f"{path.name}.damaged-{number}") for number in range(1, MOST_PUT_ASIDE + 1)]
    aside = next((name for name in names if not os.path.lexists(name)), names[-1])
    try:
        # First the files from which SQLite would restore into the next file of that name.
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}-journal", f"{aside}-journal")
        os.replace(path, aside)
    except OSError as error:
        raise StoreError(f"the damaged store {path} cannot be put aside: {error.strerror or error}") from error
    return aside


def _edge(server: ControlServer, options: argparse.Namespace, token: str | None) -> Edge | None:
    if options.http_port is None:
        return None
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
        raise UsageError(f"--http-port needs the extra `http`: pip install 'dalsegno[http]' (no {missing[0]})")
    try:
        return Edge(
            server,
            options.host,
            options.http_port,
            token,
            loopback=is_loopback(options.host),
            tls=tls_files(options),
            stands_by=lambda: _is_several(options) and not server.leads,
        )
    except OSError as error:
        raise UsageError(
            f"cannot listen on {options.host} port {options.http_port} (--http-port): {error.strerror or error}"
        ) from error


def _announce(server: ControlServer, edge: Edge | None, remark: str) -> None:
    said: dict[str, object] = {"address": server.address, "generation": server.driver.generation}
    if remark:
        said["remark"] = remark
    _print(said, edge)


def _print(said: dict[str, object], edge: Edge | None) -> None:
    print_line(said if edge is None else said | {"http": edge.address})


def _is_unwanted() -> bool:
    """Whether nobody is left to read the first line and to write the claim by which agents find this master.

    It would supersede the next master, which serves them.
    """
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _hear_signals(server: ControlServer, lifetime: Lifetime | None) -> None:
    """Handles signals: a service stops; an embedded master serves its agents, which may be saving, to their end."""
    loop = asyncio.get_running_loop()

    def heard(signum: signal.Signals) -> None:
        log.info("%s: %s", signum.name, "stopping" if lifetime is None else "ending as soon as no agent is left")
        server.stop() if lifetime is None else lifetime.hurry()

    for signum in stopping() if lifetime is None else EMBEDDED_STOP:
        loop.add_signal_handler(signum, heard, signum)
    # The process that started an embedded master has blocked them until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EMBEDDED_STOP)


class _Formatter(logging.Formatter):
    """One line for each message, whatever others have put into it; tracebacks keep their lines."""

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message, LONGEST_MESSAGE)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join("    " + one_line(line) if line.startswith(" ") else one_line(line) for line in lines)


def _set_up_logging(log_file: Path | None, job_id: str) -> None:
    """The master's own log; without --log-file only what needs attention, on stderr."""
    try:
        handler = StderrHandler() if log_file is None else LogFile(log_file, program="dlrover-master")
    except OSError as error:
        raise UsageError(f"cannot write the log file {log_file}: {error.strerror or error}") from error
    handler.setFormatter(_Formatter(f"%(asctime)sZ %(levelname)s [{job_id}/master] %(message)s"))
    root = logging.getLogger("dalsegno")
    root.handlers[:] = [handler]
    # What libraries warn of, which else goes to stderr at once: whoever logs would wait for who reads that.
    logging.lastResort = handler
    root.setLevel(logging.WARNING if log_file is None else logging.INFO)


def _advertised(text: str) -> tuple[str, int]:
    """Host, with brackets if it is an IPv6 address, and port; 0: none was given."""
    match = ADDRESS.fullmatch(text)
    if match is None or match[1].strip("[]") in ANY_HOST or not 0 <= int(match[2] or 0) <= 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address to go to: write HOST:PORT, or HOST for the port of --port"
        )
    return match[1], int(match[2] or 0)


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 (any free one) to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dlrover-master", description="The master of one elastic training job.", allow_abbrev=False)
    add = parser.add_argument
    add("--job-id", type=job_id, help="the job that this master serves")
    text = "a run that pre-emptible machines carry on one after another (repeatable), instead of --job-id"
    add("--relay", type=file_path, action="append", default=[], metavar="FILE", help=text)
    text = "where the job's state is kept: sqlite:///FILE (four slashes if absolute), or etcd://HOST:PORT,HOST:PORT"
    add("--store", required=True, help=text)
    add(
        "--etcd-ca",
        type=file_path,
        metavar="FILE",
        help="the authority of etcd's certificates (PEM); without it no TLS",
    )
    add("--etcd-cert", type=file_path, metavar="FILE", help="this master's certificate for etcd (PEM)")
    add("--etcd-key", type=file_path, metavar="FILE", help="its key (PEM)")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=_port, default=0, help="port to listen on; 0 (default): any free one, printed when serving")
    text = "with etcd: where agents reach this master, for other masters to send them here (default: --host and --port)"
    add("--advertise", type=_advertised, metavar="HOST[:PORT]", help=text)
    add("--http-port", type=_port, metavar="PORT", help="the job over HTTP: page, /metrics, /healthz, /readyz, /api/v1")
    add("--nnodes", type=nnodes, metavar="MIN:MAX", help="nodes of the job (default: what the first agent says)")
    add("--node_num", dest="nnodes", type=nnodes, metavar="N", help="as --nnodes N (DLRover's name)")
    add("--platform", help="accepted for DLRover's command lines; no effect")
    for flag, text in (
        ("--token-file", f"file with the token that agents must show (or {Variable.TOKEN}: the token itself)"),
        ("--tls-cert", "the server's certificate chain (PEM)"),
        ("--tls-key", "its key (PEM)"),
        ("--tls-ca", "let in only clients with a certificate of this authority (PEM)"),
    ):
        # Not the agents' PET_... variables, for which --tls-ca is the authority of the master.
        variable = f"{Variable.MASTER_FLAG}{flag[2:].upper().replace('-', '_')}"
        add(
            flag,
            type=file_path,
            metavar="FILE",
            default=os.environ.get(variable) or None,
            help=f"{text}; also {variable}",
        )
    add("--insecure", action="store_true", help="listen beyond this machine without a token")
    add("--log-file", type=file_path, metavar="FILE", help="write the log there")
    text = (
        "end, with all stacks in the log, when nothing has moved in this process for S seconds (default: 300; 0: never)"
    )
    add("--hang-timeout", type=seconds, default=HANG_TIMEOUT_SECONDS, metavar="S", help=text)
    add("--embedded", action="store_true", help="end with the job, or when no agent is left (dlrover-run's own master)")
    add("--idle-timeout", type=seconds, default=30.0, metavar="S", help="with --embedded: end after S seconds alone")
    add("--linger", type=seconds, default=10.0, metavar="S", help="with --embedded: stay S seconds after the job's end")
    return parser
