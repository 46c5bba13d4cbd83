"""A checkpoint directory, and what disks, people and other programs do to it. Each damage follows from its number."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint import (
    SHARDED,
    UNIVERSAL,
    Best,
    CheckpointName,
    CheckpointStore,
    Manifest,
    Order,
    Position,
    Shape,
    describe,
    is_checkpoint_name,
    seal,
)
from dalsegno.master.record.store import SqliteStore

__all__ = ["AREAS", "JOB", "RECORD", "RUNS", "Template", "damage"]

JOB = "job"
RUNS = ("run-0001", "run-0002")
# What the store holds; its shape is the master's own business.
RECORD = {f"row/{number}": json.dumps({"number": number, "job": list(range(20))}).encode() for number in range(8)}
BRACKETS = 200_000


@dataclass
class Template:
    """The whole directory, and beside it a place that belongs to somebody else: nothing may be deleted there."""

    root: Path
    elsewhere: Path
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, place: Path) -> Template:
        """Two runs, one of them finished; checkpoints, a universal form, notes, and an embedded master's files."""
        made = cls(place / "root", place / "elsewhere")
        for number, run in enumerate(RUNS):
            store = CheckpointStore(made.root / JOB / run)
            before = None
            for step in (10, 20, 30)[number:]:
                before = made._checkpoint(store, CheckpointName(step, 1 + step // 30, 1), run, before)
            if number == 0:
                form = CheckpointName(20, 1, 1).later(UNIVERSAL, 1)
                made._checkpoint(store, form, run, made._read(store, "step-20.e1.1"))
            head = made._read(store, "step-30.e2.1")
            store.write_latest(head)
            store.write_best(Best(head.name, "loss", "min", 0.5))
            if number == 0:
                store.mark_finished(30, head)
        made._private(made.root / ".dalsegno" / JOB)
        shutil.copytree(made.root / JOB / RUNS[0] / "step-10.e1.1", made.elsewhere / "step-10.e1.1")
        (made.elsewhere / "precious").write_bytes(b"not yours")
        return made

    def _checkpoint(self, store: CheckpointStore, name: CheckpointName, run: str, before: Manifest | None) -> Manifest:
        path = store.path(str(name))
        (path / "parts").mkdir(parents=True)
        for file in ("model.pt", "parts/rank-0.json"):
            (path / file).write_bytes(random.Random(f"{run}/{name}/{file}").randbytes(200))
        later = name.form != SHARDED
        ref = None if before is None else before.ref
        manifest = Manifest(
            name=str(name),
            job_id=JOB,
            run_id=run,
            step=name.step,
            epoch=name.epoch,
            generation=1,
            form=name.form,
            shape=Shape(1, "deepspeed-zero-2", any_world_size=True, reshards=not later),
            position=Position(0, 16 * name.step),
            order=Order(7, 1000, 16, True),
            source=ref if later else None,
            resumed_from=ref if name.epoch == 2 and ref is not None else None,
            min_nodes=1,
            max_nodes=4,
            metric=0.5,
            files=describe(path, sync=False),
            best=Best(str(name.source), "loss", "min", 0.5),
            keep=None if later else 5,
        )
        self.digests[f"{run}/{name}"] = seal(path, manifest)
        return manifest

    @staticmethod
    def _read(store: CheckpointStore, name: str) -> Manifest:
        return Manifest.read(store.path(name))

    @staticmethod
    def _private(private: Path) -> None:
        private.mkdir(parents=True, mode=0o700)
        (private / "probe").write_text("0123456789abcdef" * 2)
        (private / "token").write_text("f" * 64 + "\n")
        (private / "token").chmod(0o600)
        claim = {"host": "elsewhere", "boot_id": "b", "pid": 1, "start_time": 1, "generation": 4, "counter": 9}
        (private / "claim.json").write_text(json.dumps({**claim, "address": "127.0.0.1:1"}))
        store = SqliteStore(private / "master.sqlite", JOB)
        generation = [store.raise_generation() for _ in range(4)][-1]
        store.save({**RECORD}, generation)
        store.close()

    def copy(self, place: Path) -> Path:
        """The directory anew, to be damaged."""
        shutil.copytree(self.root, place, symlinks=True)
        return place

    def checkpoints(self) -> list[str]:
        """`run/name` of each."""
        return list(self.digests)

    def is_intact(self, root: Path, checkpoint: str) -> bool:
        """Whether there is not a byte, a name or a kind of file different below a checkpoint's directory."""
        return _tree(root / JOB / checkpoint) == _tree(self.root / JOB / checkpoint)

    def is_whole(self, root: Path, checkpoint: str) -> bool:
        """Whether all that it holds is there, also where a link in the place of its directory leads to it."""
        there = Path(os.path.realpath(root / JOB / checkpoint))
        return there.is_dir() and _tree(there) == _tree(self.root / JOB / checkpoint)


def _tree(directory: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {".": _kind(directory)}
    if found["."] != "directory":
        return found
    for current, folders, files in os.walk(directory):
        for name in (*folders, *files):
            path = Path(current) / name
            kind = _kind(path)
            # An empty directory more holds nothing that could be loaded.
            if kind != "directory":
                found[str(path.relative_to(directory))] = path.read_bytes() if kind == "file" else kind
    return found


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "directory"
    return "file" if path.is_file() else "nothing" if not path.exists() else "something else"


# ---- what is done to a file or a directory ---------------------------------------------------------------------------

Deed = Callable[[random.Random, Path, Template], None]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flip(rng: random.Random, path: Path, template: Template) -> None:
    data = bytearray(path.read_bytes())
    # A database is mostly empty space: half of the flips are where there is something.
    used = [where for where, byte in enumerate(data) if byte] if rng.random() < 0.5 else []
    if data:
        data[rng.choice(used or range(len(data)))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def _cut(rng: random.Random, path: Path, template: Template) -> None:
    os.truncate(path, rng.choice((0, 1, rng.randrange(path.stat().st_size + 1))))


def _grow(rng: random.Random, path: Path, template: Template) -> None:
    with path.open("ab") as file:
        file.write(rng.choice((b"\n", b"\0", b"{}", rng.randbytes(50))))


def _overwrite(rng: random.Random, path: Path, template: Template) -> None:
    texts = (
        b"",
        b"\xff\xfe\0garbage",
        b"null\n",
        b"[]",
        b"{}",
        b'"' + b"x" * 100_000 + b'"',
        b"[" * BRACKETS,
        b'{"a":' * BRACKETS,
        b"1" * 5000,
        b"1e999999",
        b"NaN",
        rng.randbytes(300),
    )
    path.write_bytes(rng.choice(texts))


def _lie(rng: random.Random, path: Path, template: Template) -> None:
    """Another value in well-formed JSON, spelt as ours are."""
    try:
        content: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return _flip(rng, path, template)
    if isinstance(content, dict) and content:
        values = (None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, "", "..", "../../elsewhere/precious", [], {})
        holder, key = content, rng.choice(sorted(content))
        while isinstance(holder[key], dict) and holder[key] and rng.random() < 0.8:
            holder, key = holder[key], rng.choice(sorted(holder[key]))
        if isinstance(holder[key], list) and holder[key] and rng.random() < 0.8:
            entry = rng.choice(holder[key])
            if isinstance(entry, dict):
                holder, key = entry, rng.choice(sorted(entry))
        holder[key] = rng.choice(values)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    path.write_bytes(text.encode() + b"\n")
    return None


def _delete(rng: random.Random, path: Path, template: Template) -> None:
    _remove(path)


def _replace(rng: random.Random, path: Path, template: Template) -> None:
    """Something else under the same name: a pipe, a link, a loop, a device, a directory."""
    _remove(path)
    match rng.randrange(9):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to(path.name)
        case 2:
            path.symlink_to(template.elsewhere / "precious")
        case 3:
            path.symlink_to(template.elsewhere / "step-10.e1.1")
        case 4:
            path.symlink_to("/dev/zero")
        case 5:
            path.symlink_to("/nowhere/at/all")
        case 6:
            path.mkdir()
            (path / "in the way").touch()
        case 7:
            with socket.socket(socket.AF_UNIX) as one:
                # The path of a socket is short; the directory's is not.
                here = os.open(path.parent, os.O_RDONLY)
                try:
                    one.bind(f"/proc/self/fd/{here}/{path.name}")
                finally:
                    os.close(here)
        case 8:
            path.touch()


def _forbid(rng: random.Random, path: Path, template: Template) -> None:
    path.chmod(rng.choice((0o000, 0o200, 0o777, 0o4777)))


def _swap(rng: random.Random, path: Path, template: Template) -> None:
    """Changes places with another of its directory; a file also with its namesake in another checkpoint of the run."""
    namesakes = [] if path.is_dir() else path.parent.parent.glob(f"*/{path.name}")
    others = sorted(other for other in (*path.parent.iterdir(), *namesakes) if other != path)
    # Runs that are called by each other's names are whole, only not where they were.
    if others and path.name not in RUNS:
        other, aside = rng.choice(others), path.with_name("aside")
        if path not in other.parents and other not in path.parents:
            path.rename(aside)
            other.rename(path)
            aside.rename(other)


def _add(rng: random.Random, path: Path, template: Template) -> None:
    """Something that nobody listed, in a directory."""
    if not path.is_dir():
        path = path.parent
    extra = path / rng.choice(("extra", "model.pt.tmp", "a\nb", "-rf", ".nfs0001", "step-99.e9.1", "latest", "e9"))
    if os.path.lexists(extra):
        return
    match rng.randrange(6):
        case 0:
            extra.touch()
        case 1:
            extra.mkdir()
        case 2:
            os.mkfifo(extra)
        case 3:
            extra.symlink_to(extra.name)
        case 4:
            extra.symlink_to(template.elsewhere)
        case 5:
            extra.mkdir()
            _replace(rng, extra / "MANIFEST.json", template)


FILE_DEEDS: tuple[Deed, ...] = (_flip, _flip, _flip, _cut, _grow, _overwrite, _lie, _delete, _replace, _forbid, _swap)
DIRECTORY_DEEDS: tuple[Deed, ...] = (_delete, _replace, _replace, _forbid, _swap, _add, _add)


def _manifests(root: Path) -> list[Path]:
    return sorted(root.glob(f"{JOB}/*/*/MANIFEST.json"))


def _shards(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{JOB}/*/step-*/**/*") if path.is_file() and path.name != "MANIFEST.json")


def _directories(root: Path) -> list[Path]:
    inside = [path for path in root.glob(f"{JOB}/*/**") if path.is_dir()]
    return sorted(path for path in inside if is_checkpoint_name(path.name) or path.name in ("parts", *RUNS))


def _notes(root: Path) -> list[Path]:
    return sorted(path for path in root.glob(f"{JOB}/*/*.json"))


def _private_files(root: Path) -> list[Path]:
    private = root / ".dalsegno" / JOB
    return [private / name for name in ("probe", "claim.json", "token")]


def _store_files(root: Path) -> list[Path]:
    return [root / ".dalsegno" / JOB / "master.sqlite"]


# What is damaged, and how.
AREAS: dict[str, tuple[Callable[[Path], list[Path]], tuple[Deed, ...]]] = {
    "manifests": (_manifests, FILE_DEEDS),
    "files": (_shards, FILE_DEEDS),
    "directories": (_directories, DIRECTORY_DEEDS),
    "notes": (_notes, FILE_DEEDS),
    "private": (_private_files, FILE_DEEDS),
    "store": (_store_files, FILE_DEEDS),
}


def damage(rng: random.Random, area: str, root: Path, template: Template) -> list[str]:
    """Does one to three things to a fresh copy; says what, for a person."""
    find, deeds = AREAS[area]
    done = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        # What was replaced a moment ago is not there any more, or is something that deeds cannot be done to.
        kind = stat.S_ISDIR if deeds is DIRECTORY_DEEDS else stat.S_ISREG
        targets = [path for path in find(root) if os.path.lexists(path) and kind(path.lstat().st_mode)]
        if targets:
            path, deed = rng.choice(targets), rng.choice(deeds)
            deed(rng, path, template)
            done.append(f"{deed.__name__.strip('_')} {path.relative_to(root)}")
    return done
