"""What a node does of a checkpoint that is on the disk already, in whole or in part."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory.durable import make_durable
from dalsegno.elastic.checkpoint import MANIFEST, files
from dalsegno.elastic.checkpoint.spares import FOLDER, spare_bytes
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


def test_names_without_room_get_that_of_the_spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the bytes of files do: a directory may be what the disk has no room for."""
    memory, run_dir = tmp_path / "memory", tmp_path / RUN
    memory.mkdir()
    manifest = manifest_of(NAME, {0: CONTENT})
    write_own(memory, manifest, 0, CONTENT)
    (run_dir / FOLDER).mkdir(parents=True)
    (run_dir / FOLDER / "=model.pt").write_bytes(b"o")
    make, tries = os.mkdir, []

    def full(path: Any, *more: Any) -> None:
        if str(path).endswith(NAME):
            tries.append(path)
            if spare_bytes(run_dir) or stays:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, *more)

    monkeypatch.setattr(os, "mkdir", full)
    stays = True
    assert "no space left on device" in make_durable(memory / NAME, manifest, [*CONTENT], run_dir, str)
    assert len(tries) == 2
    (run_dir / FOLDER).mkdir()
    (run_dir / FOLDER / "=model.pt").write_bytes(b"o")
    stays = False
    assert make_durable(memory / NAME, manifest, [*CONTENT], run_dir, str) == ""
    assert (run_dir / NAME / MANIFEST).exists()
