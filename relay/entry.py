"""`dalsegno relay run.yaml`: what a pod runs. It checks, recovers, and hands the run to the agent until that ends.

The lease, the fence and what counts are the master's, and the agent keeps to them; nothing here decides about that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dalsegno.protos.commander_api import RunState
from dalsegno.protos.contract import EXIT_FAILED, EXIT_FINISHED, EXIT_LEFT, EXIT_LEFT_UNSAVED, EXIT_USAGE, Variable
from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import RunFile, read_run_file
from dalsegno.protos.shortage import CannotStartError
from dalsegno.protos.yaml_text import InputRefused

from .agent_process import AgentProcess, MirrorProcess
from .command_line import agent_command, check_command
from .logs import Logs
from .milestones.access import Access, secret
from .milestones.console import PodConsole
from .milestones.libraries import INSTALL_RELAY, lacking
from .preflight import Away, ask, master_of
from .recovering import Stuck, is_held, prepared
from .saves import SaveWatch
from .volume import Volume
from .waking import Waking

__all__ = ("carry_on",)

# Pauses between two questions to a Commander that does not answer.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 1.0, 15.0
# Pause between two questions whether the run is free.
_HOLDER_SECONDS = 2.0
# States as the Commander has them, by the agent's exit code.
_STATES = {
    EXIT_FINISHED: RunState.COMPLETED,
    EXIT_LEFT: RunState.PREEMPTED,
    EXIT_LEFT_UNSAVED: RunState.PREEMPTED,
    # Whoever knows what this pod lacked, such as the present token, carries the run on.
    EXIT_USAGE: RunState.PREEMPTED,
}


class _Left(BaseException):
    """A signal came before there was an agent."""


def carry_on(options: argparse.Namespace, ahead: AgentProcess) -> int:
    """Runs one pod to its end with an agent that waits to begin; returns the pod's exit code, which is the agent's.

    Raises:
        UsageError: bad input, in one line; nothing was started.
    """
    file = _read(options)
    access = Access.given(options, file.commander)
    tls = access.agent_flags(file.commander)
    console = PodConsole("dalsegno relay")
    volume = Volume(file.l1_root, file.run_id, console.say)
    if problem := volume.problem(must_be_mount=not options.no_mount_check):
        raise UsageError(problem)
    try:
        with _Pod(file, options, volume, access, tls, ahead, console) as pod:
            return pod.run()
    except _Left:  # it came at the edges of `run`
        return EXIT_LEFT


def _read(options: argparse.Namespace) -> RunFile:
    try:
        file = read_run_file(options.file)
    except InputRefused as refused:
        raise UsageError("; ".join(refused.lines)) from refused
    uses = "hf" if file.hf is not None else "baseline" if file.baseline is not None and file.baseline.hf else ""
    if uses and (why := lacking()):
        raise UsageError(f"{options.file}: {uses}: needs the extra relay ({why}): {INSTALL_RELAY}")
    if file.hf is not None and not secret("HF_TOKEN"):
        raise UsageError(f"{options.file}: hf: the environment has no HF_TOKEN that may write to {file.hf.repo}")
    if not 0 < options.notice < float("inf"):
        raise UsageError(f"--notice {options.notice:g}: it must be more than 0 seconds")
    check_command(file, str(options.file))
    return file


class _Pod:
    """One pod, from its pre-flight on. Use it as a context manager, on the main thread."""

    def __init__(
        self,
        file: RunFile,
        options: argparse.Namespace,
        volume: Volume,
        access: Access,
        tls: Sequence[str],
        ahead: AgentProcess,
        console: PodConsole,
    ) -> None:
        self._file, self._options, self._volume, self._console = file, options, volume, console
        self._say = console.say
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._epoch = self._step = 0
        self._run = self._path = ""
        self._agent: AgentProcess | None = None
        self._access, self._tls, self._ahead = access, tls, ahead
        self._logs: Logs | None = None
        self._mirror = MirrorProcess(options.file, volume, self._say, access.flags())
        self._saves = SaveWatch(file.interval_seconds, self._say)
        self._handled: list[int] = []
        self._waking = Waking()
        self._signalled, self._interrupted = 0, False
        # The agent is just being started; it has told something, so it handles signals by now.
        self._starting = self._told = False
        # How the run stands is written for good: a notice changes nothing any more.
        self._over = False

    def __enter__(self) -> _Pod:
        self._waking.__enter__()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # else it is `nohup`
                signal.signal(number, self._notice)
                self._handled.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._saves.end()
        self._mirror.end()
        self._ahead.close()
        if self._logs is not None:
            self._logs.close()
        self._console.close()
        # This process is about to end with an exit code that says how it went, and no signal may replace that.
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)
        self._waking.__exit__(None, None, None)

    def run(self) -> int:
        """Returns the exit code."""
        try:
            while True:
                shown = self._ask()
                self._file = self._with_its_lease(shown)
                allowed, older = self._options.allow_baseline, self._options.allow_older
                found = prepared(self._file, self._volume, shown, self._say, allowed=allowed, older=older)
                if found is None:
                    continue
                initial, back = found
                if back and is_held(shown):
                    # Its volume may be another one; nothing is taken from under it.
                    self._say(f"the run goes back to step {back.partition(':')[0]} once {shown['holder']} has lost it")
                    self._wait_until_free()
                    continue
                code = self._train(shown, initial, back)
                if code != EXIT_USAGE or not self._is_away():
                    return self._ended(code)
                self._agent = None  # it has ended: a notice is this process's own from here on
                if self._signalled:
                    raise _Left
                self._say("the agent found no Commander: asking again")
        except Stuck as stuck:
            self._say(f"error: {stuck}")
            return EXIT_FAILED
        except CannotStartError:
            raise
        except UsageError:
            if self._epoch:  # it has trained, and so it has something to say
                self._ended(EXIT_USAGE)
            raise
        except OSError as error:
            self._say(f"error: the volume {self._file.l1_root} fails: {error}: mount it again, and start this anew")
            return EXIT_FAILED
        except _Left:
            self._say(f"{signal.Signals(self._signalled).name}: left before training began")
            return EXIT_LEFT

    # ---- the Commander ----------------------------------------------------------------------------------------------

    def _ask(self) -> dict[str, Any]:
        """What the Commander knows of the run; waits until it answers, and says so.

        Raises:
            UsageError: it does not know the run, or not us.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return ask(self._file, self._access)
            except Away as away:
                self._say(f"{away}: nothing is started; asking again in {pause:.0f} s")
            # why: no event tells when a server far away answers again
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    def _wait_until_free(self) -> None:
        """Only asks the Commander: what is on the volume is verified again once nobody has the run."""
        while is_held(self._ask()):
            time.sleep(_HOLDER_SECONDS)  # why: a lease ends far away, without an event here

    def _with_its_lease(self, shown: dict[str, Any]) -> RunFile:
        """The run with the Commander's lease: a pod that counts a longer one would train on without the run."""
        lease = shown.get("lease_seconds")
        if not isinstance(lease, (int, float)) or lease == self._file.lease_seconds:
            return self._file
        own = self._file.lease_seconds
        self._say(f"lease_seconds: the Commander's file says {lease:g}, this pod's {own:g}: the Commander's counts")
        return self._file.model_copy(update={"lease_seconds": float(lease)})

    def _is_away(self) -> bool:
        try:
            ask(self._file, self._access)
        except Away:
            return True
        except UsageError:
            pass  # it answers that it does not want us, as the agent has said
        return False

    # ---- training ---------------------------------------------------------------------------------------------------

    def _train(self, shown: dict[str, Any], initial: Path | None, back: str) -> int:
        self._logs = self._logs or Logs(self._volume.logs, self._say)
        command = agent_command(
            self._file,
            self._volume,
            master_of(self._file, shown),
            self._options.notice,
            ranks=self._options.nproc_per_node,
            logs=self._logs.directory,
            tls=self._tls,
            initial=initial,
            back=back,
        )
        token = {Variable.TOKEN: self._access.token} if self._access.token else {}
        self._starting, self._told = True, False
        if not self._ahead.waits:  # it has begun before, or was killed
            self._ahead.close()
            self._ahead = AgentProcess()
        agent = self._ahead
        agent.begin(command, token)
        self._agent, self._starting = agent, False
        try:
            if self._signalled:  # while it was started
                agent.signal(signal.SIGTERM)
            for event in agent.events():
                self._told = True
                self._heard(event)
            code = agent.wait()
        finally:
            self._mirror.end()
        if self._signalled and code == 128 + signal.SIGTERM and not self._told:
            raise _Left  # it died of the signal, because it had no handler yet
        return code

    def _heard(self, event: dict[str, Any]) -> None:
        """Takes what the agent tells, for `events.log`, `state.json` and the pointers."""
        more = {"pod": self._name, "epoch": event.get("epoch", self._epoch)}
        match event.get("event"):
            case "starts":
                self._epoch, self._run, self._step = event["epoch"], event["run"], event["step"]
                more["epoch"] = self._epoch
                self._volume.note("acquire", **more)
                self._volume.note("resume", **more, checkpoint=event["resume"], step=event["step"])
                if event["resume"]:
                    self._path = str(self._volume.job / self._run / event["resume"])
                    # Whoever committed it may not have come to that.
                    self._volume.show(self._run, event["resume"], event["step"], self._epoch)
                if self._volume.restored():
                    with contextlib.suppress(OSError):  # it only makes the next start ask once more
                        self._volume.note_restored("")
                self._write(RunState.RUNNING)
                if self._file.hf is not None:
                    self._mirror.start()
            case "started":
                self._saves.begin()
                self._volume.note("started", **more, seconds=round(_age_seconds(), 3))
            case "committed" if event["epoch"] == self._epoch:
                self._saves.begin()
                self._step, self._path = event["step"], str(self._volume.job / self._run / event["name"])
                self._volume.note("ckpt_saved", **more, checkpoint=event["name"], step=event["step"])
                self._volume.show(self._run, event["name"], event["step"], self._epoch)
                self._write(RunState.RUNNING)
                if self._file.hf is not None and not self._signalled:
                    # It may have been killed, as where memory is short.
                    self._mirror.start()
            case "damaged":
                self._volume.note("damaged", **more, checkpoint=event["name"], why=event["why"])
            case "fenced":
                self._volume.note("fenced", **more)
                self._mirror.end()
            case "stops" | "stopped":
                self._saves.end()
                self._volume.note(event["event"], **more)

    def _write(self, state: RunState) -> None:
        while True:
            signalled = self._signalled
            self._volume.write_state(
                {
                    "run_id": self._file.run_id,
                    "status": RunState.PREEMPTED if signalled and state is RunState.RUNNING else state,
                    "epoch": self._epoch,
                    "last_ok_step": self._step,
                    "last_ckpt_path": self._path,
                    "last_hf_revision": self._volume.last_revision(),
                    "pod": self._name,
                    "written": round(time.time(), 3),
                }
            )
            if signalled == self._signalled:
                return  # else a notice came in between, and what it has written is replaced

    def _ended(self, code: int) -> int:
        self._over = True
        state = _STATES.get(code, RunState.FAILED)
        if self._epoch:
            self._write(state)
            self._volume.tidy()  # the last prune came behind the last commit
        self._volume.note("released", pod=self._name, epoch=self._epoch, status=state, code=code)
        return code

    # ---- signals ----------------------------------------------------------------------------------------------------

    def _notice(self, number: int, frame: FrameType | None) -> None:
        """Python calls it between two instructions of the main thread, which only waits."""
        if self._over:
            return
        first, self._signalled = not self._signalled, number
        again = number == signal.SIGINT and self._interrupted
        self._interrupted |= number == signal.SIGINT
        # First of all: a volume that stands still for a while would take that from the trainer's time to save.
        if self._agent is not None and (first or again):
            self._agent.signal(self._for_agent(number))
        self._mirror.ask_to_end()
        if first and self._epoch:
            self._write(RunState.RUNNING)  # as far as that is true now
            self._say(f"{signal.Signals(number).name}: this pod leaves")
        self._volume.note("sigterm", pod=self._name, epoch=self._epoch, signal=signal.Signals(number).name)
        if first and self._agent is None and not self._starting:
            raise _Left

    def _for_agent(self, number: int) -> int:
        """The signal by which the agent is told. Told again later it goes at once, as a second Ctrl-C wants.

        A container's init may tell all processes, and the entry point passes it on: so nothing else is passed on twice,
        and SIGTERM as SIGHUP, which never counts as the second.
        """
        if not self._told:
            return signal.SIGTERM  # of which it dies without a word, as long as it has no handler
        heard = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        return signal.SIGHUP if number == signal.SIGTERM and heard else number


def _age_seconds() -> float:
    """Seconds since this process began (proc_pid_stat(5): field 22, in ticks since the boot)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
