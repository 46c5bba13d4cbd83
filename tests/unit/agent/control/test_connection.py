"""The way to the master while the file system of its token hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dalsegno.agent.control.connection import Connector, Credentials


class HungDisk:
    """Reads the token, and does not come back before `answer`."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def read(self) -> Credentials:
        self.asked.set()
        self.answer.wait(60)
        return Credentials("token")


@pytest.fixture
def disk() -> Iterator[HungDisk]:
    made = HungDisk()
    yield made
    made.answer.set()


def test_an_agent_ends_while_its_token_cannot_be_read(disk: HungDisk) -> None:
    """Nobody waits for who reads it: not who closes, nor who only wants to know what there is."""
    connector = Connector(lambda: ["127.0.0.1:1"], disk.read)
    found: list[object] = []
    opening = threading.Thread(target=lambda: found.append(connector.get()), daemon=True)
    opening.start()
    assert disk.asked.wait(30)

    def end() -> None:
        assert connector.present is None
        assert connector.metadata == ()
        connector.failed(None)
        connector.close()

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive()
    disk.answer.set()
    opening.join(30)
    assert found == [None], "a channel that was opened after the end is closed"


def test_the_newest_token_counts(disk: HungDisk) -> None:
    """A link that is open stays until it is found broken."""
    disk.answer.set()
    connector = Connector(lambda: ["127.0.0.1:1"], disk.read)
    link = connector.get()
    assert link is not None
    assert connector.present is link
    assert connector.metadata == (("authorization", "Bearer token"),)
    connector.failed(link)
    assert connector.present is None
    connector.close()
