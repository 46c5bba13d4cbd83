"""Callbacks' states find their own callbacks again."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.elastic import Callback
from dalsegno.elastic.trainer.hooks import CallbackKey, Hooks, matched


class Average(Callback):
    def __init__(self, decay: float, key: str = "") -> None:
        self.decay, self.key, self.kept = decay, key, None

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = state["kept"]


class Other(Average): ...


class Silent(Callback): ...


class Session:
    rank = 0

    def gather(self, message: Any) -> list[Any]:
        return [message]


def saved(*hooks: Any) -> dict[str, Any]:
    made = Hooks(hooks)
    for number, hook in enumerate(hooks):
        hook.kept = number  # after they were made, as in training
    return made.state_dict()


def loaded(state: dict[str, Any], *hooks: Any) -> list[Any]:
    Hooks(hooks).load_state_dict(state, Session())  # type: ignore[arg-type]
    return [getattr(hook, "kept", None) for hook in hooks]


def test_another_order_and_one_that_is_gone() -> None:
    """By what they were made with; each has its own state again, or none."""
    state = saved(Average(0.9), Silent(), Average(0.99), Average(0.5))
    assert loaded(state, Average(0.99), Average(0.5), Silent(), Average(0.9)) == [2, 3, None, 0]
    assert loaded(state, Average(0.5), Average(0.9)) == [3, 0]
    assert loaded(state, Average(0.5), Average(0.9), Average(0.99), Average(0.7)) == [3, 0, 2, None]


def test_the_only_one_may_be_made_otherwise() -> None:
    assert loaded(saved(Average(0.9)), Average(0.5)) == [0]
    assert loaded(saved(Average(0.9), Average(0.8)), Average(0.5), Average(0.9)) == [1, 0]


def test_what_cannot_be_told_apart_is_refused() -> None:
    state = saved(Average(0.9), Average(0.8))
    with pytest.raises(ValueError, match=r"states of 2 callbacks of class Average .*Callback\.key"):
        loaded(state, Average(0.5), Average(0.6))
    with pytest.raises(ValueError, match=r"states of 2 callbacks of class Average .* than the 1 here"):
        loaded(state, Average(0.5))


def test_a_key_tells_them_apart() -> None:
    """Whatever they are made with."""
    state = saved(Average(0.9, "a"), Average(0.9, "b"))
    assert loaded(state, Average(0.1, "b"), Average(0.2, "a")) == [1, 0]
    assert Hooks([Average(0.9, "a"), Average(0.9, "b")]).alike == []
    assert Hooks([Average(0.9), Average(0.8), Silent(), Silent()]).alike == []
    assert Hooks([Average(0.9), Average(0.9)]).alike == ["Average"]


def test_what_is_lost_or_new_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loaded(saved(Average(0.9)), Other(0.9), Silent())
    assert caplog.messages == [
        "the state of Average is in the checkpoint, and no callback takes it: it is lost",
        "the checkpoint has no state of Other, which begins anew",
    ]


def test_checkpoints_of_earlier_versions_go_by_names() -> None:
    """Which were counted over all callbacks."""
    state = {"callbacks": {"Average": {"kept": 7}, "Silent": {}, "Average-2": {"kept": 8}}}
    assert loaded(state, Average(0.1), Silent(), Average(0.2)) == [7, None, 8]


def test_nothing_that_a_callback_was_made_with_is_written_down() -> None:
    (known,) = Hooks([Average(0.9, "secret")]).state_dict()["callback_settings"].values()
    assert known[0] == "Average"
    assert "secret" not in known[1]
    assert matched({"a": CallbackKey("A", "x")}, {}).gone == ["a"]


class Ends(Callback):
    """Notes what was said before it hears of the end, and may fail there."""

    def __init__(self, log: pytest.LogCaptureFixture, failure: BaseException | None = None) -> None:
        self.log, self.failure, self.before = log, failure, list[str]()

    def on_fit_end(self, trainer: Any) -> None:
        self.before.append(" ".join(record.getMessage() for record in self.log.records))
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize("raised", [KeyError("the\nbatch"), SystemExit(83), None])
@pytest.mark.parametrize("fails", [False, True])
def test_an_error_is_told_before_callbacks_hear_of_the_end(
    caplog: pytest.LogCaptureFixture, raised: BaseException | None, fails: bool
) -> None:
    """A rank that fails alone may wait there for the others, and its traceback is printed only behind that."""
    last = RuntimeError("no space for the report")
    one, closed = Ends(caplog, last if fails else None), list[bool]()
    hooks, trainer = Hooks([one]), SimpleNamespace()
    found: BaseException | None = None
    try:
        with hooks.ending(trainer, lambda: closed.append(True)):  # type: ignore[arg-type]
            hooks.begin(trainer)  # type: ignore[arg-type]
            if raised is not None:
                raise raised
    except BaseException as error:
        found = error
    assert closed == [True]
    is_error = isinstance(raised, Exception)
    assert ["the training fails with KeyError: 'the\\nbatch'" in said for said in one.before] == [is_error]
    assert found is (raised if is_error or not fails else last)
    assert ("on_fit_end fails, too: RuntimeError: no space for the report" in caplog.text) == (is_error and fails)


def test_an_error_before_the_training_begins_is_for_no_callback(caplog: pytest.LogCaptureFixture) -> None:
    one = Ends(caplog)
    with pytest.raises(KeyError), Hooks([one]).ending(SimpleNamespace(), lambda: None):  # type: ignore[arg-type]
        raise KeyError("batch")
    assert (one.before, caplog.records) == ([], [])
