"""`python -m tests.fuzz calls|frames|damages --seed 1 --count 1000`: one fuzzer, by hand."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .arena import fuzz
from .calls import FAMILIES
from .frames import fuzz_frames


def main() -> int:
    """Returns 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=("calls", "frames"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="of calls; all by default")
    options = parser.parse_args()
    began = time.monotonic()
    failures = []
    if options.what == "frames":
        failures = [fuzz_frames(options.seed, options.count)[0]]
    else:
        with tempfile.TemporaryDirectory() as directory:
            for family in options.family or FAMILIES:
                failure = fuzz(Path(directory), family, options.seed, options.count)
                failures.append("" if failure is None else f"{family}: {failure}")
    print("\n".join(filter(None, failures)) or "everything held")
    print(f"{time.monotonic() - began:.1f} s")
    return 1 if any(failures) else 0


if __name__ == "__main__":
    sys.exit(main())
