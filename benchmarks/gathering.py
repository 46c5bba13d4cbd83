"""How long many nodes take to fetch one large part from memory, over links of so many bytes a second.

Of plain DDP one node's part is the whole state, and its buddy has a copy: all others fetch it at each planned change.
Real agents' memories in one process, over loopback; what each of them sends is held back to the speed of a link, all
its transfers together. *From its holders*: without being passed on by those who have fetched it. *As a whole*: only by
those who have all of it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

from benchmarks.results import report
from dalsegno.agent.memory import turnstile
from dalsegno.agent.memory.arrivals import Arrivals
from dalsegno.protos import control_pb2
from tests.support.checkpoints.memory import RUN, Node, links, manifest_of, nodes

NODES = (2, 4, 8, 16, 32)
PART_BYTES, LINK_BYTES_PER_SECOND = 32 << 20, 32e6
REPEATS = 3
STEP = "step-10.e1.1"
PIECE_BYTES = 256 << 10
HOLDERS, WHOLE, PASSED_ON = "from its holders", "passed on as a whole", "passed on"


def seconds(fetching: int, way: str) -> float:
    """From the start until so many nodes have the part, which two others have."""
    contents = {"state": os.urandom(PART_BYTES)}
    manifest = manifest_of(STEP, {0: contents})
    large = 1 << 60 if way == HOLDERS else turnstile.LARGE_BYTES
    root = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    with (
        tempfile.TemporaryDirectory(prefix="gathering-", dir=root) as folder,
        mock.patch.object(turnstile, "LARGE_BYTES", large),
        as_a_whole() if way == WHOLE else nullcontext(),
        nodes(Path(folder), 2 + fetching) as (holder, buddy, *others),
    ):
        holder.tier.open_epoch(RUN, 1, 0, [buddy.tier.address])
        holder.writes(manifest, 0, contents)
        buddy.holds(STEP, 0)
        where = {0: [holder.tier.address, buddy.tier.address]}

        def gather(node: Node) -> None:
            found = node.gathers(manifest, where, 600.0)
            assert isinstance(found, control_pb2.Checkpoint), found

        with links(LINK_BYTES_PER_SECOND, PIECE_BYTES), ThreadPoolExecutor(fetching) as pool:
            began = time.monotonic()
            list(pool.map(gather, others))
            return time.monotonic() - began


@contextmanager
def as_a_whole() -> Iterator[None]:
    """What still comes is not handed on."""
    with mock.patch.object(Arrivals, "find", return_value=None):
        yield


def main() -> int:
    """Prints a table and writes its JSON."""
    rows = []
    for count in NODES:
        row: dict[str, object] = {"nodes that fetch": count}
        for way in (HOLDERS, WHOLE, PASSED_ON):
            row[f"{way} (s)"] = statistics.median(seconds(count, way) for _ in range(REPEATS))
        rows.append(row)
        print("  " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
    once = PART_BYTES / LINK_BYTES_PER_SECOND
    report("gathering", rows, title="One part, fetched by many nodes", settings={"once_over_a_link_s": once})
    return 0
