"""The queue of the thread that decides."""

from __future__ import annotations

import threading

import pytest

from dalsegno.agent.shell.mailbox import Mailbox

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("seconds", [None, 1e15, float("inf")])
def test_a_wait_may_be_as_long_as_it_likes(seconds: float | None) -> None:
    """A node that waits for its master for ever hears of its own workers meanwhile."""
    mailbox: Mailbox[str] = Mailbox()
    timer = threading.Timer(0.2, lambda: mailbox.put("a worker has ended"))
    timer.start()
    assert mailbox.get(seconds) == "a worker has ended"
    assert mailbox.get(0.01) is None
