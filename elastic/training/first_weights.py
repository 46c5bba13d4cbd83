"""What a model's state was like before its first step: what is saved later must load into a model that is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dalsegno.protos.text import few

from ..rank.remarks import remark
from ..saving.replicas import is_repeated
from .unlisted import each_buffer

__all__ = ["FirstBuffers", "FirstWeights", "check_places"]


class FirstWeights:
    """Names and shapes, as they were at first.

    Args:
        weights: Of the model before its first step; None: those that are first looked at.
    """

    def __init__(self, weights: Mapping[str, Any] | None = None) -> None:
        self._shapes = None if weights is None else _shapes(weights)
        self._told = False

    def problem(self, model: nn.Module, weights: Mapping[str, Any]) -> str:
        """Why a model that the script makes anew could not load this; "": it could.

        It has other names than at first, or other shapes and no way of its own to load these.

        Args:
            weights: The ``state_dict()`` of ``model``.
        """
        shapes = _shapes(weights)
        if self._shapes is None:
            self._shapes = shapes
        first = self._shapes
        if shapes == first:
            return ""
        if changed := sorted(first.keys() ^ shapes.keys()):
            return (
                f"the model's state_dict() {'has' if changed[0] in weights else 'lacks'} {few(changed)} since its first"
                " step, and could not be loaded into the model that the script makes: make it in __init__, or give"
                " register_buffer persistent=False"
            )
        for name, shape in shapes.items():
            if shape != first[name] and not _loads_by_itself(model, name):
                return (
                    f"the model's {name} has the shape {_text(shape)} now, and had {_text(first[name])} before its"
                    " first step: it could not be loaded into the model that the script makes. Make it as large as it"
                    " becomes in __init__, give register_buffer persistent=False, or have its module load it"
                    " (register_load_state_dict_pre_hook)"
                )
        return ""

    def tell(self, model: nn.Module, weights: Mapping[str, Any]) -> None:
        """Remarks on that, once: the script may know of it, and make the model so when it resumes."""
        if not self._told and (problem := self.problem(model, weights)):
            self._told = True
            remark("%s. If the script does not make it so before it loads, the run goes on at no other start", problem)

    def refuse(self, model: nn.Module, weights: Mapping[str, Any]) -> None:
        """The same where the script cannot know of it yet: before the first step, and behind it.

        Raises:
            ValueError: There is a problem.
        """
        if problem := self.problem(model, weights):
            raise ValueError(problem)


class FirstBuffers:
    """The same of an engine's model, whose weights DeepSpeed knows from the start.

    They are looked at once more, with the first save: that takes a while.

    Args:
        model: The engine's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._looks = model, 1
        self._first = FirstWeights(listed_buffers(model))

    def tell(self) -> None:
        """At each save, on rank 0."""
        if self._looks:
            self._looks -= 1
            self._first.tell(self._model, listed_buffers(self._model))


def listed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``state_dict()`` lists, by their names there."""
    return {name: buffer for name, buffer, listed in each_buffer(model) if listed}


def check_places(weights: Mapping[str, Any]) -> None:
    """Refuses a model with a tensor that torch cannot load into.

    Raises:
        ValueError: It has one place in memory for several values.
    """
    for name, value in weights.items():
        if isinstance(value, Tensor) and value.layout is torch.strided and is_repeated(value):
            raise ValueError(
                f"the model's {name} has one place in memory for several values (expand), and torch loads"
                " nothing there: register a clone() of it"
            )


def _loads_by_itself(model: nn.Module, name: str) -> bool:
    """Whether a module around this entry has a way of its own to load."""
    module: Any = model
    for part in (None, *name.split(".")[:-1]):
        module = module if part is None else getattr(module, part, None)
        if not isinstance(module, nn.Module):
            return False
        own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        if own or type(module).load_state_dict is not nn.Module.load_state_dict or module._load_state_dict_pre_hooks:
            return True
    return False


def _shapes(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in weights.items()}


def _text(shape: Any) -> str:
    return "none" if shape is None else str(list(shape))
