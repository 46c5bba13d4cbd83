"""A converter that stops for good after so many files (its first argument), to be killed there."""

from __future__ import annotations

import sys
import threading
from typing import Any

from dalsegno.elastic.universal import __main__ as program
from dalsegno.elastic.universal import output

_files = int(sys.argv.pop(1))
_finished = threading.Semaphore(_files)
_finish = output.Output._finish


def _halt(self: output.Output, *arguments: Any) -> None:
    _finished.acquire()
    _finish(self, *arguments)


output.Output._finish = _halt  # type: ignore[method-assign]
sys.exit(program.main())
