"""What a checkpoint's configuration, files and names say of its layout, before anything is made of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from dalsegno.elastic.universal import convert_directory
from dalsegno.elastic.universal.errors import EnvironmentFailed, Impossible
from dalsegno.elastic.universal.layout import refuse_unconvertible
from tests.support.checkpoints.shards import write_shards

PLAIN = {"zero_optimization": {"stage": 1}}
ROBIN = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}


def given(config: dict[str, Any], how: str, directory: Path) -> Any:
    """The configuration as DeepSpeed puts it into a checkpoint: as it was given to `initialize`."""
    text = json.dumps(config)
    if how == "encoded":
        return base64.urlsafe_b64encode(text.encode()).decode()
    if how == "object":
        return config
    # DeepSpeed reads these files with hjson.
    path = directory / "ds.json"
    path.write_text(f"# ours\n{text}" if how == "commented" else text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("how", ["object", "file", "commented", "encoded"])
def test_a_layout_is_judged_by_it(how: str, tmp_path: Path) -> None:
    refuse_unconvertible({"ds_config": given(PLAIN, how, tmp_path)})
    with pytest.raises(Impossible, match="round_robin_gradients"):
        refuse_unconvertible({"ds_config": given(ROBIN, how, tmp_path)})


@pytest.mark.parametrize("text", [None, "[1, 2]", "{"])
def test_a_file_that_cannot_be_read_here_may_be_readable_elsewhere(text: str | None, tmp_path: Path) -> None:
    """Another node has it, maybe: the checkpoint is not to blame."""
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(EnvironmentFailed, match=r"ds\.json") as raised:
        refuse_unconvertible({"ds_config": str(path)})
    assert not isinstance(raised.value, Impossible)


def test_none_is_needed() -> None:
    refuse_unconvertible({})


def test_files_that_are_universal_already(tmp_path: Path) -> None:
    """Nothing was lost there."""
    write_shards(tmp_path / "global_step3", {"weight": (3, 5)})
    convert_directory(tmp_path / "global_step3", tmp_path / "universal")
    with pytest.raises(Impossible, match=r"^universal is universal already: it loads as it is; for another --stage"):
        convert_directory(tmp_path / "universal", tmp_path / "again")


@pytest.mark.parametrize("name", ["../../../stray", "."])
def test_a_buffers_name_stays_below_the_target(name: str, tmp_path: Path) -> None:
    """A parameter's does, too; but these are in no optimizer's list."""
    source = tmp_path / "global_step3"
    write_shards(source, {"weight": (3, 5)})
    content = torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)
    content["module"][name] = torch.ones(2)
    torch.save(content, source / "mp_rank_00_model_states.pt")
    with pytest.raises(Impossible, match="cannot be a directory's"):
        convert_directory(source, tmp_path / "below" / "universal")
    assert not (tmp_path / "stray").exists()
