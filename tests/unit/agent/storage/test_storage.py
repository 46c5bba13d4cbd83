"""The agent's work in the checkpoint directory, and the conversion job with a scripted converter."""

from __future__ import annotations

import errno
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.decisions.events import ConversionUpdate, ManifestRead, VerificationMoved
from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.processes.proc import start_time
from dalsegno.agent.standby.standby_pool import StandbyPool
from dalsegno.agent.storage import job_directory as agent_storage
from dalsegno.agent.storage import private
from dalsegno.agent.storage.job_directory import JobDirectory, Storage, StorageError, Survey
from dalsegno.agent.storage.private import NotPrivateError
from dalsegno.agent.workers.conversion_job import NICENESS, ConversionJob
from dalsegno.elastic.checkpoint import CheckpointName, Manifest, Position, Shape, describe, seal
from dalsegno.elastic.checkpoint.marks import marked
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.limits import MOST_EARLIER
from tests.support.checkpoints.damage import HARM
from tests.support.jobs.local_processes import many_open_files, process_state

pytestmark = pytest.mark.timeout(60)


def make_checkpoint(run_dir: Path, name: str, content: bytes = b"weights", **changes: Any) -> Manifest:
    """A sealed checkpoint with one file; `changes` to its manifest."""
    path = run_dir / name
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(content)
    parsed = CheckpointName.parse(name)
    manifest = Manifest(
        name=name,
        job_id="job",
        run_id=run_dir.name,
        step=parsed.step,
        epoch=parsed.epoch,
        generation=1,
        form=parsed.form,
        shape=Shape(1, "ddp", True),
        position=Position(0, 16),
        order=None,
        source=None if parsed.lease is None else replace_ref(run_dir, str(parsed.source)),
        resumed_from=None,
        min_nodes=1,
        max_nodes=2,
        metric=None,
        files=describe(path),
    )
    manifest = replace(manifest, **changes)
    seal(path, manifest)
    return manifest


def replace_ref(run_dir: Path, name: str) -> Any:
    return Manifest.read(run_dir / name).ref


@pytest.fixture
def storage(directory: JobDirectory) -> Iterator[Storage]:
    one = Storage(directory)
    yield one
    one.close()


def test_all_nodes_read_the_same_probe(directory: JobDirectory) -> None:
    """Many at once, nobody reads half of it, and nothing is left beside it."""
    found: list[str] = []
    barrier = threading.Barrier(16)

    def look() -> None:
        barrier.wait(30)
        found.append(JobDirectory(directory.root, "job").probe())

    threads = [threading.Thread(target=look) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert [path.name for path in directory.private.iterdir()] == ["probe"]
    assert JobDirectory(directory.root, "other").probe() != found[0]


@pytest.mark.parametrize("what", ["pipe", "link", "directory", "endless"])
def test_a_probe_that_is_no_file_holds_nobody_up(directory: JobDirectory, tmp_path: Path, what: str) -> None:
    """One line says what to do about it."""
    path = directory.private / "probe"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        (tmp_path / "file").write_text("somebody else's")
        path.symlink_to("/dev/zero" if what == "endless" else tmp_path / "file")
    with pytest.raises(NotPrivateError, match="probe is no regular file: delete it, the agent makes its own"):
        directory.survey()


def test_an_empty_probe_is_made_anew(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ever be seen to see the directory by it."""
    monkeypatch.setattr(private, "PUBLISHED_PAUSE_SECONDS", 0.001)
    (directory.private / "probe").touch()
    assert len(directory.probe()) == 32
    assert [path.name for path in directory.private.iterdir()] == ["probe"]


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """The line names the directory and the flag."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--checkpoint-dir"):
        JobDirectory(tmp_path / "file", "job").prepare()
    for name in ("../other", "", ".", "..", "a\0b"):
        with pytest.raises(ValueError, match="run id"):
            JobDirectory(tmp_path, "job").run(name)


def test_a_survey_sees_sealed_checkpoints_of_unfinished_runs(directory: JobDirectory) -> None:
    """Finished runs are named, their checkpoints are not offered; what is not sealed does not exist."""
    make_checkpoint(directory.run("run-0001"), "step-9.e1.1")
    (directory.run("run-0001") / "FINISHED.json").write_text("{}")
    wanted = make_checkpoint(directory.run("run-0002"), "step-4.e3.1")
    (directory.run("run-0002") / "step-5.e3.1").mkdir()
    survey = directory.survey()
    assert [(one.run_id, one.ref.digest) for one in survey.inventory] == [("run-0002", wanted.digest)]
    assert survey.finished_runs == ("run-0001",)
    assert survey.probe == directory.probe()


@pytest.mark.slow
def test_a_resume_point_that_comes_late_is_waited_for(directory: JobDirectory, storage: Storage) -> None:
    """A bounded look ends without it; a patient one goes on until it is there; a newer look ends an older."""
    run = directory.run("run-0001")
    digest = make_checkpoint(directory.root / "aside", "step-3.e1.1").digest
    ref = pb.CheckpointRef(name="step-3.e1.1", digest=digest)
    seen: queue.SimpleQueue[tuple[str, Survey]] = queue.SimpleQueue()
    storage.look("run-0001", ref, False, lambda survey: seen.put(("bounded", survey)), seconds=0.3)
    kind, survey = seen.get(timeout=30)
    assert (kind, survey.inventory) == ("bounded", ())
    storage.look("run-0001", ref, True, lambda survey: seen.put(("old", survey)), seconds=0.1)
    storage.look("run-0001", ref, True, lambda survey: seen.put(("new", survey)), seconds=0.1)
    time.sleep(0.3)
    assert seen.empty()
    run.mkdir()
    os.rename(directory.root / "aside" / "step-3.e1.1", run / "step-3.e1.1")
    kind, survey = seen.get(timeout=30)
    assert (kind, survey.inventory[0].ref.digest) == ("new", digest)
    time.sleep(0.3)
    assert seen.empty()
    storage.look("run-0001", None, False, lambda survey: seen.put(("none", survey)))
    assert seen.get(timeout=30)[0] == "none"


class Pauses:
    """Stands in for the event that ends a storage: notes each wait instead of waiting, and ends it after some."""

    def __init__(self, most: int) -> None:
        self.most, self.seconds = most, list[float]()
        self.over = threading.Event()

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        if len(self.seconds) == self.most:
            self.over.set()
        return self.over.is_set()

    def is_set(self) -> bool:
        return self.over.is_set()

    def set(self) -> None:
        self.over.set()


@pytest.mark.parametrize(("patient", "longest"), [(False, 1.0), (True, 8.0)])
def test_a_patient_look_becomes_rare(directory: JobDirectory, patient: bool, longest: float) -> None:
    """A spare that may look for days does not read all manifests every second; a member, whom all wait for, does."""
    storage = Storage(directory)
    pauses: Any = Pauses(12)
    storage._closing = pauses
    ref = pb.CheckpointRef(name="step-3.e1.1", digest="d")
    storage.look("run-0001", ref, patient, lambda survey: None, seconds=1000)
    assert pauses.over.wait(20)
    storage.close()
    assert pauses.seconds == [min(0.1 * 2**look, longest) for look in range(12)]


def test_what_is_gone_is_told_from_what_is_damaged(directory: JobDirectory, storage: Storage) -> None:
    """Others may have removed a whole checkpoint; one without its manifest is damaged, a missing run says nothing."""
    told: queue.SimpleQueue[ManifestRead] = queue.SimpleQueue()

    def is_gone(name: str) -> bool:
        storage.read_manifest("run-0001", name, "d", told.put)
        read = told.get(timeout=30)
        assert read.checkpoint is None
        assert read.message
        return read.gone

    assert not is_gone("step-3.e1.1")
    make_checkpoint(directory.run("run-0001"), "step-5.e1.1")
    assert is_gone("step-3.e1.1")
    assert not is_gone("step-5.e1.1"), "its digest is another"
    (directory.run("run-0001") / "step-5.e1.1" / "MANIFEST.json").unlink()
    assert not is_gone("step-5.e1.1")


def test_manifest_and_verification(directory: JobDirectory, storage: Storage) -> None:
    """A sealed checkpoint is described and verifies; a flipped byte and a wrong digest are told."""
    run = directory.run("run-0001")
    manifest = make_checkpoint(run, "step-3.e1.1")
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    storage.read_manifest("run-0001", manifest.name, manifest.digest, told.put)
    assert told.get(timeout=30).checkpoint == manifest.to_proto()
    storage.read_manifest("run-0001", manifest.name, "0" * 64, told.put)
    assert told.get(timeout=30).checkpoint is None
    order = pb.Verification(number=4, ref=manifest.to_proto().ref)
    storage.verify("run-0001", order, told.put)
    done = told.get(timeout=30)
    assert (done.number, done.intact) == (4, True)
    (run / manifest.name / "model.pt").write_bytes(b"wEights")
    storage.verify("run-0001", order, told.put)
    done = told.get(timeout=30)
    assert (done.intact, "model.pt" in done.message) == (False, True)


def test_a_verification_tells_how_far_it_is(
    directory: JobDirectory, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes read so far, which only grow; a try that the file system spoiled counts too. The verdict comes last."""
    monkeypatch.setattr(agent_storage, "_MOVED_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(agent_storage, "_VERIFY_PAUSES_SECONDS", (0.01,))
    manifest = make_checkpoint(directory.run("run-0001"), "step-3.e1.1")
    original = agent_storage.verify
    spoiled = [OSError(errno.EIO, "spoiled")]

    def verify(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        if spoiled:
            raise spoiled.pop()

    monkeypatch.setattr(agent_storage, "verify", verify)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    storage.verify("run-0001", pb.Verification(number=4, ref=manifest.to_proto().ref), told.put)
    updates = []
    while not updates or isinstance(updates[-1], VerificationMoved):
        updates.append(told.get(timeout=30))
    moved = [update.bytes_done for update in updates[:-1]]
    assert moved == sorted(set(moved))
    assert moved[-1] == 2 * manifest.total_bytes > 0
    assert {update.number for update in updates} == {4}
    assert updates[-1].intact


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_system_that_fails_is_no_verdict(
    directory: JobDirectory, storage: Storage, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It is tried again; if it stays so the verification is inconclusive; if it passes the verdict counts."""
    manifest = make_checkpoint(directory.run("run-0001"), "step-3.e1.1")
    order = pb.Verification(number=4, ref=manifest.to_proto().ref)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    failures = [OSError(error, os.strerror(error))] * 5

    def flaky(*arguments: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(agent_storage, "verify", flaky)
    monkeypatch.setattr(agent_storage, "_VERIFY_PAUSES_SECONDS", (0.01,) * 4)
    storage.verify("run-0001", order, told.put)
    done = told.get(timeout=30)
    assert (done.number, done.intact, done.inconclusive) == (4, False, True)
    assert os.strerror(error) in done.message
    failures[:] = [OSError(error, os.strerror(error))] * 4
    storage.verify("run-0001", order, told.put)
    done = told.get(timeout=30)
    assert (done.intact, done.inconclusive) == (True, False)


def test_a_directory_out_of_sight_is_no_verdict_and_a_missing_file_is(
    directory: JobDirectory, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that is away hides everything; a file that alone is gone is damage, a manifest too."""
    monkeypatch.setattr(agent_storage, "_VERIFY_PAUSES_SECONDS", (0.01,) * 4)
    run = directory.run("run-0001")
    manifest = make_checkpoint(run, "step-3.e1.1")
    order = pb.Verification(number=4, ref=manifest.to_proto().ref)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    run.rename(directory.root / "away")
    storage.verify("run-0001", order, told.put)
    assert told.get(timeout=30).inconclusive
    (directory.root / "away").rename(run)
    make_checkpoint(run, "step-2.e1.1")
    (run / manifest.name).rename(directory.root / "gone")
    storage.verify("run-0001", order, told.put)
    done = told.get(timeout=30)
    assert done.inconclusive
    assert "it is not in sight, and 1 others are in the run's directory" in done.message
    (directory.root / "gone").rename(run / manifest.name)
    for name in ("model.pt", "MANIFEST.json"):
        (run / manifest.name / name).unlink()
        storage.verify("run-0001", order, told.put)
        done = told.get(timeout=30)
        assert (done.intact, done.inconclusive, name in done.message) == (False, False, True)


@pytest.mark.parametrize("harm", ["flipped", "empty", "deleted", "other", "pipe"])
def test_a_manifest_in_sight_that_is_no_good_is_a_verdict(
    directory: JobDirectory, storage: Storage, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """Found in three looks; when it is sound in the second one, which NFS may show late, the checkpoint is intact."""
    monkeypatch.setattr(agent_storage, "_VERIFY_PAUSES_SECONDS", (0.01,) * 4)
    run = directory.run("run-0001")
    manifest = make_checkpoint(run, "step-3.e1.1")
    path = run / manifest.name / "MANIFEST.json"
    HARM[harm][0](path)
    order = pb.Verification(number=4, ref=manifest.to_proto().ref)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    looks = []
    original = agent_storage._damage_of

    def look(*arguments: Any) -> Any:
        looks.append(original(*arguments))
        return looks[-1]

    monkeypatch.setattr(agent_storage, "_damage_of", look)
    storage.verify("run-0001", order, told.put)
    done = told.get(timeout=20)
    assert (done.intact, done.inconclusive, len(looks)) == (False, False, agent_storage._DAMAGE_LOOKS)
    assert "MANIFEST.json: " in done.message

    def comes_late(*arguments: Any) -> Any:
        found = look(*arguments)
        path.unlink(missing_ok=True)
        path.write_bytes(manifest.to_bytes())
        return found

    monkeypatch.setattr(agent_storage, "_damage_of", comes_late)
    storage.verify("run-0001", order, told.put)
    done = told.get(timeout=20)
    assert (done.intact, done.inconclusive) == (True, False)


def test_pruning_takes_the_later_forms_and_nothing_else(directory: JobDirectory, storage: Storage) -> None:
    """A retired checkpoint goes with its forms, a retired form alone; others and strangers stay."""
    run = directory.run("run-0001")
    for name in ("step-1.e1.1", "step-1.e1.10", "step-2.e1.1"):
        make_checkpoint(run, name)
    make_checkpoint(run, "step-1.e1.1.universal.4")
    make_checkpoint(run, "step-2.e1.1.universal.5")
    make_checkpoint(run, "step-2.e1.1.universal.6")
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    refs = [
        pb.CheckpointRef(name=name) for name in ("step-1.e1.1", "step-2.e1.1.universal.5", "../evil", "step-7.e1.1")
    ]
    storage.prune("run-0001", refs, told.put)
    assert [ref.name for ref in told.get(timeout=30).refs] == ["step-1.e1.1", "step-2.e1.1.universal.5", "step-7.e1.1"]
    assert sorted(os.listdir(run)) == [".sealed", "step-1.e1.10", "step-2.e1.1", "step-2.e1.1.universal.6"]
    assert marked(run) == {"step-1.e1.10", "step-2.e1.1", "step-2.e1.1.universal.6"}


def test_what_is_being_converted_is_not_swept(directory: JobDirectory, storage: Storage) -> None:
    """Its forms are of an old epoch, and no manifest is in them yet; others' forms go, and those of old leases."""
    run_dir = directory.run("run-0001")
    make_checkpoint(run_dir, "step-5.e2.1")
    newest = range(95, 95 + MOST_EARLIER + 1)
    made = [f"step-5.e2.1.universal.{lease}" for lease in newest]
    others = ["step-5.e1.1.universal.1", "step-15.e2.1.universal.1", "step-7.e2.1"]
    others += [f"step-5.e2.1.universal.{lease}" for lease in (9, 80, 94)]
    for name in (*made, *others):
        (run_dir / name).mkdir()
    storage.sweep("run-0001", 3, converting="step-5.e2.1")
    deadline = time.monotonic() + 20
    while any((run_dir / name).exists() for name in others):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all((run_dir / name).is_dir() for name in made)


def test_what_was_never_sealed_goes_once_a_newer_epoch_has_committed(
    directory: JobDirectory, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    """Only directories without any manifest, never those that had one; of that epoch itself only its older saves."""
    run_dir = directory.run("run-0001")
    make_checkpoint(run_dir, "step-5.e2.1")
    for name in ("step-7.e2.1", "step-5.e2.1.universal.1", "step-9.e3.1", "notes"):
        (run_dir / name).mkdir()
        (run_dir / name / "half").touch()
    make_checkpoint(run_dir, "step-6.e2.1")
    (run_dir / "step-6.e2.1" / "MANIFEST.json").write_bytes(b"damaged")
    lost = ("step-4.e2.1", "step-4.e2.1.universal.1")
    for name in lost:
        make_checkpoint(run_dir, name)
    for name in lost:
        (run_dir / name / "MANIFEST.json").unlink()
    (run_dir / "step-8.e3.1").mkdir()
    (run_dir / "step-8.e3.1.universal.1").mkdir()
    storage.sweep("run-0001", 3, 9)
    deadline = time.monotonic() + 20
    while (run_dir / "step-7.e2.1").exists() or (run_dir / "step-8.e3.1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stays = [*lost, "step-5.e2.1", "step-6.e2.1", "step-8.e3.1.universal.1", "step-9.e3.1"]
    assert sorted(os.listdir(run_dir)) == [".sealed", "notes", *stays]
    assert "step-4.e2.1 was sealed and has lost its manifest: it stays, delete it by hand" in caplog.text


def test_notes_for_people(directory: JobDirectory, storage: Storage) -> None:
    """latest.json and FINISHED.json name the newest commit."""
    run = directory.run("run-0001")
    manifest = make_checkpoint(run, "step-3.e1.1")
    storage.write_latest("run-0001", manifest.to_proto())
    storage.mark_finished("run-0001", 3, manifest.to_proto().ref)
    finished = json.loads((run / "FINISHED.json").read_text())
    assert (finished["step"], finished["name"]) == (3, "step-3.e1.1")
    deadline = time.monotonic() + 30
    while not (run / "latest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads((run / "latest.json").read_text())["digest"] == manifest.digest
    assert directory.survey().finished_runs == ("run-0001",)


# ---- the conversion job ----------------------------------------------------------------------------------------------

CONVERTER = """
import json
import os, subprocess, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
source, target, how = arguments["--source"], arguments["--target"], os.environ["HOW"]
print("noise on stdout", flush=True)
print(json.dumps({"files_done": 1, "files_total": 3}), flush=True)
if how == "moving":
    for done in range(1, 100):
        print(json.dumps({"bytes_done": done << 20}), flush=True)
        time.sleep(0.1)
if how == "nice":
    print(json.dumps({"files_done": int(arguments.get("--nice", 0)), "files_total": 3}), flush=True)
if how == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(300)
if how == "ready":
    os.rename(os.environ["MADE"], target)
    print(json.dumps({"state": "READY", "message": ""}), flush=True)
if how == "bad":
    # As a library does that shows how far it is.
    print("loading {2 of 3} ", end="", flush=True)
    print(json.dumps({"state": "SOURCE_BAD", "message": "model.pt: checksum"}), flush=True)
    sys.exit(65)
if how == "disk":
    print(json.dumps({"state": "ENVIRONMENT", "message": "no space left"}), flush=True)
    sys.exit(74)
if how == "killed":
    os.kill(os.getpid(), 9)
"""


class Conversions:
    def __init__(self, tmp_path: Path, nursery: bool) -> None:
        self.updates: queue.SimpleQueue[ConversionUpdate] = queue.SimpleQueue()
        self.lifeline = Lifeline()
        self.run_dir = tmp_path / "run-0001"
        self.source = make_checkpoint(self.run_dir, "step-5.e2.1")
        (tmp_path / "scripted_converter.py").write_text(CONVERTER)
        self.job = ConversionJob(self.lifeline, tmp_path / "conversion.log", self.updates.put, "scripted_converter")
        self.pool: StandbyPool | None = None
        if nursery:
            warm = threading.Event()
            self.pool = StandbyPool(self.lifeline, 1, ("json",), tmp_path / "standby.log", warm.set)
            self.pool.fill(low_priority=False)
            assert warm.wait(20)
            self.job.nursery = self.pool.start_helper

    def close(self) -> None:
        self.job.stop()
        if self.pool is not None:
            self.pool.close()
        self.lifeline.close()

    def start(self, lease: int, beside: bool = False) -> None:
        self.job.start(self.run_dir, pb.Conversion(lease=lease, source=self.source.to_proto(), beside=beside))

    def end(self) -> ConversionUpdate:
        while True:
            update = self.updates.get(timeout=20)
            if update.state != pb.CONVERSION_STATE_WORKING:
                return update


@pytest.fixture(params=["cold", "nursery"])
def conversions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Conversions]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    one = Conversions(tmp_path, request.param == "nursery")
    yield one
    one.close()


@pytest.mark.slow
def test_a_conversion_of_an_agent_with_many_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it hands to its nursery has large numbers then."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HOW", "bad")
    with many_open_files():
        conversions = Conversions(tmp_path, nursery=True)
        conversions.start(3)
        assert conversions.end().state == pb.CONVERSION_STATE_SOURCE_BAD
        conversions.close()


@pytest.mark.slow
def test_a_conversion_that_succeeds(conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress comes, then READY with the sealed form's description."""
    aside = tmp_path / "aside"
    made = make_checkpoint(aside, "step-5.e2.1")
    made = replace(made, name="step-5.e2.1.universal.7", form="universal", source=conversions.source.ref)
    (aside / "step-5.e2.1" / "MANIFEST.json").write_bytes(made.to_bytes())
    monkeypatch.setenv("HOW", "ready")
    monkeypatch.setenv("MADE", str(aside / "step-5.e2.1"))
    conversions.start(7)
    first = conversions.updates.get(timeout=20)
    assert (first.lease, first.state, first.files_total) == (7, pb.CONVERSION_STATE_WORKING, 3)
    update = conversions.end()
    assert update.state == pb.CONVERSION_STATE_READY
    assert update.checkpoint is not None
    assert (update.checkpoint.ref.name, update.checkpoint.form) == ("step-5.e2.1.universal.7", pb.FORM_UNIVERSAL)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [True, False])
def test_a_conversion_beside_a_training_yields_to_it(
    conversions: Conversions, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """Where nobody trains it need not."""
    monkeypatch.setenv("HOW", "nice")
    conversions.start(3, beside)
    assert conversions.end().files_done == (NICENESS if beside else 0)


@pytest.mark.slow
def test_bytes_of_a_conversion_are_told(conversions: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two files too: the master can tell a large file from a stuck converter."""
    monkeypatch.setenv("HOW", "moving")
    conversions.start(3)
    updates = [conversions.updates.get(timeout=20) for _ in range(3)]
    assert [update.files_done for update in updates] == [1, 1, 1]
    moved = [update.bytes_done for update in updates]
    assert moved[0] == 0 < moved[1] < moved[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "state", "word"),
    [
        ("bad", pb.CONVERSION_STATE_SOURCE_BAD, "checksum"),
        ("disk", pb.CONVERSION_STATE_ENVIRONMENT, "no space left"),
        ("killed", pb.CONVERSION_STATE_ENVIRONMENT, "signal 9"),
        ("liar", pb.CONVERSION_STATE_ENVIRONMENT, "cannot be read"),
    ],
)
def test_a_conversion_that_fails(
    conversions: Conversions, monkeypatch: pytest.MonkeyPatch, how: str, state: int, word: str
) -> None:
    """Only a proven damage of the source is one; exit 0 without a sealed form is not READY."""
    monkeypatch.setenv("HOW", how)
    conversions.start(3)
    update = conversions.end()
    assert (update.state, update.lease) == (state, 3)
    assert word in update.message


def started_converter(pids: Path) -> tuple[int, int]:
    """The converter that hangs, and its child, once both exist."""
    deadline = time.monotonic() + 20
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    parent, child = map(int, pids.read_text().split())
    return parent, child


@pytest.mark.slow
def test_a_conversion_is_stopped_before_its_start_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Its nursery's word comes late: the stop waits for it, and the converter is gone then."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    conversions = Conversions(tmp_path, nursery=True)
    request.addfinalizer(conversions.close)
    monkeypatch.setenv("HOW", "hang")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    heard, plain = threading.Event(), conversions.lifeline.add_group

    def add_group(pgid: int) -> None:
        assert heard.wait(30)
        plain(pgid)

    monkeypatch.setattr(conversions.lifeline, "add_group", add_group)
    conversions.start(3)
    converter, _ = started_converter(tmp_path / "pids")
    late = threading.Timer(0.5, heard.set)
    late.start()
    conversions.job.stop(3)
    assert heard.is_set()
    assert start_time(converter) is None
    late.join()


@pytest.mark.slow
def test_a_stopped_conversion_is_gone_and_silent(
    conversions: Conversions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converter and what it started are dead; nothing is told of it afterwards; another lease can begin."""
    monkeypatch.setenv("HOW", "hang")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    conversions.start(3)
    parent, child = started_converter(tmp_path / "pids")
    conversions.job.stop(99)
    assert start_time(parent) is not None
    conversions.job.stop(3)
    assert start_time(parent) is None
    deadline = time.monotonic() + 20
    while process_state(child) not in (None, "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setenv("HOW", "bad")
    conversions.start(4)
    assert conversions.end().lease == 4
