"""`python -m tests.fuzz calls|frames|directives|damages --seed 1 --count 1000`: one fuzzer, by hand."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .arena import fuzz
from .calls import FAMILIES
from .damage_checks import KINDS
from .damage_runs import damages_place, fuzz_damages, run_damages
from .directives import fuzz_directives
from .frames import fuzz_frames


def _failures(options: argparse.Namespace) -> Iterator[str]:
    if options.what == "frames":
        yield fuzz_frames(options.seed, options.count)[0]
    elif options.what == "directives":
        yield fuzz_directives(options.seed, options.count)[0]
    elif options.what == "damages":
        for kind in options.kind or KINDS:
            yield from fuzz_damages(kind, options.seed, options.count)
    else:
        with tempfile.TemporaryDirectory() as directory:
            for family in options.kind or FAMILIES:
                failure = fuzz(Path(directory), family, options.seed, options.count)
                yield "" if failure is None else f"{family}: {failure}"


def main() -> int:
    """Returns 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=("calls", "frames", "directives", "damages"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument(
        "--kind", action="append", help=f"of calls: {', '.join(FAMILIES)}; of damages: {', '.join(KINDS)}; else all"
    )
    parser.add_argument("--first", type=int, help="the number of one damage, to have it alone in this process")
    options = parser.parse_args()
    if options.first is not None and options.what != "damages":
        parser.error("--first: only damages have numbers")
    if options.first is not None:
        failed = 0
        for kind in options.kind or KINDS:
            with damages_place() as place:
                for number, wrong in run_damages(place, kind, options.seed, options.first, options.count):
                    print(number, wrong, flush=True)
                    failed += bool(wrong)
        return 1 if failed else 0
    began = time.monotonic()
    failures = [failure for failure in _failures(options) if failure]
    print("\n".join(failures) or "everything held")
    print(f"{time.monotonic() - began:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
