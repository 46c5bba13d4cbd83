"""What DeepSpeed does as it makes an engine, and need not do here. Measured with 0.19.8."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed.ops
import deepspeed.utils.torch
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .releasing import names, release_by_look_up

# The configuration of the engine whose weights all ranks load next.
_loaded_next: list[Mapping[str, Any]] = []
# Whether the engine that is being made is that one.
_spared = [False]
# What ZeRO-3's method for each parameter asks for, in the versions that send it as they cut it.
_SENDS_EACH = frozenset(
    {
        *("_convert_to_deepspeed_param", "get_partition_dp_group", "dist", "get_world_group", "broadcast", "data"),
        *("view", "torch", "uint8", "get_global_rank", "partition"),
    }
)


def spare_work() -> None:
    """All of this that is the same for each engine. May be called again."""
    compile_nothing()
    count_duplicates()
    make_no_gradients()
    make_stage_3_in_silence()
    compare_versions_once()
    release_by_look_up()


def compile_nothing() -> None:
    """Has DeepSpeed compile no collectives for CPUs, which takes 40 CPU seconds, and is not used under torchrun.

    (If a process is killed during that, a lock remains that blocks the next start for ever.) To learn whether it could
    compile them, DeepSpeed 0.19 looks at all that it can compile, with setuptools and a compiler: 0.1 s for each rank.
    """
    # As an attribute of its package it is hidden by torch itself.
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    if hasattr(communication, "build_shm_op"):
        communication.build_shm_op = _build_nothing
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _build_nothing() -> None:
    """Stands for an operation that cannot be compiled here."""


def make_no_gradients() -> None:
    """Has ZeRO 1 and 2 make no gradients of zeros, as large as a rank's weights in fp32, which they delete again.

    They were for a step that made an optimizer's states; versions that make it are left alone, and so are offloading,
    which keeps the gradients, Adagrad, which is made anew, and what a script has put in the method's place.
    """
    known = DeepSpeedZeroOptimizer.initialize_optimizer_states
    ours_or_a_scripts = hasattr(known, "__wrapped__") or known.__module__ != DeepSpeedZeroOptimizer.__module__
    if ours_or_a_scripts or "step" in known.__code__.co_names:
        return

    @functools.wraps(known)
    def initialize(optimizer: Any) -> None:
        if optimizer.cpu_offload or isinstance(optimizer.optimizer, torch.optim.Adagrad):
            known(optimizer)
            return
        for weights in optimizer.single_partition_of_fp32_groups:
            weights.grad = None

    DeepSpeedZeroOptimizer.initialize_optimizer_states = initialize


class _Names(dict[Any, str]):
    """Names of parameters, which nobody writes out with their values."""

    def __repr__(self) -> str:
        return f"<{len(self)} names>"


def make_stage_3_in_silence() -> None:
    """Has ZeRO-3 write out no values of parameters, and send none that all load next, see `send_nothing`.

    DeepSpeed 0.19 makes a line of all that its optimizer is given, with the values of each parameter, and then does not
    print it: 0.8 ms for each. It also sends each one by itself before it cuts it: 0.5 ms for each of two ranks.
    """
    known: Any = DeepSpeedZeroOptimizer_Stage3.__init__
    if hasattr(known, "__wrapped__"):
        return
    signature = inspect.signature(known)

    @functools.wraps(known)
    def init(*given: Any, **named: Any) -> None:
        bound = signature.bind(*given, **named)
        parameters = bound.arguments.get("param_names")
        if type(parameters) is dict:
            bound.arguments["param_names"] = _Names(parameters)
        with _cutting_in_silence() if _spared[0] else nullcontext():
            _spared[0] = False
            known(*bound.args, **bound.kwargs)

    DeepSpeedZeroOptimizer_Stage3.__init__ = init


@contextmanager
def _cutting_in_silence() -> Iterator[None]:
    known: Any = Init._zero_init_param
    if names(known) == _SENDS_EACH:
        Init._zero_init_param = _cut
    try:
        yield
    finally:
        Init._zero_init_param = known


def _cut(context: Any, parameter: Any) -> None:
    context._convert_to_deepspeed_param(parameter)
    parameter.partition()


def compare_versions_once() -> None:
    """Has DeepSpeed read torch's version once, and not for each parameter: 0.03 s at 2,400 of them."""
    known = deepspeed.utils.torch.required_torch_version
    if not hasattr(known, "cache_info"):
        deepspeed.utils.torch.required_torch_version = functools.cache(known)


def count_duplicates() -> None:
    """Has DeepSpeed 0.19 look for parameters that an optimizer has twice in one pass.

    It lists all of the optimizer's for each of the model's: a second and more at 2,400 of them.
    """
    if hasattr(DeepSpeedEngine, "_check_for_duplicates"):
        DeepSpeedEngine._check_for_duplicates = _check_for_duplicates


def _check_for_duplicates(engine: Any, optimizer: Any) -> None:
    found = Counter(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    for name, parameter in engine.module.named_parameters():
        assert found[id(parameter)] <= 1, (
            f"Parameter with name: {name} occurs multiple times in optimizer.param_groups. Make sure it only appears "
            "once to prevent undefined behavior."
        )


def send_nothing(config: Mapping[str, Any]) -> None:
    """Has DeepSpeed send no weights from rank 0 to the others as it makes one engine: all load the same ones next.

    It sends each parameter by itself: half a second for 2,400 of two ranks.

    Args:
        config: This very object is given to ``deepspeed.initialize``. Any other engine is made as ever.
    """
    known = getattr(DeepSpeedEngine, _SENDS, None)
    if known is None:
        return
    _loaded_next[:] = [config]
    if getattr(known, "__module__", "") == __name__:
        return

    def send(engine: Any) -> None:
        is_next = any(getattr(engine, "config", None) is one for one in _loaded_next)
        _loaded_next.clear()
        _spared[0] = is_next and not getattr(engine, "has_moe_layers", False)
        if not _spared[0]:
            known(engine)

    setattr(DeepSpeedEngine, _SENDS, send)


_SENDS = "_broadcast_model"
