"""Why a worker ended, in one line for people, taken from the files that it left."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from dalsegno.protos.text import ITS_FILE, one_line

from .advice import tells_of_a_peer
from .tracebacks import last_raised

__all__ = ["error_message", "last_words", "without_file"]

# How many bytes at the end of a worker's errors are read (a traceback through a model of transformers has some ten
# thousand), and how many characters of its last line are shown.
_TAIL_BYTES = 65536
_LONGEST_LINE = 300
# A progress bar of tqdm: `  5%|▌    | 5/100 [00:01<00:19, 4.9it/s]`, or `5it [00:01, 4.9it/s]`.
_BAR = re.compile(r"^.*\[\d+:\d\d(:\d\d)?(<|, )[^\]]*\]")
# What loggers put before what went well: `INFO`, `[2026-11-24 10:00:00,000] [INFO] [engine.py:12]`, glog's `I1124 `.
_WENT_WELL = re.compile(r"^(I\d{4} |.{0,60}?\b(DEBUG|INFO|info|debug)\b[\]:| \-|\t])")
# What Python's `warnings` print, above the line of source that they are about.
_WARNED = re.compile(r"\S.*:\d+: \w*Warning: ")
# Sequences that move the cursor of a terminal, or colour its text.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# What gloo says as it aborts a rank that receives more than it waits for, with both sizes, and what that means.
_APART = re.compile(r"op\.preamble\.length(?:.*?(?P<sizes>\d+ vs \d+))?")
_IN_DIFFERENT_COLLECTIVES = (
    "the ranks were in different collectives, or in one with tensors of other sizes or types%s: some did not call what"
    " all must call (a backward pass, an evaluation, s.sum, s.gather, s.improved, s.save)"
)

logger = logging.getLogger(__name__)


def last_words(path: str, code: int) -> str:
    """Why a worker ended with `code`, according to the end of its errors, and where to find the rest.

    An exception is named with the script's own line that it passed last. Without one it is the last line, whatever
    that says, unless it is a warning or a logger put it among what went well. A signal (a negative code) ends a
    process anywhere, so there its last line counts only if it is an error of Python itself, or gloo's about ranks that
    went apart. What a lost peer makes a collective say is cut to that. A progress bar does not count as a line, because
    it was there before. Empty if its errors are in no file.
    """
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        logger.warning("the errors of a worker in %s cannot be read: %s", path, error)
        return ""
    if not text.strip():
        return ""
    lines = [line for physical in text.split("\n") if (line := _without_bars(physical))]
    words = _words(lines, code) if lines else ""
    return f"{words} (see {path})" if words else f"see {path}"


def without_file(words: str) -> str:
    """The same without the file that they name."""
    return ITS_FILE.sub("", words)


def _words(lines: Sequence[str], code: int) -> str:
    """The line that says why, with its place in the script; empty if a signal came from outside."""
    fatal = next((line.strip() for line in reversed(lines) if line.startswith("Fatal Python error: ")), "")
    if code < 0 and (apart := next(filter(None, map(_APART.search, lines)), None)):
        return _IN_DIFFERENT_COLLECTIVES % (f" ({apart['sizes']} bytes)" if apart["sizes"] else "")
    if code < 0 and fatal:
        return fatal[:_LONGEST_LINE]
    raised = last_raised(lines)
    if raised is None or (code < 0 and raised.rest):
        told = next((line for line in reversed(_without_warnings(lines)) if not _WENT_WELL.match(line)), "")
        return "" if code < 0 else told[:_LONGEST_LINE]
    if peer := tells_of_a_peer(" ".join((raised.text, *raised.rest))):
        return f"it lost a peer ({peer})"
    return raised.text[:_LONGEST_LINE] + (f" ({raised.where})" if raised.where else "")


def _without_warnings(lines: Sequence[str]) -> list[str]:
    """The lines, stripped, without those of warnings, which end nobody's work."""
    found, warned = [], False
    for line in lines:
        about, warned = warned and line[:1].isspace(), bool(_WARNED.match(line))
        if not about and not warned:
            found.append(line.strip())
    return found


def _without_bars(physical: str) -> str:
    """One line of the file without what was drawn over, or was to be drawn over; "" if nothing is left.

    What a script prints after a bar that has not ended its line is kept, because its last error may be there.
    """
    line = _ESCAPE.sub("", physical).rstrip()
    drawn, _, last = line.rpartition("\r")
    behind, bars = _BAR.subn("", last)
    if bars:
        return behind.strip() if any(letter.isalpha() for letter in behind) else ""
    return "" if drawn or last != line else last


def error_message(path: str) -> str:
    """One line from the error file that torch's `@record` writes in a worker; empty if there is none."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8", errors="replace") or "{}")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        logger.warning("the error file %s cannot be read: %s", path, error)
        return ""
    message = content.get("message", "") if isinstance(content, dict) else ""
    if isinstance(message, dict):
        message = message.get("message", "")
    lines = str(message).strip().splitlines()
    # As in `_words`: it may stand behind what is cut.
    if lines and len(lines[0]) > _LONGEST_LINE and (peer := tells_of_a_peer(lines[0])):
        return f"it lost a peer ({peer})"
    return one_line(lines[0], _LONGEST_LINE) if lines else ""
