"""What a traceback of Python says, in one line: the exception, and the script's own line that it passed last."""

from __future__ import annotations

import errno
import itertools
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Raised", "last_raised"]

_BEGIN = "Traceback (most recent call last):"
# torch hands an exception of a DataLoader's worker process on in this form, with the traceback there below it.
_CAUGHT = re.compile(r"[\w.]+: Caught \w+ in (?P<place>.+)\.$")
_ORIGINAL = f"Original {_BEGIN}"
# Pools of processes print theirs between such lines, above the traceback of who waited for it.
_QUOTES = '"""'
# What an exception group draws at the left of its lines, and between those that are in it.
_GROUP = f"+ Exception Group {_BEGIN}"
_MARGIN = re.compile(r" *(\| ?|\+ |\+-[+-]*.*)")
# The last line of a traceback: the exception's name, not indented, alone or with its text.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_BARE = "AssertionError"
# What a write says that finds the disk full, without the file's name; and the lines that write to standard output. Of a
# call over several lines only the first is shown, and the file may stand on another.
_FULL = f"OSError: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
_PRINTS = re.compile(r"print\((?!.*\bfile ?=).*\)$|sys\.stdout\.")
_COMPILING = ("SyntaxError", "IndentationError", "TabError")
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<function>.+))?')
# torch begins each line with it, where there are several ranks.
_RANK = re.compile(r"\[rank\d+\]: ?")
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "") for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
)
# Characters of each of the indented lines.
_SHORT = 100
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Raised:
    """An exception that was printed.

    Attributes:
        text: The first line of it, with its name. One that ends with a colon is followed by the indented lines below
            it, of each its beginning.
        where: `train.py, line 10, in main`, of the last frame that is in no library. If all are, as a program of a
            library was run (`-m`), the last one in the package of the first. Empty if there is none.
        rest: What follows it: more lines of its text, or of what libraries say at the end.
    """

    text: str
    where: str
    rest: tuple[str, ...]


def last_raised(lines: Sequence[str]) -> Raised | None:
    """The exception of the last traceback in these lines, if it is whole."""
    plain = [_RANK.sub("", line, count=1) for line in lines]
    groups = [number for number, line in enumerate(plain) if line.strip() == _GROUP]
    if groups:
        plain = [_MARGIN.sub("", line, count=1) for line in plain]
    begins = [number for number, line in enumerate(plain) if line.startswith(_BEGIN)]
    if not begins:
        return _group(plain[groups[-1] + 1 :]) if groups else _not_compiled(plain)
    found = _exception(plain[begins[-1] + 1 :])
    if found is None:
        return None
    text, frames, rest = found
    caught = _CAUGHT.match(text)
    if caught and rest[:1] == (_ORIGINAL,) and (first := _exception(rest[1:])):
        text, frames, rest = f"{first[0]} (in {caught['place']})", [*frames, *first[1]], first[2]
    elif begins[1:] and plain[begins[-2] - 1].strip() == _QUOTES:
        there = _exception(plain[begins[-2] + 1 :])
        frames += there[1] if there is not None and there[0] == text else []
    return Raised(_with_more(text, rest), _where(frames), rest)


def _exception(lines: Sequence[str]) -> tuple[str, list[re.Match[str]], tuple[str, ...]] | None:
    """What a traceback says below its first line: the exception, its frames, and what follows it."""
    frames: list[re.Match[str]] = []
    for number, line in enumerate(lines):
        if frame := _FRAME.match(line):
            frames.append(frame)
        elif _EXCEPTION.match(line):
            return _explained(line.strip(), lines[:number]), frames, tuple(lines[number + 1 :])
    return None


def _group(lines: Sequence[str]) -> Raised | None:
    """An exception group of which no member has a traceback of its own: itself, and the first of these."""
    found = _exception(lines)
    if found is None:
        return None
    text, frames, rest = found
    first = next((line.strip() for line in rest if line.strip()), "")
    return Raised(f"{text}: {first}" if first else text, _where(frames), rest)


def _not_compiled(lines: Sequence[str]) -> Raised | None:
    """The error of a script that Python could not compile, which is printed with its place and without a traceback."""
    starts = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    found = _exception(lines[starts[-1] :]) if starts else None
    if found is None or not found[0].startswith(_COMPILING):
        return None
    text, frames, rest = found
    return Raised(text, _place(frames[-1]), rest)


def _explained(text: str, lines: Sequence[str]) -> str:
    """The exception's text; where it has no words of its own for it, with what the line above says of the cause.

    Of an assertion that is what did not hold, and of a full disk that a line was printed there.
    """
    code = next((line.strip() for line in reversed(lines) if line.strip().strip("^~")), "")
    if text == _BARE and code.startswith("assert "):
        return f"{text}: {code}"
    if text == _FULL and _PRINTS.match(code):
        return f"{text}: the disk of its standard output is full"
    return text


def _with_more(text: str, rest: Sequence[str]) -> str:
    """torch says there which keys of a state dict are missing."""
    if not text.endswith(":"):
        return text
    more = [line.strip() for line in itertools.takewhile(lambda line: line[:1].isspace(), rest)]
    return " ".join([text, *(line if len(line) <= _SHORT else f"{line[:_SHORT]}…" for line in more if line)])


def _where(frames: Sequence[re.Match[str]]) -> str:
    own = [frame for frame in frames if _is_own(frame["file"])]
    if not own and (packages := [found for frame in frames if (found := _package(frame["file"]))]):
        own = [frame for frame in frames if _package(frame["file"]) == packages[0]]
    return _place(own[-1]) if own else ""


def _package(file: str) -> str:
    """The top package of an installed file, with its place; "": it is none."""
    match = _INSTALLED.search(file)
    return "" if match is None else file[: match.end()] + re.split(r"[/\\]", file[match.end() :])[0]


def _is_own(file: str) -> bool:
    """Whether a file is neither Python's nor installed."""
    real = os.path.realpath(file)
    return not (file.startswith("<") or _INSTALLED.search(file) or real.startswith(_LIBRARIES))


def _place(frame: re.Match[str]) -> str:
    function = f", in {frame['function']}" if frame["function"] else ""
    return f"{os.path.basename(frame['file'])}, line {frame['line']}{function}"
