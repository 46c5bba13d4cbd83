"""The shell line that starts an agent: where its command begins and ends, and which flags stand on it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dalsegno.protos.yaml_text import InputRefused

__all__ = ("agent_line", "flag_value", "stays", "up_to_script", "with_flags")

PROGRAMS = ("dlrover-run", "dalsegno-run")
# In a text that cannot be cut.
_PROGRAM = re.compile(rf"(?<![\w./-])(?:{'|'.join(PROGRAMS)})(?![\w./-])")
_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
# `$(…)` and `<(…)` are parts of a word, with up to two more levels of brackets in them.
_INNER = rf"[^()'\"\\]|\\.|{_QUOTED}"
_BRACKETS = rf"\((?:{_INNER}|\((?:{_INNER}|\((?:{_INNER})*\))*\))*\)"
_PIECE = re.compile(
    r"(?P<blank>(?:[^\S\n]|\\\n)+)"
    r"|(?P<comment>\#[^\n]*)"
    rf"|(?P<word>(?:\\.|\$'(?:\\.|[^'\\])*'|{_QUOTED}|`[^`]*`|\$\{{[^}}]*\}}|[$<>]{_BRACKETS}|[^\s;&|()<>'\"`\\])+)"
    r"|(?P<redirection>[<>]+[&|]?|&>>?)"
    r"|(?P<operator>\n|&&|\|[|&]?|;;|[;&()])",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"\w+(?:\[[^]]*\])?\+?=")
# What may stand before a command and is no program: `exec` may follow it. Keywords are none behind an assignment.
_KEYWORDS = ("!", "time")
_BUILTINS = ("command", "builtin", "eval")
# Programs that become the one that they are given: `exec` stands before them.
_BECOMES_ANOTHER = ("numactl", "nice", "ionice", "taskset", "chrt", "env", "stdbuf", "nohup")
_PIPES = ("|", "|&")
# Behind these an agent's name is a command for certain: behind `echo` it is none.
_STARTS = (*_KEYWORDS, *_BUILTINS, *_BECOMES_ANOTHER, *("exec", "if", "then", "else", "while", "until", "do", "{"))
_ENDS = (";", "&&", "||", "|", "&", ";;")
# Flags of the agent behind which no value stands, in the spelling with hyphens. (Its parser lies above this room.)
SWITCHES = frozenset(
    (
        *("--auto-config", "--auto-tunning", "--comm-perf-test", "--deepspeed-load-universal", "--dlrover"),
        *("--dlrover-fixes", "--exclude-straggler", "--make-room", "--network-check", "--new-run", "--no-python"),
        *("--node-check", "--numa-affinity", "--run-path", "--save-at-breakpoint", "--standalone"),
        *("--universal-checkpoint", "--virtual-local-rank", "--help", "-h"),
    )
)


class _Piece(NamedTuple):
    kind: str
    text: str


def agent_line(text: str, place: str) -> str:
    """The same line, with `dalsegno-run` in the place of `dlrover-run`, and `exec` where the shell can become it.

    Args:
        text: What a shell runs; several lines, too.
        place: Of it, for the line about what is wrong.

    Raises:
        InputRefused: it starts no agent, or the shell would go on beside it or after it.
    """
    pieces = _pieces(text)
    if pieces is None:
        return _uncut(text, place)
    at = next((number for number, piece in enumerate(pieces) if piece.text in PROGRAMS), None)
    if at is None:
        raise _no_agent(place)
    behind = next((piece for piece in _without_empty_end(pieces[at:]) if piece.kind == "operator"), None)
    if behind is not None:
        raise _goes_on("a further line" if behind.text == "\n" else repr(behind.text), place)
    begin = max((number + 1 for number in range(at) if pieces[number].kind == "operator"), default=0)
    if begin and pieces[begin - 1].text in _PIPES:
        raise _piped(pieces[begin - 1].text, place)
    pieces[at] = _Piece("word", "dalsegno-run")
    # A shell that stays is process 1, which ignores SIGTERM, and the pod's notice would reach nobody.
    where = _place_of_exec(pieces[begin:at], text)
    if where is not None:
        pieces.insert(begin + where, _Piece("word", "exec "))
    return "".join(piece.text for piece in pieces)


def _place_of_exec(before: Sequence[_Piece], text: str) -> int | None:
    """Where it goes among the pieces of a command before its program; None: nowhere, or nobody knows."""
    first = True
    previous = ""
    words = list[int]()
    for number, piece in enumerate(before):
        follows = before[number + 1].kind if number + 1 < len(before) else ""
        if piece.kind in ("blank", "comment"):
            continue
        number_of_file = piece.text.isdecimal() and follows == "redirection"
        if piece.kind == "redirection" or number_of_file or previous == "redirection":
            first, previous = False, "redirection" if piece.kind == "redirection" else ""
        elif _ASSIGNMENT.match(piece.text):
            first, previous = False, ""
        elif (first and piece.text in _KEYWORDS) or piece.text in _BUILTINS:
            first, previous = first and piece.text in _KEYWORDS, piece.text
        elif piece.text != "-p" or previous not in ("time", "command"):
            words.append(number)
    if not words:
        return len(before)
    program = before[words[0]].text
    if program in _BECOMES_ANOTHER and "exec" not in [piece.text for piece in before]:
        return words[0]
    # One of the text's own functions, as `retry`, starts a builtin as well.
    return len(before) if re.search(rf"(?m)(?:^|[\s;]){re.escape(program)}\s*\(\)", text) else None


def stays(text: str, place: str) -> str:
    """Why a shell would certainly stay process 1 of its container while the agent of this line runs; empty: it may not.

    It may have become the agent by `exec`, or hand the notice on by a `trap`.
    """
    pieces = _pieces(text) or []
    at = _at(pieces)
    if at is None or any(piece.text == "trap" or piece.text.startswith("<<") for piece in pieces):
        return ""
    operators = [number for number, piece in enumerate(pieces) if piece.kind == "operator"]
    begin = max((number + 1 for number in operators if number < at), default=0)
    first = next((p.text for p in pieces[begin:at] if p.kind == "word" and not _ASSIGNMENT.match(p.text)), "exec")
    if first not in _STARTS:
        return ""
    if begin and pieces[begin - 1].text in _PIPES:
        return str(_piped(pieces[begin - 1].text, place))
    end = next((number for number in operators if number > at), len(pieces))
    behind = [piece for piece in pieces[end:] if piece.kind not in ("blank", "comment") and piece.text != "\n"]
    follows = any(piece.kind != "operator" for piece in behind)
    if end == len(pieces) or pieces[end].text in "()":
        return ""
    becomes = "exec" in [piece.text for piece in pieces[begin:at]]
    if pieces[end].text in (*_PIPES, "&") or (follows and not becomes):
        return str(_goes_on("a further line" if pieces[end].text == "\n" else repr(pieces[end].text), place))
    return ""


def _uncut(text: str, place: str) -> str:
    """Of a text with quotes or brackets that only a shell understands."""
    run = _PROGRAM.search(text)
    if run is None:
        raise _no_agent(place)
    before, behind = text[: run.start()], text[run.end() :]
    tokens = _tokens(behind)
    if tokens is None:
        raise InputRefused(f"the command {text[:60]!r} cannot be cut into words: a quote is not closed")
    if found := [end for end in _ENDS if end in tokens]:
        raise _goes_on(repr(found[0]), place)
    for line in re.finditer(r"(?<!\\)\n", behind):
        if _tokens(behind[: line.start()]) is not None and _tokens(behind[line.end() :]):
            raise _goes_on("a further line", place)
    command = _pieces(re.split(r"[\n;|&]", before)[-1])
    where = _place_of_exec(command, text) if command is not None else 0
    if command is None or where == len(command):
        return f"{before}exec dalsegno-run{behind}"
    return f"{before}dalsegno-run{behind}"


def _tokens(text: str) -> list[str] | None:
    """Words and operators; None: a quote in it is open."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def _no_agent(place: str) -> InputRefused:
    return InputRefused(f"{place}: it starts no dlrover-run, so there is nothing that could be elastic")


def _piped(what: str, place: str) -> InputRefused:
    return InputRefused(
        f"{place}: {what!r} stands before dlrover-run, and a shell that stays for it would not"
        " pass the notice to it: let dlrover-run read a file"
    )


def _goes_on(what: str, place: str) -> InputRefused:
    return InputRefused(
        f"{place}: {what} stands behind dlrover-run, and a shell that goes on after it would not"
        " pass the notice to it: let dlrover-run be the last command"
    )


def _pieces(text: str) -> list[_Piece] | None:
    """They are the whole text; None: it cannot be cut with certainty."""
    found, at = list[_Piece](), 0
    while at < len(text):
        match = _PIECE.match(text, at)
        if match is None or (match[0] == "(" and found and found[-1].text[-1] in "$<>"):
            return None
        found.append(_Piece(str(match.lastgroup), match[0]))
        at = match.end()
    return found


def _without_empty_end(pieces: list[_Piece]) -> list[_Piece]:
    last = max(n for n, piece in enumerate(pieces) if piece.kind not in ("blank", "comment") and piece.text != "\n")
    return pieces[: last + 1]


def _own_words(text: str) -> list[str]:
    """Those behind the agent's name up to its script; none where there is no agent to be seen."""
    pieces = _pieces(text)
    if pieces is None:
        run = _PROGRAM.search(text)
        return [] if run is None else up_to_script(text[run.end() :].split())
    at = _at(pieces)
    return [] if at is None else up_to_script(_words_behind(pieces, at))


def _at(pieces: Sequence[_Piece]) -> int | None:
    """The place of the agent's name.

    Of the last one that has words behind it: `command -v dalsegno-run` only looks for it.
    """
    for number in reversed(range(len(pieces))):
        piece = pieces[number]
        if piece.kind == "word" and piece.text.rpartition("/")[2] in PROGRAMS and _words_behind(pieces, number):
            return number
    return None


def _words_behind(pieces: Sequence[_Piece], at: int) -> list[str]:
    """The words of the same command."""
    words = list[str]()
    for piece in pieces[at + 1 :]:
        if piece.kind == "operator":
            break
        words += [piece.text] if piece.kind == "word" else []
    return words


def up_to_script(words: Sequence[str]) -> list[str]:
    """The agent's own of the words behind its name. A word behind a flag without `=` may be its value."""
    own, value = list[str](), False
    for word in (re.sub("[\"']", "", word) for word in words):
        if not word.startswith("-") and (not value or word.endswith(".py")):
            break
        value = word.startswith("-") and "=" not in word and word.replace("_", "-") not in SWITCHES
        own.append(word)
        if word in ("-m", "--module"):
            break
    return own


def flag_value(text: str, flag: str, variables: Mapping[str, str]) -> str:
    """The value of a flag on the agent's line, with these variables replaced; empty: it is not there."""
    given, words = "", _own_words(text)
    for word, following in zip(words, [*words, ""][1:], strict=True):
        own, equals, rest = word.partition("=")
        if own.replace("_", "-") == flag:
            given = rest if equals else following
    return re.sub(r"\$(?:(\w+)|{(\w+)})", lambda found: variables.get(found[1] or found[2], found[0]), given)


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """The same text with these flags behind the agent's name, but for those that it has there.

    As it was, where there is no agent to be seen, or it cannot be cut with certainty.
    """
    pieces = _pieces(text) or []
    at = _at(pieces)
    if at is None:
        return text
    own = {word.partition("=")[0].replace("_", "-") for word in up_to_script(_words_behind(pieces, at))}
    more = [_Piece("word", f" {flag}={value}") for flag, value in flags.items() if flag not in own]
    return "".join(piece.text for piece in (*pieces[: at + 1], *more, *pieces[at + 1 :]))
