"""Checks what a worker says. Pure: numbers within bounds, names of checkpoints, texts of one line.

A message that breaks a rule here was not sent by a worker of ours, so the connection that brought it is cut.
"""

from __future__ import annotations

import math

from dalsegno.elastic.checkpoint import is_checkpoint_name
from dalsegno.protos import worker_pb2
from dalsegno.protos.limits import MOST
from dalsegno.protos.text import SHA256

__all__ = ["MOST", "checked", "one_line"]

# The most seconds of one step, save or evaluation: 30 days.
_LONGEST_SECONDS = 30 * 86400.0
# The most characters of a text that people are shown.
_TEXT = 1000


def checked(message: worker_pb2.ToAgent, rank: int, *, seals: bool = False) -> worker_pb2.ToAgent:
    """This rank's message in the form that the agent uses: each text cut to one printable line.

    `seals`: the agent has asked its ranks to seal what others left, so the sealing rank need not be rank 0.

    Raises:
        ValueError: no worker of this version sends that; the text names the field.
    """
    body = message.WhichOneof("body")
    match body:
        case "progress":
            _bounded(message.progress.step, "step")
            _bounded(message.progress.beats, "beats")
            _duration(message.progress.seconds, "seconds")
            _duration(message.progress.longest, "longest")
        case "saving":
            _name(message.saving.name)
            _bounded(message.saving.bytes, "bytes")
            _bounded(message.saving.written, "written")
            message.saving.problem = one_line(message.saving.problem)
        case "sealed":
            if rank != 0 and not seals and not message.sealed.in_memory:
                raise ValueError(f"rank {rank} says that it sealed a checkpoint, which rank 0 does")
            _reference(message.sealed.name, message.sealed.digest)
            _bounded(message.sealed.step, "step")
            _duration(message.sealed.seconds, "seconds")
        case "save_failed":
            # A save can fail before it has a name.
            _name(message.save_failed.name, optional=True)
            _bounded(message.save_failed.step, "step")
            message.save_failed.reason = one_line(message.save_failed.reason)
        case "draining":
            _bounded(message.draining.step, "step")
        case "keeping":
            _bounded(message.keeping.step, "step")
        case "drained":
            if message.drained.name or message.drained.digest:
                _reference(message.drained.name, message.drained.digest)
            _bounded(message.drained.step, "step")
        case "finished":
            _bounded(message.finished.step, "step")
        case "bad_checkpoint":
            bad = message.bad_checkpoint
            _reference(bad.name, bad.digest)
            bad.file, bad.message = one_line(bad.file), one_line(bad.message)
        case "refused":
            message.refused.message = one_line(message.refused.message)
    return message


def one_line(text: str) -> str:
    """The text in a form for a log or a terminal: one line, without control characters, not too long."""
    line = " ".join(text[: 4 * _TEXT].split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    return line if len(line) <= _TEXT else line[: _TEXT - 1] + "…"


def _bounded(number: int, what: str) -> None:
    if number > MOST:
        raise ValueError(f"{what} is {number}, at most {MOST} is possible")


def _duration(seconds: float, what: str) -> None:
    if not (math.isfinite(seconds) and 0 <= seconds <= _LONGEST_SECONDS):
        raise ValueError(f"{what} is {seconds} seconds")


def _name(name: str, optional: bool = False) -> None:
    if not is_checkpoint_name(name) and not (optional and not name):
        raise ValueError(f"{one_line(name)[:80]!r} is not the name of a checkpoint")


def _reference(name: str, digest: str) -> None:
    _name(name)
    if SHA256.fullmatch(digest) is None:
        raise ValueError(f"{one_line(digest)[:80]!r} is not the digest of a checkpoint")
