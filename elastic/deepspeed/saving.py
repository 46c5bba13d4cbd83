"""What an engine's save adds to DeepSpeed's own: errors that hold up no other rank, and what a load needs besides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO, UNIVERSAL_CHECKPOINT_VERSION_KEY

from dalsegno.protos.reads import Reads

from ..saving.optimizers import source_of_step
from ..saving.replicas import loadable, pythons_numbers
from ..saving.schedules import factors, unchanged
from ..training.first_weights import FirstBuffers
from ..universal.source import OPTIMIZER_NOTE
from .checks import can_reshard, loads_by_place, strategy, what_ranks_read
from .loading import TRAINED_NOTE, torch_optimizer, trained
from .writers import collected, errors_after_collectives, why_not_collected

UNIVERSAL_VERSION = 0.4
# Key in the client's state for the values of the scheduler's functions.
SCHEDULE = "dalsegno_schedule"

Client = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


def save(engine: Any, client_state: Client | None = None, buffers: FirstBuffers | None = None) -> Save:
    """The ``write`` function that a session calls on every rank to save ``engine``.

    Args:
        engine: From ``deepspeed.initialize``.
        client_state: Plain values or tensors of the script's own; `restore` returns them. Or what makes them at each
            save.
        buffers: Those of the model, where this is called at each save; None: as they are now, before the first step.
    """
    return Save(engine, client_state, buffers)


class Save:
    """``write(path)`` creates ``path`` and writes this rank's files; ``background(write)`` has a session write them.

    See `save`.

    Attributes:
        engine: The engine.
        reshards: See `can_reshard`; the session records it.
        by_place: See `loads_by_place`.
        reads: See `what_ranks_read`.
        strategy: See `strategy`; the session uses it if the script gives none.
    """

    def __init__(self, engine: Any, client_state: Client | None = None, buffers: FirstBuffers | None = None) -> None:
        self.engine, self._client_state = engine, client_state
        self._factors = factors(getattr(engine, "lr_scheduler", None))
        self._buffers = FirstBuffers(engine.module) if buffers is None else buffers

    @property
    def reshards(self) -> bool:
        return can_reshard(self.engine)

    @property
    def by_place(self) -> bool:
        return loads_by_place(self.engine)

    @property
    def reads(self) -> Reads | None:
        return what_ranks_read(self.engine)

    @property
    def strategy(self) -> str:
        return strategy(self.engine)

    def __call__(self, path: Path) -> None:
        """Writes this rank's files.

        Raises:
            OSError: Something could not be written. Raised only after DeepSpeed's collectives, so that no other rank
                waits for this one.
            TypeError: The client's or the scheduler's state could not be loaded again. Raised only then, too.
        """
        with errors_after_collectives(self.engine):
            problem = self._save(path)
        if problem is not None:
            raise problem

    @property
    def why_no_files(self) -> str | None:
        """Why `files` would fail on every rank; None: it works."""
        return why_not_collected(self.engine)

    def files(self) -> dict[str, Any]:
        """What this rank writes, by file name; the tensors are the engine's own. Collective.

        Raises:
            TypeError: See `__call__`.
            ValueError: See ``writers.collected``.
        """
        with collected(self.engine) as files:
            problem = self._save(Path("nowhere/files"))
        if problem is not None:
            raise problem
        return {path.name: content for path, content in files.items()}

    def _save(self, path: Path) -> Exception | None:
        """Calls the engine. Returns what is wrong on this rank, once all ranks are through."""
        if dist.get_rank() == 0:
            self._buffers.tell()
        given, problem = self._given()
        state = _described(self.engine, given)
        if self._factors:
            state[SCHEDULE] = unchanged(self._factors, factors(self.engine.lr_scheduler))
        if problem is not None:
            state = {}
        self.engine.save_checkpoint(str(path.parent), tag=path.name, client_state=state, save_latest=False)
        return problem

    def _given(self) -> tuple[Mapping[str, Any] | None, Exception | None]:
        """The client's state, and why this rank's state beside the engine's own could not be loaded again."""
        given, scheduler = None, self.engine.lr_scheduler
        try:
            given = self._client_state() if callable(self._client_state) else self._client_state
            _use_pythons_numbers(self.engine.optimizer, scheduler)
            if getattr(self.engine, "save_non_zero_checkpoint", True):
                given = loadable(given, "the state of a callback or of the script's own")
        except Exception as error:  # every error is kept, because the other ranks wait in DeepSpeed's collectives
            return given, error
        return given, None


def _use_pythons_numbers(optimizer: Any, scheduler: Any) -> None:
    """Has what DeepSpeed asks for and writes by itself be loadable again.

    Raises:
        TypeError, ValueError: The scheduler's state could not be.
    """
    for group in getattr(optimizer, "param_groups", ()):
        group.update(pythons_numbers({key: value for key, value in group.items() if key != "params"}))
    if scheduler is None:
        return
    state = scheduler.state_dict()
    attributes, found = getattr(scheduler, "__dict__", {}), loadable(state, "the state of the scheduler")
    for name, value in found.items() if isinstance(found, dict) else ():
        if value is not state[name] and attributes.get(name) is state[name]:
            attributes[name] = value


@contextmanager
def saved_by_trainer(engine: Any, keep: Callable[[Path, Any], None] | None = None) -> Iterator[None]:
    """Lets a framework call ``engine.save_checkpoint`` itself inside, and adds what `Save` adds.

    Args:
        engine: From ``deepspeed.initialize``.
        keep: Called at the end with each file's path and content, none of which is written then. Only where
            ``writers.why_not_collected`` knows nothing against it.

    Raises:
        OSError: Something could not be written. Raised only at the end, see `Save`.
    """
    original = engine.save_checkpoint
    latest: list[tuple[Path, str]] = []

    @functools.wraps(original)
    def save_checkpoint(
        save_dir: str, tag: Any = None, client_state: Any = None, save_latest: bool = True, **options: Any
    ) -> Any:
        tag = str(tag or f"global_step{engine.global_steps}")
        if save_latest and dist.get_rank() == 0:
            latest.append((Path(save_dir) / "latest", tag))
        # Rank 0 would write that file before the last barrier, where a failure would hold up the others.
        return original(save_dir, tag=tag, client_state=_described(engine, client_state), save_latest=False, **options)

    engine.save_checkpoint = save_checkpoint
    writing: AbstractContextManager[dict[Path, Any] | None]
    writing = errors_after_collectives(engine) if keep is None else collected(engine)
    try:
        with writing as files:
            yield
    finally:
        del engine.save_checkpoint
    for path, content in (files or {}).items():
        assert keep is not None
        keep(path, content)
    for path, tag in latest:
        path.write_text(tag)


def _reserves_it(engine: Any) -> bool:
    """Whether this DeepSpeed refuses entries of a client's state that are its own, saving experts; 0.18.0 does not."""
    return "reserved_keys" in engine._save_moe_checkpoint.__code__.co_varnames


def _described(engine: Any, client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state that is saved beside the engine's own.

    In stages 1 and 2 the converter needs information for universal checkpoints. With tensor parallelism DeepSpeed adds
    it itself, and an entry in the client's state would replace that. With a mixture of experts newer versions take it
    from the module alone, and refuse such an entry.
    """
    state = dict(client_state or {})
    if getattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, None) is None:
        info = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_VERSION}
        if getattr(engine, "has_moe_layers", False) and _reserves_it(engine):
            setattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, info)
        else:
            state.setdefault(UNIVERSAL_CHECKPOINT_INFO, info)
    state[OPTIMIZER_NOTE] = source_of_step(torch_optimizer(engine))
    if int(engine.zero_optimization_stage()) == 0:
        state[TRAINED_NOTE] = trained(engine)
    return state
