"""1,000 damages of checkpoints, their directory and the master's store, 100,000 in `make test-all`."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from .counts import SEED, count, patience
from .damage_checks import KINDS
from .damage_runs import fuzz_damages
from .damages import JOB, Template

PRIVATE = Path(".dalsegno", JOB)
USUAL = 40
SHARE = {
    "manifests": 0.25,
    "files": 0.15,
    "directories": 0.15,
    "notes": 0.05,
    "private": 0.1,
    "store": 0.15,
    "prune": 0.15,
}

pytestmark = pytest.mark.timeout(patience(USUAL, 200))


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_is_believed_or_ends_anything(kind: str) -> None:
    """No traceback, no hang, nothing damaged called intact, nothing intact lost from sight or deleted."""
    failures = fuzz_damages(kind, SEED, round(count(USUAL) * SHARE[kind]))
    assert not failures, "\n".join(failures)


def test_no_bit_of_the_fence_is_believed(tmp_path: Path) -> None:
    """Each bit of the store's job id and generation, which lie beside the record's rows."""
    template = Template.make(tmp_path / "template")
    whole = (template.root / PRIVATE / "master.sqlite").read_bytes()
    # One column behind the other; the checksum's hex comes next.
    where = next(found.start() for found in re.finditer(JOB.encode() + b"\x04[0-9a-f]{64}", whole))
    for bit in range(8 * (len(JOB) + 1)):
        damaged = bytearray(whole)
        damaged[where + bit // 8] ^= 1 << bit % 8
        root = tmp_path / f"{bit}"
        (root / PRIVATE).mkdir(parents=True)
        (root / PRIVATE / "master.sqlite").write_bytes(damaged)
        KINDS["store"](random.Random(bit), root, template)
