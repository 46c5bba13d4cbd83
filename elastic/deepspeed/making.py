"""What DeepSpeed does as it makes an engine, and need not do here. Measured with 0.19.8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

# The configuration of the engine whose weights all ranks load next.
_loaded_next: list[Mapping[str, Any]] = []


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
        if not is_next or getattr(engine, "has_moe_layers", False):
            known(engine)

    setattr(DeepSpeedEngine, _SENDS, send)


_SENDS = "_broadcast_model"
