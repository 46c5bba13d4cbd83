"""An engine is loaded on a node that does not see a file which the manifest lists: another start may see it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from dalsegno.elastic.checkpoint import UNIVERSAL, seal
from dalsegno.elastic.deepspeed import engine
from dalsegno.elastic.rank.meetings import is_mistake
from dalsegno.elastic.saving.resuming import ResumePoint
from dalsegno.elastic.saving.unfit import Unfit, rejecting
from tests.unit.elastic.checkpoint.test_checkpoint import manifest_for
from tests.unit.elastic.saving.test_resuming import point

MODEL, VALUES = "mp_rank_00_model_states.pt", "zero/weight/fp32.pt"
LAYER, SLICE = "layer_00-model_states.pt", "layer_01-model_00-model_states.pt"
SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
NOT_HERE = "is not here, although the checkpoint's manifest lists it"


def saved(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"x")
    return directory


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "refused_together", nullcontext)
    for name in ("tell", "_check"):
        monkeypatch.setattr(engine, name, lambda *given: None)


def load(resume: ResumePoint) -> None:
    """As the Trainer's strategy does it, which takes a RuntimeError for another model's."""
    made: Any = SimpleNamespace(module=None, optimizer=None)
    with rejecting():
        engine.restore(made, resume)


def test_model_states_that_a_node_does_not_see_are_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    """In memory a node has what its own ranks need, and has verified that: what lacks there was not saved."""
    directory = saved(tmp_path / "step-4.e2.1", MODEL)
    resume = point(directory)
    (directory / MODEL).unlink()
    with pytest.raises(OSError, match=f"{MODEL} {NOT_HERE}") as found:
        load(resume)
    assert not is_mistake(found.value)
    for other in (point(directory), replace(resume, in_memory=True)):
        with pytest.raises(Unfit, match="no model states in"):
            load(other)


@pytest.mark.parametrize("prefix", ["", "zero_pp_rank_0_"])
def test_how_many_ranks_shared_the_model_is_not_counted_by_what_is_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """With tensor parallelism: a rank that does not see its own file took the first rank's."""
    second = f"{prefix}mp_rank_01_model_states.pt"
    directory = saved(tmp_path / "step-4.e2.1", MODEL, second)
    resume = point(directory)
    for name in ("check_groups", "check_factors"):
        monkeypatch.setattr(engine, name, lambda *given: None)
    monkeypatch.setattr(engine, "_load", lambda *given: {})
    load(resume)
    (directory / second).unlink()
    with pytest.raises(OSError, match=f"{second} {NOT_HERE}"):
        load(resume)
    load(point(directory))


def converted(run_dir: Path, *source: str) -> ResumePoint:
    """A resume point with the universal form, made of a checkpoint with these files."""
    resume = point(saved(run_dir / "step-4.e2.1", *(source or (MODEL,))))
    later = saved(run_dir / "step-4.e2.1.universal.3", VALUES, MODEL)
    seal(later, manifest_for(later, source=resume.ref))
    return replace(resume, form=UNIVERSAL, universal_at=later)


@pytest.mark.parametrize("hidden", [True, False])
def test_so_is_a_file_of_the_universal_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    """Its own manifest lists it."""
    resume = converted(tmp_path)
    assert resume.universal_at is not None

    def lacks(*given: Any) -> None:
        raise RuntimeError("weight is missing: the model has a parameter that was not saved")

    monkeypatch.setattr(engine, "check_groups", lacks)
    if hidden:
        (resume.universal_at / VALUES).unlink()
    with pytest.raises(OSError if hidden else Unfit, match=f"{VALUES} {NOT_HERE}" if hidden else "was not saved"):
        load(resume)


def test_so_are_model_states_of_what_was_converted(tmp_path: Path) -> None:
    """They tell which parameters the optimizer trained."""
    resume = converted(tmp_path, MODEL, SHARD)
    (resume.saved_at / MODEL).unlink()
    with pytest.raises(OSError, match=f"{MODEL} {NOT_HERE}"):
        load(resume)
    never = replace(resume, manifest=replace(resume.manifest, files=()))
    with pytest.raises(Unfit, match="no model states in"):
        load(never)


def test_shards_that_were_converted_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has the universal form may delete them: the model's fault stays one."""
    resume = converted(tmp_path, MODEL, SHARD)
    (resume.saved_at / SHARD).unlink()

    def lacks(*given: Any) -> None:
        raise RuntimeError("weight is missing: the model has a parameter that was not saved")

    monkeypatch.setattr(engine, "check_groups", lacks)
    with pytest.raises(Unfit, match="was not saved"):
        load(resume)


@pytest.mark.parametrize("hidden", [LAYER, SLICE, MODEL])
def test_of_a_converted_pipeline_the_layers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """They are loaded from what was saved, as many files as DeepSpeed finds of each. Its model states are not."""
    resume = converted(tmp_path, MODEL, LAYER, SLICE)
    monkeypatch.setattr(engine, "PipelineModule", type(None))
    monkeypatch.setattr(engine, "_load", lambda *given: {})
    load(resume)
    (resume.saved_at / hidden).unlink()
    with nullcontext() if hidden == MODEL else pytest.raises(OSError, match=f"{hidden} {NOT_HERE}"):
        load(resume)


def test_those_of_the_universal_form_are_counted_before_a_load_and_values_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank does not read all values, and who lacks one of its own meets an error."""
    resume = converted(tmp_path)
    assert resume.universal_at is not None
    for name in ("check_groups", "check_factors"):
        monkeypatch.setattr(engine, name, lambda *given: None)
    monkeypatch.setattr(engine, "_load", lambda *given: {})
    (resume.universal_at / VALUES).unlink()
    load(resume)
    (resume.universal_at / MODEL).unlink()
    with pytest.raises(OSError, match=f"universal.3/{MODEL} {NOT_HERE}"):
        load(resume)


def test_weights_alone_are_read_from_shards_also_where_these_were_converted(tmp_path: Path) -> None:
    resume = converted(tmp_path, MODEL, SHARD)
    made: Any = SimpleNamespace(
        optimizer=None, zero_nvme_offload_optimizer=lambda: False, zero_optimization_stage=lambda: 1
    )
    (resume.saved_at / SHARD).unlink()
    with pytest.raises(OSError, match=f"{SHARD} {NOT_HERE}"):
        engine.restore_weights(made, resume)
