"""The entry of a pod: signals at awkward moments, and what it writes of them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import read_run_file
from dalsegno.relay import entry
from dalsegno.relay.command import pod_parser
from dalsegno.relay.milestones import libraries
from dalsegno.relay.milestones.access import Access
from dalsegno.relay.milestones.console import PodConsole
from dalsegno.relay.volume import Volume
from tests.support.jobs.commander import run_file
from tests.support.pages.sources import ROOT

STARTS = {"event": "starts", "epoch": 1, "run": "run-0001", "resume": None, "step": 0}


def interrupt(number: int = signal.SIGTERM) -> None:
    """Now, on the main thread."""
    os.kill(os.getpid(), number)


class Agent:
    """An agent that does what the test says."""

    told: tuple[dict[str, Any], ...] = ()
    code = 0
    on_start: Callable[[], None] = staticmethod(lambda: None)
    on_wait: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.waits = True

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.waits = False
        self.on_start()

    def events(self) -> Iterator[dict[str, Any]]:
        yield from self.told

    def wait(self) -> int:
        self.on_wait()
        return self.code

    def signal(self, number: int) -> None:
        self.signals.append(number)
        # Of a signal that it does not handle it dies.
        type(self).code = self.code if self.told else 128 + number

    def close(self) -> None:
        pass


@pytest.fixture
def nohup() -> Iterator[None]:
    """As `nohup dalsegno relay` begins."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def handlers() -> Iterator[None]:
    """A pod's process ends behind it; this one goes on, and handles signals as before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None) -> Iterator[Any]:
    """A pod whose Commander always answers, and whose agent is `Agent`."""
    (tmp_path / "volume").mkdir()
    path = run_file(tmp_path, command=["sleep", "${save_dir}"])
    file = read_run_file(path)
    volume = Volume(file.l1_root, file.run_id)
    assert volume.problem(must_be_mount=False) == ""
    kind = type("Kind", (Agent,), {})
    monkeypatch.setattr(entry, "AgentProcess", kind)
    monkeypatch.setattr(entry, "ask", lambda file, access: {"grpc_port": 1})
    options = pod_parser().parse_args([str(path), "--no-mount-check"])
    with entry._Pod(file, options, volume, Access("a-token-of-some-length"), (), kind(), PodConsole("pod")) as one:
        one.agent = kind
        one.volume = volume
        yield one


def test_an_agent_that_does_not_handle_signals_yet_has_left(pod: Any) -> None:
    """It dies of the notice while it imports; nothing was trained, so that is no failure."""
    pod.agent.on_wait = staticmethod(interrupt)
    assert pod.run() == 75
    assert not pod.volume.state.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_it_dies_without_a_traceback(pod: Any, number: int) -> None:
    """Whatever came here: SIGINT would be Python's KeyboardInterrupt there."""
    pod.agent.on_wait = staticmethod(lambda: interrupt(number))
    assert pod.run() == 75
    assert pod._agent.signals == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        # As where all processes of a container are told, and the entry point passes it on, too.
        ((signal.SIGTERM, signal.SIGTERM, signal.SIGHUP), [signal.SIGHUP]),
        # A terminal's shell passes it on as another one.
        ((signal.SIGINT, signal.SIGTERM), [signal.SIGINT]),
        ((signal.SIGTERM, signal.SIGINT), [signal.SIGHUP]),
        # Somebody does not want to wait.
        ((signal.SIGINT, signal.SIGINT), [signal.SIGINT, signal.SIGINT]),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), [signal.SIGHUP, signal.SIGINT]),
    ],
)
def test_only_a_second_ctrl_c_is_a_second_notice(pod: Any, sent: tuple[int, ...], passed_on: list[int]) -> None:
    """An agent that is told twice goes at once, without a save; that it was told itself, too, must not count either."""

    def notices() -> None:
        for number in sent:
            interrupt(number)

    pod.agent.told, pod.agent.on_wait = (STARTS,), staticmethod(notices)
    pod.run()
    assert pod._agent.signals == passed_on


def test_a_volume_that_stands_still_takes_nothing_of_the_notice(pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written there may take as long as the trainer has: it is asked to save before that."""
    told: list[list[int]] = []
    monkeypatch.setattr(pod.volume, "write_state", lambda state: told.append([*pod._agent.signals]))
    monkeypatch.setattr(pod.volume, "note", lambda event, **more: told.append([*pod._agent.signals]))

    def notice() -> None:
        told.clear()
        interrupt()
        assert told == [[signal.SIGHUP]] * 2

    pod.agent.told, pod.agent.on_wait = (STARTS,), staticmethod(notice)
    assert pod.run() == 0


def test_a_notice_that_the_kernel_gives_to_another_thread(pod: Any) -> None:
    """As of two signals at once: the main thread, which waits for the agent, hears of it all the same."""
    reader, writer = os.pipe()
    late = threading.Timer(10.0, lambda: os.write(writer, b"late"))
    other = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
    read: list[bytes] = []

    def wait() -> None:
        late.start()
        other.start()
        read.append(os.read(reader, 4))

    pod.agent.told, pod.agent.on_wait = (STARTS,), staticmethod(wait)
    pod.agent.signal = lambda self, number: os.write(writer, b"told")
    pod.run()
    late.cancel()
    assert read == [b"told"]


@pytest.mark.usefixtures("nohup")
def test_nohup_keeps_its_meaning(pod: Any) -> None:
    """A terminal that is closed tells nobody then; the agent has inherited that, and is told by SIGTERM."""

    def notices() -> None:
        interrupt(signal.SIGHUP)
        assert pod._agent.signals == []
        interrupt(signal.SIGTERM)

    pod.agent.told, pod.agent.on_wait = (STARTS,), staticmethod(notices)
    pod.run()
    assert pod._agent.signals == [signal.SIGTERM]


def test_a_signal_while_the_agent_is_started_reaches_it(pod: Any) -> None:
    """The process may be there before we know of it: it is never left alone."""
    pod.agent.on_start = staticmethod(interrupt)
    assert pod.run() == 75
    assert pod._agent is not None
    assert pod._agent.signals == [signal.SIGTERM]


@pytest.mark.parametrize("when", [2, 3])
def test_a_notice_while_the_commander_is_asked_again(pod: Any, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """The agent that found none has ended, so the notice is the pod's own, and ends it."""
    asked: list[int] = []

    def ask(*_: object) -> dict[str, Any]:
        asked.append(1)
        assert len(asked) < 5, "the notice ends it"
        if len(asked) == when:
            interrupt()
        if len(asked) > 1:
            raise entry.Away("no answer")
        return {"grpc_port": 1}

    monkeypatch.setattr(entry, "ask", ask)
    pod.agent.code = 2
    assert pod.run() == 75


def test_a_second_notice_changes_nothing_where_nothing_is_trained(pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the first one is handled, not while all is closed, and not behind that, until the process has ended."""

    def ask(*_: object) -> None:
        interrupt()
        pytest.fail("the notice ends it")

    said: list[str] = []

    def say(text: str) -> None:
        interrupt(signal.SIGINT)
        said.append(text)

    monkeypatch.setattr(entry, "ask", ask)
    pod._say = say
    assert pod.run() == 75
    assert "left before training began" in said[-1]
    monkeypatch.setattr(pod._console, "close", interrupt)
    pod.__exit__(None, None, None)
    assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)} == {signal.SIG_IGN}
    pod._waking = contextlib.nullcontext()  # it is closed, and the fixture closes it again


def test_a_notice_while_all_is_closed_changes_nothing(pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code says why it ended."""

    def ask(*_: object) -> None:
        raise entry.Stuck("no checkpoint")

    monkeypatch.setattr(entry, "ask", ask)
    monkeypatch.setattr(pod._console, "close", interrupt)
    assert pod.run() == 1
    pod.__exit__(None, None, None)
    pod._waking = contextlib.nullcontext()


def test_a_notice_at_the_edges_of_a_pod_is_no_traceback(pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where what keeps the pod from beginning is just being said."""

    def ask(*_: object) -> None:
        raise entry.Stuck("no checkpoint")

    def say(text: str) -> None:
        interrupt()

    monkeypatch.setattr(entry, "ask", ask)
    monkeypatch.setattr(pod, "_say", say)
    monkeypatch.setattr(entry, "_Pod", lambda *_: contextlib.nullcontext(pod))
    assert entry.carry_on(pod._options, pod._ahead) == 75


def test_a_notice_behind_the_end_leaves_the_end_as_it_is(pod: Any) -> None:
    """A finished run's state.json says COMPLETED, also where the machine is taken away at that moment."""
    note = pod.volume.note

    def noted(event: str, **more: Any) -> None:
        note(event, **more)
        if event == "released":
            interrupt()

    pod.volume.note = noted
    pod.agent.told = (STARTS,)
    assert pod.run() == 0
    assert json.loads(pod.volume.state.read_text())["status"] == "COMPLETED"
    assert json.loads(pod.volume.events.read_text().splitlines()[-1])["event"] == "released"


def test_a_commit_after_the_notice_does_not_say_that_it_runs(pod: Any) -> None:
    """state.json stays PREEMPTED from the notice on, also where a write was just under way."""
    states = []
    write = pod.volume.write_state

    def seen(state: dict[str, Any]) -> None:
        if not states:
            states.append("the notice comes between the first line of this and its end")
            interrupt()
        write(state)
        states.append(json.loads(pod.volume.state.read_bytes())["status"])

    pod.volume.write_state = seen
    pod.agent.told = (STARTS, {"event": "committed", "epoch": 1, "name": "step-5.e1.1", "step": 5})
    pod.agent.code = 75
    assert pod.run() == 75
    assert states[-3:] == ["PREEMPTED"] * 3


def test_what_the_run_resumes_from_is_pointed_to(pod: Any) -> None:
    """Whoever committed it may have died before it had."""
    (pod.volume.job / "run-0001" / "step-7.e1.1").mkdir(parents=True)
    pod.agent.told = ({**STARTS, "epoch": 2, "resume": "step-7.e1.1", "step": 7},)
    assert pod.run() == 0
    assert (pod.volume.ckpt / "latest").resolve().name == "step-7.e1.1"
    assert (pod.volume.ckpt / "step_00000007").exists()


def test_a_volume_that_fails_is_one_line(
    pod: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It went away between the first look and the recovery."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(entry, "prepared", fails)
    assert pod.run() == 1
    pod._console.close()
    error = capfd.readouterr().err
    assert (len(error.splitlines()), "the volume" in error, "not connected" in error) == (1, True, True)


def test_a_machine_that_takes_no_logs_is_not_the_volume(pod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container whose root cannot be written, and that has no other place: one line says what is missing."""

    def fails(*_: object, **__: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", fails)
    with pytest.raises(entry.UsageError, match=r"logs.*No usable temporary directory.*TMPDIR"):
        pod.run()
    assert not pod.volume.state.exists()


def test_a_pod_whose_agent_is_refused_in_mid_run_says_that_it_is_gone(pod: Any) -> None:
    """The token was changed, for instance: somebody who has the present one carries the run on."""
    pod.agent.told, pod.agent.code = (STARTS,), 2
    assert pod.run() == 2
    assert json.loads(pod.volume.state.read_text())["status"] == "PREEMPTED"


def test_a_pod_that_the_commander_lets_in_no_more_says_that_it_is_gone(
    pod: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away when the agent ended, and answers under another token."""
    answers: list[Any] = [{"grpc_port": 1}, entry.Away("no answer"), entry.UsageError("401: check the token")]

    def ask(file: object, access: object) -> Any:
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers.pop(0)

    monkeypatch.setattr(entry, "ask", ask)
    pod.agent.told, pod.agent.code = (STARTS,), 2
    with pytest.raises(entry.UsageError):
        pod.run()
    assert json.loads(pod.volume.state.read_text())["status"] == "PREEMPTED"


def test_what_state_json_says_of_each_part_of_a_run(pod: Any) -> None:
    """At the start, after a save, on a notice, when it was fenced, and at the end."""
    states: list[dict[str, Any]] = []

    def told() -> Iterator[dict[str, Any]]:
        for event in (
            {**STARTS, "resume": "step-2.e1.1", "step": 2, "epoch": 3},
            {"event": "committed", "epoch": 3, "name": "step-5.e3.1", "step": 5},
            {"event": "committed", "epoch": 2, "name": "step-4.e2.1", "step": 4},
            {"event": "fenced"},
        ):
            yield event
            states.append({})
            states[-1].update(json.loads(pod.volume.state.read_text()))
        interrupt()
        states.append(json.loads(pod.volume.state.read_text()))

    pod.volume.note("restored", checkpoint="step-2.e1.1", step=2, revision="abc")
    pod.agent.events, pod.agent.told = (lambda self: told()), (STARTS,)
    assert pod.run() == 0
    states.append(json.loads(pod.volume.state.read_text()))
    assert [(one["status"], one["last_ok_step"], one["epoch"]) for one in states] == [
        ("RUNNING", 2, 3),
        *[("RUNNING", 5, 3)] * 3,
        ("PREEMPTED", 5, 3),
        ("COMPLETED", 5, 3),
    ]
    assert {one["last_hf_revision"] for one in states} == {"abc"}
    assert states[0]["last_ckpt_path"].endswith("run-0001/step-2.e1.1")
    assert states[-1]["last_ckpt_path"].endswith("run-0001/step-5.e3.1")
    assert {one["run_id"] for one in states} == {"my-run"}


HUB = {"hf": {"repo": "me/my-run"}}


@pytest.mark.parametrize(
    ("more", "name", "installed", "line"),
    [
        (HUB, "hf", "0.36.0", "huggingface_hub 0.36.0 is older than 1.0"),
        (HUB, "hf", None, "no huggingface_hub"),
        ({"baseline": {"hf": "me/base@main"}, "resume_flag": "--from"}, "baseline", "0.36.0", "0.36.0 is older"),
    ],
)
def test_a_pod_that_cannot_speak_to_the_hub_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], name: str, installed: str | None, line: str
) -> None:
    """Its image was made without the extra: it would train without a milestone, or wait for a hub that answers."""
    fake = tmp_path / "site"
    if installed is None:
        known = importlib.metadata.version
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: known("no-such" if "hub" in name else name))
    else:
        (fake / f"huggingface_hub-{installed}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: huggingface_hub\nVersion: {installed}\n"
        (fake / f"huggingface_hub-{installed}.dist-info" / "METADATA").write_text(metadata)
        monkeypatch.syspath_prepend(fake)
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    path = run_file(tmp_path, command=["sleep", "${save_dir}"], **more)
    with pytest.raises(UsageError) as caught:
        entry._read(pod_parser().parse_args([str(path)]))
    assert f"{path}: {name}: needs the extra relay" in str(caught.value)
    assert line in str(caught.value)
    assert str(caught.value).endswith("pip install 'dalsegno[relay]'")


def test_what_speaks_to_the_hub_is_known_as_the_extra_says() -> None:
    """A release that is too old for it is refused."""
    extra = (ROOT / "setup.cfg").read_text().partition("\nrelay =\n")[2].partition("\nlog =")[0].split()
    for name, (release, part) in libraries._LEAST.items():
        assert f"{name}>={release}.{part}" in extra
