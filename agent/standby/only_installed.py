"""In a nursery: lets imports ahead run installed modules only, and none of a user's own.

An installed module may import one that the user has, too (`transformers.trainer` imports `datasets`). In the script's
process it then gets the user's, and so it does here. But that module is the script's to run: it may ask for its rank.
The nursery itself has imported modules of Python's own, and the script may have one of their names beside it.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType

from ..own_modules import hidden_of_pythons, is_in, is_in_interpreter, own_places

__all__ = ["OnlyInstalled", "OwnModuleMet"]


class OwnModuleMet(BaseException):
    """An import has come to a module of the user's own. No error that a library may handle."""


class _Refuses(Loader):
    def __init__(self, hook: OnlyInstalled) -> None:
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._hook.met = self._hook.met or spec.name
        raise OwnModuleMet(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Never called; without it importlib calls neither."""


class OnlyInstalled:
    """An import hook, as a context manager. Who only looks for a user's own module finds it.

    It stays on `sys.meta_path` behind that, and does nothing: see `holds._Imports`.

    Args:
        first: the directory that the script has first on `sys.path`; "": none.

    Attributes:
        met: the first one that was to be imported, or is named like one of Python's that was; "": none.
    """

    def __init__(self, first: str) -> None:
        self._places, self._over = own_places(first), False
        self.met = next((name for place in self._places for name in hidden_of_pythons(place)), "")

    def __enter__(self) -> OnlyInstalled:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over = True

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Finds a user's own top-level module, which then does not run."""
        if self._over or path is not None or is_in_interpreter(name) or not is_in(name, self._places):
            return None
        spec = PathFinder.find_spec(name, list(self._places))
        if spec is not None:
            spec.loader = _Refuses(self)
        return spec
