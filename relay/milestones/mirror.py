"""The mirror: a process beside the agent that makes milestones of a run's committed checkpoints.

The pod's entry starts it as a module. It may be killed at any moment and started again: what is pending lies in the
``hf`` directory, what was uploaded on the hub, and what counts at the Commander. It never holds up the training: it has
the lowest priority, and nobody waits for it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import get_native_id
from typing import Any

from dalsegno.elastic.checkpoint import CheckpointDamaged, CheckpointName, Manifest, Tracked, is_checkpoint_name
from dalsegno.elastic.checkpoint.files import replace_file
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.protos.options import UsageError, file_path
from dalsegno.protos.run_file import RunFile, commander_url, read_run_file
from dalsegno.protos.text import one_line
from dalsegno.protos.yaml_text import InputRefused

from . import due
from .access import Access, add_tls, secret
from .alone import alone
from .child import Outcome, Transfer, patience
from .commander_client import Away, CommanderClient, Milestone
from .console import PodConsole
from .metrics_file import MetricsFile
from .snapshot import Snapshot, freeze, snapshots

__all__ = ("main",)

POLL_SECONDS = 2.0
# How often the Commander is asked for the head, and told again of a milestone that it has not heard of.
ASK_SECONDS = 15.0
NOTE_SECONDS = 60.0
NICE = 19
_LAST_LINES_SECONDS = 0.2


class Stopped(BaseException):
    """SIGTERM came."""


@dataclass(frozen=True)
class Places:
    """Where things lie.

    Attributes:
        checkpoints: the job's directory with its runs' checkpoints, or one run's.
        hf: snapshots and notes.
        events: gets one JSON line per milestone.
    """

    checkpoints: Path
    hf: Path
    events: Path


class Mirror:
    """Makes milestones, one after the other.

    Args:
        file: ``run.yaml``; it has ``hf``.
        places: where things lie.
        commander: who says what counts.
        say: takes lines for people.
    """

    def __init__(self, file: RunFile, places: Places, commander: CommanderClient, say: Callable[[str], None]) -> None:
        assert file.hf is not None
        self._file, self._hub, self._places, self._commander = file, file.hf, places, commander
        improve = file.hf.on_improve
        tracked = None if improve is None else Tracked(improve.metric, improve.mode, improve.min_delta)
        self._rules = due.Rules(file.hf.interval_seconds, tracked)
        metrics = file.hf.metrics
        self._metrics = None if metrics is None else MetricsFile(metrics, "" if improve is None else improve.metric)
        self._root = places.hf / "snapshots"
        self._pace, self._last, self._looked, self._reported = self._noted()
        self._at = self._noted_at = time.monotonic()
        self._ask_at = self._tell_at = 0.0
        self._show, self._said, self._reason = say, "", due.INTERVAL
        self._newest: tuple[Path, CheckpointName] | None = None
        # What the process before left: one that is to be uploaded, and those that the Commander has not heard of.
        there = snapshots(self._root)
        unfinished = [one for one in there if not one.revision]
        for one in unfinished[:-1]:
            one.remove()
        self._pending = unfinished[-1] if unfinished else None
        self._untold = [one for one in there if one.revision]
        if self._untold:
            self._last = self._untold[-1].manifest.digest

    def run(self) -> None:
        """Goes on until it is stopped."""
        if self._pending is not None:
            self._say(f"goes on with the upload of {self._pending.manifest.checkpoint}")
        while True:
            self._try(self._turn)
            # why: a directory on any volume tells nobody that something is new in it
            time.sleep(POLL_SECONDS)

    def _try(self, do: Callable[[], None]) -> None:
        """Does it; a volume that fails, for instance because it is full, is one line and ends nothing."""
        try:
            do()
        except OSError as error:
            self._say(f"the volume fails ({one_line(str(error), 200)}): milestones wait, training goes on")

    def _turn(self) -> None:
        self._beside()
        snapshot = self._chosen()
        if snapshot is not None:
            self._upload(snapshot)
            self._tell_at = 0.0
            self._tell_all()

    def _beside(self) -> None:
        """What is done at any time, also while an upload runs."""
        self._observe()
        self._tell_all()
        if time.monotonic() - self._noted_at >= NOTE_SECONDS:
            self._note()

    # What is due.

    def _observe(self) -> None:
        now = time.monotonic()
        self._pace, self._at = due.passed(self._pace, now - self._at), now
        before = self._pace
        self._newest = _newest(self._places.checkpoints)
        if self._metrics is not None and self._newest is not None and self._rules.tracked is not None:
            values = self._metrics.news(self._newest[0].parent)
            self._pace = due.observed(self._pace, self._rules, values)
        if self._newest is not None and self._newest[0].name != self._looked:
            self._look(self._newest[0])
        if before.best != self._pace.best or before.wish != self._pace.wish:
            self._note()

    def _look(self, path: Path) -> None:
        """A new checkpoint: its session may have reported it as the best one, or one before it that was not seen here.

        Of a script without one the metrics file says so (`_observe`).
        """
        try:
            manifest = Manifest.read(path)
        except (CheckpointDamaged, OSError):
            return  # the agent names it, and the next one comes
        self._looked, self._ask_at = path.name, 0.0
        if manifest.saved_as is not None:
            return
        tracked, best = self._rules.tracked, manifest.best
        if tracked is None or best is None or best.metric != tracked.metric or not is_checkpoint_name(best.name):
            return
        name = CheckpointName.parse(best.name)
        if not self._reported or name.age > CheckpointName.parse(self._reported).age:
            self._reported = best.name
            self._pace = due.reported(self._pace, name.step)

    def _chosen(self) -> Snapshot | None:
        """The snapshot to upload now; None: nothing is due, or nothing can be done about it."""
        if self._pace.rest_seconds > 0:
            return None
        if self._pending is not None:
            return self._pending
        now = time.monotonic()
        if self._newest is None or not due.due(self._pace, self._rules, self._newest[1].step) or now < self._ask_at:
            return None
        self._ask_at = now + ASK_SECONDS
        try:
            run = self._commander.run()
        except Away as away:
            self._say(f"a milestone is due, but {away}: it waits")
            return None
        source = self._head(run)
        reason = "" if source is None else due.due(self._pace, self._rules, CheckpointName.parse(source.name).step)
        return None if source is None or not reason else self._frozen(source, reason)

    def _frozen(self, source: Path, reason: str) -> Snapshot | None:
        self._reason = reason
        metrics = None if self._metrics is None else self._metrics.path(source.parent)
        there = {one.name for one in os.scandir(self._root)} if self._root.is_dir() else set()
        file = self._file
        # Also a checkpoint that cannot be frozen is a try. It is noted with its end: one that was killed is made again.
        before, self._pace = self._pace, due.begun(self._pace)
        try:
            snapshot = _with_low_priority(lambda: freeze(source, self._root, file.run_id, file.manifest, metrics))
        except (
            CheckpointDamaged,
            OSError,
            ValueError,
        ) as error:  # ValueError: a file's name that no milestone can have
            if not (source / MANIFEST).exists():
                self._pace = before
                self._say(f"{source.name} was pruned before it was frozen: the next one is taken")
                return None
            self._give_up(f"{source.name} cannot be frozen ({one_line(str(error), 200)})")
            return None
        # A try that failed is given up for a newer checkpoint.
        for name in there - {source.name, *(one.directory.name for one in self._untold)}:
            shutil.rmtree(self._root / name, ignore_errors=True)
        return snapshot

    def _head(self, run: dict[str, Any]) -> Path | None:
        """The run's newest committed checkpoint on this volume, if it is no milestone yet."""
        head, milestones = run.get("head"), run.get("milestones")
        if not isinstance(head, dict) or not is_checkpoint_name(str(head.get("name"))):
            return None
        done = [one.get("digest") for one in milestones or () if one.get("repo") == self._hub.repo]
        if head.get("digest") in (*done, self._last):
            self._pace = due.done(self._pace, CheckpointName.parse(head["name"]).step)
            return None
        for directory in _runs(self._places.checkpoints):
            try:
                if Manifest.read(directory / head["name"]).digest == head.get("digest"):
                    return directory / str(head["name"])
            except (CheckpointDamaged, OSError):
                continue
        return None

    # The upload.

    def _upload(self, snapshot: Snapshot) -> None:
        self._pace, self._pending = due.begun(self._pace), None
        self._note()
        begun = time.monotonic()
        try:
            outcome = self._outcome(snapshot)
        except OSError as error:  # as where no process can be started
            outcome = {"failed": one_line(str(error), 200)}
        if "revision" not in outcome:
            self._give_up(f"{snapshot.manifest.checkpoint}: {outcome.get('refused') or outcome.get('failed')}")
            return
        published = snapshot.published(self._hub.repo, str(outcome["revision"]))
        # The Commander is told also if that cannot be noted: only the next process would have to look on the hub again.
        self._untold.append(published)
        self._try(published.note)
        self._last = snapshot.manifest.digest
        self._pace = due.done(self._pace, snapshot.manifest.step)
        self._note()
        size, took = snapshot.manifest.total_bytes / 1e6, time.monotonic() - begun
        revision = f"{self._hub.repo}@{outcome['revision']}"
        self._say(f"step {snapshot.manifest.step} is uploaded as {revision} ({size:.1f} MB in {took:.1f} s)")

    def _outcome(self, snapshot: Snapshot) -> Outcome:
        """What comes of its upload. Raises OSError if no process can be started."""
        job = {
            "do": "publish",
            "repo": self._hub.repo,
            "private": self._hub.private,
            "snapshot": str(snapshot.directory),
            "upload_limit": self._hub.upload_limit,
            "nice": NICE,
        }
        seconds = patience(snapshot.manifest.total_bytes, self._hub.upload_limit)
        # What Xet knows of chunks that the hub has: on the volume, so that the next pod need not send them again.
        environment = {"HF_XET_CACHE": os.environ.get("HF_XET_CACHE") or str(self._places.hf / "xet")}
        while True:
            with Transfer(job, environment) as transfer:
                beside = partial(self._try, self._beside)
                outcome = transfer.result(seconds, POLL_SECONDS, beside, lambda event: None)
            if not outcome.get("xet"):
                return outcome
            # The library has no way back by itself.
            self._say(f"the Xet way fails ({outcome['failed']}): uploading the plain way")
            environment = {**environment, "HF_HUB_DISABLE_XET": "1"}

    def _give_up(self, why: str) -> None:
        self._pace = due.failed(self._pace, self._rules, self._reason)
        self._note()
        self._say(f"no milestone: {why}: training goes on, tried again in {self._pace.rest_seconds:.0f} s")

    # The Commander is told.

    def _tell_all(self) -> None:
        """Tells the Commander of each milestone that it has not heard of."""
        while self._untold and time.monotonic() >= self._tell_at:
            one = self._untold[0]
            told = Milestone(one.repo, one.revision, one.manifest.step, one.manifest.checkpoint, one.manifest.digest)
            try:
                counts = self._commander.tell(told)
            except Away as away:
                self._say(f"step {told.step} is on the hub, but {away}: told again until it is heard")
                self._tell_at = time.monotonic() + ASK_SECONDS
                return
            if counts:
                # For people: a full volume holds up nothing, and this snapshot may have filled it.
                self._try(partial(self._write_event, told))
                self._say(f"milestone: step {told.step} is {told.repo}@{told.revision}")
            else:
                self._say(f"step {told.step} never counts: {told.checkpoint} is not the run's")
            self._untold.pop(0)
            one.remove()

    def _write_event(self, told: Milestone) -> None:
        """One line for each, also where this process was killed before it knew that it had written it."""
        line = json.dumps({"event": "hf_synced", "time": round(time.time(), 3), **asdict(told)}).encode() + b"\n"
        descriptor = os.open(self._places.events, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with open(descriptor, "r+b", buffering=0) as file:
            text = file.read()
            if not any(b'"hf_synced"' in one and told.revision.encode() in one for one in text.splitlines()):
                os.write(descriptor, line if not text or text.endswith(b"\n") else b"\n" + line)
                os.fsync(descriptor)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._show(text)

    # What the next process goes on with.

    def _noted(self) -> tuple[due.MilestonePace, str, str, str]:
        try:
            raw = json.loads((self._places.hf / "mirror.json").read_bytes())
            reported = str(raw.get("reported", ""))
            known = reported if is_checkpoint_name(reported) else ""
            return due.MilestonePace(**raw["pace"]), str(raw["last"]), str(raw["looked"]), known
        except (OSError, ValueError, KeyError, TypeError):
            return due.MilestonePace(), "", "", ""  # the first one; or it was cut in two: a milestone more does no harm

    def _note(self) -> None:
        """As far as the volume takes it: without it the next process makes a milestone more, or a try too early."""
        self._noted_at = time.monotonic()
        noted = {"pace": asdict(self._pace), "last": self._last, "looked": self._looked, "reported": self._reported}
        text = json.dumps(noted)
        self._try(lambda: replace_file(self._places.hf / "mirror.json", text.encode() + b"\n"))


def _runs(checkpoints: Path) -> list[Path]:
    """Directories that may hold checkpoints: this one and those in it."""
    try:
        with os.scandir(checkpoints) as entries:
            below = [Path(one.path) for one in entries if one.is_dir() and not one.name.startswith(".")]
    except FileNotFoundError:
        return []
    return [checkpoints, *(one for one in sorted(below) if not is_checkpoint_name(one.name))]


def _newest(checkpoints: Path) -> tuple[Path, CheckpointName] | None:
    """The newest sealed checkpoint by its name. Whether it counts is the Commander's to say."""
    found: list[tuple[tuple[int, int, int], Path, CheckpointName]] = []
    for directory in _runs(checkpoints):
        try:
            names = [name for name in os.listdir(directory) if is_checkpoint_name(name)]
        except FileNotFoundError:
            continue
        parsed = [CheckpointName.parse(name) for name in names]
        found += [(one.age, directory / str(one), one) for one in parsed if one.lease is None]
    for _, path, name in sorted(found, reverse=True, key=lambda one: one[0]):
        if (path / MANIFEST).is_file():
            return path, name
    return None


def _with_low_priority(work: Callable[[], Snapshot]) -> Snapshot:
    """Does it in a thread to which everything else is preferred. This thread can be stopped at once."""
    pool = ThreadPoolExecutor(1, "low-priority", lambda: os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE))
    try:
        return pool.submit(work).result()
    finally:
        pool.shutdown(wait=False)


def _commander(file: RunFile, given: argparse.Namespace) -> CommanderClient:
    try:
        url = commander_url(given.commander) if given.commander else file.commander
    except ValueError as error:
        raise InputRefused(f"--commander: {error}") from error
    return CommanderClient(url, file.run_id, Access.given(given, url))


def _stop(number: int, frame: object) -> None:
    raise Stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mirror until SIGTERM or SIGINT. Returns 2 where something must be changed first."""
    parser = argparse.ArgumentParser(
        prog="dalsegno.relay.milestones.mirror", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run_file", type=file_path, metavar="run.yaml")
    parser.add_argument("--checkpoints", type=file_path, required=True, help="the job's directory of checkpoints")
    parser.add_argument("--hf", type=file_path, required=True, help="where snapshots lie, on the same volume")
    parser.add_argument("--events", type=file_path, required=True, help="gets one JSON line per milestone")
    parser.add_argument("--commander", metavar="URL", help="another address than the file's")
    add_tls(parser)
    given = parser.parse_args(arguments)
    try:
        file = read_run_file(given.run_file)
        if file.hf is None:
            raise InputRefused(f"{given.run_file}: hf: missing: there are no milestones to make")
        if not secret("HF_TOKEN"):
            raise InputRefused("HF_TOKEN is not set: hf in run.yaml needs a token that may write to the repository")
        commander = _commander(file, given)
    except InputRefused as refused:
        for line in refused.lines:
            print(f"error: {line}", file=sys.stderr)
        return 2
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    console = PodConsole(f"[dalsegno] mirror of {file.run_id}")
    try:
        with alone(given.hf / ".mirror.lock", lambda: console.say("another one works here: waiting for its end")):
            Mirror(file, Places(given.checkpoints, given.hf, given.events), commander, console.say).run()
    except Stopped:
        console.close(_LAST_LINES_SECONDS)
        # At once: a thread may still read a checkpoint.
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
