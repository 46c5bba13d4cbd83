"""Gradient accumulation: ranks synchronise only in the last micro-step, and an unfinished step is never taken for one.

    accumulate = Accumulation(wrapped, optimizer)
    for batch in s.steps(batches):
        for micro in accumulate(batch):
            micro.scale(loss_of(wrapped(micro.data))).backward()
        optimizer.step()
        optimizer.zero_grad()

Works alike with DistributedDataParallel, FSDP (both versions), DeepSpeed (whose engine defers by itself; this checks
that it agrees) and modules without a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.batch import Batch
from ..data.micro_batch import MicroBatch
from ..saving.declared import is_engine
from .dealing import check_dealt
from .parts import check_initialised
from .wrappers import Frozen, tell

T = TypeVar("T")


class Accumulation:
    """Iterates over a batch's micro-batches, and defers the model's gradient synchronisation in all but the last.

    Whether a micro-batch is the last one is known before its forward pass begins. Micro-batches with factor 0 leave
    zero gradients, whatever the model computes for them.

    ``DistributedDataParallel(static_graph=True)`` learns the graph in its first backward pass, and fails with an
    internal assertion if that pass is deferred. So with it the first micro-batch of each step is synchronised, too.
    This happens in each step, so that a resumed process synchronises in the same places as one that never stopped.

    Args:
        model: What the training calls: a wrapper, a DeepSpeed engine, or a plain module, which is left alone.
        optimizers: They refuse to step while micro-batches are missing. (A DeepSpeed engine counts by itself.)

    Attributes:
        model, optimizers: As given.
        deferrals: Number of backward passes so far whose synchronisation was deferred: a - 1 in each step if the model
            synchronises at all; a - 2 with a static graph.

    Raises:
        ValueError: An optimizer's class does not call its base's ``__init__``.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        check_initialised(optimizers)
        self.model = model
        self._batch: Batch[Any] | None = None
        self._open = ExitStack()
        self.deferrals = 0
        self._dealt = False
        self._engine = is_engine(model)
        self._sharded = [m for m in model.modules() if hasattr(m, "set_requires_gradient_sync")]
        self._defer = _deferring(model, self._sharded)
        self._static_graph = has_static_graph(model)
        self.optimizers = optimizers
        self._frozen = Frozen(model)
        self._hooks = [optimizer.register_step_pre_hook(self._before_optimizer) for optimizer in optimizers]
        tell(model, optimizers)

    def close(self) -> None:
        """Lets the model and the optimizers go; batches may still have a reference to this."""
        self._open.close()
        for hook in self._hooks:
            hook.remove()
        self.model, self.optimizers, self._batch = nn.Module(), (), None
        self._defer, self._sharded, self._frozen = None, [], Frozen(self.model)

    def __call__(self, batch: Batch[T]) -> Iterator[MicroBatch[T]]:
        """The micro-batches of ``batch`` in order; the body of the ``for`` is the forward and backward pass.

        Raises:
            RuntimeError: The previous batch was left half-way; or the engine's own count of micro-steps disagrees; or
                parameters were unfrozen whose gradients nobody would average.
            ValueError: The batch's factors are not for this model; or ranks that compute together have other samples.
        """
        self._open.close()  # whatever a loop that raised has left open
        before, self._batch = self._batch, None
        if before is not None:
            # Raised only once: a script that catches it, and zeroes the gradients, may go on.
            before.check_complete()
        if self._engine != (batch.scale == "deepspeed"):
            wanted = "deepspeed" if self._engine else "ddp"
            raise ValueError(
                f"Batches(scale={batch.scale!r}) makes factors that are wrong for {type(self.model).__name__}: "
                f"give scale={wanted!r}"
            )
        self._frozen.check(batch.step)
        self._batch, batch.trained_by = batch, self
        if not self._dealt and batch.made_by is not None:
            check_dealt(self.model, batch.made_by.plan.world_size, batch.made_by.rank)
            self._dealt = True
        begun, batch.begun = batch.begun, None
        if begun is not None:
            begun(self.model, self.optimizers)
        return self._micro_batches(batch)

    def _micro_batches(self, batch: Batch[T]) -> Iterator[MicroBatch[T]]:
        for micro in batch.micro_batches:
            if self._engine:
                self._compare(micro, batch)
            with ExitStack() as stack:
                self._open = stack
                must_synchronise = micro.is_last or (self._static_graph and batch.handed_out == 1)
                if not must_synchronise and (self._engine or self._defer is not None):
                    self.deferrals += 1
                    if self._defer is not None:
                        stack.enter_context(self._defer())
                stack.callback(micro.close)
                if micro.silent:
                    self._zero(micro, stack)
                yield micro

    def _compare(self, micro: MicroBatch[T], batch: Batch[T]) -> None:
        """Checks that the engine, which synchronises and steps by a count of its own, counts the same micro-steps."""
        model: Any = self.model
        if bool(model.is_gradient_accumulation_boundary()) != micro.is_last:
            raise RuntimeError(
                f"micro-batch {batch.handed_out} of {batch.accumulation} begins, but the engine, which accumulates "
                f"over {model.gradient_accumulation_steps()}, does not take it so. Call engine.step() after each "
                "micro-batch, and make its config for the present plan (s.deepspeed_config or elastic.deepspeed.config)"
            )

    def _zero(self, micro: MicroBatch[T], stack: ExitStack) -> None:
        """Keeps what it computes from reaching any gradient, even if the model's derivatives are infinite."""
        micro.zero_gradients(self.model.parameters())
        # FSDP1 may hide its one flat parameter.
        flat = (getattr(module, "_flat_param", None) for module in self.model.modules())
        micro.zero_gradients(parameter for parameter in flat if isinstance(parameter, Tensor))
        # FSDP2's gradients go to tensors that exist only after the forward pass has gathered them.
        for module in self._sharded:
            hook = module.register_forward_pre_hook(lambda module, _: micro.zero_gradients(module.parameters()))
            stack.callback(hook.remove)

    def _before_optimizer(self, *_: Any) -> None:
        if self._batch is not None and self._batch.handed_out:
            self._batch.check_complete()


def has_static_graph(model: nn.Module) -> bool:
    """Whether it is ``DistributedDataParallel(static_graph=True)``, perhaps compiled."""
    return bool(getattr(model, "static_graph", False))  # a compiled model passes attribute lookups on


@contextmanager
def synchronised(model: Any) -> Iterator[None]:
    """Makes ``DistributedDataParallel`` synchronise even inside a ``no_sync`` that other code has entered."""
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    try:
        yield
    finally:
        model.require_backward_grad_sync = before


def _deferring(model: nn.Module, sharded: list[nn.Module]) -> Callable[[], AbstractContextManager[Any]] | None:
    """How this model's synchronisation is deferred; None: it has none, or defers by itself (DeepSpeed)."""
    if is_engine(model):
        return None
    if sharded:
        return lambda: _WithoutSync(sharded)
    no_sync: Callable[[], AbstractContextManager[Any]] | None = getattr(model, "no_sync", None)
    return no_sync if callable(no_sync) else None


class _WithoutSync:
    """FSDP2's switch for synchronisation as a context manager."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules: list[Any] = list(modules)

    def __enter__(self) -> None:
        self._set(False)

    def __exit__(self, *_: object) -> None:
        self._set(True)

    def _set(self, value: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(value, recurse=False)
