"""What a leave does to an evaluation of a Trainer of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.swift_plugin.hf.run import Leaving
from dalsegno.swift_plugin.hf.trainer import ElasticTrainer


class Transformers:
    """As transformers' Trainer: logs, evaluates if that is due, and may leave it."""

    def _maybe_log_save_evaluate(self, *_: Any, **__: Any) -> None:
        if self.control.should_evaluate:  # type: ignore[attr-defined]
            self.evaluations.append(self.elastic_run.may_leave)  # type: ignore[attr-defined]
            if self.elastic_run.may_leave and self.elastic_run.wanted:  # type: ignore[attr-defined]
                self.elastic_run.wanted.pop()  # type: ignore[attr-defined]
                raise Leaving


class FailingLeave:
    """A run whose leave's save fails each time."""

    def __init__(self) -> None:
        self.wanted, self.left, self.looks = [1, 2, 3], 0, 0
        self.draining = self.may_leave = False
        self.unfinished: Any = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self.may_leave = True
        yield
        self.may_leave = False

    def mark(self, *_: Any, **__: Any) -> None: ...

    def look(self) -> None:
        self.looks += 1

    def leave(self) -> None:
        self.draining, self.left = False, self.left + 1


def test_an_evaluation_that_a_leave_cuts_short_stays_one_that_it_can() -> None:
    """Also once its save has failed: the leaver's notice is shorter than an evaluation may be."""
    trainer: Any = object.__new__(type("Trainer", (ElasticTrainer, Transformers), {}))
    trainer.elastic_run, trainer.evaluations, trainer._globalstep_last_logged = FailingLeave(), [], 1
    trainer.control = SimpleNamespace(should_log=False, should_evaluate=True, should_save=False)
    trainer.state = SimpleNamespace(global_step=1)
    trainer._save_checkpoint = lambda *_: None
    trainer._maybe_log_save_evaluate(0.0, None, None, None)
    assert (trainer.evaluations, trainer._run.left, trainer._run.looks) == ([True] * 4, 3, 0)


class Hub:
    """As transformers' Trainer where it pushes: each checkpoint begins an upload."""

    def _push_from_checkpoint(self, folder: str) -> None:
        self.pushed.append(folder)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("draining", "in_memory", "wanted"), [(False, False, ["x"]), (True, False, []), (False, True, [])]
)
def test_what_a_leave_saves_is_not_uploaded(draining: bool, in_memory: bool, wanted: list[str]) -> None:
    """The process ends next: the upload would never come to its end."""
    trainer: Any = object.__new__(type("Trainer", (ElasticTrainer, Hub), {}))
    trainer.elastic_run = SimpleNamespace(draining=draining, in_memory=in_memory, writing=None)
    trainer.pushed = []
    trainer._push_from_checkpoint("x")
    assert trainer.pushed == wanted
