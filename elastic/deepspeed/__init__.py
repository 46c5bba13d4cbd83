"""DeepSpeed in an elastic run: what a script adds around ``deepspeed.initialize`` (see `engine`, `saving`)."""

from .checks import strategy
from .engine import config, load_weights, loads_by_values, prepare, restore, restore_weights
from .saving import save, saved_by_trainer

__all__ = [
    "config",
    "load_weights",
    "loads_by_values",
    "prepare",
    "restore",
    "restore_weights",
    "save",
    "saved_by_trainer",
    "strategy",
]
