"""A machine that allows no more processes and threads: each part says in one line what could not be started."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.jobs import local_processes as processes

pytestmark = pytest.mark.timeout(400)

SETPRIV = shutil.which("setpriv")
# Nobody's: what runs as this user counts for its limit, and nothing else does.
USER = 54000 + os.getpid() % 10000
LIMITED = [
    *("setpriv", "--reuid", str(USER), "--clear-groups", "--inh-caps", "-all,+dac_override,+dac_read_search"),
    *("--ambient-caps", "+dac_override,+dac_read_search"),
]
# As many as that were enough on a machine of two cores when this was written; more cores, more threads.
ENOUGH = 60 + 4 * (os.cpu_count() or 1)
MARK = f"DALSEGNO_TEST_SHORTAGE={os.getpid()}"
LINE = re.compile(r"^dlrover-run: .*(no more|hardly any more) processes and threads are allowed here .*limit", re.M)


@pytest.fixture
def node() -> Iterator[Callable[[int], tuple[int, str]]]:
    """Runs a node that may have so many processes and threads; its exit code and all that it said."""
    # Not pytest's own, which no other user may enter.
    top = Path(tempfile.mkdtemp(prefix="shortage-"))
    top.chmod(0o777)
    script = top / "train.py"
    script.write_text("print('here', flush=True)\n")

    def run(most: int) -> tuple[int, str]:
        end_all()
        place = top / f"limit-{most}"
        place.mkdir()
        place.chmod(0o777)
        words = [
            sys.executable,
            "-m",
            "dalsegno.agent.commands.dlrover_run",
            "--nnodes=1",
            "--max-restarts=0",
            "--job-id=job",
        ]
        words += [f"--checkpoint-dir={place / 'checkpoints'}", f"--log-dir={place / 'logs'}", str(script)]
        name, _, value = MARK.partition("=")
        console = place / "console"
        with (
            console.open("wb") as out,
            subprocess.Popen(
                [*(LIMITED if os.geteuid() == 0 else ()), "prlimit", f"--nproc={most}", *words],
                env={
                    **os.environ,
                    **{name: value, "TMPDIR": str(place), "HOME": str(place)},
                    **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            deadline = time.monotonic() + 150
            while process.poll() is None:
                assert time.monotonic() < deadline, console.read_text()
                if LINE.search(console.read_text()):
                    # Said; it may go on to wait for room.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(5)
                    process.kill()
                time.sleep(0.1)  # why: its output is a file
        return process.returncode, console.read_text()

    yield run
    end_all()
    shutil.rmtree(top)


def end_all() -> None:
    """Embedded masters outlive their agents for a while, and count. What they tidy up by then is not looked at."""
    deadline = time.monotonic() + 30
    while left := set(processes.carriers(MARK)):
        assert time.monotonic() < deadline, left
        processes.send(left, signal.SIGKILL)
        time.sleep(0.02)  # why: these are not this process's children


def judge(code: int, said: str) -> None:
    """Either it was enough, or one line says what was not."""
    assert "Traceback" not in said
    if code != 0:
        assert LINE.search(said), said
        assert code in (1, 2, 76, -signal.SIGKILL), said


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs util-linux")
def test_a_limit_that_is_reached_already(node: Callable[[int], tuple[int, str]]) -> None:
    """Not even the first thread can be had."""
    if os.geteuid() == 0 and SETPRIV is None:
        pytest.skip("needs setpriv: the limit does not count for root")
    code, said = node(1)
    assert code == 2
    assert len(said.strip().splitlines()) == 1, said
    judge(code, said)


@pytest.mark.skipif(os.geteuid() != 0 or SETPRIV is None, reason="needs root and setpriv, for a user with no processes")
@pytest.mark.parametrize(
    "most",
    [
        3,
        pytest.param(20, id="20"),
        *(pytest.param(most, marks=pytest.mark.full) for most in range(2, ENOUGH, 2)),
    ],
)
def test_whatever_cannot_be_started_any_more_is_said(node: Callable[[int], tuple[int, str]], most: int) -> None:
    """The master, the keeper, a thread, a standby worker, a worker: which it is depends on how many may be."""
    judge(*node(most))


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or SETPRIV is None, reason="needs root and setpriv, for a user with no processes")
def test_where_there_is_room_nothing_is_refused(node: Callable[[int], tuple[int, str]]) -> None:
    """The probe for room asks for no more than a small node has."""
    code, said = node(ENOUGH)
    assert code == 0, said
