"""What a file system that fails for the moment hides: nobody takes it for not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.memory.durable import make_durable
from dalsegno.agent.storage import taking
from dalsegno.agent.storage.foreign import survey
from dalsegno.agent.storage.layouts import complete
from dalsegno.agent.storage.problems import is_gone
from dalsegno.elastic.checkpoint import MANIFEST, Manifest, files, verify
from dalsegno.elastic.checkpoint.reading import is_directory, is_file, is_there
from tests.support.checkpoints.memory import RUN, manifest_of, write_own
from tests.unit.agent.storage.test_adoption import ZERO_1, begun, sealed_step, states, world

Stale = Callable[..., None]


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> Stale:
    """Has the file system answer ESTALE for these paths; for none: for nothing any more."""
    hidden: set[str] = set()

    def failing(name: str) -> None:
        plain = getattr(os, name)

        def call(path: object = ".", *rest: object, **more: object) -> object:
            if not isinstance(path, int) and os.fspath(path) in hidden:  # type: ignore[call-overload]
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return plain(path, *rest, **more)

        monkeypatch.setattr(os, name, call)

    for name in ("stat", "lstat", "scandir"):
        failing(name)

    def stale(*paths: Path) -> None:
        hidden.clear()
        hidden.update(str(path) for path in paths)

    return stale


def test_only_what_is_not_there_is_no(tmp_path: Path, stale: Stale) -> None:
    """A missing name, a file on the way and a link to itself; also of what a link leads to."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to(tmp_path)
    assert [is_directory(tmp_path), is_directory(tmp_path / "link"), is_file(tmp_path / "file")] == [True, True, True]
    assert [is_there(tmp_path / name) for name in ("file", "link", "loop")] == [True, True, True]
    for name in ("none", "file/none", "loop", "loop/none"):
        assert [is_directory(tmp_path / name), is_file(tmp_path / name)] == [False, False]
    assert [is_there(tmp_path / name) for name in ("none", "file/none", "loop/none")] == [False, False, False]
    stale(tmp_path)
    for ask in (is_directory, is_file, is_there):
        with pytest.raises(OSError, match="Stale file handle"):
            ask(tmp_path)


def test_what_is_out_of_sight_is_not_gone(tmp_path: Path, stale: Stale) -> None:
    """A seal that the master hears is gone does not count."""
    path = tmp_path / "step-1.e1.1"
    with pytest.raises(Exception, match="not there") as missing:
        Manifest.read(path)
    assert is_gone(path, missing.value)
    for hidden in (path, tmp_path):
        stale(hidden)
        assert not is_gone(path, missing.value)


def test_a_seal_that_may_be_there_is_not_deleted(tmp_path: Path, stale: Stale, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal fails behind its last write, and then nobody can tell."""
    plain, target = taking.seal, tmp_path / "step-40.e1.1"

    def sealing(directory: Path, manifest: Manifest) -> None:
        plain(directory, manifest)
        if directory == target:
            stale(target / MANIFEST)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))

    monkeypatch.setattr(taking, "seal", sealing)
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    states(tmp_path / "e1" / "global_step40", *ZERO_1)
    heard.get(timeout=20)
    assert sealed_step(heard.get(timeout=20)) == 40
    taken.close()
    stale()
    verify(target, Manifest.read(target))


def test_a_directory_that_cannot_be_listed_is_not_empty(tmp_path: Path, stale: Stale) -> None:
    """Of a script's checkpoint with a link in it, which is sealed with what is listed; and of what is made durable."""
    for name in ("step_7/model.pt", "step_7/more/optimizer.pt"):
        states(tmp_path, name)
    (tmp_path / "step_7" / "same.pt").symlink_to("model.pt")
    (unit,) = [one for units in survey(tmp_path).series() for one in units]
    complete(tmp_path, unit, 1)
    stale(tmp_path / "step_7" / "more")
    with pytest.raises(OSError, match="Stale file handle"):
        complete(tmp_path, unit, 1)
    with pytest.raises(OSError, match="Stale file handle"):
        files.fsync_tree(tmp_path / "step_7")


def test_what_may_be_sealed_on_the_disk_is_not_written_again(tmp_path: Path, stale: Stale) -> None:
    """Its files would be replaced while somebody loads them."""
    memory, run_dir, content = tmp_path / "memory", tmp_path / RUN, {"large.pt": b"0123456789" * 100}
    memory.mkdir()
    name = "step-10.e3.1"
    manifest = manifest_of(name, {0: content})
    write_own(memory, manifest, 0, content)
    assert make_durable(memory / name, manifest, [*content], run_dir, str) == ""
    before = os.stat(run_dir / name / "large.pt").st_ino
    stale(run_dir / name / MANIFEST)
    assert make_durable(memory / name, manifest, [*content], run_dir, str).startswith("Stale file handle")
    stale(run_dir / name)
    assert make_durable(memory / name, manifest, [*content], run_dir, str).startswith("Stale file handle")
    stale()
    assert os.stat(run_dir / name / "large.pt").st_ino == before
