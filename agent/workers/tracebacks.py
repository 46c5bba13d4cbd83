"""What a traceback of Python says, in one line: the exception, and the script's own line that it passed last."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Raised", "last_raised"]

_BEGIN = "Traceback (most recent call last):"
# The last line of a traceback: the exception's name, not indented, alone or with its text.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<function>.+))?')
# torch begins each line with it, where there are several ranks.
_RANK = re.compile(r"\[rank\d+\]: ?")
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "") for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Raised:
    """An exception that was printed.

    Attributes:
        text: The first line of it, with its name.
        where: `train.py, line 10, in main`, of the last frame that is in no library; empty if there is none.
        rest: What follows it: more lines of its text, or of what libraries say at the end.
    """

    text: str
    where: str
    rest: tuple[str, ...]


def last_raised(lines: Sequence[str]) -> Raised | None:
    """The exception of the last traceback in these lines, if it is whole."""
    plain = [_RANK.sub("", line, count=1) for line in lines]
    begins = [number for number, line in enumerate(plain) if line.startswith(_BEGIN)]
    if not begins:
        return None
    where = ""
    for number, line in enumerate(plain[begins[-1] + 1 :], begins[-1] + 1):
        if frame := _FRAME.match(line):
            where = _place(frame) if _is_own(frame["file"]) else where
        elif _EXCEPTION.match(line):
            return Raised(line.strip(), where, tuple(plain[number + 1 :]))
    return None


def _is_own(file: str) -> bool:
    """Whether a file is neither Python's nor installed."""
    real = os.path.realpath(file)
    return not (file.startswith("<") or _INSTALLED.search(file) or real.startswith(_LIBRARIES))


def _place(frame: re.Match[str]) -> str:
    function = f", in {frame['function']}" if frame["function"] else ""
    return f"{os.path.basename(frame['file'])}, line {frame['line']}{function}"
