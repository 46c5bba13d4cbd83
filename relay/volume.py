"""A run's place on the volume: its folders, whether it can be used, and what people are shown there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint import CheckpointDamaged, CheckpointName, Manifest, Unsealed, inspect, verify
from dalsegno.elastic.checkpoint.files import CANNOT, replace_file, write_problem

from .saying import say

__all__ = ("Volume", "damage_of")

# The least bytes that must be free, and what a trial writes.
_LEAST_FREE_BYTES = 64 << 20
_TRIAL_BYTES = 1 << 20
# A small file in a link's place has a path in it, and no more.
_LONGEST_POINTER_BYTES = 4096


class Volume:
    """`<l1_root>/runs/<run_id>`.

    Args:
        l1_root: where the volume is mounted.
        run_id: the run.
        say: takes lines for people.
    """

    def __init__(self, l1_root: Path, run_id: str, say: Callable[[str], None] = say) -> None:
        self.l1_root, self.run_id, self._say = l1_root, run_id, say
        self.root = l1_root / "runs" / run_id
        self.ckpt, self.hf, self.logs = self.root / "ckpt", self.root / "hf", self.root / "logs"
        # The agent's checkpoint directory, and the job's place in it.
        self.store = self.ckpt / ".store"
        self.job = self.store / run_id
        self.events, self.state = self.root / "events.log", self.root / "state.json"
        self._told: set[str] = set()
        # How many bytes of `events.log` were read, and the last milestone's revision in them.
        self._read: tuple[int, str | None] = (0, None)

    def problem(self, *, must_be_mount: bool) -> str:
        """Why it cannot be used, and what to do; empty if it can. Makes its folders."""
        try:
            return self._problem(must_be_mount)
        except OSError as error:
            return f"the volume {self.l1_root} fails: {error.strerror or error}; mount it again"

    def _problem(self, must_be_mount: bool) -> str:
        where = self.l1_root
        try:
            os.fsencode(where)
        except UnicodeEncodeError:
            spelt = sys.getfilesystemencoding()
            return f"l1_root {where}: file names are {spelt} here: set LC_ALL=C.UTF-8, or mount it elsewhere"
        if not where.is_dir():
            return f"l1_root {where} is no directory: mount the volume there"
        if must_be_mount and not os.path.ismount(where):
            return (
                f"l1_root {where} is no mount point: what is saved there goes with the machine; mount the volume, or "
                "say --no-mount-check"
            )
        try:
            folders = ("data", "logs", "ckpt", "hf", "ckpt/_staging", "ckpt/.store")
            for folder in (
                *(self.root / one for one in folders),
                where / "shared/base_models",
                where / "shared/wheelhouse",
            ):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"the volume {where} cannot be written: {error.strerror or error}; mount it for writing"
        if shutil.disk_usage(where).free < _LEAST_FREE_BYTES:
            return f"the volume {where} is full: make at least {_LEAST_FREE_BYTES >> 20} MiB of room, or a larger one"
        if why := write_problem(self.root, _TRIAL_BYTES):
            return f"the volume {where} cannot be written: {why}; make room, or mount it for writing"
        return ""

    def manifests(self) -> list[Manifest | Unsealed]:
        """All checkpoints of the run, newest first; also those without a usable manifest, which may never have had one.

        Raises:
            OSError: the volume cannot be read.
        """
        found: list[Manifest | Unsealed] = []
        for directory in self.run_directories():
            # Files that are missing or cut off are damage, which is looked for byte by byte.
            seen = inspect(directory, check_sizes=False)
            every: list[Manifest | Unsealed] = [*(one for one in seen.sealed if one.source is None), *seen.unsealed]
            found += sorted(every, key=lambda one: CheckpointName.parse(one.name).age, reverse=True)
        return found

    def run_directories(self) -> list[Path]:
        """Directories with checkpoints, the newest run's first."""
        try:
            return sorted((path for path in self.job.iterdir() if path.is_dir()), reverse=True)
        except FileNotFoundError:
            return []

    def directory_of(self, manifest: Manifest) -> Path:
        """Where a checkpoint lies."""
        return self.job / manifest.run_id / manifest.name

    def note_restored(self, digest: str) -> None:
        """Remembers that this checkpoint was restored here, until the run has gone on from it; "": it has.

        Raises:
            OSError: the volume says no.
        """
        replace_file(self.hf / "restored", digest.encode())

    def restored(self) -> str:
        """The digest that was noted; "": none."""
        try:
            return (self.hf / "restored").read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""

    # ---- for people: nothing relies on what follows -----------------------------------------------------------------

    def note(self, event: str, **more: Any) -> None:
        """Adds a line to `events.log`."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **more}) + "\n"
        self._try("events.log", lambda: self._append(line.encode()))

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.events, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            # A line that a full volume has cut off must not spoil the next one.
            whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
            os.write(descriptor, line if whole else b"\n" + line)
        finally:
            os.close(descriptor)

    def write_state(self, state: dict[str, Any]) -> None:
        """Replaces `state.json`, unless it is of a later epoch: a pod that was fenced has nothing to say any more."""

        def write() -> None:
            if self._epoch() <= int(state["epoch"]):
                replace_file(self.state, json.dumps(state, indent=2).encode() + b"\n")

        self._try("state.json", write)

    def _epoch(self) -> int:
        try:
            return int(json.loads(self.state.read_bytes())["epoch"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def last_revision(self) -> str | None:
        """The last milestone's revision, as `events.log` has it. Only what is new there is read."""
        at, found = self._read
        try:
            with open(self.events, "rb") as file:
                if os.fstat(file.fileno()).st_size < at:
                    at = 0  # somebody has emptied it
                file.seek(at)
                text = file.read()
        except OSError:
            return found
        whole = text[: text.rfind(b"\n") + 1]
        for event in _events(whole):
            # A new volume knows no milestone but the one that was restored to it.
            if event.get("event") in ("hf_synced", "restored"):
                found = str(event.get("revision"))
        self._read = at + len(whole), found
        return found

    def show(self, run: str, name: str, step: int, epoch: int) -> None:
        """Points to a committed checkpoint: `ckpt/step_00000040` and `ckpt/latest`; removes pointers to none.

        Not if `state.json` is of a later epoch, see `write_state`.
        """
        if self._epoch() > epoch:
            return
        target = os.path.join(".store", self.run_id, run, name)
        self._try("ckpt/latest", lambda: self._point(self.ckpt / f"step_{step:08d}", target))
        self._try("ckpt/latest", lambda: self._point(self.ckpt / "latest", target))
        self.tidy()

    def tidy(self) -> None:
        """Removes pointers to checkpoints that are gone."""
        self._try("ckpt/step_*", self._unlink_dangling)

    def _unlink_dangling(self) -> None:
        for link in self.ckpt.glob("step_*"):
            if self._is_dangling(link):
                link.unlink(missing_ok=True)

    def _is_dangling(self, link: Path) -> bool:
        if link.is_symlink():
            return not link.exists()
        if not link.is_file() or link.stat().st_size > _LONGEST_POINTER_BYTES:
            return False
        target = link.read_bytes().strip()
        return target.startswith(b".store/") and not os.path.exists(os.path.join(os.fsencode(self.ckpt), target))

    def _point(self, link: Path, target: str) -> None:
        try:
            aside = self.ckpt / "_staging" / f"{link.name}-{os.getpid()}"
            aside.unlink(missing_ok=True)
            aside.symlink_to(target)
            os.replace(aside, link)
        except OSError as error:
            if error.errno not in (*CANNOT, errno.EXDEV):
                raise
            replace_file(link, target.encode() + b"\n")

    def _try(self, what: str, do: Any) -> None:
        """Does what people are shown; that it fails (a full volume) is said once, and stops nothing."""
        try:
            do()
        except OSError as error:
            if what not in self._told:
                self._told.add(what)
                self._say(f"warning: {what} cannot be written: {error}")


def _events(text: bytes) -> Iterator[dict[str, Any]]:
    """The lines of `events.log` that can be read."""
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def damage_of(directory: Path, manifest: Manifest) -> str:
    """What is wrong with a checkpoint, byte by byte; empty if nothing.

    Raises:
        OSError: it cannot be read.
    """
    try:
        verify(directory, manifest)
    except CheckpointDamaged as error:
        return str(error)
    return ""
