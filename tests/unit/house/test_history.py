"""The judge of the integration tests and the demo: kept history, and its comparison with the undisturbed run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from examples.history import (
    StepLine,
    StepLogReader,
    compare,
    epoch_spans,
    kept_history,
    read_lines,
    sample_problems,
)

GLOBAL_BATCH = 4


def world(epoch: int, size: int, steps: range, *, began: float = 0.0, data_epoch: int = 0) -> list[StepLine]:
    """The lines of a world that makes `steps`, one per second; sample ids follow from the step alone."""
    lines = []
    for number, step in enumerate(steps):
        samples = list(range((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH))
        for rank in range(size):
            own = tuple(samples[rank::size])
            loss = 5.0 / step
            lines.append(StepLine(epoch, step, rank, size, data_epoch, own, loss, 1.0, began + number))
    return lines


def write(directory: Path, lines: list[StepLine]) -> None:
    directory.mkdir(exist_ok=True)
    for line in lines:
        with (directory / f"rank-{line.rank}-epoch-{line.epoch}.jsonl").open("a") as file:
            file.write(json.dumps(line.__dict__) + "\n")


def test_a_later_epoch_replaces_what_it_redid() -> None:
    """Steps redone in a later epoch, and older lines at later steps, are not kept."""
    lines = world(1, 2, range(1, 11)) + world(2, 3, range(6, 9))
    kept = kept_history(lines)
    assert list(kept) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [kept[step].epoch for step in (5, 6, 8)] == [1, 2, 2]
    assert kept[6].world_size == 3
    assert sorted(kept[6].sample_ids) == [20, 21, 22, 23]
    assert sample_problems(kept, steps=8) == []


def test_a_stale_node_does_not_reach_the_history() -> None:
    """Lines that a closed epoch writes after the next one opened are not kept (P7)."""
    lines = world(2, 2, range(6, 12), began=100) + world(1, 2, range(1, 16))
    assert [entry.epoch for entry in kept_history(lines).values()] == [1] * 5 + [2] * 6


def test_spans_tell_pause_and_loss() -> None:
    """What a change cost: the time without steps, and the steps that were redone."""
    lines = world(1, 2, range(1, 11), began=0) + world(2, 1, range(6, 21), began=12.5)
    first, second = epoch_spans(lines)
    assert (first.first_step, first.last_step, first.lost_steps, first.paused) == (1, 10, 5, 0)
    assert (second.first_step, second.last_step, second.lost_steps, second.paused) == (6, 20, 0, 3.5)


def test_equal_runs_compare_equal() -> None:
    """Another world size with the same losses is no difference."""
    compared = compare(kept_history(world(1, 3, range(1, 9))), kept_history(world(0, 1, range(1, 9))))
    assert compared.largest_difference == 0
    assert compared.problems == ()


@pytest.mark.parametrize("value", [2.5001, math.nan, math.inf])
def test_a_loss_that_differs_is_found(value: float) -> None:
    """The largest relative difference and its step; NaN doesn't slip through a comparison."""
    lines = world(1, 1, range(1, 4))
    lines[1] = StepLine(**{**lines[1].__dict__, "loss": value})
    compared = compare(kept_history(lines), kept_history(world(0, 1, range(1, 4))))
    assert compared.at_step == 2
    assert not compared.largest_difference <= 1e-5


def test_a_sample_twice_is_found() -> None:
    """Within a data epoch once; in the next again."""
    lines = world(1, 1, range(1, 3))
    lines[1] = StepLine(**{**lines[1].__dict__, "sample_ids": lines[0].sample_ids})
    assert "4 samples consumed twice" in sample_problems(kept_history(lines))[0]
    lines[1] = StepLine(**{**lines[1].__dict__, "data_epoch": 1})
    assert sample_problems(kept_history(lines)) == []


def test_other_samples_are_found() -> None:
    """A step that consumed a sample which the undisturbed run consumed elsewhere."""
    lines = world(1, 1, range(1, 3))
    lines[1] = StepLine(**{**lines[1].__dict__, "sample_ids": (4, 5, 6, 99)})
    compared = compare(kept_history(lines), kept_history(world(0, 1, range(1, 3))))
    assert compared.problems == ("step 2 (epoch 1): other samples than in the undisturbed run",)


def test_gaps_and_missing_ranks_are_found() -> None:
    """A step that nobody or not everybody tells of; a run that is too long."""
    lines = [line for line in world(1, 2, range(1, 6)) if line.step != 3]
    assert sample_problems(kept_history(lines)) == ["1 steps are missing, the first is 3"]
    lines = [line for line in world(1, 2, range(1, 6)) if (line.step, line.rank) != (4, 1)]
    assert "step 4 (epoch 1): ranks (0,) of 2 tell" in sample_problems(kept_history(lines))[0]
    assert sample_problems(kept_history(lines[:4]), steps=3) == ["1 steps are missing, the first is 3"]
    assert sample_problems(kept_history(lines[:4]), steps=1) == ["1 steps too many, the first is 2"]


def test_a_rank_that_was_killed_before_it_could_tell() -> None:
    """Of a world's last step, which went on to count: not of any other, and with no sample that is not that step's."""
    undisturbed = kept_history(world(0, 1, range(1, 5)))
    lines = [line for line in world(1, 2, range(1, 3)) if (line.step, line.rank) != (2, 1)] + world(2, 1, range(3, 5))
    assert compare(kept_history(lines), undisturbed).problems == ()
    foreign = [line if line.step != 2 else StepLine(**{**line.__dict__, "sample_ids": (99,)}) for line in lines]
    assert "other samples" in compare(kept_history(foreign), undisturbed).problems[0]
    lines = [line for line in world(1, 2, range(1, 3)) if (line.step, line.rank) != (1, 1)] + world(2, 1, range(3, 5))
    assert len(compare(kept_history(lines), undisturbed).problems) == 2


def test_ranks_that_disagree_are_found() -> None:
    """The logged loss is a global mean: every rank must have computed the same."""
    lines = world(1, 2, range(1, 3))
    lines[1] = StepLine(**{**lines[1].__dict__, "loss": 5.1})
    assert "ranks disagree on the loss" in sample_problems(kept_history(lines))[0]


def test_a_killed_writers_last_line_is_left_out(tmp_path: Path) -> None:
    """Half a line is not read, and read when its rest has come."""
    write(tmp_path, world(1, 1, range(1, 3)))
    reader = StepLogReader(tmp_path)
    assert len(reader.poll()) == 2
    line = json.dumps(world(1, 1, range(3, 4))[0].__dict__)
    path = tmp_path / "rank-0-epoch-1.jsonl"
    with path.open("a") as file:
        file.write(line[:30])
    assert reader.poll() == []
    with path.open("a") as file:
        file.write(line[30:] + "\n")
    assert [new.step for new in reader.poll()] == [3]


def test_reading_gives_back_what_was_written(tmp_path: Path) -> None:
    """All files of a directory, in order of time."""
    lines = world(1, 2, range(1, 4)) + world(2, 3, range(4, 6), began=10)
    write(tmp_path, lines)
    assert read_lines(tmp_path) == sorted(lines, key=lambda line: (line.time, line.step, line.rank))


def test_garbage_is_an_error(tmp_path: Path) -> None:
    """A complete line that is none of ours is never skipped in silence."""
    (tmp_path / "rank-0-epoch-1.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(ValueError, match="not a line of a step log"):
        read_lines(tmp_path)
