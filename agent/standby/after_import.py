"""In a worker: changes a module of somebody else's as soon as the script imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]

Change = Callable[[ModuleType], None]


def after_import(name: str, change: Change) -> None:
    """Calls `change` with the module of this name: now if it is imported, and otherwise once it is."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport:
    """An import hook for one module. It finds no other."""

    def __init__(self, name: str, change: Change) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
