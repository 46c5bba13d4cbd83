"""In a worker: lets DeepSpeed load universal files in a script whose configuration does not say so.

The agent's `--deepspeed-load-universal` asks for it, and a worker does it where its resume point is universal files:
an engine's `load_checkpoint` then takes what `latest_universal` names.
"""

from __future__ import annotations

import functools
from types import ModuleType

from dalsegno.protos.imported import when_imported

__all__ = ["install"]


def install() -> None:
    """Does it as soon as DeepSpeed's configuration is imported."""
    when_imported("deepspeed.runtime.config", _change)


def _change(module: ModuleType) -> None:
    # Not the dictionary that `initialize` gets: it may be a path, or text in base64, or lie in the script's arguments.
    plain = module.DeepSpeedConfig.__init__

    @functools.wraps(plain)
    def initialize(self: object, *arguments: object, **named: object) -> None:
        plain(self, *arguments, **named)
        self.load_universal_checkpoint = True  # type: ignore[attr-defined]

    module.DeepSpeedConfig.__init__ = initialize
