"""`--dlrover-fixes` with DLRover's own classes: the curve of one rank, and each sample once, whatever the world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic import ElasticSampler
from tests.support.jobs import dlrover_users as users
from tests.support.jobs.cluster import LEFT_UNSAVED, Cluster

pytestmark = pytest.mark.timeout(300)
LENGTH, MICRO_BATCH, SEED, RATE, MOST = 101, 5, 3, 0.05, 4


@pytest.fixture
def fixed(clusters: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """Makes jobs of `fixed_worker.py` with up to 4 nodes, so that 20 samples make a global batch."""

    def make(*extra: str, flags: tuple[str, ...] = ("--dlrover-fixes",), **options: Any) -> Cluster:
        training = users.FlashTraining(script=users.FIXED, extra=extra)
        options = {"nnodes": f"1:{MOST}", "step_time": 0.3, **options}
        return clusters(training=training, hooked=False, universal="", agent_flags=["--grow-wait=1", *flags], **options)

    return make


def one_rank(steps: int) -> list[tuple[set[int], float]]:
    """What one process without DLRover's classes does: for each of so many steps its samples, and the weights' sum."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    sampler = ElasticSampler(LENGTH, MICRO_BATCH * MOST, seed=SEED)
    found = []
    for batch in sampler:
        if len(found) == steps:
            break
        ids = list(batch.sample_ids)
        rows = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in ids])
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        scheduler.step()
        found.append((set(ids), sum(float(value.detach().double().sum()) for value in model.parameters())))
    return found


def assert_same_run(job: Cluster) -> None:
    """Each step has the samples and the weights of one rank's, in every world that made it."""
    made = users.sums(job)
    expected = one_rank(max(made))
    assert sorted(made) == list(range(1, len(expected) + 1))
    samples: dict[int, set[int]] = {}
    for path in job.step_log.glob("samples-*"):
        for line in path.read_text(encoding="ascii").splitlines():
            step, _, *ids = map(int, line.split())
            samples.setdefault(step, set()).update(ids)
    for step, (ids, total) in enumerate(expected, 1):
        assert samples[step] == ids, f"samples of step {step}"
        assert [float(one) for one in made[step]] == pytest.approx([total] * len(made[step]), abs=2e-4), f"step {step}"


def wait_over(job: Cluster) -> None:
    """Has the script end with its data epoch; nothing of it is left."""
    users.end(job)
    assert users.notes(job)[-1][0] == "over"


@pytest.mark.full
def test_defects_are_named_once_at_the_start(fixed: Callable[..., Cluster]) -> None:
    """On the console, before anything of the run, and not again with the next world."""
    job = fixed(flags=())
    (node,) = job.start("a")
    users.wait_steps(job, 0, 3)
    users.crash(job, 0)
    users.wait_steps(job, 1, 3)
    wait_over(job)
    said = node.said()
    named = [number for number, line in enumerate(said) if "--dlrover-fixes mends it" in line]
    assert len(named) == 2, said
    assert "different numbers of micro-batches with 3 of 4 nodes" in said[named[0]]
    assert "ElasticDistributedSampler counts from the last resume" in said[named[1]]
    first = next(number for number, line in enumerate(said) if "epoch 1" in line)
    assert max(named) < first, said
    assert not [line for line in said if "session()" in line], "a script of DLRover's has none"


@pytest.mark.full
@pytest.mark.parametrize("extra", [(), ("--zero-first",)], ids=["zeroed behind", "zeroed before"])
def test_worlds_of_one_two_and_three_of_four(fixed: Callable[..., Cluster], extra: tuple[str, ...]) -> None:
    """Growths, a crash, a leave: several resumes in a data epoch, and a world that does not divide the batch."""
    job = fixed(*extra)
    job.start("a")
    users.wait_steps(job, 0, 3)
    (b,) = job.start("b")
    users.wait_steps(job, 1, 2)
    job.start("c")
    users.wait_steps(job, 2, 2)
    users.crash(job, 1)
    users.wait_steps(job, 3, 3)
    job.leave(b, LEFT_UNSAVED)
    users.wait_steps(job, 4, 1)
    wait_over(job)
    assert [world.size for world in users.worlds(job)] == [1, 2, 3, 3, 2]
    assert_same_run(job)


@pytest.mark.full
def test_without_the_flag_they_are_theirs(fixed: Callable[..., Cluster]) -> None:
    """The comparison above can fail: in a world of one of four, theirs accumulates what it does not average."""
    job = fixed("--data-epochs=1", flags=(), step_time=0.0)
    job.start("a")
    wait_over(job)
    with pytest.raises(AssertionError):
        assert_same_run(job)


# Runs each snippet of a list in a process of its own, forked from one that has imported the library. Its output, or the
# last line of its error, is an item of the list that is printed.
SNIPPETS = """
import io, json, os, sys, torch, traceback
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler as S
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from contextlib import redirect_stdout
found = []
for number, (code, environment) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        os.environ.update(environment)
        text = io.StringIO()
        try:
            with redirect_stdout(text):
                exec(code, globals())
        except Exception as error:
            print(traceback.format_exception_only(error)[-1], file=text)
        open(f"said-{number}", "w").write(text.getvalue())
        os._exit(0)
    os.waitpid(child, 0)
    found.append(open(f"said-{number}").read().strip())
print(json.dumps(found))
"""


def said(directory: Path, *snippets: str | tuple[str, dict[str, str]], ours: bool = True) -> list[str]:
    """What pieces of scripts print that use DLRover's sampler (`S`) and trainer, or the error that ends them."""
    install = "from dalsegno.elastic.dlrover.fixes import install\ninstall()\n" if ours else ""
    pairs = [(one, {}) if isinstance(one, str) else one for one in snippets]
    done = subprocess.run(
        [sys.executable, "-c", install + SNIPPETS, json.dumps(pairs)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(users.installed(*users.DLROVER))},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def begin(state: str) -> str:
    """Takes 3 micro-batches of 4, prints their samples, and saves the sampler's state."""
    return (
        "s = S(range(40), seed=5)\ns.set_epoch(2)\ni = iter(torch.utils.data.DataLoader(range(40), 4, sampler=s))\n"
        f"print([x for _ in range(3) for x in next(i).tolist()])\njson.dump(s.state_dict(3, 4), open('{state}', 'w'))\n"
    )


def read(state: str, seed: int = 5) -> str:
    """Prints the samples of the rest of that data epoch, and before them its number."""
    return (
        f"s = S(range(40), seed={seed})\ns.load_state_dict(json.load(open('{state}')))\n"
        "l = torch.utils.data.DataLoader(range(40), 4, sampler=s)\n"
        "print([s.epoch, *(x for b in l for x in b.tolist())])\n"
    )


@pytest.mark.full
def test_a_state_loads_in_either_class(tmp_path: Path) -> None:
    """A data epoch that theirs has begun goes on in its order; theirs takes place and number from one of ours."""
    (begun_by_theirs,) = map(json.loads, said(tmp_path, begin("theirs"), ours=False))
    begun, theirs, ours, other = said(tmp_path, begin("ours"), read("theirs"), read("ours"), read("ours", seed=6))
    assert "seed was 5 and is 6" in other
    for head, rest in ((begun_by_theirs, json.loads(theirs)), (json.loads(begun), json.loads(ours))):
        assert rest[0] == 2
        assert sorted(head + rest[1:]) == list(range(40))
    (back,) = map(json.loads, said(tmp_path, read("ours"), ours=False))
    assert (back[0], len(back)) == (2, 29), "in an order of its own: at the start of a data epoch nothing comes twice"


TRAINER = (
    "m = torch.nn.Linear(1, 1)\nt = ElasticTrainer(m)\nt.prepare(torch.optim.SGD(m.parameters(), lr=1))\n"
    "l = torch.utils.data.DataLoader(range(40), 4, sampler=S(range(40)))\ni = iter(l)\n"
)


@pytest.mark.full
def test_what_cannot_be_exact_is_refused(tmp_path: Path) -> None:
    """With one line that says what to do."""
    fixed = TRAINER + "next(i)\nwith t.step(fix_total_batch_size=True): pass\n"
    two, none, late, nodes = said(
        tmp_path,
        TRAINER + "next(i)\nnext(i)\nwith t.step(): pass\n",
        TRAINER + "next(i)\nwith t.step(): pass\nwith t.step(): pass\n",
        (fixed, {"DALSEGNO_DLROVER_FIXES": "each", "WORKER_NUM": "3"}),
        (TRAINER, {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "NODE_NUM": "2"}),
    )
    assert "2 batches were taken from the loader" in two
    assert "step() was entered 2 times" in none
    assert "write that argument into the script's own text" in late
    assert "the same --nproc-per-node" in nodes


@pytest.mark.full
def test_other_ways_to_train(tmp_path: Path) -> None:
    """A batch of each world's own keeps the position; batches that the script cuts make as many micro-batches."""
    own = "for _ in l:\n    with t.step(): pass\n    print(l.sampler.state_dict(0, 4)['completed_num'])\n"
    cut = (
        "for _ in range(4):\n    with t.step(True):\n        m(torch.ones(1, 1)).sum().backward()\n"
        "    print(t.gradient_state.sync_gradients, float(m.bias.grad))\n"
    )
    each, even = said(
        tmp_path,
        (TRAINER + own, {"DALSEGNO_DLROVER_FIXES": "each", "WORKER_NUM": "3"}),
        (TRAINER + cut, {"WORKER_NUM": "2"}),
    )
    assert each.split() == [str(4 * number) for number in range(1, 11)]
    assert even.splitlines() == ["False 0.5", "True 1.0", "False 1.5", "True 2.0"]
