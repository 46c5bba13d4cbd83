"""What agents tell of a checkpoint directory: little, whatever is in it; and what of the resume point is no good."""

from __future__ import annotations

import os
import queue
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.decisions.state import Admission, Join
from dalsegno.agent.storage import job_directory as agent_storage
from dalsegno.agent.storage import survey
from dalsegno.agent.storage.job_directory import JobDirectory, Storage, Survey
from dalsegno.agent.storage.survey import Manifests, look_at, newest_of
from dalsegno.elastic.checkpoint import Best, CheckpointName, Manifest, Position, Ref, Shape
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.limits import MOST_CHECKPOINTS, MOST_FINISHED_RUNS, MOST_UNUSABLE
from tests.support.checkpoints.damage import HARM, loop
from tests.unit.agent.storage.test_storage import Pauses, make_checkpoint

pytestmark = pytest.mark.timeout(120)


def put(run: Path, name: str, **changes: Any) -> Manifest:
    """A sealed checkpoint without files, made quickly."""
    parsed = CheckpointName.parse(name)
    manifest = Manifest(
        name=name,
        job_id="job",
        run_id=run.name,
        step=parsed.step,
        epoch=parsed.epoch,
        generation=1,
        form=parsed.form,
        shape=Shape(1, "ddp", True),
        position=Position(0, 16),
        order=None,
        source=None if parsed.lease is None else Ref(str(parsed.source), "ab" * 32),
        resumed_from=None,
        min_nodes=1,
        max_nodes=2,
        metric=None,
        files=(),
    )
    manifest = replace(manifest, **changes)
    (run / name).mkdir(parents=True)
    (run / name / "MANIFEST.json").write_bytes(manifest.to_bytes())
    return manifest


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each manifest was read."""
    counted: Counter[str] = Counter()
    read = Manifest.read.__func__  # type: ignore[attr-defined]

    def counting(cls: type[Manifest], path: Path) -> Manifest:
        counted[path.name] += 1
        manifest: Manifest = read(cls, path)
        return manifest

    monkeypatch.setattr(Manifest, "read", classmethod(counting))
    return counted


def told(found: Survey | tuple[list[pb.Checkpoint], object, object]) -> set[str]:
    inventory = found.inventory if isinstance(found, Survey) else found[0]
    return {one.ref.name for one in inventory}


@pytest.mark.full
@pytest.mark.slow
def test_a_join_among_ten_thousand_checkpoints_reads_a_handful(directory: JobDirectory, reads: Counter[str]) -> None:
    """And its message is small; the next one reads the resume point alone; a registration tells of 256 at most."""
    run = directory.run("run-0001")
    head = [put(run, f"step-{step}.e{1 + step // 2500}.1") for step in range(10_000)][-1]
    resume = pb.CheckpointRef(name="step-5000.e3.1", digest=Manifest.read(run / "step-5000.e3.1").digest)
    reads.clear()
    seen = directory.look("run-0001", resume, (head.epoch, head.step))
    assert resume in [one.ref for one in seen.inventory]
    assert reads.total() <= 40
    assert pb.JoinRequest(inventory=seen.inventory, probe=seen.probe).ByteSize() < 16_000
    reads.clear()
    assert directory.look("run-0001", resume, (head.epoch, head.step)) == seen
    assert reads == {resume.name: 1}
    at_first = directory.look("run-0001", None, None)
    assert len(at_first.inventory) == MOST_CHECKPOINTS
    reads.clear()
    known = directory.survey()
    assert told(known) == {f"step-{step}.e4.1" for step in range(10_000 - MOST_CHECKPOINTS, 10_000)}
    assert not reads
    assert pb.RegisterRequest(inventory=known.inventory).ByteSize() < 100_000


def test_a_join_tells_what_the_master_may_not_know(directory: JobDirectory) -> None:
    """What was sealed since the newest commit, what a closed epoch sealed too late, and forms with them."""
    run = directory.run("run-0001")
    for step in range(10, 200, 10):
        put(run, f"step-{step}.e3.1")
    for step in range(200, 700, 10):
        put(run, f"step-{step}.e5.1")
    late, new = put(run, "step-205.e3.1"), put(run, "step-700.e5.1")
    put(run, "step-700.e5.1.universal.9")
    (run / "step-710.e5.1").mkdir()
    seen = directory.look("run-0001", None, (5, 690))
    assert {late.name, new.name, "step-700.e5.1.universal.9"} <= told(seen)
    assert seen.unusable == ()
    assert "step-10.e3.1" not in told(seen)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 10))])
def test_a_join_tells_nothing_old_that_a_registration_leaves_out(tmp_path: Path, seed: int) -> None:
    """A master that has lost its store would take it for what the run has left, and have it deleted."""
    chance = random.Random(seed)
    run = tmp_path / "run-0001"
    epochs = chance.choice([2, 9, 60])
    for number in range(600):
        name = CheckpointName(number, 1 + number * epochs // 600, 1)
        put(run, str(name))
        if chance.random() < 0.8:
            put(run, str(name.later("universal", 1)))
            put(run, str(name.later("universal", 2)))
    manifests = Manifests()
    known = {one.ref.name for one in newest_of(run, manifests)}
    assert len(known) == MOST_CHECKPOINTS
    assert told(look_at(run, None, (epochs, 599), manifests)) <= known


@pytest.mark.slow
def test_a_registration_brings_the_best(directory: JobDirectory) -> None:
    """However long ago it was; and of older runs which epochs there were; and not more than the newest finished."""
    run = directory.run("run-0002")
    best = put(run, "step-1.e1.1")
    for step in range(2, 300):
        put(run, f"step-{step}.e1.1", best=Best(best.name, "loss", "min", 0.5), metric=1.0)
    put(directory.run("run-0001"), "step-7.e9.1")
    put(directory.run("run-0001"), "step-8.e9.1")
    for number in range(3, 3 + MOST_FINISHED_RUNS + 5):
        (directory.runs / f"run-{number:04d}").mkdir()
        (directory.runs / f"run-{number:04d}" / "FINISHED.json").touch()
    seen = directory.survey()
    assert {best.name, "step-299.e1.1"} <= told(seen)
    assert len(seen.inventory) == MOST_CHECKPOINTS
    assert len(seen.finished_runs) == MOST_FINISHED_RUNS
    assert seen.finished_runs[-1] == f"run-{2 + MOST_FINISHED_RUNS + 5:04d}"
    shutil.rmtree(run)
    assert told(directory.survey()) == {"step-7.e9.1", "step-8.e9.1"}
    put(run, "step-300.e1.1")
    assert told(directory.survey()) == {"step-300.e1.1", "step-8.e9.1"}


# ---- the resume point ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", HARM)
def test_a_resume_point_in_sight_with_another_manifest_is_told(directory: JobDirectory, harm: str) -> None:
    """After a few looks, long before a directory that is out of sight is given up; and nothing of it is in sight."""
    run = directory.run("run-0001")
    before, resume = put(run, "step-1.e1.1"), put(run, "step-2.e1.1")
    act, reason = HARM[harm]
    act(run / resume.name / "MANIFEST.json")
    storage = Storage(directory)
    pauses: Any = Pauses(1000)
    storage._closing = pauses
    seen: queue.SimpleQueue[Survey] = queue.SimpleQueue()
    storage.look("run-0001", resume.to_proto().ref, False, seen.put, seconds=10_000)
    found = seen.get(timeout=60)
    storage.close()
    assert [one.name for one in found.unusable] == [resume.name]
    assert reason in found.unusable[0].reason
    assert [one.ref.name for one in found.inventory if one.ref.digest == resume.digest] == []
    assert before.name in told(found)
    assert 1 < len(pauses.seconds) < agent_storage._UNUSABLE_LOOKS


def test_a_resume_point_out_of_sight_is_not_called_damaged(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is not there, or the file system lets nobody read: that says nothing about it."""
    run = directory.run("run-0001")
    resume = put(run, "step-2.e1.1")
    ref = resume.to_proto().ref
    assert directory.look("run-0001", ref, None).unusable == ()

    def spoiled(path: Path) -> Manifest:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "read", spoiled)
        assert directory.look("run-0001", ref, None).unusable == ()
    loop(run / resume.name)
    assert directory.look("run-0001", ref, None).unusable == ()
    (run / resume.name).unlink()
    assert directory.look("run-0001", ref, None).unusable == ()


def test_later_forms_that_are_no_good_are_told(directory: JobDirectory) -> None:
    """Those that are damaged, of another source, or still being made, the newest at most; a good one is in sight."""
    run = directory.run("run-0001")
    resume = put(run, "step-2.e1.1")
    good = put(run, f"{resume.name}.universal.1", source=resume.ref)
    bad = put(run, f"{resume.name}.universal.2", source=resume.ref)
    (run / bad.name / "MANIFEST.json").write_bytes(b"")
    put(run, f"{resume.name}.universal.3")
    (run / f"{resume.name}.universal.4").mkdir()
    seen = directory.look("run-0001", resume.to_proto().ref, None)
    assert {resume.name, good.name} <= told(seen)
    assert [one.name.rpartition(".")[2] for one in seen.unusable] == ["4", "3", "2"]
    for lease in range(5, 5 + 2 * MOST_UNUSABLE):
        (run / f"{resume.name}.universal.{lease}").mkdir()
    assert len(directory.look("run-0001", resume.to_proto().ref, None).unusable) == MOST_UNUSABLE


@pytest.mark.slow
def test_a_patient_look_tells_of_damage_and_goes_on(directory: JobDirectory) -> None:
    """Once; and once more when the resume point is sound after all."""
    run = directory.run("run-0001")
    resume = put(run, "step-2.e1.1")
    path = run / resume.name / "MANIFEST.json"
    sound = path.read_bytes()
    path.write_bytes(b"")
    storage = Storage(directory)
    seen: queue.SimpleQueue[Survey] = queue.SimpleQueue()
    storage.look("run-0001", resume.to_proto().ref, True, seen.put)
    assert [one.name for one in seen.get(timeout=30).unusable] == [resume.name]
    path.write_bytes(sound)
    found = seen.get(timeout=30)
    storage.close()
    assert (found.unusable, resume.name in told(found)) == ((), True)
    assert seen.empty()


def test_the_join_carries_what_is_unusable() -> None:
    """Both answers of a patient look are sent."""
    state = replace_state()
    bad = (pb.UnusableCheckpoint(name="step-2.e1.1", reason="empty"),)
    for unusable in (bad, ()):
        event = ev.JoinPrepared(2, "d3", "h", 7, "probe", (), unusable)
        state, actions = handling.handle(state, event, 0.0)
        (call,) = [action for action in actions if isinstance(action, ev.Call)]
        assert isinstance(call.request, pb.JoinRequest)
        assert tuple(call.request.unusable) == unusable


def replace_state() -> handling.AgentState:
    """An agent that prepares a patient Join of round 2."""
    state = handling.fresh(handling.AgentSettings())
    state.incarnation = "i"
    state.place = Admission(pb.Wait(round=2, look_for=pb.CheckpointRef(digest="d3")), Join(2, "d3", patient=True))
    return state


def test_a_manifest_that_changes_is_read_again(tmp_path: Path, reads: Counter[str]) -> None:
    """A good one and a bad one alike; what is remembered is bounded."""
    run = tmp_path / "run-0001"
    manifest = put(run, "step-2.e1.1")
    manifests = Manifests()
    for _ in range(3):
        assert manifests.describe(run / manifest.name) == manifest.to_proto()
    assert reads.total() == 1
    (run / manifest.name / "MANIFEST.json").write_bytes(b"torn")
    for _ in range(3):
        assert list(manifests.usable(run, [CheckpointName.parse(manifest.name)])) == []
    assert reads.total() == 2
    (run / manifest.name / "MANIFEST.json").write_bytes(manifest.to_bytes())
    assert manifests.describe(run / manifest.name) == manifest.to_proto()
    for number in range(survey._REMEMBERED + 10):
        manifests._remember(tmp_path / str(number), (0, 0, 0), "")
    assert len(manifests._known) == survey._REMEMBERED


def test_agents_register_beside_whatever_lies_there(directory: JobDirectory) -> None:
    """Loops, pipes, files, names in no encoding, runs of other programs: none of it stops or is told."""
    run = directory.run("run-0001")
    good = make_checkpoint(run, "step-1.e1.1")
    for number, harm in enumerate(HARM.values()):
        harm[0](run / put(run, f"step-{2 + number}.e1.1").name / "MANIFEST.json")
    (run / "step-90.e1.1").symlink_to(run / "step-90.e1.1")
    os.mkfifo(run / "step-91.e1.1")
    (run / "step-92.e1.1").touch()
    os.mkdir(os.fsencode(run) + b"/step-\xff")
    os.mkdir(os.fsencode(directory.runs) + b"/run-\xff")
    (directory.runs / "run-0009").symlink_to(directory.runs / "run-0009")
    (directory.runs / "run-0008").touch()
    (directory.runs / "tensorboard").mkdir()
    (directory.runs / "tensorboard" / "FINISHED.json").touch()
    other = put(run, "step-93.e1.1")
    seen = directory.survey()
    assert told(seen) == {good.name, other.name, "step-5.e1.1"}  # sealed, with another manifest
    assert seen.finished_runs == ()
    pb.RegisterRequest(inventory=seen.inventory, finished_runs=seen.finished_runs).SerializeToString()
    assert told(directory.look("run-0001", good.to_proto().ref, None)) == told(seen)
