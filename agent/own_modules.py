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
    "is_in",
    "is_in_interpreter",
    "nearby",
    "own_places",
    "take_first_path",
    "tops_in",
]

# The most folders of one directory that are looked into, and how many directories above a script's own.
_MOST_FOLDERS, _MOST_ABOVE = 200, 3
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
    """The directories with a user's own modules, as Python searches them: the first path, and those of PYTHONPATH.

    Not those in which packages are installed.
    """
    paths = os.environ.get("PYTHONPATH")
    try:
        # An empty one of several is the working directory.
        named = [os.path.abspath(path) for path in paths.split(os.pathsep)] if paths else []
    except OSError:  # it is gone
        named = []
    named = [path for path in named if not path.endswith("-packages")]
    return tuple(path for path in (first, *named) if path and not _is_of_installed(path))


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
    """Whether the interpreter has this top-level module in itself, and so asks no directory for it."""
    return BuiltinImporter.find_spec(name) is not None or FrozenImporter.find_spec(name) is not None


def nearby(source: Path | str | None) -> tuple[str, ...]:
    """Directories that a script is likely to mean where it changes `sys.path`: around it, and the working one."""
    try:
        here = Path.cwd()
        bases = [here] if isinstance(source, str) or source is None else [Path(os.path.realpath(source)).parent, here]
    except OSError:
        return ()
    found = [one for base in bases for one in (base, *list(base.parents)[:_MOST_ABOVE])]
    found += [one for base in bases for above in (base, base.parent) for one in _folders(above)]
    return tuple(dict.fromkeys(path for path in map(str, found) if not _is_of_installed(path)))


def _folders(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
    return [directory / name for name in sorted(names)[:_MOST_FOLDERS]]
