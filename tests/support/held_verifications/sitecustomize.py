"""On an agent's PYTHONPATH: it stops in the middle of a verification, until a test lets it go on.

In the agent's environment: DALSEGNO_TEST_HOLDS, the directory where `verification` appears when one is held. It goes on
when `release` appears there. An audit hook: the product knows nothing of it. Of a node's processes only the agent is
held; its workers read checkpoints too.
"""

import os
import sys
import time
from pathlib import Path

HOLD_LIMIT = 180.0


def _install(holds: Path) -> None:
    def hold(event: str, arguments: tuple[object, ...]) -> None:
        # path, mode, flags: a checkpoint's file that is read.
        if event != "open" or int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR):
            return
        if not str(arguments[0]).endswith(".pt") or not sys.argv[0].endswith("dlrover-run"):
            return
        (holds / "verification").touch()
        deadline = time.monotonic() + HOLD_LIMIT
        while not (holds / "release").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a verification was held for {HOLD_LIMIT:.0f} s")
            time.sleep(0.02)

    sys.addaudithook(hold)


if "DALSEGNO_TEST_HOLDS" in os.environ:
    _install(Path(os.environ["DALSEGNO_TEST_HOLDS"]))
