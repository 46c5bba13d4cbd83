"""A DDP loop of which something is unusual, in what people's scripts do; flags as the examples have them, and

--width N      columns of the model: 256 rows of 3 * 4 bytes each, with the optimizer's state
--odd WORDS    with commas, of these:

average        an average of the weights, which the loss depends on
norm           batch normalization
dtypes         parameters and buffers of several types
short          micro-batches of one sample: a step has many
evaluates      at step 20 a long evaluation, of so many seconds as DALSEGNO_TEST_LONG says
thaws          half of the model is frozen until step 12
adds           parameters are added behind step 12
late           the session is asked for late, when everything is built
loaders        processes read the data, they stay over data epochs, in pinned memory
small          the data set has 70 samples: a data epoch ends every few steps
compiled       the model is compiled
raises, hangs  rank 1 does, in step 15 of its first world
auto           memory_every="auto"
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset

from dalsegno.elastic import Session, session

# `hooked.py` has put it there already, to lengthen steps.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import common  # type: ignore[import-not-found]

CHANGES_AT = 12
EVALUATES_AT = 20
FAILS_AT = 15


class Average(nn.Module):
    """An average of a weight."""

    kept: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", weight.detach().clone())

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        self.kept.mul_(0.9).add_(weight, alpha=0.1)


class Model(nn.Module):
    """A next-byte model that looks at one byte: (batch, length) -> (batch, length, 256)."""

    def __init__(self, width: int, odd: set[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(common.VOCABULARY, width)
        self.norm = nn.BatchNorm1d(width) if "norm" in odd else nn.Identity()
        self.head = nn.Linear(width, common.VOCABULARY)
        self.added: nn.Module | None = None
        self.dtypes = "dtypes" in odd
        if self.dtypes:
            self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("turned", torch.ones(2, dtype=torch.complex64))
            self.register_buffer("flags", torch.tensor([True, False]))

    def add(self) -> nn.Module:
        """More parameters; they change nothing at first."""
        torch.manual_seed(7)
        self.added = nn.Linear(self.embedding.embedding_dim, common.VOCABULARY, bias=False)
        nn.init.zeros_(self.added.weight)
        return self.added

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embedding(rows)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        if self.dtypes:
            narrow = self.narrow(hidden[..., :8].to(torch.bfloat16)).float()
            hidden = torch.cat((narrow, hidden[..., 8:]), -1) * self.wide.mean().float()
        hidden = nn.functional.gelu(hidden)
        found: Tensor = self.head(hidden)
        return found if self.added is None else found + self.added(hidden)


def fail(odd: set[str], rank: int, epoch: int, step: int) -> None:
    """Rank 1 does, once."""
    if rank != 1 or epoch != 1 or step != FAILS_AT:
        return
    if "raises" in odd:
        raise RuntimeError("rank 1 has had enough")
    if "hangs" in odd:
        (Path(os.environ["DALSEGNO_TEST_HOLDS"]) / "hangs").touch()
        while True:
            time.sleep(1)


def evaluate(s: Session) -> None:
    """Takes long, and talks to no other rank; that it is no stall it says, as docs/reference.md has it."""
    if holds := os.environ.get("DALSEGNO_TEST_HOLDS"):
        (Path(holds) / f"evaluates-{os.environ['DALSEGNO_EPOCH']}-{os.environ['RANK']}").touch()
    for _ in range(int(os.environ.get("DALSEGNO_TEST_LONG", "0"))):
        s.busy()
        time.sleep(1)


class Built:
    """Model and optimizer as they are at a step, and what is to be saved of them."""

    def __init__(self, flags: Any, odd: set[str]) -> None:
        self.odd, self.rate = odd, flags.learning_rate
        torch.manual_seed(flags.seed)
        self.model = Model(flags.width, odd)
        self.average = Average(self.model.embedding.weight)
        self.run: nn.Module = torch.compile(self.model) if "compiled" in odd else self.model  # type: ignore[assignment]
        first = list(self.model.embedding.parameters())
        rest = [one for one in self.model.parameters() if one is not first[0]]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW([{"params": first}, {"params": rest}], lr=self.rate)

    def after(self, step: int) -> bool:
        """What the script changes behind a step. Returns whether the model must be wrapped anew."""
        if "thaws" in self.odd:
            self.optimizer.param_groups[0]["lr"] = self.rate if step >= CHANGES_AT else 0.0
        if "adds" in self.odd and step >= CHANGES_AT and self.model.added is None:
            self.optimizer.add_param_group({"params": list(self.model.add().parameters()), "lr": self.rate})
            return True
        return False


def main() -> None:
    parser = common.parser(__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--odd", default="")
    parser.add_argument("--whole", type=int, default=0, help="with fewer ranks a step takes a second")
    flags = parser.parse_args()
    odd = set(filter(None, flags.odd.split(",")))
    s = None if "late" in odd else session(checkpoint_dir=flags.checkpoint_dir)
    built = Built(flags, odd)
    dataset: Dataset[Tensor] = common.StdlibText()
    if "small" in odd:
        dataset = Subset(dataset, range(70))
    s = s or session(checkpoint_dir=flags.checkpoint_dir)
    # What a script does that knows at which step it goes on.
    built.after(0 if s.resume is None else s.resume.step)
    more = {"average": built.average} if "average" in odd else {}
    state = s.state(built.run, built.optimizer, wrap=DistributedDataParallel, **more)
    loader = {"num_workers": 2, "persistent_workers": True, "pin_memory": True} if "loaders" in odd else {}
    data = s.data(
        dataset,
        global_batch=flags.global_batch_size,
        micro_batch=1 if "short" in odd else flags.max_micro_batch_size,
        seed=flags.seed,
        fixed_micro_batch="norm" in odd,
        **loader,
    )
    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)
    every = "auto" if "auto" in odd else flags.memory_every
    anew: nn.Module | None = None
    for batch in s.steps(
        data,
        state,
        max_steps=flags.steps,
        save_every=flags.save_every,
        memory_every=every,
        stay="stay" in odd,
    ):
        total = 0.0
        for micro in batch:
            fail(odd, s.rank, s.epoch, batch.step)
            logits = (state.model if anew is None else anew)(micro.data[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), micro.data[:, 1:].flatten())
            if "average" in odd:
                loss = loss + 0.1 * (built.model.embedding.weight - built.average.kept).square().mean()
            micro.scale(loss).backward()
            total += float(loss.detach()) * micro.n
        norm = common.gradient_norm(built.model.parameters())
        built.optimizer.step()
        built.optimizer.zero_grad()
        if "average" in odd:
            built.average.update(built.model.embedding.weight)
        if built.after(batch.step):
            anew = DistributedDataParallel(built.run)
        mean = common.global_mean(total, batch.n)
        log.follow(s)
        # At once: a rank that is killed while it waits has made the step, and others may go on behind it.
        log.write(
            step=batch.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=mean,
            grad_norm=norm,
        )
        if "evaluates" in odd and batch.step == EVALUATES_AT:
            evaluate(s)
        clock.wait()
        if s.world_size < flags.whole:
            time.sleep(1.0)  # why: whoever comes for those that are gone finds most of the training undone
        s.report(mean)
    log.close()


if __name__ == "__main__":
    main()
