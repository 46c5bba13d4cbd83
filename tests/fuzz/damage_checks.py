"""What must hold of a damaged directory: no traceback, nothing damaged called intact, all that is intact found."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from dalsegno.agent.commands import dalsegno
from dalsegno.agent.control.claim import ClaimFile
from dalsegno.agent.control.embedded import EmbeddedMaster
from dalsegno.agent.control.spawning import TokenLostError
from dalsegno.agent.storage import private as private_files
from dalsegno.agent.storage.job_directory import JobDirectory, StorageError
from dalsegno.elastic.checkpoint import MANIFEST, CheckpointStore, inspect, is_checkpoint_name
from dalsegno.elastic.checkpoint import files as checkpoint_files
from dalsegno.elastic.checkpoint.layout import SEALED
from dalsegno.elastic.checkpoint.marks import marked
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.saving.resuming import newest
from dalsegno.master.record.store import SqliteStore, StoreError

from .damages import JOB, RECORD, RUNS, Template, damage
from .good_agents import Broken

__all__ = ["KINDS", "check_one"]


def check_one(place: Path, template: Template, kind: str, seed: int, number: int) -> str:
    """Damages a copy and has somebody look at it; what did not hold and what was done, or nothing."""
    rng = random.Random(f"damages/{kind}/{seed}/{number}")
    root = template.copy(place / f"{number}")
    done = damage(rng, rng.choice(_PRUNED) if kind == "prune" else kind, root, template)
    # A reader that finds a small file empty waits for its writer, who does not come here; and the files are small.
    private_files.PUBLISHED_PAUSE_SECONDS = 0.001
    checkpoint_files.READ_BYTES = 1 << 12
    try:
        KINDS[kind](rng, root, template)
    except Broken as broken:
        return f"{'; '.join(done)}: {broken}"
    except Exception as error:
        return f"{'; '.join(done)}: {type(error).__name__}: {error} (in {_where(error)})"
    finally:
        _delete(root)
    return ""


def _look(rng: random.Random, root: Path, template: Template) -> None:
    intact = {name for name in template.checkpoints() if template.is_intact(root, name)}
    _check_inventory(root, template, intact, check_sizes=rng.random() < 0.5)
    whole = {name for name in template.checkpoints() if template.is_whole(root, name)}
    _check_commands(rng, root, intact, whole)
    _check_resuming(root, intact, whole)


def _there(root: Path, run: str) -> bool:
    """Whether a run's directory is one, and lies where it belongs."""
    path = root / JOB / run
    return path.is_dir() and not path.is_symlink()


def _check_inventory(root: Path, template: Template, intact: set[str], check_sizes: bool) -> None:
    known = set(template.digests.values())
    for run in filter(lambda run: _there(root, run), RUNS):
        sealed = inspect(root / JOB / run, check_sizes=check_sizes).sealed
        wanted = {name.partition("/")[2] for name in intact if name.startswith(run)}
        if missing := wanted - {manifest.name for manifest in sealed}:
            raise Broken(f"the inventory lacks {sorted(missing)}, which are intact")
        if false := [manifest.name for manifest in sealed if manifest.digest not in known]:
            raise Broken(f"the inventory has a manifest of {false} that nobody wrote")


def _check_commands(rng: random.Random, root: Path, intact: set[str], whole: set[str]) -> None:
    code, said = _run("checkpoints", "verify", str(root))
    called = {name for name in _named(root) if f"{root / JOB / name}: intact" in said}
    if lies := called - whole:
        raise Broken(f"verify calls {sorted(lies)} intact")
    reachable = {name for name in intact if _there(root, name.partition("/")[0])}
    if missing := reachable - called:
        raise Broken(f"verify does not call {sorted(missing)} intact: {said[-500:]}")
    damaged = {name for name in _named(root) - whole if not _is_unsealed(root / JOB / name)}
    if code == 0 and damaged:
        raise Broken(f"verify ended with 0 although {sorted(damaged)} are damaged")
    code, said = _run("checkpoints", "ls", str(root))
    if missing := [name for name in reachable if f"  {name.partition('/')[2]}  " not in said]:
        raise Broken(f"ls does not list {missing}")
    _run("checkpoints", "show", str(root / JOB / rng.choice(sorted(_named(root) or {"none"}))))


def _is_unsealed(path: Path) -> bool:
    """Whether a run that has sealed others has neither sealed nor marked this one: a save that goes on looks so."""
    if not path.is_dir() or os.path.lexists(path / MANIFEST):
        return False
    return (path.parent / SEALED).is_dir() and path.name not in marked(path.parent)


def _named(root: Path) -> set[str]:
    """`run/name` of all that carries a checkpoint's name."""
    found = set()
    for run in filter(lambda run: _there(root, run), RUNS):
        found |= {f"{run}/{name}" for name in os.listdir(root / JOB / run) if is_checkpoint_name(name)}
    return found


def _run(*arguments: str) -> tuple[int, str]:
    """A command as a person gives it; its exit code, and all that it said."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = dalsegno.run(arguments)
    if code not in (0, 1, 2):
        raise Broken(f"{' '.join(arguments[:2])} ended with {code}")
    return code, output.getvalue()


def _check_resuming(root: Path, intact: set[str], whole: set[str]) -> None:
    """A run goes on from the newest that is intact, or from a newer one that a link leads to."""
    for run in filter(lambda run: _there(root, run), RUNS):
        sound = _sharded(intact, run)
        try:
            point = newest(CheckpointStore(root / JOB / run), Solo(), 1)
        except RuntimeError as error:
            if sound:
                raise Broken(f"{run} cannot go on although {sound} are intact: {error}") from None
            continue
        possible = [name for name in _sharded(whole, run) if name >= (sound or [""])[-1]]
        if (point is None and sound) or (point is not None and point.path.name not in possible):
            raise Broken(f"{run} goes on from {point and point.path.name}, and {sound} are intact")


def _sharded(names: set[str], run: str) -> list[str]:
    """The checkpoints of a run among `run/name`, from old to new."""
    return sorted(name.partition("/")[2] for name in names if name.startswith(run) and ".universal." not in name)


def _check_private(rng: random.Random, root: Path, template: Template) -> None:
    private = root / ".dalsegno" / JOB
    with contextlib.suppress(OSError, StorageError):
        probe = JobDirectory(root, JOB).survey().probe
        if not (len(probe) <= 256 and probe.isprintable()):
            raise Broken(f"the probe is {probe[:80]!r}")
    with contextlib.suppress(OSError):
        claim = ClaimFile(private).read()
        if claim is not None:
            _check_claim(claim.__dict__)
    with contextlib.suppress(OSError, TokenLostError):
        token = EmbeddedMaster(private, JOB, 10.0).credentials().token
        if not token or len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
            raise Broken(f"the token is {token!r}")


def _check_claim(claim: dict[str, object]) -> None:
    """Whoever reads it kills the process that it names, and takes over above its generation."""
    for name in ("pid", "start_time", "generation", "counter"):
        value = claim[name]
        if type(value) is not int or not 0 <= value < 2**63:
            raise Broken(f"a claim is believed whose {name} is {value!r}")
    for name in ("host", "boot_id", "address"):
        value = claim[name]
        if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
            raise Broken(f"a claim is believed whose {name} is {str(value)[:80]!r}")


def _check_store(rng: random.Random, root: Path, template: Template) -> None:
    """The record as it was, nothing yet, or a refusal in one line. Never another record."""
    path = root / ".dalsegno" / JOB / "master.sqlite"
    # SQLite takes what is shorter than its smallest page for a file that nobody has written to yet.
    fresh = not path.exists() or (path.is_file() and path.stat().st_size < 512)
    try:
        store = SqliteStore(path, JOB)
    except StoreError as error:
        _one_line(error)
        return
    with contextlib.closing(store):
        try:
            generation = store.raise_generation()
            data = store.load()
        except StoreError as error:
            _one_line(error)
            return
        if fresh and (data, generation) == ({}, 1):
            return
        if data != RECORD:
            raise Broken(f"the store gives {data!r:.200} for its record")
        if generation != 5:
            raise Broken(f"the store gives out generation {generation} after 4")


def _one_line(error: StoreError) -> None:
    if not str(error).isprintable() or len(str(error)) > 1000:
        raise Broken(f"the store says {str(error)!r:.200}")


def _check_prune(rng: random.Random, root: Path, template: Template) -> None:
    """The newest that is whole stays, and so does what is not ours to delete; the rest goes in spite of it."""
    intact = {name for name in template.checkpoints() if template.is_intact(root, name)}
    headless = [name for name in template.checkpoints() if _is_headless(root / JOB / name)]
    before = sorted(path.name for path in template.elsewhere.rglob("*"))
    where = rng.choice((root, root / JOB / RUNS[0]))
    _, said = _run("checkpoints", "prune", str(where), "--keep", str(rng.choice((1, 2))))
    if sorted(path.name for path in template.elsewhere.rglob("*")) != before:
        raise Broken(f"prune deleted somewhere else: {said[-500:]}")
    if gone := [name for name in headless if not _is_headless(root / JOB / name)]:
        raise Broken(f"prune deleted {gone}, which have only lost their manifests: {said[-500:]}")
    for run in RUNS:
        sound = sorted(name for name in intact if name.startswith(run) and ".universal." not in name)
        gone = {name for name in intact if name.startswith(run) and not template.is_intact(root, name)}
        if gone & set(sound[-1:]):
            raise Broken(f"prune deleted {sound[-1]}, the newest that is intact: {said[-500:]}")
        if gone and run == RUNS[1]:
            raise Broken(f"prune deleted {sorted(gone)}, whose run has not finished: {said[-500:]}")


def _is_headless(directory: Path) -> bool:
    """Whether a checkpoint's own directory is there, with files and without a manifest."""
    there = directory.is_dir() and not directory.is_symlink() and (directory / "model.pt").is_file()
    return there and not os.path.lexists(directory / "MANIFEST.json")


# What of the directory is damaged, and who looks at it then.
KINDS: dict[str, Callable[[random.Random, Path, Template], None]] = {
    "manifests": _look,
    "files": _look,
    "directories": _look,
    "notes": _look,
    "private": _check_private,
    "store": _check_store,
    "prune": _check_prune,
}
_PRUNED = ("manifests", "files", "directories", "notes")


def _where(error: BaseException) -> str:
    """The innermost line of ours."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    ours = [frame for frame in frames if not frame.startswith(("damage_checks", "damages"))]
    return " < ".join(reversed(ours[:4]))


def _delete(root: Path) -> None:
    for current, _, _ in os.walk(root):
        with contextlib.suppress(OSError):
            os.chmod(current, 0o700)
    shutil.rmtree(root, ignore_errors=True)
