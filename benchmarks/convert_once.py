"""One conversion or copy for `benchmarks.convert`, in a process of its own: ``python -m benchmarks.convert_once WAY``.

It imports what it needs, prints a line, waits for a line on standard input, then runs: ``SOURCE TARGET`` follow the way
on the command line. At the end it prints how long that took, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Convert = Callable[[Path, Path], object]


def _copy(threads: int) -> Convert:
    from dalsegno.elastic.checkpoint.files import fsync_directory

    def copy(source: Path, target: Path) -> None:
        def one(path: Path) -> None:
            shutil.copyfile(path, target / path.name)
            descriptor = os.open(target / path.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        target.mkdir()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, sorted(source.iterdir())))
        fsync_directory(target)
        fsync_directory(target.parent)

    return copy


def _copy_in_parallel() -> Convert:
    from dalsegno.elastic.universal import Effort

    return _copy(Effort.threads)


def _ours() -> Convert:
    from dalsegno.elastic.universal import check, convert, streaming  # noqa: F401 (imported before the clock starts)

    return convert


def _deepspeeds() -> Convert:
    from deepspeed.checkpoint import ds_to_universal

    def theirs(source: Path, target: Path) -> None:
        # The defaults of its command line, except for the state that it wants injected.
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(source),
                output_folder=str(target),
                num_extract_workers=4,
                num_merge_workers=2,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )

    return theirs


WAYS: dict[str, Callable[[], Convert]] = {
    "copy": lambda: _copy(1),
    "copy, parallel": _copy_in_parallel,
    "ours": _ours,
    "DeepSpeed": _deepspeeds,
}


def main() -> None:
    way, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    convert = WAYS[way]()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed's converter prints
    print("ready", file=answers, flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    convert(source, target)
    print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)


if __name__ == "__main__":
    main()
