"""DeepSpeed's own converter, behind guards.

Used for layouts that the streaming converter does not cover. These faults of 0.19.8 were reproduced, and are guarded
against: a reused output directory (stale ``tmp/`` corrupts silently), ``[`` and ``+`` in a path (files dropped, an
exception), a trailing slash (``latest_universal`` in the wrong place), pool workers that outlive a killed parent (here
it runs without a pool), layouts that it converts wrongly (``round_robin_gradients``), moments that it silently leaves
out (for instance with ``[`` in a parameter's name), and pickles that run any code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import Tensor

from ..checkpoint.files import CANNOT, list_files, place_file
from ..checkpoint.reading import size_below
from .archive import Packed, refuse_packed
from .errors import EnvironmentFailed, Impossible, SourceBad
from .forms import PARAM, ZERO
from .layout import described_parameters, refuse_unconvertible
from .loading import describe_refusal, load, only_safe_loading
from .shards import FP32
from .source import ADAM_STATES, COMMON_STATE

WORK = ".work"
# Seconds between two looks at how much was written: each walks over all files, perhaps on a network disk.
LOOK_EVERY_SECONDS = 5.0


def stage(source: Path, target: Path, moved: Callable[[int], None] = lambda count: None) -> Path:
    """Converts ``source`` in a working directory inside ``target``, and checks the result.

    While it runs it changes the process's working directory and how the process loads files. Run it in its own process.

    Args:
        source: A sharded checkpoint of DeepSpeed.
        target: The lease's directory; a working directory in it is made anew.
        moved: Called on a thread with the number of bytes by which the working directory has grown.

    Returns:
        The directory that holds the converter's output, in ``target / WORK``; the caller moves files out of it by link
        and then calls ``clear``.

    Raises:
        SourceBad: It has no files of DeepSpeed's.
        EnvironmentFailed: The converter cannot convert it, or left something out.
        OSError: The file system says no.
    """
    from deepspeed.checkpoint import ds_to_universal

    work = target / WORK
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    _refuse_packed(source)
    models = _model_states(source)
    # Relative names without special characters: the converter globs and builds regular expressions from its paths.
    _present(source.resolve(), work / "in")
    (work / "out").mkdir()
    arguments = argparse.Namespace(
        input_folder="in",
        output_folder="out",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        # Strictly, the converter would take a pattern of parameters without shards for a misspelt one.
        strict=not any(map(_unsharded, models)),
        inject_missing_state=True,
    )
    with _inside(work), _watched(work, moved), only_safe_loading():
        try:
            ds_to_universal.main(arguments)
        except UnpicklingError as error:
            raise Impossible(describe_refusal("the checkpoint", error)) from error
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise EnvironmentFailed(f"DeepSpeed's converter failed: {type(error).__name__}: {error}") from error
    _check(work / "out", models)
    return work / "out"


def _present(source: Path, place: Path) -> None:
    """Shows ``source`` at ``place``, as one link or, where the mount has no symbolic links, file by file."""
    try:
        os.symlink(source, place, target_is_directory=True)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        for path in list_files(source):
            place_file(source / path, place / path)


def clear(target: Path) -> None:
    """Removes the working directory, so that ``target`` can be sealed."""
    shutil.rmtree(target / WORK)


def _refuse_packed(source: Path) -> None:
    """Refuses compressed archives among the files that DeepSpeed loads by itself."""
    for path in sorted(path for path in source.rglob("*.pt") if path.is_file()):
        try:
            refuse_packed(path)
        except Packed as error:
            raise SourceBad(f"{path.name} cannot be read: {error}") from error


def _model_states(source: Path) -> list[Mapping[str, Any]]:
    """All files of model states. Refuses layouts of which the converter makes wrong files."""
    models: list[Mapping[str, Any]] = []
    for path in sorted(source.glob("*mp_rank_*_model_states.pt")):
        try:
            # Files of torch's older format cannot be mapped.
            with open(path, "rb") as file:
                mapped = file.read(2) == b"PK"
            content = load(path, mmap=mapped)
        except UnpicklingError as error:
            raise Impossible(describe_refusal(path.name, error)) from error
        if "ds_config" in content or "param_shapes" in content:  # experts' files have neither
            refuse_unconvertible(content)
            models.append(content)
    if not models:
        raise SourceBad(f"no files of DeepSpeed's model states (*_model_states.pt) in {source.name}")
    names = [_names(model) for model in models]
    # Ranks of tensor parallelism describe the same parameters; each stage of a pipeline describes its own.
    tensor_parallel = any(names[0] and other == names[0] for other in names[1:])
    if tensor_parallel and int(models[0].get("mp_world_size") or 1) > 1 and not described_parameters(models[0]):
        raise Impossible(
            "saved with tensor parallelism and without a description of it (universal_checkpoint_info): DeepSpeed's "
            "converter would glue copies of one parameter together; save with one to be able to change the world size"
        )
    return models


def _check(output: Path, models: list[Mapping[str, Any]]) -> None:
    """Checks that each parameter that any rank describes has its weights and, with Adam, its moments.

    Raises:
        EnvironmentFailed: The converter left something out, or made weights that are not the model's.
    """
    common = load(output / ZERO / COMMON_STATE)
    adam = any("betas" in group and "eps" in group for group in common["param_groups"])
    trained = int(models[0]["global_steps"]) > int(models[0].get("skipped_steps") or 0)
    states = (FP32, *ADAM_STATES) if adam and trained else (FP32,)
    for model in models:
        module: Mapping[str, Any] = model.get("module") or {}
        for name in _names(model):
            sizes = {state: _tensor(output, name, state) for state in states}
            weights = sizes[FP32]
            for state, value in sizes.items():
                if value.numel() != weights.numel():
                    raise EnvironmentFailed(
                        f"DeepSpeed's converter made {state} of {name} with {value.numel()} values, "
                        f"its weights have {weights.numel()}"
                    )
            own = module.get(name)
            if isinstance(own, Tensor) and own.numel() == weights.numel() and own.numel() > 0:
                _compare(name, weights, own)


def _names(model: Mapping[str, Any]) -> list[str]:
    shapes = model.get("param_shapes") or ()
    return [name for group in ([shapes] if isinstance(shapes, Mapping) else shapes) for name in group]


def _unsharded(model: Mapping[str, Any]) -> set[str]:
    """Names of parameters that are in the model states alone: frozen ones, second names of tied ones."""
    return set(model.get("module") or ()) - set(model.get("buffer_names") or ()) - set(_names(model))


def _tensor(output: Path, name: str, state: str) -> Tensor:
    path = output / ZERO / name / f"{state}.pt"
    if not path.is_file():
        raise EnvironmentFailed(f"DeepSpeed's converter left out {state} of {name}")
    content = load(path, mmap=True)
    value = content[PARAM] if isinstance(content, dict) else content
    assert isinstance(value, Tensor)
    return value


def _compare(name: str, weights: Tensor, own: Tensor) -> None:
    converted, own = weights.reshape(-1).to(own.dtype), own.reshape(-1)
    if not bool(((converted == own) | (converted.isnan() & own.isnan())).all()):
        raise EnvironmentFailed(f"DeepSpeed's converter made weights of {name} that differ from the model states")


@contextmanager
def _watched(directory: Path, moved: Callable[[int], None]) -> Iterator[None]:
    """Reports how much DeepSpeed's converter has written, which says nothing itself, by looking at the directory."""
    stop = threading.Event()

    def watch() -> None:
        most = 0
        while not stop.wait(LOOK_EVERY_SECONDS):
            now = size_below(directory)
            if now > most:
                moved(now - most)
                most = now

    watcher = threading.Thread(target=watch, name="dalsegno-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


@contextmanager
def _inside(directory: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
