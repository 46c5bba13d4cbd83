"""Many things in groups of a few."""

from __future__ import annotations

import pytest

from dalsegno.protos.grouping import grouped


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([], []),
        ([1, 1, 1, 1], [[1, 1, 1], [1]]),  # so many at most
        ([6, 4, 1], [[6, 4], [1]]),  # so many bytes at most
        ([1, 99, 1], [[1], [99], [1]]),  # one that is larger is alone
        ([0, 0, 0, 10], [[0, 0, 0], [10]]),
    ],
)
def test_groups_are_bounded_and_keep_the_order(sizes: list[int], wanted: list[list[int]]) -> None:
    assert list(grouped(sizes, int, 3, 10)) == wanted


def test_no_more_is_read_than_the_next_group_needs() -> None:
    items = iter(range(9))
    assert next(grouped(items, lambda item: 1, 3, 10)) == [0, 1, 2]
    assert next(items) == 4  # 3 was looked at, to see that the group is full
