"""Which resume point a worker takes, and what it blames when it cannot."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.checkpoint import (
    SHARDED,
    UNIVERSAL,
    CheckpointName,
    CheckpointStore,
    Manifest,
    Ref,
    SavedAs,
    Shape,
)
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import ResumeOrder
from dalsegno.elastic.saving.resuming import Damaged, ResumePoint, check_strategy, handed_out, newest
from tests.support.workers.zero_runs import run_world
from tests.unit.elastic.checkpoint.test_best import start
from tests.unit.elastic.checkpoint.test_checkpoint import manifest_for, seal


def write(run_dir: Path, name: CheckpointName, *, shape: Shape, source: Ref | None = None) -> Manifest:
    directory = run_dir / str(name)
    directory.mkdir(parents=True)
    (directory / "model.pt").write_bytes(str(name).encode())
    manifest = manifest_for(directory, source=source, shape=shape)
    seal(directory, manifest)
    return manifest


def point(directory: Path) -> ResumePoint:
    """The resume point whose manifest lists what is in this directory now."""
    manifest = manifest_for(directory)
    return ResumePoint(manifest.step, manifest.position, SHARDED, directory, None, manifest)


ANY, TWO = Shape(2, "ddp", True), Shape(2, "deepspeed-zero-1", False)


def test_universal_form_is_loaded_and_each_culprit_is_named(tmp_path: Path) -> None:
    """A damaged later form is blamed alone; a source whose manifest is gone is blamed as the source."""
    name = CheckpointName(4, 2, 1)
    source = write(tmp_path, name, shape=TWO)
    later = write(tmp_path, name.later("universal", 3), shape=TWO, source=source.ref)
    order = ResumeOrder(source.ref, UNIVERSAL, later.ref)
    point = handed_out(order, tmp_path, Solo())
    assert isinstance(point, ResumePoint)
    assert (point.form, point.path, point.universal) == (UNIVERSAL, tmp_path / source.name, tmp_path / later.name)
    assert not point.in_memory
    os.truncate(tmp_path / later.name / "model.pt", 2)
    bad = handed_out(order, tmp_path, Solo())
    assert isinstance(bad, Damaged)
    assert (bad.ref, bad.form, bad.file) == (later.ref, UNIVERSAL, "model.pt")
    assert isinstance(handed_out(order, tmp_path, Solo(), verify=False), ResumePoint)
    (tmp_path / source.name / "MANIFEST.json").unlink()
    bad = handed_out(order, tmp_path, Solo())
    assert isinstance(bad, Damaged)
    assert (bad.ref, bad.form, bad.file) == (source.ref, SHARDED, "MANIFEST.json")


def test_other_digest_is_another_checkpoint(tmp_path: Path) -> None:
    """A directory with the right name but not the recorded manifest is not loaded."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=ANY)
    bad = handed_out(ResumeOrder(Ref(source.name, "0" * 64), SHARDED, None), tmp_path, Solo())
    assert isinstance(bad, Damaged)
    assert "DIGEST" in bad.message


def test_file_system_trouble_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is not condemned because it cannot be read just now."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=ANY)

    def fails(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dalsegno.elastic.saving.resuming.verify_files", fails)
    with pytest.raises(OSError, match="Permission denied"):
        handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo())


HANDED_OUT = """
import os, sys, time
from functools import partial
from pathlib import Path
from dalsegno.elastic.checkpoint import SHARDED, Ref
from dalsegno.elastic.rank.collective import GlooCollective
from dalsegno.elastic.rank.identity import ResumeOrder
from dalsegno.elastic.saving.resuming import Damaged, handed_out
from dalsegno.elastic.training.opening import beside
rank = int(os.environ["RANK"])
group = GlooCollective(rank, 2, 0)
order, run_dir = ResumeOrder(Ref(sys.argv[1], sys.argv[2]), SHARDED, None), Path(sys.argv[3])
later = partial(beside, group, None) if sys.argv[5] == "later" else None
point = handed_out(order, run_dir, group, verify=sys.argv[4][rank] == "v", beside=later)
group.barrier()
if isinstance(point, Damaged):
    sys.exit("damaged: " + point.message)
try:
    point.wait()
finally:
    # why: rank 0 has the store, from which the other one hears.
    time.sleep(0 if rank else 2)
point.end()
group.barrier()
"""


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("who", ["v-", "-v"])
def test_rank_0_says_for_all_whether_files_are_verified(tmp_path: Path, who: str, when: str) -> None:
    """Ranks that were told otherwise, by a setting of one node, could not tell each other what they had found."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=ANY)
    (tmp_path / source.name / "model.pt").write_bytes(str(source.name).encode().swapcase())
    script = tmp_path / "rank.py"
    script.write_text(HANDED_OUT)
    ended = run_world(2, [str(script), source.name, source.digest, str(tmp_path), who, when], seconds=60)
    if who == "-v":
        assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
        return
    codes = {"at once": [1, 1], "later": [84, 84]}[when]
    assert [code for code, _ in ended] == codes, "\n".join(output for _, output in ended)
    assert all("model.pt" in output for _, output in ended), "\n".join(output for _, output in ended)


def test_alone_takes_the_newest_sound_one_that_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damaged ones are named and passed over; all damaged is an error; another world needs the universal form."""
    store = CheckpointStore(tmp_path)
    assert newest(store, Solo(), 1) is None
    old = write(tmp_path, CheckpointName(2, 0, 1), shape=ANY)
    new = write(tmp_path, CheckpointName(4, 0, 1), shape=ANY)
    (tmp_path / "step-9.e0.1").mkdir()
    point = newest(store, Solo(), 1)
    assert point is not None
    assert point.ref == new.ref
    os.truncate(tmp_path / new.name / "model.pt", 1)
    with caplog.at_level(logging.WARNING):
        point = newest(store, Solo(), 1)
    assert point is not None
    assert point.ref == old.ref
    assert "step-4.e0.1 is damaged" in caplog.text
    (tmp_path / old.name / "model.pt").unlink()
    with pytest.raises(RuntimeError, match="all 2 checkpoints"):
        newest(store, Solo(), 1)
    sharded = write(tmp_path, CheckpointName(6, 0, 1), shape=TWO)
    with pytest.raises(RuntimeError, match="was written by 2 ranks"):
        newest(store, Solo(), 3)
    assert newest(store, Solo(), 2) is not None
    later = write(tmp_path, CheckpointName(6, 0, 1).later("universal", 1), shape=TWO, source=sharded.ref)
    point = newest(store, Solo(), 3)
    assert point is not None
    assert point.universal == tmp_path / later.name


def test_alone_nothing_is_read_that_need_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a script that wants no verification: a file that was cut is found all the same."""
    old = write(tmp_path, CheckpointName(2, 0, 1), shape=ANY)
    new = write(tmp_path, CheckpointName(4, 0, 1), shape=ANY)

    def read(*given: Any, **options: Any) -> None:
        raise AssertionError("its files are read")

    monkeypatch.setattr("dalsegno.elastic.saving.resuming.verify_files", read)
    for wanted in (new, old):
        with start(tmp_path, verify=False) as session:
            assert session.resume is not None
            assert session.resume.ref == wanted.ref
        os.truncate(tmp_path / wanted.name / "model.pt", 1)


def test_alone_universal_files_that_are_there_come_before_resharding(tmp_path: Path) -> None:
    """Somebody has converted it, perhaps because re-sharding had said that this is needed; at its own size as saved."""
    name = CheckpointName(6, 0, 1)
    source = write(tmp_path, name, shape=replace(TWO, reshards=True))
    store = CheckpointStore(tmp_path)
    point = newest(store, Solo(), 1)
    assert point is not None
    assert (point.form, point.reshard) == (SHARDED, True)
    later = write(tmp_path, name.later("universal", 1), shape=TWO, source=source.ref)
    point = newest(store, Solo(), 1)
    assert point is not None
    assert (point.universal, point.reshard) == (tmp_path / later.name, False)
    point = newest(store, Solo(), 2)
    assert point is not None
    assert point.form == SHARDED
    os.truncate(tmp_path / later.name / "model.pt", 1)
    point = newest(store, Solo(), 1)
    assert point is not None
    assert point.reshard


def test_another_strategy_is_refused_with_both_names(tmp_path: Path) -> None:
    """Before a step is made; universal files are those of every stage of DeepSpeed, and of nothing else."""
    name = CheckpointName(4, 2, 1)
    source = write(tmp_path, name, shape=TWO)
    later = write(tmp_path, name.later("universal", 3), shape=TWO, source=source.ref)
    sharded = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo())
    universal = handed_out(ResumeOrder(source.ref, UNIVERSAL, later.ref), tmp_path, Solo())
    assert isinstance(sharded, ResumePoint)
    assert isinstance(universal, ResumePoint)
    check_strategy(None, "ddp")
    check_strategy(sharded, "deepspeed-zero-1")
    check_strategy(universal, "deepspeed-zero-3")
    for resume, strategy in ((sharded, "deepspeed-zero-2"), (sharded, "ddp"), (universal, "ddp")):
        with pytest.raises(ValueError, match=f"written with strategy deepspeed-zero-1, and this run has {strategy}"):
            check_strategy(resume, strategy)


def test_what_a_script_saved_without_a_session_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Nobody has given it a strategy: its name would say nothing."""
    shape = replace(TWO, strategy="transformers")
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=shape)
    resume = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo())
    assert isinstance(resume, ResumePoint)
    manifest = replace(resume.manifest, saved_as=SavedAs("checkpoint-4", "checkpoint-4"))
    with pytest.raises(ValueError, match=r"without a session and hf\.elastic: go on without .*--new-run"):
        check_strategy(replace(resume, manifest=manifest), "ddp")


def test_the_loop_refuses_data_that_do_not_go_on(tmp_path: Path) -> None:
    """Batches without ``resume=`` would begin anew, and an order that is given by hand is compared as well."""
    data, plan = list(range(20)), BatchPlan(4, 1, 4)

    def batches(seed: int = 0, resume: ResumePoint | None = None) -> Batches[Any]:
        return Batches(data, ElasticSampler(20, 4, seed=seed), plan, 0, resume=resume)

    with start(tmp_path) as session:
        for batch in session.steps(batches(), max_steps=2, save=lambda path: None):
            list(batch.micro_batches)
    with start(tmp_path) as session:
        with pytest.raises(ValueError, match=r"begin at sample 0 of data epoch 0, and step-2\..* at sample 8 of"):
            session.steps(batches(), max_steps=3)
        with pytest.raises(ValueError, match="seed was 0 and is 1"):
            session.steps([1], max_steps=3, order=ElasticSampler(20, 4, seed=1).order)
        going_on = batches(resume=session.resume)
        for batch in session.steps(going_on, max_steps=3):
            assert batch.position.samples == 8
            list(batch.micro_batches)


@pytest.mark.parametrize(
    ("length", "size", "options", "message"),
    [
        (21, 4, {}, "length was 20 and is 21"),
        (20, 5, {}, "global_batch_size was 4 and is 5"),
        (20, 4, {"seed": 1}, "seed was 0 and is 1"),
        (20, 4, {"shuffle": False}, "shuffle was True and is False"),
    ],
)
def test_another_order_than_the_checkpoints_is_refused(
    tmp_path: Path, length: int, size: int, options: dict[str, Any], message: str
) -> None:
    """When the Batches are made, with what it was and what it is."""
    with start(tmp_path) as session:
        first: Batches[Any] = Batches(list(range(20)), ElasticSampler(20, 4), BatchPlan(4, 1, 4), 0)
        for batch in session.steps(first, max_steps=2, save=lambda path: None):
            list(batch.micro_batches)
    with start(tmp_path) as session:
        sampler = ElasticSampler(length, size, **options)
        with pytest.raises(ValueError, match=message):
            Batches(list(range(length)), sampler, BatchPlan(size, 1, 4), 0, resume=session.resume)


def test_what_loads_at_one_world_size_only_is_refused_at_another(tmp_path: Path) -> None:
    """A strategy that nobody knows, or FSDP1's shards, unless it says that its files load anywhere."""
    for number, claim in enumerate((None, True)):
        with start(tmp_path / str(number)) as session:
            list(session.steps([1], save=lambda path: None, strategy="fsdp1", any_world_size=claim))
    assert [CheckpointStore(tmp_path / n).sealed()[0].shape for n in "01"] == [
        Shape(1, "fsdp1", False),
        Shape(1, "fsdp1", True),
    ]
    write(tmp_path / "two", CheckpointName(6, 0, 1), shape=Shape(2, "fsdp1", False))
    # Nothing converts what is not DeepSpeed's.
    refused = r"written by 2 ranks and loads at no other number; start as many \(there are 1\)$"
    with pytest.raises(RuntimeError, match=refused), start(tmp_path / "two"):
        pass
    write(tmp_path / "any", CheckpointName(6, 0, 1), shape=Shape(2, "fsdp1", True))
    with start(tmp_path / "any") as session:
        assert session.step == 6


def test_the_loop_refuses_another_strategy_before_its_first_step(tmp_path: Path) -> None:
    """`steps` itself raises, not its first batch."""
    write(tmp_path, CheckpointName(4, 0, 1), shape=ANY)
    with start(tmp_path) as session:
        with pytest.raises(ValueError, match="written with strategy ddp, and this run has fsdp"):
            session.steps([1], save=lambda path: None, strategy="fsdp")
        assert next(iter(session.steps([1], save=lambda path: None, advanced=True))) == 1
