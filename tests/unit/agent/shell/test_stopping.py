"""How long a script that is asked to save has for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.shell import stopping
from dalsegno.agent.shell.stopping import Stopping


class Scene:
    """A script that does not save, and a volume that is looked at for so many seconds before it is asked."""

    met, signs, save_timeout = False, (), 0.0

    def __init__(self, looks_seconds: float, ends_after: float | None) -> None:
        self.now = 0.0
        self.looks_seconds, self.ends_after = looks_seconds, ends_after
        self.over = False
        self.waited: list[float] = []
        self.graces: list[float] = []
        self.said: list[str] = []

    def monotonic(self) -> float:
        return self.now

    # ---- what takes its saves

    def request(self) -> bool:
        self.now += self.looks_seconds
        return True

    def wait_met(self, timeout_seconds: float, over: Any) -> bool:
        self.waited.append(timeout_seconds)
        if self.ends_after is not None and not self.over:
            self.over, timeout_seconds = True, self.ends_after
        self.now += timeout_seconds
        return False

    def interrupt(self) -> None: ...

    def notice(self) -> None: ...

    def stopped(self, *_: Any, **__: Any) -> Any:
        return ev.WorkersStopped(1)

    # ---- the workers

    def ask(self, signum: int) -> int:
        self.now += 1.0
        return 1

    def stop(self, grace: float, *_: Any) -> None:
        self.graces.append(grace)

    # ---- Flash Checkpoint

    def freeze(self) -> None: ...

    def say(self, text: str, warning: bool) -> None:
        self.said.append(text)


def asked(monkeypatch: pytest.MonkeyPatch, looks_seconds: float, ends_after: float | None = None) -> Scene:
    """A script with a notice of 20 s; a quarter of that is for its end."""
    scene: Any = Scene(looks_seconds, ends_after)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=scene.monotonic))
    order = ev.StopWorkers(1, 20.0, ask="SIGUSR1")
    Stopping(order, scene, scene, scene, 60.0, 0.0, scene.say)._stop()
    made: Scene = scene
    return made


@pytest.mark.parametrize(("looks_seconds", "left"), [(0.0, 14.0), (8.0, 6.0), (30.0, 0.0)])
def test_the_notice_counts_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch, looks_seconds: float, left: float
) -> None:
    """A slow volume does not move its end: the machine is gone then."""
    scene = asked(monkeypatch, looks_seconds)
    assert scene.waited == [left]
    assert scene.said == [f"the script did not save within {left:.0f} s of SIGUSR1: it is told to end"]
    assert scene.graces == [5.0 if left else 0.0]


def test_what_comes_late_into_sight_does_not_move_it_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script saved and ended, and the volume shows that late. What was kept for its end is left for that."""
    assert asked(monkeypatch, 0.0, ends_after=4.0).waited == [14.0, 5.0]
    assert asked(monkeypatch, 0.0, ends_after=14.0).waited == [14.0, 5.0]
    assert asked(monkeypatch, 8.0, ends_after=6.0).waited == [6.0, 5.0]
    assert asked(monkeypatch, 17.0, ends_after=0.0).waited == [0.0, 2.0]
    assert asked(monkeypatch, 30.0, ends_after=0.0).waited == [0.0, 0.0]
