"""How each printed block of Python code is run: what stands before it, and what must be true after it.

A block that is not here fails `tests/unit/house/test_printed.py`. Nothing is left out of a block; a number may be
smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..forks.forked import PRELOADED
from .printed import Block

PRELOADED_HF = "tests.support.forks.preloaded_hf"


@dataclass(frozen=True)
class Snippet:
    """One block.

    Attributes:
        page, line: where it is printed, and a line that only this block has.
        before: what a reader has already: the imports, a tiny model, data.
        after: what it has done.
        smaller: what is printed, and what is run instead.
        preloaded: see `forked`.
    """

    page: str
    line: str
    before: str = ""
    after: str = ""
    smaller: dict[str, str] = field(default_factory=dict)
    preloaded: str = PRELOADED

    def is_of(self, block: Block) -> bool:
        """Whether this is how that block is run."""
        return block.page == self.page and self.line in block.text

    def source(self, block: Block) -> str:
        """A script."""
        text = block.text
        for printed, ours in self.smaller.items():
            assert printed in text, f"{self.page} does not print {printed} any more"
            text = text.replace(printed, ours)
        return "\n".join((self.before, text, self.after))


# A small one of what examples/train.py trains; beside the script lies a copy of the examples.
GPT = """
import functools, sys, types
sys.path.insert(0, "examples")
import common, train as example
import torch
from torch.utils.data import DataLoader, DistributedSampler
Gpt, flags = example.Gpt, types.SimpleNamespace(layers=1)
make_optimizer = functools.partial(example.make_optimizer, learning_rate=3e-4)
data = common.StdlibText(example.BLOCK, max_samples=80)
"""
# Rows of 5 numbers, the last of which follows from the others.
ROWS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.utils.data import DataLoader
from dalsegno.elastic import Accumulation, Batches, BatchPlan, Counts, ElasticSampler, Evaluator, TrainingState
from dalsegno.elastic import background, session
torch.manual_seed(1)
data, held_out = torch.randn(600, 5), torch.randn(40, 5)
def make_model(): return nn.Linear(4, 1)
def loss_of(model, rows): return (model(rows[:, :4]) - rows[:, 4:]).square().mean()
def evaluate(model): return float(loss_of(model, held_out))
def measure(model, rows): return {"loss": ((model(rows[:, :4]) - rows[:, 4:]).square().squeeze(1), len(rows))}
model = wrapped = make_model()
optimizer = AdamW(model.parameters())
"""
# Under dlrover-run or torchrun it is one rank of several; typed by itself it is the only one.
DDP = (
    """
import os
alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
if "RANK" not in os.environ: os.environ.update(alone)
"""
    + ROWS
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
data = torch.randn(1200, 5)
"""
)
LOOP = (
    ROWS
    + """
s = session("checkpoints")
def loss_of(output): return output.square().mean()
def save(path): torch.save(model.state_dict(), path / "model.pt")
"""
)
BATCHES = (
    "batches = Batches(data[:, :4], ElasticSampler(600, 256), BatchPlan(256, s.world_size, 8), s.rank, data_epochs=1)\n"
)
# Whoever has no loop of ours: plain batches.
TINY = LOOP + "batches = range(3)\n"
# DeepSpeed as `elastic_deepspeed.prepare` starts it: without an extension that is compiled for a minute.
NO_COMPILER = "import deepspeed.ops\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
HUGGING_FACE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, use_cache=False))
args = TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none",
                         save_strategy="no")
dataset = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
"""
TRAINED = "assert trainer.state.global_step == 2\n"

CODE = (
    Snippet(
        "README.md",
        "for rows in batches:",
        DDP,
        "assert len(batches) == 75\n",
    ),
    Snippet(
        "README.md",
        "for batch in s.steps(batches, state, max_steps=300, save_every=20):",
        DDP,
        # A scene has two nodes run it, and the second one's joining saves another step.
        "assert s.step == 40\nfrom dalsegno.elastic import CheckpointStore\n"
        "assert {20, 40} <= {m.step for m in CheckpointStore(s.run_dir).sealed()}\n",
        {"max_steps=300": "max_steps=40"},
    ),
    Snippet(
        "docs/deepspeed.md",
        'engine.load_checkpoint("checkpoints")',
        NO_COMPILER + GPT,
        "from pathlib import Path\nassert Path('checkpoints/latest').read_text() == 'global_step5'\n",
    ),
    Snippet(
        "docs/deepspeed.md",
        "state = s.engine(engine)",
        GPT,
        "assert s.step == 40\nfrom dalsegno.elastic import CheckpointStore\n"
        "assert [m.step for m in CheckpointStore(s.run_dir).sealed()] == [20, 40]\n",
        {"max_steps=300": "max_steps=40"},
    ),
    Snippet(
        "docs/loop.md",
        "clip_grad_norm_(model.parameters(), 1.0)",
        ROWS,
        "assert s.step == 6\nfrom dalsegno.elastic import CheckpointStore\n"
        "assert [m.step for m in CheckpointStore(s.run_dir).sealed()] == [3, 6]\n",
        {"max_steps=1000": "max_steps=6", "save_every=100": "save_every=3", "batch.step % 100": "batch.step % 2"},
    ),
    Snippet(
        "docs/loop.md",
        "state = s.state(model, optimizer, wrap=DistributedDataParallel)",
        ROWS
        + "from torch.nn.parallel import DistributedDataParallel\n"
        + "s = session('checkpoints')\nmodel = make_model()\noptimizer = AdamW(model.parameters())\n"
        + "batches = s.data(data, global_batch=16, micro_batch=4, seed=0)\n",
        "assert s.step == 6\nassert isinstance(state.model, DistributedDataParallel)\n",
        {"max_steps=1000": "max_steps=6"},
    ),
    Snippet(
        "docs/loop.md",
        "for rate in (1e-3, 1e-4):",
        ROWS + "done = []\ndef train(s, rate): done.append((s.run_dir.name, s.step))\n",
        "assert done == [('0.001', 0), ('0.0001', 0)], done\n",
    ),
    Snippet(
        "docs/lower-layer.md",
        "state = TrainingState(s, model=model, optimizer=optimizer)",
        ROWS,
        "assert s.step == 40\nfrom dalsegno.elastic import CheckpointStore\n"
        "assert [m.step for m in CheckpointStore(s.run_dir).sealed()] == [20, 40]\n",
        {"max_steps=300": "max_steps=40"},
    ),
    Snippet(
        "docs/lower-layer.md",
        "elastic_deepspeed.restore(engine, s.resume)",
        ROWS
        + "import deepspeed\nfrom dalsegno.elastic import deepspeed as elastic_deepspeed\ns = session('checkpoints')\n",
        "assert s.step == 4\n",
        {"max_steps=300": "max_steps=4"},
    ),
    Snippet(
        "docs/scripts.md",
        'config["checkpoint"] =',
        "import os\nconfig = {}\nos.environ['DALSEGNO_RESUME_FORM'] = 'universal'\n",
        "assert config == {'checkpoint': {'load_universal': True}}\n",
    ),
    Snippet(
        "docs/data.md",
        "sampler = ElasticSampler(len(data), 256",
        LOOP + "data = data[:, :4]\n",
        "assert s.step == 5",
        {"max_steps=1000": "max_steps=5"},
    ),
    Snippet(
        "docs/data.md",
        "logits = micro.guard(",
        LOOP.replace(
            "def loss_of(output): return output.square().mean()",
            "def loss_of_each_row(output): return output.square().squeeze(1)",
        )
        + "plan = BatchPlan(256, s.world_size, 8, pad=True)\n"
        "batch = next(iter(Batches(data[:, :4], ElasticSampler(600, 256), plan, s.rank)))\n"
        "micro = next(iter(batch.micro_batches))\n",
        "assert all(p.grad is not None for p in model.parameters())",
    ),
    Snippet("docs/data.md", "for i, batch in enumerate(held_out):", LOOP, "assert i == len(held_out) - 1"),
    Snippet(
        "docs/dcp.md",
        "dcp.save({",
        after="assert s.step == STEPS\nfrom dalsegno.elastic import CheckpointStore\n"
        "assert [m.step for m in CheckpointStore(s.run_dir).sealed()] == [3, 6, 9, 12]\n",
    ),
    Snippet(
        "docs/ms-swift.md", "hf.elastic(trainer, global_batch_size=32)", HUGGING_FACE, TRAINED, preloaded=PRELOADED_HF
    ),
    Snippet(
        "docs/trainer.md",
        "for step, batch in enumerate(loader, 1):",
        ROWS + "data = torch.randn(1600, 5)\n",
        "assert step == 100\n",
    ),
    Snippet(
        "docs/trainer.md",
        'track=Tracked("loss"),',
        ROWS,
        "from pathlib import Path\nassert Path('checkpoints/best.json').exists()\n",
        {"max_steps=1000": "max_steps=20", "save_every=100": "save_every=5", "evaluate_every=100": "evaluate_every=5"},
    ),
    Snippet(
        "elastic/training/accumulation.py",
        "accumulate = Accumulation(wrapped, optimizer)",
        LOOP + BATCHES,
        "assert s.step == 3",
    ),
    Snippet(
        "elastic/saving/background_save.py", "save=background(state), save_every=100): ...", TINY, "assert s.step == 3"
    ),
    Snippet(
        "docs/memory.md",
        "save_every=500, memory_every=10): ...",
        TINY + "from dalsegno.elastic import background\ndef state(): return {}\n",
        "assert s.step == 3",
    ),
    Snippet(
        "elastic/data/counts.py",
        "counts = Counts(device)",
        ROWS
        + "device, shard, wanted = 'cpu', range(3), 1\nlosses, output = torch.ones(4), torch.tensor([1, 1, 2, 3])\n",
        "assert metrics == {'loss': 1.0, 'hits': 6.0}, metrics",
    ),
    Snippet(
        "elastic/deepspeed/engine.py",
        "elastic_ds.restore(engine, s.resume)",
        LOOP + "import deepspeed\nfrom dalsegno.elastic import deepspeed as elastic_ds\n"
        "base, plan, batches = {'zero_optimization': {'stage': 1}}, BatchPlan(8, 1, 4), range(3)\n",
        "assert s.step == 3",
        {"deepspeed.initialize(...,": "deepspeed.initialize(model=model, optimizer=optimizer,"},
    ),
    Snippet(
        "elastic/data/evaluator.py",
        "metrics = Evaluator(dataset, measure, batch_size=64).run(model)",
        ROWS + "from typing import NamedTuple\n"
        "class Sample(NamedTuple):\n    x: torch.Tensor\n    y: torch.Tensor\n"
        "dataset, model = [Sample(torch.randn(4), torch.tensor(1))] * 100, nn.Linear(4, 3)\n",
        "assert metrics['loss'] > 0",
    ),
    Snippet(
        "elastic/training/training_state.py",
        "state.load()",
        TINY + "scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)\nscaler = torch.amp.GradScaler('cpu')\n",
        "assert s.step == 3",
    ),
    Snippet(
        "elastic/script/session.py",
        "state = s.state(model, optimizer)",
        ROWS + "dataset = data\n",
        "assert s.step == 4",
        {"max_steps=1000": "max_steps=4"},
    ),
    Snippet(
        "elastic/training/session.py",
        "load(s.resume.path)",
        TINY + "load = train = lambda batch: 1.0\n",
        "assert s.step == 3",
    ),
    Snippet(
        "swift_plugin/hf/plain.py",
        "elastic(trainer)",
        HUGGING_FACE + "from dalsegno.swift_plugin.hf import elastic\n",
        TRAINED,
        preloaded=PRELOADED_HF,
    ),
)
