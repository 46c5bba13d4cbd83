"""Messages of any length between real ranks: one round carries short ones, two carry what is longer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from dalsegno.elastic.rank.collective import HEAD_BYTES, LENGTH_BYTES

ROOM = HEAD_BYTES - LENGTH_BYTES
RANK = """
import json, sys
from dalsegno.elastic.rank.collective import GlooCollective
rank, lengths = int(sys.argv[1]), json.loads(sys.argv[2])
group = GlooCollective(rank, len(lengths[0]), 0)
said = [group.gather(chr(97 + rank) * (own[rank] - 2)) for own in lengths]
found = [said, group.broadcast({"long": "x" * 5000} if rank == 0 else None), group.max([rank])]
group.barrier()
print(json.dumps(found))
"""


def test_messages_are_gathered_whole_whatever_their_lengths() -> None:
    """Around what fits into the first round, alike and unlike on the ranks; quotes count as two bytes."""
    lengths = [
        [2, 2, 2],
        [ROOM - 1, ROOM, 3],
        [ROOM, ROOM, ROOM],
        [ROOM + 1, 3, ROOM],
        [3, 3, ROOM + 1],
        [100_000, 2, ROOM + 7],
    ]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), json.dumps(lengths)],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    expected = [[chr(97 + rank) * (length - 2) for rank, length in enumerate(own)] for own in lengths]
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        assert json.loads(output) == [expected, {"long": "x" * 5000}, [2]]
