"""Where a loop's batches come from, ``Batches`` or any iterable, and whether a run can resume with them.

``Batches`` know their position. So does a loader with ``state_dict`` and ``load_state_dict`` (torchdata's
``StatefulDataLoader``): each rank has a state of its own, which is saved with every checkpoint, and loads if as many
ranks resume. Any other iterable does not tell its position, so a run resumes with it only if the script says that it
has moved it.
"""

from __future__ import annotations

import copy
import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import xxhash
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ..checkpoint import Position
from ..checkpoint.files import write_exclusive
from ..data.batch import Batch, batch_in, batches_in
from ..data.batches import Batches
from ..data.sampler import check_cut, check_order
from ..rank.agreement import PART
from ..rank.remarks import remark
from ..rank.tensor_bytes import bytes_of
from ..saving.background_save import Background, in_background
from ..saving.replicas import loadable
from ..saving.resuming import LOADERS, ResumePoint, check_loaders
from .findings import NOTHING, OURS, SCRIPTS, STATE
from .reading_state import read_saved

log = logging.getLogger(__name__)

T = TypeVar("T")

INSTEAD = (
    "give Batches, whose order continues in any world, or a loader with state_dict and load_state_dict (torchdata's "
    "StatefulDataLoader); or, where the script itself has moved the data to session.step, say so: steps(advanced=True)"
)
ONE_DATA_SET = "make one data set of both (torch's StackDataset), or draw the other's samples by batch.step"


class BatchSource(ABC, Generic[T]):
    """Batches one after the other, and how many are certain to follow.

    Attributes:
        any_world_size: Whether any number of ranks can use what it saves.
    """

    any_world_size = True

    @abstractmethod
    def take(self) -> T:
        """The next batch, which ``ahead`` has promised."""

    @abstractmethod
    def ahead(self, limit: int) -> int:
        """Number of batches not taken yet, at most ``limit``; never more than there are."""

    def last(self, *, trained: bool) -> None:
        """Whether the batch that was taken last was trained. It was, as long as nobody says otherwise."""
        return

    def files(self, rank: int) -> dict[str, bytes]:
        """Its files in a checkpoint: the data's position after the last batch that was taken and trained."""
        return {}


class Counted(BatchSource[T]):
    """Data that know their length: ``Batches``."""

    def __init__(self, data: Any) -> None:
        self._data, self._iterator = data, iter(data)

    def take(self) -> T:
        batch: T = next(self._iterator)
        return batch

    def ahead(self, limit: int) -> int:
        left: int | None = self._data.left
        return limit if left is None else min(limit, left)


class Unknown(BatchSource[T]):
    """Any iterable: it must fetch a batch to know whether there is one more.

    Attributes:
        failure: The error with which the first batch, or the way to it, failed.
    """

    failure: Exception | None = None

    def __init__(self, data: Iterable[T]) -> None:
        self._data = data
        self._iterator: Iterator[T] | None = None
        self._next: list[T] = []
        self._ended = False

    def take(self) -> T:
        self.ahead(1)
        return self._next.pop()

    def ahead(self, limit: int) -> int:
        if limit and not self._next and not self._ended:
            if self._iterator is None:
                self._iterator = iter(self._data)
            for batch in self._iterator:
                self._next.append(batch)
                break
            self._ended = not self._next
        return min(limit, len(self._next))

    @property
    def place(self) -> Position | None:
        """Where the next batch begins, if the batch itself says so."""
        following = self._next[0] if self._next else None
        found = getattr(batch_in(following) or following, "position", None)
        return found if isinstance(found, Position) else None

    @property
    def batches(self) -> Batches[Any] | None:
        """The `Batches` that made the next batch, if something passes theirs on: a progress bar, a generator."""
        batch = batch_in(self._next[0]) if self._next else None
        return None if batch is None else batch.made_by

    @property
    def apart(self) -> int:
        """How many `Batches` the next item has batches of, if they would not go on together; else 0."""
        found = batches_in(self._next[0]) if self._next else []
        # A batch and the one behind it (``pairwise``) have one place.
        first = {id(one.made_by): one for one in reversed(found)}
        return 0 if all(_stands_with(found[0], other) for other in first.values()) else len(first)

    @property
    def loses(self) -> bool:
        """Whether ``zip`` gives something beside the next batch that will begin anew, unlike that: not numbers."""
        zipped = getattr(self._data, "iterable", self._data)  # a progress bar has it inside
        if type(zipped) is not zip or self.place is None:
            return False
        item: Any = self._next[0]
        return not all(isinstance(part, Batch) or _is_plain(part) for part in item)


def _is_plain(part: Any) -> bool:
    """Whether it is none of what a loader gives: a number, a name."""
    return part is None or isinstance(part, Number | str) or (isinstance(part, torch.Tensor) and not part.dim())


def _stands_with(first: Batch[Any], other: Batch[Any]) -> bool:
    """Whether a run that goes on behind the first one goes on behind the other one, too."""
    if other is first:
        return True
    one, two = first.made_by, other.made_by
    if one is None or two is None or (first.position, first.position_after) != (other.position, other.position_after):
        return False
    try:
        check_order(one.order, two.order)
        check_cut(one.cut, two.cut)
    except ValueError:
        return False
    return True


class StatefulLoader(Unknown[T]):
    """A loader that tells its position, in a state of this rank's own.

    Args:
        data: The loader.
        saved: The state that this rank has saved; None: begin at the beginning.
    """

    any_world_size = False

    def __init__(self, data: Any, saved: Mapping[str, Any] | None) -> None:
        super().__init__(data)
        self._saved = saved
        # Behind the batch that was taken last, and before it; None: at the beginning.
        self._state: Any = None
        self._before: Any = None
        self._untrained = False

    def go_on(self) -> str:
        """Moves the loader to where it stood. Returns why that failed; "": it succeeded, or nobody can tell.

        An error with which it failed is the `failure`.
        """
        if self._saved is None:
            return ""
        self._state, self._ended = self._saved["state"], self._saved["ended"]
        if self._ended:  # if it were told of its end, a loader would begin anew
            return ""
        if self._state is None:  # nothing of it was trained
            return ""
        loader: Any = self._data
        try:
            loader.load_state_dict(copy.deepcopy(self._state))
            self.ahead(1)
        except Exception as error:  # the other ranks must hear of every error before this one ends
            log.debug("a state that was not taken", exc_info=error)
            self.failure = error
            return f"{kind(loader)} does not go on from the state that was saved of it: {type(error).__name__}: {error}"
        if self._saved["next"] in (None, fingerprint(self._next)):
            return ""
        if _inner(loader) is not loader:
            return f"{kind(loader)} goes on with another batch than was next: its state lacks the order; {INSTEAD}"
        remark(
            "%s goes on with another batch than was next: right if its data set draws at random, else samples come "
            "twice or never, because its state lacks the order (a sampler without a state); then %s",
            kind(loader),
            INSTEAD,
        )
        return ""

    def take(self) -> T:
        batch = super().take()
        self._before, self._untrained = self._state, False
        # Now, because the loader moves on when the next batch is fetched to see whether there is one. A copy, because
        # the loader may go on working with its state.
        loader: Any = self._data
        self._state = copy.deepcopy(loader.state_dict())
        return batch

    def last(self, *, trained: bool) -> None:
        self._untrained = not trained

    def files(self, rank: int) -> dict[str, bytes]:
        state, following, ended = self._state, self._next, self._ended and not self._next
        if self._untrained:
            # The step may have changed the batch that comes next, so nothing is said of that.
            state, following, ended = self._before, [], False
        # At the last step of a run the next batch was not fetched.
        held = {"state": state, "ended": ended, "next": fingerprint(following) if following else None}
        content = io.BytesIO()
        torch.save(loadable(held, f"the state of {kind(self._data)}"), content)
        return {file_name(rank): content.getvalue()}


def fingerprint(batch: Any) -> str:
    """Fingerprint of the values in a batch: lists, dictionaries and tensors, as collate functions make them."""
    summed = xxhash.xxh3_128()
    for value in _values(batch):
        summed.update(value)
    return summed.hexdigest()


def _values(batch: Any) -> Iterator[Any]:
    if isinstance(batch, torch.Tensor):
        yield repr((batch.dtype, tuple(batch.shape))).encode()
        yield bytes_of(batch.cpu())
    elif isinstance(batch, Mapping):
        for name, value in batch.items():
            yield repr(name).encode()
            yield from _values(value)
    elif isinstance(batch, (list, tuple)):
        yield f"{len(batch)}".encode()
        for value in batch:
            yield from _values(value)
    else:  # the text of other things may contain their address in memory
        yield repr(batch).encode() if isinstance(batch, (str, bytes, int, float, bool)) else kind(batch).encode()


def file_name(rank: int) -> str:
    """Path of the state of a rank's loader, relative to the checkpoint."""
    return f"{LOADERS}/rank-{rank}.pt"


def kind(data: Any) -> str:
    """What to call the data in a message."""
    return type(data).__name__


def keeps_state(data: Any) -> bool:
    """Whether the loader's state contains its position and its order."""
    if not all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    inner = _inner(data)
    if inner is not data:
        return keeps_state(inner)
    # Torch's own samplers have no state, so a loader's state only says how much of their draws was used.
    sampler = data
    for name in ("batch_sampler", "batch_sampler", "sampler"):
        sampler = getattr(sampler, name, None) or sampler
    return type(sampler) not in _AT_RANDOM or getattr(sampler, "generator", None) is not None


def _inner(data: Any) -> Any:
    """The loader inside one of Accelerate's, whose wrapper has both methods for any loader."""
    return getattr(data, "base_dataloader", data)


_AT_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def knows(data: Any, *, advanced: bool) -> str:
    """What is known of the data's position: the kind of source that a loop makes of them."""
    if hasattr(data, "left"):
        return OURS
    if advanced or isinstance(getattr(data, "position", None), Position):
        return SCRIPTS
    return STATE if keeps_state(data) else NOTHING


def begin(data: Iterable[T], *, advanced: bool) -> Unknown[T] | None:
    """Fetches the first batch, if only that tells about the data; None: the data know their position themselves."""
    given = advanced or isinstance(getattr(data, "position", None), Position)
    if hasattr(data, "left") or (not given and keeps_state(data)):
        return None
    found = Unknown(data)
    try:
        found.ahead(1)
    except Exception as error:  # the other ranks must hear of every error before this one ends
        found.failure = error
    return found


def source_of(
    data: Iterable[T],
    begun: Unknown[T] | None,
    resume: ResumePoint | None,
    rank: int,
    world_size: int,
    *,
    advanced: bool,
) -> BatchSource[T]:
    """The source from which a loop takes its batches.

    Args:
        data: The data that the script gives.
        begun: What `begin` returned for them.
        resume: Where the run resumes; None: at the data's beginning.
        rank, world_size: The session's.
        advanced: The script itself has moved the data there, and tells their position.

    Raises:
        ValueError: The data cannot continue there. Raised on all ranks alike.
    """
    if hasattr(data, "left"):
        return Counted(data)
    if begun is None:
        return StatefulLoader(data, None if resume is None else _saved(resume, rank, world_size, kind(data)))
    given = advanced or isinstance(getattr(data, "position", None), Position)
    if given or resume is None or not begun.ahead(1):
        return begun
    # Something else, for instance a progress bar, may pass on batches of `Batches`, which know their position.
    check_place(begun.place, resume)
    if begun.place is None:
        raise ValueError(
            f"{kind(data)} begins where it always begins, and {resume.ref.name} ended at step {resume.step}: the same "
            f"samples would be trained again; {INSTEAD}"
        )
    if begun.apart:
        raise ValueError(
            f"{kind(data)} gives batches of {begun.apart} Batches at a time, which do not begin at one place in one"
            f" order of samples: {ONE_DATA_SET}, or give each resume=session.resume"
        )
    return begun


def check_place(place: Position | None, resume: ResumePoint) -> None:
    """Checks that data that know their position begin where the resume point ended, so that no sample comes twice.

    Raises:
        ValueError: They do not.
    """
    if place is not None and place != resume.position:
        raise ValueError(
            f"the data begin at {_said(place)}, and {resume.ref.name} ended at {_said(resume.position)}: "
            "give Batches(..., resume=session.resume)"
        )


def check_goes_on(source: Unknown[Any] | None) -> None:
    """Checks, in a later loop of one process, that no batch was lost that the loop before had fetched ahead.

    Raises:
        ValueError: One was.
    """
    batches = None if source is None else source.batches
    if source is None or batches is None or source.place == batches.position:
        return
    assert source.place is not None
    raise ValueError(
        f"the data begin at {_said(source.place)}, and the training stands at {_said(batches.position)}: the loop "
        "before had fetched what is between them; give Batches to each loop, or make the progress bar or generator anew"
    )


def _said(place: Position) -> str:
    return f"sample {place.samples} of data epoch {place.data_epoch}"


def _saved(resume: ResumePoint, rank: int, world_size: int, what: str) -> Any:
    check_loaders(resume.manifest, world_size)
    if not resume.lists(file_name(rank)):
        raise ValueError(
            f"{resume.ref.name} was saved without the state of a data loader, so {what} would begin anew: go on with "
            "the data that it was trained on, or start a new run"
        )
    return read_saved(resume, file_name(rank))


def say_what_cannot_resume(source: BatchSource[Any], data: Any, world_size: int) -> None:
    """Says at the start of a run if it cannot resume, so that nobody learns it only at the first change."""
    if isinstance(source, StatefulLoader):
        remark(
            "%s has a state for each rank: this run goes on with %d ranks only; with Batches it would with any number",
            kind(data),
            world_size,
        )
    elif isinstance(source, Unknown) and source.ahead(1) and source.place is None:
        remark(
            "%s cannot be resumed: nothing says where it stands, and a run that goes on from a checkpoint would train "
            "its first samples again, which is refused; %s",
            kind(data),
            INSTEAD,
        )
    elif isinstance(source, Unknown) and source.apart:
        remark(
            "%s gives batches of %d Batches at a time, which do not go on at one place in one order of samples, and one"
            " place is saved: a run that goes on from a checkpoint is refused; %s",
            kind(data),
            source.apart,
            ONE_DATA_SET,
        )
    elif isinstance(source, Unknown) and source.loses:
        remark(
            "what zip gives beside the batches begins anew at each start, while they go on, as only their place is "
            "saved: %s",
            ONE_DATA_SET,
        )


class SavedWithPosition:
    """A script's ``write(path)``, which also writes the data's position.

    Attributes:
        reshards: False, because the state of the data is each rank's own.
        by_place: That of ``write``: a rank reads only its own state of the data.
    """

    reshards = False

    def __init__(self, write: Callable[[Path], None], source: BatchSource[Any], rank: int) -> None:
        self._write, self._source, self._rank = write, source, rank
        self.by_place = bool(getattr(write, "by_place", False))
        beside = in_background(write)
        if isinstance(beside, Background):
            self.files = lambda: {**beside.state(), **source.files(rank)}

    def __call__(self, path: Path) -> None:
        self._write(path)
        for name, content in self._source.files(self._rank).items():
            (path / name).parent.mkdir(exist_ok=True)
            write_exclusive(path / name, content, lasting=False)  # the session makes all files durable


def saved_with(
    write: Callable[[Path], None] | Background, source: BatchSource[Any], rank: int
) -> Callable[[Path], None] | Background:
    """``write``, extended by what the source saves."""
    if not isinstance(source, StatefulLoader):
        return write
    if isinstance(write, Background):
        state = write.state
        return Background(lambda: {**state(), **source.files(rank)})
    return SavedWithPosition(write, source, rank)


def alike_of(data: Any) -> dict[str, Any]:
    """What must be alike on all ranks, as the data tell: ``Batches``, or torch's ``DistributedSampler``."""
    if hasattr(data, "alike"):
        return dict(data.alike)
    sampler = getattr(_inner(data), "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return {}
    named = {f"{name} of the DistributedSampler": getattr(sampler, name) for name in ("seed", "shuffle", "epoch")}
    return {**named, "length of the data set": sampler.total_size, PART: [sampler.rank, sampler.num_replicas]}
