"""Takes over checkpoints of scripts without a session.

A script that gets `${save_dir}` saves below a directory of its epoch's own, in its usual way. The agent of group rank 0
looks there, and puts a copy of each complete checkpoint among the run's, sealed like any other. A link would not do:
the script may delete its own checkpoint, or save again under the same name, which overwrites its files in place. The
script never writes into ours, because the next epoch has another directory (`save_dir`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointDamaged, Manifest
from dalsegno.elastic.checkpoint.errors import is_full, printable
from dalsegno.protos import control_pb2, worker_pb2

from ..decisions import events as ev
from . import old_saves
from .alone import MainAlone
from .anew import Resumed
from .asked import Growth, Request, request
from .beside import Beside
from .best_save import BestRule
from .best_watch import BestWatch
from .elsewhere import Elsewhere
from .foreign import COUNTED, FoundUnits, Unit, shown, survey
from .halves import Halves, is_parted
from .layouts import Complete, FileState, complete, damaged, number_of_unit
from .notes import notes_of
from .patience import LookPatience
from .present import extent_of, files_of, may_be_there, states_of
from .problems import problem_of
from .slices import Behind, Latest, SaveSlice, choose, newest_number
from .slots import Slots
from .taking import Before, Changed, Late, Origin, adopt, is_taken, save_directory, sealed_as
from .untaken import LARGE_BYTES, Untaken
from .volume_check import VolumeCheck

__all__ = ["Adopter", "Before", "Origin", "adopt", "save_directory"]

# Seconds between two looks; what has not changed between them is no longer being written.
LOOK_EVERY_SECONDS = 1.0
# Looks without a change after which that is so, where no rule says that nothing is missing.
UNSURE_LOOKS = 4
# The longest pause, in seconds, after a copy that could not be written; and how many times what a look takes.
LONGEST_PAUSE_SECONDS = 60.0
SHARE = 10
# Looks without a change after which an incomplete checkpoint is named; and what changes is no longer waited for.
PATIENCE_LOOKS = 30
# The most members of a series that are looked at.
MOST_MEMBERS = 16
# Seconds between two looks when the script was asked to save, and whether somebody still waits for that.
_LOOK_WHEN_ASKED_SECONDS = 0.25
# So much longer, and this process itself was stopped (Ctrl-Z); then so long for a look at what was saved meanwhile.
_STOOD_STILL_SECONDS, _BEHIND_A_STOP_SECONDS = 1.0, 5.0
_BEGAN_ANEW = (
    "it is older than the resume point, and is not taken: the script did not load what ${resume_dir} and "
    "DALSEGNO_RESUME_DIR name, or it has begun to count anew since then"
)

logger = logging.getLogger(__name__)


class Adopter:
    """Looks at one epoch's directory until it is closed, on a thread of its own.

    Args:
        run_dir: the run's directory.
        world: the epoch's world.
        origin: for the manifests.
        deliver: gets the same events as for a worker that sealed something or found a bad checkpoint, and lines.
        pattern: `--checkpoint-glob`; empty: none.
        before: the resume point, if it was adopted, and its files where they were put into this epoch's directory.
        keep: see `old_saves.remove`.
        best: what makes a checkpoint the best one; None: none is.
        late: the first node of that world is lost; None: it is this one.
        full: gets the reason, each time that a copy fails as the disk or a quota is full.
    """

    def __init__(
        self,
        run_dir: Path,
        world: control_pb2.World,
        origin: Origin,
        deliver: Callable[[ev.Event], None],
        pattern: str = "",
        before: Before | None = None,
        keep: int = 0,
        best: BestRule | None = None,
        late: Late | None = None,
        full: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._keep, self._full, self._rule = keep, full, best
        self._best: BestWatch | None = None
        self._run_dir, self._world, self._origin, self._deliver = run_dir, world, origin, deliver
        self._root, self._pattern = save_directory(run_dir, world.epoch), pattern
        self._elsewhere = Elsewhere(self._root, pattern, self._say)
        self._volume = VolumeCheck(run_dir)
        self._resumed_step = self._step = world.resume.source.step if world.HasField("resume") else 0
        self._before, self._resume = before, Resumed(self._root, before)
        self._known: dict[str, FileState] = dict(before.files) if before is not None else {}
        self._resumed = dict(before.saved_as.numbers) if before is not None else {}
        # Before people are told what is missing.
        own = self._root, origin.world_size, before, (PATIENCE_LOOKS - 1) * LOOK_EVERY_SECONDS
        self._alone = MainAlone(*own, others=late is not None and late.others)
        self._numbers: dict[str, int | None] = {}
        self._slots = Slots(self._root, origin.world_size, self._resumed, self._known.values())
        # The ranks that a checkpoint of this epoch has named: of a worker that is itself a launcher.
        self._ranks = 0
        # What was complete at the last looks, and since when nothing of it changes; the same of what was incomplete.
        self._stands: dict[str, tuple[tuple[FileState, ...], float]] = {}
        self._lacks: dict[str, tuple[object, float]] = {}
        self._since: float | None = None
        self._untaken = Untaken(self._root, pattern, self._say)
        self._beside = Beside(self._root)
        self._halves = Halves(self._root, PATIENCE_LOOKS * LOOK_EVERY_SECONDS)
        self._said: set[str] = set()
        self._late, self._latest = late, late.latest if late is not None else None
        if late is not None:
            self._step, self._numbers = late.step, dict(late.numbers)
            # The first node has said so.
            self._untaken.end()
            self._said = {_BEGAN_ANEW}
        # Something is new, or has changed: the next look decides.
        self._undecided, self._vanished, self._told = False, False, ""
        # The file system has allowed all of the last look; and seconds that it took, without copying.
        self._calm, self._took = True, 0.0
        self._closing, self._interrupted = False, late is not None
        self._asked = self._answered = self._trusting = 0
        # When somebody last began to wait.
        self._asked_at = 0.0
        # The script was asked to save, and what it saved then is taken.
        self._request: Request | None = None
        self._growth: Growth | None = None
        self._met = False
        # Of what was begun behind the request there is more than was taken, says the last look; and nothing more is.
        self._coming = self._at_rest = False
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="adoption", daemon=True).start()

    def close(self) -> None:
        """Stops looking. A copy under way is finished, and refused if it comes too late."""
        with self._news:
            self._closing = True
            self._news.notify_all()

    def request(self) -> None:
        """The script is about to be asked to save.

        Raises:
            OSError: the file system says no.
        """
        asked = request(self._root)
        with self._news:
            self._growth = Growth(asked, LARGE_BYTES, UNSURE_LOOKS * LOOK_EVERY_SECONDS)
            self._request = asked
            self._news.notify_all()

    def wait_met(self, timeout_seconds: float, over: Callable[[], bool]) -> bool:
        """Waits until what the script saved when it was asked is taken, for at most `timeout_seconds`.

        That may be a save which was due anyway. If the script is writing another one by then, that is waited for, too.
        Where this process was stopped meanwhile, what was saved then gets a few looks more, once.

        Args:
            over: whether it is not worth waiting any more.
        """
        began = time.monotonic()
        deadline, granted = began + timeout_seconds, False
        with self._news:
            while not self._at_rest and not self._closing and (left := deadline - began) > 0 and not over():
                # why: the end of a process is no event here.
                self._news.wait(min(left, _LOOK_WHEN_ASKED_SECONDS))
                last, began = began, time.monotonic()
                if began - last >= _LOOK_WHEN_ASKED_SECONDS + _STOOD_STILL_SECONDS and not granted:
                    granted, deadline = True, max(deadline, began + _BEHIND_A_STOP_SECONDS)
            return self._met

    @property
    def met(self) -> bool:
        """Whether the script was asked to save, and what it saved then is taken."""
        return self._met

    def interrupt(self) -> None:
        """The workers are stopped. From now on stillness does not prove that a file was written to its end."""
        self._interrupted = True

    def settle(self, timeout_seconds: float, *, ended_well: bool = True) -> bool:
        """Waits until everything complete has been adopted, or cannot be; at most `timeout_seconds`.

        False: the file system did not allow all of the last look, so another one may find more.

        Args:
            ended_well: a worker has ended by itself, with all that it saved; interrupted workers may have been saving.
        """
        with self._news:
            self._asked += 1
            self._asked_at = time.monotonic()
            self._trusting += ended_well
            mine = self._asked
            self._news.notify_all()
            self._news.wait_for(lambda: self._closing or self._answered >= mine, timeout_seconds)
            self._trusting -= ended_well
            return self._calm or self._closing

    def _run(self) -> None:
        pause, asked, patience = LOOK_EVERY_SECONDS, 0, LookPatience(PATIENCE_LOOKS, LOOK_EVERY_SECONDS)
        if self._rule is not None:
            sealed = self._late.sealed if self._late is not None else ""
            own = self._rule, self._run_dir, self._world, sealed
            self._best = BestWatch(*own, self._say)
        self._note(self._known.values())
        old_saves.remove(self._run_dir, self._world.epoch, self._keep)
        self._volume.measure()
        while True:
            before, asked = asked, self._wait(pause, asked)
            if self._closing:
                return
            if asked > before:
                self._since = None  # who waits now has not waited before
                patience.renew()
            listed = self._lists_all()
            met, self._calm = self._met, self._look()
            with self._news:
                self._at_rest = self._at_rest or (met and not self._coming)
                self._news.notify_all()
            # Now, too: the look may have shown that listings are later.
            listed = listed and self._lists_all()
            undecided = patience.lasts(self._vanished) or (self._undecided and not self._vanished)
            if not (self._calm and (undecided or not listed)):
                with self._news:
                    self._answered = asked
                    self._news.notify_all()
            # Not every second, because each try may first fill the disk.
            longest = LONGEST_PAUSE_SECONDS if self._request is None else _LOOK_WHEN_ASKED_SECONDS
            pause = min(longest, max(LOOK_EVERY_SECONDS, SHARE * self._took) if self._calm else 2 * pause)
            pause = 0.0 if self._met > met else pause

    def _wait(self, pause: float, asked: int) -> int:
        """Waits for the next look; not if somebody waits for it. Returns how many ever waited, `asked` before."""
        with self._news:
            before = self._request
            self._news.wait_for(lambda: self._closing or self._asked > asked or self._request is not before, pause)
            return self._asked

    def _lists_all(self) -> bool:
        """Whether all that was there when somebody began to wait is listed by now."""
        return time.monotonic() > self._asked_at + 2 * self._volume.lag

    def _look(self) -> bool:
        """Looks at all that the run does not have; the newest of each series, as there may be time for no more.

        Returns:
            Whether the file system allowed it.
        """
        self._undecided, self._vanished, self._calm, self._coming = False, False, True, False
        try:
            self._volume.check()
            if not self._interrupted:  # else seconds count
                self._elsewhere.look(self._before)
            began = time.monotonic()
            found = survey(self._root, self._pattern)
            every = [self._resume.beside(one, taken=one[0].series in self._numbers) for one in found.series()]
            series = [self._slots.arrange(members) for members in every if members]
            stood, self._stands = self._stands, {}
            self._halves.begin(found)
            units = [one for members in series if (one := self._newest(members, stood, len(series) == 1)) is not None]
            self._untaken.look(found, self._before.directory if self._before is not None else None)
            whole = [one for members in series for one in members if one.path in self._stands]
            self._beside.look(found, whole, interrupted=self._interrupted)
            self._coming = self._is_growing(found)
            self._took = time.monotonic() - began
            return self._consider(units, found) and self._calm
        except (FileNotFoundError, Changed):
            # The script deletes old ones during the look, or writes one again; or it has deleted all, for good.
            self._undecided = self._vanished = self._coming = may_be_there(self._root)
        except OSError as error:
            self._complain(".", str(error))
            return False
        except Exception as error:  # ValueError, CheckpointDamaged, and what nobody has thought of: it is looked again
            self._complain(".", str(error) or repr(error))
        return True

    def _newest(
        self, members: list[Unit], stood: Mapping[str, tuple[tuple[FileState, ...], float]], alone: bool
    ) -> Complete | None:
        """The newest of a series that is complete; or the newest that stands still already, where each is a step.

        A script may save so often that its newest never stands still. Who waits now wants no other.

        Args:
            members: the newest come first.
            stood: what was complete at the look before, and since when.
            alone: there is no other series, whose newest would belong to the newest of this one.
        """
        newest: Complete | None = None
        for number, unit in enumerate(members[:MOST_MEMBERS]):
            if self._is_behind(unit):
                continue
            try:
                one = complete(self._root, unit, self._origin.world_size, self._ranks)
                one = self._alone.judge(unit, one, ended=self._asked > self._answered and self._lists_all())
            except FileNotFoundError:
                self._undecided = self._vanished = True
            except (CheckpointDamaged, ValueError) as error:
                self._complain(unit.path, problem_of(error))
            except OSError as error:
                self._complain(unit.path, str(error))
                self._calm = False
            else:
                if isinstance(one, Complete) and self._late is not None and (torn := damaged(self._root, one.files)):
                    self._complain(unit.path, f"{torn} is not whole: its node was lost while it was written")
                    self._halves.note(unit)
                elif isinstance(one, Complete):
                    self._lacks.pop(unit.path, None)
                    files, since = stood.get(unit.path, ((), 0.0))
                    began = time.monotonic() if self._late is None else self._late.stands_since(one)
                    self._stands[unit.path] = (one.files, since if files == one.files else began)
                    if self._stands_still([one], one.sure):
                        # What is newer is looked at again, at once.
                        self._undecided = self._undecided or newest is not None
                        return one
                    newest = newest or one
                    is_step = unit.layout in COUNTED or (alone and unit.number is not None)
                    if not is_step or self._asked > self._answered or self._request is not None:
                        break
                elif number == 0:
                    self._lacking(unit, one)
                    self._halves.note(unit)
        return newest

    def _stands_still(self, units: Iterable[Complete], sure: bool) -> bool:
        """Whether nothing of them has changed for so long that it is no longer being written."""
        long_ago = time.monotonic() - (1 if sure else UNSURE_LOOKS) * LOOK_EVERY_SECONDS
        return all(self._stands[one.unit.path][1] <= long_ago for one in units)

    def _is_behind(self, unit: Unit) -> bool:
        """Whether a checkpoint that counts steps in its name has nothing new; if it began anew, that is said."""
        if unit.layout not in COUNTED or unit.number is None:
            return False
        if unit.number < newest_number(unit.series, self._resumed, self._resumed_step):
            self._complain(unit.path, _BEGAN_ANEW)
        return unit.number <= newest_number(unit.series, {**self._resumed, **self._numbers}, self._step)

    def _is_growing(self, found: FoundUnits) -> bool:
        """Whether the script was asked, and writes something newer than was taken."""
        if self._growth is None:
            return False
        data = [file for unit in found.units for file in files_of(self._root, unit)]
        return self._growth.goes_on(data, states_of(self._root, found.other), self._known.values(), time.monotonic())

    def _lacking(self, unit: Unit, missing: str) -> None:
        """Names what stays incomplete though nothing of it changes."""
        now = time.monotonic()
        state = (missing, extent_of(self._root, unit))
        before, since = self._lacks.get(unit.path, (None, now))
        self._lacks[unit.path] = (state, since if before == state else now)
        if before == state and now - since >= PATIENCE_LOOKS * LOOK_EVERY_SECONDS:
            self._complain(unit.path, f"it is not complete: {missing}")

    def _consider(self, units: list[Complete], found: FoundUnits) -> bool:
        numbers = {one.unit.path: number for one in units if (number := self._number(one)) is not None}
        anew = {one.unit.path: one for one in units if self._counts_anew(one)}
        piece = choose(units, self._known, self._numbers, self._resumed, numbers, self._step, anew, self._latest)
        if isinstance(piece, Behind):
            self._complain(piece.unit.path, _BEGAN_ANEW)
            return True
        if piece is None:
            self._since = None
            return True
        nobody_writes = self._interrupted and not self._trusting
        parted = is_parted(piece, {**self._resumed, **self._numbers})
        if nobody_writes and (parted or not all(one.sure for one in piece.changed)):
            return True
        if self._halves.waits(piece):
            # It may be written for minutes.
            self._undecided, self._since = not nobody_writes, None
            if self._halves.never_end():
                self._tell_of_restless(piece)
            return True
        now = time.monotonic()
        self._since = self._since if self._since is not None else now
        if not self._stands_still(piece.units, piece.sure and not parted):
            # A caller of `settle` makes the look come early, and waits for it no longer than that.
            self._undecided = now - self._since <= PATIENCE_LOOKS * LOOK_EVERY_SECONDS
            if not self._undecided:
                self._tell_of_restless(piece)
            return True
        if self._best is not None and not self._best.knows_earlier(self._interrupted):
            self._undecided = True
            return True
        return self._adopt(piece, found, anew.get(piece.newest.unit.path))

    def _adopt(self, piece: SaveSlice, found: FoundUnits, anew: Complete | None) -> bool:
        if self._interrupted and (self._late is None or self._late.since):
            # The first node, and one that leaves, may see the same save at the same time.
            other = is_taken(self._run_dir, piece.step, self._world.epoch)
            if other is not None or (self._late is not None and piece.newest.written < self._late.since):
                self._undecided = other is False
                if other:  # Its own word may come when the next world has been opened without this node.
                    self._tell_sealed(sealed_as(self._run_dir, piece.step, self._world.epoch))
                return True
        notes = ((), ()) if piece.below else (notes_of(self._root, piece, found), self._beside.of(piece))
        try:
            saved_as = piece.saved_as(found.links)
            own = (piece, saved_as, self._run_dir, self._world, self._origin, *notes, self._before, self._volume)
            manifest = adopt(*own) if self._best is None else adopt(*own, self._best.judged)
        except (Changed, FileNotFoundError):
            raise
        except OSError as error:
            if is_full(error):
                self._full(str(error))
            self._complain(piece.newest.unit.path, problem_of(error))
            return False
        except (ValueError, CheckpointDamaged) as error:
            self._complain(piece.newest.unit.path, problem_of(error))
            return True
        logger.info("%s was saved by the script as %s", manifest.name, printable(piece.newest.unit.path))
        self._note(piece.files)
        self._step = manifest.step
        new = [file for unit in piece.changed for file in unit.files if self._known.get(file.name) != file]
        self._known = {file.name: file for file in piece.files}
        self._slots.took(piece.files)
        self._halves.took()
        self._latest = Latest(piece.newest.unit.series, piece.newest.written) if piece.below else None
        self._ranks = max(self._ranks, *(one.ranks for one in piece.changed))
        changed = {one.unit.series for one in piece.changed}
        self._numbers |= {series: number for series, number in piece.numbers if series in changed}
        self._before = Before(self._run_dir / manifest.name, self._known, saved_as)
        self._lacks, self._since = {}, None
        self._said &= {_BEGAN_ANEW}
        self._tell_sealed(manifest)
        if anew and self._late is None and (text := self._resume.how_anew(anew)):
            self._say(text)
        with self._news:
            # One behind the answer is enough: some scripts save all the time.
            self._at_rest = self._met
            if self._request is not None and not self._met:
                self._met = self._request.is_answered_by(new)
            self._news.notify_all()
        return True

    def _tell_sealed(self, manifest: Manifest | None) -> None:
        if manifest is not None and manifest.name != self._told:
            self._told = manifest.name
            sealed = worker_pb2.Sealed(name=manifest.name, digest=manifest.digest, step=manifest.step)
            self._deliver(ev.WorkerSaid(self._world.epoch, 0, worker_pb2.ToAgent(sealed=sealed)))

    def _note(self, files: Iterable[FileState]) -> None:
        try:
            old_saves.note(self._root, files)
        except OSError as error:
            logger.warning("these files of the script's will never be removed: %s", error)

    def _counts_anew(self, one: Complete) -> bool:
        """Whether this is behind the resume point, although its name has no larger number."""
        series, number = one.unit.series, one.unit.number
        before = self._resumed.get(series)
        behind = number is not None and before is not None and number <= before
        return behind and series not in self._numbers and self._resume.went_on(one)

    def _number(self, one: Complete) -> int | None:
        """The number in a file of it, where its name has none."""
        if one.unit.number is not None:
            return None
        if all(self._known.get(file.name) == file for file in one.files):
            return self._numbers.get(one.unit.series, self._resumed.get(one.unit.series))
        return number_of_unit(self._root, one)

    def _say(self, text: str) -> None:
        self._deliver(ev.Remark(text))

    def _tell_of_restless(self, piece: SaveSlice) -> None:
        self._complain(
            shown(piece.newest.unit.names) or piece.newest.unit.path,
            "it, or what was saved beside it, changes all the time, and is never known to be whole; save less "
            "often, or name with --checkpoint-glob what is a checkpoint",
        )

    def _complain(self, path: str, problem: str) -> None:
        """Warns once of a problem, even if the next checkpoint has the same."""
        if problem not in self._said:
            self._said.add(problem)
            self._deliver(ev.ManifestRead(printable(path), None, problem))
