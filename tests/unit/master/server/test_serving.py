"""What every kind of master says around its server."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dalsegno.master import serving
from tests.support.jobs.master_process import command

PRINTS = """
from dalsegno.master import cli, serving
cli._set_up_logging(None, "job")
serving.print_line({"address": "127.0.0.1:1", "generation": 2})
serving.print_line({"address": "127.0.0.1:1", "generation": 3})
"""


def test_a_full_disk_under_its_output_ends_no_master() -> None:
    """A standby that takes over writes a line, too, and would have left the job without any."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        line = [sys.executable, "-c", PRINTS]
        said = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("standard output cannot be written") == 1
    assert "No space left on device" in said.stderr


@pytest.fixture
def said_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """What is said of `--host=HOST` where names mean what they do on the machine."""
    know = socket.getaddrinfo

    def of(host: str, **names: list[str]) -> list[str]:
        def look_up(name: str, *rest: Any, **options: Any) -> list[Any]:
            return [one for mean in names.get(name, [name]) for one in know(mean, *rest, **options)]

        caplog.clear()
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        serving.say_if_loopback(host)
        return caplog.messages

    return of


def test_a_name_that_means_loopback_here_is_told(said_of: Callable[..., list[str]]) -> None:
    """As Debian's own name of a machine does. Nodes elsewhere had no answer, and no line said why."""
    line = (
        "--host head means 127.0.1.1 on this machine, so only its own nodes reach the master: for others give"
        " --host 0.0.0.0, or an address of this machine"
    )
    assert said_of("head", head=["127.0.1.1"]) == [line]
    assert said_of("head", head=["127.0.1.1", "10.0.0.4"]) == []
    assert said_of("head", head=["10.0.0.4"]) == []


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::", "", "none.invalid", "a..b"]
)
def test_who_asks_for_loopback_or_for_a_name_without_an_address_hears_nothing(
    said_of: Callable[..., list[str]], host: str
) -> None:
    """The first means it; the second has an error of its own where it is to be listened on."""
    assert said_of(host) == []


def test_a_master_says_it_at_its_start(tmp_path: Path) -> None:
    """Once, on stderr, and it serves."""
    own = socket.gethostname()
    try:
        found = {one[4][0] for one in socket.getaddrinfo(own, None)}
    except OSError:
        found = set()
    if own == "localhost" or not found or not all(str(one).startswith("127.") for one in found):
        pytest.skip("this machine's own name does not mean loopback")
    line = command(tmp_path / "job.sqlite", f"--host={own}", "--insecure")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as master:
        assert master.stdout is not None
        assert f'"address": "{own}:' in master.stdout.readline()
        master.terminate()
        _, said = master.communicate(timeout=60)
    assert master.returncode == 0
    assert len(re.findall(rf"--host {re.escape(own)} means 127\.", said)) == 1
