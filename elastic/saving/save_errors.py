"""Why a save failed: its surroundings, which the next try may find mended, or a mistake, which every save would repeat.

A full or lost disk and a lack of memory are surroundings. What a script's ``save`` or a library raises besides is a
mistake: to warn of it at every save, to the end, would leave the run without a checkpoint.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointDamaged
from ..checkpoint.files import write_problem

# What torch's writer, which is C++, says of a disk that takes no more.
_WRITER = re.compile(r"PytorchStreamWriter|inline_container|unexpected pos|basic_ios|iostream error|file write failed")
_MEMORY = re.compile(r"not enough memory|can't allocate memory|out of memory", re.IGNORECASE)
# Of a directory that can be written: the path is wrong, and will be so the next time.
_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


class Failed(Exception):
    """A part of the save failed on some rank; all ranks have this with the same text."""

    def __init__(self, reason: str, fatal: bool, *, final: bool | None = None) -> None:
        super().__init__(reason)
        self.fatal, self.final = fatal, fatal if final is None else final


class Cause(str, enum.Enum):
    """What kind of reason a rank has."""

    SURROUNDINGS = "surroundings"
    # A mistake, unless another rank's surroundings are what it comes from: a collective that was left in the middle.
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
        """What the other ranks are told."""
        return {"text": self.text, "cause": self.cause.value}


def kept(error: BaseException) -> BaseException:
    """The error, if it is one of saving, so that the other ranks can hear of it; else it is raised.

    ``torch.distributed.checkpoint`` says by a ``BaseException`` that some rank could not write.
    """
    if isinstance(error, Exception) or _failures(error) is not None:
        return error
    raise error


def problem(error: BaseException | None, directory: Path) -> Problem | None:
    """What became of a rank's part of a save below ``directory``; None: it is done."""
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


def is_fatal(answers: Iterable[dict[str, Any]]) -> bool:
    """Whether what all ranks answered says that no later save can succeed."""
    answers = list(answers)
    causes = {answer.get("cause") for answer in answers if "text" in answer}
    return is_mistake(answers) or causes == {Cause.LIKELY_MISTAKE.value}


def is_mistake(answers: Iterable[dict[str, Any]]) -> bool:
    """Whether some rank has what cannot be saved by any other process either."""
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
    """Of torch's ``CheckpointException``: each rank's error; None: it is something else.

    By its name: whoever raised it has imported it, and nobody else should.
    """
    kind = type(error)
    if kind.__name__ == "CheckpointException" and kind.__module__.startswith("torch.distributed.checkpoint"):
        failures: dict[int, tuple[BaseException, Any]] = error.failures  # type: ignore[attr-defined]
        return failures
    return None
