"""DeepSpeed's own converter, behind guards.

Used for layouts that the streaming converter does not cover. What is guarded against, each reproduced with 0.19.8: a
reused output directory (stale ``tmp/`` corrupts silently), ``[`` and ``+`` in a path (files dropped, an exception), a
trailing slash (``latest_universal`` in the wrong place), and pool workers that outlive a killed parent (here it runs
without a pool). What it leaves out it does not say; the completeness check afterwards does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WORK = ".work"
# Seconds between two looks at how much there is: a walk over all files, perhaps of a network disk.
LOOK_EVERY = 5.0


def stage(source: Path, target: Path, moved: Callable[[int], None] = lambda count: None) -> Path:
    """Converts ``source`` in a working directory inside ``target``.

    Changes the process's working directory while it runs: meant for a process of its own.

    Args:
        source: A sharded checkpoint of DeepSpeed.
        target: The lease's directory, which must not hold a working directory yet.
        moved: Told, on a thread, by how many bytes the working directory has grown.

    Returns:
        The directory that holds the converter's output, in ``target / WORK``; the caller moves files out of it by link
        and then calls ``clear``.

    Raises:
        FileExistsError: ``target`` was used before.
        Exception: Whatever the converter raises.
    """
    from deepspeed.checkpoint import ds_to_universal

    work = target / WORK
    work.mkdir()
    # Relative names without special characters: the converter globs and builds regular expressions from its paths.
    os.symlink(source.resolve(), work / "in", target_is_directory=True)
    (work / "out").mkdir()
    arguments = argparse.Namespace(
        input_folder="in",
        output_folder="out",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with _inside(work), _watched(work, moved):
        ds_to_universal.main(arguments)
    return work / "out"


def clear(target: Path) -> None:
    """Removes the working directory, so that ``target`` can be sealed."""
    shutil.rmtree(target / WORK)


@contextmanager
def _watched(directory: Path, moved: Callable[[int], None]) -> Iterator[None]:
    """DeepSpeed's converter says nothing while it works: what it writes is seen from the outside."""
    stop = threading.Event()

    def watch() -> None:
        most = 0
        while not stop.wait(LOOK_EVERY):
            now = _size_of(directory)
            if now > most:
                moved(now - most)
                most = now

    watcher = threading.Thread(target=watch, name="dalsegno-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _size_of(directory: Path) -> int:
    """Bytes in all files below; what is taken away meanwhile does not count."""
    total = 0
    for current, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(current, name)).st_size
    return total


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
