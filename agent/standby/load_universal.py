"""In a worker: lets DeepSpeed load universal files in a script whose configuration does not say so.

The agent's `--deepspeed-load-universal` asks for it, and a worker does it where its resume point is universal files:
an engine's `load_checkpoint` then takes what `latest_universal` names. The script's own text, file and configuration
stay as they are. Executed as a module, with a script and its arguments, this runs the script that way in a fresh
interpreter.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from dalsegno.protos.contract import Variable

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
    module = sys.modules.get(_CONFIG)
    if module is not None:
        _change(module)
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """An import hook: changes the module that it waits for as soon as that is there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _CONFIG or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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
