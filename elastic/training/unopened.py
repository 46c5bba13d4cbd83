"""A session that nobody has used yet, in a process that runs ahead of its world.

Scripts open their session in their first lines and build a model then. To open it takes a place in a world; to build a
model does not. So the session opens when it is first used, or when the script waits for its place for another reason,
before anything else happens there: what concerns several ranks has the same order in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dalsegno.protos.ahead import Ahead

from .session import BareSession

__all__ = ["is_unopened", "unopened"]

S = TypeVar("S", bound=BareSession)


class _Unopened:
    """Stands before the session's own class, until the session is open."""

    def __getattribute__(self, name: str) -> Any:
        _open[0]()
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _open[0]()
        setattr(self, name, value)


# Opens the one session of this process.
_open: list[Callable[[], None]] = []


def is_unopened(session: BareSession) -> bool:
    """Whether it is there, and not open."""
    return isinstance(session, _Unopened)


def unopened(kind: type[S], begin: Callable[[Callable[..., S]], S], ahead: Ahead) -> S:
    """A session of this kind that opens when it is used, or when there is a place.

    Args:
        begin: Opens a session, which its argument makes.
        ahead: This process's life ahead of its world.
    """
    found: S = object.__new__(type(kind.__name__, (_Unopened, kind), {}))

    def made(*arguments: Any, **options: Any) -> S:
        object.__setattr__(found, "__class__", kind)  # from here on it is one
        found.__init__(*arguments, **options)  # type: ignore[misc]
        return found

    def open_it() -> None:
        ahead.meet("its session is used")  # which opens it; here once more if that has failed and nobody heard
        if is_unopened(found):
            begin(made)

    _open[:] = [open_it]
    ahead.first(open_it)
    return found
