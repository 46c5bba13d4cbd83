"""Many things in groups, where one by one would take too long, and all at once too much room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ("grouped",)

T = TypeVar("T")


def grouped(items: Iterable[T], size_of: Callable[[T], int], most: int, most_bytes: int) -> Iterator[list[T]]:
    """All items in their order, in groups, none of them empty. Of the items only the next group and one are read ahead.

    Args:
        items: What is grouped.
        size_of: The bytes of one.
        most: The most items of a group.
        most_bytes: The most bytes of one, unless a single item has more.
    """
    group: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and (total + size > most_bytes or len(group) >= most):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
