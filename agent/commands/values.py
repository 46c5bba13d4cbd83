"""Values of `dlrover-run`'s flags: each function takes a flag's text, and refuses a wrong one (ArgumentTypeError)."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from dalsegno.protos.addresses import ADDRESS, addresses_of
from dalsegno.protos.contract import LEAST_NODE_TIMEOUT_SECONDS
from dalsegno.protos.limits import MOST, MOST_SETTING
from dalsegno.protos.options import file_path, no_directory, seconds
from dalsegno.protos.text import LONGEST_NAME, name_problem

from ..processes.signals import number_of, signals_of
from ..storage.naming import is_pattern

# Bytes in a second.
_LEAST_BANDWIDTH = 1_000_000
# What 32 bits hold, as messages to the master carry counts; and the characters of a number that are looked at.
_MOST_COUNT = (1 << 32) - 1
_LONGEST_NUMBER = 100
# Characters of a wrong value that are shown.
_SHOWN = 40


def more_than_none(text: str) -> float:
    """Seconds, more than 0."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def node_timeout(text: str) -> float:
    """Seconds of silence after which a node counts as gone."""
    value = seconds(text)
    if value < LEAST_NODE_TIMEOUT_SECONDS:
        raise argparse.ArgumentTypeError(
            f"an agent whose heartbeat was lost is heard again within {LEAST_NODE_TIMEOUT_SECONDS:g} s, "
            "so that is the least"
        )
    return value


def seconds_or_auto(text: str) -> float:
    """Seconds; -1 for `auto`."""
    return -1.0 if text == "auto" else seconds(text)


def count_of(least: int) -> Callable[[str], int]:
    """The reader of a whole number of at least so much."""

    def parse(text: str) -> int:
        if len(text) > _LONGEST_NUMBER or not text.isdecimal() or not least <= int(text) <= _MOST_COUNT:
            raise argparse.ArgumentTypeError(
                f"{text[:_SHOWN]!r} is no whole number of at least {least} and at most {_MOST_COUNT}"
            )
        return int(text)

    return parse


def bytes_of(text: str) -> int:
    """A size: 1500, 300MB, 32GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is no size, for example 32GiB")
    unit = (match[2] or "").upper()
    base = 1024 if unit.endswith("I") else 1000
    size = float(match[1]) * base ** (" KMGT".index(unit[0]) if unit else 0)
    if size > MOST:
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is more than {MOST} bytes, the largest size")
    return int(size)


def bandwidth(text: str) -> int:
    """Bytes in a second: 200MB/s."""
    value = bytes_of(text.removesuffix("/s"))
    if value < _LEAST_BANDWIDTH:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1MB in a second, or no part would ever arrive")
    return value


def nproc(text: str) -> str:
    """Workers of a node: a number, or a word that torch knows."""
    if text.lstrip("-").isdecimal() and (text.startswith("-") or not text.strip("0")):
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1 worker is needed")
    if text.isdecimal() and (len(text) > _LONGEST_NUMBER or int(text) > MOST_SETTING):
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r}: at most {MOST_SETTING} workers")
    return text


def address(text: str) -> str:
    """HOST:PORT, several of them with commas."""
    for one in addresses_of(text):
        found = ADDRESS.fullmatch(one)
        if found is None or not 0 < int(found[2] or 0) < 65536:
            raise argparse.ArgumentTypeError(f"{one!r} is not HOST:PORT")
        host(found[1])
    return text


def host(text: str) -> str:
    """A host's name or address, as far as its form goes: the system's own look-up raises no OSError at other forms."""
    try:
        text.encode("idna")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is no host: {error}") from error
    return text


def glob(text: str) -> str:
    """A pattern for files below `${save_dir}`."""
    if text and not is_pattern(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be relative to '${{save_dir}}', and lead to what is below it")
    return text


def best_metric(text: str) -> tuple[str, str]:
    """A metric, and which way is better: eval_loss:min."""
    metric, _, mode = text.rpartition(":")
    if not metric or mode not in ("min", "max"):
        raise argparse.ArgumentTypeError(f"{text!r} is not METRIC:min or METRIC:max, for example eval_loss:min")
    if len(metric) > LONGEST_NAME or not metric.isprintable():
        raise argparse.ArgumentTypeError(f"a metric's name has up to {LONGEST_NAME} printable characters")
    return metric, mode


def least_gain(text: str) -> float:
    """How much better a value must be: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0, for example 0.001")
    return value


def metrics_file(text: str) -> str:
    """A file below `${save_dir}`, or an absolute path."""
    path = file_path(text)
    if not path.name or ".." in path.parts:
        raise argparse.ArgumentTypeError(f"{text!r} is no file below '${{save_dir}}', nor an absolute path")
    return text


def node_name(text: str) -> str:
    """A node's name."""
    if problem := name_problem(text):
        raise argparse.ArgumentTypeError(f"the name {problem}")
    return text


def streams(text: str) -> str:
    """torch's choice of streams: 3, or 0:3,1:1."""
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0..3 nor RANK:0..3,…")
    return text


def signals(text: str) -> str:
    """Names of signals with commas."""
    try:
        signals_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def save_signal(text: str) -> str:
    """The name of a signal that can be handled; SIGRTMIN+N is one, too. Empty: none."""
    try:
        if text:
            number_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def directory(text: str) -> Path:
    """A directory that is there."""
    path = file_path(text)
    if problem := no_directory(path):
        raise argparse.ArgumentTypeError(problem)
    return path.absolute()


def log_level(text: str) -> str:
    """A level of logging."""
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of DEBUG, INFO, WARNING, ERROR")
    return text.upper()


def resume_step(text: str) -> tuple[int, int]:
    """A step, and for the how manieth time it is asked for: 400, 400:2."""
    match = re.fullmatch(r"(\d{1,15})(?::([1-9]\d{0,5}))?", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no step, like 400, or 400:2 to go back there once more")
    return int(match[1]), int(match[2] or 1)


def commas(text: str) -> list[str]:
    """Words with commas between them; two commas stand for one in a word."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]
