"""Text that somebody else wrote, made fit for a log, a console or an error line."""

from __future__ import annotations

__all__ = ("one_line",)

# Characters. Longer reasons help nobody; a traceback's last line fits in.
LONGEST_LINE = 1000


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """The same as one line of at most `longest` printable characters.

    White space of any kind becomes a space. What else cannot be printed (escape sequences that move a cursor or colour
    a terminal, marks that turn the direction of the text around) is shown as Python writes it: `\\x1b`.
    """
    if len(text) <= longest and text.isprintable():
        return text
    # No more of it than can be needed: it may be megabytes long.
    words = " ".join(text[: 2 * longest].split())
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)
    return line if len(line) <= longest and len(text) <= 2 * longest else line[: longest - 1] + "…"
