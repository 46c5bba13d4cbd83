"""On an agent's PYTHONPATH: its converters stop after a few files, until a test lets them go on.

In the agent's environment: DALSEGNO_TEST_HELD_FILES, how many files are begun before the hold; DALSEGNO_TEST_HOLDS, the
directory where `conversion-<pid>` appears when a converter is held. It goes on when `release` appears there.
An audit hook stays in force in processes that are forked later, and the product knows nothing of it.
"""

import os
import sys
import threading
import time
from pathlib import Path

HOLD_LIMIT = 180.0


def _install(holds: Path, files: int) -> None:
    begun: set[str] = set()
    lock = threading.Lock()

    def hold(event: str, arguments: tuple[object, ...]) -> None:
        # path, mode, flags: only files that are begun, the journal apart.
        if event != "open" or not int(str(arguments[2])) & os.O_EXCL or ".universal." not in str(arguments[0]):
            return
        if not str(arguments[0]).endswith(".pt"):
            return
        with lock:
            begun.add(str(arguments[0]))
            if len(begun) <= files:
                return
        (holds / f"conversion-{os.getpid()}").touch()
        deadline = time.monotonic() + HOLD_LIMIT
        while not (holds / "release").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a conversion was held for {HOLD_LIMIT:.0f} s")
            time.sleep(0.02)

    sys.addaudithook(hold)


if "DALSEGNO_TEST_HELD_FILES" in os.environ:
    _install(Path(os.environ["DALSEGNO_TEST_HOLDS"]), int(os.environ["DALSEGNO_TEST_HELD_FILES"]))
