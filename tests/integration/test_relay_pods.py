"""One run carried on by one pod after another: real Commander, real agents, a trainer that knows nothing of us."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import Manifest
from tests.support.jobs.commander import ADMIN_TOKEN
from tests.support.jobs.pods import LEASE_SECONDS, Run, relayed

pytestmark = pytest.mark.timeout(280)


def test_the_next_pod_goes_on_where_the_one_before_was_told_to_go(tmp_path: Path) -> None:
    """Not a step is lost: the trainer saves when it is asked, and the waiting pod has the lease at once."""
    with relayed(tmp_path, "--end-when-asked", "--save-every=1000", steps=60) as run:
        a = run.pod("a")
        run.wait_step(5)
        trainer = run.steps()[-1].pid
        # However long the second pod takes to come, the first trainer is not at its end by then.
        os.kill(trainer, signal.SIGSTOP)
        b = run.pod("b")
        run.wait(lambda: "is a spare" in b.said, "b waits")
        os.kill(trainer, signal.SIGCONT)
        noticed = time.monotonic()
        a.notice()
        run.wait(lambda: run.state()["status"] == "PREEMPTED", "state.json", 1.0)
        assert a.process.wait(60) == 75, run.said()
        left = time.monotonic()
        run.wait(lambda: run.events("resume")[1:], "b resumes", 10.0)
        print(
            f"notice to the end: {left - noticed:.2f} s; from there to the next lease: {time.monotonic() - left:.2f} s"
        )
        assert b.process.wait(120) == 0, run.said()
        first, second = run.epochs().values()
        assert second[0].step == first[-1].step + 1
        run.assert_one_history(60)
        own = [event["event"] for event in run.events() if event["pod"].endswith(f"-{a.process.pid}")]
        # A trainer that has saved may be at its end before anybody has looked at what it saved.
        assert own.index("stops") < own.index("ckpt_saved") < own.index("released")
        own.remove("ckpt_saved")
        assert own == ["acquire", "resume", "started", "sigterm", "stops", "stopped", "released"]
        assert run.commander.run()["state"] == "COMPLETED"
        assert (run.state()["status"], run.state()["last_ok_step"]) == ("COMPLETED", 60)
        latest = (run.root / "ckpt" / "latest").resolve()
        assert Manifest.read(latest).step == 60
        assert (run.root / "ckpt" / "step_00000060").resolve() == latest


def test_a_pod_that_leaves_gives_its_lease_back(tmp_path: Path) -> None:
    """Also where nobody waits for it: whoever comes next has it at once, not when it would be over."""
    with relayed(tmp_path, "--end-when-asked", "--save-every=1000", "--pace=0.1", lease_seconds=60) as run:
        a = run.pod("a")
        run.wait_step(5)
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        left = time.monotonic()
        run.wait(lambda: run.commander.run()["state"] == "PREEMPTED" and not run.commander.run()["holder"], "it", 5.0)
        b = run.pod("b")
        run.wait(lambda: run.events("resume")[1:], "b resumes", 40.0)
        assert time.monotonic() - left < 40.0
        assert b.process.wait(120) == 0, run.said()
        run.assert_one_history(200)


@pytest.mark.full
@pytest.mark.parametrize("waiting", [True, False])
def test_the_next_pod_goes_on_when_the_one_before_has_vanished(tmp_path: Path, waiting: bool) -> None:
    """Lost is what was made since the last complete save; the lease is over first."""
    with relayed(tmp_path, "--pace=0.1", "--save-every=30") as run:
        a = run.pod("a")
        saved = run.wait_saved()
        if waiting:
            b = run.pod("b")
            run.wait(lambda: "is a spare" in b.said, "b waits")
            saved = run.wait_saved(saved)
        vanished = time.monotonic()
        a.vanish()
        if not waiting:
            b = run.pod("b")
        run.wait(lambda: run.events("resume")[1:], "b resumes")
        assert not waiting or time.monotonic() - vanished < 2 * LEASE_SECONDS + 5
        assert b.process.wait(120) == 0, run.said()
        first, second = run.epochs().values()
        assert saved <= second[0].step - 1 <= first[-1].step
        run.assert_one_history(200)


@pytest.mark.full
def test_a_pod_that_stood_still_beyond_its_lease_is_fenced(tmp_path: Path) -> None:
    """It wakes, is told so, and waits; what its trainer saves then is never the run's."""
    with relayed(tmp_path, "--pace=0.1") as run:
        a = run.pod("a")
        run.wait_saved()
        b = run.pod("b")
        run.wait(lambda: "is a spare" in b.said, "b waits")
        a.all(signal.SIGSTOP)
        run.wait_step(1, epoch=2)
        a.all(signal.SIGCONT)
        run.wait(lambda: "was declared dead" in a.said, "a is told")
        run.wait(lambda: run.events("fenced"), "the log")
        assert b.process.wait(120) == 0, run.said()
        assert a.process.wait(60) == 0, "the run is finished, as a hears"
        run.assert_one_history(200)
        kept = [event for event in run.events("ckpt_saved") if event["epoch"] == 1]
        assert all(event["time"] < run.events("resume")[1]["time"] for event in kept)
        assert run.state()["epoch"] == 2


@pytest.mark.full
def test_a_pod_that_was_released_ends(tmp_path: Path) -> None:
    """Also where nobody else waits: whoever released it wants another machine. The next start goes on."""
    with relayed(tmp_path, "--pace=0.1") as run:
        a = run.pod("a")
        saved = run.wait_saved()
        code, said = run.commander.ask("POST", "/api/relay/my-run/release", token=ADMIN_TOKEN)
        assert (code, said["status"]) == (200, "released")
        assert a.process.wait(60) == 76, run.said()
        assert "fenced for good (released by the admin)" in a.said
        assert run.state()["status"] == "PREEMPTED"
        assert len(run.epochs()) == 1
        b = run.pod("b")
        assert b.process.wait(120) == 0, run.said()
        assert run.epochs()[max(run.epochs())][0].step > saved
        run.assert_one_history(200)


@pytest.mark.full
def test_the_commander_is_lost_in_mid_run(tmp_path: Path) -> None:
    """For less than the lease nothing happens; beyond it the trainer stops after a save, and starts again from that."""
    with relayed(tmp_path, "--end-when-asked", "--save-every=1000", "--pace=0.1", steps=300) as run:
        pod = run.pod("a")
        run.wait_step(5)
        run.commander.process.send_signal(signal.SIGSTOP)
        run.wait(lambda: "cannot be reached" in pod.said, "the loss", 30.0)
        run.commander.process.send_signal(signal.SIGCONT)
        run.wait(lambda: "the master is back" in pod.said, "its return", 30.0)
        before = len(run.steps())
        run.wait(lambda: len(run.steps()) > before, "the same trainer")
        run.commander.process.send_signal(signal.SIGKILL)
        run.commander.process.wait(20)
        run.wait(lambda: "--self-fence" in pod.said, "the fence", 60.0)
        run.wait(lambda: run.events("stopped"), "the end of the trainer", 30.0)
        assert len(run.epochs()) == 1, "one trainer until here, whatever the first loss was"
        made = run.steps()[-1].step
        time.sleep(3.0)  # why: nothing may happen in it
        assert run.steps()[-1].step == made, "nobody trains"
        run.commander.again()
        assert pod.process.wait(150) == 0, run.said()
        *_, last = run.epochs().values()
        assert last[0].step == made + 1, "what was saved at the fence is the run's"
        run.assert_one_history(300)


@pytest.mark.full
@pytest.mark.parametrize("given_back", [False, True])
def test_a_commander_under_a_new_token(tmp_path: Path, given_back: bool) -> None:
    """The pod says so, trains on for its lease, and saves before it ends; with the old token it goes on."""
    steps = 300
    lease = 25.0 if given_back else LEASE_SECONDS
    trainer = ("--end-when-asked", "--save-every=1000", "--pace=0.1")
    with relayed(tmp_path, *trainer, steps=steps, lease_seconds=lease) as run:
        a = run.pod("a")
        run.wait_step(5)
        old = dict(run.commander.environment)
        run.commander.environment = {**old, "DALSEGNO_TOKEN": "another-token-0123456789"}
        run.commander.again()
        run.wait(lambda: "the master refuses this token: it was changed there; training goes on" in a.said, "the line")
        if given_back:
            run.commander.environment = old
            run.commander.again()
            run.wait(lambda: "the master takes this token again" in a.said, "the old one")
            assert a.process.wait(120) == 0, run.said()
            assert len(run.epochs()) == 1, "the same trainer"
        else:
            assert a.process.wait(90) == 2, run.said()
            assert a.said.count("refuses this token: it was changed there") == 1, a.said
            assert run.state()["status"] == "PREEMPTED"
            assert run.events("released")[-1]["code"] == 2
            b = run.pod("b", DALSEGNO_TOKEN="another-token-0123456789")
            assert b.process.wait(150) == 0, run.said()
            first, second = run.epochs().values()
            assert second[0].step == first[-1].step + 1, "what a saved when it was asked is the run's"
        run.assert_one_history(steps)


@pytest.mark.full
def test_a_commander_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    """Nothing is started, a line says so, and the run begins when it answers. SIGTERM ends the wait."""
    with relayed(tmp_path, steps=20) as run:
        run.commander.end(signal.SIGKILL)
        pod = run.pod("a")
        run.wait(lambda: "nothing is started; asking again in" in pod.said, "the wait")
        other = run.pod("b")
        run.wait(lambda: "nothing is started" in other.said, "the other's wait")
        other.notice()
        assert other.process.wait(20) == 75
        assert not run.events("acquire")
        run.commander.again()
        assert pod.process.wait(120) == 0, run.said()
        run.assert_one_history(20)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_notices_that_come_again_before_training(tmp_path: Path, number: signal.Signals) -> None:
    """Until the process has ended: it says once that it left, and its exit code says so, too."""
    with relayed(tmp_path) as run:
        run.commander.end()
        pod = run.pod("a")
        run.wait(lambda: "nothing is started" in pod.said, "a pod that waits")
        until = time.monotonic() + 60
        while pod.process.poll() is None and time.monotonic() < until:
            pod.process.send_signal(number)
            time.sleep(0.01)  # why: the moment is what is tried
        assert pod.process.wait(1) == 75, run.said()
        assert ("Traceback" in pod.said, pod.said.count("left before training")) == (False, 1), pod.said


def damage(run: Run, step: int) -> None:
    """A byte of the checkpoint of this step is another one."""
    (directory,) = run.root.glob(f"ckpt/.store/my-run/*/step-{step}.*")
    path = directory / "trainer_state.json"
    path.write_bytes(path.read_bytes().replace(b"global", b"glOb\xc3l"[:6]))


@pytest.mark.full
@pytest.mark.parametrize("every", [False, True])
def test_a_damaged_checkpoint_is_never_resumed_from(tmp_path: Path, every: bool) -> None:
    """The newest: the run goes back by one. All of them, and no milestone: it says so, and never begins silently."""
    with relayed(tmp_path, "--pace=0.1") as run:
        a = run.pod("a")
        saved = run.wait_saved(run.wait_saved() + 1)
        a.vanish()
        steps = sorted({event["step"] for event in run.events("ckpt_saved")})
        assert steps[-1] >= saved
        there = {int(path.name.split(".")[0][5:]) for path in run.root.glob("ckpt/.store/my-run/*/step-*")}
        for step in there if every else {max(there)}:
            damage(run, step)
        b = run.pod("b")
        run.wait(lambda: "is damaged" in b.said, "the damage")
        if not every:
            run.wait_step(1, epoch=2)
            resumed = next(made for epoch, made in run.epochs().items() if epoch > 1)[0].step - 1
            # What the lost pod had saved last, and nobody had taken yet, is newer than the damaged one.
            assert resumed in there - {max(there)} or resumed > max(there)
            assert b.process.wait(120) == 0, run.said()
            run.assert_one_history(200)
            return
        assert b.process.wait(60) == 1
        assert "no checkpoint on the volume is intact" in b.said
        assert [one for one in run.steps() if one.epoch > 1] == [], run.said()
        c = run.pod("c", "--allow-baseline")
        assert c.process.wait(120) == 0, run.said()
        assert run.epochs()[max(run.epochs())][0].step == 1, "as somebody said"


@pytest.mark.full
def test_the_lease_of_the_commander_counts(tmp_path: Path) -> None:
    """A pod whose file has a longer one says so, and stops its trainer when the Commander's is over."""
    with relayed(tmp_path, "--end-when-asked", "--save-every=1000", "--pace=0.1", steps=400) as run:
        file = json.loads(run.file.read_text())
        run.file.write_text(json.dumps({**file, "lease_seconds": 3600}))
        pod = run.pod("a")
        run.wait_step(5)
        assert f"the Commander's file says {LEASE_SECONDS:g}, this pod's 3600" in pod.said
        run.commander.end(signal.SIGKILL)
        run.wait(lambda: run.events("stopped"), "the end of the trainer", 60.0)
        assert pod.process.poll() is None, run.said()


BAD = [
    ({"run_id": "a/b"}, (), "'a/b' is no name for a directory"),
    ({"command": ["sleep", "1"]}, (), "no word of it has ${save_dir}"),
    ({"comand": []}, (), "did you mean command?"),
    ({"hf": {"repo": "me/it"}}, (), "no HF_TOKEN"),
    ({"command": ["not-there-at-all", "${save_dir}"]}, (), "not-there-at-all does not exist"),
    ({"l1_root": "/not/there"}, (), "/not/there is no directory: mount the volume there"),
    ({"baseline": {"hf": "me/it@main"}, "resume_flag": None}, (), "nothing would read it"),
    ({}, ("--notice=0",), "it must be more than 0 seconds"),
    ({}, ("--nproc-per-node=0",), "'0' is no number of ranks"),
]


@pytest.mark.parametrize(("change", "flags", "line"), BAD)
def test_bad_input_is_one_line_before_anything_starts(
    tmp_path: Path, change: dict[str, object], flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and nothing on the volume."""
    from dalsegno.agent.commands.dalsegno import run as dalsegno
    from tests.support.jobs.commander import run_file

    (tmp_path / "volume").mkdir()
    settings = {"command": ["sleep", "${save_dir}"], **change}
    run_id = str(settings.pop("run_id", "my-run"))
    path = run_file(tmp_path, "my-run", **settings)
    said = json.loads(path.read_text())
    said["run_id"] = run_id
    path.write_text(json.dumps(said))
    code = dalsegno(["relay", str(path), "--no-mount-check", *flags])
    error = capsys.readouterr().err
    assert (code, len(error.splitlines())) == (2, 1), error
    assert line in error
    assert not any((tmp_path / "volume").iterdir())


def test_a_folder_is_no_volume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lies on the machine's own disk goes with the machine, so that must be said."""
    from dalsegno.agent.commands.dalsegno import run as dalsegno
    from tests.support.jobs.commander import run_file

    (tmp_path / "volume").mkdir()
    assert dalsegno(["relay", str(run_file(tmp_path, command=["sleep", "${save_dir}"]))]) == 2
    assert "is no mount point" in capsys.readouterr().err
