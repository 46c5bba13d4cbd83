"""`dalsegno relay export`: the least from which a run can go on, copied elsewhere: a small volume with one checkpoint.

What it is: the newest checkpoint that is the run's and verifies byte by byte, with its manifest, `run.yaml`,
`state.json` and the file by which the Commander knows the volume. It lies as on a volume, so a pod may mount it as one.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointDamaged, Manifest, verify
from dalsegno.elastic.checkpoint.files import copy_file, fsync_directory, fsync_tree, replace_file, write_exclusive
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.elastic.checkpoint.marks import mark
from dalsegno.protos.contract import EXIT_FAILED, EXIT_FINISHED
from dalsegno.protos.options import UsageError, file_path, no_directory
from dalsegno.protos.run_file import RunFile, read_run_file
from dalsegno.protos.yaml_text import InputRefused

from .milestones.access import Access, add_tls
from .milestones.commander_client import Away, CommanderClient
from .saying import say
from .volume import Volume, damage_of

__all__ = ("add_export", "export")


def add_export(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `export`."""
    parser.add_argument("file", type=file_path, metavar="run.yaml", help="the run")
    parser.add_argument("directory", type=file_path, metavar="DIR", help="where it is copied to; it exists")
    add_tls(parser)


def export(options: argparse.Namespace) -> int:
    """Copies it, and verifies the copy. Returns 1 if there is nothing whole, or the copy failed.

    Raises:
        UsageError: bad input, in one line; nothing was copied.
    """
    try:
        file = read_run_file(options.file)
    except InputRefused as refused:
        raise UsageError("; ".join(refused.lines)) from refused
    volume, pack = Volume(file.l1_root, file.run_id), Volume(options.directory.absolute(), file.run_id)
    if problem := no_directory(volume.root):
        raise UsageError(f"{problem}: nothing of {file.run_id} is seen on this volume")
    if problem := no_directory(options.directory):
        raise UsageError(f"{problem}: make it, or mount there what the copy is to lie on")
    if os.path.realpath(options.directory) == os.path.realpath(file.l1_root):
        raise UsageError(f"{options.directory} is the volume itself: name another place")
    access = Access.given(options, file.commander)
    try:
        manifest = _chosen(volume, *_head(file, access))
        if manifest is None:
            return _failed(f"no checkpoint in {volume.job} is the run's and intact: nothing was copied")
        target = pack.directory_of(manifest)
        _copy(volume.directory_of(manifest), target, manifest, pack)
        _beside(options.file, volume, pack, manifest)
    except CheckpointDamaged as error:
        return _failed(f"the copy is damaged, and was removed: {error}")
    except OSError as error:
        return _failed(f"nothing was exported: {error}")
    print(f"{target}: step {manifest.step}, {manifest.total_bytes / 1e6:.1f} MB, copied and verified")
    return EXIT_FINISHED


def _head(file: RunFile, access: Access) -> tuple[str, str]:
    """The digest of the run's newest commit, or ""; and why it is not known, or what it is, for a person."""
    try:
        head = CommanderClient(file.commander, file.run_id, access).run().get("head")
    except Away as away:
        return "", str(away)
    if not isinstance(head, dict):
        return "", "the Commander knows no commit of the run"
    return str(
        head["digest"]
    ), f"{head['name']}, the run's last commit, is not on the volume, or its manifest is damaged"


def _chosen(volume: Volume, head: str, missing: str) -> Manifest | None:
    """The newest that is intact, and no newer than the head.

    Args:
        volume: the run's place.
        head: the digest of the newest commit, or "".
        missing: what a person is told if that is not on the volume, and so all of them are looked at.
    """
    every = volume.manifests()
    places = [number for number, one in enumerate(every) if isinstance(one, Manifest) and one.digest == head]
    if not places:
        say(f"{missing}: the newest intact checkpoint on the volume is taken, which may never have been committed")
    for one in every[places[0] if places else 0 :]:
        if not isinstance(one, Manifest):
            continue
        problem = damage_of(volume.directory_of(one), one)
        if not problem:
            return one
        say(f"{one.name} is damaged: {problem}: the one before is looked at")
    return None


def _copy(source: Path, target: Path, manifest: Manifest, pack: Volume) -> None:
    """Copies a checkpoint aside, verifies the copy, and puts it in its place. One that is there and whole stays.

    Raises:
        CheckpointDamaged: the copy is not what was sealed; it is gone again.
        OSError: the directory cannot be read or written.
    """
    if target.is_dir() and not damage_of(target, manifest):
        return
    aside = pack.ckpt / "_staging" / f"export-{secrets.token_hex(4)}"
    aside.mkdir(parents=True)
    try:
        for entry in manifest.files:
            (aside / entry.path).parent.mkdir(parents=True, exist_ok=True)
            copy_file(source / entry.path, aside / entry.path)
        write_exclusive(aside / MANIFEST, manifest.to_bytes())
        fsync_tree(aside)
        verify(aside, manifest)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            os.rename(target, target.with_name(f".damaged-{secrets.token_hex(4)}.{target.name}"))
        os.rename(aside, target)
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    mark(target)


def _beside(run_file: Path, volume: Volume, pack: Volume, manifest: Manifest) -> None:
    """What else belongs to it. Raises OSError."""
    replace_file(pack.root / "run.yaml", run_file.read_bytes())
    if volume.state.is_file():
        replace_file(pack.state, volume.state.read_bytes())
    known = Path(".dalsegno") / volume.run_id / "probe"
    if (volume.store / known).is_file():
        private = (pack.store / known).parent
        private.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(private / "probe", (volume.store / known).read_bytes())
        (private / "probe").chmod(0o600)
    pack.show(manifest.run_id, manifest.name, manifest.step, sys.maxsize)  # no pod of an earlier epoch: a person


def _failed(text: str) -> int:
    say(f"error: {text}")
    return EXIT_FAILED
