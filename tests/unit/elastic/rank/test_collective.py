"""Messages of any length between real ranks: one round carries short ones, two carry what is longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from dalsegno.elastic.rank.collective import FORM, HEAD_BYTES, LENGTH_BYTES, GlooCollective, PeerLost
from tests.support.jobs.ports import free_port

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


SILENT = """
import sys
from dalsegno.elastic.rank.collective import GlooCollective, PeerLost
rank, what = int(sys.argv[1]), sys.argv[2]
group = GlooCollective(rank, 2, 0, timeout=3.0)
group.barrier()
if rank == 1:
    if what == "silent":
        sys.stdin.read()
    sys.exit()
try:
    with group.unless(lambda: False):
        group.barrier()
except PeerLost as lost:
    print(type(lost).__name__)
"""


@pytest.mark.parametrize(("what", "kind"), [("silent", "PeerSilent"), ("gone", "PeerLost")])
def test_a_peer_that_is_only_silent_is_told_from_one_that_is_gone(what: str, kind: str) -> None:
    """Nobody is to blame, as far as is known, for not coming within the group's timeout."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SILENT, str(rank), what],
            env={**os.environ, **place, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        # Not `communicate`, which would close what the other one waits for.
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.read().decode() == f"{kind}\n"
    finally:
        for rank in reversed(ranks):
            rank.communicate(timeout=60)


class Never:
    """A collective that the others do not come to."""

    def is_completed(self) -> bool:
        return False


def test_a_wait_in_two_blocks_is_called_off_by_either() -> None:
    """A save of a drain's, in which this rank waits with a problem: also behind the inner block."""
    group, asked = GlooCollective(0, 2, 0), list[str]()

    def gone(name: str, rounds: int) -> bool:
        asked.append(name)
        return asked.count(name) >= rounds

    with group.unless(lambda: gone("outer", 4)):
        with group.unless(lambda: gone("inner", 2)), pytest.raises(PeerLost):
            group._wait(Never())
        assert asked == ["inner", "outer", "inner"]
        with pytest.raises(PeerLost):
            group._wait(Never())
        assert asked.count("outer") == 4
    assert group._gone is None


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
    port = free_port()
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


@pytest.mark.parametrize("said", [FORM, "1"])
def test_a_rank_of_another_version_is_told_so(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no rank of this world: gloo would abort it where messages are not as long as it expects."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store.set("dalsegno/7/0/form", said)
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    group = GlooCollective(0, 1, 7)
    if said == FORM:
        assert group.max([5]) == [5]
        return
    with pytest.raises(RuntimeError, match=f"form {said} and this rank's in form {FORM}.*install the same one"):
        group.max([5])
