"""A trainer with the habits of other people's: `odd_saver.py HABIT OUT LOG STEPS [RESUME]`. It starts without torch.

forks: a child of its own writes each save, slowly, while it trains on; asked to save, it starts one and ends at once.
deaf: it ignores the signal that asks, and SIGTERM.
on term: it saves on SIGTERM, and ends.
floods: it prints more than any console takes.
names: beside its files others lie, with names that few expect; it wants all of them back.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from pathlib import Path

habit, out, log, last = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
step, state, asked = 0, 1.0, False
# Blanks, quotes, a line's end, an option, what shells expand, what is hidden, and many folders.
NAMES = (
    "a b",
    "it's",
    "two\nlines",
    "-rf",
    "\u00fcb\u20acr",
    "*",
    "${save_dir}",
    ".hidden",
    "%s\\",
    "d/" * 40 + "deep",
)


def ask(*_: object) -> None:
    global asked
    asked = True


def write(step: int, state: float, pace: float = 0.0) -> None:
    """A checkpoint as Hugging Face's Trainer makes it, its files in pieces, where they stay."""
    where = out / f"checkpoint-{step}"
    where.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [65536], "data_offsets": [0, 65536]}}).encode()
    with open(where / "model.safetensors", "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(8):
            file.write(b"\1" * 8192)
            time.sleep(pace)  # why: it stands for a slow disk
    if habit == "names":
        for name in NAMES:
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            (where / name).write_text(str(step))
        (where / "empty").mkdir(exist_ok=True)
    (where / "trainer_state.json").write_text(json.dumps({"global_step": step, "state": state}))


def save() -> None:
    if habit != "forks":
        write(step, state)
    elif os.fork() == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        write(step, state, 0.2)
        os._exit(0)


if len(sys.argv) > 5 and sys.argv[5]:
    found = json.loads((Path(sys.argv[5]) / "trainer_state.json").read_text())
    step, state = found["global_step"], found["state"]
    if habit == "names":
        for name in NAMES:
            assert (Path(sys.argv[5]) / name).read_text() == str(step), name
if habit == "deaf":
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM if habit == "on term" else signal.SIGUSR1, ask)
while step < last:
    step, state = step + 1, state * 0.99 + 0.001 * (step % 7)
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps([step, state, int(os.environ.get("DALSEGNO_EPOCH", 0)), os.getpid()]) + "\n")
    if habit == "floods":
        print("x" * 200_000, flush=True)
    time.sleep(0.1)  # why: it stands for the work of a step
    if asked:
        save()
        sys.exit(0)
    if step % 20 == 0:
        save()
save()
