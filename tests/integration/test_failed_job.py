"""The end of a job: one that failed for good is taken up where it was committed last, and nothing goes with memory."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import LEFT, LEFT_UNSAVED, PATIENCE, Cluster, Training, Undisturbed
from tests.support.jobs.faults import run_directory
from tests.support.jobs.shell import Shell

pytestmark = pytest.mark.timeout(300)

# A job that ended in failure; docs/contracts.md.
FAILED = 1


@pytest.mark.parametrize("master", ["alive", pytest.param("dead", marks=pytest.mark.full)])
def test_same_command_after_a_failure(clusters: Callable[..., Cluster], undisturbed: Undisturbed, master: str) -> None:
    """Its budget is spent. Again, also with another --nnodes and a master that must be started anew: it resumes."""
    job = clusters(training=Training(steps=30, save_every=5), nnodes="1:1", agent_flags=["--max-restarts=0"])
    (first,) = job.start("a")
    first.expected = None
    epoch = job.wait_world(1)
    head = job.wait_status(lambda status: status.head.step >= 10, "a commit").head
    processes.send([job.worker_pid(first)], signal.SIGKILL)
    first.expected = FAILED
    job.wait_exit(first)
    if master == "dead":
        pid = job.master_pid()
        assert pid is not None
        processes.send([pid])
        job.nnodes = "1:2"
    job.start("a")
    epoch = job.wait_world(1, after=epoch)
    assert job.change(epoch).resumed >= head.step
    assert not run_directory(job, "run-0002").exists()
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("names", [("a",), pytest.param(("a", "b"), marks=pytest.mark.full)])
def test_what_is_in_memory_alone_outlives_a_failure_for_good(
    clusters: Callable[..., Cluster], undisturbed: Undisturbed, names: tuple[str, ...]
) -> None:
    """The ranks have saved to memory only: the agents bring that to the disk before they end."""
    job = clusters(
        training=Training(steps=40, save_every=1000),
        nnodes=f"1:{len(names)}",
        universal=False,
        script_flags=("--memory-every=5",),
        agent_flags=("--memory-replicas=1", "--max-restarts=0", "--quiet-time=60"),
        agent_environment={"DALSEGNO_TEST_STEPS": "3"},
    )
    nodes = job.start(*names)
    epoch = job.wait_world(len(names))
    held = job.wait_status(lambda status: status.held.step >= 20, "a step in memory").held
    for node in nodes:
        node.expected = FAILED
    processes.send([job.worker_pid(nodes[0])], signal.SIGKILL)
    for node in nodes:
        job.wait_exit(node)
    assert "is in memory only, is on the disk" in nodes[0].text()
    assert json.loads((run_directory(job) / "latest.json").read_text())["step"] >= held.step
    job.start(*names)
    epoch = job.wait_world(len(names), after=epoch)
    assert job.change(epoch).resumed >= held.step
    job.finish()
    job.assert_undisturbed(undisturbed)


def test_a_node_that_leaves_behind_a_failure_writes_what_its_ranks_left(
    clusters: Callable[..., Cluster], undisturbed: Undisturbed
) -> None:
    """Its rank dies and its master stands still: what is in its memory is the only copy of the run."""
    job = clusters(
        training=Training(steps=40, save_every=1000),
        nnodes="1:1",
        universal=False,
        script_flags=("--memory-every=5",),
        agent_flags=("--memory-replicas=1",),
        agent_environment={"DALSEGNO_TEST_STEPS": "3"},
    )
    (node,) = job.start("a")
    epoch = job.wait_world(1)
    held = job.wait_status(lambda status: status.held.step >= 20, "a step in memory").held
    master = job.master_pid()
    assert master is not None
    processes.send([master], signal.SIGSTOP)
    try:
        processes.send([job.worker_pid(node)])
        job.leave(node)
        # Its rank's death may be seen behind its notice.
        node.expected = node.process.wait(PATIENCE)
    finally:
        processes.send([master], signal.SIGCONT)
    assert node.expected in (LEFT, LEFT_UNSAVED)
    assert re.search("what was in memory here(, which)? is on the disk", node.text())
    job.start("a")
    epoch = job.wait_world(1, after=epoch)
    assert job.change(epoch).resumed >= held.step
    job.finish()
    job.assert_undisturbed(undisturbed)


LEFT_BEHIND_A_SAVE = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from dalsegno.elastic import session

s = session()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
state = s.state(model, optimizer, wrap=DistributedDataParallel)
data = s.data(torch.utils.data.TensorDataset(torch.randn(64, 2048)), global_batch=4, micro_batch=4, seed=1)
for batch in s.steps(data, state, max_steps=100, save_every=4, memory_every=2):
    if s.step == 4:
        break  # Good enough: what was just saved is the result.
    for micro in batch:
        micro.scale(state.model(micro.data[0]).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
s.finish()
os._exit(0)
"""


def test_what_a_script_saved_last_is_on_the_disk_when_the_job_is_finished(shell: Shell, tmp_path: Path) -> None:
    """It leaves its loop right behind a save, which the agents still write from memory to the disk then."""
    script = tmp_path / "script.py"
    script.write_text(LEFT_BEHIND_A_SAVE, encoding="utf-8")
    directory = tmp_path / "checkpoints"
    ended = shell.run("--nnodes=1", "--memory-replicas=1", f"--checkpoint-dir={directory}", "--job-id=job", str(script))
    assert ended.code == 0, ended.text
    latest = json.loads((directory / "job" / "run-0001" / "latest.json").read_text(encoding="utf-8"))
    assert latest["step"] == 4


BEST_AND_GONE = """
import os
import time
import torch
from dalsegno.elastic import session

s = session()
s.track("score", mode="max")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
state = s.state(model, optimizer)
data = s.data(torch.utils.data.TensorDataset(torch.randn(64, 8)), global_batch=4, micro_batch=4, seed=1)
first = not os.path.exists(os.environ["AGAIN"])
aside = s.run_dir / ".durable"
if first:
    open(os.environ["AGAIN"], "w").close()
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text("Agents cannot write as long as this is here.")
for batch in s.steps(data, state, max_steps=7, memory_every=1):
    for micro in batch:
        micro.scale(state.model(micro.data[0]).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if first:
        time.sleep(1.0)  # Each step is held before the next one.
    s.improved(1.0 if batch.step == 4 else 0.0)
    if first and batch.step == 6:
        aside.unlink()
        os._exit(3)
s.finish()
"""


@pytest.mark.full
def test_a_job_that_fails_for_good_has_its_best_on_the_disk(shell: Shell, tmp_path: Path) -> None:
    """It was the best two steps before the end. Newer steps are in memory, and until then the disk took nothing."""
    script = tmp_path / "script.py"
    script.write_text(BEST_AND_GONE, encoding="utf-8")
    directory = tmp_path / "checkpoints"
    flags = "--nnodes=1", "--memory-replicas=1", f"--checkpoint-dir={directory}", "--job-id=job", "--max-restarts=0"
    once = {"AGAIN": str(tmp_path / "again")}
    assert shell.run(*flags, str(script), **once).code == FAILED
    run = directory / "job" / "run-0001"
    (best,) = (path.parent.name for path in run.glob("step-4.*/MANIFEST.json"))
    again = shell.run(*flags, str(script), **once)
    assert again.code == 0, again.text
    assert "resumed at step 5" in again.text
    assert json.loads((run / "best.json").read_text(encoding="utf-8"))["name"] == best


RAISES = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise RuntimeError("out of luck")
main()
"""


def test_a_scheduler_finds_why_the_job_failed(shell: Shell, tmp_path: Path) -> None:
    """Where it has told its launcher to leave that, as torchrun does; and torch's events are told to who wants them."""
    script, reply = tmp_path / "script.py", tmp_path / "reply.json"
    script.write_text(RAISES, encoding="utf-8")
    flags = f"--checkpoint-dir={tmp_path / 'c'}", f"--log-dir={tmp_path / 'logs'}", "--max-restarts=0"
    done = shell.run(*flags, "--event-log-handler=console", str(script), TORCHELASTIC_ERROR_FILE=str(reply))
    assert done.code == FAILED
    (own,) = (tmp_path / "logs").rglob("error.json")
    told, found = (json.loads(path.read_text(encoding="utf-8"))["message"] for path in (reply, own))
    assert told == {**found, "errorCode": 1}
    assert "out of luck" in told["message"]
    states = re.findall(r'"name": "torchelastic\.worker\.status\.(\w+)"', done.text)
    assert states == ["START", "FAILED", "SUCCEEDED"]
