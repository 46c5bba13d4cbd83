"""The cause of a master that is away is looked for, and told once."""

from __future__ import annotations

import queue
import threading

import pytest

from dalsegno.agent.control.link_cause import LinkCause

WRONG = "the master at m:1 shows a certificate that --tls-ca ca.pem does not accept"
SOON, LONG = 0.001, 30.0


class Told:
    """A cause that is found at a given look, and what was said of it."""

    def __init__(self, at_look: int = 3) -> None:
        self.at_look, self.looks = at_look, 0
        self.said: queue.Queue[str] = queue.Queue()
        self.waits = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def hopeless(self) -> str:
        self.looks += 1
        self.waits.set()
        assert self.goes_on.wait(LONG)
        return WRONG if self.looks >= self.at_look else ""


def test_it_is_told_once_each_time_that_the_master_is_away() -> None:
    told = Told()
    cause = LinkCause(told.hopeless, told.said.put, SOON)
    for _ in range(2):
        cause.changed(up=False, refused=False)
        cause.changed(up=False, refused=False)
        assert told.said.get(timeout=LONG) == WRONG
        cause.changed(up=True, refused=False)
    cause.close()
    assert told.said.empty()
    assert told.looks >= told.at_look


@pytest.mark.parametrize(("up", "refused"), [(True, False), (False, True)])
def test_nobody_looks_where_it_is_heard(up: bool, refused: bool) -> None:
    """A token that it refuses is told elsewhere."""
    told = Told()
    cause = LinkCause(told.hopeless, told.said.put, SOON)
    cause.changed(up, refused)
    assert [thread for thread in threading.enumerate() if thread.name == "link-cause"] == []
    assert told.looks == 0


def test_what_is_found_too_late_is_not_told() -> None:
    """It is heard again while the cause is looked for; and it is looked for by one thread at a time."""
    told = Told(at_look=1)
    cause = LinkCause(told.hopeless, told.said.put, SOON)
    told.goes_on.clear()
    cause.changed(up=False, refused=False)
    assert told.waits.wait(LONG)
    cause.changed(up=True, refused=False)
    cause.changed(up=False, refused=False)
    assert told.looks == 1
    told.at_look = 3
    told.goes_on.set()
    assert told.said.get(timeout=LONG) == WRONG
    assert told.looks == 3
    cause.close()
    assert told.said.empty()


def test_a_cause_is_looked_for_once_there_is_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who tells that the master is away goes on."""

    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told = Told()
    cause = LinkCause(told.hopeless, told.said.put, SOON)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        cause.changed(up=False, refused=False)
    cause.changed(up=False, refused=False)
    assert told.said.get(timeout=LONG) == WRONG
    cause.close()
