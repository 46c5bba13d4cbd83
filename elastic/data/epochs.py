"""Tells a data set in which data epoch it is read, where it wants to know: it, or one inside of it, has ``set_epoch``.

Each process that reads has a data set of its own, and a new process begins with a new one. So what a script tells its
data set holds for one process, and for a while. Here every reader tells its own before it reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.data import Dataset

from ..rank import rng

# How deep data sets in data sets are searched, and how many items of a container, before all are if there is one.
_DEPTH, _ITEMS = 6, 256


class Heard:
    """What a map-style data set was told.

    Attributes:
        last: The number that it was told last by us; None: by nobody, or by the script since then.
        by_script: The number that the script has told it since `DataEpoch.contradicted` asked; None: none.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.last: Any = None
        self.by_script: Any = None

    def tell(self, data_epoch: int) -> None:
        """Tells it this number."""
        before = self.by_script
        self.dataset.set_epoch(data_epoch)
        self.last, self.by_script = data_epoch, before


# By the id of the data set, which lives at least as long.
_heard_of: WeakValueDictionary[int, Heard] = WeakValueDictionary()


class DataEpoch:
    """The data epoch that a data set is told, in this process.

    A data set with ``set_epoch`` is told, and may tell those inside of it; in one without, those that it holds are
    looked for: in ``Subset``, ``ConcatDataset``, ``StackDataset``, and in any attribute.

    Args:
        dataset: The data set.
        seed: With it and the data epoch the global generators are seeded while a map-style data set is told, which may
            shuffle then. What a stream seeds is for its iterator, which draws later.
        stream: It is iterable: it is told before each reading, also if that begins anew within a data epoch.

    Attributes:
        wanted: There is a data set that wants to know.
    """

    def __init__(self, dataset: Any, seed: int = 0, *, stream: bool = False) -> None:
        self._dataset, self._seed, self._stream = dataset, seed, stream
        self._heard: list[Heard] = []
        # Nobody hears what a script tells these, so they are told each time.
        self._unheard: list[Any] = []
        for found in _with_epochs(dataset, 0, set()):
            heard = None if stream else _heard(found)
            if heard is None:
                self._unheard.append(found)
            elif heard not in self._heard:
                self._heard.append(heard)
        self.wanted = bool(self._heard or self._unheard)

    def __reduce__(self) -> Any:
        # In another process a data set may hold others than here, or make them anew.
        return _data_epoch, (self._dataset, self._seed, self._stream)

    def tell(self, data_epoch: int) -> None:
        """Says that samples of this data epoch are read from now on; the first is 0."""
        told: list[Callable[[int], Any]] = [heard.tell for heard in self._heard if heard.last != data_epoch]
        for tell in (*told, *(dataset.set_epoch for dataset in self._unheard)):
            if self._stream:
                tell(data_epoch)
                continue
            # A seed that it sets, or an order that it draws, is the same in each process, and moves no other draw.
            with rng.aside("data epoch", self._seed, data_epoch):
                tell(data_epoch)

    def keep_apart(self) -> None:
        """In a process that reads by itself: what the data sets are told here is not told to other processes.

        Hugging Face's share their epoch, and add the difference to it: two workers at a time could add it twice.
        """
        for dataset in _all_inside(self._dataset, 0, set()):
            shared = getattr(dataset, "_epoch", None) if _is_of_datasets(dataset) else None
            if isinstance(shared, Tensor):
                dataset._epoch = shared.clone()

    def contradicted(self, *right: int) -> int | None:
        """The number other than these that the script has told the data set by itself, since this was asked last."""
        told = [heard.by_script for heard in self._heard]
        for heard in self._heard:
            heard.by_script = None
        return next((number for number in told if number is not None and number not in right), None)


def _data_epoch(dataset: Any, seed: int, stream: bool) -> DataEpoch:
    return DataEpoch(dataset, seed, stream=stream)


def _is_of_datasets(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "datasets"


def _heard(dataset: Any) -> Heard | None:
    """What it was told, from now on; None: nobody can know."""
    method = dataset.set_epoch
    # A wrapper may hand out the method of what is inside.
    owner = getattr(method, "__self__", None)
    # One that was put on the object is not the class's, whatever that has.
    if getattr(method, "__func__", None) is not getattr(type(owner), "set_epoch", None) or not _listen(type(owner)):
        return None
    return _heard_of.setdefault(id(owner), Heard(owner))


def _listen(kind: type[Any]) -> bool:
    """Has the class's ``set_epoch`` note what it is told; not that of the object, which copies would take along."""
    plain = getattr(kind, "set_epoch", None)
    if not inspect.isfunction(plain):
        return False
    if hasattr(plain, "_noted_by_dalsegno"):
        return True

    @functools.wraps(plain)
    def set_epoch(self: Any, *arguments: Any, **options: Any) -> Any:
        answer = plain(self, *arguments, **options)
        _note(self, next(iter((*arguments, *options.values())), None))
        return answer

    set_epoch._noted_by_dalsegno = True  # type: ignore[attr-defined]
    try:
        kind.set_epoch = set_epoch
    except (AttributeError, TypeError):
        return False
    return True


def _note(dataset: Any, number: Any) -> None:
    """It was told: by us, or by the script, which it is told by us once more then. (Pickled by its name.)"""
    heard = _heard_of.get(id(dataset))
    if heard is not None:
        heard.last, heard.by_script = None, number


def _with_epochs(thing: Any, depth: int, known: set[int]) -> Iterator[Any]:
    """The outermost data sets that have ``set_epoch``, in order."""
    if depth > _DEPTH or id(thing) in known:
        return
    known.add(id(thing))
    # Of what may be anything the class is asked: some objects answer to every name.
    asked = thing if depth == 0 or isinstance(thing, Dataset) else type(thing)
    if _takes_an_epoch(asked, thing):
        yield thing
        return
    for held in _held(thing):
        yield from _with_epochs(held, depth + 1, known)


def _takes_an_epoch(asked: Any, thing: Any) -> bool:
    """Whether there is a ``set_epoch`` of one number, as torch's and Hugging Face's are."""
    try:
        return callable(getattr(asked, "set_epoch", None)) and bool(inspect.signature(thing.set_epoch).bind(0))
    except ValueError:  # one that is not Python's, and tells nothing of itself
        return True
    # Whatever a class of the script's answers to names that it does not know.
    except Exception:
        return False


def _all_inside(thing: Any, depth: int, known: set[int]) -> Iterator[Any]:
    """It, and all that may be a data set inside of it."""
    if depth <= _DEPTH and id(thing) not in known:
        known.add(id(thing))
        yield thing
        for held in _held(thing):
            yield from _all_inside(held, depth + 1, known)


def _held(thing: Any) -> Iterator[Any]:
    for value in list(getattr(thing, "__dict__", {}).values()):
        yield from _data_sets(value)


def _data_sets(value: Any) -> list[Any]:
    """The value, if it may be a data set, or those in it; a container of samples is not gone through."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple):
        return list(filter(_is_one, value)) if any(map(_is_one, value[:_ITEMS])) else []
    indexed = hasattr(type(value), "__getitem__") and not isinstance(value, Tensor)
    return [value] if indexed or _is_one(value) else []


def _is_one(thing: Any) -> bool:
    return isinstance(thing, Dataset) or (hasattr(type(thing), "set_epoch") and hasattr(type(thing), "__getitem__"))
