"""Text that somebody else wrote, made fit for a log, a console or an error line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

__all__ = (
    "ITS_FILE",
    "LONGEST_NAME",
    "SHA256",
    "few",
    "is_component",
    "megabytes",
    "name_problem",
    "object_in",
    "one_line",
    "same_failure",
    "text_problem",
)

# Characters of a line. A longer reason helps nobody; a traceback's last line fits.
LONGEST_LINE = 1000
# Characters of a name.
LONGEST_NAME = 256
# How many names of a list are printed.
_NAMED = 3
# At how many braces of a line an object may begin.
_MOST_BRACES = 16
# A digest, in the hexadecimal digits in which it is told.
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
# What may differ between two tellings of one failure: the file with the rest; numbers of ranks, processes, ports.
ITS_FILE = re.compile(r" \(see [^)]*\)")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """The text as one line of at most `longest` printable characters.

    White space of any kind becomes a space. Any other character that cannot be printed (escape sequences that move a
    cursor or colour a terminal, marks that reverse the direction of the text) is shown as Python writes it: `\\x1b`.
    """
    if len(text) <= longest and text.isprintable():
        return text
    # The text may be megabytes long: look at no more than can be needed.
    words = " ".join(text[: 2 * longest].split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return line if len(line) <= longest and len(text) <= 2 * longest else line[: longest - 1] + "…"


def few(names: Iterable[str]) -> str:
    """The first ones, and how many more."""
    listed = list(names)
    more = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def megabytes(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 1e6:.0f} MB" if count >= 10e6 or not count else f"{count / 1e6:.1f} MB"


def object_in(line: str, key: str = "") -> dict[str, Any] | None:
    """The JSON object that ends the line, with this key unless that is empty; None if there is none.

    A process of ours says such lines on its standard output. A site's `sitecustomize`, or a library, may print there,
    too, and need not end its line.
    """
    at = -1
    for _ in range(_MOST_BRACES):
        if (at := line.find("{", at + 1)) < 0:
            break
        try:
            said = json.loads(line[at:])
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and (not key or key in said):
            return said
    return None


def same_failure(told: str, text: str) -> bool:
    """Whether two lines tell of the same failure: they differ in numbers, and in the files that they name, at most."""
    return bool(told) and _bare(told) == _bare(text)


def _bare(text: str) -> str:
    return _NUMBER.sub("0", ITS_FILE.sub("", text))


def text_problem(value: str | bytes, longest: int = LONGEST_NAME) -> str:
    """What is wrong with a short text that is to stand in a log; empty if nothing is."""
    if len(value) > longest:
        return f"is {len(value)} long, at most {longest} are taken"
    if isinstance(value, str) and not value.isprintable():
        return f"is {one_line(value)!r}: it has characters that cannot be printed"
    return ""


def is_component(text: str) -> bool:
    """Whether a text is one component of a path, as the ids of jobs and runs are."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def name_problem(value: str) -> str:
    """What is wrong with a name of a node, host or incarnation, which may stand in a path; empty if nothing is."""
    if problem := text_problem(value):
        return problem
    if "/" in value or "\\" in value or ".." in value or value != value.strip():
        return f"is {value!r}: no slashes, no '..', no white space around it"
    return ""
