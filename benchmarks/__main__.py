"""`python -m benchmarks [NAME ...]`: runs all benchmarks, or those named; `NAME FLAG ...` gives one its flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import (
    changes,
    checksums,
    convert,
    edge,
    exchange,
    flash,
    gathering,
    gpu,
    leaders,
    lost,
    memory,
    pause,
    peers,
    record,
    rendezvous,
    reshard,
    sampler,
    saving,
    start,
    successor,
    upload,
)
from examples.demo import end_by_signals

BENCHMARKS: dict[str, Callable[[], int]] = {
    "checksums": checksums.main,
    "sampler": sampler.main,
    "saving": saving.main,
    "memory": memory.main,
    "lost": lost.main,
    "exchange": exchange.main,
    "convert": convert.main,
    "reshard": reshard.main,
    "changes": changes.main,
    "pause": pause.main,
    "peers": peers.main,
    "record": record.main,
    "edge": edge.main,
    "leaders": leaders.main,
    "flash": flash.main,
    "gathering": gathering.main,
    "rendezvous": rendezvous.main,
    "gpu": gpu.main,
    "start": start.main,
    "successor": successor.main,
    "upload": upload.main,
}
# Benchmarks that take flags of their own.
WITH_FLAGS: dict[str, Callable[[Sequence[str]], int]] = {
    "convert": convert.main,
    "flash": flash.main,
    "gpu": gpu.main,
    "leaders": leaders.main,
    "lost": lost.main,
    "pause": pause.main,
    "rendezvous": rendezvous.main,
    "start": start.main,
    "successor": successor.main,
    "upload": upload.main,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every benchmark that ran succeeded."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end_by_signals()
    if len(given) > 1 and given[0] in WITH_FLAGS and given[1].startswith("-"):
        return WITH_FLAGS[given[0]](given[1:])
    flags = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    flags.add_argument("name", nargs="*", choices=[[], *BENCHMARKS], help=f"of {', '.join(BENCHMARKS)}")
    names = flags.parse_args(given).name or list(BENCHMARKS)
    codes = []
    for name in names:
        print(f"== {name}", flush=True)
        codes.append(BENCHMARKS[name]())
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
