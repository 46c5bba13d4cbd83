"""Names in a run's directory: ``step-<n>.e<epoch>.<attempt>`` and ``….<form>.<lease>`` for a later form of one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dalsegno.protos.contract import FIRST_OF_SURVIVORS

MANIFEST = "MANIFEST.json"
LATEST = "latest.json"
BEST = "best.json"
FINISHED = "FINISHED.json"
LOCK = ".lock"
SEALED = ".sealed"
# What a conversion has written so far; it may outlive the seal by a moment, or by a machine that ended there.
JOURNAL = "JOURNAL.jsonl"

SHARDED, UNIVERSAL, WEIGHTS = "sharded", "universal", "weights"
FORMS = (SHARDED, UNIVERSAL, WEIGHTS)
# By form, what may lie in a checkpoint's directory besides what its manifest lists.
BESIDES = {UNIVERSAL: frozenset({JOURNAL})}

# The largest number in a name: 18 digits, which every part of the program can handle.
MAX_NUMBER = 10**18 - 1
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(rf"step-{_NUMBER}\.e{_NUMBER}\.{_NUMBER}(?:\.({UNIVERSAL}|{WEIGHTS})\.{_NUMBER})?", re.ASCII)


@dataclass(frozen=True)
class CheckpointName:
    """The parts of a checkpoint directory's name.

    Attributes:
        step: Optimizer steps done.
        epoch: The epoch that wrote the sharded checkpoint.
        attempt: Distinguishes saves of one step in one epoch.
        form: ``"sharded"``, or the later form that this directory holds.
        lease: The conversion lease that wrote a later form; None for a sharded one.
    """

    step: int
    epoch: int
    attempt: int
    form: str = SHARDED
    lease: int | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"unknown form {self.form!r}, known: {', '.join(FORMS)}")
        if (self.form == SHARDED) != (self.lease is None):
            raise ValueError(f"a later form has a lease and a sharded checkpoint has none: {self.form}, {self.lease}")
        if not all(0 <= number <= MAX_NUMBER for number in (self.step, self.epoch, self.attempt, self.lease or 0)):
            raise ValueError(f"a checkpoint's name holds no such number: {self.step}, {self.epoch}, {self.attempt}")

    def __str__(self) -> str:
        name = f"step-{self.step}.e{self.epoch}.{self.attempt}"
        return name if self.lease is None else f"{name}.{self.form}.{self.lease}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName:
        """The inverse of ``str``.

        Raises:
            ValueError: ``name`` is not one of ours.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"not a checkpoint name: {name!r}")
        step, epoch, attempt, form, lease = match.groups()
        if form is None:
            return cls(int(step), int(epoch), int(attempt))
        return cls(int(step), int(epoch), int(attempt), form, int(lease))

    @property
    def by_survivor(self) -> bool:
        """Whether a rank has saved it by itself, behind a crash. All such of one step and epoch have the same state."""
        return self.attempt >= FIRST_OF_SURVIVORS

    def later(self, form: str, lease: int) -> CheckpointName:
        """The directory beside this one in which ``lease`` writes ``form``."""
        return replace(self, form=form, lease=lease)

    @property
    def source(self) -> CheckpointName:
        """The sharded checkpoint that this one is, or is a form of."""
        return replace(self, form=SHARDED, lease=None)

    @property
    def age(self) -> tuple[int, int, int]:
        """Sort key: the newest checkpoint has the highest epoch, then step, then attempt."""
        return self.epoch, self.step, self.attempt


def is_checkpoint_name(name: str) -> bool:
    """Whether ``name`` could be a checkpoint directory of ours."""
    return _NAME.fullmatch(name) is not None
