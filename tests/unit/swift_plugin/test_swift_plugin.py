"""The parts of the plugin, each by itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.swift_plugin.hf import checkpoints, data, options, refusals
from dalsegno.swift_plugin.hf.checkpoints import Arriving, Errors, TrainerWrite, Unfinished
from dalsegno.swift_plugin.hf.options import Options


def session(max_world_size: int = 4, global_batch_size: int | None = None) -> Any:
    order = None if global_batch_size is None else SimpleNamespace(global_batch_size=global_batch_size)
    resume = None if order is None else SimpleNamespace(manifest=SimpleNamespace(order=order))
    return SimpleNamespace(max_world_size=max_world_size, resume=resume)


# ---- options --------------------------------------------------------------------------------------------------------


def test_the_global_batch_is_what_was_asked_for_then_what_it_was_then_the_largest_worlds() -> None:
    assert options.global_batch_size(Options(48), 2, 3, session(global_batch_size=32)) == 48
    assert options.global_batch_size(Options(), 2, 3, session(global_batch_size=32)) == 32
    assert options.global_batch_size(Options(usual_batch_size=16), 2, 3, session(global_batch_size=32)) == 32
    assert options.global_batch_size(Options(usual_batch_size=16), 2, 3, session(max_world_size=4)) == 16
    assert options.global_batch_size(Options(), 2, 3, session(max_world_size=4)) == 24


def test_options_of_the_environment() -> None:
    assert options.from_environment({}) == Options()
    found = options.from_environment({"DALSEGNO_GLOBAL_BATCH_SIZE": "24", "DALSEGNO_FIXED_MICRO_BATCH": "true"})
    assert found == Options(24, True)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DALSEGNO_GLOBAL_BATCH_SIZE": "many"}, "'many': a number of samples"),
        ({"DALSEGNO_GLOBAL_BATCH_SIZE": "0"}, "at least one sample, not 0"),
        ({"DALSEGNO_FIXED_MICRO_BATCH": "perhaps"}, "'perhaps': 1 or 0"),
    ],
)
def test_options_that_mean_nothing(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options.from_environment(environ)


# ---- data -----------------------------------------------------------------------------------------------------------


def test_a_silenced_slice_has_no_token_that_counts() -> None:
    labels = torch.tensor([[5, -100, 7]])
    given = {"input_ids": torch.ones(1, 3), "labels": labels, "name": "a"}
    silent = data.silenced(given)
    assert silent["labels"].tolist() == [[-100, -100, -100]]
    assert silent["input_ids"] is given["input_ids"]
    assert labels.tolist() == [[5, -100, 7]]


def test_what_a_slices_mean_is_over() -> None:
    labels = torch.tensor([[5, -100, 7], [-100, 1, 2]])
    assert data.count_labels({"labels": labels}, shifted=True) == 3
    assert data.count_labels({"labels": labels}, shifted=False) == 4
    assert data.count_labels({"labels": labels, "shift_labels": labels[:, :1]}, shifted=True) == 1
    assert data.count_labels({"labels": torch.tensor([1, 0, -100])}, shifted=True) == 2
    assert data.count_labels({"values": torch.zeros(5, 2)}, shifted=True) == 5


@pytest.mark.parametrize("batch", [{}, {"return_loss": True}])
def test_a_batch_that_has_lost_all_its_columns_says_what_to_do(batch: dict[str, Any]) -> None:
    """As that of a Trainer with ``torch.compile(model)`` has. No other start would mend that."""
    with pytest.raises(Refusal, match=r"torch\.compile\(model\) it cannot see: .* torch_compile=True in TrainingArgum"):
        data.count_labels(batch, shifted=True)


class Lazy(torch.utils.data.Dataset[int]):
    """Substitutes as ms-swift's LazyLLMDataset does: even samples cannot be encoded."""

    def __init__(self) -> None:
        self._idx, self._idx_list = 0, [3, 0, 5, 1, 2, 4]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        while index % 2 == 0:
            index = self._idx_list[self._idx]
            self._idx = (self._idx + 1) % 6
        return index


def test_a_substitute_depends_on_its_sample_alone() -> None:
    plain = Lazy()
    assert [plain[0], plain[0]] != [plain[0], plain[0]], "the stand-in should not be repeatable by itself"
    ours = data.repeatable(Lazy())
    forward = [ours[index] for index in range(6)]
    backward = [ours[index] for index in reversed(range(6))]
    assert forward == backward[::-1]
    assert len(ours) == 6


def test_packed_samples_are_repeatable_too() -> None:
    class Packed:
        def __init__(self) -> None:
            self.dataset, self.packed_idx = Lazy(), [[0, 2], [1]]

        def __getitem__(self, index: int) -> list[int]:
            return [self.dataset[i] for i in self.packed_idx[index]]

    ours = data.repeatable(Packed())
    first = ours[0]
    assert ours[1] == [1]
    assert ours[0] == first


def loader(length: int = 10, position: int = 0) -> data.StepLoader:
    """Steps of 4 samples."""
    sampler = ElasticSampler(length, 4, shuffle=False)
    for _ in range(position):
        sampler.seek(sampler.batch_at(sampler.position).position_after)
    plan = BatchPlan(4, 1, 2)
    batches = Batches(list(range(length)), sampler, plan, 0, scale="deepspeed")
    return data.StepLoader(batches, None, plan.accumulation, sampler.batches_per_data_epoch)


def consume(steps: Any) -> list[tuple[int, ...]]:
    found = []
    for batch in steps:
        found.append(batch.sample_ids)
        for _ in batch.micro_batches:
            pass
    return found


def test_an_iteration_is_one_data_epoch_and_the_next_one_goes_on() -> None:
    steps = loader()
    assert len(steps) == 3 * 2
    assert consume(steps) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert steps.epoch_is_over
    steps.set_epoch(1)
    assert consume(steps) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert steps.position.data_epoch == 2


def test_a_resumed_iteration_begins_where_the_run_stands() -> None:
    assert consume(loader(position=2)) == [(8, 9)]


def test_a_data_epoch_that_is_not_the_runs_is_refused() -> None:
    steps = loader(position=1)
    with pytest.raises(RuntimeError, match=r"data epoch 1, and the run stands at sample 4 of data epoch 0$"):
        steps.set_epoch(1)


def test_a_stream_has_no_length() -> None:
    sampler = ElasticSampler(None, 4, shuffle=False)
    batches = Batches(iter_of(7), sampler, BatchPlan(4, 1, 4), 0, scale="deepspeed")
    steps = data.StepLoader(batches, None, 1, None)
    with pytest.raises(TypeError):
        len(steps)
    steps.set_epoch(3)
    assert [batch.sample_ids for batch, _ in zip(steps, range(3), strict=False)] == [
        (0, 1, 2, 3),
        (4, 5, 6),
        (0, 1, 2, 3),
    ]


def iter_of(length: int) -> Any:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(length))

    return Stream()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_what_is_unfinished_comes_back(tmp_path: Path) -> None:
    saved = Unfinished(loss=1.25, logged=7, evaluation=True, epoch_end=True)
    saved.write(tmp_path)
    assert Unfinished.read(tmp_path) == saved


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was not saved by an elastic Trainer"):
        Unfinished.read(tmp_path)
    (tmp_path / checkpoints.PROGRESS).write_text('{"version": 99}')
    with pytest.raises(ValueError, match="a newer dalsegno"):
        Unfinished.read(tmp_path)
    (tmp_path / checkpoints.PROGRESS).write_text('{"version": 1, "logged": 5}')
    assert Unfinished.read(tmp_path) == Unfinished(logged=5)


def test_a_save_tells_its_first_error_when_all_is_done(tmp_path: Path) -> None:
    done = []

    def save() -> None:
        for number in (1, 2):
            with write.errors.kept():
                raise OSError(number, "no room")
        done.append(write.directory)

    write = TrainerWrite(save, Unfinished(), 0, reshards=False, by_place=False)
    with pytest.raises(OSError, match=r"\[Errno 1\]"):
        write(tmp_path)
    assert done == [tmp_path]
    assert write.directory is None
    assert not (tmp_path / checkpoints.PROGRESS).exists()


def test_errors_keep_only_errors() -> None:
    with pytest.raises(KeyboardInterrupt), Errors().kept():
        raise KeyboardInterrupt


def sealed(run: Path, name: str, step: int) -> Path:
    """A checkpoint with the Trainer's files."""
    source = checkpoints.trainers(run / name, step)
    (source / "global_step1").mkdir(parents=True)
    for file in ("trainer_state.json", "model.safetensors", "global_step1/states.pt"):
        (source / file).write_text(name)
    return run / name


def test_links_show_what_is_there(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    for step in (5, 10):
        checkpoints.link(output, sealed(run, f"step-{step}.e1.1", step), step)
    assert sorted(os.listdir(output)) == ["checkpoint-10", "checkpoint-5"]
    assert (output / "checkpoint-5" / "global_step1" / "states.pt").read_text() == "step-5.e1.1"
    # Made again by a later epoch, and the older one pruned.
    shutil.rmtree(run / "step-5.e1.1")
    checkpoints.link(output, sealed(run, "step-10.e2.1", 10), 10)
    assert os.listdir(output) == ["checkpoint-10"]
    assert {path.read_text() for path in (output / "checkpoint-10").rglob("*") if path.is_file()} == {"step-10.e2.1"}


def test_a_step_that_is_saved_again_has_no_link_to_what_it_had_before(tmp_path: Path) -> None:
    """By fewer ranks. And a place whose making was interrupted is finished."""
    first, second = sealed(tmp_path / "run", "step-5.e1.1", 5), sealed(tmp_path / "run", "step-5.e2.1", 5)
    (checkpoints.trainers(first, 5) / "rng_state_1.pth").touch()
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    checkpoints.link(tmp_path / "out", first, 5)
    checkpoints.link(tmp_path / "out", second, 5)
    found = {path.name for path in (tmp_path / "out" / "checkpoint-5").rglob("*") if path.is_symlink()}
    assert found == {"trainer_state.json", "model.safetensors", "states.pt"}


def test_what_is_added_to_a_linked_checkpoint_is_not_the_checkpoints(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    one = sealed(run, "step-5.e1.1", 5)
    before = sorted(path for path in one.rglob("*"))
    checkpoints.link(output, one, 5)
    (output / "checkpoint-5" / "infer_result").mkdir()
    (output / "checkpoint-5" / "infer_result" / "answers.jsonl").write_text("{}")
    assert sorted(path for path in one.rglob("*")) == before
    shutil.rmtree(run)
    checkpoints.tidy(output)
    assert [path.name for path in (output / "checkpoint-5").rglob("*") if not path.is_dir()] == ["answers.jsonl"]


def test_a_checkpoint_of_another_training_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    checkpoints.link(tmp_path, sealed(tmp_path / "run", "step-5.e1.1", 5), 5)
    assert os.listdir(tmp_path / "checkpoint-5") == ["trainer_state.json"]
    assert not (tmp_path / "checkpoint-5" / "trainer_state.json").is_symlink()
    assert "is there already and is not the run's" in caplog.text


def test_an_output_directory_that_cannot_be_written_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file")
    checkpoints.link(tmp_path / "out", sealed(tmp_path / "run", "step-5.e1.1", 5), 5)
    assert "cannot be linked" in caplog.text


def test_a_library_that_says_for_itself_that_the_disk_is_full(tmp_path: Path) -> None:
    """An error of safetensors' own kind must not be taken for a mistake in the script."""
    write = TrainerWrite(lambda: None, Unfinished(), 0, reshards=False, by_place=False)
    with write.errors.kept():
        save_file({"a": torch.zeros(1)}, tmp_path / "missing" / "model.safetensors")
    assert isinstance(write.errors.first, OSError)
    mistake = TrainerWrite(lambda: None, Unfinished(), 0, reshards=False, by_place=False)
    with mistake.errors.kept():
        raise KeyError("a")
    assert isinstance(mistake.errors.first, KeyError)


# ---- refusals -------------------------------------------------------------------------------------------------------


def trainer(**changes: Any) -> Any:
    arguments = {
        "auto_find_batch_size": False,
        "save_only_model": False,
        "train_sampling_strategy": "random",
        "n_gpu": 1,
    }
    own = {"is_fsdp_enabled": False, "train_dataset": [1]}
    sizes = {"get_tp_size": 1, "get_cp_size": 1, "get_sp_size": 1}
    for name, value in changes.items():
        next((known for known in (own, sizes) if name in known), arguments)[name] = value
    return SimpleNamespace(
        args=SimpleNamespace(**arguments),
        _run_epoch=None,
        is_deepspeed_enabled=False,
        callback_handler=SimpleNamespace(callbacks=[]),
        **own,
        **{name: (lambda size=size: size) for name, size in sizes.items()},
    )


def test_an_ordinary_trainer_is_not_refused() -> None:
    refusals.refuse(trainer())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        ({"save_only_model": True}, "nothing that a run could go on from"),
        ({"train_sampling_strategy": "group_by_length"}, "depends on the world"),
        ({"train_sampling_strategy": "batch_rebalance"}, "depends on the world"),
        ({"group_by_length": True}, "depends on the world"),
        ({"use_flash_ckpt": True}, "another program's"),
        ({"enable_jit_checkpoint": True}, "saves and stops by itself"),
        ({"resume_only_model": True}, "begin with the weights instead"),
        ({"n_gpu": 2}, "start one process for each"),
        ({"is_fsdp_enabled": True}, "use DeepSpeed ZeRO or DDP"),
        ({"get_sp_size": 2}, "set their sizes to 1"),
        ({"train_dataset": None}, "give the Trainer one"),
    ],
)
def test_what_no_change_of_the_world_would_survive_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refusals.refuse(trainer(**change))


def test_a_class_of_ones_own_that_deals_samples_otherwise_is_refused() -> None:
    class Weighted:
        def _get_train_sampler(self) -> None: ...

    own = Weighted()
    own.__dict__.update(trainer().__dict__)
    with pytest.raises(ValueError, match=r"_get_train_sampler of .*Weighted"):
        refusals.refuse(own)


def test_a_trainer_of_trl_that_draws_samples_by_itself_is_refused() -> None:
    own = type("GRPOTrainer", (), {"_get_train_sampler": None, "__module__": "trl.trainer.grpo_trainer"})()
    own.__dict__.update(trainer().__dict__)
    with pytest.raises(ValueError, match=r"GRPOTrainer, which draws or compares samples .* take another trainer"):
        refusals.refuse(own)


def test_a_loss_that_compares_the_pairs_of_a_micro_batch_needs_fixed_ones() -> None:
    """Others are means over pairs."""
    own = trainer()
    own.loss_types = ["sigmoid", "aot"]
    with pytest.raises(ValueError, match=r"the loss aot compares .* fixed_micro_batch=True"):
        refusals.refuse_losses(own, fixed_micro_batch=False)
    refusals.refuse_losses(own, fixed_micro_batch=True)
    own.loss_types = ["sigmoid"]
    refusals.refuse_losses(own, fixed_micro_batch=False)


def test_sequence_parallelism_of_ms_swift_is_refused() -> None:
    own = trainer()
    own.template = SimpleNamespace(sequence_parallel_size=2)
    with pytest.raises(ValueError, match="leave out --sequence_parallel_size"):
        refusals.refuse(own)


def test_a_trainer_of_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals.transformers, "__version__", "5.2.0")
    with pytest.raises(RuntimeError, match=r"install transformers>=5\.6"):
        refusals.refuse(trainer())


def test_what_the_agents_leave_out_is_not_looked_for_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer one has come in its place. What comes late, and in order, is put in its place."""
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 0.0)
    put = list[int]()
    session = SimpleNamespace(rank=0, run_dir=tmp_path)
    arriving = Arriving(lambda path, step: put.append(step), session)  # type: ignore[arg-type]
    there, looks = set[str](), list[list[str]]()
    arriving._sight = SimpleNamespace(found=there.__contains__, look=lambda names: looks.append(list(names)))  # type: ignore[assignment]
    told = list[int]()
    for step in (10, 20, 30):
        arriving.add(step, f"step-{step}", told.append)
    arriving.look()
    assert looks == [["step-10", "step-20", "step-30"]]
    there.add("step-20")
    arriving.look()
    there.add("step-10")
    arriving.look()
    assert put == told == [20, 10]
    arriving.add(40, "step-40", told.append)
    there.add("step-40")
    arriving.look()
    arriving.look()
    assert looks[-1] == []
    assert put == [20, 10, 40]
