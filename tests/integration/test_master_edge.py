"""The HTTP edge beside a real master: a process that ends with it, and never holds it up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")

from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.master_process import Agent, eventually, master_process, settings

pytestmark = pytest.mark.timeout(120)


def edges_of(master: int) -> list[int]:
    """Process ids of this master's edges."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == master and b"edge_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def health(address: str, seconds: float = 20) -> int:
    """The status code of /healthz; 0: no answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=seconds) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def is_gone(process: int) -> bool:
    """Whether it has ended; a zombie holds no port."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_master_leaves_no_edge(tmp_path: Path) -> None:
    """SIGKILL: its edge goes with it, and the next master listens on the same port."""
    with master_process(tmp_path / "s.sqlite", "--http-port", "0") as first:
        assert health(first.http) == 200
        (edge,) = edges_of(first.process.pid)
        first.kill()
        eventually(lambda: is_gone(edge), 10)
    with master_process(tmp_path / "s.sqlite", "--http-port", first.http.rpartition(":")[2]) as second:
        assert health(second.http) == 200


def test_a_master_that_is_killed_at_once_leaves_its_port(tmp_path: Path) -> None:
    """Its edge is still starting then."""
    for number in range(4):
        with master_process(tmp_path / f"{number}.sqlite", "--http-port", "0") as first:
            first.kill()
        port = first.http.rpartition(":")[2]
        with master_process(tmp_path / f"{number}.sqlite", "--http-port", port) as second:
            assert second.http == first.http


def test_a_stopped_edge_holds_no_master_up(tmp_path: Path) -> None:
    """SIGSTOP: orders over gRPC are carried out, and the master ends well and in time."""
    with master_process(tmp_path / "s.sqlite", "--http-port", "0") as master:
        assert health(master.http) == 200
        (edge,) = edges_of(master.process.pid)
        os.kill(edge, signal.SIGSTOP)
        agent = Agent(master.address, "a")
        agent.register(settings((2, 2)))
        assert agent.stub.Stop(pb.StopRequest(), timeout=10).text
        master.process.terminate()
        _, said = master.process.communicate(timeout=20)
        assert (master.process.returncode, said) == (0, "")
        assert is_gone(edge)


def test_health_is_the_master_s(tmp_path: Path) -> None:
    """A master that is stopped is not healthy, however well its edge is, until it goes on."""
    with master_process(tmp_path / "s.sqlite", "--http-port", "0") as master:
        assert health(master.http) == 200
        master.process.send_signal(signal.SIGSTOP)
        eventually(lambda: health(master.http) == 503, 30)
        master.process.send_signal(signal.SIGCONT)
        eventually(lambda: health(master.http) == 200, 30)


# A master with an edge, that asks for its own health.
SMALL = """
import asyncio
from dalsegno.master.brain.events import Reply
from dalsegno.master.http.edge import Edge
from dalsegno.master.server.feed import Feed
class Master:
    feed, turns = Feed(), 0
    async def status(self):
        return Reply("UNAVAILABLE", "it rests", None)
async def main():
    edge = Edge(Master(), "127.0.0.1", 0, None, loopback=True)
    edge.start()
    host, port = edge.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /healthz HTTP/1.0\\r\\nhost: localhost\\r\\n\\r\\n")
    said = (await asyncio.wait_for(reader.readline(), 20)).decode().split()[1]
    writer.close()
    await edge.close()
    return said
said = asyncio.run(main())
"""


def test_modules_of_a_user_do_no_harm(tmp_path: Path) -> None:
    """A `fastapi.py` or `logging.py` in the master's working directory is not the edge's."""
    for name in ("fastapi", "logging", "ctypes", "dalsegno"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger was imported')\n", encoding="utf-8")
    # The directory is the working one, and not on the path of the master itself.
    own = "import sys\nsys.path = [entry for entry in sys.path if entry]\n"
    line = [sys.executable, "-c", own + SMALL + "print(said, 'fastapi' in sys.modules)"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("503 False\n", "")


# Just before the edge's wire is made: the loop has its own files by then.
CLOSED = """
import os, socket
made = socket.socketpair
def pair():
    for number in range(3):
        os.close(number)
    return made()
"""


def test_a_master_without_standard_streams(tmp_path: Path) -> None:
    """Their numbers are given to other files, and the edge has its own."""
    code = CLOSED + SMALL.replace("    edge.start()", "    socket.socketpair = pair\n    edge.start()")
    code += f"open({str(tmp_path / 'said')!r}, 'w').write(said)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert (tmp_path / "said").read_text() == "503"
