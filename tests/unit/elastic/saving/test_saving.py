"""A save in flight tells how far it is, so that a slow one is not taken for a stuck one; and what a save leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.workers.worker_env import WorldPlace, worker_environment
from dalsegno.elastic import background
from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, Position
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity, from_environment
from dalsegno.elastic.saving import saving, saving_reports
from dalsegno.protos import control_pb2
from tests.support.checkpoints.power import Image, Power, only_whole_checkpoints, sealed
from tests.support.workers.fake_link import FakeLink

pytestmark = pytest.mark.timeout(30)


class Heard(FakeLink):
    def bytes(self) -> list[int]:
        return [saving.bytes for saving in self.of("saving")]

    def wait_beyond(self, size: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.bytes()[-1:] > [size], 10), self.bytes()


def test_syncing_and_summing_are_seen_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the files are synced and read back the count goes on growing; every save starts under its own name."""
    monkeypatch.setattr(saving_reports, "REPORT_SECONDS", 0.01)
    plain, heard = saving.checksums, Heard()

    def slow(root: Path, paths: list[str], *, sync: bool, known: Any, moved: Any) -> Any:
        for path in paths:
            before = heard.bytes()[-1]
            plain(root, [path], moved=moved)
            heard.wait_beyond(before)
        return plain(root, paths, sync=sync, known=known)

    monkeypatch.setattr(saving, "checksums", slow)
    saver = saving.Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), heard, None)  # type: ignore[arg-type]

    def write(path: Path) -> None:
        (path / "a.pt").write_bytes(bytes(1000))
        heard.wait_beyond(0)
        (path / "b.pt").write_bytes(bytes(2000))

    for step in (1, 2):
        content = saving.Content(step, Position(0, 16 * step))
        manifest = saver.save(content, write, create_directory=True, drain=False)
        assert manifest is not None
        said = [message.saving for message in heard.said if message.saving.name == manifest.name]
        sizes = [one.bytes for one in said]
        assert sizes == sorted(sizes)
        assert sizes[-1] >= 3000 + manifest.total_bytes
        assert heard.said[-1].sealed.name == manifest.name
        heard.said.clear()
    saver.close()


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_a_power_cut_leaves_the_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """At any moment of a save: what has a manifest has every byte, and the checkpoint before is still there."""
    before: list[str] = []

    def look(image: Image) -> None:
        only_whole_checkpoints(image)
        assert set(before) <= set(sealed(image))

    power = Power(tmp_path, monkeypatch, look)
    saver = saving.Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), Heard(), None)  # type: ignore[arg-type]

    def write(path: Path) -> None:
        for name in ("a/1.pt", "a/2.pt", "b/c/3.pt"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(name.encode() * 100)

    for step in (1, 2):
        content = saving.Content(step, Position(0, 16 * step))
        if waits:
            manifest = saver.save(content, write, create_directory=True, drain=False)
            assert manifest is not None
            before.append(manifest.name)
        else:
            files = {name: name.encode() * 100 for name in ("a/1.pt", "a/2.pt", "b/c/3.pt")}
            assert saver.begin(content, background(lambda files=files: files), lambda: None, drain=False)  # type: ignore[misc]
            settled = saver.settle()
            assert settled is not None
            before.append(settled[1].name)
        assert set(before) <= set(sealed(power.image())), "what is announced is durable"
    saver.close()


def test_a_manifest_says_the_jobs_nodes(tmp_path: Path) -> None:
    """A master that lost its store reads min and max nodes there, as the agent's environment gave them to the rank."""
    settings = control_pb2.Settings(min_nodes=2, max_nodes=4)
    place = WorldPlace(group_rank=0, first_rank=0, nproc=1, nodes=1, world_size=1, node="node")
    world = control_pb2.World(epoch=1, run_id="run-0001")
    (given,) = worker_environment(world, place, settings, 1, "job", tmp_path, "default", {})
    identity = from_environment(given | {"LOCAL_RANK": "0", "DALSEGNO_SOCKET": "socket"})
    saver = saving.Saver(identity, Solo(), CheckpointStore(tmp_path), Heard(), None)  # type: ignore[arg-type]

    def write(path: Path) -> None:
        (path / "a.pt").write_bytes(bytes(10))

    manifest = saver.save(saving.Content(3, Position(0, 48)), write, create_directory=True, drain=False)
    saver.close()
    assert manifest is not None
    written = Manifest.read(tmp_path / manifest.name).to_proto()
    assert (written.min_nodes, written.max_nodes) == (2, 4)


def test_a_failed_save_names_its_boundary(tmp_path: Path) -> None:
    """By which the master knows of which drain a late report speaks."""
    heard = Heard()
    saver = saving.Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), heard, None)  # type: ignore[arg-type]

    def write(path: Path) -> None:
        raise OSError("no space")

    assert saver.save(saving.Content(7, Position(0, 112)), write, create_directory=True, drain=True) is None
    failed = heard.said[-1].save_failed
    assert (failed.step, failed.drain) == (7, True)
