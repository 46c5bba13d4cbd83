"""What the controllers see of pods, and what they can want."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "Create", "Delete", "Phase", "Pod"]


class Phase(Enum):
    """`status.phase` of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_terminal(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True)
class Pod:
    """One pod as the API shows it.

    Attributes:
        name: of the pod.
        number: the how-manieth pod of the cluster it is.
        revision: of the template that it was made from.
        index: of an indexed Job or a StatefulSet; -1: it has none.
        phase: as the kubelet, or who collects pods of nodes that are gone, has set it.
        ready: whether its condition `Ready` is true.
        deleting: whether it has a `deletionTimestamp`.
        exit_code: of its container, once the pod has ended.
        disrupted: whether its condition `DisruptionTarget` is true.
        ended: when it ended, in seconds.
    """

    name: str
    number: int
    revision: str = ""
    index: int = -1
    phase: Phase = Phase.PENDING
    ready: bool = False
    deleting: bool = False
    exit_code: int | None = None
    disrupted: bool = False
    ended: float = 0.0

    @property
    def is_active(self) -> bool:
        """As controllers count: neither ended, nor on its way out."""
        return not self.deleting and not self.phase.is_terminal


@dataclass(frozen=True)
class Create:
    """A pod is to be made; `index` as in `Pod`."""

    index: int = -1


@dataclass(frozen=True)
class Delete:
    """This pod is to be deleted, with its grace."""

    name: str


Action = Create | Delete
