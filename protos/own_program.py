"""Runs a module of ours as a program: `python own_program.py MODULE …`, otherwise as `python -m MODULE …`.

With `-m` Python searches the working directory before all others. That is a user's, and may have a `queue.py`, or a
folder `dalsegno`. So nothing but built-in modules may be imported here before that place has left `sys.path`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    del sys.path[0]  # this file's own directory

from collections.abc import Sequence

__all__ = ["command_of"]


def command_of(module: str, flags: Sequence[str] = (), python: str = sys.executable) -> tuple[str, ...]:
    """The words that begin the command line of a process that runs this module.

    Args:
        module: its full name.
        flags: the interpreter's.
        python: the interpreter.
    """
    return (python, *flags, __file__, module)


if __name__ == "__main__":
    import runpy

    # As with `-m` the module finds its own name in front of its arguments.
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
