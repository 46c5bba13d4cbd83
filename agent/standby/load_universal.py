"""In a worker: lets DeepSpeed load universal files in a script whose configuration does not say so.

The agent's `--deepspeed-load-universal` asks for it, and a worker does it where its resume point is universal files:
an engine's `load_checkpoint` then takes what `latest_universal` names. The script's own text, file and configuration
stay as they are. Executed as a module, with a script and its arguments, this runs the script that way in a fresh
interpreter.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from dalsegno.protos.contract import Variable

from .after_import import after_import

__all__ = ["arguments_for", "install", "wanted"]

_CONFIG = "deepspeed.runtime.config"


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether a worker with this environment is to do it."""
    return environment.get(Variable.LOAD_UNIVERSAL) == "1"


def arguments_for(arguments: Sequence[str]) -> tuple[str, ...]:
    """The interpreter's arguments for the script that `-u script …` or `-u -m module …` would run without it."""
    return ("-u", "-m", "dalsegno.agent.standby.load_universal", *arguments[1:])


def install() -> None:
    """Does it now if DeepSpeed's configuration is imported, and otherwise once it is."""
    after_import(_CONFIG, _change)


def _change(module: ModuleType) -> None:
    # Not the dictionary that `initialize` gets: it may be a path, or text in base64, or lie in the script's arguments.
    plain = module.DeepSpeedConfig.__init__

    @functools.wraps(plain)
    def initialize(self: object, *arguments: object, **named: object) -> None:
        plain(self, *arguments, **named)
        self.load_universal_checkpoint = True  # type: ignore[attr-defined]

    module.DeepSpeedConfig.__init__ = initialize


def main() -> None:
    """Runs the script or module that the arguments name."""
    from .worker_main import run_to_end

    install()
    module = sys.argv[1:2] == ["-m"]
    sys.argv = sys.argv[2 if module else 1 :]
    run_to_end(sys.argv[0], module, os.getcwd())


if __name__ == "__main__":
    main()
