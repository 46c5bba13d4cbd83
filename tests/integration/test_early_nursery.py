"""The first seconds of an agent: its nursery imports beside it, and nothing of it stays if it ends meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.protos.contract import EXIT_LEFT, EXIT_USAGE
from tests.support.pages.sources import ROOT

pytestmark = pytest.mark.timeout(180)

# Starts an agent, ends it at a moment, and tells what is left of it. All that loses its parent becomes its child.
GUARDIAN = """
import json, os, pathlib, signal, subprocess, sys, time
from dalsegno.agent.processes.proc import adopt_orphans, descendants, end_descendants
from tests.support.jobs.local_processes import command_line

def nurseries():
    return [one for one in descendants(os.getpid()) if "dalsegno.agent.standby.nursery" in command_line(one)]

def has_torch(pid):
    try:
        return "libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False

adopt_orphans()
since, delay, number, *command = sys.argv[1:]
deadline = time.monotonic() + 90
agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
while since != "start" and agent.poll() is None and time.monotonic() < deadline:
    if any(since == "nursery" or has_torch(one) for one in nurseries()):
        break
    time.sleep(0.01)  # why: no event tells of a process that another one starts
found = len(nurseries())
if int(number):
    time.sleep(float(delay))  # why: this is the moment
    imported = has_torch(agent.pid)
    agent.send_signal(int(number))
else:
    imported = False
code = agent.wait(90)
deadline = time.monotonic() + 20
while (left := descendants(os.getpid())) and time.monotonic() < deadline:
    time.sleep(0.01)  # why: nor of its end
print(json.dumps({"code": code, "nurseries": found, "imported": imported, "left": [command_line(one) for one in left]}))
end_descendants(10)
"""

# Holds an agent, or its nursery, where it begins to import torch. (Whether there is a torch is asked before.)
SITE = """
import os, sys, time

class Hold:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch."):
            time.sleep(100)

if os.environ["TEST_HELD"] in sys.orig_argv:
    sys.meta_path.insert(0, Hold())
"""
AGENT, NURSERY = "dalsegno.agent.commands.dlrover_run", "dalsegno.agent.standby.nursery"


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def ended(tmp_path: Path, since: str, delay: float, number: int, *flags: str, held: str = "") -> dict[str, Any]:
    """What became of an agent, and of what it started. `held`: which of the two does not get on with its imports."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    command = [
        *(sys.executable, "-c", GUARDIAN, since, str(delay), str(number)),
        *(sys.executable, "-m", AGENT, "--job-id=job"),
        *(f"--checkpoint-dir={tmp_path / 'checkpoints'}", f"--log-dir={tmp_path / 'logs'}", *flags, str(script)),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TEST_HELD": held},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "said": done.stderr}


def test_the_nursery_imports_torch_while_the_agent_does(tmp_path: Path, nobody: str) -> None:
    """It waits for nothing of the agent's: here the agent does not come to its own torch at all."""
    found = ended(tmp_path, "torch", 0, signal.SIGKILL, f"--master={nobody}", held=AGENT)
    assert (found["nurseries"], found["imported"], found["left"]) == (1, False, [])


@pytest.mark.parametrize(
    ("since", "delay"),
    [
        ("start", 0.3),
        ("nursery", 0.0),
        ("nursery", 0.5),
        *(pytest.param("start", delay, marks=pytest.mark.full) for delay in (0.05, 0.1, 0.2, 0.5, 0.7, 1.0, 1.5, 2.0)),
        *(pytest.param("nursery", delay, marks=pytest.mark.full) for delay in (0.02, 0.1, 0.2, 1.0, 2.0, 4.0)),
    ],
)
def test_an_agent_that_is_killed_at_its_start_leaves_nothing(
    tmp_path: Path, nobody: str, since: str, delay: float
) -> None:
    """SIGKILL, while it sets up, starts processes, imports, or looks for its master; the nursery hears of nothing."""
    found = ended(tmp_path, since, delay, signal.SIGKILL, f"--master={nobody}", held=NURSERY)
    assert (found["code"], found["left"]) == (-signal.SIGKILL, [])
    assert since == "start" or found["nurseries"] == 1


@pytest.mark.parametrize("delay", [0.0, pytest.param(1.0, marks=pytest.mark.full)])
def test_a_notice_at_its_start_leaves_nothing_either(tmp_path: Path, nobody: str, delay: float) -> None:
    """The agent leaves at once, and its nursery, which ignores such signals, ends with it."""
    found = ended(tmp_path, "nursery", delay, signal.SIGTERM, f"--master={nobody}", held=NURSERY)
    assert (found["code"], found["nurseries"], found["left"]) == (EXIT_LEFT, 1, [])


def test_a_mistake_that_only_then_comes_to_light_ends_it(tmp_path: Path, nobody: str) -> None:
    """One line says what is wrong; nothing is left."""
    flags = (f"--master={nobody}", f"--tls-ca={tmp_path / 'missing.pem'}")
    found = ended(tmp_path, "nursery", 0.0, 0, *flags)
    assert (found["code"], found["nurseries"], found["left"]) == (EXIT_USAGE, 1, [])
    assert "missing.pem" in found["said"]


@pytest.mark.parametrize("flags", [("--help",), ("--nproc-per-node=0",), ("--no-such-flag",), ("--nnodes=2:1",)])
def test_what_is_wrong_from_the_beginning_starts_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    found = ended(tmp_path, "nursery", 0.0, 0, *flags)
    assert (found["nurseries"], found["left"]) == (0, [])
    assert not (tmp_path / "logs").exists()
