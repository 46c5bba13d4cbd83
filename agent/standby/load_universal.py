"""In a worker: lets DeepSpeed load universal files in a script whose configuration does not say so.

The agent's `--deepspeed-load-universal` asks for it, and a worker does it where its resume point is universal files:
an engine's `load_checkpoint` then takes what `latest_universal` names. What it leaves out of that is told.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from dalsegno.protos.imported import when_imported

__all__ = ["install"]

# With this module a script has our own loading, which repairs all of it.
_OURS = "dalsegno.elastic.deepspeed.loading"


def install() -> None:
    """Does it as soon as DeepSpeed's configuration is imported."""
    when_imported("deepspeed.runtime.config", _change)
    when_imported("deepspeed.runtime.engine", _tell)


def _change(module: ModuleType) -> None:
    # Not the dictionary that `initialize` gets: it may be a path, or text in base64, or lie in the script's arguments.
    plain = module.DeepSpeedConfig.__init__

    @functools.wraps(plain)
    def initialize(self: object, *arguments: object, **named: object) -> None:
        plain(self, *arguments, **named)
        self.load_universal_checkpoint = True  # type: ignore[attr-defined]

    module.DeepSpeedConfig.__init__ = initialize


def _tell(module: ModuleType) -> None:
    plain = module.DeepSpeedEngine.load_checkpoint

    @functools.wraps(plain)
    def load_checkpoint(self: Any, *arguments: Any, **named: Any) -> Any:
        loaded = plain(self, *arguments, **named)
        # DeepSpeed returns no path where it found nothing to load, and says so.
        found = loaded is not None and loaded[0] is not None
        if found and self.global_rank == 0 and _OURS not in sys.modules and (lost := _left_out(self)):
            print(
                f"dalsegno: DeepSpeed does not load all from universal files: {'; '.join(lost)}: see 'DeepSpeed at"
                " another number of ranks' in docs/scripts.md",
                file=sys.stderr,
                flush=True,
            )
        return loaded

    module.DeepSpeedEngine.load_checkpoint = load_checkpoint


def _left_out(engine: Any) -> list[str]:
    """What an engine's model and optimizer have, and DeepSpeed's loading of universal files leaves as it was."""
    buffers = any(
        dict(one.named_buffers(recurse=False)).keys() - getattr(one, "_non_persistent_buffers_set", ())
        for one in engine.module.modules()
    )
    frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
    both = " and ".join(name for name, there in (("buffers", buffers), ("frozen parameters", frozen)) if there)
    found = [f"{both} keep the values that the script gave them"] if both else []
    optimizer = getattr(engine.optimizer, "optimizer", None)
    if engine.zero_optimization_stage() == 3 and optimizer is not None:
        if len(optimizer.param_groups) > 1:
            found.append("all parameter groups have the first one's settings")
        # One tensor for all pieces, of which each counts a step of its own. (A number is counted for each by itself.)
        steps = [state["step"] for state in optimizer.state.values() if hasattr(state.get("step"), "add_")]
        if len({id(step) for step in steps}) < len(steps):
            found.append("the optimizer's pieces count their steps together")
    return found
