"""Python's collector of cyclic garbage, where it only costs: it looks at every object each time many are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is looked for while it lasts: what is loaded is kept, and passes over it take seconds."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
