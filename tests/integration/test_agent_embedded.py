"""The embedded master: found, started, replaced, and never two of them. With the real master and with scripted ones."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from dalsegno.agent.control import embedded, inquiry
from dalsegno.agent.control.claim import Claim, ClaimFile
from dalsegno.agent.control.embedded import EmbeddedMaster, MasterError
from dalsegno.agent.control.machine import Machine
from dalsegno.agent.control.spawning import make_token
from dalsegno.agent.processes.proc import start_time
from dalsegno.protos import control_pb2, control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL
from dalsegno.protos.processes import Status
from tests.support.jobs.local_processes import is_same_process, process_state
from tests.support.jobs.master_process import settings

pytestmark = pytest.mark.timeout(120)

HOLDER = """
import sys, time
from pathlib import Path
from dalsegno.agent.control.embedded import EmbeddedMaster
master = EmbeddedMaster(Path(sys.argv[1]), "job", 2.0)
master.start()
print(master.addresses()[0], flush=True)
time.sleep(300)
"""
# In namespaces of its own: says what it finds, and looks for the master again at every line that it is sent.
CONTAINED = """
import sys
from pathlib import Path
from dalsegno.agent.control import embedded
embedded._LEAST_WATCH_SECONDS = 5.0
try:
    master = embedded.EmbeddedMaster(Path(sys.argv[1]), "job", 5.0)
    master.start()
except embedded.MasterError as error:
    print("refused:", error, flush=True)
    sys.exit(2)
print(master.addresses()[0], flush=True)
for line in sys.stdin:
    master._ensure()
    print(master.addresses()[0], flush=True)
"""


class Jobs:
    """Agents' views of one job, and the masters that they left behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.claims = ClaimFile(directory)
        self.said: list[str] = []
        self.views: list[EmbeddedMaster] = []

    def view(
        self, node_timeout: float = 2.0, command: tuple[str, ...] = embedded.COMMAND, patience: float = 60.0
    ) -> EmbeddedMaster:
        def say(text: str, warning: bool) -> None:
            self.said.append(text)

        one = EmbeddedMaster(self.directory, "job", node_timeout, say, command, patience)
        self.views.append(one)
        return one

    def claim(self) -> Claim:
        claim = self.claims.read()
        assert claim is not None
        return claim

    def close(self) -> None:
        for view in self.views:
            view.close()
        claim = self.claims.read()
        if claim is not None:
            Machine().kill(claim.pid, claim.start_time)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    one = Jobs(tmp_path / "job")
    yield one
    one.close()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_two_terminals_at_once_share_one_master(jobs: Jobs) -> None:
    """Racing starts end with one process, one address, one token that only its owner can read."""
    views = [jobs.view() for _ in range(4)]
    threads = [threading.Thread(target=view.start) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {view.addresses() for view in views} == {(jobs.claim().address,)}
    assert jobs.claim().generation == 1
    assert len({view.credentials().token for view in views}) == 1
    assert stat.S_IMODE((jobs.directory / "token").stat().st_mode) == 0o600


def test_a_copied_directory_has_a_master_of_its_own(jobs: Jobs, tmp_path: Path) -> None:
    """The claim was copied, too: its agents joined the world of the original, and saved there."""
    jobs.view().start()
    shutil.copytree(jobs.directory, tmp_path / "copy")
    copied = Jobs(tmp_path / "copy")
    try:
        copied.view().start()
        assert copied.claim().address != jobs.claim().address
        assert Machine().is_same_process(jobs.claim().pid, jobs.claim().start_time)
    finally:
        copied.close()


@pytest.mark.full
def test_the_counter_moves_and_somebody_takes_it_over(jobs: Jobs) -> None:
    """One agent renews; when it goes, another on the machine does."""
    first, second = jobs.view(), jobs.view()
    first.start()
    second.start()
    begin = jobs.claim().counter
    wait_for(lambda: jobs.claim().counter >= begin + 2)
    first.close()
    begin = jobs.claim().counter
    wait_for(lambda: jobs.claim().counter >= begin + 2)


@pytest.mark.full
def test_a_stopped_agent_does_not_keep_the_renewal(jobs: Jobs) -> None:
    """Ctrl-Z in the terminal of the one that moved the counter: to others the master looks as served as it is."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(jobs.directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        begin = jobs.claim().counter
        wait_for(lambda: jobs.claim().counter > begin)
        jobs.view().start()
        os.kill(holder.pid, signal.SIGSTOP)
        wait_for(lambda: process_state(holder.pid) == "T")
        begin = jobs.claim().counter
        wait_for(lambda: jobs.claim().counter >= begin + 2)
    finally:
        holder.kill()
        holder.wait()


def test_a_master_without_a_claim_is_ended(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim cannot be written: nobody would find it, and every attempt would leave one more."""
    started = []

    def refuse(claims: ClaimFile, claim: Claim, closing: threading.Event) -> None:
        started.append(claim)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(claims.path))

    monkeypatch.setattr(ClaimFile, "write", refuse)
    with pytest.raises(MasterError, match=r"no master can be started \(No space left on device\): .* needs room"):
        jobs.view().start()
    (claim,) = started
    wait_for(lambda: not is_same_process(claim.pid, claim.start_time))


def test_a_full_disk_is_said_once_each_time_that_it_is_full(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master is silent then, and people would look for another cause. Each error names another file."""
    plain, full = ClaimFile.bump, threading.Event()
    tries = 0

    def bump(claims: ClaimFile, before: Claim) -> Claim | None:
        nonlocal tries
        tries += 1
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{claims.path}.{tries}")
        return plain(claims, before)

    monkeypatch.setattr(ClaimFile, "bump", bump)
    monkeypatch.setattr(embedded, "_RENEWAL_SECONDS", 0.05)
    jobs.view().start()
    wait_for(lambda: tries > 2)
    for time_of_it in (1, 2):
        full.set()
        wait_for(lambda many=time_of_it: len(jobs.said) == many)
        before = tries
        wait_for(lambda least=before + 3: tries > least)
        full.clear()
        before = tries
        wait_for(lambda least=before + 3: tries > least)
    assert len(jobs.said) == 2
    assert all("(No space left on device): the master decides nothing until there is some" in one for one in jobs.said)


def test_a_master_whose_starter_is_gone_serves_nobody(jobs: Jobs) -> None:
    """It would supersede the next one, and be found by nobody: it ends before it takes a generation."""
    jobs.directory.mkdir(mode=0o700)
    make_token(jobs.directory)
    reads, writes = os.pipe()
    os.close(reads)
    words = [*embedded.COMMAND, "--host", "127.0.0.1", "--port", "0", "--job-id", "job", "--embedded"]
    words += ["--store", f"sqlite:///{jobs.directory / 'master.sqlite'}", "--token-file", str(jobs.directory / "token")]
    try:
        assert subprocess.run(words, stdout=writes, timeout=60, check=False).returncode == 0
    finally:
        os.close(writes)
    jobs.view().start()
    assert jobs.claim().generation == 1


def test_another_programs_server_is_not_the_master(jobs: Jobs) -> None:
    """The master has ended, and its port is that of somebody who speaks gRPC, and does not know our calls."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    os.kill(before.pid, signal.SIGKILL)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        jobs.claims.write(replace(before, address=f"127.0.0.1:{port}"), threading.Event())
        view.missing()
        wait_for(lambda: jobs.claim().generation == 2)
    finally:
        server.stop(None).wait(10)


def test_the_master_outlives_the_agent_that_started_it(jobs: Jobs) -> None:
    """SIGKILL of the starter's whole group: the master goes on, the next agent finds it."""
    starter = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(jobs.directory)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None
    address = starter.stdout.readline().strip()
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    view = jobs.view()
    view.start()
    assert view.addresses() == (address,)
    assert jobs.claim().generation == 1


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_master_is_replaced(jobs: Jobs, signum: signal.Signals) -> None:
    """Whoever misses it starts the next, with a higher generation; a stopped one is killed first."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    os.kill(before.pid, signum)
    view.missing()
    wait_for(lambda: jobs.claim().generation == 2)
    wait_for(lambda: view.addresses() == (jobs.claim().address,))
    assert not is_same_process(before.pid, before.start_time)
    assert view.abandoned_generation == 1


def test_a_false_alarm_changes_nothing(jobs: Jobs) -> None:
    """A master that answers is kept."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    view.missing()
    time.sleep(1.0)
    assert jobs.claim().pid == before.pid
    assert is_same_process(before.pid, before.start_time)


def test_a_job_that_another_machine_serves_is_refused(jobs: Jobs) -> None:
    """While the counter moves, the line says --master; the claim stays theirs."""
    jobs.directory.mkdir(parents=True)
    theirs = Claim("elsewhere", "boot", 1, 1, 5, 0, "127.0.0.1:1")
    stop = threading.Event()

    def renew() -> None:
        claim = theirs
        while not stop.wait(0.2):
            claim = replace(claim, counter=claim.counter + 1)
            jobs.claims.write(claim, stop)

    jobs.claims.write(theirs, stop)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(MasterError, match="--master"):
            jobs.view(node_timeout=5.0).start()
        assert jobs.claim().host == "elsewhere"
    finally:
        stop.set()
        thread.join()


def test_an_abandoned_claim_is_taken_over(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that stands still for one node-timeout: the job is ours, and its generation is known."""
    monkeypatch.setattr(embedded, "_LEAST_WATCH_SECONDS", 0.5)
    jobs.directory.mkdir(parents=True)
    jobs.claims.write(Claim("elsewhere", "boot", os.getpid(), 1, 5, 0, "127.0.0.1:1"), threading.Event())
    view = jobs.view(node_timeout=1.0)
    begin = time.monotonic()
    view.start()
    assert time.monotonic() - begin >= 1.0
    assert jobs.claim().host != "elsewhere"
    assert view.abandoned_generation == 5
    assert "elsewhere" in jobs.said[0]


def test_nobody_watches_a_claim_of_before_the_machine_was_started_anew(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is this one, the boot another: the master is gone, and the next one starts at once."""
    monkeypatch.setattr(embedded, "_LEAST_WATCH_SECONDS", 3600.0)
    here = replace(Machine().place(), machine="this machine")
    monkeypatch.setattr(Machine, "place", lambda self: here)
    jobs.directory.mkdir(parents=True)
    before = Claim(here.host, "before", os.getpid(), 1, 5, 0, "127.0.0.1:1", here.pid_ns, here.net_ns, here.machine)
    jobs.claims.write(before, threading.Event())
    view = jobs.view()
    view.start()
    assert (jobs.claim().boot_id, jobs.claim().machine) == (here.boot_id, "this machine")
    assert view.abandoned_generation == 5
    assert jobs.said == []


def test_a_short_node_timeout_does_not_take_a_served_job(jobs: Jobs) -> None:
    """The counter moves every two seconds: whoever watches for less would take over from a living master."""
    jobs.directory.mkdir(parents=True)
    theirs = Claim("elsewhere", "boot", 1, 1, 5, 0, "127.0.0.1:1")
    stop = threading.Event()
    jobs.claims.write(theirs, stop)
    move = threading.Timer(2.0, lambda: jobs.claims.write(replace(theirs, counter=1), stop))
    move.start()
    try:
        with pytest.raises(MasterError, match="--master"):
            jobs.view(node_timeout=1.0).start()
    finally:
        move.join()


def test_a_master_that_does_not_start_says_why(jobs: Jobs) -> None:
    """The last line of its log comes with the error, and no claim is left."""
    code = "import sys; sys.exit('dlrover-master: the store is broken')"
    with pytest.raises(MasterError, match="the store is broken"):
        jobs.view(command=(sys.executable, "-c", code)).start()
    assert jobs.claims.read() is None


def test_a_reused_process_number_is_not_killed(jobs: Jobs) -> None:
    """The claim names a process that is somebody else's by now: it lives on."""
    view = jobs.view()
    view.start()
    claim = jobs.claim()
    os.kill(claim.pid, signal.SIGKILL)
    view.close()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        jobs.claims.write(replace(claim, pid=stranger.pid), threading.Event())
        jobs.view().start()
        assert stranger.poll() is None
        assert jobs.claim().generation == 2
    finally:
        stranger.kill()
        stranger.wait()


# ---- containers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def contained(jobs: Jobs, *namespaces: str) -> Iterator[subprocess.Popen[str]]:
    """An agent's view from namespaces of its own: the host's name, kernel and files, other processes or network."""
    try:
        subprocess.run(["unshare", *namespaces, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespaces can be made here: {error}")
    command = ["unshare", *namespaces, sys.executable, "-c", CONTAINED, str(jobs.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


PROCESSES = ("--pid", "--fork", "--mount-proc", "--kill-child")
NETWORK = ("--net",)


def line_of(process: subprocess.Popen[str], word: str = "") -> str:
    """What it says next, after it was sent `word`."""
    assert process.stdin is not None
    assert process.stdout is not None
    if word:
        process.stdin.write(word + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("namespaces", [pytest.param(NETWORK, marks=pytest.mark.full), NETWORK + PROCESSES])
def test_a_container_with_a_network_of_its_own_starts_no_second_master(jobs: Jobs, namespaces: tuple[str, ...]) -> None:
    """It sees the claim move and cannot reach the master: one line, and the master lives on."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    with contained(jobs, *namespaces) as other:
        said = line_of(other)
        assert other.wait(30) == 2
    assert "another container of this machine" in said
    assert "--master HOST:PORT" in said
    assert jobs.claim().is_of(before)
    assert is_same_process(before.pid, before.start_time)


def test_a_container_with_the_same_network_shares_the_master(jobs: Jobs) -> None:
    """Containers of one pod: another process number space, the same loopback address. Nobody kills, nobody spawns."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    with contained(jobs, *PROCESSES) as other:
        assert line_of(other) == before.address
        for _ in range(3):
            assert line_of(other, "look") == before.address
            view._ensure()
        assert jobs.claim().is_of(before)
        assert is_same_process(before.pid, before.start_time)
        # Its own machine's agent sees the death at once; the other one waits for its successor.
        os.kill(before.pid, signal.SIGKILL)
        view.missing()
        address = line_of(other, "look")
        after = jobs.claim()
        assert (after.generation, after.address) == (before.generation + 1, address)
        assert after.pid_ns == before.pid_ns


@pytest.mark.full
def test_a_master_that_cannot_be_seen_is_taken_over_when_nobody_renews_it(jobs: Jobs) -> None:
    """All that could see it are gone, and it does not answer: its claim stands still."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    with contained(jobs, *PROCESSES) as other:
        assert line_of(other) == before.address
        view.close()
        os.kill(before.pid, signal.SIGKILL)
        assert line_of(other, "look") not in ("", before.address)
        after = jobs.claim()
        assert after.generation == before.generation + 1
        assert after.pid_ns != before.pid_ns
        assert after.net_ns == before.net_ns


@pytest.mark.full
def test_who_only_reaches_the_master_vouches_for_it_while_it_answers(jobs: Jobs) -> None:
    """Nobody is left that can see its process; to another machine the job is served all the same."""
    view = jobs.view()
    view.start()
    with contained(jobs, *PROCESSES) as other:
        assert line_of(other)
        view.close()
        begin = jobs.claim().counter
        wait_for(lambda: jobs.claim().counter >= begin + 2, 30)


# ---- a master that lives and does not answer ------------------------------------------------------------------------


def lock_store(jobs: Jobs) -> contextlib.closing[sqlite3.Connection]:
    """Another process would do the same: no write of the master's comes through until it is closed."""
    connection = sqlite3.connect(jobs.directory / "master.sqlite", isolation_level=None, timeout=30)
    connection.execute("BEGIN EXCLUSIVE")
    return contextlib.closing(connection)


SILENT = """
import json, socket, sys, time
port = socket.create_server(("127.0.0.1", 0))
print(json.dumps({"address": "127.0.0.1:%d" % port.getsockname()[1], "generation": 1}), flush=True)
time.sleep(300)
"""


def silent_master(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, patience: float) -> tuple[EmbeddedMaster, Claim]:
    """A process that took its port and says nothing; and the view that started it, whose patience is short."""
    monkeypatch.setattr(embedded, "_LEAST_WATCH_SECONDS", 0.1)
    monkeypatch.setattr(embedded, "_SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(inquiry, "ANSWER_TIMEOUT_SECONDS", 0.2)
    view = jobs.view(0.1, (sys.executable, "-c", SILENT), patience)
    view.start()
    return view, jobs.claim()


def test_a_living_master_that_is_silent_is_not_killed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, and the person hears so once, however long it takes."""
    view, before = silent_master(jobs, monkeypatch, 300.0)
    view.missing()
    wait_for(lambda: bool(jobs.said))
    time.sleep(3.0)
    assert is_same_process(before.pid, before.start_time)
    assert jobs.claim().is_of(before)
    assert len(jobs.said) == 1
    assert f"process {before.pid}) lives and does not answer" in jobs.said[0]


@pytest.mark.full
def test_who_comes_new_gives_a_silent_master_up_after_a_while(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to do; the master lives on. A running agent says it once, too, and stays."""
    view, before = silent_master(jobs, monkeypatch, 1.0)
    with pytest.raises(MasterError, match="kill -9"):
        jobs.view(0.1, patience=1.0).start()
    jobs.said.clear()
    assert is_same_process(before.pid, before.start_time)
    view.missing()
    wait_for(lambda: any("kill -9" in said for said in jobs.said))
    time.sleep(3.0)
    assert len(jobs.said) == len(set(jobs.said))
    os.kill(before.pid, signal.SIGKILL)
    view._command = embedded.COMMAND
    wait_for(lambda: not jobs.claim().is_of(before))


def test_a_master_under_a_debugger_is_not_killed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced processes stand still for as long as somebody looks at them."""
    view, before = silent_master(jobs, monkeypatch, 1.0)
    monkeypatch.setattr(Machine, "status", lambda self, pid: Status("t", before.start_time))
    with pytest.raises(MasterError, match="kill -9"):
        view._ensure()
    assert is_same_process(before.pid, before.start_time)


@pytest.mark.full
def test_a_master_with_a_slow_store_lives_on(jobs: Jobs) -> None:
    """It has something to write, and somebody holds the store's lock for much longer than anything waits."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    credentials = view.credentials()
    with credentials.channel(before.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        request = control_pb2.RegisterRequest(
            job_id="job",
            incarnation="i" * 16,
            protocol=CONTROL_PROTOCOL,
            host="h",
            nproc=1,
            settings=settings(),
            probe="p",
        )
        request.secret = b"s" * 16
        with lock_store(jobs):
            call = stub.Register.future(request, timeout=60, metadata=credentials.metadata)
            until = time.monotonic() + embedded._SILENCE_SECONDS + 5.0
            while time.monotonic() < until:
                view.missing()
                time.sleep(0.2)
            assert not call.done()
            assert is_same_process(before.pid, before.start_time)
        assert call.result().node
    view._ensure()
    assert jobs.claim().is_of(before)


def test_a_master_that_is_continued_in_time_lives_on(jobs: Jobs) -> None:
    """It was stopped when it was asked, and no longer when its successor's turn came."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    os.kill(before.pid, signal.SIGSTOP)
    wait_for(lambda: process_state(before.pid) == "T")
    with jobs.claims.starting(5.0, threading.Event()):
        view.missing()
        time.sleep(inquiry.ANSWER_TIMEOUT_SECONDS + 1.0)
        os.kill(before.pid, signal.SIGCONT)
    view._ensure()
    assert jobs.claim().is_of(before)
    assert is_same_process(before.pid, before.start_time)


def test_who_goes_while_another_starts_the_master_says_nothing_of_its_lock(jobs: Jobs) -> None:
    """Another agent may hold it for a second; it was told that some process had held it for more than 90."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    with jobs.claims.starting(5.0, threading.Event()):
        Machine().kill(before.pid, before.start_time)
        wait_for(lambda: not is_same_process(before.pid, before.start_time))
        view.missing()
        time.sleep(1.0)  # No event tells that it waits for the lock.
        began = time.monotonic()
        view.close()
        assert time.monotonic() - began < 5.0
    assert jobs.said == []


# ---- damage, and what others put there ------------------------------------------------------------------------------


def test_a_lost_token_is_made_anew_and_its_master_with_it(jobs: Jobs) -> None:
    """Nobody could ever speak to a master whose token is nowhere: its successor has another one, and all agents."""
    views = [jobs.view(), jobs.view()]
    for view in views:
        view.start()
    before = jobs.claim()
    (jobs.directory / "token").write_bytes(b"\xff\xfe")
    for view in views:
        view.missing()
    wait_for(
        lambda: all(view.addresses() == (jobs.claim().address,) for view in views) and jobs.claim().generation == 2
    )
    assert not is_same_process(before.pid, before.start_time)
    assert len({view.credentials().token for view in views}) == 1
    assert [text for text in jobs.said if "put aside as token.damaged-1" in text] == jobs.said


@pytest.mark.full
def test_who_lost_the_token_and_cannot_see_the_master_says_so(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing to show, and may not end a process that it does not see: not a word of slow disks."""
    monkeypatch.setattr(embedded, "_LEAST_WATCH_SECONDS", 5.0)
    monkeypatch.setattr(embedded, "_SILENCE_SECONDS", 0.3)
    jobs.view().start()
    before = jobs.claim()
    place = replace(Machine().place(), pid_ns="pid:[1]")
    monkeypatch.setattr(Machine, "place", lambda self: place)
    (jobs.directory / "token").write_bytes(b"")
    with pytest.raises(MasterError, match=r"lives and cannot be asked: .*token is damaged; .*kill -9"):
        jobs.view(patience=1.0).start()
    assert len(jobs.said) == 1
    assert "slow" not in jobs.said[0]
    assert jobs.claim().is_of(before)


@pytest.mark.parametrize("damage", [b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000, None])
def test_a_damaged_store_is_put_aside(jobs: Jobs, damage: bytes | None) -> None:
    """With the journal that would be played back into the next one; said in one line. None: half of it is left."""
    view = jobs.view()
    view.start()
    claim = jobs.claim()
    os.kill(claim.pid, signal.SIGKILL)
    view.close()
    store = jobs.directory / "master.sqlite"
    if damage is None:
        damage = store.read_bytes()[: store.stat().st_size // 2 + 100]
    store.write_bytes(damage)
    Path(f"{store}-journal").write_bytes(b"journal")
    again = jobs.view()
    again.start()
    assert again.abandoned_generation == 1
    assert (jobs.directory / "master.sqlite.damaged-1").read_bytes() == damage
    assert len(jobs.said) == 1
    assert "put aside as master.sqlite.damaged-1" in jobs.said[0]
    assert len(jobs.said[0].splitlines()) == 1


def test_a_claim_never_makes_us_kill_a_strangers_process(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number and start are right, it is stopped, and it is another user's: it lives on."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        os.kill(stranger.pid, signal.SIGSTOP)
        wait_for(lambda: process_state(stranger.pid) == "T")
        monkeypatch.setattr(Machine, "owner_of", lambda self, pid: os.geteuid() + 1)
        started = start_time(stranger.pid)
        assert started is not None
        view = jobs.view()
        jobs.directory.mkdir(mode=0o700)
        place = Machine().place()
        forged = Claim(
            place.host, place.boot_id, stranger.pid, started, 1, 0, "127.0.0.1:1", place.pid_ns, place.net_ns
        )
        jobs.claims.write(forged, threading.Event())
        view.start()
        assert stranger.poll() is None
        assert process_state(stranger.pid) == "T"
        assert jobs.claim().pid != stranger.pid
    finally:
        stranger.kill()
        stranger.wait()


def test_a_bug_does_not_end_the_search_for_the_master(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts masters goes on, and says once what failed."""
    view = jobs.view()
    view.start()
    failures = [RuntimeError("a bug"), RuntimeError("a bug")]
    plain = view._standing

    def failing(claim: Claim | None) -> object:
        if failures:
            raise failures.pop()
        return plain(claim)

    monkeypatch.setattr(view, "_standing", failing)
    os.kill(jobs.claim().pid, signal.SIGKILL)
    view.missing()
    wait_for(lambda: jobs.claim().generation == 2)
    assert [text for text in jobs.said if "a bug" in text] == jobs.said
    assert len(jobs.said) == 1


def test_without_locks_there_is_one_line(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store could not be kept there either."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(MasterError, match=r"has no file locks.*--master HOST:PORT"):
        jobs.view().start()
    assert jobs.claims.read() is None
