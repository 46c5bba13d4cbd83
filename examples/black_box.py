"""A trainer that knows nothing of us: it saves as Hugging Face's does, and on SIGUSR1. It starts fast, without torch.

Its loss follows from its state, which is all that it saves; so a curve shows whether it went on from what it had saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--output_dir", type=Path, required=True)
    flags.add_argument("--resume_from_checkpoint", type=Path)
    flags.add_argument("--log", type=Path, required=True)
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--save-every", type=int, default=20)
    flags.add_argument("--pace", type=float, default=0.05)
    flags.add_argument("--end-when-asked", action="store_true")
    flags.add_argument("--size", type=int, default=65536, help="bytes of a checkpoint")
    flags.add_argument("--go-on", action="store_true", help="a save that fails is a line, and no end")
    options = flags.parse_args()
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, ask)
    step, state = 0, 1.0
    if options.resume_from_checkpoint is not None:
        found = json.loads((options.resume_from_checkpoint / "trainer_state.json").read_text())
        step, state = found["global_step"], found["state"]

    def save() -> None:
        where = options.output_dir / f"checkpoint-{step}"
        try:
            where.mkdir(parents=True, exist_ok=True)
            (where / "model.safetensors").write_bytes(b"\0" * options.size)
            (where / "trainer_state.json").write_text(json.dumps({"global_step": step, "state": state}))
        except OSError as error:
            if not options.go_on:
                raise
            print(f"step {step} is not saved: {error}", file=sys.stderr, flush=True)
            shutil.rmtree(where, ignore_errors=True)

    while step < options.steps:
        step, state = step + 1, state * 0.99 + 0.001 * (step % 7)
        with open(options.log, "a", encoding="utf-8") as file:
            file.write(json.dumps([step, state, int(os.environ.get("DALSEGNO_EPOCH", 0)), os.getpid()]) + "\n")
        time.sleep(options.pace)  # why: it stands for the work of a step
        if asked:
            asked = False
            save()
            if options.end_when_asked:
                sys.exit(0)
        elif step % options.save_every == 0:
            save()
    save()


if __name__ == "__main__":
    main()
