"""Shows a universal checkpoint with the names and the common state that DeepSpeed's loader of a given stage expects.

Stages 1 and 2 on one side and stage 3 on the other make universal files that do not load into each other, although the
values are the same: the model states have other names, and ``optimizer_state.pt`` is another dictionary. DeepSpeed also
finds no files if a path contains ``[``. A temporary directory of links solves both. Another such directory makes
DeepSpeed load a sharded checkpoint as if it were universal.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dalsegno.protos.contract import Variable

from ..universal.forms import NESTED, ZERO, Form, model_states_name
from ..universal.loading import load
from ..universal.source import COMMON_STATE


def model_states_file(directory: Path, model_rank: int = 0) -> Path:
    """The file of model states of the first rank of one rank of model parallelism.

    Raises:
        RuntimeError: There is none.
    """
    for name in (f"zero_pp_rank_0_mp_rank_{model_rank:02d}", f"mp_rank_{model_rank:02d}"):
        path = directory / f"{name}_model_states.pt"
        if path.is_file():
            return path
    if model_rank > 0:  # it was saved with fewer model-parallel ranks
        return model_states_file(directory)
    raise RuntimeError(f"no model states in {directory}")


def model_states_of(rank: int, first: Path) -> Path:
    """Stage 3: where another rank's model states lie, beside those of the first."""
    return first.with_name(f"zero_pp_rank_{rank}_{first.name.removeprefix('zero_pp_rank_0_')}") if rank else first


@contextmanager
def sharded_view(directory: Path) -> Iterator[Path]:
    """A sharded checkpoint under a name that DeepSpeed can glob."""
    if glob.escape(str(directory)) == str(directory):
        yield directory
        return
    with _temporary() as parent:
        (parent / "checkpoint").symlink_to(directory.resolve(), target_is_directory=True)
        yield parent / "checkpoint"


@contextmanager
def universal_view(directory: Path, stage: int) -> Iterator[Path]:
    """A universal checkpoint as the loader of ``stage`` wants it.

    Raises:
        RuntimeError: It is not one, or lacks what it must have.
        OSError: The file system says no.
    """
    common: Mapping[str, Any] = load(directory / ZERO / COMMON_STATE)
    wants_nested = stage == 3
    if (NESTED in common) == wants_nested:
        with sharded_view(directory) as view:
            yield view
        return
    model = model_states_file(directory)
    with _temporary() as parent:
        view = parent / "checkpoint"
        (view / ZERO).mkdir(parents=True)
        for entry in (directory / ZERO).iterdir():
            if entry.name != COMMON_STATE:
                (view / ZERO / entry.name).symlink_to(entry.resolve())
        (view / model_states_name(stage)).symlink_to(model.resolve())
        torch.save(_nested(common, directory) if wants_nested else _plain(common, model), view / ZERO / COMMON_STATE)
        yield view


@contextmanager
def resharded_view(source: Path, form: Form) -> Iterator[Path]:
    """A sharded checkpoint shown as a universal one without parameter files: values are read from the shards."""
    with _temporary() as parent:
        view = parent / "checkpoint"
        (view / ZERO).mkdir(parents=True)
        torch.save(form.common_state(), view / ZERO / COMMON_STATE)
        for name, there in form.model_files.items():
            (view / name).symlink_to((source / there).resolve())
        yield view


def _nested(common: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The common state for stage 3, with the step, which comes from a parameter's own file or from the group."""
    groups = common["param_groups"]
    steps = sorted((directory / ZERO).rglob("step.pt"))
    step = load(steps[0]) if steps else groups[0].get("step", torch.tensor(0.0, device="cpu"))
    return {**common, NESTED: {"state": {0: {"step": step}}, "param_groups": groups}}


def _plain(common: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """The common state for stages 1 and 2. What is nested is kept, because `load_groups` finds the step there."""
    return {
        **common,
        "ds_version": load(model, mmap=True)["ds_version"],
        "param_groups": common[NESTED]["param_groups"],
    }


@contextmanager
def _temporary() -> Iterator[Path]:
    # With its agent's, if there is one: they go although this process is killed while it loads.
    agents = os.path.dirname(os.environ.get(Variable.SOCKET, ""))
    below = agents if os.path.isdir(agents) and glob.escape(agents) == agents else None
    with tempfile.TemporaryDirectory(prefix="dalsegno-", dir=below) as temporary:
        yield Path(temporary)
