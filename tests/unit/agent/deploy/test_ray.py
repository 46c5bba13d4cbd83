"""The driver for Ray, with a Ray in which every agent ends at once; `tests/integration/test_ray.py` has a real one."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.support.pages.sources import ROOT

SCRIPT = ROOT / "deploy" / "ray" / "train_on_ray.py"


class RayError(Exception):
    """What all of Ray's own errors are."""


# No kind of the other, as in Ray.
RAYS = {name: type(name, (RayError,), {}) for name in ("RayActorError", "OutOfMemoryError")}


def driver(
    monkeypatch: pytest.MonkeyPatch, codes: list[int | str], rays: tuple[str, ...] = tuple(RAYS)
) -> tuple[dict[str, Any], list[int]]:
    """The script's names, and the agents that it starts: each ends with the next of these, the last for ever.

    A code, or the name of an error of Ray's, of which this Ray has those of `rays`.
    """

    def get(run: int) -> int:
        end = codes[min(run, len(codes) - 1)]
        if isinstance(end, str):
            raise RAYS[end]
        return end

    ray: Any = ModuleType("ray")
    ray.remote = lambda **_: lambda actor: actor
    ray.wait = lambda runs, **_: (runs[:1], runs[1:])
    ray.get = get
    exceptions: Any = ModuleType("ray.exceptions")
    for name in rays:
        setattr(exceptions, name, RAYS[name])
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    names: dict[str, Any] = {"__name__": "train_on_ray"}
    exec(compile(SCRIPT.read_text(encoding="utf-8"), str(SCRIPT), "exec"), names)
    started: list[int] = []

    def start(_flags: Any, machines: dict[int, None]) -> None:
        assert len(started) < 5000
        machines[len(started)] = None
        started.append(len(started))

    names["start"] = start
    return names, started


def test_a_killed_agent_is_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two again up to a hundred times; then the driver ends as a job that failed, and says why."""
    names, started = driver(monkeypatch, [-9])
    assert names["train"](argparse.Namespace(nodes=2), {}) == 1
    assert len(started) == 2 + 200
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_on_ray: agents were killed 201 times")


def test_who_leaves_on_notice_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spot machines come and go as often as they like."""
    names, started = driver(monkeypatch, [*[75, 76] * 500, -9, 0])
    assert names["train"](argparse.Namespace(nodes=1), {}) == 0
    assert len(started) == 1002


@pytest.mark.parametrize("lost", RAYS)
def test_whom_ray_has_ended_is_started_again(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """With its machine, or by Ray's memory monitor. If the driver ended, all other agents would leave."""
    names, started = driver(monkeypatch, [lost, 0])
    assert names["train"](argparse.Namespace(nodes=1), {}) == 0
    assert len(started) == 2


def test_who_has_too_little_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the kernel kills is."""
    names, started = driver(monkeypatch, ["OutOfMemoryError"])
    assert names["train"](argparse.Namespace(nodes=1), {}) == 1
    assert len(started) == 1 + 100


def test_an_old_ray_has_no_memory_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its error."""
    names, _ = driver(monkeypatch, ["RayActorError", 0], ("RayActorError",))
    assert names["train"](argparse.Namespace(nodes=1), {}) == 0
