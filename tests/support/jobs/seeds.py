"""Runs random schedules, one for each seed, several at a time: what the commands that do so share."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

__all__ = ["run_seeds"]


def run_seeds(
    module: str,
    description: str,
    plan_of: Callable[[int], object],
    play: Callable[[int, Path], str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Plays the schedules that the command line names. Prints a line for each; the folder of one that fails is kept.

    Args:
        module: what `python -m` names.
        description: for `--help`.
        plan_of: what a seed means, for people.
        play: plays one in a directory; returns what it measured, for people. It raises where something is not true.
        arguments: of the command line.

    Returns:
        0 if all that ran kept what must be true.
    """
    flags = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    flags.add_argument("--seed", type=int, default=1, help="of the first run; the next ones follow it")
    flags.add_argument("--runs", type=int, default=1)
    flags.add_argument("--jobs", type=int, default=1, help="how many at a time")
    options = flags.parse_args(arguments)
    seeds: Iterator[int] = iter(range(options.seed, options.seed + options.runs))
    passed: list[int] = []
    failed: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            plan, began = plan_of(seed), time.monotonic()
            directory = Path(tempfile.mkdtemp(prefix=f"schedule-{seed}-"))
            try:
                said = play(seed, directory)
            except Exception:
                failed.append(seed)
                again = f"again: {sys.executable} -m {module} --seed {seed}; its files: {directory}"
                print(f"FAILED {plan}\n{traceback.format_exc()}\n{again}\n", end="", flush=True)
            else:
                passed.append(seed)
                print(f"passed {plan} ({time.monotonic() - began:.0f} s; {said})\n", end="", flush=True)
                shutil.rmtree(directory, ignore_errors=True)

    def enough(*_: object) -> None:
        # Those that run end first: what they have started is theirs to end.
        nonlocal seeds
        seeds = iter(())

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, enough)
    workers = [threading.Thread(target=work) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(passed)} of {len(passed) + len(failed)} passed" + (f"; failed: {sorted(failed)}" if failed else ""))
    return 1 if failed else 0
