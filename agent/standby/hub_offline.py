"""In a worker: does not ask Hugging Face's hub where the agent knows that nobody answers there.

Each file of a model is asked for several times, with pauses, before the cache counts: minutes at each start. With
HF_HUB_OFFLINE=1 the cache counts at once. The library reads that variable when it is imported, which a standby worker
has done already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType

from dalsegno.protos.contract import Variable
from dalsegno.protos.imported import when_imported

__all__ = ["OFFLINE", "install"]

OFFLINE = "HF_HUB_OFFLINE"
_CONSTANTS, _OF_DATASETS = "huggingface_hub.constants", "datasets.config"


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Does it if this environment, a worker's, names a hub that cannot be reached."""
    hub = environment.get(Variable.HUB_UNREACHABLE)
    if hub:
        when_imported(_CONSTANTS, partial(_change, hub))


def _change(hub: str, module: ModuleType) -> None:
    # A script may name another hub, or decide by itself.
    if module.ENDPOINT.rstrip("/") != hub or OFFLINE in os.environ:
        return
    module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    os.environ[OFFLINE] = "1"  # peft reads it later, as do processes that the script starts
    known = sys.modules.get(_OF_DATASETS)
    if known is not None and "HF_DATASETS_OFFLINE" not in os.environ:
        known.HF_HUB_OFFLINE = known.HF_DATASETS_OFFLINE = True  # type: ignore[attr-defined]
