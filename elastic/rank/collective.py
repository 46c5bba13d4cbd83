"""The session's own group on the CPU: a few numbers and texts between all ranks, apart from the training's groups.

It uses the store that torchrun (or the agent) named in the environment, not the default process group. So it works
before a script initialises that one, with whatever backend. Only the main thread may call anything here: collectives
from two threads would pair up differently on different ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from .envelopes import Statement, judge, packed, unpacked

T = TypeVar("T")

log = logging.getLogger(__name__)

# When a peer dies, its sockets close and a wait ends at once. This timeout, in seconds, is for a peer that only hangs.
# Ranks wait here for one that writes a large checkpoint on a slow disk. Under an agent the master ends one that hangs.
TIMEOUT_SECONDS = 6 * 3600.0
# The same for the store through which they find each other, and for each answer of it.
STORE_SECONDS = 1800.0
# A wait that fails after this part of its timeout has had no answer.
SILENT_SHARE = 0.9
# Seconds before the first, second, ... check whether a connection to a peer is closed.
PEER_LOOKS_SECONDS = (0.0, 0.02, 0.08)
# A tag that no message of ours has, so that nobody ever answers.
PEER_TAG = 0x5E6
# Of the ranks' messages. Whoever changes what a round carries, changes this too.
FORM = "4"
# What each rank sends in the first round of a gather: the message's length, and as much of it as there is room for.
LENGTH_BYTES, HEAD_BYTES = 8, 2048
# Seconds between two looks at a collective that somebody may call off: at first, and at most.
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.001, 0.1


class OtherThread(RuntimeError):
    """Another thread than the main one calls what only that one may. The same would happen at another start."""

    def __init__(self) -> None:
        super().__init__("the session belongs to the main thread: call it, and the loop, there")


class PeerLost(RuntimeError):
    """A peer is gone, or is no longer waited for. Raised inside ``Collective.unless``, and by ``agree``."""


class PeerSilent(PeerLost):
    """A peer has not come for as long as the group waits."""


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> list[int]: ...


class PendingGather(Protocol):
    """A `Collective.gather` under way."""

    def wait(self) -> list[Any]: ...


class Collective(Protocol):
    """What the session needs of a group. All ranks call the same methods in the same order.

    One exception: a rank that ends may `meet` with its problem while the others are in any collective but ``start_max``
    and ``start_sum``. These, which run beside the steps, carry bare numbers; all others carry messages (`envelopes`),
    and raise what `meet` raises.
    """

    rank: int
    world_size: int

    def start_max(self, values: Sequence[int]) -> Pending:
        """Begins an element-wise maximum over the ranks."""
        ...

    def start_sum(self, values: Sequence[int]) -> Pending:
        """Begins an element-wise sum over the ranks, exact below 2**63."""
        ...

    def max(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over the ranks."""
        ...

    def sum(self, value: float) -> float:
        """The sum over the ranks in double precision, the same bits on every rank."""
        ...

    def broadcast(self, message: Any) -> Any:
        """Rank 0's ``message`` (plain JSON values) on every rank; the others' is ignored."""
        ...

    def gather(self, message: Any) -> list[Any]:
        """Every rank's ``message`` (plain JSON values), in rank order, on every rank."""
        ...

    def meet(self, said: Statement, *, patience_seconds: float | None = None) -> None:
        """All ranks compare what they ``said``; see `agreement.agree`.

        Args:
            said: By this rank.
            patience_seconds: What it may take; after that the group is unusable. Default: the group's own timeout.

        Raises:
            Unlike, Refusal, Trouble: See `envelopes.judge`. On all ranks, whatever message they brought.
        """
        ...

    def start_gather(self, message: Any) -> PendingGather:
        """Begins a `gather`. Other collectives may come in between, alike on all ranks."""
        ...

    def barrier(self) -> None: ...

    def unless(self, gone: Callable[[], bool]) -> AbstractContextManager[None]:
        """Inside, a collective raises ``PeerLost`` if a peer is gone: its connection is closed, or ``gone()``.

        ``gone`` is asked again and again while this rank waits, and may raise. One block may be in another one.
        """
        ...

    def has_lost_a_peer(self) -> bool:
        """Whether the connection to some peer is closed. Not collective; the group is unusable afterwards."""
        ...

    def close(self) -> None: ...


class Done(Generic[T]):
    """A reduction or a gather that is over."""

    def __init__(self, values: Sequence[T]) -> None:
        self._values = list(values)

    def wait(self) -> list[T]:
        return self._values


class Solo:
    """The group of a world of one: no torch.distributed at all."""

    rank, world_size = 0, 1

    def start_max(self, values: Sequence[int]) -> Pending:
        return Done(values)

    def start_sum(self, values: Sequence[int]) -> Pending:
        return Done(values)

    def max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def sum(self, value: float) -> float:
        return value

    def broadcast(self, message: Any) -> Any:
        return message

    def gather(self, message: Any) -> list[Any]:
        return [message]

    def meet(self, said: Statement, *, patience_seconds: float | None = None) -> None:
        judge([said])

    def start_gather(self, message: Any) -> PendingGather:
        return Done([message])

    def barrier(self) -> None:
        return None

    def unless(self, gone: Callable[[], bool]) -> AbstractContextManager[None]:
        return nullcontext()

    def has_lost_a_peer(self) -> bool:
        return False

    def close(self) -> None:
        return None


class ByMessages:
    """Collectives that are gathers of messages.

    So the group takes any of them for any other. Gloo aborts processes whose collectives differ in size, and a rank
    that ends with a problem does not know what the others are in.
    """

    rank: int

    def gather(self, message: Any) -> list[Any]:
        """See `Collective`."""
        raise NotImplementedError

    def max(self, values: Sequence[int]) -> list[int]:
        """See `Collective`."""
        return [max(column) for column in zip(*self.gather([int(value) for value in values]), strict=True)]

    def sum(self, value: float) -> float:
        """See `Collective`."""
        # Added in rank order: every rank gets the same bits. JSON keeps each bit of a number in double precision.
        return float(sum(self.gather(float(value))))

    def broadcast(self, message: Any) -> Any:
        """See `Collective`."""
        return self.gather(message if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        """See `Collective`."""
        self.gather(None)


class GlooCollective(ByMessages):
    """A gloo group of all ranks. It connects at the first use, and at the first use after ``close``.

    Args:
        rank: As in ``RANK``.
        world_size: As in ``WORLD_SIZE``.
        epoch: Keeps keys of different epochs apart if a store outlives one.
        number: The same for groups that follow one another in a process.
        timeout: Seconds that any one operation may take; the store has ``STORE_SECONDS`` for its answers.
    """

    def __init__(
        self, rank: int, world_size: int, epoch: int, *, number: int = 0, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._epoch = f"{epoch}.{number}" if number else str(epoch)
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = None
        self._store: Any = None
        self._left = 0
        self._gone: Callable[[], bool] | None = None
        self._asked: list[Any] = []

    def start_max(self, values: Sequence[int]) -> Pending:
        return self._start(values, "MAX")

    def start_sum(self, values: Sequence[int]) -> Pending:
        return self._start(values, "SUM")

    def gather(self, message: Any) -> list[Any]:
        return _Gather(self, message).wait()

    def meet(self, said: Statement, *, patience_seconds: float | None = None) -> None:
        _Gather(self, said, patience_seconds).wait()

    def start_gather(self, message: Any) -> PendingGather:
        return _Gather(self, message)

    @contextmanager
    def unless(self, gone: Callable[[], bool]) -> Iterator[None]:
        before = self._gone
        asked = [gone] if before is None else [gone, before]
        self._gone = lambda: any(one() for one in asked)
        try:
            yield
        finally:
            self._gone = before

    def has_lost_a_peer(self) -> bool:
        """Asks each peer for a message that nobody sends: gloo refuses that at once if the connection is closed."""
        import torch

        # Another group's connection to the same peer may be seen closed a moment before ours is.
        for pause in PEER_LOOKS_SECONDS if self._group is not None else ():
            threading.Event().wait(pause)
            for distance in range(1, self.world_size):
                peer = (self.rank + distance) % self.world_size
                try:
                    # Kept, because destroying it would wait for its end, and nobody else does.
                    self._asked.append(self._group.recv([torch.zeros(1, device="cpu")], peer, PEER_TAG))
                except RuntimeError:
                    return True
        return False

    def channel(self, use: str) -> Any:
        """A connection of its own to this world's store, with names that only this ``use`` of it has."""
        import torch.distributed as dist

        self._connected()
        prefix = f"dalsegno/{self._epoch}/{self._left}/{use}"
        return dist.PrefixStore(prefix, _another(self._store, timedelta(seconds=STORE_SECONDS)))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leaves the group. Call ``barrier`` before, or a peer that is still in a collective sees its connection go.

        The group's threads are joined here. A thread that still needed the interpreter's lock while Python ends would
        abort the process (exit code -6, "terminate called without an active exception").
        """
        self._group = None
        self._store = None
        self._left += 1

    def _start(self, values: Sequence[int], operation: str) -> Pending:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, operation))
        return _Reduction(self._connected().allreduce([tensor], options), tensor, self._wait)

    def start_all_gather(self, tensor: Any, patience_seconds: float | None = None) -> _AllGather:
        """Begins to gather tensors of one shape.

        Args:
            patience_seconds: As with `meet`.
        """
        import torch

        parts = [torch.zeros_like(tensor) for _ in range(self.world_size)]
        work = self._connected().allgather([parts], [tensor])
        wait = self._wait if patience_seconds is None else partial(_wait_for, timedelta(seconds=patience_seconds))
        return _AllGather(work, tensor, parts, wait)

    def _wait(self, work: Any) -> None:
        gone, pause, began = self._gone, FIRST_LOOK_SECONDS, time.monotonic()
        if gone is None:
            work.wait(self._timeout)
            return
        while not work.is_completed():
            if gone():
                raise PeerLost("its notice is over")
            # Gloo's work can be waited for, and ``gone`` can be asked, but both only in turn.
            threading.Event().wait(pause)
            pause = min(2 * pause, LAST_LOOK_SECONDS)
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            silent = time.monotonic() - began >= SILENT_SHARE * self._timeout.total_seconds()
            raise (PeerSilent if silent else PeerLost)(str(error).partition("\n")[0]) from error

    def _connected(self) -> Any:
        check_main_thread()
        if self._group is None:
            import torch.distributed as dist
            from torch.distributed.rendezvous import rendezvous

            began = time.monotonic()
            store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=STORE_SECONDS))))
            if (rank, world_size) != (self.rank, self.world_size):
                raise RuntimeError(f"rank {rank} of {world_size} in the environment, the session is {self.rank}")
            # After a run's end ranks may meet again, for a last sum; the store still has the addresses of the group
            # before.
            prefixed = dist.PrefixStore(f"dalsegno/{self._epoch}/{self._left}", store)  # type: ignore[attr-defined]
            _check_form(prefixed)
            self._store = store
            self._group = dist.ProcessGroupGloo(prefixed, rank, world_size, self._timeout)
            log.debug("the session's group of %d ranks stands after %.3f s", world_size, time.monotonic() - began)
        return self._group


def check_main_thread() -> None:
    """Checks that the main thread is the one that calls.

    Raises:
        OtherThread: It is another one.
    """
    if threading.current_thread() is not threading.main_thread():
        raise OtherThread


def _check_form(store: Any) -> None:
    """Whoever comes first says in which form the ranks talk: gloo would abort a process that takes it for another.

    Raises:
        RuntimeError: This rank talks in another one.
    """
    said = store.compare_set("form", "", FORM).decode()
    if said != FORM:
        raise RuntimeError(
            f"another rank's dalsegno talks in form {said} and this rank's in form {FORM}: nodes have different"
            " versions of dalsegno; install the same one on all of them"
        )


def _padded(data: bytes, count: int) -> Any:
    """The bytes in a tensor of ``count`` of them, zeros behind."""
    import torch

    return torch.frombuffer(bytearray(data.ljust(count, b"\0")), dtype=torch.uint8)


def _another(store: Any, timeout: timedelta) -> Any:
    """Another connection to the server of a store, which not every version of torch can clone."""
    import torch.distributed as dist

    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]


def _wait_for(patience: timedelta, work: Any) -> None:
    work.wait(patience)


class _AllGather:
    """It keeps what is sent for as long as that takes."""

    def __init__(self, work: Any, sent: Any, parts: list[Any], wait: Callable[[Any], None]) -> None:
        self._work, self._sent, self._parts, self._wait = work, sent, parts, wait

    def wait(self) -> list[Any]:
        self._wait(self._work)
        return self._parts


class _Gather:
    """Of messages in their envelopes. The first round has each one's length and beginning."""

    def __init__(self, group: GlooCollective, message: Any, patience_seconds: float | None = None) -> None:
        self._group, self._data = group, packed(message)
        begin = self._data[: HEAD_BYTES - LENGTH_BYTES]
        head = _padded(len(self._data).to_bytes(LENGTH_BYTES, "big") + begin, HEAD_BYTES)
        self._heads = group.start_all_gather(head, patience_seconds)

    def wait(self) -> list[Any]:
        said = [head.numpy().tobytes() for head in self._heads.wait()]
        lengths = [int.from_bytes(one[:LENGTH_BYTES], "big") for one in said]
        begun = [one[LENGTH_BYTES : LENGTH_BYTES + length] for one, length in zip(said, lengths, strict=True)]
        # Nearly always 0, and on all ranks alike: one round instead of two.
        longest = max(length - len(part) for length, part in zip(lengths, begun, strict=True))
        if longest:
            rests = self._group.start_all_gather(_padded(self._data[HEAD_BYTES - LENGTH_BYTES :], longest)).wait()
            begun = [part + rest.numpy().tobytes() for part, rest in zip(begun, rests, strict=True)]
        return unpacked([part[:length] for part, length in zip(begun, lengths, strict=True)])


class _Reduction:
    def __init__(self, work: Any, tensor: Any, wait: Callable[[Any], None]) -> None:
        self._work, self._tensor, self._wait = work, tensor, wait

    def wait(self) -> list[int]:
        self._wait(self._work)
        values: list[int] = self._tensor.tolist()
        return values
