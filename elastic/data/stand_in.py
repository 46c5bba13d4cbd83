"""What a loader reads in the place of a map-style data set, so that a ``worker_init_fn`` finds the data set in it."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)

# A subclass has no other names than those of Python's own methods: all others are the data set's.
_PLACE = "_dalsegno_stands_for"


class StandIn(Dataset[T_co]):
    """Reads a data set for a loader. In its processes ``get_worker_info().dataset`` is this, and seems to be that.

    What is asked of it, or set on it, is asked of the data set, or set there: ``info.dataset.open()``.

    Args:
        dataset: Map-style. (A part of an iterable one must not be given to a worker, as torch's documents do.)
        own: What the subclass needs besides, see `parts_of`.
    """

    def __init__(self, dataset: Any, own: Any = None) -> None:
        self.__dict__[_PLACE] = (dataset, own)

    def __len__(self) -> int:
        return len(self.__dict__[_PLACE][0])

    def __getattr__(self, name: str) -> Any:
        # Not what Python itself asks for, above all while this is unpickled.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__[_PLACE][0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__[_PLACE][0], name, value)


def parts_of(stand_in: StandIn[Any]) -> tuple[Any, Any]:
    """The data set, and what the subclass needs besides."""
    dataset, own = stand_in.__dict__[_PLACE]
    return dataset, own
