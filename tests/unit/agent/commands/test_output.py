"""What a person is told of a worker's output."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.launch import verdict
from dalsegno.agent.commands.status import status_lines
from dalsegno.agent.script import advice, tells_of_a_peer
from dalsegno.agent.shell.console import Console, set_up_logging
from dalsegno.agent.shell.outlet import Outlet
from dalsegno.agent.workers.last_words import last_words
from dalsegno.protos import control_pb2 as pb


def test_the_last_line_of_the_errors_is_the_reason(tmp_path: Path) -> None:
    """Without torch's `@record` the traceback's last line says it, with the file that has the rest."""
    path = tmp_path / "stderr.log"
    path.write_text("Traceback (most recent call last):\n" + "x" * 20000 + "\nValueError: boom\n\n")
    assert last_words(str(path), 1) == f"ValueError: boom (see {path})"
    path.write_text("y" * 20000)
    assert len(last_words(str(path), 1)) < 400
    path.write_text("")
    assert last_words(str(path), 1) == last_words(str(path), -9) == ""
    assert last_words("", 1) == ""
    assert last_words(str(tmp_path / "nothing"), 1) == ""


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("a.py:1: UserWarning: old\n  return func(*args, **kwargs)\n", ""),
        ("INFO: loading\n", ""),
        ("Traceback (most recent call last):\n  File x\nOSError: retried\nINFO 12:00 step 4 done\n", ""),
        ("Traceback (most recent call last):\n  File x\nmy.Error: no luck\n", "my.Error: no luck"),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File x\n", "Fatal Python error: Segmentation fault"),
    ],
)
def test_the_reason_of_a_signal_is_not_what_was_printed_last(tmp_path: Path, errors: str, reason: str) -> None:
    """A killed process printed that long before; only an error of Python's counts. The file is named in any case."""
    path = tmp_path / "stderr.log"
    path.write_text(errors)
    assert last_words(str(path), -9) == (f"{reason} (see {path})" if reason else f"see {path}")


OWN = '  File "/tmp/it/train.py", line 10, in main\n    load(path)\n    ^^^^^^^^^^\n'
LIBRARY = f'  File "{json.__file__}", line 346, in loads\n    return decode(s)\n'
INSTALLED = '  File "/env/lib/python3.11/site-packages/torch/nn/module.py", line 5, in forward\n    return f(x)\n'


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (f"{OWN}{LIBRARY}ValueError: boom\n", "ValueError: boom (train.py, line 10, in main)"),
        (f"{OWN}{INSTALLED}ValueError: boom\n", "ValueError: boom (train.py, line 10, in main)"),
        (f"{INSTALLED}ValueError: boom\n", "ValueError: boom"),
        # The message has several lines, and a library says something at the end.
        (f"{OWN}RuntimeError: CUDA error: x\nCompile with it.\n[W1 a.cpp:5] bye\n", "RuntimeError: CUDA error: x ("),
        (f"{OWN}KeyboardInterrupt\n", "KeyboardInterrupt (train.py, line 10, in main)"),
        ('  File "/tmp/it/train.py", line 3\n    = 1\n    ^\nSyntaxError: invalid\n', "invalid (train.py, line 3)"),
        # The last of a chain.
        (f"{OWN}OSError: a\n\nDuring it\n\nTraceback (most recent call last):\n{OWN}KeyError: 'b'\n", "KeyError: 'b'"),
        (f"{OWN}it was cut off\n  in the mid", "in the mid"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_an_exception_is_named_with_the_scripts_own_line(tmp_path: Path, errors: str, reason: str, prefix: str) -> None:
    """Frames of Python and of installed packages are not the script's."""
    path = tmp_path / "stderr.log"
    lines = ["loading", "Traceback (most recent call last):", *errors.splitlines()]
    path.write_text("\n".join(prefix + line for line in lines))
    said = last_words(str(path), 1)
    assert reason in said
    assert said.endswith(f"(see {path})")
    assert ("rank3" in said) == (bool(prefix) and "cut off" in errors)


def test_what_a_lost_peer_makes_gloo_and_nccl_say_is_short(tmp_path: Path) -> None:
    """It is the effect of something else, which is told, too."""
    path = tmp_path / "stderr.log"
    nccl = "DistBackendError: NCCL error in: work.cpp:90\nncclRemoteError: A call failed.\nLast error:\nsocket: closed"
    path.write_text(f"Traceback (most recent call last):\n{OWN}torch.distributed.{nccl}\n")
    assert last_words(str(path), 1) == f"it lost a peer (ncclRemoteError) (see {path})"
    gloo = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30646. This is typically caused"
    path.write_text(f"Traceback (most recent call last):\n{OWN}RuntimeError: {gloo} by a crash. Check the logs.\n")
    said = last_words(str(path), 1)
    assert said == f"it lost a peer (Connection closed by peer) (see {path})"
    assert tells_of_a_peer(said)


BARS = "\r  0%|          | 0/100 [00:00<?, ?it/s]\r 10%|█         | 10/100 [00:00<00:02, 44.1it/s, loss=0.1]"
TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: boom\n"


@pytest.mark.parametrize(
    ("errors", "ended", "killed"),
    [
        # What was drawn last is older than the end, whether the bar ended its line or not.
        (f"UserWarning: old\n{BARS}", "UserWarning: old", ""),
        (f"{BARS}\n", "", ""),
        ("Loading:  45%\rLoading:  50%", "", ""),
        ("\x1b[2K\r\x1b[32m12it [00:01, 9.8it/s]\x1b[0m", "", ""),
        # What comes behind it is what ended it, also on the bar's line.
        (f"{BARS}\n{TRACEBACK}", "ValueError: boom", "ValueError: boom"),
        (f"{BARS}{TRACEBACK}{BARS}\n", "ValueError: boom", "ValueError: boom"),
        (f"{BARS}the data is wrong\n", "the data is wrong", ""),
        # No bar: a log's time, an index, the line ends of another system.
        ("[00:01] the data is wrong\r\n", "[00:01] the data is wrong", ""),
        ("RuntimeError: no rows [3, 4]\n", "RuntimeError: no rows [3, 4]", ""),
    ],
)
def test_a_progress_bar_is_no_reason(tmp_path: Path, errors: str, ended: str, killed: str) -> None:
    """Its text has no line of its own, and stays at the end of the errors."""
    path = tmp_path / "stderr.log"
    path.write_text(errors, newline="")
    assert last_words(str(path), 1) == (f"{ended} (see {path})" if ended else f"see {path}")
    assert last_words(str(path), -9) == (f"{killed} (see {path})" if killed else f"see {path}")


@pytest.mark.parametrize(
    ("line", "tells"),
    [
        ("RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:30646. This is", True),
        (
            "RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:63188: Connection reset by peer",
            True,
        ),
        ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to a", True),
        ("Last error: socketPollConnect: remote process exited or there was a network error", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_what_gloo_and_nccl_say_of_a_lost_peer_is_known(line: str, tells: bool) -> None:
    """Of scripts without a session nothing else tells."""
    assert bool(tells_of_a_peer(line)) is tells


def test_the_verdict_of_a_failed_job_says_what_to_do(tmp_path: Path) -> None:
    """Under either kind of master the next agent takes the run up again."""
    line = verdict("a: no luck (see /tmp/errors); 4 failures", tmp_path)
    assert line.startswith("the job failed: a: no luck; 4 failures; ")
    assert str(tmp_path) in line
    assert "the same command tries again" in line
    assert "--new-run starts over" in line


def test_errors_go_into_files_unless_told_otherwise() -> None:
    """The console is for what happened to the run; a peer's death would fill it with tracebacks."""
    assert parse(["train.py"]).redirects == "2"
    assert parse(["--redirects=0", "train.py"]).redirects == "0"


def test_a_closed_terminal_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The drain that follows its SIGHUP goes on; what would have been said is in the log."""
    reader, writer = os.pipe()
    os.close(reader)
    console = Console(Outlet(writer))
    with caplog.at_level("INFO"):
        console.say("saving at the next step boundary")
        console.flush(10)
    assert "saving at the next step boundary" in caplog.text
    os.close(writer)


def test_what_others_wrote_cannot_move_the_cursor(capfd: pytest.CaptureFixture[str]) -> None:
    """Escape sequences and line breaks in a reason or a name are shown, not obeyed: one line for each word."""
    console = Console()
    console.say("node a\x1b[2J left\ndlrover-run: the run finished\u202e")
    console.flush(10)
    assert capfd.readouterr().err == "dlrover-run: node a\\x1b[2J left dlrover-run: the run finished\\u202e\n"
    reply = pb.StatusReply(
        job_id="job", reason="a\nb", nodes=[pb.NodeStatus(node="x\x1b[8m", role="spare", host="h\r")]
    )
    lines = status_lines(reply)
    assert all(line.isprintable() for line in lines)
    assert lines[0].endswith("(a b)")
    assert lines[1].startswith("  spare x\\x1b[8m on h ")


def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an agent that runs for months the last of it is kept; what it says of each event is left out."""
    monkeypatch.setattr("dalsegno.agent.shell.console.LARGEST_LOG_BYTES", 10_000)
    logger = logging.getLogger("test.bounded")
    set_up_logging(tmp_path / "agent.log", lambda: "here", names=("test.bounded",))
    for number in range(1000):
        logger.info("line %d", number)
        logger.debug("detail")
    logger.handlers.clear()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["agent.log", "agent.log.1"]
    assert sum(file.stat().st_size for file in files) <= 20_000
    assert "line 999" in files[0].read_text()
    assert "detail" not in files[0].read_text()


OTHER_SIZE = (
    "[rank0]: deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 2 "
    "but the current world size is 1. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size"
)
NO_UNIVERSAL = "ValueError: Invalid for universal checkpoint: /c/e3/latest_universal does not exist (see x)"


@pytest.mark.parametrize(
    ("line", "helps"),
    [
        (OTHER_SIZE, "or start with --deepspeed-load-universal"),
        (NO_UNIVERSAL, "needs none: put in "),
        ("ValueError: the world size is 2", ""),
    ],
)
def test_deepspeeds_errors_are_known(line: str, helps: str) -> None:
    """Each tells what to put into its configuration, which is the same."""
    text = advice(line)
    assert helps in text
    assert bool(text) == bool(helps)
    assert not text or '"load_universal": os.environ.get("DALSEGNO_RESUME_FORM") == "universal"' in text
