"""Who gets a signal when, and what the list of them may hold."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import sys
import time

import pytest

from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.processes.signals import SignalWatch, signals_of
from dalsegno.protos.options import UsageError


def test_signals_go_to_whoever_has_them_now() -> None:
    """First to the way out, then to the agent, to nobody when that has ended, and after all to who had them before."""
    heard: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.put(("before", signal.SIGUSR1)))
    try:
        with SignalWatch((signal.SIGUSR1, signal.SIGUSR2), lambda number: heard.put(("first", number))) as watch:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard.get(timeout=10) == ("first", signal.SIGUSR1)
            with watch.to(lambda number: heard.put(("agent", number))):
                os.kill(os.getpid(), signal.SIGUSR2)
                assert heard.get(timeout=10) == ("agent", signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.get(timeout=10) == ("before", signal.SIGUSR1)
        assert heard.empty()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_default_is_torchs() -> None:
    """A terminal that is closed is a notice too."""
    names = parse(["x.py"], {}).signals_to_handle
    assert signals_of(names) == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.mark.parametrize("names", ["SIGTERM,SIGNONE", "", "SIGTERM,", "15", "SIGKILL", "SIG_IGN"])
def test_a_signal_that_cannot_be_handled_is_one_line(names: str) -> None:
    """Bad usage; torch would only log it."""
    with pytest.raises(UsageError, match="signals-to-handle"):
        parse([f"--signals-to-handle={names}", "x.py"], {})


STOPS = """
import os, signal, sys, threading, time
from dalsegno.agent.processes.signals import SignalWatch
ended = threading.Event()
def stopping(has_workers):
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGTSTP)
    time.sleep(0.2)  # the main thread takes it
def first(number):
    print(number, flush=True)
    ended.set()
with SignalWatch((signal.SIGTERM,), first, stopping=stopping if sys.argv[1] == "says" else None):
    print("ready", flush=True)
    ended.wait()
"""


@pytest.mark.parametrize("says", [True, False])
def test_ctrl_z_is_told_and_stops_once(says: bool) -> None:
    """The word comes before the stop, pressed twice it stops once, and what came meanwhile is heard behind it."""
    command = [sys.executable, "-c", STOPS, "says" if says else ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=os.setpgrp)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            os.kill(process.pid, signal.SIGTSTP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert not says or process.stdout.readline() == "stops\n"
            os.kill(process.pid, signal.SIGCONT)
            _, status = os.waitpid(process.pid, os.WCONTINUED)
            assert os.WIFCONTINUED(status)
        os.kill(process.pid, signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == f"{signal.SIGTERM:d}\n"
    finally:
        process.kill()
        process.communicate()


PRESSED = """
import sys, threading, time
from dalsegno.agent.processes import signals
asked = threading.Event()
def stopping(has_workers):
    print("stopping", flush=True)
    asked.set()
heard = lambda number: print(f"heard {number}", flush=True)
with signals.SignalWatch((signals.signal.SIGINT,), heard, stopping=stopping) as watch:
    with watch.undisturbed():
        print("ready", flush=True)
        asked.wait()
        time.sleep(1.0)  # why: more signals come while it is waited for
    sys.stdin.read()
"""


def test_what_is_pressed_while_ctrl_z_waits() -> None:
    """A second Ctrl-Z is the same one, and Ctrl-C is heard at once: both took effect behind `fg`."""
    command = [sys.executable, "-c", PRESSED]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=os.setpgrp, bufsize=0)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGTSTP)
        assert process.stdout.readline() == b"stopping\n"
        for number in (signal.SIGTSTP, signal.SIGINT):
            os.kill(process.pid, number)
            time.sleep(0.1)  # why: the kernel hands out several signals in the order of their numbers
        assert process.stdout.readline() == f"heard {signal.SIGINT:d}\n".encode()
        assert os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG) == (0, 0), "stopped already"
        os.waitpid(process.pid, os.WUNTRACED)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)  # why: it would stop once more
        assert os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG) == (0, 0)
    finally:
        process.kill()
        process.communicate()


BUSY = """
import sys, threading, time
from dalsegno.agent.processes import signals
signals._UNDISTURBED_SECONDS = float(sys.argv[1])
def stopping(has_workers):
    print("has workers" if has_workers else "has none", flush=True)
    asked.set()
asked, workers = threading.Event(), []
with signals.SignalWatch((), print, stopping=stopping) as watch, watch.to(print, lambda: bool(workers)):
    with watch.undisturbed():
        print("ready", flush=True)
        asked.wait()
        time.sleep(1.0)  # why: it is stopped then, if it is at all
        print("undisturbed", flush=True)
        workers.append(1)
    sys.stdin.read()
"""


@pytest.mark.parametrize("waits", [True, False])
def test_ctrl_z_waits_for_what_others_would_wait_for(waits: bool) -> None:
    """What holds a lock of the job's is done before it stops, if that takes no longer than a person waits."""
    command = [sys.executable, "-c", BUSY, "60" if waits else "0.1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=os.setpgrp, bufsize=0)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        said = []
        for _ in range(2):
            os.kill(process.pid, signal.SIGTSTP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            said += os.read(process.stdout.fileno(), 1 << 10).split(b"\n")[:-1]
            os.kill(process.pid, signal.SIGCONT)
            assert waits or len(said) > 1 or process.stdout.readline() == b"undisturbed\n"
        assert said == [b"has none", *([b"undisturbed"] if waits else []), b"has workers"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("behind", ["", "; true"], ids=["alone", "below a script"])
def test_where_nobody_can_continue_it_ctrl_z_does_nothing(behind: str) -> None:
    """As the kernel has it for a session's first processes: those of `ssh -t`, of `docker run`, of a window."""
    command = ["bash", "-c", shlex.join([sys.executable, "-c", STOPS, "says"]) + behind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGTSTP)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == f"{signal.SIGTERM:d}\n"
    finally:
        process.kill()
        process.communicate()


def test_below_a_script_of_a_shells_job_it_can_be_continued() -> None:
    """The script is in its group, and the script's parent, a shell, is not."""
    code = "from dalsegno.agent.processes.signals import can_be_continued; print(can_be_continued())"
    for grouped, answer in ((os.setpgrp, "True"), (os.setsid, "False")):
        line = ["bash", "-c", f"{shlex.join([sys.executable, '-c', code])}; true"]
        done = subprocess.run(line, preexec_fn=grouped, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout.strip() == answer
