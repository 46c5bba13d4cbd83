"""Has a function called with a module as soon as that is imported, whoever imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    """Calls `change` with the module of this name: now if it is imported, and otherwise right after its own code."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, change))


class _Waiting:
    """An import hook for one module. It finds what the others find."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change, self._looks = name, change, False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name or self._looks:
            return None
        self._looks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looks = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # Not earlier: who only looks for a module does not import it.
                # And not from the list itself: an import under way on another thread would pass over the next finder.
                sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
                execute(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
