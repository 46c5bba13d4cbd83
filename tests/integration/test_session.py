"""The session with real processes, gloo and an agent's socket: exchange, saves, drains, failures, world changes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, Shape, seal, verify
from tests.support.jobs.cluster import DDP
from tests.support.workers.fake_agent import WORKER, FakeAgent, assert_same_curve, read_history
from tests.support.workers.ranks import Rank, wait_all

pytestmark = pytest.mark.timeout(120)

History = dict[int, tuple[float, list[int]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """12 steps in a world of one."""
    with FakeAgent(tmp_path_factory.mktemp("undisturbed"), world=1, epoch=1) as agent:
        agent.start("--steps", "12")
        assert agent.wait() == [0]
        yield agent.history()


def newest(directory: Path) -> Manifest:
    manifest = CheckpointStore(directory / "run-0001").newest()
    assert manifest is not None
    return manifest


def test_worlds_1_3_2_give_the_undisturbed_curve(tmp_path: Path, undisturbed: History) -> None:
    """Two drains and changes of the world (3 does not divide 16): same losses, each sample once, no step twice."""
    found: History = {}
    resume = None
    for epoch, (world, last) in enumerate([(1, 3), (3, 7), (2, 12)], start=1):
        with FakeAgent(tmp_path, world=world, epoch=epoch, resume=resume) as agent:
            agent.start("--steps", "12", "--step-time", "0.3")
            if last < 12:
                agent.wait_for_step(last - 1)
                agent.drain()
                assert agent.wait() == [83] * world, agent.outputs
                drained = agent.wait_for("drained", world)
                resume = newest(tmp_path)
                assert {(d.name, d.digest) for d in drained} == {(resume.name, resume.digest)}
                assert [s.digest for s in agent.of("sealed")] == [resume.digest]
                assert {d.step for d in agent.wait_for("draining", world)} == {resume.step}
            else:
                assert agent.wait() == [0] * world, agent.outputs
                assert len(agent.wait_for("finished", world)) == world
            history = agent.history()
            assert not set(found) & set(history), "a step was made twice"
            found.update(history)
    assert_same_curve(found, undisturbed, range(1, 13))
    final = newest(tmp_path)
    assert (final.step, final.position.data_epoch, final.position.samples) == (12, 1, 80)
    assert final.resumed_from is not None


def test_same_world_resumes_bit_exactly_with_dropout(tmp_path: Path) -> None:
    """A drain and a restart with as many ranks change not one bit, dropout included."""
    with FakeAgent(tmp_path / "a", world=2, epoch=1) as agent:
        agent.start("--steps", "9", "--dropout", "0.3")
        assert agent.wait() == [0, 0], agent.outputs
        wanted = agent.history()
    with FakeAgent(tmp_path / "b", world=2, epoch=1) as agent:
        agent.start("--steps", "9", "--dropout", "0.3", "--step-time", "0.2")
        agent.wait_for_step(3)
        agent.drain()
        assert agent.wait() == [83, 83], agent.outputs
        found = agent.history()
    with FakeAgent(tmp_path / "b", world=2, epoch=2, resume=newest(tmp_path / "b")) as agent:
        agent.start("--steps", "9", "--dropout", "0.3")
        assert agent.wait() == [0, 0], agent.outputs
        found.update(agent.history())
    assert found == wanted


def test_fixed_micro_batches_keep_dropout_alike_in_other_worlds(tmp_path: Path) -> None:
    """With fixed micro-batches, dropout at 3 ranks gives the curve of one rank."""
    histories = []
    for world in (1, 3):
        with FakeAgent(tmp_path / str(world), world=world, epoch=1) as agent:
            agent.start("--steps", "6", "--dropout", "0.3", "--fixed")
            assert agent.wait() == [0] * world, agent.outputs
            histories.append(agent.history())
    assert_same_curve(histories[1], histories[0], range(1, 7))


def test_failed_save_on_one_rank_fails_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    """Disk full on rank 1 only: nobody hangs, leftovers go, one line, SaveFailed, and later saves succeed."""
    with FakeAgent(tmp_path, world=2, epoch=4) as agent:
        agent.start("--steps", "6", "--save-every", "2", "--fail-rank", "1")
        assert agent.wait() == [0, 0], agent.outputs
        failed = agent.wait_for("save_failed", 2)
    assert {(f.name, f.drain) for f in failed} == {("step-2.e4.1", False)}
    assert all("No space left" in f.reason and "rank 1" in f.reason for f in failed)
    assert agent.outputs[0].count("saving step-2.e4.1 failed") == 1
    names = {p.name for p in agent.run_dir.glob("step-*")}
    assert names == {"step-4.e4.1", "step-6.e4.1"}
    for manifest in CheckpointStore(agent.run_dir).sealed():
        verify(agent.run_dir / manifest.name, manifest)
        assert {"part-0.json", "part-1.json", "rng/rank-0.json", "rng/rank-1.json"} < {f.path for f in manifest.files}


@pytest.mark.parametrize("flags", [(), ("--background",)], ids=["waiting", "background"])
@pytest.mark.parametrize("drain", [False, True])
def test_a_full_disk_before_a_barrier_is_said_and_ends_the_ranks(
    tmp_path: Path, flags: tuple[str, ...], drain: bool
) -> None:
    """The others wait there for rank 0, which waits for them: it says why, and its end lets them go."""
    with FakeAgent(tmp_path, world=2, epoch=1, stall_timeout=4) as agent:
        agent.start("--steps", "1000", "--save-every", "0" if drain else "2", "--fail-rank", "0", "--barrier", *flags)
        if drain:
            agent.wait_for_step(2)
            agent.drain()
        codes = agent.wait()
    assert 0 not in codes, agent.outputs
    assert 83 not in codes, agent.outputs
    full = "Cannot allocate memory" if flags else "No space left on device"
    (said,) = [line for line in agent.outputs[0].splitlines() if line.startswith("dalsegno: rank 0 cannot save")]
    assert full in said
    assert "If they wait for it in a barrier, in 3 s without a byte from them it ends" in said
    ended = next(line for line in agent.outputs[0].splitlines() if "SaveError: saving step" in line)
    assert full in ended
    assert "cannot save" not in agent.outputs[1]


def test_a_rank_that_failed_waits_for_those_that_still_write(tmp_path: Path) -> None:
    """However long they take, as long as something grows: the save fails on all ranks, and the run goes on."""
    with FakeAgent(tmp_path, world=2, epoch=1, stall_timeout=8) as agent:
        agent.start("--steps", "4", "--save-every", "2", "--fail-rank", "1", "--write-slowly", "10")
        assert agent.wait() == [0, 0], agent.outputs
        assert {one.name for one in agent.of("save_failed")} == {"step-2.e1.1"}
    assert "dalsegno: rank 1 cannot save its part of step-2.e1.1" in agent.outputs[1]
    assert newest(tmp_path).step == 4


def test_mistake_in_the_save_function_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    """What trying again cannot cure is not hidden as a failed save, and no rank waits for the one that raised."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "6", "--save-every", "2", "--fail-rank", "1", "--fail-with", "mistake")
        assert agent.wait() == [1, 1]
    assert "a mistake in the script" in agent.outputs[0]
    assert "SaveError" in agent.outputs[0]


def test_drain_whose_save_fails_trains_on_and_tries_again(tmp_path: Path) -> None:
    """Nobody exits from a drain that could not save; the next try, after a pause, does, under a new name."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "1000", "--step-time", "0.05", "--fail-rank", "0")
        agent.wait_for_step(2)
        agent.drain()
        failed = agent.wait_for("save_failed", 2)
        assert all(f.drain and f.name == f"step-{f.step}.e1.1" for f in failed)
        assert agent.wait() == [83, 83], agent.outputs
        steps = sorted({d.step for d in agent.wait_for("draining", 4)})
    assert len(steps) == 2
    assert steps[1] > steps[0] + 5
    assert newest(tmp_path).step == steps[1]


def test_an_order_to_save_is_carried_out_once_by_all_ranks(tmp_path: Path) -> None:
    """Also where one alone has heard of it: all save at one boundary, and train on; the next order is another."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "40", "--step-time", "0.1", "--save-every", "0")
        agent.wait_for_step(2)
        agent.order_save(7, ranks=1)
        (first,) = agent.wait_for("sealed")
        agent.wait_for_step(first.step + 5)
        assert len(agent.of("sealed")) == 1
        agent.order_save(9)
        _, second = agent.wait_for("sealed", 2)
        assert agent.wait() == [0, 0], agent.outputs
        sealed = [one.step for one in agent.of("sealed")]
        assert 2 < first.step < second.step < 40
        # The last one is the end's.
        assert sealed == [first.step, second.step, 40]
        assert not agent.of("draining")
        assert len(agent.of("ready")) == 2


def test_withdrawn_drain_is_forgotten(tmp_path: Path) -> None:
    """A drain taken back before the ranks agreed on it does nothing."""
    with FakeAgent(tmp_path, world=1, epoch=1) as agent:
        agent.start("--steps", "6", "--step-time", "0.3")
        agent.wait_for_step(1)
        agent.drain()
        agent.drain(False)
        assert agent.wait() == [0], agent.outputs


def test_drain_does_not_save_a_step_twice(tmp_path: Path) -> None:
    """Where a regular save falls on the drain's boundary, there is one checkpoint of it."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "100", "--save-every", "1", "--step-time", "0.1")
        agent.wait_for_step(3)
        agent.drain()
        assert agent.wait() == [83, 83], agent.outputs
        drained = agent.wait_for("drained", 2)
    steps = [m.step for m in CheckpointStore(agent.run_dir).sealed()]
    assert steps == list(range(1, drained[0].step + 1))


def test_resume_at_the_end_finishes_without_saving_the_same_step_again(tmp_path: Path) -> None:
    """A run that lost its last word, but not its last step, has nothing to train and nothing to save."""
    with FakeAgent(tmp_path, world=1, epoch=1) as agent:
        agent.start("--steps", "3")
        assert agent.wait() == [0], agent.outputs
    with FakeAgent(tmp_path, world=2, epoch=2, resume=newest(tmp_path)) as agent:
        agent.start("--steps", "3")
        assert agent.wait() == [0, 0], agent.outputs
        assert {f.step for f in agent.wait_for("finished", 2)} == {3}
        assert not agent.of("sealed")
        assert not agent.history()
    assert [m.name for m in CheckpointStore(agent.run_dir).sealed()] == ["step-3.e1.1"]


def test_exit_code_is_83_whatever_the_script_returns(tmp_path: Path) -> None:
    """A script that catches everything and returns 0 after a drain cannot be taken for a success."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--swallow", "--steps", "1000", "--step-time", "0.1")
        agent.wait_for_step(2)
        agent.drain()
        assert agent.wait() == [83, 83], agent.outputs
    assert "swallowed Drained(83)" in agent.outputs[0]


@pytest.mark.parametrize("harm", ["flip", "truncate", "missing", "extra", "manifest"])
def test_damaged_resume_point_is_reported_and_never_loaded(tmp_path: Path, harm: str) -> None:
    """Every kind of damage ends all ranks with 84 and names the file to the agent."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "2")
        assert agent.wait() == [0, 0], agent.outputs
    manifest = newest(tmp_path)
    directory = agent.run_dir / manifest.name
    victim = directory / ("MANIFEST.json" if harm == "manifest" else "model.pt")
    if harm == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif harm == "truncate":
        os.truncate(victim, victim.stat().st_size - 1)
    elif harm in ("missing", "manifest"):
        victim.unlink()
    else:
        victim = directory / "extra.pt"
        victim.write_bytes(b"x")
    with FakeAgent(tmp_path, world=2, epoch=2, resume=manifest) as agent:
        agent.start("--steps", "4")
        assert agent.wait() == [84, 84], agent.outputs
        bad = agent.wait_for("bad_checkpoint")
    assert {(b.name, b.digest, b.form, b.file) for b in bad} == {(manifest.name, manifest.digest, 1, victim.name)}
    assert not agent.history()


def test_shards_of_another_world_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    """Whatever an agent hands out: two ranks cannot load what three wrote as it is, and say so in one line."""
    with FakeAgent(tmp_path, world=1, epoch=1) as agent:
        agent.start("--steps", "2")
        assert agent.wait() == [0], agent.outputs
    directory, manifest = agent.run_dir / newest(tmp_path).name, newest(tmp_path)
    (directory / "MANIFEST.json").unlink()
    other = replace(manifest, shape=Shape(3, "fsdp1", False))
    seal(directory, other)
    with FakeAgent(tmp_path, world=2, epoch=2, resume=other) as agent:
        agent.start("--steps", "4")
        assert agent.wait() == [1, 1], agent.outputs
    last = [output.strip().splitlines()[-1] for output in agent.outputs]
    wanted = "RuntimeError: .* written by 3 ranks with strategy fsdp1, which loads at no other number .there are 2.*"
    assert all(re.search(wanted, line) for line in last), last
    assert not agent.history()


def test_first_rank_without_data_ends_the_loop_for_all(tmp_path: Path) -> None:
    """Iterables of unknown and different lengths: all ranks make the shortest one's steps, none hangs."""
    with FakeAgent(tmp_path, world=3, epoch=1) as agent:
        agent.start("--plain-lists", "5")
        assert agent.wait() == [0, 0, 0], agent.outputs
    assert [(agent.logs / f"rank-{r}.done").read_text() for r in range(3)] == ["5", "5", "5"]


def test_fast_steps_are_exchanged_rarely_and_still_drain_together(tmp_path: Path) -> None:
    """Steps of a millisecond do not pay for an exchange each, and all ranks leave at one boundary."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "1000000")
        agent.wait_for_step(100)
        # Only exchanged steps are reported at once, others at most every 50 ms. On a loaded machine steps may be longer
        # for a while.
        agent.wait_until(lambda: len(agent.of("progress")) / 2 < max(m.step for m in agent.of("progress")) - 1)
        agent.drain()
        assert agent.wait() == [83, 83], agent.outputs
        assert len({d.step for d in agent.wait_for("drained", 2)}) == 1


def test_dead_agent_does_not_hang_a_worker(tmp_path: Path) -> None:
    """Without its agent a worker trains on until the node's keeper ends it."""
    with FakeAgent(tmp_path, world=1, epoch=1) as agent:
        agent.start("--steps", "12", "--step-time", "0.1")
        agent.wait_for_step(2)
        for connection in agent._connections:
            connection.shutdown(2)
        assert agent.wait() == [0], agent.outputs
    assert len(agent.history()) == 12


def alone(tmp_path: Path, *flags: str, **environ: str) -> Rank:
    """A training process without an agent."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    command = [str(WORKER), "--log", str(tmp_path / "logs"), "--checkpoint-dir", str(tmp_path / "ck"), *flags]
    return Rank(command, {**os.environ, "OMP_NUM_THREADS": "1", **environ})


@pytest.mark.full
def test_an_example_runs_with_plain_python(tmp_path: Path) -> None:
    """As a user types it, in a fresh interpreter."""
    command = [sys.executable, str(DDP), "--steps=3", f"--checkpoint-dir={tmp_path / 'ck'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert CheckpointStore(tmp_path / "ck").finished


def test_plain_python_saves_on_sigterm_and_resumes(tmp_path: Path, undisturbed: History) -> None:
    """No agent at all: SIGTERM drains with 83, the next start goes on, a damaged newest checkpoint is passed over."""
    log = tmp_path / "logs"
    with closing(alone(tmp_path, "--steps", "12", "--save-every", "2", "--step-time", "0.2")) as process:
        while len(read_history(log, 0)) < 5:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code, output = process.wait(30)
    assert code == 83, output
    store = CheckpointStore(tmp_path / "ck")
    drained = store.newest()
    assert drained is not None
    assert drained.step == max(read_history(log, 0))
    second_newest = store.sealed()[-2]
    (store.path(drained.name) / "model.pt").unlink()
    with open(store.path(second_newest.name) / "model.pt", "r+b") as file:
        file.write(b"no")
    with closing(alone(tmp_path, "--steps", "12")) as second:
        code, output = second.wait(60)
    assert code == 0, output
    for name in (drained.name, second_newest.name):
        assert f"checkpoint {name} is damaged, trying the one before" in output
    assert store.finished
    for step, (loss, ids) in read_history(log, 0).items():
        assert loss == pytest.approx(undisturbed[step][0], rel=1e-5)
        assert set(ids) == set(undisturbed[step][1])


def test_torchrun_without_agent_drains_all_ranks(tmp_path: Path) -> None:
    """SIGTERM to one rank of a plain two-rank world saves on both and ends both with 83."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        alone(
            tmp_path,
            *("--steps", "1000", "--step-time", "0.1"),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(2)
    ]
    try:
        while len(read_history(tmp_path / "logs", 0)) < 3:
            assert ranks[1].poll() is None
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGTERM)
        ended = wait_all(ranks, 30)
    finally:
        for rank in ranks:
            rank.close()
    assert [code for code, _ in ended] == [83, 83], ended
    found = CheckpointStore(tmp_path / "ck").newest()
    assert found is not None
    assert found.shape.world_size == 2


def test_second_training_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    """Two processes that would write the same checkpoints: the second ends with a line that says what to do."""
    with closing(alone(tmp_path, "--steps", "1000", "--step-time", "0.1")) as first:
        while not read_history(tmp_path / "logs", 0):
            assert first.poll() is None
            time.sleep(0.05)
        with closing(alone(tmp_path, "--steps", "2")) as second:
            code, output = second.wait(30)
    assert code == 1
    assert "in use by another training" in output
