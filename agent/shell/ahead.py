"""What standby workers run before they have a place in a world."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.utils.api import macros

from ..script import Script
from ..standby.room import has_room_beside
from ..standby.worker_main import Assignment
from ..workers.torch_versions import set_local_rank
from ..workers.worker_env import job_environment
from .config import AgentConfig

__all__ = ["assignments_ahead"]

logger = logging.getLogger(__name__)


def assignments_ahead(
    agent: Any,
    spec: WorkerSpec,
    config: AgentConfig,
    script: Script,
    running: Iterable[int],
    node_environment: Callable[[], Mapping[str, str]],
) -> list[Assignment]:
    """What each rank of this node runs ahead; empty where memory is short, or that cannot be found out now.

    Ranks train meanwhile, so nothing that fails here may end this agent: a directory that was deleted, no descriptor
    left. The next world then begins without it.

    Args:
        agent: torch's agent, which knows how ranks are told their numbers.
        spec: torch's description of the workers.
        config, script: the agent's.
        running: the processes that train.
        node_environment: returns what each process of this node is told.
    """
    if not has_room_beside(running):
        return []
    try:
        ours = {**job_environment(config.job_id, spec.role, config.nproc, os.environ), **node_environment()}
        found, cwd = [], os.getcwd()
        for local in range(config.nproc):
            environment: Any = dict(ours)
            set_local_rank(agent, environment, local, spec)
            own = macros.substitute(list(script.own), str(local))
            found.append(Assignment(own, script.module, {**os.environ, **environment}, cwd))
    except Exception:
        logger.exception("nothing runs ahead")
        return []
    return found
