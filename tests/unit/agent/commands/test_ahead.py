"""An agent that is started before its command line is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from dalsegno.agent.commands import ahead
from dalsegno.protos.options import UsageError

PROGRAM = [sys.executable, "-m", "dalsegno.agent.commands.dlrover_run"]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was imported, in place of torch."""
    done: list[str] = []
    monkeypatch.setattr(ahead, "launcher", lambda: done.append("launch"))
    return done


def piped(text: str) -> int:
    """A descriptor from which this comes."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return reader


def test_the_rest_comes_later(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what was given at once; its variables are ours then. What stands for flags is another launcher's."""
    monkeypatch.setenv("ADDED", "no")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    rest = {"arguments": ["--nnodes=1:1", "train.py", "--flag"], "environment": {"ADDED": "yes"}}
    reader = piped(json.dumps(rest))
    found = ahead.command_line(["--tell-fd=9", f"--command-fd={reader}"])
    assert found is not None
    line, environ = found
    assert line == ["--tell-fd=9", *rest["arguments"]]
    assert (imported, os.environ["ADDED"], environ["ADDED"]) == (["launch"], "yes", "yes")
    assert (os.environ["PET_NPROC_PER_NODE"], "PET_NPROC_PER_NODE" in environ) == ("4", False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


@pytest.mark.parametrize(
    ("given", "before"),
    [
        (["--command-fd", "FD"], []),
        (["--command_fd=FD"], []),
        (["--command_fd", "FD", "--tell-fd", "9", "-m"], ["--tell-fd", "9", "-m"]),
        (["--nnodes", "1", "--command-fd=FD"], ["--nnodes", "1"]),
    ],
)
def test_it_is_written_as_other_flags_are(imported: list[str], given: list[str], before: list[str]) -> None:
    """The script was missed, unless it had a `=` and so had all words beside it."""
    reader = piped(json.dumps({"arguments": ["train.py", "--command-fd", "4"], "environment": {}}))
    found = ahead.command_line([word.replace("FD", str(reader)) for word in given])
    assert found is not None
    assert found[0] == [*before, "train.py", "--command-fd", "4"]


def test_whoever_would_tell_the_rest_has_gone(imported: list[str]) -> None:
    """Then there is nothing to do."""
    assert ahead.command_line([f"--command-fd={piped('')}"]) is None


@pytest.mark.parametrize("text", ["{}", "[]", "1", '{"arguments": [', '{"arguments": [], "environment": null}'])
def test_what_is_no_command_line_is_one_line(imported: list[str], text: str) -> None:
    """With the flag's name; also a descriptor that is not open."""
    with pytest.raises(UsageError, match="no JSON object of arguments and environment comes there"):
        ahead.command_line([f"--command-fd={piped(text)}"])
    for number in ("9999", "99999999999", "9" * 20):
        with pytest.raises(UsageError, match=f"--command-fd={number}: no JSON object .*: no such descriptor is open"):
            ahead.command_line([f"--command-fd={number}"])


@pytest.mark.parametrize(
    "given",
    [
        ["train.py", "--command-fd=9999"],
        ["--nnodes", "1", "train.py", "--command-fd", "9999"],
        ["--command-fd", "9999", "train.py"],
        ["--command-fd=x"],
        ["--command-fd"],
        ["--command-fd=9999", "--command-fd=9998"],
        ["--command-fd=9999", "--unknown"],
        ["--command-fd=9999", ""],
        [],
    ],
)
def test_a_flag_of_the_script_is_the_scripts(imported: list[str], given: Sequence[str]) -> None:
    """Nothing is read from a descriptor of whose meaning nothing is known."""
    assert ahead.command_line(given) == (given, os.environ)
    assert imported == []


@pytest.mark.slow
def test_an_agent_that_nobody_tells_anything_ends() -> None:
    """Nobody stays behind whoever has started it; and the flag is refused beside a script."""
    reader, writer = os.pipe()
    with subprocess.Popen([*PROGRAM, f"--command-fd={reader}"], pass_fds=[reader], stderr=subprocess.PIPE) as process:
        os.close(reader)
        os.close(writer)
        assert process.communicate(timeout=60) == (None, b"")
        assert process.returncode == 75
    done = subprocess.run([*PROGRAM, "--command-fd=5", "train.py"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
