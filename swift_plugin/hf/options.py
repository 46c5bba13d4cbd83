"""The user's settings that are not among the trainer's own arguments, and the size of the global batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.elastic.saving.cadence import AUTO, checked

GLOBAL_BATCH_SIZE = "DALSEGNO_GLOBAL_BATCH_SIZE"
FIXED_MICRO_BATCH = "DALSEGNO_FIXED_MICRO_BATCH"
MEMORY_EVERY = "DALSEGNO_MEMORY_EVERY"
STAY = "DALSEGNO_STAY"
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Options:
    """How a trainer is made elastic.

    Attributes:
        global_batch_size: Samples per optimizer step over all ranks; None: see `global_batch_size`.
        fixed_micro_batch: See ``BatchPlan``.
        memory_every: Steps between saves to the nodes' memory, see ``Session.steps``.
        mean_over_samples: The loss of a micro-batch is a mean over its samples, even if its labels are tokens.
        stay: Its process stays through changes of the world, see `staying`.
        usual_batch_size: Samples per optimizer step where neither the user nor the run's beginning says how many.
    """

    global_batch_size: int | None = None
    fixed_micro_batch: bool = False
    mean_over_samples: bool = False
    memory_every: int | str = 0
    stay: bool = False
    usual_batch_size: int | None = None

    def __post_init__(self) -> None:
        checked(self.memory_every)
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ValueError(f"the global batch has at least one sample, not {self.global_batch_size}")


def from_environment(environ: Mapping[str, str] = os.environ) -> Options:
    """Reads the options from the environment, for users who cannot add a flag.

    Raises:
        ValueError: A variable has an invalid value.
    """
    size = environ.get(GLOBAL_BATCH_SIZE, "")
    if size and not size.isdecimal():
        raise ValueError(f"{GLOBAL_BATCH_SIZE} is {size!r}: a number of samples was expected")
    return Options(
        int(size) if size else None,
        _is_set(environ, FIXED_MICRO_BATCH),
        memory_every=memory_every(environ.get(MEMORY_EVERY, "")),
        stay=_is_set(environ, STAY),
    )


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    said = environ.get(name, "").lower()
    if said not in (*_YES, *_NO):
        raise ValueError(f"{name} is {said!r}: 1 or 0 was expected")
    return said in _YES


def memory_every(text: str) -> int | str:
    """What a flag or a variable says of it; nothing: 0.

    Raises:
        ValueError: It means nothing.
    """
    if text in ("", AUTO) or text.isdecimal():
        return AUTO if text == AUTO else int(text or "0")
    raise ValueError(f"memory_every is a number of steps, 0 (off) or {AUTO!r}, not {text!r}")


def global_batch_size(options: Options, per_device: int, accumulation: int, session: Any) -> int:
    """Samples per optimizer step over all ranks, alike at every world size.

    It is what the user asked for; else what the run began with; else what is usual; else what the trainer's own
    arguments give in the largest world that the job may have, because their author had that one in mind.

    Args:
        options: What the user asked for.
        per_device, accumulation: The trainer's arguments.
        session: This process's session.
    """
    if options.global_batch_size is not None:
        return options.global_batch_size
    order = None if session.resume is None else session.resume.manifest.order
    if order is not None:
        return int(order.global_batch_size)
    if options.usual_batch_size is not None:
        return options.usual_batch_size
    return per_device * accumulation * int(session.max_world_size)
