"""What the command lines of agent and master share: bad input is one line, and the same values are checked alike.

Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
from pathlib import Path
from typing import NoReturn

from .limits import LONGEST_SECONDS, MOST_SETTING

__all__ = ("JOB_ID", "Parser", "UsageError", "file_path", "job_id", "nnodes", "no_directory", "path_text", "seconds")

# Ids of jobs and of runs become directory names and part of addresses.
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# A bucket, or a page: pathlib would take it for a directory below the working directory.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class UsageError(Exception):
    """Bad input; one line that says the cause and what to change."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing a page of usage."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def job_id(text: str) -> str:
    """A job's name."""
    if not JOB_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no job id: letters, digits, '.', '_', '-', at most 128, the first a letter or digit"
        )
    return text


def path_text(text: str) -> str:
    """The name of a file or directory, as it was given."""
    if not text:
        # Pathlib takes it for the working directory, others for a flag that was not given.
        raise argparse.ArgumentTypeError("the name is empty: is a variable unset?")
    if _URL.match(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a URL: mount what is there, and name a file or directory")
    return text


def file_path(text: str) -> Path:
    """The path of a file or directory."""
    return Path(path_text(text))


def no_directory(path: Path) -> str:
    """Why a path is none of a directory, for people; empty: it is one. Unlike `Path.is_dir` it says so of any path."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return ""
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    return f"{path} is no directory"


def seconds(text: str) -> float:
    """A duration, not negative, of up to thirty years."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    if value > LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r}: at most {LONGEST_SECONDS:.0f} seconds")
    return value


def nnodes(text: str) -> tuple[int, int]:
    """The least and the largest number of nodes: N or MIN:MAX."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not N or MIN:MAX, for example 1:4")
    low, high = int(match[1]), int(match[2] or match[1])
    if low < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1 node is needed")
    if high > MOST_SETTING:
        raise argparse.ArgumentTypeError(f"{text!r}: at most {MOST_SETTING} nodes")
    if high < low:
        raise argparse.ArgumentTypeError(f"{text!r}: the maximum is below the minimum, did you mean {high}:{low}?")
    return low, high
