"""A process that began alone follows a new one on its way to the training, which says what it calls.

A script that runs alone often leaves out what several ranks do: ``main_process_first`` does nothing there, and many
make a process group only for more than one rank. The first two ranks of a world say each call before they make it, in
the world's store. Nobody listens, unless one of them has stayed from a world of one rank: then all others are new.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dalsegno.protos.contract import Variable

__all__ = ["Announcer", "CannotFollow", "Guide", "repeatable"]

# Seconds for the next word. A new process has its place by then, but may have to read its data first.
PATIENCE_SECONDS = 180.0
# No script meets as often before it trains. One that never trains in a loop of ours says no more then.
MOST_WORDS = 1000
_GROUP, _BARRIER, _OTHER, _TALK = "group", "barrier", "other", "talk"
_ODD = {
    _GROUP: "makes the default process group more than once",
    _TALK: "exchanges data there, or makes other process groups",
    _OTHER: "makes the default process group with a store, an init_method or options of its own",
}


def repeatable(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """What else makes the same group in another process, as JSON has it; None: nothing does.

    Args:
        given: Arguments of ``init_process_group``.
    """
    known = {"backend", "init_method", "timeout", "rank", "world_size", "device_id"}
    others = {name for name, value in given.items() if name not in known and value not in (None, "")}
    if others or not str(given.get("init_method") or "env://").startswith("env://"):
        return None
    said: dict[str, Any] = {}
    if given.get("backend") is not None:
        said["backend"] = str(given["backend"])
    if isinstance(given.get("timeout"), timedelta):
        said["timeout"] = given["timeout"].total_seconds()
    device = given.get("device_id")
    if device is not None:
        device = torch.device(device)
        if device.index != int(os.environ.get("LOCAL_RANK", "0")):
            return None
        said["device_id"] = device.type
    return said


class CannotFollow(RuntimeError):
    """This process cannot take part in its world. A new one in its place can."""


class Announcer:
    """Says what this process calls, until it trains."""

    def __init__(self) -> None:
        self._said = 0
        self._store: Any = None

    def group(self, given: Mapping[str, Any]) -> None:
        """The group is made."""
        if self._is_heard():
            said = repeatable(given)
            self._say(_OTHER if said is None else _GROUP, said)

    def talk(self) -> None:
        """Its ranks do what nobody can follow."""
        self._say(_TALK)

    def barrier(self) -> None:
        """Its ranks meet."""
        self._say(_BARRIER)

    def stage(self, name: str) -> None:
        """They have come so far."""
        self._say(name)

    def end(self) -> None:
        """That was all."""
        self._said, self._store = MOST_WORDS, None

    def _is_heard(self) -> bool:
        if self._said >= MOST_WORDS or not os.environ.get(Variable.SOCKET):
            return False
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and int(os.environ["RANK"]) < 2

    def _say(self, call: str, given: Any = None) -> None:
        if not self._is_heard():
            return
        # Who has lost the store will not meet the others either, and then says so.
        with contextlib.suppress(RuntimeError):
            self._store = self._store or _store()
            self._store.set(f"{os.environ['RANK']}/{self._said}", json.dumps([call, given]))
            self._said += 1


class Guide:
    """What the new process says that this one follows. It is of the first two ranks."""

    def __init__(self) -> None:
        self._store, self._heard = _store(), 0
        self._rank = 1 if os.environ["RANK"] == "0" else 0

    def until(self, stage: str) -> tuple[Mapping[str, Any] | None, int]:
        """Does as it does, up to there. Returns how the group was made, and how many barriers there were. Collective.

        Raises:
            CannotFollow: It does what nobody can do once more.
        """
        made, barriers = None, 0
        while True:
            call, given = self._hear(stage)
            if call == stage:
                return made, barriers
            if call == _BARRIER:
                barriers += 1
                dist.barrier()
            elif call == _GROUP and made is None:
                made = self._make(_arguments(given))
            else:
                raise CannotFollow(_line(_ODD.get(call, f"is at {call!r}, where it should come to {stage!r}")))

    def _make(self, given: dict[str, Any]) -> dict[str, Any]:
        if dist.is_initialized():
            return given
        try:
            dist.init_process_group(**given)
        except Exception as error:
            raise CannotFollow(_line(f"makes the default process group as it cannot be made here ({error})")) from error
        return given

    def _hear(self, stage: str) -> tuple[str, Any]:
        name = f"{self._rank}/{self._heard}"
        try:
            self._store.wait([name], timedelta(seconds=PATIENCE_SECONDS))
        except RuntimeError as error:
            raise CannotFollow(_line(f"is not at {stage!r} after {PATIENCE_SECONDS:g} s")) from error
        self._heard += 1
        call, given = json.loads(bytes(self._store.get(name)))
        return call, given


def _line(where: str) -> str:
    return (
        f"this process began alone, has stayed, and cannot follow a new one to the training, which {where}: before "
        "it, with stay=True, ranks make the default process group and meet at barriers, nothing else. A new process "
        "takes its place"
    )


def _arguments(said: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(said)
    if "timeout" in made:
        made["timeout"] = timedelta(seconds=made["timeout"])
    if "device_id" in made:
        made["device_id"] = torch.device(made["device_id"], int(os.environ["LOCAL_RANK"]))
    return made


def _store() -> Any:
    """A connection to the world's store, with names that nothing else has."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=PATIENCE_SECONDS))))
    return dist.PrefixStore(f"dalsegno/way/{os.environ[Variable.EPOCH]}", store)  # type: ignore[attr-defined]
