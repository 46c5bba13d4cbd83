"""What a training is found to be before its first step, in lines for a person. Pure.

Nobody should learn only at the first change of the world that a change is impossible, or goes back to step 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dalsegno.protos.text import few

from .draws import drawn_in

# Kinds of layers that make a step depend on how its samples are dealt to the ranks.
RANDOM, BATCH_STATISTICS, STATISTICS_OF_ALL = "random", "batch statistics", "statistics of all ranks"
# What may be known of the data's position.
OURS, SCRIPTS, STATE, NOTHING = "all, as of Batches", "what the script sees to", "a state of each rank", "nothing"


class Finding(NamedTuple):
    """One line: its subject, and what was found."""

    about: str
    text: str


@dataclass(frozen=True)
class Facts:
    """What is known of a training when its ranks meet for the first time.

    Attributes:
        strategy: As in `Session.save`.
        world_size, max_world_size: Number of ranks here, and in the largest world that this run may have.
        directory: There is a directory for checkpoints.
        saves: The script gives something to save with.
        save_every: Steps between saves; 0: only for drains and at the end.
        memory_every: Steps between saves to the nodes' memory, or ``"auto"``; 0: there are none.
        any_world_size: Its files load at any world size as they are.
        reshards: Its files load at any world size, because each rank takes its ranges of them.
        data: What is known of the data's position; empty: they were not looked at.
        fixed_micro_batch: The cut of the global batch is the same in every world.
        optimizers: Names of their classes.
        layers: Kinds of layers that were seen, see `kinds_of`, each with the classes.
        stateless: Names of callbacks that keep nothing in checkpoints.
        keeping: What such a callback lacks.
        data_draws: The data set draws random numbers, and nothing sets the generators for each sample.
        data_draws_own: The data set draws from a generator of its own.
        left_out: Kinds of schedules that act on an optimizer and are in no checkpoint.
        lacks, belongs: Where these are not, and what to do about it.
        left_out_refused: A run with them is refused where it resumes.
        dynamic_scale: A DeepSpeed engine trains in fp16 and finds its loss scale by overflows.
        twins: Classes of callbacks whose states only their order tells apart.
        loss_draws: Names of functions with which a `Trainer`'s loss draws random numbers.
        seeded: The generators are set for each fixed micro-batch.
        unwrapped: Nothing around the model is seen to average the ranks' gradients.
        examined: `dalsegno doctor` examines the training, and sees no step.
    """

    strategy: str = "ddp"
    world_size: int = 1
    max_world_size: int = 1
    directory: bool = False
    saves: bool = False
    save_every: int = 0
    memory_every: int | str = 0
    any_world_size: bool = True
    reshards: bool = False
    data: str = ""
    fixed_micro_batch: bool = False
    optimizers: tuple[str, ...] = ()
    layers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    stateless: tuple[str, ...] = ()
    keeping: str = "state_dict()"
    data_draws: bool = False
    data_draws_own: bool = False
    left_out: tuple[str, ...] = ()
    lacks: str = ""
    belongs: str = ""
    left_out_refused: bool = True
    dynamic_scale: bool = False
    twins: tuple[str, ...] = ()
    loss_draws: tuple[str, ...] = ()
    seeded: bool = False
    unwrapped: bool = False
    examined: bool = False


def loads_anywhere(strategy: str) -> bool:
    """Whether any number of ranks loads a strategy's checkpoints as they are, if the script does not say."""
    return strategy in ("ddp", "deepspeed-zero-0")


def findings(facts: Facts) -> Iterator[Finding]:
    """All findings, the most important first."""
    with_ = f" with {', '.join(facts.optimizers)}" if facts.optimizers else ""
    ranks = f"{facts.world_size} rank{'s' if facts.world_size != 1 else ''}"
    yield Finding("training", f"strategy {facts.strategy}{with_}, {ranks}")
    yield Finding("change of the world", change_of_world(facts))
    yield from (Finding("the same only in distribution", text) for text in in_distribution(facts))
    yield from (Finding("not saved", text) for text in not_saved(facts))
    yield from (Finding("not seen", text) for text in not_seen(facts))


def change_of_world(facts: Facts) -> str:
    """Whether this run can go on with another number of ranks, and how."""
    if not facts.directory or not facts.saves:
        why = (
            "there is no checkpoint directory (dlrover-run has one)"
            if facts.saves
            else "nothing is given to save with (save=)"
        )
        return f"begins again at step 0, as does a crash: {why}"
    if facts.data in (NOTHING, STATE):
        return f"impossible: {data(facts)}"
    if facts.left_out and facts.left_out_refused:
        return (
            f"refused, unless the script itself moves {few(facts.left_out)} to session.step: it {facts.lacks}, "
            f"and would begin anew; {facts.belongs}"
        )
    if facts.any_world_size:
        return "its checkpoints load as they are, at any number of ranks"
    if facts.reshards:
        return "its checkpoints load as they are: each rank takes its ranges of them (re-shard)"
    if facts.strategy.startswith("deepspeed-zero"):
        return (
            "goes on after a conversion to Universal Checkpoint: dlrover-run does it (--universal-checkpoint), "
            "elsewhere `dalsegno convert`"
        )
    return (
        f"impossible: checkpoints of strategy {facts.strategy} load with {facts.world_size} ranks only, so a change "
        "waits for as many; say any_world_size=True if they load at any number"
    )


def data(facts: Facts) -> str:
    """What people should know of the data's position; empty: nothing."""
    if facts.data == NOTHING:
        return "nothing says where these data stand: a resume is refused; give Batches, or steps(advanced=True)"
    if facts.data == STATE:
        return f"the loader's state is each rank's own: a resume needs {facts.world_size} ranks again; Batches do not"
    return ""


def in_distribution(facts: Facts) -> Iterator[str]:
    """What each start, or a change of the number of ranks, alters beyond rounding."""
    seen = dict(facts.layers)
    if facts.data_draws_own:
        yield (
            "the data set: it draws from a generator of its own, which nothing saves or sets, so each start has other "
            "numbers; draw from torch's, Python's or NumPy's global one"
        )
    if facts.max_world_size == 1 and facts.world_size == 1:
        return
    drawing = [*seen.get(RANDOM, ()), *(f"{name} in the loss" for name in facts.loss_draws)]
    if drawing and not (facts.fixed_micro_batch and facts.seeded):
        yield (
            f"{few(drawing)}: each rank draws its own random numbers. In the same world they go on bit for bit, "
            "after a change of its size they are others; fixed_micro_batch with a seed sets them for each micro-batch"
        )
    if facts.data_draws:
        yield (
            "the data set: what it draws at random is drawn by each rank, and other numbers after a change; "
            "fixed_micro_batch with a seed sets them for each sample"
        )
    if BATCH_STATISTICS in seen and not facts.fixed_micro_batch:
        yield (
            f"{few(seen[BATCH_STATISTICS])}: statistics are of one micro-batch, whose size changes with the world; "
            "fixed_micro_batch keeps it"
        )
    if facts.dynamic_scale:
        yield (
            "fp16 with a dynamic loss scale: which steps overflow, and are left out, also depends on how samples are "
            "dealt to the ranks; bf16 does without, and a fixed loss_scale overflows in few steps, if any"
        )
    if STATISTICS_OF_ALL in seen:
        yield (
            f"{few(seen[STATISTICS_OF_ALL])}: statistics are of the micro-batches of all ranks at a time, so they "
            "depend on the number of ranks, also with fixed_micro_batch"
        )


def not_saved(facts: Facts) -> Iterator[str]:
    """What a resume does not bring back."""
    if facts.saves and facts.directory and not facts.save_every:
        back = "goes back to the last change, or to step 0"
        if facts.memory_every:
            yield f"what is in memory only (save_every is 0): if all nodes go at once, the run {back}"
        else:
            yield f"steps between two changes (save_every is 0): a crash {back}"
    if facts.twins:
        yield (
            f"which callback is which, of several {few(facts.twins)} that were made alike: keep their order, or give "
            "each a key"
        )
    if facts.left_out and not facts.left_out_refused:
        yield (
            f"{few(facts.left_out)}: it {facts.lacks}, and begins anew unless the script sets it by s.step; "
            f"{facts.belongs}"
        )
    if facts.stateless:
        yield f"{few(facts.stateless)}: without {facts.keeping} they begin anew at each start"


def not_seen(facts: Facts) -> Iterator[str]:
    """What the doctor cannot tell, so that nobody takes its silence for an answer."""
    if facts.unwrapped:
        yield (
            "what averages the gradients of the ranks: no DistributedDataParallel is around the model. Where the "
            "script does not do it by itself, each rank trains a model of its own"
        )
    if not facts.examined:
        return
    if facts.world_size == 1:
        yield "what differs between ranks (data, gradients that nobody averages): look with --nproc-per-node=2, too"
    yield (
        "the steps: what a loop or a callback draws at random, keeps in variables of its own, or changes later "
        "(parameters that are unfrozen or added, buffers). A run compares and says some of it in its first steps"
    )


def kinds_of(model: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Which layers of a ``torch.nn.Module`` make a step depend on how samples are dealt to ranks, by kind."""
    found: dict[str, dict[str, None]] = {}
    for module in model.modules():
        name = type(module).__name__
        if _drops(module) and _rate(module) > 0:
            found.setdefault(RANDOM, {})[name] = None
        elif any(_rate_of(module, key) > 0 for key in ("dropout", "dropout_p", "attention_dropout")):
            found.setdefault(RANDOM, {})[f"dropout in {name}"] = None
        elif not type(module).__module__.startswith("torch."):
            drawn = _drawn_by(module)
            if drawn:
                found.setdefault(RANDOM, {})[f"{drawn[0]} in {name}"] = None
        if "BatchNorm" in name:
            found.setdefault(STATISTICS_OF_ALL if "Sync" in name else BATCH_STATISTICS, {})[name] = None
    return tuple((kind, tuple(names)) for kind, names in found.items())


def _drops(module: Any) -> bool:
    return bool(re.search(r"drop(out|path)", type(module).__name__, re.IGNORECASE))


def _drawn_by(module: Any) -> list[str]:
    """Names with which a layer's own ``forward`` draws. What its children draw is said of them."""
    values = {**vars(module), **module._modules}
    silent = frozenset(name for name, value in values.items() if "drop" in name and _is_no_draw(value))
    rated = ("p",) if _drops(module) else ()
    rates = [value for name, value in values.items() if ("drop" in name or name in rated) and _is_rate(value)]
    # Which rate goes where is not seen, so the layer is silent if it has any, and all are 0.
    drops = not rates or any(rates)
    return [draw for draw in drawn_in(type(module).forward, silent) if drops or "drop" not in draw]


def _is_no_draw(value: Any) -> bool:
    """Whether what has a name as of a draw draws nothing, or is a layer that tells its rate by itself."""
    if not hasattr(value, "modules"):
        return _is_rate(value)
    tells = any(_is_rate(getattr(value, key, "")) for key in ("p", "drop_prob"))
    return type(value).__name__ == "Identity" or (_drops(value) and tells)


def _is_rate(value: Any) -> bool:
    # A flag that is set says that there is a rate, not which.
    return value is None or (isinstance(value, int | float) and value is not True)


def _rate(module: Any) -> float:
    return max(_rate_of(module, "p"), _rate_of(module, "drop_prob"))


def _rate_of(module: Any, key: str) -> float:
    value = getattr(module, key, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
