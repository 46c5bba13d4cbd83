"""Where DeepSpeed's files of a checkpoint lie: at the top, or below a trainer's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.elastic.universal.layout import engine_directory

STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def put(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).touch()
    return directory


@pytest.mark.parametrize("place", ["", "global_step12", "checkpoint-12/global_step12"])
def test_it_is_found(tmp_path: Path, place: str) -> None:
    checkpoint = put(tmp_path / "step-12.e1.1", "MANIFEST.json")
    wanted = put(checkpoint / place, *STATES)
    put(checkpoint / "checkpoint-12", "trainer_state.json")
    assert engine_directory(checkpoint) == wanted


def test_files_at_the_top_come_first(tmp_path: Path) -> None:
    put(tmp_path / "global_step12", *STATES)
    put(tmp_path, STATES[1])
    assert engine_directory(tmp_path) == tmp_path


@pytest.mark.parametrize("places", [(), ("global_step1", "global_step2"), ("other/deep",)])
def test_where_nobody_can_tell_it_is_the_checkpoint_itself(tmp_path: Path, places: tuple[str, ...]) -> None:
    for place in places:
        put(tmp_path / place, *STATES)
    assert engine_directory(tmp_path) == tmp_path


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    wanted = put(tmp_path / "a[1]" / "global_step3", *STATES)
    assert engine_directory(tmp_path / "a[1]") == wanted
