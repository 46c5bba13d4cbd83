"""A converter that SIGKILL does not end."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from dalsegno.agent.standby.nursery_client import StandbyProcess
from dalsegno.agent.workers import conversion_job
from dalsegno.agent.workers.conversion_job import ConversionJob
from dalsegno.protos import control_pb2


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConversionJob:
    """One whose converter belongs to a nursery that is stopped: nobody says that it has ended."""
    monkeypatch.setattr(conversion_job, "_KILL_TIMEOUT_SECONDS", 0.1, raising=False)
    made = ConversionJob(MagicMock(), tmp_path / "log", MagicMock())
    made.nursery = lambda assignment: StandbyProcess(lambda: True)
    return made


def within_bounds(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_the_agent_does_not_wait_for_it(job: ConversionJob, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that decides stops a conversion."""
    job._converter, job._lease = conversion_job._Converter(StandbyProcess(lambda: True), io.StringIO(), None), 4
    within_bounds(lambda: job.stop(4))
    assert job._converter is None
    assert "did not end within" in caplog.text


def test_not_where_no_thread_can_follow_it(job: ConversionJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused as one that cannot be started."""

    class NoThread(threading.Thread):
        def start(self) -> None:
            if self.name == "conversion":
                raise RuntimeError("can't start new thread")
            super().start()

    conversion = control_pb2.Conversion(lease=4)
    conversion.source.ref.name = "step-5.e2.1"
    refused: list[OSError] = []

    def start() -> None:
        try:
            job.start(tmp_path, conversion)
        except OSError as error:
            refused.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoThread)
        within_bounds(start)
    assert refused
    assert job._converter is None
