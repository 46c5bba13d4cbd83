"""The conversion of a checkpoint into its universal form, as a child process of the agent under the keeper."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.elastic.checkpoint import UNIVERSAL, CheckpointDamaged, CheckpointName, Manifest
from dalsegno.protos import control_pb2

from .events import ConversionUpdate
from .lifeline import Lifeline
from .processes import kill_group

__all__ = ["ConversionJob"]

# The converter's process (`python -m dalsegno.elastic.universal`); docs/contracts.md.
_STATES = {
    0: control_pb2.CONVERSION_STATE_READY,
    65: control_pb2.CONVERSION_STATE_SOURCE_BAD,
}
# Seconds between two progress events; the master only wants to know that it moves.
_PROGRESS_INTERVAL = 0.2

logger = logging.getLogger(__name__)


class ConversionJob:
    """At most one conversion at a time.

    Args:
        lifeline: the process hangs on it.
        log: where the converter's standard error goes.
        deliver: called on a thread of the job's with progress, and once with the end of each conversion that was not
            stopped. READY comes with the description of the sealed form.
        command: the converter.
    """

    def __init__(
        self,
        lifeline: Lifeline,
        log: Path,
        deliver: Callable[[ConversionUpdate], None],
        command: Sequence[str] = (sys.executable, "-m", "dalsegno.elastic.universal"),
    ) -> None:
        self._lifeline = lifeline
        self._log = log
        self._deliver = deliver
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lease = 0

    def start(self, run_dir: Path, conversion: control_pb2.Conversion) -> None:
        """Starts converting under a lease; a conversion of another lease is stopped first."""
        self.stop()
        source = conversion.source.ref
        target = run_dir / str(CheckpointName.parse(source.name).later(UNIVERSAL, conversion.lease))
        command = [*self._command, "--source", str(run_dir / source.name), "--target", str(target)]
        command += ["--digest", source.digest] if source.digest else []
        for name in conversion.earlier:
            command += ["--earlier", str(run_dir / name)]
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **self._lifeline.environment()},
            )
        self._lifeline.add_group(process.pid)
        with self._lock:
            self._process, self._lease = process, conversion.lease
        threading.Thread(
            target=self._follow, args=(process, conversion.lease, target), name="conversion", daemon=True
        ).start()

    def stop(self, lease: int | None = None) -> None:
        """Kills the conversion (of that lease) with everything it started; nothing is delivered for it any more."""
        with self._lock:
            process = self._process
            if process is None or lease not in (None, self._lease):
                return
            self._process = None
        kill_group(process.pid)
        process.wait()
        self._lifeline.drop_group(process.pid)

    def _follow(self, process: subprocess.Popen[str], lease: int, target: Path) -> None:
        assert process.stdout is not None
        done = total = 0
        message = ""
        told_at = 0.0
        with process.stdout:
            for line in process.stdout:
                try:
                    said = json.loads(line)
                    message = str(said.get("message", message))
                    done, total = int(said.get("files_done", done)), int(said.get("files_total", total))
                except (ValueError, AttributeError, TypeError):
                    logger.warning("the converter printed %r", line[:200])
                    continue
                if time.monotonic() - told_at >= _PROGRESS_INTERVAL and "state" not in said:
                    told_at = time.monotonic()
                    working = control_pb2.CONVERSION_STATE_WORKING
                    self._tell(process, ConversionUpdate(lease, working, done, total))
        # Pool workers that outlived the converter go with it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        kill_group(process.pid)
        code = process.wait()
        update = self._ended(lease, code, done, total, message, target)
        with self._lock:
            stopped = self._process is not process
            if not stopped:
                self._process = None
        self._lifeline.drop_group(process.pid)
        if not stopped:
            self._deliver(update)

    def _tell(self, process: subprocess.Popen[str], update: ConversionUpdate) -> None:
        with self._lock:
            current = self._process is process
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
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            message = f"the converter {how}"
        return ConversionUpdate(lease, state, done, total, message, checkpoint)
