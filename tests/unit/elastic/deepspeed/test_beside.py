"""What is loaded beside an engine: what does not fit is said so, and what the machine lacks is not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dalsegno.elastic.deepspeed import beside
from dalsegno.elastic.deepspeed.beside import PARTS, BesideEngine


class Average:
    """A part that says what it is told to."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (KeyError("shadow"), True),
        (RuntimeError("size mismatch"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_a_part_that_does_not_fit_is_told_from_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_refused: bool
) -> None:
    """Only the first would be the same at another start."""
    monkeypatch.setattr(beside, "_saved", lambda path: {PARTS: {"average": {"type": "Average", "state": {}}}})
    engine = SimpleNamespace(module=nn.Linear(1, 1))
    resume: Any = SimpleNamespace(path=Path("step-2"), unless_damaged=nullcontext)
    with pytest.raises(ValueError if is_refused else type(error)) as caught:
        BesideEngine(engine, {"average": Average(error)}).load(resume)
    assert ("the average in step-2 does not fit this one" in str(caught.value)) == is_refused
