"""What a node does of a checkpoint that is on the disk already, in whole or in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.agent.memory.durable import make_durable
from dalsegno.elastic.checkpoint import MANIFEST, files
from tests.support.checkpoints.memory import RUN, manifest_of, write_own

NAME = "step-10.e3.1"
CONTENT = {"large.pt": b"0123456789" * 100, "small.pt": b"small"}
PIECE = 10


@pytest.mark.parametrize("here", [[*CONTENT], ["small.pt"]])
def test_reading_what_is_there_is_a_sign_of_life(
    here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each piece: a file that takes longer to read than a disk may be silent is not a disk that hangs.

    So it is with a file of this node, and with one that another node has written.
    """
    monkeypatch.setattr(files, "READ_BYTES", PIECE)
    memory, run_dir = tmp_path / "memory", tmp_path / RUN
    memory.mkdir()
    manifest = manifest_of(NAME, {0: CONTENT})
    write_own(memory, manifest, 0, CONTENT)
    assert make_durable(memory / NAME, manifest, [*CONTENT], run_dir, str, seals=False) == ""

    def try_it(steps: int | None) -> tuple[str, int]:
        """Gives up at so many signs of life."""
        signs = 0

        def stopped() -> str:
            nonlocal signs
            signs += 1
            return "it is given up" if signs == steps else ""

        return make_durable(memory / NAME, manifest, here, run_dir, stopped), signs

    pieces = len(CONTENT["large.pt"]) // PIECE
    assert try_it(pieces // 2) == ("it is given up", pieces // 2)
    assert not (run_dir / NAME / MANIFEST).exists()
    why, signs = try_it(None)
    assert why == ""
    assert signs >= pieces
    assert (run_dir / NAME / MANIFEST).exists()
