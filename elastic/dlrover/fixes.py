"""Puts this project's order and plan behind DLRover's classes in a worker, as soon as a script imports them."""

from __future__ import annotations

from types import ModuleType

from dalsegno.protos.imported import when_imported

__all__ = ["install"]

_PACKAGE = "dlrover.trainer.torch.elastic"


def install() -> None:
    """Does it; nothing else is imported before the script imports theirs."""
    when_imported(f"{_PACKAGE}.sampler", _change_sampler)
    when_imported(f"{_PACKAGE}.trainer", _change_trainer)


def _change_sampler(module: ModuleType) -> None:
    from .samplers import attach, change

    change(module.ElasticDistributedSampler)
    attach(module.ElasticDistributedSampler)


def _change_trainer(module: ModuleType) -> None:
    from .trainers import change
    from .weights import apply

    apply()
    change(module)
