"""A table of immutable rows that knows which of them were touched since they were last stored."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Generic, TypeVar

__all__ = ("Table",)

T = TypeVar("T")


class Table(Generic[T]):
    """Rows by key, in order of their arrival. A row is replaced whole, never changed.

    So a copy is cheap, a row that is still the same object has not changed, and only touched rows must be stored: the
    cost of a turn does not grow with the table.
    """

    __slots__ = ("_rows", "touched")

    def __init__(self, rows: Mapping[str, T] | None = None) -> None:
        self._rows: dict[str, T] = dict(rows or {})
        self.touched: set[str] = set(self._rows)

    def copy(self) -> Table[T]:
        """A table with the same rows and the same touched ones."""
        other: Table[T] = Table()
        other._rows, other.touched = dict(self._rows), set(self.touched)
        return other

    def put(self, key: str, row: T) -> None:
        self._rows[key] = row
        self.touched.add(key)

    def drop(self, key: str) -> T | None:
        """Forgets a row; None if there was none."""
        row = self._rows.pop(key, None)
        if row is not None:
            self.touched.add(key)
        return row

    def get(self, key: str) -> T | None:
        return self._rows.get(key)

    def values(self) -> ValuesView[T]:
        return self._rows.values()

    def items(self) -> ItemsView[str, T]:
        return self._rows.items()

    def __getitem__(self, key: str) -> T:
        return self._rows[key]

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._rows == other._rows

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Table({self._rows!r})"
