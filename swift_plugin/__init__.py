"""ms-swift (and so Hugging Face Trainer) on Dal Segno. This package is a door with nothing behind it yet.

What will be here: an entry script for ms-swift's `sft`, with the elastic sampler, resume points handed out by the
master, and drains. Until then run a script of your own with `dalsegno.elastic.session()`; see `examples/train.py`.
"""

from __future__ import annotations

__all__: tuple[str, ...] = ()


def __getattr__(name: str) -> object:
    """One clear line for whoever looks for the integration; dunder lookups of import machinery stay ordinary."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(f"{__name__}.{name}: the ms-swift integration is not part of this version (see ROADMAP.md)")
