"""``python -m dalsegno.elastic.universal --source DIR --target DIR [--earlier DIR ...]``: one conversion.

Standard output carries one JSON object per line and nothing else: ``{"bytes_total"}`` (approximate) once it is known,
``{"files_done", "files_total"}`` after each file, ``{"bytes_done"}`` (read, written and synced) every second while
bytes move, and last ``{"state", "message"}`` with state READY, SOURCE_BAD, ENVIRONMENT or IMPOSSIBLE. Exit codes: 0,
65, 74, 69 (2: bad usage).

With ``--anywhere`` source and target may be any directories, and an unfinished target is continued (``dalsegno
convert``). Without it both are a run's checkpoints, and the target is the lease's own.

With ``--nice N`` it yields to what trains beside it, in computing as in reading and writing.

With ``--standby`` in place of the directories the process imports what it needs, says ``{"state": "WARM"}`` and waits
for one line on standard input, a JSON object with ``source``, ``target`` and, if wanted, ``earlier`` (a list) and
``digest``; end of file instead of a line: it was not needed, exit code 0.

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

from dalsegno.protos.priority import yield_to_others

from ..checkpoint.files import Meter
from .conversion import Watch, Wish, convert
from .effort import MEMORY_BYTES, THREADS, Effort
from .errors import EXIT_READY, ConversionError
from .standalone import convert_directory

# Seconds.
BYTES_EVERY_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one conversion and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dalsegno.elastic.universal", description=__doc__)
    parser.add_argument("--source", type=Path, help="the sealed sharded checkpoint")
    parser.add_argument("--target", type=Path, help="this lease's directory, not there yet")
    parser.add_argument("--earlier", type=Path, action="append", default=[], help="directory of an earlier lease")
    parser.add_argument("--digest", help="the source's recorded digest")
    parser.add_argument("--upstream", action="store_true", help="use DeepSpeed's own converter")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads that work at once (default: %(default)s)")
    parser.add_argument("--memory", type=int, default=MEMORY_BYTES, help="bytes of buffers (default: %(default)s)")
    parser.add_argument("--anywhere", action="store_true", help="any directories; go on with a target that was begun")
    parser.add_argument("--stage", type=int, help="the ZeRO stage that will load it (with --anywhere)")
    parser.add_argument("--reset-optimizer", action="store_true", help="forget its state (with --anywhere)")
    parser.add_argument("--allow", action="append", default=[], help="class that may be unpickled (with --anywhere)")
    parser.add_argument("--no-latest", action="store_true", help="leave latest_universal alone (with --anywhere)")
    parser.add_argument("--nice", type=int, default=0, help="priority below the parent's (default: %(default)s)")
    parser.add_argument("--standby", action="store_true", help="get warm, then read the order from standard input")
    options = parser.parse_args(arguments)
    if options.standby == (options.source is not None) or (options.source is None) != (options.target is None):
        parser.error("give --source and --target, or --standby")
    if not options.anywhere and (options.stage or options.reset_optimizer or options.allow or options.no_latest):
        parser.error("--stage, --reset-optimizer, --allow and --no-latest are for --anywhere")
    try:
        effort = Effort(options.threads, options.memory)
        wish = Wish(effort, options.stage, options.reset_optimizer, options.upstream, tuple(options.allow))
    except ValueError as error:
        parser.error(str(error))
    if options.nice:
        yield_to_others(options.nice)
    say = _Lines()
    _end_with_parent()
    if options.standby and not _receive_order(options, say):
        return EXIT_READY
    try:
        message = _convert(options, wish, say)
    except ConversionError as error:
        say(state=error.state, message=str(error))
        return error.exit_code
    say(state="READY", message=message)
    return EXIT_READY


def _convert(options: argparse.Namespace, wish: Wish, say: _Lines) -> str:
    watch = Watch(
        progress=lambda done, total: say(files_done=done, files_total=total),
        moved=Meter(lambda done: say(bytes_done=done), BYTES_EVERY_SECONDS),
        planned=lambda total: say(bytes_total=total),
    )
    # Absolute: the conversion may change the working directory.
    source, target = options.source.absolute(), options.target.absolute()
    if options.anywhere:
        made = convert_directory(source, target, wish=wish, watch=watch, latest=not options.no_latest)
        return "" if made else f"{options.target} was complete already"
    earlier = [path.absolute() for path in options.earlier]
    convert(source, target, earlier=earlier, digest=options.digest, wish=wish, watch=watch)
    return ""


class _Lines:
    """Standard output, reserved for our JSON lines: what libraries print goes to standard error. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def __call__(self, **line: object) -> None:
        with self._lock:
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()


def _receive_order(options: argparse.Namespace, say: _Lines) -> bool:
    """Reads the order from standard input into ``options`` once warm; False: no order will come."""
    from . import check, forms, source, streaming  # noqa: F401 (imported now because that takes seconds)

    say(state="WARM")
    line = sys.stdin.readline()
    if not line:
        return False
    order = json.loads(line)
    options.source, options.target = Path(order["source"]), Path(order["target"])
    options.earlier = [Path(path) for path in order.get("earlier", ())]
    options.digest = order.get("digest")
    return True


def _end_with_parent() -> None:
    """Ends this process at once when its parent is gone, however the parent ended.

    In addition to the agent's keeper. Not PR_SET_PDEATHSIG: that fires when the parent's *thread* ends.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:
        return  # no pidfds in this kernel, or the parent is in another PID namespace: only the keeper is left

    def watch() -> None:
        poller = select.poll()
        poller.register(parent, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="dalsegno-parent", daemon=True).start()


if __name__ == "__main__":
    # It runs beside trainings, and its libraries would look for accelerators.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main())
