"""What a worker asked the saver for, told in plain values and made again."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from dalsegno.agent.dlrover.orders import objects_of, plain_of


class Strategy:
    """Keeps some checkpoints."""

    def __init__(self, keep: int) -> None:
        self.keep, self.steps = keep, [1, 2]


def test_objects_come_back() -> None:
    """By class and attributes, through JSON."""
    order = SimpleNamespace(class_name="Saver", kwargs={"storage": Strategy(3), "shards": 2, "timeout": None})
    made = objects_of(json.loads(json.dumps(plain_of(order))))
    assert made.class_name == "Saver"
    assert (made.kwargs["shards"], made.kwargs["timeout"]) == (2, None)
    strategy = made.kwargs["storage"]
    assert isinstance(strategy, Strategy)
    assert (strategy.keep, strategy.steps) == (3, [1, 2])


@pytest.mark.parametrize("value", [threading.Lock(), print, lambda: 1, Strategy, b"x", {"a": {1, 2}}])
def test_what_cannot_be_told_is_an_error(value: object) -> None:
    """Then the next saver waits for the next world."""
    with pytest.raises(TypeError):
        plain_of(value)
