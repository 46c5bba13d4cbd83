"""The macros in the arguments of a script without a session. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

__all__ = ["RESUME_DIR", "RESUME_PATH", "RESUME_STEP", "SAVE_DIR", "expand", "first_macro", "macros_of", "misspelt"]

SAVE_DIR, RESUME_DIR, RESUME_PATH, RESUME_STEP = "save_dir", "resume_dir", "resume_path", "resume_step"
# As a shell's: with `:-` what to take where there is no resume point, with `:+` what to take where there is one.
_MACRO = re.compile(r"\$\{(save_dir|resume_dir|resume_path|resume_step)(?::([-+])([^}]*))?\}")

# Anything that looks like one. Other programs have such words, too (Hydra's `${hydra:run.dir}`).
_WORD = re.compile(r"\$\{([^}:]*)[^}]*\}")
_ALIKE = 0.8


def misspelt(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Words in a script's arguments that are no macros, and the macro that each of them was probably meant to be."""
    found = []
    for text in arguments:
        for match in _WORD.finditer(text):
            plain = match[1].strip().lower().replace("-", "_")
            meant = difflib.get_close_matches(plain, (SAVE_DIR, RESUME_DIR, RESUME_PATH, RESUME_STEP), 1, _ALIKE)
            if meant and not _MACRO.fullmatch(match[0]):
                found.append((match[0], f"${{{meant[0]}}}"))
    return found


def macros_of(arguments: Sequence[str]) -> frozenset[str]:
    """The macros in a script's arguments whose value it gets; `${resume_dir:+WORD}` only asks whether there is one."""
    return frozenset(match[1] for text in arguments for match in _MACRO.finditer(text) if match[2] != "+")


def first_macro(arguments: Sequence[str]) -> str:
    """The first one, as people wrote it; empty: there is none."""
    return next((match[0] for text in arguments for match in _MACRO.finditer(text)), "")


def expand(arguments: Sequence[str], values: Mapping[str, str | None]) -> tuple[str, ...]:
    """A script's arguments with the macros' values in them.

    An argument with a macro that has no value is left out, and so is the flag whose value it would have been: the
    argument before it, if that begins with a hyphen and has no `=`. One that is a flag itself (`--from=…`) has none.

    Args:
        arguments: as people wrote them.
        values: by the macro's name; None: it has none now.
    """
    made: list[str] = []
    before = ""
    for argument in arguments:
        text = _fill(argument, values)
        if text is not None:
            made.append(text)
        elif (
            not argument.startswith("-")
            and before.startswith("-")
            and "=" not in before
            and made
            and made[-1] == before
        ):
            made.pop()
        before = argument
    return tuple(made)


def _fill(argument: str, values: Mapping[str, str | None]) -> str | None:
    """One argument; None: a macro in it has no value."""
    made, end = "", 0
    for match in _MACRO.finditer(argument):
        value = values[match[1]]
        if match[2] == "-" and value is None:
            value = match[3]
        if value is None:
            return None
        made += argument[end : match.start()] + (match[3] if match[2] == "+" else value)
        end = match.end()
    return made + argument[end:]
