"""Who this worker is, read from its environment (``docs/contracts.md``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos.contract import Variable

from ..checkpoint import SHARDED, UNIVERSAL, Ref


@dataclass(frozen=True)
class ResumeOrder:
    """What the agent handed out to start from.

    Attributes:
        directory, universal_directory: Where they are on this node; None: in the run's directory, by their names.
    """

    source: Ref
    form: str
    universal: Ref | None
    directory: Path | None = None
    universal_directory: Path | None = None


@dataclass(frozen=True)
class Identity:
    """Identity of one worker.

    Attributes:
        socket: The agent's; None outside ``dlrover-run``.
        group_rank, nodes: This node's number in the world, and how many nodes that has.
        run_dir: Where checkpoints are; None where nothing can be saved.
        memory_dir: Where memory checkpoints of the run are on this node; None where there are none.
        drain_timeout: The notice that a node has to leave, in seconds.
        memory_budget: The most bytes that this node's memory checkpoints may have, others' parts too; None: no limit.
        stall_timeout: Seconds in which nothing moves, after which a disk counts as stuck; 0: never.
        resume: None: from step 0 (or, outside ``dlrover-run``, not known yet).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    epoch: int = 0
    socket: str | None = None
    job_id: str = ""
    run_id: str = ""
    node: str = ""
    generation: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    run_dir: Path | None = None
    stall_timeout: float = 0.0
    resume: ResumeOrder | None = None
    group_rank: int = 0
    nodes: int = 1
    memory_dir: Path | None = None
    memory_budget: int | None = None
    drain_timeout: float = 30.0

    @property
    def alone(self) -> bool:
        """Whether there is no agent: plain python or torchrun."""
        return self.socket is None

    def in_memory(self, directory: Path) -> bool:
        """Whether a checkpoint lies in this node's memory: then it is a copy that no other node sees."""
        return self.memory_dir is not None and directory.is_relative_to(self.memory_dir)


def from_environment(environ: Mapping[str, str] | None = None, checkpoint_dir: Path | None = None) -> Identity:
    """Reads torchrun's variables and, under an agent, ours.

    Args:
        environ: The variables; default: this process's, in whatever object they are now. (`datasets` puts a copy in the
            place of ``os.environ`` as it maps with processes.)
        checkpoint_dir: The run's directory outside ``dlrover-run``; ignored under an agent, which gives its own.

    Raises:
        RuntimeError: A required variable is missing, or is not a number.
    """
    environ = os.environ if environ is None else environ
    rank, world_size, local_rank, local_world_size = (_number(environ, key, default) for key, default in _TORCHRUN)
    socket = environ.get(Variable.SOCKET)
    if not socket:
        return Identity(rank, world_size, local_rank, local_world_size, run_dir=checkpoint_dir)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        epoch=_number(environ, Variable.EPOCH),
        socket=socket,
        job_id=_text(environ, Variable.JOB_ID),
        run_id=_text(environ, Variable.RUN_ID),
        node=_text(environ, Variable.NODE),
        generation=_number(environ, Variable.GENERATION),
        min_nodes=_number(environ, Variable.MIN_NODES),
        max_nodes=_number(environ, Variable.MAX_NODES),
        run_dir=Path(_text(environ, Variable.RUN_DIR)),
        stall_timeout=float(environ.get(Variable.STALL_TIMEOUT, "0")),
        resume=_resume(environ),
        group_rank=_number(environ, "GROUP_RANK", 0),
        nodes=_number(environ, "GROUP_WORLD_SIZE", 1),
        memory_dir=_path(environ, Variable.MEMORY_DIR),
        drain_timeout=float(environ.get(Variable.DRAIN_TIMEOUT, "30")),
        memory_budget=_number(environ, Variable.MEMORY_BUDGET) if Variable.MEMORY_BUDGET in environ else None,
    )


_TORCHRUN = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))


def _resume(environ: Mapping[str, str]) -> ResumeOrder | None:
    if not environ.get(Variable.RESUME_NAME):
        return None
    source = Ref(_text(environ, Variable.RESUME_NAME), _text(environ, Variable.RESUME_DIGEST))
    form = _text(environ, Variable.RESUME_FORM)
    if form not in (SHARDED, UNIVERSAL):
        raise RuntimeError(f"DALSEGNO_RESUME_FORM is {form!r}: 'sharded' or 'universal' was expected")
    directory = _path(environ, Variable.RESUME_DIR)
    if form == SHARDED:
        return ResumeOrder(source, form, None, directory)
    universal = Ref(_text(environ, Variable.UNIVERSAL_NAME), _text(environ, Variable.UNIVERSAL_DIGEST))
    return ResumeOrder(source, form, universal, directory, _path(environ, Variable.UNIVERSAL_DIR))


def _path(environ: Mapping[str, str], key: str) -> Path | None:
    value = environ.get(key)
    return Path(value) if value else None


def _text(environ: Mapping[str, str], key: str) -> str:
    value = environ.get(key)
    if not value:
        raise RuntimeError(f"{key} is missing in the environment although DALSEGNO_SOCKET is there")
    return value


def _number(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environ.get(key)
    if text is None and default is not None:
        return default
    try:
        return int(_text(environ, key))
    except ValueError as error:
        raise RuntimeError(f"{key} is {text!r}, a number was expected") from error
