"""What threads of the ranks tell one another beside the training, over the store of this world.

The session's collectives belong to the main threads, which meet between steps only. A thread of one rank says something
under a name, and threads of other ranks look until it is there. Whoever looks can be called off: a peer may never say
anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Board", "CalledOff", "KeyValueStore", "LocalStore", "open_board"]

# Seconds between two looks: at first, and at most. (torch writes a warning for each wait that ends in vain.)
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.0005, 0.05
# torch's server closes the connection of who sends more than 8 MiB at once.
MAX_BYTES = 7 << 20


class CalledOff(RuntimeError):
    """It is not looked for any more."""


class KeyValueStore(Protocol):
    """What is needed of torch's store."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...


class Board:
    """One rank's. Any thread, one at a time.

    Args:
        store: A connection of its own, with names that only this use of it has.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def say(self, name: str, message: Any) -> None:
        """Says it to all.

        Args:
            name: Nothing else is ever said under it.
            message: Plain JSON values.

        Raises:
            RuntimeError: The store is gone, or takes no message of this length.
        """
        data = json.dumps(message)
        if len(data) > MAX_BYTES:
            raise RuntimeError(f"{name} has {len(data)} bytes, and the store takes {MAX_BYTES} at most")
        self._store.set(name, data)

    def hear(self, names: Sequence[str], off: Callable[[float], bool], most: float = LAST_LOOK_SECONDS) -> list[Any]:
        """Looks until something is said under each of these names.

        Args:
            off: Waits for so many seconds, or less, and returns whether to give up.
            most: Seconds between two looks, at most.

        Raises:
            CalledOff: It said so.
            RuntimeError: The store is gone.
        """
        pause = FIRST_LOOK_SECONDS
        while not self._store.check(list(names)):
            if off(pause):
                raise CalledOff(f"{names[0]} is not waited for any more")
            pause = min(2 * pause, most)
        return [json.loads(said) for said in self._store.multi_get(list(names))]

    def forget(self, name: str) -> None:
        """Nobody will ask for it again.

        Raises:
            RuntimeError: The store is gone.
        """
        self._store.delete_key(name)


class LocalStore:
    """A store within this process, as of a world of one rank.

    Attributes:
        said: By key.
    """

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.said[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.said for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.said[key].encode() for key in keys]

    def delete_key(self, key: str) -> bool:
        return self.said.pop(key, None) is not None


class _Gone:
    """Instead of a store that cannot be reached."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the world's store cannot be reached: {self._why}")


def open_board(collective: Any, use: str = "board") -> Board:
    """A board of a group's world, for one use. Main thread; each rank as often as the others.

    Where the store cannot be reached, all that is asked of the board raises RuntimeError.
    """
    try:
        return Board(LocalStore() if collective.world_size == 1 else collective.channel(use))
    except (RuntimeError, NotImplementedError) as error:
        return Board(_Gone(str(error)))
