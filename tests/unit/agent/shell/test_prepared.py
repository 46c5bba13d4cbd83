"""What is prepared beside training, and started a second time, may fail without ending the agent."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.script import FLAG
from dalsegno.agent.shell import elastic_agent
from dalsegno.agent.shell.elastic_agent import ElasticAgent
from dalsegno.agent.shell.own_events import Exited


def agent_that_prepares() -> ElasticAgent:
    """One with a pool, whose script may run ahead."""
    agent = object.__new__(ElasticAgent)
    agent._context, agent._prepared_for = None, 1
    agent._pool = MagicMock()
    agent._config = SimpleNamespace(run_ahead=True, deepspeed_load_universal=False, job_id="job", nproc=1)  # type: ignore[assignment]
    agent._adoption = SimpleNamespace(wanted=False)  # type: ignore[assignment]
    agent._worker_group = SimpleNamespace(spec=SimpleNamespace(role="default", virtual_local_rank=False))  # type: ignore[assignment]
    agent._script = SimpleNamespace(own=("train.py",), module=False)  # type: ignore[assignment]
    agent._node_environment = lambda epoch: {"EPOCH": str(epoch)}  # type: ignore[method-assign]
    return agent


def test_scripts_run_ahead_where_the_agent_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its directory, with what each process of this node is told."""
    monkeypatch.chdir(tmp_path)
    agent: Any = agent_that_prepares()
    agent._prepare(low_priority=True)
    (ahead,) = agent._pool.fill.call_args.kwargs["ahead"]
    assert (ahead.arguments, ahead.cwd, ahead.environment["EPOCH"]) == (["train.py"], str(tmp_path), "2")


def test_a_deleted_directory_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first step the agent looks where it is. Nothing runs ahead then, and imports are still prepared."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    agent: Any = agent_that_prepares()
    with caplog.at_level(logging.WARNING):
        agent._prepare(low_priority=True)
    assert agent._pool.fill.call_args.kwargs == {"low_priority": True, "ahead": []}
    assert "nothing runs ahead" in caplog.text


def test_without_a_descriptor_for_the_interfaces_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """What a process is told of this node is asked of the kernel each time."""
    agent: Any = agent_that_prepares()
    agent._node_environment = MagicMock(side_effect=OSError(24, os.strerror(24)))
    agent._prepare(low_priority=True)
    assert agent._pool.fill.call_args.kwargs["ahead"] == []
    assert "Too many open files" in caplog.text


def test_a_second_start_without_the_flag_that_fails_is_an_event() -> None:
    """As a first one that fails: the master hears why, and the agent lives on."""
    agent: Any = object.__new__(ElasticAgent)
    agent._state = SimpleNamespace(epoch=SimpleNamespace(has_session=False), world=SimpleNamespace(epoch=3))
    agent._context, agent._use_flag, agent._starts = MagicMock(), True, 1
    agent._script = SimpleNamespace(arguments=("x",))
    agent._arguments = lambda world: ("x", FLAG)
    agent._mailbox, agent._adoption, agent._worker_group = MagicMock(), MagicMock(), None
    agent._start_workers = MagicMock(side_effect=OSError(28, os.strerror(28)))
    agent._handle(Exited(3, 0, 2, "unrecognized arguments", start=1))
    (failed,) = [one.args[0] for one in agent._mailbox.put.call_args_list if isinstance(one.args[0], ev.StartFailed)]
    assert failed.epoch == 3
    assert "No space left on device" in failed.message


def test_a_second_start_that_fails_is_told_with_its_own_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the ends of the ranks of the first one, which come before it."""
    agent: Any = object.__new__(ElasticAgent)
    agent._state = SimpleNamespace(
        epoch=SimpleNamespace(has_session=False), world=SimpleNamespace(epoch=3), workers=handling.Workers.RUNNING
    )
    agent._context, agent._use_flag, agent._starts, agent._pool = MagicMock(), True, 1, None
    agent._script, agent._advised = SimpleNamespace(arguments=("x",)), set()
    agent._arguments = lambda world: ("x", FLAG) if agent._use_flag else ("x",)
    events: list[ev.Event] = []
    agent._mailbox, agent._adoption, agent._worker_group = SimpleNamespace(put=events.append), MagicMock(), None
    refused = [Exited(3, rank, 2, "unrecognized arguments", start=1) for rank in range(2)]
    killed = Exited(3, 1, -9, start=1)
    agent._context.stop = lambda grace: events.extend([refused[1], killed])
    agent._start_workers = MagicMock(side_effect=OSError(28, os.strerror(28)))
    decided: list[ev.Event] = []
    monkeypatch.setattr(handling, "handle", lambda state, event, now: (state, decided.append(event) or []))
    monkeypatch.setattr(elastic_agent, "told", lambda *_: [])
    agent._handle(refused[0])
    for event in events:
        agent._handle(event)
    assert [type(event) for event in decided] == [ev.Remark, ev.StartFailed]
