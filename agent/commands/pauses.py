"""`dalsegno pauses DIR`: where the time of each change went, read from the marks of `dlrover-run --trace-dir DIR`."""

from __future__ import annotations

import argparse

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.protos.options import no_directory
from dalsegno.protos.trace import read

from ..decisions.events import EXIT_FAILED, EXIT_FINISHED
from ..decisions.pauses import PARTS, WorldChange, pauses

__all__ = ["lines", "show"]


def show(options: argparse.Namespace) -> int:
    """Prints a line for each change, and one for each of its parts.

    Raises:
        OSError: the directory cannot be read.
    """
    if problem := no_directory(options.directory):
        raise ValueError(f"{problem}: give the directory of dlrover-run --trace-dir")
    found = pauses(read(options.directory))
    if not found:
        print(f"no change of the world in {options.directory}: the worlds before and after it must have made a step")
        return EXIT_FAILED
    named = len({pause.run for pause in found}) > 1
    for pause in found:
        print("\n".join(map(printable, lines(pause, named))))
    return EXIT_FINISHED if all(pause.seconds >= 0 for pause in found) else EXIT_FAILED


def lines(pause: WorldChange, named: bool = False) -> list[str]:
    """The lines about one change, for people, with its run's name if that is `named`."""
    epoch = f"{pause.run}, epoch {pause.epoch}" if named and pause.run else f"epoch {pause.epoch}"
    if pause.seconds < 0:
        # A run's id comes again in a directory that was emptied, and in another job's.
        return [f"{epoch}: marks of several runs under one name are mixed: give each run a --trace-dir of its own"]
    how = "planned" if pause.planned else f"unplanned, {pause.lost} steps made again"
    ranks = "1 rank" if pause.ranks == 1 else f"{pause.ranks} ranks"
    width = max(len(name) for name in (*PARTS, *pause.parts))
    rows = [f"  {name:<{width}} {seconds:8.3f} s" for name, seconds in pause.parts.items()]
    return [f"{epoch}, {ranks}: {pause.seconds:.3f} s ({how})", *rows]
