"""What a worker changes in other people's modules before its script runs, as its environment says.

Each hook is a module with `install()`, which changes a module once it is imported. The script's own text and files
stay as they are. Executed as a module, with a script and its arguments, this runs the script that way in a fresh
interpreter.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.protos.contract import Variable
from dalsegno.protos.own_program import command_of

from ..own_modules import first_path, forget_hidden

__all__ = ["arguments_for", "install", "wanted"]


def wanted(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The hooks of a worker with this environment, by their modules' names."""
    universal = environment.get(Variable.LOAD_UNIVERSAL) == "1"
    offline = bool(environment.get(Variable.HUB_UNREACHABLE))
    ours = {"dalsegno.agent.standby.load_universal": universal, "dalsegno.agent.standby.hub_offline": offline}
    named = filter(None, environment.get(Variable.HOOKS, "").split(","))
    return (*(name for name, asked in ours.items() if asked), *named)


def arguments_for(arguments: Sequence[str]) -> tuple[str, ...]:
    """The interpreter's arguments for the script that `-u script …` or `-u -m module …` would run without hooks."""
    return ("-u", *command_of("dalsegno.agent.standby.hooks")[1:], *arguments[1:])


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Installs the hooks that the environment asks for."""
    for name in wanted(environment):
        importlib.import_module(name).install()


def main() -> None:
    """Runs the script or module that the arguments name."""
    from .worker_main import run_to_end

    install()
    module = sys.argv[1:2] == ["-m"]
    sys.argv = sys.argv[2 if module else 1 :]
    # The script may have modules named like those of Python's that were needed here.
    forget_hidden(first_path(sys.argv[0] if module else Path(sys.argv[0])))
    run_to_end(sys.argv[0], module, os.getcwd())


if __name__ == "__main__":
    main()
