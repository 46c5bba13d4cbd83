"""The shell line that starts an agent: where its command begins and ends, and which flags stand on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from dalsegno.protos.yaml_text import InputRefused

__all__ = ("agent_line", "flag_value")

PROGRAMS = ("dlrover-run", "dalsegno-run")
# `$(…)` and `<(…)` are parts of a word, with up to two more levels of brackets in them.
_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_PIECE = re.compile(
    r"(?P<blank>(?:[^\S\n]|\\\n)+)"
    r"|(?P<comment>\#[^\n]*)"
    rf"|(?P<word>(?:\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|`[^`]*`|\$\{{[^}}]*\}}|[$<>]{_BRACKETS}|[^\s;&|()<>'\"`\\])+)"
    r"|(?P<redirection>[<>]+[&|]?|&>>?)"
    r"|(?P<operator>\n|&&|\|[|&]?|;;|[;&()])",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"\w+\+?=")
# What may stand before a command and is no program, so that `exec` follows it.
_NO_PROGRAMS = ("!", "time", "command", "builtin", "eval")


class _Piece(NamedTuple):
    kind: str
    text: str


def agent_line(text: str, place: str) -> str:
    """The same line, with the shell becoming the agent: `exec dalsegno-run` in the place of `dlrover-run`.

    Args:
        text: What a shell runs; several lines, too.
        place: Of it, for the line about what is wrong.

    Raises:
        InputRefused: it starts no agent, or the shell would go on beside it or after it.
    """
    pieces = _pieces(text)
    at = next((number for number, piece in enumerate(pieces) if piece.text in PROGRAMS), None)
    if at is None:
        raise InputRefused(f"{place}: it starts no dlrover-run, so there is nothing that could be elastic")
    behind = next((piece for piece in _without_empty_end(pieces[at:]) if piece.kind == "operator"), None)
    if behind is not None:
        what = "a further line" if behind.text == "\n" else repr(behind.text)
        raise InputRefused(
            f"{place}: {what} stands behind dlrover-run, and a shell that goes on after it would not"
            " pass the notice to it: let dlrover-run be the last command"
        )
    begin = max((number + 1 for number in range(at) if pieces[number].kind == "operator"), default=0)
    if begin and pieces[begin - 1].text in ("|", "|&"):
        raise InputRefused(
            f"{place}: {pieces[begin - 1].text!r} stands before dlrover-run, and a shell that stays for it would not"
            " pass the notice to it: let dlrover-run read a file"
        )
    pieces[at] = _Piece("word", "dalsegno-run")
    # A shell that stays is process 1, which ignores SIGTERM, and the pod's notice would reach nobody.
    if "exec" not in [piece.text for piece in pieces[begin:at]]:
        while pieces[begin].kind in ("blank", "comment") or _stands_before_exec(pieces[begin].text):
            begin += 1
        pieces.insert(begin, _Piece("word", "exec "))
    return "".join(piece.text for piece in pieces)


def _pieces(text: str) -> list[_Piece]:
    found, at = list[_Piece](), 0
    while at < len(text):
        match = _PIECE.match(text, at)
        if match is None:
            raise InputRefused(
                f"the command {text[:60]!r} cannot be cut into words: a quote or bracket is not closed:"
                f" {text[at : at + 20]!r}"
            )
        found.append(_Piece(str(match.lastgroup), match[0]))
        at = match.end()
    return found


def _without_empty_end(pieces: list[_Piece]) -> list[_Piece]:
    last = max(n for n, piece in enumerate(pieces) if piece.kind not in ("blank", "comment") and piece.text != "\n")
    return pieces[: last + 1]


def _stands_before_exec(word: str) -> bool:
    return word in _NO_PROGRAMS or _ASSIGNMENT.match(word) is not None


def flag_value(text: str, flag: str, variables: Mapping[str, str]) -> str:
    """The value of a flag on the agent's line, with these variables replaced; empty: it is not there."""
    found = re.search(rf"(?<![\w-]){flag}(?:=|(?:\s|\\\n)+)[\"']?([^\s\"']+)", text)
    given = found[1] if found else ""
    for name, value in variables.items():
        given = re.sub(rf"\$(?:{name}\b|{{{name}}})", lambda _, value=value: value, given)
    return given
