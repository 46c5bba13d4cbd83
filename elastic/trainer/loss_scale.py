"""A gradient scaler in a `Trainer`: fp16's loss scale, and the steps that are skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

# If gradients are infinite even at this scale, fp16's range is not the reason.
LOWEST = 2.0**-14


class LossScale:
    """A ``GradScaler``, or nothing. All ranks see the same gradients, or share what they found, so all agree.

    Attributes:
        skipped: Optimizer steps skipped so far because gradients were infinite or NaN. Their batches count.
        stepped_alike: See ``held_state``.
    """

    stepped_alike = True

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self.skipped = 0

    @property
    def value(self) -> float | None:
        """The scale of the next step; None if nothing is scaled."""
        return None if self._scaler is None or not self._scaler.is_enabled() else float(self._scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divides complete gradients by the scale, so that they can be clipped."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Steps, unless a gradient is infinite or NaN on any rank, and makes the next step's scale.

        Returns:
            Whether it stepped.

        Raises:
            FloatingPointError: Gradients are not finite however small the scale.
        """
        before = self.value
        if self._scaler is None or before is None:
            optimizer.step()
            return True
        self._scaler.step(optimizer)
        self._scaler.update()
        after = float(self._scaler.get_scale())
        # Nothing says whether the optimizer stepped (a fused one is always called), but only a skipped step lowers the
        # scale.
        stepped = after >= before
        self.skipped += not stepped
        if not stepped and after < LOWEST:
            raise FloatingPointError(
                f"the gradients are not finite at a loss scale of {before:g} either: that is not fp16's range. Look at "
                "the loss, the learning rate and the weights of the last checkpoint"
            )
        return stepped

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, for checkpoints."""
        return {"skipped": self.skipped, "scaler": {} if self._scaler is None else self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse.

        Raises:
            ValueError: A scale was saved and there is none now, or the other way round.
        """
        if bool(state["scaler"]) != (self.value is not None):
            had, has = ("a", "none") if state["scaler"] else ("no", "one")
            raise ValueError(f"the checkpoint has {had} loss scale, the Trainer {has}: make the grad_scaler as it was")
        self.skipped = int(state["skipped"])
        if self._scaler is not None:
            self._scaler.load_state_dict(dict(state["scaler"]))
