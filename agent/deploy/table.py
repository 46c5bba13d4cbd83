"""Reads a mapping that a person wrote: each value has its kind, and a key that nobody knows is refused by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from dalsegno.protos.yaml_text import InputRefused

__all__ = ("YamlMapping", "line_of", "mappings_of")

# Unknown keys that are named: with more it is another file, whose text is nobody's business.
MOST_UNKNOWN = 5


class YamlMapping:
    """The keys below one place of the document. Each is taken once; `done` refuses what was not taken.

    All methods raise `InputRefused` with the place (`master.port`) and what should stand there.
    """

    def __init__(self, values: Any, place: str = "") -> None:
        if not isinstance(values, Mapping):
            raise InputRefused(f"{place or 'the file'}: {_shown(values)} is no mapping: write `key: value` lines")
        self._values = {str(key): value for key, value in values.items()}
        self._place = f"{place}." if place else ""
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def take(self, key: str) -> Any:
        """The value as it stands; None if there is none."""
        self._known.append(key)
        return self._values.get(key)

    def text(self, key: str, default: str = "") -> str:
        """One line of text; a number counts as its text."""
        value = self.take(key)
        return default if value is None else line_of(value, f"{self._place}{key}")

    def name(self, key: str, default: str = "") -> str:
        """A name as Kubernetes has them (RFC 1123, at most 63 characters)."""
        value = self.text(key, default)
        if value and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
            raise InputRefused(f"{self._place}{key}: {value!r} is no name: small letters, digits and '-', at most 63")
        return value

    def user(self, key: str, default: str = "") -> str:
        """A user of Linux by name, as directories of users have them, too, or by number."""
        value = self.text(key, default)
        if value and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*|[0-9]+", value):
            raise InputRefused(f"{self._place}{key}: {value!r} is no name of a user, like ml_train")
        return value

    def path(self, key: str, default: str = "") -> str:
        """An absolute path without white space, which unit files and mounts could not carry."""
        value = self.text(key, default)
        if value and not re.fullmatch(r"/[^\s:,\"'$%\\]*", value):
            raise InputRefused(
                f"{self._place}{key}: {value!r} is no absolute path of plain characters, like /shared/gpt"
            )
        return value

    def quantity(self, key: str, default: str = "") -> str:
        """A size as Kubernetes has them: 16Gi."""
        value = self.text(key, default)
        if value and not re.fullmatch(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|k|m)?", value):
            raise InputRefused(f"{self._place}{key}: {value!r} is no size, for example 16Gi")
        return value

    def whole(self, key: str, default: int, least: int = 0, most: int = 1_000_000) -> int:
        """A whole number within bounds."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputRefused(f"{self._place}{key}: {_shown(value)} is no whole number from {least} to {most}")
        return value

    def one_of(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """One of a few words."""
        value = self.text(key, default)
        if value not in choices:
            raise InputRefused(f"{self._place}{key}: {value!r} is none of {', '.join(choices)}")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """A list of words."""
        value = self.take(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise InputRefused(f"{self._place}{key}: {_shown(value)} is no list: write [one, another]")
        return tuple(line_of(item, f"{self._place}{key}") for item in value)

    def mappings(self, key: str) -> tuple[Mapping[str, Any], ...]:
        """A list of mappings, as they stand."""
        return mappings_of(self.take(key), f"{self._place}{key}")

    def texts(self, key: str) -> dict[str, str]:
        """A mapping of names to text."""
        value = self.take(key)
        if value is None:
            return {}
        inner = YamlMapping(value, f"{self._place}{key}")
        return {name: inner.text(name) for name in inner._values}

    def quantities(self, key: str) -> dict[str, str]:
        """A mapping of names to sizes."""
        inner = self.below(key)
        return {name: inner.quantity(name) for name in inner._values}

    def below(self, key: str) -> YamlMapping:
        """The mapping under a key; an empty one if there is none."""
        value = self.take(key)
        return YamlMapping({} if value is None else value, f"{self._place}{key}")

    def done(self) -> None:
        """Refuses keys that nobody has asked for, with the nearest one that there is."""
        unknown = [key for key in self._values if key not in self._known]
        if not unknown:
            return
        lines = []
        for key in unknown[:MOST_UNKNOWN]:
            near = difflib.get_close_matches(key, self._known, 1)
            known = ", ".join(sorted(set(self._known)))
            meant = f"did you mean {self._place}{near[0]}?" if near else f"there are {known}"
            lines.append(f"{self._place}{key}: no such key: {meant}")
        if (more := len(unknown) - MOST_UNKNOWN) > 0:
            lines.append(f"and {more} more keys that there are not: is this the job's file?")
        raise InputRefused(*lines)


def mappings_of(value: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    """A list of mappings; none if there is no value. Raises InputRefused."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InputRefused(f"{place}: {_shown(value)} is no list: write `- key: value` lines")
    for one in value:
        if not isinstance(one, Mapping):
            raise InputRefused(f"{place}: {_shown(one)} is no mapping: write `- key: value` lines")
    return tuple(value)


def line_of(value: Any, place: str) -> str:
    """A scalar as one line of text. Raises InputRefused."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputRefused(f"{place}: {_shown(value)} is no text: put it into quotes")
    text = str(value)
    if not text.isprintable():
        raise InputRefused(f"{place}: {_shown(text)} has a line break, or what cannot be printed")
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
