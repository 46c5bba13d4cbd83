"""How a script without a session had saved a checkpoint, so that the next start of the script can find it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SavedAs:
    """Where the files of an adopted checkpoint lay below the script's own directory. Paths have forward slashes.

    Attributes:
        below: Where in that directory these files lay; "": in the directory itself, under the paths they have here.
        newest: What was saved last, a directory or a file, relative to the script's directory.
        numbers: For each thing that was saved, what is the same for it at each step, and the number of this one.
        links: Links in the script's directory and what they lead to, both relative to it.
    """

    below: str
    newest: str
    numbers: tuple[tuple[str, int | None], ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    def paths(self) -> Iterator[str]:
        """All paths in it that must not lead out of the script's directory."""
        if self.below:
            yield self.below
        if self.newest != ".":
            yield self.newest
        for name, target in self.links:
            yield name
            yield target


def parse_saved_as(raw: object, most: int) -> SavedAs:
    """The inverse of ``dataclasses.asdict`` and JSON.

    Args:
        raw: What the JSON was.
        most: The largest number.

    Raises:
        ValueError: It is nothing of the kind.
    """
    keys: dict[str, Any] = raw if isinstance(raw, dict) else {}
    if set(keys) != set(SavedAs.__dataclass_fields__):
        raise ValueError("saved_as has other keys")
    pairs = [pair for name in ("numbers", "links") for pair in _list(keys[name])]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("saved_as has something that is no pair")
    numbers = [number for _, number in keys["numbers"] if number is not None]
    if not all(type(number) is int and 0 <= number <= most for number in numbers):
        raise ValueError("saved_as has a number that is no count")
    texts = [keys["below"], keys["newest"], *(series for series, _ in keys["numbers"])]
    if not all(isinstance(text, str) for text in (*texts, *(text for pair in keys["links"] for text in pair))):
        raise ValueError("saved_as has something that is no text")
    pairs_of = {name: tuple((first, second) for first, second in keys[name]) for name in ("numbers", "links")}
    return SavedAs(keys["below"], keys["newest"], pairs_of["numbers"], pairs_of["links"])


def _list(raw: object) -> list[Any]:
    if not isinstance(raw, list):
        raise ValueError("saved_as has something that is no list")
    return raw
