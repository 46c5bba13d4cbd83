"""A `Trainer` with all that it takes, that writes a step log; flags as the examples have them, and

--stay         its processes stay through planned changes
--odd WORDS    with commas, of these:

forgets        its callback and its model keep no state of their own, of which rank 0's might have more, or which
               changes before the optimizer's step
holds          the script keeps the wrapper of its first world
freezes        a callback freezes a part of the model behind step 4
stops          it is stopped at step 20, and the world changes one step later
raises         a callback raises as the training ends
swaps          a callback changes the weights then
evaluates      it evaluates behind each step
joins          the script makes the default process group first, and its ranks meet at a barrier there
talks          they meet at two more behind the session's opening, and make the group there if it is not there
sums           as talks, and they sum something
several        all this only where there are several
sleeps         at its first resume rank 1 sleeps before it makes its optimizer, once it has told its process
lingers        several ranks evaluate a few samples at a time, each 0.5 s long, and say so
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from dalsegno.elastic import Batch, Callback, Evaluator, Tracked, Trainer, session
from dalsegno.elastic.trainer.strategies import DDP

# `hooked.py` has put it there already, to lengthen steps.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import common  # type: ignore[import-not-found]


def losses(model: nn.Module, blocks: Tensor) -> Tensor:
    """(batch, length + 1) -> (batch, length)"""
    return cross_entropy(model(blocks[:, :-1]).transpose(1, 2), blocks[:, 1:], reduction="none")


def measure(model: nn.Module, blocks: Tensor) -> dict[str, Any]:
    found = losses(model, blocks)
    return {"loss": (found, found.numel())}


class Gelu(nn.GELU):
    """Knows how often each rank has called it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class OpenedOnce:
    """A logger that can be closed, and not be opened again."""

    def __init__(self) -> None:
        self._file = open(os.devnull, "w")  # noqa: SIM115

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        print(step, dict(values), file=self._file)

    def close(self) -> None:
        self._file.close()


class Written(Callback):
    """Writes each step, and paces it. Counts the steps, which a checkpoint has to keep."""

    def __init__(self, directory: str, seconds: float, odd: str) -> None:
        self._directory, self._clock, self._odd = directory, common.StepClock(seconds), odd.split(",")
        self._values: Mapping[str, float] = {}
        self._steps = self._begun = 0

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._begun += 1
        assert self._begun == 1, "told twice that the training begins"
        assert "forgets" in self._odd or self._steps == trainer.step, (
            f"{self._steps} steps counted, and {trainer.step} done"
        )
        # What a model keeps beside its parameters is rank 0's on all ranks that begin.
        kept = torch.tensor([getattr(trainer.model[1], "calls", 0)])
        told = [torch.zeros_like(kept) for _ in range(trainer.world_size)]
        dist.all_gather(told, kept) if trainer.world_size > 1 else None
        assert trainer.world_size == 1 or len({int(one) for one in told}) == 1, told
        self._freeze(trainer)
        epoch = int(os.environ.get("DALSEGNO_EPOCH", 0))
        self._log = common.StepLog(self._directory, rank=trainer.rank, world_size=trainer.world_size, epoch=epoch)

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self._values = values

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        self._steps += 1
        self._log.write(
            step=batch.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=self._values["loss"],
            grad_norm=self._values["grad_norm"],
        )
        self._freeze(trainer)
        if "stops" in self._odd and batch.step == 20:
            trainer.stop()
        while "stops" in self._odd and batch.step == 21 and not session().should_drain:
            time.sleep(0.01)  # until another node comes
        self._clock.wait()

    def _freeze(self, trainer: Trainer) -> None:
        if "freezes" in self._odd and trainer.step > 4:
            trainer.model[0].requires_grad_(False)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._begun -= 1
        assert self._begun == 0, "told twice that the training ends"
        self._log.close()
        if "raises" in self._odd:
            raise RuntimeError("at the end")
        if "swaps" in self._odd:
            for parameter in trainer.model.parameters():
                parameter.data.mul_(0.9)  # as recipes do it, so that torch does not count it

    def state_dict(self) -> dict[str, Any]:
        return {} if "forgets" in self._odd else {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]


def meets(odd: list[str], directory: str | None) -> None:
    """What the ranks do in the default process group before they train."""
    if not {"joins", "talks", "sums"} & {*odd}:
        return  # Nothing here reads an environment variable: then such a script would not run ahead as far as `fit()`.
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if "RANK" not in os.environ or ("several" in odd and alone):
        return
    if "joins" in odd:
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        dist.barrier()
    if "talks" in odd or "sums" in odd:
        session(directory)
        if "joins" not in odd:
            dist.init_process_group(backend="gloo")
        dist.barrier()
        dist.barrier()
    if "sums" in odd:
        dist.all_reduce(torch.ones(1))


def main() -> None:
    parser = common.parser("A Trainer.")
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--odd", default="")
    flags = parser.parse_args()
    meets(flags.odd.split(","), flags.checkpoint_dir)
    torch.manual_seed(flags.seed)
    gelu = nn.GELU() if "forgets" in flags.odd else Gelu()
    model = nn.Sequential(nn.Embedding(common.VOCABULARY, 32), gelu, nn.Linear(32, common.VOCABULARY))
    kept: list[Any] = []

    def loss(called: Any, blocks: Tensor) -> Tensor:
        if "holds" in flags.odd and not kept:
            kept.append(called)
        return losses(called, blocks).mean()

    def found(called: nn.Module, blocks: Tensor) -> dict[str, Any]:
        if "lingers" in flags.odd and session().world_size > 1:
            print(f"{session().world_size} ranks evaluate", flush=True)
            time.sleep(0.5)  # as a large model would
        return measure(called, blocks)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        opened, once = session(), Path(f"{flags.step_log}-slept")
        if "sleeps" in flags.odd and opened.resume is not None and opened.rank == 1 and not once.exists():
            once.touch()
            print(f"process {os.getpid()} sleeps", flush=True)
            time.sleep(60)  # until it is killed
        return torch.optim.AdamW(model.parameters(), lr=flags.learning_rate)

    few = {"batch_size": 8, "interrupt_every": 1} if "lingers" in flags.odd else {}
    text = common.StdlibText()
    Trainer(
        model,
        Subset(text, range(200, len(text))),
        optimizer=optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        loss=loss,
        global_batch_size=flags.global_batch_size,
        max_micro_batch_size=flags.max_micro_batch_size,
        max_steps=flags.steps,
        max_grad_norm=1.0,
        seed=flags.seed,
        save_every=flags.save_every,
        memory_every=flags.memory_every,
        checkpoint_dir=flags.checkpoint_dir,
        stay=flags.stay,
        evaluator=Evaluator(Subset(text, range(200)), found, **few),
        evaluate_every=1 if "evaluates" in flags.odd else 15,
        strategy=DDP(find_unused_parameters="freezes" in flags.odd),
        track=Tracked("loss"),
        callbacks=[Written(flags.step_log, flags.step_time, flags.odd)],
        loggers=[OpenedOnce()],
        log_every=1,
        progress=False,
    ).fit()


if __name__ == "__main__":
    main()
