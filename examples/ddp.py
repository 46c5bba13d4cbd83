"""The smallest elastic script: plain DistributedDataParallel, nothing to convert.

    python examples/ddp.py                                  one process
    torchrun --nproc-per-node 2 examples/ddp.py             two
    dlrover-run --nnodes=1:4 examples/ddp.py                as many as there are, and they may come and go

Outside ``dlrover-run`` it saves only if ``--checkpoint-dir DIR`` is given.
The lines marked ``elastic`` are what it adds to a plain DDP script.
"""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dalsegno.elastic import session  # elastic


def make_model(width: int = 64) -> nn.Module:
    """A next-byte model that looks at only one byte: (batch, length) -> (batch, length, 256)."""
    return nn.Sequential(nn.Embedding(common.VOCABULARY, width), nn.GELU(), nn.Linear(width, common.VOCABULARY))


def main() -> None:
    parser = common.parser("Plain DDP on the standard library's source text.")
    parser.add_argument("--stay", action="store_true", help="processes stay through planned changes of the world")
    flags = parser.parse_args()
    s = session(checkpoint_dir=flags.checkpoint_dir)  # elastic

    torch.manual_seed(flags.seed)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.learning_rate)
    state = s.state(model, optimizer, wrap=DistributedDataParallel)  # elastic: loaded where the run resumes

    data = s.data(  # elastic: instead of DistributedSampler and DataLoader
        common.StdlibText(),
        global_batch=flags.global_batch_size,
        micro_batch=flags.max_micro_batch_size,
        seed=flags.seed,
    )

    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)
    steps = s.steps(  # elastic
        data,
        state,
        max_steps=flags.steps,
        save_every=flags.save_every,
        memory_every=flags.memory_every,
        stay=flags.stay,
    )
    for batch in steps:
        total = 0.0
        for micro in batch:  # elastic: as many as this rank computes
            logits = state.model(micro.data[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), micro.data[:, 1:].flatten())
            micro.scale(loss).backward()  # elastic: instead of loss / accumulation
            total += float(loss.detach()) * micro.n
        norm = common.gradient_norm(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        mean = common.global_mean(total, batch.n)
        clock.wait()
        s.report(mean)  # elastic
        log.follow(s)
        log.write(
            step=batch.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=mean,
            grad_norm=norm,
        )
        if s.rank == 0 and batch.step % 10 == 0:
            print(f"step {batch.step}: loss {mean:.4f} ({s.world_size} ranks)", flush=True)
    log.close()


if __name__ == "__main__":
    main()
