"""torch's watchdogs, of which an agent has one each."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from dalsegno.agent.workers.watchdogs import TorchWatchdogs


class Agent(SimpleNamespace):
    """As much of torch's as starts and ends them."""

    _setup_local_watchdog = LocalElasticAgent._setup_local_watchdog
    _setup_healthcheck = LocalElasticAgent._setup_healthcheck
    _shutdown = LocalElasticAgent._shutdown
    _log_watchdog_event = None


@pytest.mark.parametrize("wanted", [True, False])
def test_all_worlds_of_an_agent_have_one_server_of_timers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """Each world left a thread and a pipe in the directory for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1" if wanted else "0")
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    agent = Agent(_worker_watchdog=None, _health_check_server=None, _pcontext=None)
    watchdogs, before = TorchWatchdogs(), threading.active_count()
    told = []
    for world_size in (1, 2, 3):
        envs = {rank: {"TORCHELASTIC_RUN_ID": "job"} for rank in range(world_size)}
        watchdogs.stand(agent, envs)
        told += [own.get("TORCHELASTIC_TIMER_FILE") for own in envs.values()]
    pipes = [str(path) for path in tmp_path.iterdir()]
    assert len(pipes) == threading.active_count() - before == int(wanted)
    assert told == (pipes or [None]) * 6
    for pipe in pipes:
        with open(pipe, "w", encoding="ascii"):
            pass  # its thread waits for a first worker
    LocalElasticAgent._shutdown(agent)
    assert list(tmp_path.iterdir()) == []
