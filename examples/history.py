"""What a run really did, read back from the step logs of its ranks.

The *kept history* is what became part of the run: for every step the lines of the highest epoch. A step that was redone
in a later epoch replaces its older lines, and everything at later steps of older epochs. This module reads the logs,
computes the kept history and compares it with the undisturbed run's. Standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepLine:
    """One rank's line about one optimizer step."""

    epoch: int
    step: int
    rank: int
    world_size: int
    data_epoch: int
    sample_ids: tuple[int, ...]
    loss: float
    grad_norm: float
    time: float


@dataclass(frozen=True)
class KeptStep:
    """One step of the kept history, all ranks together.

    `sample_ids` are in the order of the ranks; `time` is when the last rank had done it, in seconds since 1970.
    """

    step: int
    epoch: int
    world_size: int
    data_epoch: int
    sample_ids: tuple[int, ...]
    loss: float
    loss_spread: float
    ranks: tuple[int, ...]
    time: float

    @property
    def complete(self) -> bool:
        """Whether every rank of the world wrote its line, once."""
        return self.ranks == tuple(range(self.world_size))


@dataclass(frozen=True)
class EpochSpan:
    """What one epoch did: its steps, when they were made (seconds since 1970), and what the way here cost.

    `paused` is the time from the last step of the previous world to the first of this one; `lost_steps` are steps of
    this epoch that a later one had to redo.
    """

    epoch: int
    world_size: int
    first_step: int
    last_step: int
    began: float
    ended: float
    paused: float
    lost_steps: int


@dataclass(frozen=True)
class Comparison:
    """How far a run is from the undisturbed one: no problems and a small difference mean that they are the same."""

    largest_difference: float
    at_step: int
    problems: tuple[str, ...]


class StepLogReader:
    """Reads a directory of step logs while they grow: each `poll` returns new complete lines."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[StepLine]:
        """New lines, ordered by time.

        A last line without its newline (its writer was killed, or is writing it) is left for the next poll.

        Raises:
            ValueError: A complete line is no JSON object or lacks a key.
        """
        found = []
        for path in sorted(self._directory.glob("rank-*-epoch-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            found += [_parse(path, line) for line in whole.splitlines()]
        return sorted(found, key=lambda line: (line.time, line.step, line.rank))


def _parse(path: Path, line: bytes) -> StepLine:
    try:
        values: dict[str, Any] = json.loads(line)
        return StepLine(
            epoch=int(values["epoch"]),
            step=int(values["step"]),
            rank=int(values["rank"]),
            world_size=int(values["world_size"]),
            data_epoch=int(values["data_epoch"]),
            sample_ids=tuple(values["sample_ids"]),
            loss=float(values["loss"]),
            grad_norm=float(values["grad_norm"]),
            time=float(values["time"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a line of a step log ({error!r}): {line[:200]!r}") from error


def read_lines(directory: Path) -> list[StepLine]:
    """All complete lines of a directory of step logs."""
    return StepLogReader(directory).poll()


def kept_history(lines: Iterable[StepLine]) -> dict[int, KeptStep]:
    """The kept history by step, in ascending order; steps of which only some ranks have a line are in it, too."""
    by_epoch: dict[int, dict[int, list[StepLine]]] = {}
    for line in lines:
        by_epoch.setdefault(line.epoch, {}).setdefault(line.step, []).append(line)
    kept: dict[int, KeptStep] = {}
    for _, steps in sorted(by_epoch.items()):
        first = min(steps)
        kept = {step: entry for step, entry in kept.items() if step < first}
        kept.update((step, _merge(steps[step])) for step in sorted(steps))
    return kept


def _merge(lines: list[StepLine]) -> KeptStep:
    lines = sorted(lines, key=lambda line: line.rank)
    losses = [line.loss for line in lines]
    return KeptStep(
        step=lines[0].step,
        epoch=lines[0].epoch,
        world_size=lines[0].world_size,
        data_epoch=lines[0].data_epoch,
        sample_ids=tuple(sample for line in lines for sample in line.sample_ids),
        loss=losses[0],
        loss_spread=max(losses) - min(losses),
        ranks=tuple(line.rank for line in lines),
        time=max(line.time for line in lines),
    )


def epoch_spans(lines: Iterable[StepLine]) -> list[EpochSpan]:
    """One span for each epoch that made a step, in order."""
    lines = list(lines)
    kept = kept_history(lines)
    spans: list[EpochSpan] = []
    for epoch in sorted({line.epoch for line in lines}):
        own = [line for line in lines if line.epoch == epoch]
        steps = {line.step for line in own}
        # The first step of a world counts when its last rank has done it.
        began = max(line.time for line in own if line.step == min(steps))
        spans.append(
            EpochSpan(
                epoch=epoch,
                world_size=own[0].world_size,
                first_step=min(steps),
                last_step=max(steps),
                began=began,
                ended=max(line.time for line in own),
                paused=began - spans[-1].ended if spans else 0.0,
                lost_steps=sum(kept[step].epoch != epoch if step in kept else True for step in steps),
            )
        )
    return spans


def sample_problems(kept: Mapping[int, KeptStep], steps: int | None = None) -> list[str]:
    """What is wrong with a kept history in itself: gaps, missing ranks, samples consumed twice in a data epoch.

    Args:
        kept: The kept history.
        steps: How many steps the run was to make, if that is known.
    """
    problems = []
    expected = range(1, (steps if steps is not None else max(kept, default=0)) + 1)
    missing = sorted(set(expected) - set(kept))
    if missing:
        problems.append(f"{len(missing)} steps are missing, the first is {missing[0]}")
    extra = sorted(set(kept) - set(expected))
    if extra:
        problems.append(f"{len(extra)} steps too many, the first is {extra[0]}")
    consumed: dict[int, Counter[int]] = {}
    for entry in kept.values():
        if not entry.complete and not _cut_off(kept, entry):
            problems.append(f"step {entry.step} (epoch {entry.epoch}): ranks {entry.ranks} of {entry.world_size} tell")
        if entry.loss_spread > 0:
            problems.append(
                f"step {entry.step} (epoch {entry.epoch}): ranks disagree on the loss by {entry.loss_spread}"
            )
        consumed.setdefault(entry.data_epoch, Counter()).update(entry.sample_ids)
    for data_epoch, counts in sorted(consumed.items()):
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        if twice:
            problems.append(f"data epoch {data_epoch}: {len(twice)} samples consumed twice, the first is {twice[0]}")
    return problems


def _cut_off(kept: Mapping[int, KeptStep], entry: KeptStep) -> bool:
    """Whether a step is the last one of a world: a rank that was killed right behind it may not have told of it."""
    after = kept.get(entry.step + 1)
    return after is not None and after.epoch > entry.epoch


def compare(kept: Mapping[int, KeptStep], undisturbed: Mapping[int, KeptStep]) -> Comparison:
    """Compares a kept history with the undisturbed run's.

    The difference is `|loss - undisturbed loss| / |undisturbed loss|`. Each step must have consumed the same samples;
    their order within a step has no meaning, because ranks compute them side by side. Of a world's last step a killed
    rank may not have told its own, which its loss, that of all ranks, speaks for.
    """
    problems = [f"undisturbed run: {problem}" for problem in sample_problems(undisturbed)]
    problems += sample_problems(kept, steps=max(undisturbed, default=0))
    largest, at_step = 0.0, 0
    for step in sorted(set(kept) & set(undisturbed)):
        mine, other = kept[step], undisturbed[step]
        told, meant = Counter(mine.sample_ids), Counter(other.sample_ids)
        same = told == meant or (not mine.complete and _cut_off(kept, mine) and told < meant)
        if mine.data_epoch != other.data_epoch or not same:
            problems.append(f"step {step} (epoch {mine.epoch}): other samples than in the undisturbed run")
        difference = relative_difference(mine.loss, other.loss)
        # Negated, so that a NaN counts as the largest of all.
        if not difference <= largest:
            largest, at_step = difference, step
            if difference != difference:
                break
    return Comparison(largest, at_step, tuple(problems))


def relative_difference(loss: float, reference: float) -> float:
    """`|loss - reference| / |reference|`; 0 if both are equal, infinite if only the reference is 0."""
    if loss == reference:
        return 0.0
    return abs(loss - reference) / abs(reference) if reference != 0 else float("inf")
