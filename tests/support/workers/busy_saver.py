"""A trainer that saves every 20 steps, behind an evaluation, and when it was asked: at the next step's end, slowly.

It is asked while it evaluates. So the save that was due comes first, and the one that it was asked for afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

# The longest evaluation, a step once it was asked, and the save then.
EVALUATION_SECONDS, STEP_SECONDS, SAVE_SECONDS = 90.0, 4.0, 2.0


def main() -> None:
    save_dir, log, *resume = (Path(word) for word in sys.argv[1:])
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    step, state = 0, 1.0
    if resume:
        found = json.loads((resume[0] / "trainer_state.json").read_text())
        step, state = found["global_step"], found["state"]

    def save(seconds: float) -> None:
        where = save_dir / f"checkpoint-{step}"
        where.mkdir(parents=True, exist_ok=True)
        (where / "model.safetensors").write_bytes(b"\0" * (2 << 20))
        time.sleep(seconds)  # why: it stands for a slow disk
        (where / "trainer_state.json").write_text(json.dumps({"global_step": step, "state": state}))

    while step < 60:
        step, state = step + 1, state * 0.99 + 0.001 * (step % 7)
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps([step, state, int(os.environ.get("DALSEGNO_EPOCH", 0)), os.getpid()]) + "\n")
        time.sleep(STEP_SECONDS if asked else 0.05)  # why: it stands for the work of a step
        if step % 20 == 0:
            until = time.monotonic() + EVALUATION_SECONDS
            while step == 20 and not asked and time.monotonic() < until:
                time.sleep(0.05)  # why: it stands for an evaluation
            save(0.0)
        elif asked:
            save(SAVE_SECONDS)
            sys.exit(0)


if __name__ == "__main__":
    main()
