"""``python -m dalsegno.elastic.universal --source DIR --target DIR [--earlier DIR ...]``: one conversion.

Standard output carries one JSON object per line and nothing else: ``{"files_done", "files_total"}`` as it goes on, and
last ``{"state", "message"}`` with state READY, SOURCE_BAD or ENVIRONMENT. Exit codes: 0, 65, 74 (2: bad usage).
The process ends when its parent does.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from .convert import convert
from .errors import EXIT_READY, ConversionError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one conversion and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dalsegno.elastic.universal", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="the sealed sharded checkpoint")
    parser.add_argument("--target", type=Path, required=True, help="this lease's directory, not there yet")
    parser.add_argument("--earlier", type=Path, action="append", default=[], help="directory of an earlier lease")
    parser.add_argument("--digest", help="the source's recorded digest")
    parser.add_argument("--upstream", action="store_true", help="use DeepSpeed's own converter")
    options = parser.parse_args(arguments)
    out = _private_stdout()
    _end_with_parent()

    def say(**line: object) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        # Absolute: the conversion may change the working directory.
        convert(
            options.source.absolute(),
            options.target.absolute(),
            earlier=[path.absolute() for path in options.earlier],
            digest=options.digest,
            progress=lambda done, total: say(files_done=done, files_total=total),
            upstream=options.upstream,
        )
    except ConversionError as error:
        say(state=error.state, message=str(error))
        return error.exit_code
    say(state="READY", message="")
    return EXIT_READY


def _private_stdout() -> TextIO:
    """The standard output for us alone: what libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _end_with_parent() -> None:
    """Ends this process at once when the parent is gone, whichever way it went.

    In addition to the agent's keeper. Not PR_SET_PDEATHSIG: that fires when the parent's *thread* ends.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:
        return  # a kernel without pidfds, or a parent out of our sight (another PID namespace): the keeper is left

    def watch() -> None:
        poller = select.poll()
        poller.register(parent, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="dalsegno-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
