"""How long many nodes take to fetch one large part from memory, over links of so many bytes a second.

Of plain DDP one node's part is the whole state, and its buddy has a copy: all others fetch it at each planned change.
Real agents' memories in one process, over loopback; what each of them sends is held back to the speed of a link, all
its transfers together. *From its holders*: without being passed on by those who have fetched it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from benchmarks.results import report
from dalsegno.agent.memory import service, turnstile
from dalsegno.agent.memory.calls import SendPace
from dalsegno.agent.memory.holdings import StepPart
from dalsegno.protos import control_pb2
from tests.support.checkpoints.memory import RUN, Node, manifest_of, nodes

NODES = (2, 4, 8, 16, 32)
PART_BYTES, LINK_BYTES_PER_SECOND = 32 << 20, 32e6
REPEATS = 3
STEP = "step-10.e1.1"
PIECE_BYTES = 256 << 10


@contextmanager
def links() -> Iterator[None]:
    """What a node serves is held back to the speed of its link."""
    paces: dict[Path, SendPace] = {}
    original = service.read_part

    def read_part(part: StepPart, manifest: bytes) -> Iterator[memoryview]:
        pace = paces.setdefault(part.place.files, SendPace(LINK_BYTES_PER_SECOND))
        for piece in original(part, manifest, PIECE_BYTES):
            pace.wait(len(piece))
            yield piece

    with mock.patch.object(service, "read_part", read_part):
        yield


def seconds(fetching: int, passed_on: bool) -> float:
    """From the start until so many nodes have the part, which two others have."""
    contents = {"state": os.urandom(PART_BYTES)}
    manifest = manifest_of(STEP, {0: contents})
    large = turnstile.LARGE_BYTES if passed_on else 1 << 60
    root = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    with (
        tempfile.TemporaryDirectory(prefix="gathering-", dir=root) as folder,
        mock.patch.object(turnstile, "LARGE_BYTES", large),
        nodes(Path(folder), 2 + fetching) as (holder, buddy, *others),
    ):
        holder.tier.open_epoch(RUN, 1, 0, [buddy.tier.address])
        holder.writes(manifest, 0, contents)
        buddy.holds(STEP, 0)
        where = {0: [holder.tier.address, buddy.tier.address]}

        def gather(node: Node) -> None:
            found = node.gathers(manifest, where, 600.0)
            assert isinstance(found, control_pb2.Checkpoint), found

        with links(), ThreadPoolExecutor(fetching) as pool:
            began = time.monotonic()
            list(pool.map(gather, others))
            return time.monotonic() - began


def main() -> int:
    """Prints a table and writes its JSON."""
    rows = []
    for count in NODES:
        row: dict[str, object] = {"nodes that fetch": count}
        for name, passed_on in (("from its holders (s)", False), ("passed on (s)", True)):
            row[name] = statistics.median(seconds(count, passed_on) for _ in range(REPEATS))
        rows.append(row)
        print("  " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
    once = PART_BYTES / LINK_BYTES_PER_SECOND
    report("gathering", rows, title="One part, fetched by many nodes", settings={"once_over_a_link_s": once})
    return 0
