"""The agent as torch's own code calls it, whose private methods differ between versions."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.shell.config import AgentConfig
from dalsegno.agent.shell.elastic_agent import ElasticAgent
from dalsegno.agent.shell.mailbox import Mailbox
from dalsegno.agent.workers.worker_env import WorldPlace, worker_environment
from dalsegno.protos import control_pb2, worker_pb2

# Of torch 2.11 and older at the end and on a signal; of later ones.
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((signal.SIGTERM,), {}),
    ((), {"timeout": 30}),
    ((signal.SIGTERM,), {"timeout": 30}),
]


def before_2_13(self: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM) -> None:
    self.killed_by = death_sig  # type: ignore[attr-defined]


def since_2_13(self: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
    self.killed_by = death_sig  # type: ignore[attr-defined]


@pytest.mark.parametrize("theirs", [before_2_13, since_2_13])
@pytest.mark.parametrize(("given", "more"), CALLS)
def test_it_ends_with_every_version_of_torch(
    monkeypatch: pytest.MonkeyPatch, theirs: Any, given: tuple[Any, ...], more: dict[str, Any]
) -> None:
    """A finished run under torch 2.11 ended with a TypeError and exit code 1."""
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", theirs)
    agent = object.__new__(ElasticAgent)
    agent._context = agent._pool = None
    rest = ("_adoption", "_beside", "_effects", "_link", "_lifeline")
    for name in rest:
        setattr(agent, name, MagicMock())
    agent._shutdown(*given, **more)
    assert agent.killed_by == signal.SIGKILL  # type: ignore[attr-defined]
    assert all(getattr(agent, name).close.called for name in rest)


@pytest.mark.parametrize(("replicas", "given", "told"), [(1, True, "dir"), (0, True, None), (1, False, None)])
def test_ranks_keep_memory_checkpoints_where_the_job_does(replicas: int, given: bool, told: str | None) -> None:
    """Its own flag makes a node's memory: in a job without there would be no copies."""
    agent = object.__new__(ElasticAgent)
    agent._effects = MagicMock()
    agent._effects.settings = control_pb2.Settings(memory_replicas=replicas)
    agent._effects.memory.directory.return_value = "dir"  # type: ignore[union-attr]
    if not given:
        agent._effects.memory = None
    assert agent._memory_directory("run-0001") == told


@pytest.mark.parametrize(("own_flag", "of_job"), [(30, 60), (60, 30)])
def test_ranks_are_told_what_their_own_node_has_to_leave_in(own_flag: float, of_job: float) -> None:
    """On a signal a node leaves by its own flag, on an order by the job's: ranks are not told which it will be."""
    agent = object.__new__(ElasticAgent)
    for name in ("_effects", "_link", "_watch", "_lifeline", "_beside", "_hub"):
        setattr(agent, name, MagicMock())
    for own in (agent._effects.node_variables, agent._hub.variables, agent._lifeline.environment):
        own.return_value = {}  # type: ignore[attr-defined]
    agent._beside.variables, agent._watch.signals = {}, ()  # type: ignore[misc]
    agent._effects.settings = control_pb2.Settings(drain_timeout=of_job)
    settings = control_pb2.Settings(drain_timeout=own_flag)
    agent._config = AgentConfig("job", 1, settings, Path("checkpoints"), Path("logs"))
    world = control_pb2.World(epoch=1, run_id="run-0001")
    place = WorldPlace(group_rank=0, first_rank=0, nproc=1, nodes=1, world_size=1, node="node")
    (of_world,) = worker_environment(world, place, agent._effects.settings, 1, "job", Path("runs"), "default", {})
    assert (of_world | agent._node_environment(1))["DALSEGNO_DRAIN_TIMEOUT"] == "30"


def test_an_exit_is_told_whatever_becomes_of_what_was_saved_last() -> None:
    """The decisions waited for it for ever."""
    agent = object.__new__(ElasticAgent)
    agent._mailbox = Mailbox()
    for name in ("_effects", "_beside", "_adoption", "_link"):
        setattr(agent, name, MagicMock())
    agent._link.last_step.return_value = 7  # type: ignore[attr-defined]
    agent._beside.settle.side_effect = MemoryError  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        agent._exited(2, 1, 3)(0, 0, "")
    told = [agent._mailbox.get(0.1) for _ in range(3)]
    assert told[:2] == [ev.EndedWell(2, 3), ev.StepsCounted(2, 7)]
    assert isinstance(told[2], ev.WorkerExited)


def test_what_fails_at_the_end_costs_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for a thread the first step failed, and the others were left out."""
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", MagicMock(side_effect=RuntimeError("can't start new thread")))
    agent = object.__new__(ElasticAgent)
    rest = ("_adoption", "_context", "_pool", "_beside", "_effects", "_link", "_lifeline")
    for name in rest:
        setattr(agent, name, MagicMock())
        getattr(agent, name).close.side_effect = RuntimeError("can't start new thread")
    agent._shutdown()
    assert all(getattr(agent, name).close.called for name in rest if name != "_context")


def test_why_a_save_failed_reaches_who_makes_room() -> None:
    """Of a quota nobody else hears."""
    agent = object.__new__(ElasticAgent)
    agent._mailbox, agent._effects = Mailbox(), MagicMock()
    failed = worker_pb2.ToAgent(save_failed=worker_pb2.SaveFailed(reason="Disk quota exceeded"))
    agent._worker_said(1, 0, failed)
    agent._effects.room.refused.assert_called_once_with("Disk quota exceeded")
    assert agent._mailbox.get(0.1) == ev.WorkerSaid(1, 0, failed)
