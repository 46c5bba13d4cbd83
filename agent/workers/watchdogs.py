"""torch's own watchdogs beside the workers: of expired timers, and of the agent's health."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["TorchWatchdogs"]

_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"


class TorchWatchdogs:
    """Those of one agent, for all its worlds. torch makes others with each start of workers, and ends the last ones.

    A process that stays for the next world knows the pipe of the first one.
    """

    def __init__(self) -> None:
        # What workers are told of it; None: there is none yet.
        self._variables: dict[str, str] | None = None

    def stand(self, agent: Any, envs: Mapping[int, dict[str, str]]) -> None:
        """Starts them where they are wanted, and adds what the workers are to know to their environments.

        Args:
            agent: torch's, whose `_shutdown` ends them.
            envs: by local rank.
        """
        if self._variables is None:
            agent._setup_local_watchdog(envs=envs)
            agent._setup_healthcheck()
            some = next(iter(envs.values()), {})
            self._variables = {_TIMER_FILE: some[_TIMER_FILE]} if _TIMER_FILE in some else {}
        for environment in envs.values():
            environment |= self._variables
