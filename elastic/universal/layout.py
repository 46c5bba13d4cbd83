"""Which files a sharded checkpoint of DeepSpeed is made of, and whether its layout is one that can be converted."""

from __future__ import annotations

import base64
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import EnvironmentFailed, Impossible, SourceBad

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHER_FILES = re.compile(r"(?:layer_|expert_|.*[_-](?:model|optim)_states\.pt).*")
_ENGINES = ("global_step*", "checkpoint-*/global_step*")
_UNIVERSAL_FILE = "zero/optimizer_state.pt"
_UNIVERSAL_INFO = "universal_checkpoint_info"
_UNIVERSAL_VERSION = "universal_checkpoint_version"


class Unsupported(EnvironmentFailed):
    """A layout that only DeepSpeed's own converter knows: tensor or pipeline parallelism, experts."""


@dataclass(frozen=True)
class Files:
    """Names of a checkpoint's files.

    Attributes:
        optimizer_ranks: The ranks whose optimizer files are there, ascending.
        optimizer: Those files, in the same order.
        model_ranks: The ranks whose model states are there, ascending; stages 1 and 2 have rank 0's alone.
        model: Those files, in the same order.
    """

    optimizer_ranks: tuple[int, ...]
    optimizer: tuple[str, ...]
    model_ranks: tuple[int, ...]
    model: tuple[str, ...]


def engine_directory(directory: Path) -> Path:
    """The directory that holds DeepSpeed's files of a checkpoint.

    Args:
        directory: The checkpoint: as DeepSpeed makes it, or a trainer's with an engine's save below its own files
            (Hugging Face's ``checkpoint-<n>/global_step<n>/``, given as either of the two directories).

    Returns:
        The directory below ``directory`` that holds the files, or ``directory`` itself, also if there are none.

    Raises:
        OSError: The file system says no.
    """
    if any(_MODEL_FILE.fullmatch(path.name) or _OPTIMIZER_FILE.fullmatch(path.name) for path in directory.iterdir()):
        return directory
    below = {path.parent for place in _ENGINES for path in directory.glob(f"{place}/*_model_states.pt")}
    return below.pop() if len(below) == 1 else directory


def find_files(directory: Path) -> Files:
    """Tells a checkpoint's files apart by their names.

    Raises:
        SourceBad: Files without which there is nothing to convert are missing.
        Impossible: It is another framework's, or universal already, or DeepSpeed's files lie in a directory below: see
            `engine_directory`.
        Unsupported: There are files of model-parallel ranks, pipeline stages or experts.
        OSError: The file system says no.
    """
    optimizer: dict[int, str] = {}
    model: dict[int, str] = {}
    for name in sorted(path.name for path in directory.iterdir() if path.is_file()):
        found = _OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name)
        if found is None:
            if _OTHER_FILES.fullmatch(name):
                raise Unsupported(f"{name}: pipeline stages or experts")
            continue
        if int(found[2]) != 0:
            raise Unsupported(f"{name}: tensor or pipeline parallelism")
        (optimizer if name.endswith("_optim_states.pt") else model)[int(found[1] or 0)] = name
    if not model and not optimizer:
        # Another framework's, or a trainer's with the engine's files below: nothing is missing, but nobody can convert
        # it.
        below = sorted({path.parent.name for path in directory.glob("*/*_model_states.pt")})
        where = f", they are in {', '.join(below)}" if below else ""
        raise Impossible(
            f"{directory.name} has no files of DeepSpeed's at its top{where}: it loads at no other number of ranks"
        )
    if not model:
        raise SourceBad(f"no files of DeepSpeed's model states (*_model_states.pt) in {directory.name}")
    if not optimizer and (directory / _UNIVERSAL_FILE).is_file():
        raise Impossible(
            f"{directory.name} is universal already: it loads as it is; for another --stage convert what it was made"
            " from"
        )
    if not optimizer:
        raise SourceBad("no optimizer files: nothing was partitioned here (ZeRO stage 0), or they are lost")
    return Files(*_by_rank(optimizer), *_by_rank(model))


def _by_rank(names: Mapping[int, str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    ranks = sorted(names)
    return tuple(ranks), tuple(names[rank] for rank in ranks)


def refuse_layout(model: Mapping[str, Any]) -> None:
    """Checks in the model states what the files' names do not tell.

    Raises:
        Unsupported: Only DeepSpeed's own converter knows this layout.
        Impossible: No converter knows it; DeepSpeed's makes wrong files of it, or none.
    """
    refuse_unconvertible(model)
    if int(model.get("mp_world_size") or 1) > 1:
        raise Unsupported(f"model parallelism of {model['mp_world_size']} ranks")
    if model.get("num_experts") or model.get("ds_autoep_layers"):
        raise Unsupported("a model with experts")
    if not isinstance(model.get("param_shapes"), list) or not isinstance(model.get("module"), Mapping):
        raise Unsupported("model states of a pipeline")
    if described := described_parameters(model):
        # Padded vocabularies, fused weights: a converter must treat them specially at any size.
        raise Unsupported(f"parameters are described by {described}")


def described_parameters(model: Mapping[str, Any]) -> list[str]:
    """How the model states describe the splitting of parameters: kinds of patterns, sorted."""
    return sorted(
        key for key, value in (model.get(_UNIVERSAL_INFO) or {}).items() if key != _UNIVERSAL_VERSION and value
    )


def refuse_unconvertible(model: Mapping[str, Any]) -> None:
    """Checks that the layout is none of which every converter makes wrong files.

    Raises:
        Impossible: It is.
        EnvironmentFailed: DeepSpeed's configuration, which tells, cannot be read here.
    """
    zero = _configuration(model.get("ds_config")).get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        raise Impossible(
            "saved with zero_optimization.round_robin_gradients, whose layout the checkpoint does not describe; "
            "set it to false to be able to change the world size"
        )
    if (zero.get("mics_shard_size") or 0) > 0:
        raise Impossible(
            "saved with zero_optimization.mics_shard_size, whose shards hold only a part of the ranks; "
            "remove it to be able to change the world size"
        )
    if (zero.get("offload_optimizer") or {}).get("device") == "nvme":
        raise Impossible(
            "saved with zero_optimization.offload_optimizer.device nvme, which keeps optimizer states out of the "
            "checkpoint's files; offload to cpu to be able to change the world size"
        )


def _configuration(given: Any) -> Mapping[str, Any]:
    """DeepSpeed's configuration. A checkpoint has it as the script gave it: an object, a file's path, or base64."""
    if not isinstance(given, str):
        return given or {}
    try:
        found = _parsed(_text(given))
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(_unreadable(given, str(error))) from error
    if not isinstance(found, Mapping):
        raise EnvironmentFailed(_unreadable(given, "it is not an object"))
    return found


def _text(given: str) -> str:
    """Of the file with this path, or what it is in base64.

    Raises:
        OSError, ValueError: It is neither.
    """
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        try:
            return base64.urlsafe_b64decode(given).decode()
        except ValueError:
            raise error from None


def _parsed(text: str) -> Any:
    """JSON, or what DeepSpeed reads besides.

    Raises:
        ValueError: It is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        try:
            # DeepSpeed's own reader, which takes comments, too; it comes with DeepSpeed.
            return importlib.import_module("hjson").loads(text)
        except ImportError:
            pass
        raise


def _unreadable(given: str, why: str) -> str:
    return (
        f"DeepSpeed's configuration {given[:200]!r}, which tells whether this layout can be converted, cannot be read "
        f"here ({why}); put it there"
    )


__all__ = (
    "Files",
    "Unsupported",
    "described_parameters",
    "engine_directory",
    "find_files",
    "refuse_layout",
    "refuse_unconvertible",
)
