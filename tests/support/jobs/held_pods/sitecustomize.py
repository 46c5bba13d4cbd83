"""On a pod's PYTHONPATH: one of its processes stops in the middle of a phase, until a test lets it go on.

In the environment of all processes of a pod:
    DALSEGNO_TEST_HELD   the phase, see `PHASES`
    DALSEGNO_TEST_HOLDS  a directory: nobody is held before `armed` is there; `<phase>-<pid>` appears when a process is
                         held, which goes on when `release` is there

An audit hook stays in force in processes that are forked later, and the product knows nothing of it.
"""

import os
import re
import sys
import time
from pathlib import Path

HOLD_LIMIT = 180.0
READS, WRITES = "reads", "writes"
# What is opened then, how, and by whom: a part of the program's path; "": anybody.
PHASES = {
    # The trainer has written its model, and not its state.
    "saving": (r"/e\d+/checkpoint-\d+/trainer_state\.json", WRITES, ""),
    # The agent has linked the trainer's files, and copies them.
    "copying": (r"/step-[^/]+/\.copy-\d+", WRITES, ""),
    # All is copied, and the manifest is not written.
    "sealing": (r"/step-[^/]+/MANIFEST\.json", WRITES, ""),
    # It is sealed, and nobody was told of it.
    "sealed": (r"/e\d+/[^/]*-adopted", WRITES, ""),
    # The entry looks for the newest checkpoint that verifies.
    "recovering": (r"/step-[^/]+/model\.safetensors", READS, "commands/dalsegno"),
    # The agent has the lease, and verifies what it resumes from.
    "resuming": (r"/step-[^/]+/model\.safetensors", READS, "commands/dlrover_run"),
}
PHASE, HOLDS = os.environ.get("DALSEGNO_TEST_HELD", ""), Path(os.environ.get("DALSEGNO_TEST_HOLDS", "."))


def hold(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or not re.search(f"{pattern}$", str(arguments[0])):
        return
    writes = bool(int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR))
    if writes != (how == WRITES) or who not in sys.argv[0] or not (HOLDS / "armed").exists():
        return
    if not (HOLDS / "release").exists():
        (HOLDS / f"{PHASE}-{os.getpid()}").touch()
    deadline = time.monotonic() + HOLD_LIMIT
    while not (HOLDS / "release").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{PHASE} was held for {HOLD_LIMIT:.0f} s")
        time.sleep(0.02)


if PHASE:
    pattern, how, who = PHASES[PHASE]
    sys.addaudithook(hold)
