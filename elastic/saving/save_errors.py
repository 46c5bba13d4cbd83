"""Why a save failed: its surroundings, which may be mended before the next try, or a mistake, which every save repeats.

A full or lost disk and a lack of memory are surroundings. Any other error of a script's ``save`` or of a library is a
mistake: warning of it at every save would leave the whole run without a checkpoint.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointDamaged
from ..checkpoint.files import write_problem

log = logging.getLogger(__name__)

# What torch's writer, which is C++, says when a disk takes no more.
_WRITER = re.compile(r"PytorchStreamWriter|inline_container|unexpected pos|basic_ios|iostream error|file write failed")
NO_MEMORY = "allocate memory|not enough memory|out of memory|start new thread"
"""A pattern of what general errors say, in small letters or large ones, where a machine has too little memory."""
_MEMORY = re.compile(NO_MEMORY, re.IGNORECASE)
# Errors about a path although its directory can be written: the path is wrong, and will be the next time.
_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failed(Exception):
    """Part of the save failed on some rank; all ranks raise this with the same text."""

    def __init__(self, reason: str, fatal: bool, *, final: bool | None = None) -> None:
        super().__init__(reason)
        self.fatal, self.final = fatal, fatal if final is None else final


class Cause(str, enum.Enum):
    """What kind of reason a rank has."""

    SURROUNDINGS = "surroundings"
    # A mistake, unless another rank's surroundings caused it, for instance by leaving a collective half-way.
    LIKELY_MISTAKE = "likely mistake"
    MISTAKE = "mistake"


@dataclass(frozen=True)
class Problem:
    """Why one rank's part of a save failed.

    Attributes:
        text: One line.
        cause: See `Cause`.
    """

    text: str
    cause: Cause

    @property
    def answer(self) -> dict[str, Any]:
        """What this rank tells the others."""
        return {"text": self.text, "cause": self.cause.value}


def kept(error: BaseException) -> BaseException:
    """Returns the error if it is an error of saving, which the other ranks must hear; raises any other one.

    ``torch.distributed.checkpoint`` raises a ``BaseException`` when some rank could not write.
    """
    if isinstance(error, Exception) or _failures(error) is not None:
        return error
    raise error


def problem(error: BaseException | None, directory: Path) -> Problem | None:
    """Why a rank's part of a save below ``directory`` failed; None: it succeeded."""
    if error is None:
        return None
    said: list[str] = []

    def disk() -> str:
        if not said:
            said.append(write_problem(directory))
        return said[0]

    cause = _cause(error, disk)
    text = describe(error)
    # Libraries that write by themselves hide what the file system said.
    hidden = said[0] if said and not isinstance(error, OSError) else ""
    return Problem(f"{hidden}; {text}" if hidden else text, cause)


def trouble(error: Exception, directory: Path) -> dict[str, Any]:
    """What a rank tells the others whose part went wrong before or behind the script's writing: a name, a manifest.

    Nothing that a file system says there is the script's mistake: the next save tries it again.
    """
    if isinstance(error, (OSError, CheckpointDamaged)):
        return {"text": describe(error)}
    return told(error, directory)


def told(error: BaseException | None, directory: Path) -> dict[str, Any]:
    """What a rank tells the others of an error, if it had one: one line. Of a mistake its own log has more."""
    found = problem(error, directory)
    if found is None:
        return {}
    if found.cause is not Cause.SURROUNDINGS:
        log.error("writing %s failed", directory.name, exc_info=error)
    return found.answer


def is_fatal(answers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the answers of all ranks say that no later save can succeed."""
    answers = list(answers)
    causes = {answer.get("cause") for answer in answers if "text" in answer}
    return is_mistake(answers) or causes == {Cause.LIKELY_MISTAKE.value}


def is_mistake(answers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some rank has something that no other process could save either."""
    return any(answer.get("cause") == Cause.MISTAKE.value for answer in answers if "text" in answer)


def describe(error: BaseException) -> str:
    """One line about an error."""
    failures = _failures(error)
    if failures:
        rank, (first, _) = min(failures.items())
        return f"{describe(first)} (in rank {rank}'s part of torch.distributed.checkpoint)"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _cause(error: BaseException, disk: Callable[[], str]) -> Cause:
    failures = _failures(error)
    if failures is not None:
        causes = {_cause(one, disk) for one, _ in failures.values()}
        for cause in (Cause.MISTAKE, Cause.SURROUNDINGS):
            if cause in causes:
                return cause
        return Cause.LIKELY_MISTAKE
    if isinstance(error, (CheckpointDamaged, MemoryError)):
        return Cause.SURROUNDINGS
    if isinstance(error, OSError):
        wrong = isinstance(error, _WRONG_PATH) and not disk()
        return Cause.LIKELY_MISTAKE if wrong else Cause.SURROUNDINGS
    if not isinstance(error, RuntimeError):
        return Cause.MISTAKE
    text = str(error)
    if _WRITER.search(text) or _MEMORY.search(text):
        disk()
        return Cause.SURROUNDINGS
    below = error.__cause__ or error.__context__
    if isinstance(below, OSError):
        return _cause(below, disk)
    return Cause.SURROUNDINGS if disk() else Cause.LIKELY_MISTAKE


def _failures(error: BaseException) -> dict[int, tuple[BaseException, Any]] | None:
    """The ranks' errors in torch's ``CheckpointException``; None: the error is something else.

    Recognised by its name: where it was raised it is imported already, and elsewhere it need not be.
    """
    kind = type(error)
    if kind.__name__ == "CheckpointException" and kind.__module__.startswith("torch.distributed.checkpoint"):
        failures: dict[int, tuple[BaseException, Any]] = error.failures  # type: ignore[attr-defined]
        return failures
    return None
