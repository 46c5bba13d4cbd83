"""`python -m benchmarks [NAME ...]`: runs all benchmarks, or those named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import changes, checksums, convert, exchange, peers, reshard, sampler, saving

BENCHMARKS: dict[str, Callable[[], int]] = {
    "checksums": checksums.main,
    "sampler": sampler.main,
    "saving": saving.main,
    "exchange": exchange.main,
    "convert": convert.main,
    "reshard": reshard.main,
    "changes": changes.main,
    "peers": peers.main,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every benchmark that ran did."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    flags.add_argument("name", nargs="*", choices=[[], *BENCHMARKS], help=f"of {', '.join(BENCHMARKS)}")
    names = flags.parse_args(arguments).name or list(BENCHMARKS)
    codes = []
    for name in names:
        print(f"== {name}", flush=True)
        codes.append(BENCHMARKS[name]())
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
