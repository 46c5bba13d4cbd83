"""What DeepSpeed is spared as it makes an engine: the same findings in one pass, and weights that all load next."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

import deepspeed.ops
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from dalsegno.elastic.deepspeed import making, releasing

THEIRS: Any = DeepSpeedEngine._check_for_duplicates


def said(check: Any, groups: list[list[Any]], module: nn.Module) -> str:
    optimizer = SimpleNamespace(param_groups=[{"params": group} for group in groups])
    try:
        check(SimpleNamespace(module=module), optimizer)
    except AssertionError as error:
        return str(error)
    return ""


def test_ours_says_what_theirs_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in a group, in two groups, not at all, and of another model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, two, *_ = every = list(model.parameters())
    other = nn.Parameter(torch.ones(1))
    cases = [[every], [[one, one]], [[one], [two, one]], [[other, other], every], [[]], []]
    answers = [said(making._check_for_duplicates, groups, model) for groups in cases]
    assert answers == [said(THEIRS, groups, model) for groups in cases]
    assert [bool(answer) for answer in answers] == [False, True, True, False, False, False]
    monkeypatch.setattr(DeepSpeedEngine, "_check_for_duplicates", THEIRS)
    making.count_duplicates()
    assert DeepSpeedEngine._check_for_duplicates is making._check_for_duplicates


def test_weights_that_all_load_next_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, of the engine with this very configuration; experts, and whatever else is made, are sent as ever."""
    sent: list[Any] = []
    monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", sent.append)
    monkeypatch.setattr(making, "_loaded_next", [])

    def made(config: Any, *, experts: bool = False) -> bool:
        before = len(sent)
        send: Any = DeepSpeedEngine._broadcast_model
        send(SimpleNamespace(config=config, has_moe_layers=experts))
        return len(sent) > before

    config, other = {"a": 1}, {"a": 1}
    assert made(config)
    making.send_nothing(config)
    assert not made(config)
    assert made(config)
    making.send_nothing(config)
    assert made(other)
    assert made(config)
    making.send_nothing(config)
    making.send_nothing(other)
    assert not made(other)
    making.send_nothing(other)
    assert made(other, experts=True)


def test_nothing_is_compiled_and_no_compiler_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DeepSpeed looks only when it is asked; an older version has looked already, and is told."""

    def refuses() -> dict[str, bool]:
        raise AssertionError("it has looked at all operations")

    communication: Any = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", refuses)
    monkeypatch.setattr(communication, "build_shm_op", communication.build_shm_op)
    making.compile_nothing()
    assert communication.build_shm_op() is None
    monkeypatch.delattr(communication, "build_shm_op")
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", known := {"deepspeed_shm_comm": True})
    making.compile_nothing()
    assert known == {"deepspeed_shm_comm": False}


def test_no_gradients_are_made_for_a_step_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading keeps them, Adagrad is made anew, and a version that makes the step is left alone."""
    theirs: list[Any] = []

    def known(optimizer: Any) -> None:
        theirs.append(optimizer)

    def steps(optimizer: Any) -> None:
        optimizer.step()

    known.__module__ = steps.__module__ = DeepSpeedZeroOptimizer.__module__

    weights = nn.Parameter(torch.ones(2))

    def made(*, offload: bool = False, kind: Any = torch.optim.AdamW) -> bool:
        optimizer: Any = SimpleNamespace(
            cpu_offload=offload, optimizer=kind([weights]), single_partition_of_fp32_groups=[weights]
        )
        weights.grad = torch.ones(2)
        before = len(theirs)
        initialize: Any = DeepSpeedZeroOptimizer.initialize_optimizer_states
        initialize(optimizer)
        assert (weights.grad is None) == (len(theirs) == before)
        return len(theirs) > before

    for version in (known, steps):
        monkeypatch.setattr(DeepSpeedZeroOptimizer, "initialize_optimizer_states", version)
        making.make_no_gradients()
        making.make_no_gradients()
        if version is known:
            assert [made(), made(offload=True), made(kind=torch.optim.Adagrad)] == [False, True, True]
    assert DeepSpeedZeroOptimizer.initialize_optimizer_states is steps


def test_what_a_script_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do more than DeepSpeed."""
    known: Any = DeepSpeedZeroOptimizer.initialize_optimizer_states

    @functools.wraps(known)
    def wrapped(optimizer: Any) -> None:
        known(optimizer)

    for theirs in (wrapped, lambda optimizer: None):
        monkeypatch.setattr(DeepSpeedZeroOptimizer, "initialize_optimizer_states", theirs)
        making.make_no_gradients()
        assert DeepSpeedZeroOptimizer.initialize_optimizer_states is theirs


def test_versions_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And say what they said."""
    helper: Any = importlib.import_module("deepspeed.utils.torch")
    known = getattr(helper.required_torch_version, "__wrapped__", helper.required_torch_version)
    monkeypatch.setattr(helper, "required_torch_version", known)
    making.compare_versions_once()
    ours: Any = helper.required_torch_version
    making.compare_versions_once()
    assert helper.required_torch_version is ours
    for options in ({"min_version": 2.1}, {"min_version": 99}, {"max_version": 1.5}, {"min_version": 2.1}):
        assert ours(**options) == known(**options)
    assert ours.cache_info().hits == 1


def stage_3(monkeypatch: pytest.MonkeyPatch, made: Any) -> Any:
    """ZeRO-3's optimizer, whose making is this function."""
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "__init__", made)
    making.make_stage_3_in_silence()
    making.make_stage_3_in_silence()
    return DeepSpeedZeroOptimizer_Stage3.__init__


def test_no_values_of_parameters_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are what they were, but nobody makes a line of all that they name."""
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    seen: list[Any] = []

    def made(self: Any, module: Any, init_optimizer: Any, param_names: Any, timers: Any = None) -> None:
        seen[:] = [param_names, timers, f"{locals()}"]

    init = stage_3(monkeypatch, made)
    init(None, "module", "optimizer", {one: "one", two: "two"}, timers=3)
    assert (seen[0], seen[0][two], seen[1], "<2 names>" in seen[2]) == ({one: "one", two: "two"}, "two", 3, True)
    init(None, "module", "optimizer", None)
    assert seen[0] is None


def test_this_version_of_stage_3_is_known() -> None:
    """Another one would be left alone, and be slow."""
    assert "param_names" in inspect.signature(DeepSpeedZeroOptimizer_Stage3.__init__).parameters
    assert releasing.names(Init._zero_init_param) == making._SENDS_EACH


@pytest.mark.parametrize("known", [True, False])
def test_parameters_that_all_load_next_are_cut_and_not_sent(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Of that one engine, even if its making fails; of one that is made in another way they are sent as ever."""
    called: list[str] = []
    theirs: Any = Init._zero_init_param if known else lambda self, parameter: called.append("sent")
    monkeypatch.setattr(Init, "_zero_init_param", theirs)
    monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", lambda engine: called.append("sent"))
    monkeypatch.setattr(making, "_loaded_next", [])
    cutting = SimpleNamespace(_convert_to_deepspeed_param=lambda parameter: called.append("known"))

    def made(self: Any, module: Any, init_optimizer: Any, param_names: Any) -> None:
        if Init._zero_init_param is not theirs or not known:
            init: Any = Init._zero_init_param
            init(cutting, SimpleNamespace(partition=lambda: called.append("cut")))
        if module == "bad":
            raise OSError(module)

    init, config = stage_3(monkeypatch, made), {"a": 1}

    def make(given: Any, module: str) -> list[str]:
        called.clear()
        send: Any = DeepSpeedEngine._broadcast_model
        send(SimpleNamespace(config=given))
        try:
            init(None, module, None, {})
        except OSError:
            called.append("failed")
        return [*called]

    spared = ["known", "cut"] if known else ["sent"]
    making.send_nothing(config)
    assert make(config, "good") == spared
    called.clear()
    init(None, "made without an engine", None, {})
    assert called == ([] if known else ["sent"])
    assert make(config, "good") == (["sent"] if known else ["sent", "sent"])
    making.send_nothing(config)
    assert make(config, "bad") == [*spared, "failed"]
    assert Init._zero_init_param is theirs
