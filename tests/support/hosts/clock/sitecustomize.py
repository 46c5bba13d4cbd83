"""The wall clock of a host whose clock is wrong by DALSEGNO_TEST_CLOCK seconds, for all Python code that asks `time`.

Linux has no namespace for it. What `datetime` asks the kernel by itself, and the times of files, stay as they are. So
does what gRPC's Python asks: it hands deadlines to gRPC's core, which has the kernel's clock.
"""

import os
import sys
import time

_WRONG_BY = int(os.environ.get("DALSEGNO_TEST_CLOCK", "0"))
if _WRONG_BY and not hasattr(time, "wrong_by"):
    time.wrong_by = _WRONG_BY  # type: ignore[attr-defined]
    _time, _time_ns, _gmtime, _localtime = time.time, time.time_ns, time.gmtime, time.localtime

    def _wrong() -> float:
        of_grpc = sys._getframe(1).f_globals.get("__name__", "").split(".")[0] == "grpc"
        return _time() + (0 if of_grpc else _WRONG_BY)

    time.time = _wrong
    time.time_ns = lambda: _time_ns() + _WRONG_BY * 1_000_000_000
    time.gmtime = lambda seconds=None: _gmtime(time.time() if seconds is None else seconds)
    time.localtime = lambda seconds=None: _localtime(time.time() if seconds is None else seconds)
