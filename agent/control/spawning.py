"""Starts an embedded master as a process of its own, and makes the token that it asks for."""

from __future__ import annotations

import base64
import logging
import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from dalsegno.elastic.checkpoint.files import publish
from dalsegno.protos import control_pb2
from dalsegno.protos.addresses import EVERYWHERE, address_of, host_and_port
from dalsegno.protos.contract import Variable
from dalsegno.protos.credentials import SHORTEST_TOKEN, is_token
from dalsegno.protos.own_program import command_of
from dalsegno.protos.shortage import crowded, file_limit, starting
from dalsegno.protos.text import object_in, one_line

from ..processes.keeper import DEAF_TO
from ..processes.signals import held_back
from ..storage.private import open_private, put_aside, read_private

__all__ = [
    "COMMAND",
    "LOOPBACK",
    "TOKEN",
    "MasterError",
    "SpawnedMaster",
    "TokenLostError",
    "events_on_record",
    "is_made",
    "last_words",
    "make_token",
    "read_token",
    "start_master",
    "with_limit",
]

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", 0)
COMMAND = command_of("dalsegno.master")
# What a failed write says where a file may not grow.
_OF_A_LIMIT = ("I/O error", "File too large")
# Its store and its log, in the job's private directory.
_STORE, _LOG = "master.sqlite", "master.log"
# There, too: written once.
TOKEN = "token"
# Seconds.
_START_TIMEOUT_SECONDS = 60.0
_READ_TIMEOUT_SECONDS = 30.0
# The most bytes that others print before the master's own line: a site's `sitecustomize`, libraries.
_MOST_BYTES_BEFORE = 1 << 20
# The most bytes of its log that are read for its last line.
_MOST_LOG_BYTES = 1 << 16


class MasterError(Exception):
    """No master can be reached or started; one line that says why and what to change."""


class TokenLostError(ValueError):
    """There is no token, or none that could be sent."""


def read_token(directory: Path) -> str:
    """The token that all agents of the job share.

    Raises:
        TokenLostError: there is none, or the file does not hold one.
        NotPrivateError: others may know it.
        OSError: it cannot be read now.
    """
    path = directory / TOKEN
    try:
        token = read_private(path, secret=True).decode("ascii", errors="replace").strip()
    except FileNotFoundError as error:
        raise TokenLostError(f"there is no {path}") from error
    if len(token) < SHORTEST_TOKEN or not is_token(token):
        raise TokenLostError(f"{path} is damaged")
    return token


def make_token(directory: Path) -> str:
    """Makes a token if there is none, and puts a damaged one aside. Returns what to tell people; empty: nothing.

    The caller holds the lock for starting a master.

    Raises:
        NotPrivateError, OSError: see `read_token`.
    """
    path, remark = directory / TOKEN, ""
    try:
        read_token(directory)
        return ""
    except TokenLostError as error:
        if os.path.lexists(path):
            remark = f"{error}: put aside as {put_aside(path).name}; the job has a new one"
    aside = directory / f"token.{secrets.token_hex(8)}"
    with open(open_private(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        publish(aside, path)
    finally:
        aside.unlink()
    return remark


@dataclass(frozen=True)
class SpawnedMaster:
    """A master that serves: its process, its first line, and how many bytes its log had before."""

    process: subprocess.Popen[bytes]
    address: str
    generation: int
    remark: str
    log_begin: int = 0


def events_on_record(directory: Path, job_id: str) -> control_pb2.EventsReply:
    """What happened to a job whose own master is gone, as far as it is on its record; nothing if that is not read.

    Args:
        directory: private to the job.
        job_id: the job's.
    """
    command = [*command_of(f"{COMMAND[-1]}.on_record"), str(directory / _STORE), job_id]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_READ_TIMEOUT_SECONDS)
        if done.returncode:
            logger.warning("%s", done.stderr.decode(errors="replace").strip())
        lines = done.stdout.decode(errors="replace").splitlines()
        said = next(filter(None, (object_in(line, "events") for line in lines)), {"events": ""})
        return control_pb2.EventsReply.FromString(base64.b64decode(str(said["events"])))
    except (OSError, subprocess.TimeoutExpired, DecodeError, ValueError) as error:
        logger.warning("the record in %s cannot be read: %s", directory, error)
        return control_pb2.EventsReply()


def start_master(
    directory: Path, job_id: str, command: Sequence[str] = COMMAND, listen: tuple[str, int] = LOOPBACK
) -> SpawnedMaster:
    """Starts a master for a job whose token exists.

    Args:
        directory: private to the job; it has the master's store and log.
        job_id: the job's.
        command: the program, without the master's arguments.
        listen: the address and the port where it serves; `EVERYWHERE`: at all of them; 0: any port.

    Raises:
        MasterError: it did not start.
        OSError: its log cannot be written, or no process can be made.
    """
    log = directory / _LOG
    # Not --nnodes: agents bring settings, and an agent that disagrees must still be able to start the job's master.
    words = [
        *command,
        *("--host", listen[0], "--port", str(listen[1]), "--job-id", job_id),
        *("--store", f"sqlite:///{directory / _STORE}"),
        *("--token-file", str(directory / "token"), "--log-file", str(log), "--embedded"),
    ]
    # It outlives this agent: no lifeline, no terminal, no output but its one line. It does not read
    # the variables of a master that is a service.
    ours = (Variable.LIFELINE, Variable.MASTER_FLAG)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    # From its first moment on it outlives a notice that all processes of the node are given.
    with open(open_private(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as errors, held_back(DEAF_TO):
        begin = errors.seek(0, os.SEEK_END)
        with starting("the embedded master"):
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=environment,
                cwd="/",
            )
    said, printed = _first_words(process)
    try:
        address = str(said["address"])
        if listen[0] == EVERYWHERE:  # which nobody can go to
            address = address_of(LOOPBACK[0], host_and_port(address)[1])
        given = address, int(said["generation"]), str(said.get("remark", ""))
        return SpawnedMaster(process, *given, begin)
    except (ValueError, KeyError, TypeError):
        process.kill()
        process.wait()
        why = _last_line(log, begin) or one_line(printed) or "it said nothing"
        hint = crowded() or _limit_behind(why)
        raise MasterError(f"the embedded master did not start: {why} (log: {log}){hint and '; '}{hint}") from None


def is_made(directory: Path) -> bool:
    """Whether a job's directory is there, with what its master has in it."""
    return any((directory / name).exists() for name in (TOKEN, _STORE))


def last_words(directory: Path, begin: int) -> str:
    """The last line in the log of a job's master since it had so many bytes; empty: none, or it cannot be read."""
    try:
        log = directory / _LOG
        return _last_line(log, begin if log.stat().st_size >= begin else 0)
    except OSError as error:
        logger.warning("the master's log cannot be read: %s", error)
        return ""


def with_limit(why: str) -> str:
    """Why a write failed; and that files may not grow here as they like, where that may be the reason."""
    hint = _limit_behind(why)
    return f"{why}; {hint}" if hint else why


def _limit_behind(why: str) -> str:
    return file_limit() if any(words in why for words in _OF_A_LIMIT) else ""


def _first_words(process: subprocess.Popen[bytes]) -> tuple[dict[str, Any], str]:
    """What it says once it serves, among what others print; nothing if it never does. And the last line printed."""
    assert process.stdout is not None
    deadline, begun, count, line = time.monotonic() + _START_TIMEOUT_SECONDS, b"", 0, ""
    with selectors.DefaultSelector() as selector, process.stdout:
        selector.register(process.stdout, selectors.EVENT_READ)
        while count < _MOST_BYTES_BEFORE and selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 1 << 16)
            count += len(piece)
            *lines, begun = (begun + piece).split(b"\n")
            for line in (one.decode(errors="replace") for one in lines if one.strip()):
                if (said := object_in(line, "generation")) and "address" in said:
                    return said, line
            if not piece:
                break
        else:
            process.kill()  # before its output is closed: of that it would complain in the log
            begun = b"" if line else begun  # cut off anywhere
    return {}, begun.decode(errors="replace") or line


def _last_line(log: Path, begin: int) -> str:
    """The last words of a master's log since it had so many bytes; empty: there are none."""
    if log.stat().st_size < begin:
        # It began a new file; the interpreter's last words still go to the file before.
        log = log.with_name(f"{log.name}.1")
    with open(open_private(log, os.O_RDONLY), "rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - _MOST_LOG_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else ""
