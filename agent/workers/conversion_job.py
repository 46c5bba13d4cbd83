"""The conversion of a checkpoint into its universal form, as a child process of the agent under the keeper."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dalsegno.elastic.checkpoint import UNIVERSAL, CheckpointDamaged, CheckpointName, Manifest
from dalsegno.protos import control_pb2
from dalsegno.protos.own_program import command_of
from dalsegno.protos.shortage import starting
from dalsegno.protos.signal_names import how_ended
from dalsegno.protos.text import object_in

from ..decisions.events import ConversionUpdate
from ..processes.lifeline import Lifeline
from ..processes.proc import kill_group
from ..standby.nursery_client import StandbyProcess
from ..standby.worker_main import Assignment

__all__ = ["ConversionJob"]

# The converter's process; docs/contracts.md.
_STATES = {
    0: control_pb2.CONVERSION_STATE_READY,
    65: control_pb2.CONVERSION_STATE_SOURCE_BAD,
    69: control_pb2.CONVERSION_STATE_IMPOSSIBLE,
}
# Beside a training: a tenth of what a rank gets where both want the same core. Where nothing else is said to the kernel
# this is the priority of its reads and writes, too (ioprio_set(2)).
NICENESS = 10
# Seconds between two progress events. The master only wants to know that it moves, and events are kept while it is
# away.
_PROGRESS_INTERVAL_SECONDS = 1.0
# Seconds to wait for a converter after SIGKILL; one that waits for a missing file system may be stuck in the kernel.
_KILL_TIMEOUT_SECONDS = 5.0

_STUCK = "the converter (process %d) did not end within %.0f s of SIGKILL"

logger = logging.getLogger(__name__)


class _Converter:
    """A running converter, started cold or from the nursery."""

    def __init__(self, process: subprocess.Popen[str] | StandbyProcess, said: IO[str], silence: int | None) -> None:
        self._process = process
        self._silence = silence
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self.said = said

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kills it with everything in its group. Of one that is reaped the number may be another's by now."""
        if isinstance(self._process, StandbyProcess):
            self._process.signal_group(signal.SIGKILL)
        elif self._process.returncode is None:
            kill_group(self._process.pid)

    def wait(self) -> int:
        """Waits for its end, and returns its exit status; nothing of its group lives then. On any thread."""
        if not isinstance(self._process, StandbyProcess):
            # Pool workers that outlived the converter are killed, too; it is not reaped yet, so the group's number is
            # its own.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
                kill_group(self._process.pid)
        code = self._process.wait()
        self._gone.set()
        return code

    def is_gone_within(self, seconds: float) -> bool:
        """Whether it has ended by then, and another thread has waited for that."""
        return self._gone.wait(seconds)

    def end_unfollowed(self) -> None:
        """Kills it where no thread waits for it, and lets go of it; within seconds."""
        self.kill()
        try:
            self._process.wait(_KILL_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error(_STUCK, self.pid, _KILL_TIMEOUT_SECONDS)
        else:
            self.hang_up()
            self.said.close()

    def hang_up(self) -> None:
        """Waits for its end, then lets the reader of `said` come to an end, too."""
        self.wait()
        with self._lock:
            silence, self._silence = self._silence, None
        if silence is not None:
            os.close(silence)

    def give_up(self) -> None:
        """Ends it, whatever has become of it and of the thread that waits for it."""
        try:
            self.kill()
            self.hang_up()
            self.said.close()
        except Exception:  # whatever it is: the master waits for an end
            logger.exception("the converter %d may live on", self.pid)


class ConversionJob:
    """At most one conversion at a time.

    Args:
        lifeline: the process is registered with it.
        log: where the converter's standard error goes.
        deliver: called on a thread of the job's with progress, and once with the end of each conversion that was not
            stopped. READY comes with the description of the sealed form.
        module: the converter, run with `python -m`.
    """

    def __init__(
        self,
        lifeline: Lifeline,
        log: Path,
        deliver: Callable[[ConversionUpdate], None],
        module: str = "dalsegno.elastic.universal",
    ) -> None:
        self._lifeline = lifeline
        self._log = log
        self._deliver = deliver
        self._module = module
        # Starts a worker that already has torch in memory, if there is a nursery: that saves seconds on a busy machine.
        self.nursery: Callable[[Assignment], StandbyProcess | None] | None = None
        self._lock = threading.Lock()
        self._converter: _Converter | None = None
        self._lease = 0

    def start(self, run_dir: Path, conversion: control_pb2.Conversion) -> None:
        """Starts converting under a lease; a conversion of another lease is stopped first.

        Raises:
            OSError: no process can be started.
        """
        self.stop()
        source = conversion.source.ref
        target = run_dir / str(CheckpointName.parse(source.name).later(UNIVERSAL, conversion.lease))
        arguments = ["--source", str(run_dir / source.name), "--target", str(target)]
        arguments += ["--digest", source.digest] if source.digest else []
        arguments += ["--nice", str(NICENESS)] if conversion.beside else []
        for name in conversion.earlier:
            arguments += ["--earlier", str(run_dir / name)]
        converter = self._adopt(arguments) or self._start_cold(arguments)
        with self._lock:
            self._converter, self._lease = converter, conversion.lease
        follower = threading.Thread(
            target=self._follow, args=(converter, conversion.lease, target), name="conversion", daemon=True
        )
        try:
            with starting("the thread that follows the converter"):
                follower.start()
        except OSError:
            with self._lock:
                self._converter = None
            converter.end_unfollowed()
            raise

    def stop(self, lease: int | None = None) -> None:
        """Kills the conversion (of that lease) with everything it started; nothing more is delivered for it.

        Waits for its end for some seconds at most: the thread that follows it does so for as long as it takes.
        """
        with self._lock:
            converter = self._converter
            if converter is None or lease not in (None, self._lease):
                return
            self._converter = None
        converter.kill()
        if not converter.is_gone_within(_KILL_TIMEOUT_SECONDS):
            logger.error(_STUCK, converter.pid, _KILL_TIMEOUT_SECONDS)

    def _adopt(self, arguments: list[str]) -> _Converter | None:
        if self.nursery is None:
            return None
        cwd = os.getcwd()  # first, because it may be gone
        reader, writer = os.pipe()
        assignment = Assignment(
            arguments=[self._module, *arguments],
            module=True,
            environment={**os.environ, **self._lifeline.environment()},
            cwd=cwd,
            # It opens our end of the pipe anew. We keep ours until it has ended, so that the reader does not come to an
            # end before the converter has begun.
            stdout=f"/proc/{os.getpid()}/fd/{writer}",
            stderr=str(self._log),
            helper=True,
        )
        process = self.nursery(assignment)
        if process is None:
            os.close(reader)
            os.close(writer)
            return None
        return _Converter(process, open(reader, encoding="utf-8"), writer)

    def _start_cold(self, arguments: list[str]) -> _Converter:
        with open(self._log, "ab") as log, starting("the converter"):
            process = subprocess.Popen(
                [*command_of(self._module), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **self._lifeline.environment()},
            )
        assert process.stdout is not None
        self._lifeline.add_group(process.pid)
        return _Converter(process, process.stdout, None)

    def _follow(self, converter: _Converter, lease: int, target: Path) -> None:
        try:
            update = self._followed(converter, lease, target)
        except Exception as error:  # whatever it is: the master waits for an end
            logger.exception("the conversion into %s is given up", target.name)
            converter.give_up()
            failed, why = control_pb2.CONVERSION_STATE_ENVIRONMENT, f"the converter cannot be followed: {error!r}"
            update = ConversionUpdate(lease, failed, message=why)
        self._lifeline.drop_group(converter.pid)
        with self._lock:
            stopped = self._converter is not converter
            if not stopped:
                self._converter = None
        if not stopped:
            self._deliver(update)

    def _followed(self, converter: _Converter, lease: int, target: Path) -> ConversionUpdate:
        done = total = moved = 0
        message = ""
        told_at = 0.0
        end = threading.Thread(target=converter.hang_up, name="conversion-end", daemon=True)
        end.start()
        with converter.said:
            for line in converter.said:
                try:
                    said = object_in(line) or {}
                    message = str(said.get("message", message))
                    done, total = int(said.get("files_done", done)), int(said.get("files_total", total))
                    moved = int(said.get("bytes_done", moved))
                except (ValueError, TypeError):
                    said = {}
                if not said:
                    logger.warning("the converter printed %r", line[:200])
                    continue
                if time.monotonic() - told_at >= _PROGRESS_INTERVAL_SECONDS and "state" not in said:
                    told_at = time.monotonic()
                    working = control_pb2.CONVERSION_STATE_WORKING
                    self._tell(converter, ConversionUpdate(lease, working, done, total, bytes_done=moved))
        end.join()
        return self._ended(lease, converter.wait(), done, total, message, target)

    def _tell(self, converter: _Converter, update: ConversionUpdate) -> None:
        with self._lock:
            current = self._converter is converter
        if current:
            self._deliver(update)

    @staticmethod
    def _ended(lease: int, code: int, done: int, total: int, message: str, target: Path) -> ConversionUpdate:
        state = _STATES.get(code, control_pb2.CONVERSION_STATE_ENVIRONMENT)
        checkpoint = None
        if state == control_pb2.CONVERSION_STATE_READY:
            try:
                checkpoint = Manifest.read(target).to_proto()
            except (CheckpointDamaged, OSError) as error:
                state, message = control_pb2.CONVERSION_STATE_ENVIRONMENT, f"{target.name} cannot be read: {error}"
        elif not message:
            message = f"the converter {how_ended(code)}"
        return ConversionUpdate(lease, state, done, total, message, checkpoint)
