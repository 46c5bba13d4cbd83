"""Brings to the volume what a run goes on from, before its agent starts: see `recovery` for the order."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.elastic.checkpoint.files import fsync_tree, replace_file
from dalsegno.protos.commander_api import RunState
from dalsegno.protos.processes import ends_with_parent
from dalsegno.protos.run_file import RunFile

from .milestones import restore
from .milestones.alone import alone
from .milestones.commander_client import Milestone
from .recovery import PodKnowledge, Way, way_of
from .volume import Volume, damage_of

__all__ = ("Stuck", "prepared")

# Pauses between two tries to reach the hub.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 2.0, 60.0

Say = Callable[[str], None]


class Stuck(Exception):
    """The run cannot go on without a person; one line."""


def prepared(
    file: RunFile, volume: Volume, shown: dict[str, Any], say: Say, *, allowed: bool
) -> tuple[Path | None, str] | None:
    """Makes the run's resume point be on the volume. Says each step, and what it waits for.

    Args:
        file: the run.
        volume: its place.
        shown: what the Commander knows of it.
        say: takes lines for people.
        allowed: the run may begin anew although there are milestones.

    Returns:
        A baseline's directory, for a run without a checkpoint, or None; and for `--resume-step` the milestone that the
        run is to go back to, or "". None: another pod has just prepared it, so that all must be asked anew.

    Raises:
        Stuck: a person has to change something.
        OSError: the volume fails.
    """
    if shown.get("state") == RunState.COMPLETED:
        return None, ""  # the agent says so, and ends
    head = shown.get("head")
    milestones = [Milestone(**one) for one in shown.get("milestones") or ()]
    intact, damaged = _newest_intact(volume, say)
    _tell_of_report(shown.get("report"), 0 if intact is None else intact.step, say)
    known = PodKnowledge(
        intact is not None, damaged, head is not None, len(milestones), file.baseline is not None, allowed
    )
    way = way_of(known)
    if way not in (Way.MILESTONE, Way.BASELINE):
        return _gone(way, file, volume, shown, milestones, intact, say)
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
        say("no checkpoint on the volume is intact: the last milestone is restored")
        manifest = _restored(milestones, volume, say)
        volume.note_restored(manifest.digest)
        return None, _back(shown, milestones, manifest, volume)


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
    file: RunFile,
    volume: Volume,
    shown: dict[str, Any],
    milestones: list[Milestone],
    intact: Manifest | None,
    say: Say,
) -> tuple[Path | None, str]:
    """The ways for which nothing has to be brought. See `prepared`."""
    head = shown.get("head")
    match way:
        case Way.VOLUME:
            assert intact is not None
            say(f"the run goes on from the volume: {intact.name} is intact (step {intact.step})")
            return None, _back(shown, milestones, intact, volume)
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


def _anew(shown: dict[str, Any], say: Say) -> str:
    """The argument of `--resume-step`; empty if the Commander knows no checkpoint, and so none is given up.

    Without the argument the master would wait for a checkpoint that it knows and that is gone.
    """
    head = shown.get("head")
    if head is None:
        return ""
    say(f"--allow-baseline: the run begins anew, without {head['name']} (step {head['step']}), its last checkpoint")
    return f"0:{int(shown['epoch']) + 1}"


def _back(shown: dict[str, Any], milestones: list[Milestone], manifest: Manifest, volume: Volume) -> str:
    """What `--resume-step` says, if the Commander would not choose that checkpoint by itself.

    Its record may no longer have a milestone, whose files had been deleted; and it knows another volume than the one
    that a milestone was restored to, until such a request is followed. The same request has the
    same number until the next epoch begins, so it is followed once.
    """
    head = shown.get("head")
    if manifest.digest not in {one.digest for one in milestones}:
        return ""
    # Without a head the run went back to its beginning, and this one is aside.
    if head is not None and head["digest"] == manifest.digest and volume.restored() != manifest.digest:
        return ""
    return f"{manifest.step}:{int(shown['epoch']) + 1}"


def _newest_intact(volume: Volume, say: Say) -> tuple[Manifest | None, bool]:
    """The newest that verifies, and whether one before it did not."""
    damaged = False
    for one in volume.manifests():
        if not isinstance(one, Manifest):
            if one.damaged or one.unreadable:  # else it was never finished
                damaged = True
                say(f"{one.name} is damaged: {one.reason}: the one before is looked at")
            continue
        if not (problem := damage_of(volume.directory_of(one), one)):
            return one, damaged
        damaged = True
        say(f"{one.name} is damaged: {problem}: the one before is looked at")
    return None, damaged


def _restored(milestones: list[Milestone], volume: Volume, say: Say) -> Manifest:
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            found = restore.restore_newest(milestones, volume.job, volume.hf, say)
        except restore.Unreachable as error:
            say(
                f"the hub does not answer ({error}): tried again in {pause:.0f} s; --allow-baseline begins anew instead"
            )
        else:
            if found is not None:
                say(f"restored: {found.manifest.name} (step {found.manifest.step})")
                revisions = [one.revision for one in milestones if one.digest == found.manifest.digest]
                volume.note("restored", checkpoint=found.manifest.name, step=found.manifest.step, revision=revisions[0])
                return found.manifest
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
        process = subprocess.Popen(words, process_group=0, preexec_fn=ends_with_parent(signal.SIGKILL, os.getpid()))
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
