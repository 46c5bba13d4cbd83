"""Brings to the volume what a run goes on from, before its agent starts: see `recovery` for the order."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint import CheckpointName, Manifest, Unsealed, is_checkpoint_name
from dalsegno.elastic.checkpoint.files import fsync_tree, replace_file
from dalsegno.protos.commander_api import RunState
from dalsegno.protos.processes import ends_with_parent
from dalsegno.protos.run_file import RunFile

from .milestones import restore
from .milestones.alone import alone
from .milestones.commander_client import Milestone
from .recovery import Age, PodKnowledge, Way, in_line, way_of
from .volume import Volume, damage_of

__all__ = ("Stuck", "is_held", "prepared")

# Pauses between two tries to reach the hub.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 2.0, 60.0

Say = Callable[[str], None]


class Stuck(Exception):
    """The run cannot go on without a person; one line."""


@dataclass(frozen=True)
class _Found:
    """What a look at the volume found.

    Attributes:
        intact: the newest one that verified, byte by byte.
        damaged: names of newer ones that did not.
        unreadable: names of newer ones that the file system does not let us read, which may be whole, and why.
        began: from what each epoch began, as far as that is known.
    """

    intact: Manifest | None
    damaged: frozenset[str]
    unreadable: Mapping[str, str]
    began: Mapping[int, Age]


def is_held(shown: Mapping[str, Any]) -> bool:
    """Whether another pod has the run, as the Commander has `shown` it."""
    return bool(shown.get("holder")) and (shown.get("expires_in_sec") or 0) > 0


def prepared(
    file: RunFile, volume: Volume, shown: dict[str, Any], say: Say, *, allowed: bool, older: bool = False
) -> tuple[Path | None, str] | None:
    """Makes the run's resume point be on the volume. Says each step, and what it waits for.

    Args:
        file: the run.
        volume: its place.
        shown: what the Commander knows of it.
        say: takes lines for people.
        allowed: the run may begin anew although there are milestones.
        older: it may go on from the newest intact checkpoint although a newer one is lost or cannot be read.

    Returns:
        A baseline's directory, for a run without a checkpoint, or None; and for `--resume-step` the checkpoint that the
        run is to go back to, or "". None: something has changed meanwhile, so that all must be asked anew.

    Raises:
        Stuck: a person has to change something.
        UsageError: so it is, before anything is started.
        OSError: the volume fails.
    """
    if shown.get("state") == RunState.COMPLETED:
        return None, ""  # the agent says so, and ends
    head = shown.get("head")
    milestones = [Milestone(**one) for one in shown.get("milestones") or ()]
    found = _look(volume, head, say)
    intact = found.intact
    _tell_of_report(shown.get("report"), 0 if intact is None else intact.step, say)
    wanted = _wanted(milestones, found, head, say)
    if intact is not None and head is not None and not older and not _is_given_up(head, found, volume):
        # Only the head itself takes its place; a spare's volume shows late what is saved on another machine.
        wanted = [one for one in wanted if one.digest == head["digest"] and not is_held(shown)]
    known = PodKnowledge(
        intact=intact is not None,
        damaged=bool(found.damaged or found.unreadable),
        head=head is not None,
        milestones=len(wanted),
        baseline=file.baseline is not None,
        allowed=allowed,
        newer=bool(wanted),
    )
    way = way_of(known)
    _check_readable(found, head, wanted, allowed=allowed, older=older)
    if way not in (Way.MILESTONE, Way.BASELINE):
        return _gone(way, volume, shown, found, say, older=older)
    waited = False

    def waits() -> None:
        nonlocal waited
        waited = True
        say("another pod brings to the volume what the run goes on from: waiting for its end")

    with alone(volume.hf / ".recovery.lock", waits) as locked:
        if waited:
            return None
        if way is Way.BASELINE:
            return _baseline(file, volume, say, locked=locked), _anew(shown, say)
        return _from_milestone(wanted, volume, shown, found, say, older=older)


def _from_milestone(
    wanted: list[Milestone],
    volume: Volume,
    shown: dict[str, Any],
    found: _Found,
    say: Say,
    *,
    older: bool,
) -> tuple[Path | None, str]:
    """Restores the first of the `wanted` that can be had; else what is intact is gone on from. See `prepared`."""
    intact, head = found.intact, shown.get("head")
    if intact is None:
        say("no checkpoint on the volume is intact: the last milestone is restored")
    else:
        say(f"{intact.name} is the newest intact one on the volume, and a milestone is newer: that is restored")
    manifest = _restored(wanted, volume, say, intact, older=older)
    if manifest is None:
        return _gone(Way.VOLUME, volume, shown, found, say, older=older)
    if head is not None and _age(head) > manifest.parsed_name.age:
        say(f"{head['name']} (step {head['step']}), the run's last checkpoint, is given up")
    volume.note_restored(manifest.digest)
    return None, _back(shown, replace(found, intact=manifest), volume, older=older)


def _wanted(milestones: list[Milestone], found: _Found, head: dict[str, Any] | None, say: Say) -> list[Milestone]:
    """The milestones that may be restored, the newest first; if something is intact here, only what is newer.

    What the run has gone back from is none of them. What is newer than the head is that, or its files were damaged; the
    Commander does not say which. Where this is not known, one is better than nothing, but not than what is here.
    """
    intact = found.intact
    if head is None:
        return milestones if intact is None else []
    wanted: list[tuple[Age, Milestone]] = []
    for one in milestones:
        if not is_checkpoint_name(one.checkpoint):
            if intact is None:
                wanted.append(((0, 0, 0), one))  # of a foreign worker: refused with a line
            continue
        age = CheckpointName.parse(one.checkpoint).age
        if intact is not None and age <= intact.parsed_name.age:
            continue
        counts = in_line(age, _age(head), found.began)
        if counts or (counts is None and intact is None):
            wanted.append((age, one))
        else:
            why = "it is not known whether the run has gone back from it" if counts is None else "the run has left it"
            say(f"{one.checkpoint} at {one.repo}@{one.revision} is passed over: {why}, on its way to {head['name']}")
    return [one for _, one in sorted(wanted, key=lambda pair: pair[0], reverse=True)]


def _check_readable(
    found: _Found, head: dict[str, Any] | None, wanted: list[Milestone], *, allowed: bool, older: bool
) -> None:
    """Raises Stuck if what cannot be read may be what the run should go on from, and nobody has given it up."""
    intact = found.intact
    is_head = intact is not None and head is not None and head["digest"] == intact.digest
    if is_head or older or (allowed and intact is None):
        return
    in_doubt = [
        f"{name} cannot be read: {why}"
        for name, why in found.unreadable.items()
        if head is None or in_line(CheckpointName.parse(name).age, _age(head), found.began) is not False
    ]
    if not in_doubt:
        return
    if intact is not None:
        help = f"--allow-older goes on from {intact.name} (step {intact.step}) without it"
    elif wanted:
        help = "--allow-older goes on from the last milestone without it"
    else:
        help = "--allow-baseline begins anew without it"
    raise Stuck(f"{'; '.join(in_doubt)}: it may be whole: mount the volume again, and start this anew; {help}")


def _is_given_up(head: dict[str, Any], found: _Found, volume: Volume) -> bool:
    """Whether the run's last checkpoint was seen here, and is damaged; or an older one was restored for it before.

    The latter is where the volume is a new one, from which the run has not gone on yet.
    """
    restored = found.intact is not None and volume.restored() == found.intact.digest
    return restored or head["name"] in found.damaged


def _age(head: dict[str, Any]) -> Age:
    """Raises ValueError if the Commander's checkpoint has no name of ours, which never is."""
    return CheckpointName.parse(head["name"]).age


def _tell_of_report(report: dict[str, Any] | None, step: int, say: Say) -> None:
    """Says that a foreign worker was further than the step that is gone on from. What it saved is not in the store."""
    if report is not None and (reported := report.get("step") or 0) > step:
        name = f" ({report['latest_ckpt']})" if report.get("latest_ckpt") else ""
        say(
            f"{report.get('worker_id')}, which is not ours, has reported step {reported}{name}: what it saves is no "
            "checkpoint of the store, so this pod does not go on from that"
        )


def _gone(
    way: Way,
    volume: Volume,
    shown: dict[str, Any],
    found: _Found,
    say: Say,
    *,
    older: bool,
) -> tuple[Path | None, str]:
    """The ways for which nothing has to be brought. See `prepared`."""
    head = shown.get("head")
    match way:
        case Way.VOLUME:
            assert found.intact is not None
            back = _back(shown, found, volume, older=older)
            say(_from_volume(head, found, back, older=older))
            return None, back
        case Way.LOOK:
            say(
                f"the run's last checkpoint, {head['name'] if head else '?'}, is not on this volume, and there is no "
                "milestone: the agent waits for it; mount the volume that has it"
            )
        case Way.STUCK:
            raise Stuck(
                "no checkpoint on the volume is intact, and there is no milestone: mount a volume that has one; "
                "--allow-baseline begins anew"
            )
        case Way.SCRATCH:
            if head is None:
                say("the run has no checkpoint, no milestone and no baseline: it begins")
            return None, _anew(shown, say)
    return None, ""


def _from_volume(head: dict[str, Any] | None, found: _Found, back: str, *, older: bool) -> str:
    """The line about going on from what is intact."""
    assert found.intact is not None
    intact = f"{found.intact.name} is intact (step {found.intact.step})"
    if head is None or _age(head) <= found.intact.parsed_name.age:
        return f"the run goes on from the volume: {intact}"
    last = f"{head['name']} (step {head['step']})"
    if older:
        return f"--allow-older: the run goes on from the volume: {intact}, without {last}, its last checkpoint"
    is_damaged = head["name"] in found.damaged
    if not back and is_damaged and not in_line(found.intact.parsed_name.age, _age(head), found.began):
        return (
            f"{last}, the run's last checkpoint, is damaged; {intact}, and it is not known whether the run has gone "
            f"back from that: the agent knows; --allow-older goes on from step {found.intact.step}"
        )
    if not back and not is_damaged:
        return (
            f"the run's last checkpoint, {last}, is not in sight on this volume, where {intact}: the agent looks for "
            f"the last one; mount the volume that has it, or --allow-older goes on from step {found.intact.step}"
        )
    return f"the run goes on from the volume: {intact}" + (f"; {last} is given up" if back else "")


def _anew(shown: dict[str, Any], say: Say) -> str:
    """The argument of `--resume-step`; empty if the Commander knows no checkpoint, and so none is given up.

    Without the argument the master would wait for a checkpoint that it knows and that is gone.
    """
    head = shown.get("head")
    if head is None:
        return ""
    say(f"--allow-baseline: the run begins anew, without {head['name']} (step {head['step']}), its last checkpoint")
    return f"0:{int(shown['epoch']) + 1}"


def _back(shown: dict[str, Any], found: _Found, volume: Volume, *, older: bool) -> str:
    """What `--resume-step` says, if the Commander would not choose what is intact by itself.

    Its record may no longer have a milestone, whose files had been deleted; and it knows another volume than the one
    that a milestone was restored to, until such a request is followed. What is newer is kept aside for ever then, so it
    must have been seen to be damaged, or a person has given it up. The same request has the same number until the next
    epoch begins, so it is followed once.
    """
    manifest, head = found.intact, shown.get("head")
    assert manifest is not None
    request = f"{manifest.step}:{int(shown['epoch']) + 1}"
    published = manifest.digest in {one["digest"] for one in shown.get("milestones") or ()}
    if head is None:
        # The run went back to its beginning, and this one is aside; or the Commander has lost its record.
        return request if published or (older and found.unreadable) else ""
    if published and volume.restored() == manifest.digest:
        return request
    age = manifest.parsed_name.age
    if _age(head) <= age:
        return ""
    is_lost = published and head["name"] in found.damaged
    return request if older or (is_lost and in_line(age, _age(head), found.began)) else ""


def _look(volume: Volume, head: dict[str, Any] | None, say: Say) -> _Found:
    """Verifies from the newest checkpoint on, until one is intact. What the run has gone back from does not count."""
    every = volume.manifests()
    began = _beginnings(every)
    ages = [one.parsed_name.age for one in every if isinstance(one, Manifest)]
    last = max(ages, default=(0, 0, 0)) if head is None else _age(head)
    damaged: set[str] = set()
    unreadable: dict[str, str] = {}
    intact = None
    for one in every:
        try:
            problem = _problem(volume, one)
        except FileNotFoundError:
            continue  # another pod has just deleted it
        except OSError as error:
            unreadable[one.name] = str(error)
            say(f"{one.name} cannot be read: {error}: the one before is looked at")
            continue
        if problem is None:
            continue
        if problem:
            damaged.add(one.name)
            say(f"{one.name} is damaged: {problem}: the one before is looked at")
        elif (age := CheckpointName.parse(one.name).age) <= last and in_line(age, last, began) is False:
            say(f"{one.name} is passed over: the run has gone back behind it since")
        else:
            assert isinstance(one, Manifest)
            intact = one
            break
    return _Found(intact, frozenset(damaged), unreadable, began)


def _beginnings(every: list[Manifest | Unsealed]) -> dict[int, Age]:
    """From what each epoch began, as its checkpoints say; zeros: at the run's beginning."""
    began: dict[int, Age] = {}
    for one in every:
        if isinstance(one, Manifest):
            start = (0, 0, 0) if one.resumed_from is None else CheckpointName.parse(one.resumed_from.name).age
            began[one.epoch] = max(start, began.get(one.epoch, start))
    return began


def _problem(volume: Volume, one: Manifest | Unsealed) -> str | None:
    """Why a checkpoint is damaged; "": it is intact; None: it was never finished. Raises OSError: it cannot be read."""
    if isinstance(one, Manifest):
        return damage_of(volume.directory_of(one), one)
    if one.unreadable:
        raise OSError(one.reason)
    return one.reason if one.damaged else None


def _restored(
    milestones: list[Milestone], volume: Volume, say: Say, intact: Manifest | None, *, older: bool
) -> Manifest | None:
    """The newest of them that can be had; None: none can, and `intact` is on the volume."""
    pause = _FIRST_PAUSE_SECONDS
    instead = "--allow-baseline begins anew" if intact is None else f"--allow-older goes on from {intact.name}"
    while True:
        try:
            found = restore.restore_newest(milestones, volume.job, volume.hf, say)
        except restore.Unreachable as error:
            if older and intact is not None:
                say(f"the hub does not answer ({error}): step {milestones[0].step} is given up")
                return None
            say(f"the hub does not answer ({error}): tried again in {pause:.0f} s; {instead} instead")
        except restore.HubUnusable as error:
            if intact is None:
                raise
            if not older:
                raise restore.HubUnusable(f"{error}; {instead} instead") from error
            say(f"step {milestones[0].step} is given up: {error}")
            return None
        except restore.VolumeFull as error:
            if intact is None:
                raise
            say(f"step {milestones[0].step} is not restored: {error}")
            return None
        else:
            if found is not None:
                say(f"restored: {found.manifest.name} (step {found.manifest.step})")
                revisions = [one.revision for one in milestones if one.digest == found.manifest.digest]
                volume.note("restored", checkpoint=found.manifest.name, step=found.manifest.step, revision=revisions[0])
                return found.manifest
            if intact is not None:
                return None
            raise Stuck("no milestone holds what it should: --allow-baseline begins anew")
        # why: no event tells when a server far away answers again
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def _baseline(file: RunFile, volume: Volume, say: Say, *, locked: bool) -> Path:
    """The directory that the run starts from.

    Raises:
        Stuck: it cannot be made.
    """
    assert file.baseline is not None
    if file.baseline.command is not None:
        return _made(file.baseline.command, volume, say, locked=locked)
    assert file.baseline.hf is not None
    pause = _FIRST_PAUSE_SECONDS
    while True:
        say(f"the run begins from the baseline {file.baseline.hf}")
        try:
            return restore.baseline(file.baseline.hf, volume.hf)
        except restore.RevisionRefused as refused:
            raise Stuck(f"the baseline {file.baseline.hf} cannot be used: {refused}") from refused
        except restore.Unreachable as error:
            say(f"the hub does not answer ({error}): tried again in {pause:.0f} s")
        # why: no event tells when a server far away answers again
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def _made(command: tuple[str, ...], volume: Volume, say: Say, *, locked: bool) -> Path:
    """What the baseline's command makes, once. Each try has its own directory: an earlier one may still write.

    Args:
        command: with `${save_dir}`.
        volume: the run's place.
        say: takes lines for people.
        locked: no other pod makes it, so that what is half made was left.
    """
    root = volume.hf / "baseline"
    root.mkdir(parents=True, exist_ok=True)
    done = root / "made.done"
    if done.exists():
        say("the run begins from the baseline that was made before")
        return root / (done.read_text(encoding="ascii").strip() or "made")
    for left in root.glob("made-*") if locked else ():
        shutil.rmtree(left, ignore_errors=True)
    target = root / f"made-{secrets.token_hex(4)}"
    target.mkdir()
    words = [word.replace("${save_dir}", str(target)) for word in command]
    say(f"the run begins from a baseline: {' '.join(words)}")
    try:
        own = ends_with_parent(signal.SIGKILL, os.getpid(), own_group=True)
        process = subprocess.Popen(words, preexec_fn=own)
    except OSError as error:
        raise Stuck(f"baseline: {words[0]} cannot be executed: {error.strerror or error}") from error
    try:
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        raise Stuck(f"baseline: the command ended with {code}")
    fsync_tree(target)
    replace_file(done, target.name.encode())
    return target
