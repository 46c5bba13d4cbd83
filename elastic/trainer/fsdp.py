"""FSDP2 for a `Trainer`, with checkpoints that any number of ranks loads.

Each rank writes its own rows of every parameter and of the optimizer's state, with the number of the first row. Each
rank of the next world maps the old files that have rows of its own into memory, and copies these. Nothing is ever
gathered, and only plain tensors are read (torch's own distributed checkpoint keeps its metadata as a pickle).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dalsegno.protos.reads import Reads, cut, reads_of, slot
from dalsegno.protos.trace import mark

from ..rank.process_group import init_process_group
from ..saving.bundles import Bundle
from ..saving.optimizers import check_sharded, say_added
from ..saving.replicas import check_whole, loadable, loadable_weights, plainly, tensors
from ..saving.resuming import ResumePoint
from ..saving.unfit import rejecting
from ..training.first_weights import FirstWeights
from ..training.reading_state import check_same_dtypes, check_same_names, owned, read_saved
from ..training.unlisted import Unlisted
from ..training.wrappers import frozen, tell_frozen
from .loss_scale import LossScale
from .made import steps_on_metric
from .sharding import Init, shard
from .strategies import (
    TRAINERS_STATE,
    MakeOptimizer,
    MakeScheduler,
    Setting,
    Strategy,
    clear_left,
    load_optimizer,
    own_device,
    step_and_clear,
)

SHARED_FILE, TRAINER_FILE, DIRECTORY = "shared.pt", "trainer.pt", "shards"
_LAYOUT_VERSION = 1
# For people.
_WRITER = "a Trainer with FSDP"


class FSDP(Strategy):
    """Every rank has a part of each parameter, gradient and optimizer state: ``fully_shard`` over all ranks.

    Args:
        blocks: Classes whose modules are gathered one by one (a transformer's layers); the rest is gathered together.
            They are also moved and sharded one by one, so that no device holds more than one of them beside its own
            rows.
        init: Fills a model that was made under ``torch.device("meta")``, as in torch's recipe for FSDP2. It is called
            once for each block with the whole model, of which only that block is real. Default: the model's
            ``reset_parameters()``, or else that of each of its modules.
        cast: Convert weights that were saved with another dtype.
        options: For ``fully_shard``: ``mp_policy``, ``reshard_after_forward``, ``offload_policy``.
    """

    loss_scale: LossScale

    def __init__(
        self, blocks: Iterable[type[nn.Module]] = (), *, init: Init | None = None, cast: bool = False, **options: Any
    ) -> None:
        if "mesh" in options or "shard_placement_fn" in options:
            raise ValueError("FSDP shards the rows of every parameter over all ranks: leave out mesh and placement")
        self._blocks, self._init, self._cast, self._options = tuple(blocks), init, cast, options
        self._max_grad_norm: float | None = None
        self._trained: list[str] = []
        self.loss_scale = LossScale(None)
        # Names of parameters that were not trained when the loaded checkpoint was saved.
        self._resumed = ""
        self._had_frozen: list[str] | None = None

    @property
    def name(self) -> str:
        return "fsdp"

    @property
    def by_place(self) -> bool:
        return self._writes_as(FSDP)

    @property
    def reads(self) -> Reads | None:
        rows = (parameter.shape[0] for parameter in self.model.parameters() if _is_sharded(parameter))
        return reads_of(rows) if self.by_place else None

    def start(self, world_size: int, local_rank: int, device: torch.device | None) -> torch.device:
        where = own_device(local_rank, device)
        init_process_group(where)
        return where

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None, setting: Setting
    ) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self._max_grad_norm, self.loss_scale = setting.max_grad_norm, LossScale(setting.scaler)
        with setting.session.meetings.together():
            check_whole(model, meta=True)
        resume = setting.session.resume
        mesh = init_device_mesh(setting.device.type, (setting.session.world_size,))

        options = dict(self._options)
        ignored = options.pop("ignored_params", None) or ()

        def apply(module: nn.Module, ignored: set[Tensor]) -> None:
            chosen = {**options, "ignored_params": ignored} if ignored else options
            fully_shard(module, mesh=mesh, **chosen)

        shard(model, self._blocks, apply, setting.device, init=self._init, same=resume is None, ignored=ignored)
        self.model, self._unlisted, self._first_weights = model, Unlisted(model), FirstWeights()
        self._parameters = tuple(model.parameters())
        self.optimizer = make_optimizer(model)
        check_sharded(self.optimizer)
        _check_own(model, self.optimizer)
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self._stepped = None if steps_on_metric(self.scheduler) else self.scheduler
        if resume is None:
            return {}
        mark("built")
        with resume.loading() as files, rejecting():
            shared = load(files, model, self.optimizer, cast=self._cast)
        mark("loaded")
        self._resumed = resume.ref.name
        # Earlier versions had neither of them.
        self._had_frozen = shared.get("frozen")
        self._unlisted.load(shared.get("unlisted", {}))
        with rejecting():
            return load_trainer_state(resume, self.scheduler, self.loss_scale)

    def backward(self, loss: Tensor) -> None:
        self.loss_scale.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> Tensor | float | None:
        norm = step_and_clear(self.model, self.optimizer, self._stepped, self._max_grad_norm, self.loss_scale)
        return norm.full_tensor() if isinstance(norm, Tensor) and hasattr(norm, "full_tensor") else norm

    def clear(self) -> None:
        clear_left(self.model, self._parameters)

    def files(self, state: Mapping[str, Any]) -> dict[str, Any]:
        _reshard(self.model)
        _check_own(self.model, self.optimizer)
        self._say_added()
        found = files(self.model, self.optimizer)
        if dist.get_rank() == 0:
            self._first_weights.tell(self.model, found[SHARED_FILE]["rest"])
            self._unlisted.tell()
            found[SHARED_FILE]["unlisted"] = self._unlisted.changed_buffers()
            found[TRAINER_FILE] = trainer_state(state, self.scheduler, self.loss_scale)
        return found

    def _say_added(self) -> None:
        names = _names(self.model)
        now = [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        before, self._trained = self._trained or now, now
        if before != now and dist.get_rank() == 0:
            say_added("optimizer", before, now)

    def rehearse(self, state: Mapping[str, Any]) -> None:
        if self._had_frozen is not None and dist.get_rank() == 0:
            tell_frozen(self._resumed, self._had_frozen, frozen(self.model))
            self._had_frozen = None
        for path, content in self.files(state).items():
            loadable(content, path)


@torch.no_grad()  # Otherwise each tensor's rows would be taken through autograd.
def files(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's rows and, on rank 0, what is alike on all ranks, by path. No collective.

    Raises:
        TypeError: The optimizer keeps something that is not sharded as its parameter is, or under no plain name.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = _names(model)
    rows: dict[str, dict[str, Any]] = {}
    shapes: dict[str, list[int]] = {}

    def put(key: str, value: Any) -> None:
        start, local = _place(value)
        shapes[key] = list(value.shape)
        # torch.save writes all of the memory that a view belongs to, and shards are padded.
        exact = local.untyped_storage().nbytes() == local.nbytes
        rows[key] = {"start": start, "value": local.detach() if exact else local.detach().clone()}

    for parameter, name in names.items():
        if _is_sharded(parameter):
            put(f"model/{name}", parameter)
    unsharded: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        if parameter not in names:
            raise TypeError(f"{type(optimizer).__name__} keeps {parameter!r}, {_SAVED}")
        name = names[parameter]
        for key, value in values.items():
            if problem := _problem(parameter, key, value):
                raise TypeError(f"{type(optimizer).__name__} keeps {key!r} of {name} {problem}, {_SAVED}")
            if _is_sharded(value):
                put(f"optimizer/{name}/{key}", value)
            else:
                unsharded.setdefault(name, {})[key] = value
    found: dict[str, Any] = {_file_of(rank): Bundle(rows)}
    if rank == 0:
        groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
        found[SHARED_FILE] = Bundle(
            version=_LAYOUT_VERSION,
            world_size=world_size,
            shapes=shapes,
            rest=_rest(model),
            optimizer=plainly({"groups": groups, "whole": unsharded}, "the state of the optimizer"),
            frozen=frozen(model),
        )
    return found


@torch.no_grad()
def load(resume: ResumePoint, model: nn.Module, optimizer: Optimizer, *, cast: bool = False) -> Mapping[str, Any]:
    """Fills a sharded model and its optimizer, in any world, reading only this rank's rows. No collective.

    Args:
        cast: Convert weights that were saved with another dtype.

    Returns:
        What is alike on all ranks, as `files` has it. Its tensors are mapped: keep none of them.

    Raises:
        ValueError: The checkpoint is of another model or optimizer, or incomplete.
        OSError: A file cannot be read, or this rank does not see one that the checkpoint has.
    """
    shared: Mapping[str, Any] = read_saved(resume, SHARED_FILE, _WRITER)
    if shared.get("version") != _LAYOUT_VERSION:
        raise ValueError(f"{resume.path} has layout {shared.get('version')}, this program reads {_LAYOUT_VERSION}")
    with ExitStack() as files:
        shards = _Shards(resume, shared, files)
        rest = _rest(model)
        sharded = {f"model/{name}": p for name, p in model.named_parameters() if _is_sharded(p)}
        saved = [key for key in shared["shapes"] if key.startswith("model/")]
        check_same_names(dict.fromkeys([*saved, *shared["rest"]]), {**sharded, **rest})
        if not cast:
            there = {key.removeprefix("model/"): shards.example(key) for key in saved}
            check_same_dtypes({**there, **shared["rest"]}, {**dict(model.named_parameters()), **rest})
        for key, parameter in sharded.items():
            start, local = _place(parameter)
            shards.fill(local, key, list(parameter.shape), start)
        # What is no tensor of the model's is kept as it comes.
        whole = {name: v if isinstance(rest[name], Tensor) else owned(v) for name, v in shared["rest"].items()}
        model.load_state_dict(whole, strict=False)
        _load_optimizer(shared["optimizer"], optimizer, model, shards, cast)
    return shared


def trainer_state(state: Mapping[str, Any], scheduler: Any, loss_scale: LossScale) -> dict[str, Any]:
    """What is alike on all ranks, as a file's content, after a check that it can be read again.

    Raises:
        TypeError: A scheduler or callback keeps something other than plain values and tensors.
        ValueError: A callback keeps sharded tensors.
    """
    schedule = None if scheduler is None else scheduler.state_dict()
    content = {"trainer": dict(state), "scheduler": schedule, "scaler": loss_scale.state_dict()}
    return dict(loadable(content, TRAINERS_STATE))


def load_trainer_state(resume: ResumePoint, scheduler: Any, loss_scale: LossScale) -> dict[str, Any]:
    """The inverse of `trainer_state`.

    Raises:
        ValueError: A scheduler or a loss scale was saved and there is none now, or the other way round.
        OSError: See ``reading_state.read_saved``.
    """
    state = owned(read_saved(resume, TRAINER_FILE, _WRITER))
    if (state["scheduler"] is None) != (scheduler is None):
        had, has = ("no", "one") if state["scheduler"] is None else ("one", "none")
        raise ValueError(f"the checkpoint has {had} scheduler, the Trainer {has}: the learning rate would be another")
    # Earlier versions had no loss scale.
    loss_scale.load_state_dict(state.get("scaler") or LossScale(None).state_dict())
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    return dict(state["trainer"])


_SAVED = "and FSDP saves optimizers whose state is by parameters, sharded as they are"


def _problem(parameter: Any, key: Any, value: Any) -> str:
    """Why a part of an optimizer's state could not be loaded again; "": it can be."""
    if not isinstance(key, str) or "/" in key:
        return "under a key that is not a word"
    if _is_sharded(value):
        same = value.shape == parameter.shape
        return "" if same else f"with the shape {list(value.shape)}, where the parameter has {list(parameter.shape)}"
    for _, tensor in tensors(value) if _is_sharded(parameter) else ():
        if tensor is value and value.numel() > 1:
            return f"as a plain tensor of shape {list(value.shape)}"
        if tensor is not value and (tensor.numel() > 1 or _is_sharded(tensor)):
            return "in a list or a dictionary"
    return ""


def _load_optimizer(
    saved: Mapping[str, Any], optimizer: Optimizer, model: nn.Module, shards: _Shards, cast: bool
) -> None:
    names = _names(model)
    here = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    if [group["params"] for group in saved["groups"]] != here:
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved['groups'])} groups with other parameters than the {len(here)} "
            f"of this {type(optimizer).__name__}"
        )
    groups, state, index = [], {}, 0
    for group, ours in zip(saved["groups"], optimizer.param_groups, strict=True):
        groups.append({**group, "params": list(range(index, index + len(group["params"])))})
        for name, parameter in zip(group["params"], ours["params"], strict=True):
            values = {key: shards.like(parameter, f"optimizer/{name}/{key}") for key in shards.keys_of(name)}
            values.update(saved["whole"].get(name, {}))
            if values:
                state[index] = values
            index += 1
    load_optimizer(optimizer, {"state": state, "param_groups": groups}, cast=cast)


class _Shards:
    """The rows that the ranks of the writing world saved. A file is mapped when something in it is first asked for.

    Which rank has a row is known from the number of rows and of ranks. Beside those files, and rank 0's, none need be
    there: in a world of as many ranks, a rank's own.
    """

    def __init__(self, resume: ResumePoint, shared: Mapping[str, Any], files: ExitStack) -> None:
        self._shapes: Mapping[str, list[int]] = shared["shapes"]
        self._saved_by: int = shared["world_size"]
        self._mapped: dict[int, Mapping[str, Any]] = {}
        files.callback(self._mapped.clear)  # each mapping ends with its last tensor
        self._resume, self._path = resume, resume.path
        # Keys of the optimizer's sharded state, by parameter: looking through all for each takes seconds for thousands.
        self._keys: dict[str, list[str]] = {}
        for place in self._shapes:
            if place.startswith("optimizer/"):
                name, _, key = place.removeprefix("optimizer/").rpartition("/")
                self._keys.setdefault(name, []).append(key)

    def _rows(self, rank: int, key: str) -> tuple[int, Tensor]:
        """One rank's rows of a tensor: the first row, and their values.

        Raises:
            ValueError: They were not saved.
            OSError: See ``reading_state.read_saved``.
        """
        if rank not in self._mapped:
            if not self._resume.lists(_file_of(rank)):
                raise ValueError(f"{self._path} has not all rows of {key}: {_file_of(rank)} is missing")
            self._mapped[rank] = read_saved(self._resume, _file_of(rank), _WRITER)
        if key not in self._mapped[rank]:
            raise ValueError(f"{self._path} has not all rows of {key}: {_file_of(rank)} has none")
        rows = self._mapped[rank][key]
        return rows["start"], rows["value"]

    def keys_of(self, name: str) -> list[str]:
        """Keys of the optimizer's sharded state of one parameter."""
        return self._keys.get(name, [])

    def example(self, key: str) -> Tensor:
        """Some rows of a tensor, with the dtype that it was saved with."""
        return self._rows(0, key)[1]

    def fill(self, local: Tensor, key: str, shape: list[int], start: int) -> None:
        """Copies rows of one tensor, from ``start`` on, into ``local``, which has this rank's.

        Raises:
            ValueError: It has another shape, or rows are missing.
            OSError: See `_rows`.
        """
        if self._shapes[key] != shape:
            raise ValueError(f"the checkpoint is of another model: {key} was {self._shapes[key]} and is {shape}")
        # ``torch.chunk`` gives each rank as many rows, as long as there are some.
        chunk, stop = slot(shape[0], self._saved_by), start + local.shape[0]
        for rank, low, high in cut(start, stop, chunk):
            begin, value = self._rows(rank, key)
            end = min((rank + 1) * chunk, shape[0])
            if (begin, begin + value.shape[0]) != (rank * chunk, end):
                raise ValueError(
                    f"{self._path} has not all rows of {key}: {_file_of(rank)} has {value.shape[0]} from row {begin} "
                    f"on, where torch.chunk puts rows {rank * chunk} to {end}"
                )
            local[low - start : high - start].copy_(value[low - begin : high - begin])

    def like(self, parameter: Any, key: str) -> Any:
        """A state of ``parameter``, sharded as the parameter is."""
        from torch.distributed.tensor import DTensor

        start, local = _place(parameter)
        rows = torch.empty_like(local, dtype=self.example(key).dtype, requires_grad=False)
        self.fill(rows, key, list(parameter.shape), start)
        return DTensor.from_local(
            rows,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _file_of(rank: int) -> str:
    return f"{DIRECTORY}/rank-{rank}.pt"


def _reshard(model: nn.Module) -> None:
    """Shards whole parameters again, which an evaluation (a forward pass without a backward pass) leaves behind."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check_own(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses parameters that are not the model's, or that ``fully_shard`` has replaced since."""
    own = _names(model)
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
    if strangers:
        raise ValueError(
            f"{type(optimizer).__name__} has {len(strangers)} parameters that are not the model's, the first of shape "
            f"{list(strangers[0].shape)}: FSDP puts sharded ones in their place, so optimizer(model) has to take them "
            "from the model that it is given"
        )


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "to_local")


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _rest(model: nn.Module) -> dict[str, Any]:
    """What is not sharded: buffers, and parameters that ``fully_shard`` was told to leave alone."""
    return loadable_weights({name: value for name, value in model.state_dict().items() if not _is_sharded(value)})


def _place(value: Any) -> tuple[int, Tensor]:
    """First row and rows of this rank: ``torch.chunk`` of the first dimension, as ``fully_shard`` does it."""
    local: Tensor = value.to_local()
    if len(value.placements) != 1 or not value.placements[0].is_shard(0):
        raise ValueError(f"rows of a tensor over all ranks were expected, not {value.placements}")
    total, mesh = value.shape[0], value.device_mesh
    chunk = slot(total, mesh.size())
    start = min(mesh.get_local_rank() * chunk, total)
    if local.shape[0] != min(chunk, total - start):
        raise ValueError(f"this torch shards {total} rows over {mesh.size()} ranks in another way than torch.chunk")
    return start, local
