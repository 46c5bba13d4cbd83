"""A converter that stops for good after so many files (its first argument), to be killed there."""

from __future__ import annotations

import sys
import threading
from typing import Any

from dalsegno.elastic.universal import __main__ as program
from dalsegno.elastic.universal import output

_files = int(sys.argv.pop(1))
_finished = threading.Semaphore(_files)
_durable = output.ConversionOutput._durable


def _halt(self: output.ConversionOutput, *arguments: Any) -> None:
    _finished.acquire()
    _durable(self, *arguments)


output.ConversionOutput._durable = _halt  # type: ignore[method-assign]
sys.exit(program.main())
