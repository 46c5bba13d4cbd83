"""DeepSpeed in an elastic run: what a training script adds around ``deepspeed.initialize``.

    s = session()
    elastic_ds.prepare()
    engine, *_ = deepspeed.initialize(..., config=elastic_ds.config(base, plan, s.resume))
    elastic_ds.restore(engine, s.resume)
    for batch in s.steps(batches, save=elastic_ds.save(engine), strategy=elastic_ds.strategy(engine)):
        ...

Works for ZeRO stages 0 to 3 without tensor or pipeline parallelism. A checkpoint is loaded in the form that the session
names. If the world size is the same (at stage 0: always), that is the form in which it was saved. Otherwise it is the
universal form, or each rank reads the shards of the ranks that saved ("re-sharding"), which needs no conversion. Both
use DeepSpeed's universal loading; ``loading`` corrects what that gets wrong.

The random state is not saved here: the session does that.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from dalsegno.protos.collector import paused
from dalsegno.protos.trace import mark

from ..checkpoint import UNIVERSAL, CheckpointDamaged, Manifest
from ..rank.process_group import init_alone
from ..saving.resuming import ResumePoint
from ..saving.schedules import check_factors, factors
from ..training.entry import refused_together
from ..training.reading_state import copied_by_name, owned
from ..universal.errors import ConversionError
from ..universal.forms import ZERO, Form
from ..universal.layout import engine_directory
from ..universal.loading import describe_refusal, each_once, only_safe_loading
from ..universal.numpys import as_numpys
from ..universal.source import open_source
from ..universal.values import ShardedValues, UniversalValues, Values
from .beside import PARTS
from .checks import can_reshard, tell, why_not_reshard
from .copies import check_names, load_parameters, load_whole_model
from .flat import flatten_in_place
from .loading import (
    check_groups,
    model_states_once,
    own_loading,
    repair_groups,
    restore_unpartitioned,
    separate_steps,
)
from .making import spare_work
from .saving import SCHEDULE
from .view import resharded_view, sharded_view, universal_view

_ROUND_ROBIN = (
    "made with zero_optimization.round_robin_gradients, which lays weights out in a way that checkpoints do not "
    "describe; set it to false to train elastically"
)


# The first files of model states of all ranks that share a model; at stage 3 with the first prefix.
_SHARED = re.compile(r"(zero_pp_rank_0_)?mp_rank_\d+_model_states\.pt")
# Of each layer of a pipeline a file for each rank of tensor parallelism.
_LAYERS = re.compile(r"layer_\d+-.*model_states\.pt")
_ANY = re.compile(".*")


class Resume(Protocol):
    """What `config` and `restore` read of a session's resume point."""

    @property
    def form(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def universal(self) -> Path | None: ...
    @property
    def reshard(self) -> bool: ...


class Plan(Protocol):
    """What `config` reads of a batch plan."""

    @property
    def accumulation(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...


def prepare(backend: str | None = None, *, timeout: timedelta | None = None) -> None:
    """Initialises ``torch.distributed`` for DeepSpeed, also in a world of one without torchrun.

    Spares DeepSpeed what is not needed here, see ``making``.

    Args:
        backend: As in ``torch.distributed``; None: the accelerator's (gloo on a CPU).
        timeout: How long a collective may take; None: DeepSpeed's default, 10 minutes.

    Raises:
        RuntimeError: There are several ranks, and the environment does not say this one's number on its node.
    """
    _check_environment()
    spare_work()
    if backend is None:
        accelerator = get_accelerator()
        backend = "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()
    if not dist.is_initialized() and "RANK" not in os.environ:
        init_alone(backend)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    deepspeed.init_distributed(dist_backend=backend, verbose=False, auto_mpi_discovery=False, **options)


def _check_environment() -> None:
    """Checks LOCAL_RANK, from which DeepSpeed takes its device; not everything that starts ranks sets it."""
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:  # DeepSpeed reads it as well, but too late
        os.environ.setdefault("LOCAL_RANK", os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        os.environ.setdefault("LOCAL_RANK", "0")
    elif "LOCAL_RANK" not in os.environ:
        raise RuntimeError(
            f"LOCAL_RANK is missing in the environment of one of {ranks} ranks, and DeepSpeed takes its device from "
            "it: start with dlrover-run or torchrun, which set it, or export it (Slurm: LOCAL_RANK=$SLURM_LOCALID)"
        )


def config(base: Mapping[str, Any], plan: Plan, resume: Resume | None) -> dict[str, Any]:
    """DeepSpeed's configuration for the present world.

    Args:
        base: The script's own configuration. Its batch sizes are replaced.
        plan: How the global batch is divided in this world.
        resume: Where the session resumes; None at step 0.

    Returns:
        A new dictionary with the micro batch size, the accumulation, and ``checkpoint.load_universal`` if the resume
        point is universal or another number of ranks saved it.

    Raises:
        ValueError: ``base`` asks for a layout whose checkpoints do not survive a change of the world.
    """
    result = copy.deepcopy(dict(base))
    zero = result.get("zero_optimization", {})
    if zero.get("round_robin_gradients"):
        raise ValueError(f"the config is {_ROUND_ROBIN}")
    if zero.get("elastic_checkpoint"):
        raise ValueError("zero_optimization.elastic_checkpoint is dead in DeepSpeed; remove it")
    # DeepSpeed derives this one. It is an upper bound, because slices of a step may be shorter than the micro batch.
    result.pop("train_batch_size", None)
    result["train_micro_batch_size_per_gpu"] = plan.micro_batch_size
    result["gradient_accumulation_steps"] = plan.accumulation
    by_values = resume is not None and loads_by_values(resume)
    result["checkpoint"] = {**result.get("checkpoint", {}), "load_universal": by_values}
    return result


def restore(engine: Any, resume: Resume | None, *, strict: bool = True, other_schedule: bool = False) -> dict[str, Any]:
    """Loads the resume point into a fresh engine and repairs what DeepSpeed leaves wrong. Collective.

    Says in one line, on rank 0, if this engine's world cannot change as usual.

    Args:
        engine: From ``deepspeed.initialize`` with this module's `config`.
        resume: Where the session resumes; None: nothing is loaded.
        strict: The checkpoint must have all of the model's weights; False if frozen ones were left out.
        other_schedule: Accept functions of the engine's scheduler (``LambdaLR``) that have changed.

    Returns:
        The ``client_state`` that was saved.

    Raises:
        ValueError: The engine was not configured for this resume point, trains something else, or its scheduler's
            functions have changed. Raised on all ranks.
        RuntimeError: DeepSpeed found nothing to load, a file is missing, or one holds objects that are not loaded; or
            another number of ranks saved it, and this engine cannot re-shard (see `can_reshard`).
        OSError: A file cannot be read, or this rank does not see one that the session's resume point has.
    """
    tell(engine)
    flatten_in_place(engine)
    if resume is None:
        return {}
    with refused_together():
        _check(engine, resume)
    if resume.reshard and not can_reshard(engine):
        # The manifest describes the DeepSpeed and the engine that saved, which need not be these.
        raise RuntimeError(_not_here(resume, why_not_reshard(engine) or "nothing is partitioned at stage 0"))
    mark("built")
    read = _LAYERS if isinstance(engine.module, PipelineModule) else _SHARED
    with _loading(resume, read) as files, _only_what_is_safe(files.path), each_once(), paused():
        with refused_together(), _unless_damaged(files):
            if not isinstance(engine.module, PipelineModule):
                check_groups(engine, engine_directory(files.path))
        state = _load(engine, files, strict)
    mark("loaded")
    if not other_schedule:
        check_factors(state.get(SCHEDULE, {}), factors(getattr(engine, "lr_scheduler", None)))
    return state


def restore_weights(engine: Any, resume: Resume) -> None:
    """Loads only the weights of the resume point, exactly, into an engine that is to train them anew. Collective.

    Raises:
        ValueError: The engine was not configured for this resume point, or has another model. On all ranks.
        RuntimeError: A weight is missing, cannot be read, or is on a disk of the optimizer's own (NVMe).
        OSError: A file cannot be read.
    """
    tell(engine)
    flatten_in_place(engine)
    with refused_together():
        _check(engine, resume)
        if engine.zero_nvme_offload_optimizer():
            raise RuntimeError("weights_only: the optimizer keeps its weights on NVMe, where they cannot be replaced")
    mark("built")
    with _loading(resume, _ANY) as files, each_once(), paused():
        # What is left as it is would be each rank's own: DeepSpeed need not send what all load.
        load_weights(engine, files.path, optimizers=True, strict=True)
    mark("loaded")


@contextmanager
def _loading(resume: Resume, read: re.Pattern[str]) -> Iterator[Resume]:
    """A session's resume point may be read while it is verified, and its manifest says what was saved.

    Args:
        read: Which files of what was saved are read also where the universal form is loaded, by the last part of their
            paths. The others may be gone then.

    Raises:
        OSError: This rank does not see a file that the manifest lists, and it matters. Another start may see it.
    """
    if not isinstance(resume, ResumePoint):
        yield resume
        return
    with resume.loading() as files:
        _check_seen(files, read)
        try:
            yield files
        except (AssertionError, AttributeError, KeyError, RuntimeError) as error:  # DeepSpeed's and ours
            _check_seen(files, read, cause=error)
            raise


def _check_seen(resume: ResumePoint, read: re.Pattern[str], cause: Exception | None = None) -> None:
    """Checks that files of what is loaded are in sight. In memory a node has, and has verified, what its ranks need.

    Args:
        read: See `_loading`.
        cause: What was met without them. None: only those are looked for of which DeepSpeed counts what it finds, as
            many as ranks shared the model.

    Raises:
        OSError: One is not, and the manifest lists it.
    """
    if resume.in_memory:
        return
    for directory, manifest, names in _listings(resume, read):
        for file in (directory / one.path for one in manifest.files):
            counted = _SHARED.fullmatch(file.name) or _LAYERS.fullmatch(file.name)
            if names.fullmatch(file.name) and (counted or cause is not None) and not file.is_file():
                raise OSError(f"{file} is not here, although the checkpoint's manifest lists it") from cause


def _listings(resume: ResumePoint, read: re.Pattern[str]) -> Iterator[tuple[Path, Manifest, re.Pattern[str]]]:
    """The directories that are loaded, what each should have, and which of that is read."""
    if resume.universal_at is None:
        yield resume.saved_at, resume.manifest, _ANY
        return
    yield resume.saved_at, resume.manifest, read
    # Damage is for a verification to find.
    with suppress(CheckpointDamaged):
        yield resume.universal_at, Manifest.read(resume.universal_at), _ANY


def _unless_damaged(resume: Resume) -> AbstractContextManager[None]:
    """Refused is what sound files say, and not what a flipped bit of a resume point has made of them."""
    return resume.unless_damaged() if isinstance(resume, ResumePoint) else nullcontext()


def _check(engine: Any, resume: Resume) -> None:
    by_values = loads_by_values(resume)
    if bool(engine.load_universal_checkpoint()) != by_values:
        raise ValueError(f"the engine's config was not made by `config` for this resume point (form {resume.form})")
    if by_values and engine.zero_round_robin_gradients():
        raise ValueError(f"the engine was {_ROUND_ROBIN}")


def load_weights(engine: Any, directory: Path, *, optimizers: bool = False, strict: bool = False) -> None:
    """Loads only the weights of a checkpoint, saved by any number of ranks, into an engine's model. Collective.

    Args:
        engine: From ``deepspeed.initialize``.
        directory: The checkpoint, see `engine_directory`.
        optimizers: Also change the optimizer's own copy of the weights; at the end of a training nobody needs it.
        strict: It must have all of the model's weights; else frozen ones that were left out stay as they are.

    Raises:
        ValueError: It is of another model.
        RuntimeError: It has no values for one of the model's parameters, or cannot be read.
        OSError: The file system says no.
    """
    saved = engine_directory(directory)
    with _only_what_is_safe(saved):
        stage = int(engine.zero_optimization_stage())
        if stage == 0:
            load_whole_model(engine, saved, strict=strict)
            if optimizers and hasattr(engine.optimizer, "refresh_fp32_params"):
                engine.optimizer.refresh_fp32_params()
            return
        try:
            form = Form(open_source(saved, ours=True), stage)
        except ConversionError as error:
            raise RuntimeError(f"the weights of {saved} cannot be read: {error}") from error
        with form.source:
            values = ShardedValues(form)
            names, wanted = {*form.source.model["module"], *values.names}, engine.module.state_dict()
            check_names(engine.module, names, wanted, strict=strict)
            load_parameters(engine, values, optimizers=optimizers)
        restore_unpartitioned(engine, saved, optimizers=optimizers)


def loads_by_values(resume: Resume) -> bool:
    """Whether each rank reads its own ranges of every parameter, instead of the file of the rank with its number."""
    return resume.form == UNIVERSAL or resume.reshard


def _load(engine: Any, resume: Resume, strict: bool) -> dict[str, Any]:
    saved = engine_directory(resume.path)
    directory = saved if resume.universal is None else resume.universal
    with _opened(resume, saved, int(engine.zero_optimization_stage())) as (view, values):
        with model_states_once(engine), nullcontext() if values is None else own_loading(engine, values, view):
            loaded, client_state = engine.load_checkpoint(
                str(view.parent),
                tag=view.name,
                load_module_strict=strict,
                custom_load_fn=_module_loader(engine, strict),
            )
        if loaded is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {directory}")
        if values is not None:
            repair_groups(engine, view)
    separate_steps(engine)
    if not isinstance(engine.module, PipelineModule):
        restore_unpartitioned(engine, directory)
    elif resume.form == UNIVERSAL:
        # A pipeline's layers have files of their own, which are not among the universal files.
        with sharded_view(saved) as view:
            engine.module.load_state_dir(str(view), engine.checkpoint_engine)
    return {key: owned(value) for key, value in as_numpys(client_state or {}).items() if key != PARTS}


def _module_loader(engine: Any, strict: bool) -> Callable[..., None] | None:
    """Copies weights by name where DeepSpeed has torch go through each module; None: parts of them lie elsewhere."""
    if int(engine.zero_optimization_stage()) == 3 or getattr(engine, "has_moe_layers", False):
        return None

    def load_module(src: Mapping[str, Any], dst: Any) -> None:
        if copied_by_name(dst, src):
            return
        if not strict:
            check_names(dst, src, dst.state_dict())
        dst.load_state_dict(src, strict=strict)

    return load_module


@contextmanager
def _opened(resume: Resume, saved: Path, stage: int) -> Iterator[tuple[Path, Values | None]]:
    """The directory that DeepSpeed is told to load, and the values for its optimizer; None: DeepSpeed reads its own."""
    if resume.form == UNIVERSAL:
        if resume.universal is None:
            raise ValueError("the resume point is universal and does not say where")
        with universal_view(resume.universal, stage) as view:
            yield view, UniversalValues(view / ZERO)
    elif resume.reshard:
        try:
            form = Form(open_source(saved, ours=True, lazy=True), stage)
            with form.source, resharded_view(saved, form) as view:
                yield view, ShardedValues(form)
        # Also while it is loaded: a rank opens the files that have its ranges when it comes to them.
        except ConversionError as error:
            raise RuntimeError(_not_here(resume, str(error))) from error
    else:
        with sharded_view(saved) as view:
            yield view, None


def _not_here(resume: Resume, reason: str) -> str:
    return f"{resume.path.name} cannot be loaded by another number of ranks as it is ({reason}): it must be converted"


@contextmanager
def _only_what_is_safe(directory: Path) -> Iterator[None]:
    """Keeps everybody, DeepSpeed included, from unpickling arbitrary objects inside."""
    try:
        with only_safe_loading():
            yield
    except UnpicklingError as error:
        trust = "; if you trust it: torch.serialization.add_safe_globals([...])"
        raise RuntimeError(describe_refusal(str(directory), error, trust)) from error
