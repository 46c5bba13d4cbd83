"""An agent that is started before its command line is known: what it needs is imported meanwhile (`--command-fd`)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError

from ..control.grpc_logs import quiet_grpc
from .arguments import build_parser

__all__ = ["command_line", "launcher"]

_FLAGS = ("--command-fd", "--command_fd")


def launcher() -> ModuleType:
    """`launch`, which imports torch and gRPC: that takes seconds."""
    with quiet_grpc(), _without_collector():
        from . import launch

    return launch


def command_line(given: Sequence[str]) -> tuple[list[str], Mapping[str, str]] | None:
    """The whole command line, and the variables that may stand for flags of it.

    Args:
        given: What it began with. With `--command-fd=N` and no script, the rest comes on that descriptor until it is
            closed, as one JSON object: `arguments`, and `environment`, which is added to this process's.

    Returns:
        Both; None: nothing came, because whoever would have sent it has gone. Of a line that came no variable is a
        flag: whoever sent it has decided about all of them, and what an image has for another launcher (as Kubeflow's
        `PET_NPROC_PER_NODE`) is none of it. Workers inherit the variables all the same.

    Raises:
        UsageError: the descriptor is not open, or what came is something else.
    """
    numbers, begun = _parted(given)
    if len(numbers) != 1 or not numbers[0].isdecimal() or not _lacks_script(begun):
        return list(given), os.environ
    with contextlib.suppress(ImportError):  # what is missing is said when the command line is carried out
        launcher()
    try:
        _check_open(int(numbers[0]))
        with open(int(numbers[0]), encoding="utf-8") as file:
            text = file.read()
        if not text:
            return None
        rest = json.loads(text)
        os.environ.update(rest["environment"])
        line = [*begun, *rest["arguments"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"--command-fd={numbers[0]}: no JSON object of arguments and environment comes there: {error}"
        ) from error
    return line, {name: value for name, value in os.environ.items() if not name.startswith(Variable.FLAG)}


def _parted(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flag's values, behind `=` or as the next word, and the other words."""
    numbers, others, words = list[str](), list[str](), iter(given)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in _FLAGS:
            numbers.append(value if equals else next(words, ""))
        else:
            others.append(word)
    return numbers, others


def _lacks_script(words: Sequence[str]) -> bool:
    """Whether they are flags and their values alone. Of wrong ones the whole command line's parser tells."""
    with contextlib.suppress(UsageError):
        options = build_parser({}).parse_args([*words, ""])
        return options.training_script == "" and not options.training_script_args
    return False


def _check_open(descriptor: int) -> None:
    """Raises ValueError if it is not open. `open` takes a number beyond any descriptor for a path."""
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError) as error:
        raise ValueError("no such descriptor is open") from error


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Around imports: nearly all that they make stays, so looking through it again and again is in vain."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
