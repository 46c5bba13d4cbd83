"""What is known of the next world before it opens: why it comes, what is made or verified for it. See `state`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Conversion", "NextWorld", "Verification")


@dataclass(frozen=True)
class Conversion:
    """The universal form of `source` is wanted. `owner` holds `lease`; 0 if nobody does."""

    source: str
    lease: int = 0
    owner: str = ""
    # Names of nodes on which it failed although the source verifies.
    failed: tuple[str, ...] = ()
    # Directories of earlier leases on the same source.
    earlier: tuple[str, ...] = ()
    blocked: bool = False
    reason: str = ""
    # The open world, or the last one, has loaded `source` without it: it is owed, and the next world waits (`beside`).
    beside: bool = False


@dataclass(frozen=True)
class Verification:
    """A node could not load a checkpoint; another one verifies it before anything is concluded."""

    number: int
    digest: str
    universal: bool
    reporter: str
    verifier: str = ""
    message: str = ""
    # Names of nodes without a verdict, once for each time that they were asked.
    unable: tuple[str, ...] = ()


@dataclass(frozen=True)
class NextWorld:
    """What is known of the next world: made when one opens, dropped when the next opens or the job ends."""

    # Why it will be another world.
    causes: tuple[str, ...] = ()
    # A drain for newcomers led to it.
    grown: bool = False
    # It comes after a start, or out of WAITING: agents that nobody has heard of may be on their way.
    quiet: bool = False
    # The conversion that it needs to load the resume point, and the verification that must come before.
    conversion: Conversion | None = None
    verification: Verification | None = None
    # The epoch before it, if its world may have begun from damaged memory: nothing that its ranks save counts, not even
    # when the job is taken up again. 0: none.
    spoilt: int = 0
