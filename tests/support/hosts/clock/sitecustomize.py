"""The wall clock of a host whose clock is wrong by DALSEGNO_TEST_CLOCK seconds, for all Python code that asks `time`.

Linux has no namespace for it. What `datetime` asks the kernel by itself, and the times of files, stay as they are.
"""

import os
import time

_WRONG_BY = int(os.environ.get("DALSEGNO_TEST_CLOCK", "0"))
if _WRONG_BY and not hasattr(time, "wrong_by"):
    time.wrong_by = _WRONG_BY  # type: ignore[attr-defined]
    _time, _time_ns, _gmtime, _localtime = time.time, time.time_ns, time.gmtime, time.localtime
    time.time = lambda: _time() + _WRONG_BY
    time.time_ns = lambda: _time_ns() + _WRONG_BY * 1_000_000_000
    time.gmtime = lambda seconds=None: _gmtime(time.time() if seconds is None else seconds)
    time.localtime = lambda seconds=None: _localtime(time.time() if seconds is None else seconds)
