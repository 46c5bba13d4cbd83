"""Compares what a script says of its checkpoints with what it saves: with its ``save``, and with the files that result.

If a checkpoint claimed more than it can do, the first change of the world would find out, when it is too late.
Nothing here imports torch or DeepSpeed.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from dalsegno.protos.reads import Reads

from ..rank.remarks import remark

DDP = "ddp"
"""The default strategy of `steps` and `save`."""
HOW_LOADED = ("reshards", "by_place", "reads")
"""What a save may say of how its files are loaded."""
_DEEPSPEED = "deepspeed-zero-"
_CURE = "give save=elastic.deepspeed.save(engine) and strategy=elastic.deepspeed.strategy(engine)"

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_MODEL_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_ANOTHERS = re.compile(r"(?:layer_|expert_|expp_rank_).*_(?:model|optim)_states\.pt")
_MODEL = re.compile(r"mp_rank_\d+_model_states\.pt")
_RANK = re.compile(r"(rank[-_]?)(\d+)", re.IGNORECASE)


def is_engine(value: object) -> bool:
    """Whether something is an engine of DeepSpeed's."""
    return callable(getattr(value, "zero_optimization_stage", None))


def how_loaded(write: Any) -> dict[str, Any]:
    """What a save, or whose ``write`` it is, says of how it is loaded, by its words for that: see ``Shape``."""
    owner = write.__self__ if inspect.ismethod(write) and write.__name__ == "write" else None
    said = {key: [value for one in (write, owner) if (value := getattr(one, key, None))] for key in HOW_LOADED}
    # A class of the script's own may call something else `reads`.
    reads = next((value for value in said["reads"] if isinstance(value, Reads)), None)
    return {"reshards": bool(said["reshards"]), "by_place": bool(said["by_place"]), "reads": reads}


def strategy_of(write: Any, given: str) -> str:
    """The strategy of a save, as far as it can be seen before anything is written.

    Args:
        write: What the script saves with.
        given: The strategy that the script gives; ``"ddp"`` if it gives none.

    Raises:
        ValueError: ``write`` calls a DeepSpeed engine, and ``given`` is no strategy of DeepSpeed's, or another stage's.
    """
    own = getattr(write, "strategy", None)
    if isinstance(own, str):  # one of our own functions, which knows its strategy
        if given not in (DDP, own):
            raise ValueError(f"strategy={given!r}, but save= writes {own}: leave strategy out")
        return own
    for engine in _engines(write):
        stage = int(engine.zero_optimization_stage())
        own = f"{_DEEPSPEED}{stage}"
        # Stage 0 partitions nothing, and a name of the script's own promises nothing.
        if given != own and (given.startswith(_DEEPSPEED) or (given == DDP and stage > 0)):
            raise ValueError(f"strategy={given!r}, but save= calls a DeepSpeed engine with {own}: {_CURE}")
    return given


def _engines(write: Any) -> Iterator[Any]:
    """DeepSpeed engines whose ``save_checkpoint`` a function calls."""
    while isinstance(write, functools.partial):
        write = write.func
    if inspect.ismethod(write) and write.__name__ == "save_checkpoint":
        yield from filter(_saves_as_engine, [write.__self__])
    if not inspect.isfunction(write) or "save_checkpoint" not in write.__code__.co_names:
        return
    seen = inspect.getclosurevars(write)
    yield from filter(_saves_as_engine, [*seen.nonlocals.values(), *seen.globals.values()])


def _saves_as_engine(value: Any) -> bool:
    return is_engine(value) and hasattr(value, "save_checkpoint")


def contradiction(paths: Sequence[str], strategy: str, any_world_size: bool) -> str | None:
    """Why the files of a checkpoint contradict what it says of itself; None: no contradiction is known.

    Args:
        paths: All of its files.
        strategy: The strategy that it gives.
        any_world_size: Whether it says that any number of ranks loads it as it is.
    """
    names = [PurePosixPath(path).name for path in paths]
    stage = _stage(names)
    sharded = stage in ("1 or 2", "3")
    if sharded and any_world_size:
        return (
            f"the files are ZeRO shards (stage {stage}), which load at no other number of ranks as they are, and "
            f"strategy={strategy!r} says that they do: {_CURE}"
        )
    if not strategy.startswith(_DEEPSPEED) or stage == "another's":
        return None
    said = strategy.removeprefix(_DEEPSPEED)
    if stage is None:
        return f"strategy={strategy!r}, but none of the files is a DeepSpeed engine's: {_CURE}, or another strategy"
    if said not in stage.split(" or "):
        return f"strategy={strategy!r}, but the files are those of ZeRO stage {stage}: {_CURE}"
    return None


def _stage(names: Sequence[str]) -> str | None:
    """The ZeRO stage of DeepSpeed's files; names do not tell that of pipelines and experts. None: there are none."""
    if any(map(_MODEL_SHARD.fullmatch, names)):
        return "3"
    if any(map(_OPTIMIZER.fullmatch, names)):
        return "1 or 2"
    if any(map(_ANOTHERS.fullmatch, names)):
        return "another's"
    return "0" if any(map(_MODEL.fullmatch, names)) else None


def of_each_rank(paths: Sequence[str], world_size: int) -> str | None:
    """A file name of which each rank has one; None: there is none, or only one rank."""
    numbers: dict[str, set[int]] = {}
    for path in paths:
        for found in _RANK.finditer(path):
            pattern = f"{path[: found.start(2)]}*{path[found.end(2) :]}"
            numbers.setdefault(pattern, set()).add(int(found[2]))
    whole = set(range(world_size))
    return next((pattern for pattern, seen in sorted(numbers.items()) if world_size > 1 and seen >= whole), None)


def say_what_each_rank_has(paths: Sequence[str], world_size: int) -> None:
    """Remarks on files that each rank has one of, where the script says that any number of ranks loads them."""
    each = of_each_rank(paths, world_size)
    if each is not None:
        remark(
            "each rank has saved a file of its own, %s, and strategy='ddp' says that any number of ranks loads "
            "them: if they hold parts of the model or of the optimizer, give save or steps any_world_size=False",
            each,
        )
