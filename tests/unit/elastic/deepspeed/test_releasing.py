"""What ZeRO-3 gives up behind a module is what DeepSpeed gives up, and is found without a walk."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs the extra deepspeed")

from deepspeed.runtime.zero import partitioned_param_coordinator as theirs

from dalsegno.elastic.deepspeed import releasing

THEIRS = getattr(theirs.PartitionedParameterCoordinator, releasing._METHOD)


class Module:
    """With parameters, of which some are other modules', too."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters_of_it = parameters

    def named_parameters(self, recurse: bool = True) -> list[tuple[str, Any]]:
        return [(str(one.ds_id), one) for one in self.parameters_of_it]

    def ds_external_parameters(self) -> list[Any]:
        return []


class Coordinator:
    """What the method asks for, of a trace that is complete."""

    def __init__(self, order: list[Module], reach: int, fetched: dict[Any, int]) -> None:
        vars(self)[releasing._ORDER] = tuple(order)
        vars(self)[releasing._REACH] = reach
        vars(self)[releasing._FETCHED] = fetched

    def is_complete_trace(self) -> bool:
        return True


class Parameter(SimpleNamespace):
    __hash__ = object.__hash__


def trace(seed: int) -> Coordinator:
    """A model through forward and backward pass, with shared parameters and persistent ones."""
    chance = random.Random(seed)
    parameters = [
        Parameter(ds_id=n, ds_numel=chance.randint(1, 50), ds_persist=chance.random() < 0.2) for n in range(40)
    ]
    modules = [Module(chance.sample(parameters, chance.randint(0, 4))) for _ in range(30)]
    order = [*modules, *reversed(modules)]
    fetched = {one: chance.choice((-(10**10), 10**10, 20)) for one in parameters}
    return Coordinator(order, chance.choice((0, 30, 300, 10**9)), fetched)


@pytest.fixture
def known() -> Any:
    """DeepSpeed's own method, whoever has made an engine in this process."""
    if THEIRS.__module__ == releasing.__name__:
        pytest.skip("it was replaced before")
    return THEIRS


@pytest.mark.parametrize("seed", range(40))
def test_it_gives_up_what_deepspeed_gives_up(known: Any, seed: int) -> None:
    one = trace(seed)
    order = vars(one)[releasing._ORDER]
    found = 0
    for step, module in enumerate(order, start=1):  # it has begun the step behind the module
        wanted = known(one, module, step)
        assert releasing._params_to_release(one, module, step) == wanted
        found += len(wanted)
    assert found or vars(one)[releasing._REACH] > 300


def test_another_trace_is_another_look(known: Any) -> None:
    one, other = trace(1), trace(2)
    module, order = vars(other)[releasing._ORDER][3], vars(other)[releasing._ORDER]
    releasing._params_to_release(one, vars(one)[releasing._ORDER][0], 1)
    for name in (releasing._ORDER, releasing._FETCHED):
        vars(one)[name] = vars(other)[name]
    assert releasing._params_to_release(one, module, 4) == known(one, module, 4)
    assert len(order) == 60


def test_a_version_that_decides_otherwise_is_left_alone(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert releasing.names(known) == releasing._KNOWN_NAMES
    monkeypatch.setattr(releasing, "_KNOWN_NAMES", releasing._KNOWN_NAMES | {"something"})
    releasing.release_by_look_up()
    assert getattr(releasing._CLASS, releasing._METHOD) is known
