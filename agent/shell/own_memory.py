"""This node's memory for checkpoints, made where the job wants them: the first agent's command line says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..memory.place import NoMemoryError, remove_leftovers, root_of_user
from ..memory.tier import HeldParts, MemoryTier
from ..processes.lifeline import Lifeline
from .config import AgentConfig

__all__ = ["OwnMemory"]

# Ranks of plain torchrun are told of no memory.
_TORCHRUN = "only dlrover-run keeps them, this is torchrun"


class OwnMemory:
    """Makes this node's memory tier, once at most.

    Args:
        config: the agent's.
        token, on_change: see `MemoryTier`.
        lifeline: removes the tier's directory when the agent is gone.
        remark: one line for people, and whether it is a warning.
    """

    def __init__(
        self,
        config: AgentConfig,
        token: Callable[[], str | None],
        lifeline: Lifeline,
        on_change: Callable[[HeldParts], None],
        remark: Callable[[str, bool], None],
    ) -> None:
        self._config, self._token, self._lifeline = config, token, lifeline
        self._on_change, self._remark = on_change, remark
        self._tried = False

    def at_start(self, host: str) -> MemoryTier | None:
        """The tier, where the own command line asks for it: mostly the job does so, too, and hears of it at once."""
        if self._config.settings.memory_replicas and self._config.keeps_memory:
            return self.make(host)
        # What agents of other jobs left is memory that this one's training may need.
        with contextlib.suppress(NoMemoryError):
            remove_leftovers(root_of_user())
        return None

    def make(self, host: str) -> MemoryTier | None:
        """The tier, which listens at this address. None: it cannot be had, as a line says, or was made before."""
        if self._tried:
            return None
        self._tried = True
        if not self._config.keeps_memory:
            self._say_none(_TORCHRUN)
            return None
        memory = MemoryTier(
            self._config.job_id,
            host,
            self._token,
            self._config.memory_budget_bytes,
            self._on_change,
            self._remark,
            tls=self._config.tls,
            bytes_per_second=self._config.memory_bytes_per_second,
            disk=self._config.checkpoint_dir / self._config.job_id,
        )
        if memory.problem:
            self._say_none(memory.problem)
            memory.close()
            return None
        if memory.path is not None:
            self._lifeline.add_path(memory.path)
        return memory

    def _say_none(self, why: str) -> None:
        self._remark(f"no memory checkpoints on this node, nor in a world that has it: {why}", True)
