"""What nobody has planned for: trainers with habits of their own, notices that come twice, clocks that jump."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.held_phases import agent_of
from tests.support.jobs.local_processes import BLOCKS, send
from tests.support.jobs.pods import Pod, Run, relayed
from tests.support.pages.sources import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]
# Of what ends, and of what is told to go before that, however busy the machine is.
STEPS, ENDLESS = 200, 5000
ODD_SAVER = ROOT / "tests" / "support" / "workers" / "odd_saver.py"
# Far ahead, far behind, and back, at each look.
JUMPING_CLOCK = """import random, time
real, draw = time.time, random.Random()
time.time = lambda: real() + draw.choice((-4e7, -3600, -1, 0, 0, 1, 3600, 4e7))
"""


@contextlib.contextmanager
def with_habit(folder: Path, name: str, steps: int = ENDLESS, **more: Any) -> Iterator[Run]:
    command = [sys.executable, str(ODD_SAVER), name, "${save_dir}", str(folder / "steps"), str(steps)]
    with relayed(folder, command=[*command, "${resume_dir:-}"], resume_flag=None, **more) as run:
        yield run


def assert_finished(run: Run, *pods: Pod) -> None:
    """All of them, with one history to its end."""
    assert [pod.process.wait(120) for pod in pods] == [0] * len(pods), run.said()
    run.assert_one_history(STEPS)
    assert (run.state()["status"], run.commander.run()["state"]) == ("COMPLETED", "COMPLETED")


def assert_goes_on(run: Run, pod: Pod) -> None:
    """It makes steps that nobody has made yet, and all of them are one history."""
    made = run.steps()[-1]
    run.wait_step(made.step + 5, made.epoch + 1)
    pod.vanish()
    run.assert_one_history(run.steps()[-1].step)


def assert_nothing_lost(run: Run) -> None:
    """Each epoch goes on where the one before had ended."""
    epochs = [*run.epochs().values()]
    assert [one[0].step for one in epochs[1:]] == [one[-1].step + 1 for one in epochs[:-1]], "a step was lost on notice"


def holder_of(run: Run, pods: list[Pod]) -> Pod:
    (found,) = [one for one in pods if run.events("acquire")[-1]["pod"].endswith(f"-{one.process.pid}")]
    return found


def test_a_trainer_whose_child_writes_on_when_it_has_ended(tmp_path: Path) -> None:
    """Each save is in the making for seconds, in its place, by another process: half of one never counts."""
    with with_habit(tmp_path, "forks", STEPS) as run:
        a = run.pod("a")
        run.wait_saved()
        run.wait_step(35)
        a.notice()
        assert a.process.wait(60) in (75, 76), run.said()
        b = run.pod("b")
        run.wait_saved(run.steps()[-1].step + 20)
        b.vanish()
        assert_finished(run, run.pod("c"))


def test_a_trainer_that_hears_nothing(tmp_path: Path) -> None:
    """Neither the signal that asks nor SIGTERM: it ends with its notice, and the next pod has the run."""
    with with_habit(tmp_path, "deaf") as run:
        a = run.pod("a", "--notice=5")
        run.wait_saved()
        a.notice()
        assert a.process.wait(30) in (75, 76), run.said()
        assert not run.commander.run()["holder"]
        assert_goes_on(run, run.pod("b"))


def test_a_trainer_that_saves_at_sigterm(tmp_path: Path) -> None:
    """It is asked by just that."""
    with with_habit(tmp_path, "on term", save_signal="SIGTERM") as run:
        a = run.pod("a")
        run.wait_step(33)
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        assert_goes_on(run, run.pod("b"))
        assert_nothing_lost(run)


def test_a_trainer_that_prints_more_than_anybody_reads(tmp_path: Path) -> None:
    """Of its output the newest is kept on the volume."""
    with with_habit(tmp_path, "floods") as run:
        a = run.pod("a")
        run.wait_step(33)
        a.notice()
        assert a.process.wait(60) == 75, run.said()[-3000:]
        assert_goes_on(run, run.pod("b"))
        assert_nothing_lost(run)


def test_names_that_few_expect(tmp_path: Path) -> None:
    """Of files below a save, and of the volume itself."""
    folder = tmp_path / 'it\'s a \u00fc "volume" $HOME'
    folder.mkdir()
    with with_habit(folder, "names") as run:
        a = run.pod("a")
        run.wait_saved(20)
        run.wait_step(33)
        a.notice()
        assert a.process.wait(60) == 75, run.said()[-3000:]
        assert_goes_on(run, run.pod("b"))
        assert_nothing_lost(run)


@pytest.mark.parametrize("how", ["twice", "all processes"])
def test_a_notice_that_comes_more_than_once(tmp_path: Path, how: str) -> None:
    """A container's init tells all of its processes, and the entry point passes it on: that is still one notice."""
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=1000", steps=ENDLESS) as run:
        a = run.pod("a")
        run.wait_step(33)
        if how == "all processes":
            send([agent_of(a)], signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ProcessLookupError):
                a.process.send_signal(number)
        assert a.process.wait(60) == 75, run.said()
        assert_goes_on(run, run.pod("b"))
        assert_nothing_lost(run)


def test_a_pod_in_the_environment_of_another_launcher(tmp_path: Path) -> None:
    """As an operator that starts torchrun sets it: there is one trainer, which goes on in the next pod."""
    said = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MAX_RESTARTS": "0", "RANK": "1"}
    said |= {"PET_MASTER_ADDR": "10.0.0.1", "PET_RDZV_BACKEND": "c10d", "PET_STANDALONE": "1", "WORLD_SIZE": "8"}
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=1000", steps=ENDLESS) as run:
        a = run.pod("a", **said)
        run.wait_step(33)
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        assert_goes_on(run, run.pod("b", **said))
        assert_nothing_lost(run)


def test_a_pod_whose_starter_has_blocked_all_signals(tmp_path: Path) -> None:
    """As a thread of a C++ program does, and all that is started from it inherits that: notice and save are heard."""
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=1000", steps=ENDLESS) as run:
        a = run.pod("a", through=BLOCKS)
        run.wait_step(33)
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        assert_goes_on(run, run.pod("b"))
        assert_nothing_lost(run)


def test_an_order_to_go_is_a_notice(tmp_path: Path) -> None:
    """From whoever hears of the provider's plans, over HTTP: the trainer is asked to save, and nothing is lost."""
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=1000", steps=ENDLESS) as run:
        a = run.pod("a")
        run.wait_step(33)
        path = f"/api/relay/my-run/nodes/{run.commander.run()['holder']}/drain"
        code, said = run.commander.ask("POST", path)
        assert code == 200, said
        assert a.process.wait(60) == 75, run.said()
        assert run.state()["status"] == "PREEMPTED"
        assert_goes_on(run, run.pod("b"))
        assert_nothing_lost(run)


def test_a_commander_that_is_restarted_all_the_time(tmp_path: Path) -> None:
    """Whatever a pod does, it is killed in the middle of that: registering, training, committing, leaving, ending."""
    over = threading.Event()
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=20", steps=STEPS) as run:

        def restart() -> None:
            while not over.wait(2.5):
                run.commander.again()

        thread = threading.Thread(target=restart)
        thread.start()
        try:
            pods = [run.pod("a"), run.pod("b")]
            run.wait_step(60)
            first = holder_of(run, pods)
            first.notice()
            assert first.process.wait(90) in (75, 76), run.said()
            last = [one for one in pods if one is not first] + [run.pod("c")]
            assert [one.process.wait(200) for one in last] == [0, 0], run.said()
        finally:
            over.set()
            thread.join()
        assert_finished(run, *last)


def test_five_pods_at_the_same_instant(tmp_path: Path) -> None:
    """One trains, four wait; each notice hands the run to exactly one of them."""
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=20", steps=ENDLESS) as run:
        pods = [run.pod(name) for name in "abcde"]
        for epoch in (1, 2, 3):
            run.wait_step(20 * epoch, epoch)
            first = holder_of(run, pods)
            first.notice()
            assert first.process.wait(60) == 75, run.said()
            pods.remove(first)
        run.wait_step(run.steps()[-1].step + 1, epoch=4)
        assert_nothing_lost(run)
        for pod in pods:
            pod.vanish()
        run.assert_one_history(run.steps()[-1].step)


def test_clocks_that_jump(tmp_path: Path) -> None:
    """By a second, an hour or a year, in all of a pod's processes: times on the volume are for people only."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPING_CLOCK)
    jumps = {"PYTHONPATH": str(tmp_path / "clock")}
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=20", steps=ENDLESS) as run:
        a = run.pod("a", **jumps)
        run.wait_step(33)
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        assert_nothing_lost(run)
        b = run.pod("b", **jumps)
        run.wait_saved(60)
        b.vanish()
        assert_goes_on(run, run.pod("c", **jumps))
