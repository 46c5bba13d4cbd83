"""DeepSpeed for a `Trainer`, which makes the calls that a script would make to `elastic.deepspeed`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dalsegno.protos.reads import Reads

from ..saving.optimizers import check_kept
from ..saving.replicas import check_shape
from ..saving.unfit import rejecting
from ..training.first_weights import FirstBuffers
from ..training.unlisted import Unlisted
from .strategies import MakeOptimizer, MakeScheduler, Setting, Strategy, resume_rates

if TYPE_CHECKING:
    from ..deepspeed.saving import Save

_STATE, _UNLISTED = "dalsegno_trainer", "dalsegno_unlisted"


class DeepSpeed(Strategy):
    """A DeepSpeed engine, ZeRO stages 0 to 3.

    Args:
        config: DeepSpeed's configuration. The plan replaces batch sizes and the accumulation; the Trainer's
            ``max_grad_norm``, if given, replaces ``gradient_clipping``. With neither of them gradients are not clipped.
            ``zero_allow_untested_optimizer`` also admits an optimizer that is not known to be element-wise.
    """

    scale = "deepspeed"
    any_world_size = None

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._config: dict[str, Any] = {"zero_optimization": {"stage": 1}, **(config or {})}
        self._engine: Any = None

    @property
    def name(self) -> str:
        return f"deepspeed-zero-{self._stage}"

    @property
    def _stage(self) -> int:
        return int(self._config["zero_optimization"].get("stage", 0))

    def start(self, world_size: int, local_rank: int, device: torch.device | None) -> torch.device:
        from deepspeed.accelerator import get_accelerator

        from .. import deepspeed as ours

        if device is not None:
            raise ValueError("DeepSpeed chooses the device: set DS_ACCELERATOR=cpu instead of Trainer(device=...)")
        accelerator = get_accelerator()
        if accelerator.device_name() == "cuda" and local_rank >= (cards := accelerator.device_count()):
            raise ValueError(
                f"local rank {local_rank}, and {cards} card{'s' * (cards != 1)} here: DeepSpeed wants one for each "
                "worker; start as many as there are, --nproc-per-node=gpu"
            )
        # Before the group is initialised, because the communicator is created on the current card.
        accelerator.set_device(local_rank)
        ours.prepare()
        return torch.device(accelerator.device_name(local_rank))

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None, setting: Setting
    ) -> dict[str, Any]:
        import deepspeed

        from .. import deepspeed as ours
        from ..deepspeed.checks import ALLOW, check_optimizer
        from ..deepspeed.making import send_nothing

        resume = setting.session.resume
        base = dict(self._config)
        if setting.max_grad_norm is not None:
            own = base.setdefault("gradient_clipping", setting.max_grad_norm)
            if own != setting.max_grad_norm:
                raise ValueError(f"gradient_clipping is {own} and max_grad_norm {setting.max_grad_norm}: give one")
        base.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default clips, to 1
        with setting.session.meetings.together():
            for name, parameter in model.named_parameters():
                check_shape(name, parameter)
            config, optimizer = ours.config(base, setting.plan, resume), make_optimizer(model)
            check_kept(optimizer, model)
            scheduled = make_scheduler is not None or "scheduler" in config
            check_optimizer(optimizer, self._stage, allowed=bool(self._config.get(ALLOW)), scheduled=scheduled)
        config.setdefault(ALLOW, True)  # DeepSpeed's guard knows fewer optimizers than ours
        if resume is not None:
            send_nothing(config)
        self._engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=make_scheduler, config=config
        )
        self.model, self._unlisted = self._engine, Unlisted(self._engine.module)
        self._buffers = FirstBuffers(self._engine.module)
        # The Trainer compares the schedule itself, for every strategy.
        with nullcontext() if resume is None else rejecting():
            state = ours.restore(self._engine, resume, other_schedule=True)
        if resume is None:
            return {}
        self._unlisted.load(state.get(_UNLISTED, {}))
        if _STATE not in state:
            raise ValueError(f"{resume.path} was not written by this Trainer: it has no {_STATE}")
        if self.scheduler is not None:
            resume_rates(self.optimizer, self.scheduler)
        return dict(state[_STATE])

    @property
    def reshards(self) -> bool:
        from ..deepspeed.checks import can_reshard

        return can_reshard(self._engine)

    @property
    def by_place(self) -> bool:
        from ..deepspeed.checks import loads_by_place

        return self._writes_as(DeepSpeed) and loads_by_place(self._engine)

    @property
    def reads(self) -> Reads | None:
        from ..deepspeed.checks import what_ranks_read

        return what_ranks_read(self._engine) if self._writes_as(DeepSpeed) else None

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        self._engine.step()  # an optimizer step after the last micro-batch

    def step(self) -> Tensor | float | None:
        norm: Tensor | float | None = self._engine.get_global_grad_norm()
        return norm

    def write(self, path: Path, state: Mapping[str, Any]) -> None:
        self._save(state)(path)

    def files(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return self._save(state).files()

    @property
    def why_no_files(self) -> str | None:
        from ..deepspeed.writers import why_not_collected

        return why_not_collected(self._engine)

    def _save(self, state: Mapping[str, Any]) -> Save:
        from .. import deepspeed as ours

        if self._engine.global_rank == 0:
            self._unlisted.tell()
        own = {_STATE: dict(state), _UNLISTED: self._unlisted.changed_buffers()}
        return ours.save(self._engine, own, self._buffers)

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        yield self._engine
