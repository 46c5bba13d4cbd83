"""Which modules are a user's own: those that Python finds beside the script before any that is installed.

A nursery imports nothing of these ahead, because they are for the script to run, in a process that has its place.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

__all__ = [
    "first_path",
    "forget_hidden",
    "hidden_of_pythons",
    "is_in",
    "is_in_interpreter",
    "own_places",
    "take_first_path",
    "tops_in",
]

# What the interpreter has imported from its own directory before it searches another.
_AT_START = frozenset(
    {"encodings", "codecs", "io", "abc", "os", "stat", "site", "posixpath", "genericpath", "_collections_abc"}
)
# What this process has put first on `sys.path`.
_first: list[str] = []


def first_path(source: Path | str | None) -> str:
    """What a fresh interpreter puts first on `sys.path`; "": nothing.

    Args:
        source: a script's file, whose own directory it is, behind symbolic links; or the name of a module (`-m`), for
            which it is the working directory. None: neither.
    """
    safe = sys.version_info >= (3, 11) and os.environ.get("PYTHONSAFEPATH")
    if safe or source is None:
        return ""
    try:
        return os.getcwd() if isinstance(source, str) else os.path.dirname(os.path.realpath(source))
    except OSError:  # the working directory is gone
        return ""


def take_first_path(path: str) -> None:
    """Puts the script's directory first on `sys.path`, as the interpreter does, instead of the one before; "": none.

    Our own modules go on coming from where they have come from, also if a folder `dalsegno` is there.
    """
    # With -P or PYTHONSAFEPATH the interpreter adds no path of its own in front.
    if getattr(sys.flags, "safe_path", False):
        return
    # The list of its files may be one from before this process was forked.
    sys.path_importer_cache.pop(path, None)
    if _first == [path]:
        return
    ours = sys.modules[__name__.partition(".")[0]]
    ours.__path__ = list(ours.__path__)
    for before in _first:
        with contextlib.suppress(ValueError):
            sys.path.remove(before)
    _first[:] = filter(None, [path])
    sys.path[:0] = _first


def own_places(first: str) -> tuple[str, ...]:
    """The directory with a user's own modules: the first path, unless packages are installed there.

    Those of PYTHONPATH may have anybody's. Every process of Python searches them, so nobody need know.
    """
    return (first,) if first and not _is_of_installed(first) else ()


def _is_of_installed(path: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(path))
    except OSError:
        return False


def is_in(name: str, places: tuple[str, ...]) -> bool:
    """Whether one of the directories has a top-level module of this name, for which Python would not look further.

    A folder without an `__init__.py` is none: an installed package of its name comes before it. Imports nothing.
    """
    try:
        spec = PathFinder.find_spec(name, list(places))
    except (OSError, ValueError):
        return False
    return spec is not None and spec.loader is not None


def tops_in(places: tuple[str, ...], modules: Iterable[str]) -> set[str]:
    """The top-level names of these modules that a user has in these directories. Ours are nobody else's."""
    tops = {name.rstrip("?").partition(".")[0] for name in modules} - {__name__.partition(".")[0]}
    return {top for top in tops if is_in(top, places)}


def is_in_interpreter(name: str) -> bool:
    """Whether the interpreter has this top-level module in itself, or from its start, and so asks no directory."""
    return name in _AT_START or any(one.find_spec(name) is not None for one in (BuiltinImporter, FrozenImporter))


def hidden_of_pythons(first: str) -> list[str]:
    """Those of Python's own modules that this process has imported, and for which a script has others: it gets these.

    Args:
        first: the directory that the script has first on `sys.path`; "": none.
    """
    loaded = sorted(sys.stdlib_module_names & set(sys.modules)) if first else []
    return [name for name in loaded if not is_in_interpreter(name) and is_in(name, (first,))]


def forget_hidden(first: str) -> None:
    """Forgets these modules, for the script to import its own, as in a fresh interpreter. Who has them keeps them."""
    hidden = hidden_of_pythons(first)
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]
